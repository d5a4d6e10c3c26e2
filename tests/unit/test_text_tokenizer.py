"""The router's tokenizers against transformers', on the same files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

from core.errors import ModelError
from router.text.text_model import TextModel
from tests.router_server import smollm2_path, smollm2_text

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "The quick brown fox doesn't jump; it's 12,345 tired.",
    "line one\nline two\r\n\r\n\ttabbed   spaces   ",
    "naïve café — “quotes” … £5 三",
    "日本語のテキスト、한국어, العربية, हिन्दी",
    "😀 👩‍👩‍👧‍👦 🇩🇪 e\u0301 \u200b\ufeff",
    "def f(x):\n    return x ** 2  # comment\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|im_x|> <|im_end|>text",
    "x=1 y=22 z=333 v4.5.6 2026-11-29T17:07",
    "\x00\x01\x7f control",
    "a" * 500,
]

NUMERALS = ["a   123", "  7", "x\t\t9", "1  2", "½ cup ¾", "a ½ Ⅷ ٣", "10²"]


@pytest.fixture(scope="module")
def reference() -> Any:
    path = smollm2_path()
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_equals_transformers(text: str, special: bool, reference: Any) -> None:
    ours = smollm2_text().encode(text, add_special_tokens=special)
    assert ours == reference.encode(text, add_special_tokens=special)
    for skip in (True, False):
        decoded = smollm2_text().decode(ours, skip_special_tokens=skip)
        assert decoded == reference.decode(ours, skip_special_tokens=skip)


@pytest.mark.parametrize("text", NUMERALS)
def test_splits_digits_as_the_model_was_trained(text: str, reference: Any) -> None:
    """transformers reads no `tokenizer.ggml.pre`; with the original's digit splitter it agrees."""
    backend = Tokenizer.from_str(reference.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    assert smollm2_text().encode(text) == backend.encode(text).ids


@pytest.mark.parametrize("text", TEXTS)
def test_round_trips(text: str) -> None:
    model = smollm2_text()
    assert model.decode(model.encode(text), skip_special_tokens=False) == text


def test_says_what_the_file_says() -> None:
    model = smollm2_text()
    assert model.vocab_size == 49152
    assert model.eos_token_ids == (2,)
    assert model.max_model_len == 8192
    assert model.token(2) == ("<|im_end|>", b"<|im_end|>")
    assert model.token(49152) == ("", b"")
    assert model.token_string(model.encode(" the")[0]) == "Ġthe"


def test_a_directory_equals_the_file_it_was_made_from(tmp_path: Path, reference: Any) -> None:
    reference.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 77, "eos_token_id": 5}')
    model = TextModel.load(tmp_path)
    assert model.eos_token_ids == (0, 2)
    assert model.max_model_len == 77
    for text in TEXTS:
        assert model.encode(text) == reference.encode(text)
    messages = [{"role": "user", "content": "hi"}]
    assert model.render_chat(messages) == smollm2_text().render_chat(messages)


def test_a_directory_may_keep_its_template_in_its_settings(tmp_path: Path, reference: Any) -> None:
    reference.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = [
        {"name": "tools", "template": "wrong"},
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
    ]
    settings["bos_token"] = {"content": "<|im_start|>", "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    model = TextModel.load(tmp_path)
    assert model.render_chat([{"role": "user", "content": "hi"}]) == "<|im_start|>hi"
    assert model.eos_token_ids == (2,)


def _directory(path: Path, **settings: object) -> Path:
    """Write SmolLM2's tokenizer with other settings."""
    smollm2_text()._tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


MESSAGES = [{"role": "user", "content": "hi"}]
WITH_TOOLS = {"tools": [{"type": "function"}]}


def test_tools_may_have_a_template_of_their_own(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} tool"},
    ]
    model = TextModel.load(_directory(tmp_path, chat_template=named))
    assert model.render_chat(MESSAGES) == "plain"
    assert model.render_chat(MESSAGES, variables={"tools": None}) == "plain"
    assert model.render_chat(MESSAGES, variables=WITH_TOOLS) == "1 tool"


def test_template_files_win_over_settings(tmp_path: Path) -> None:
    _directory(tmp_path, chat_template="in the settings")
    assert TextModel.load(tmp_path).render_chat(MESSAGES) == "in the settings"
    (tmp_path / "chat_template.jinja").write_text("in a file")
    assert TextModel.load(tmp_path).render_chat(MESSAGES, variables=WITH_TOOLS) == "in a file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    assert TextModel.load(tmp_path).render_chat(MESSAGES, variables=WITH_TOOLS) == "with tools"


def test_older_models_name_their_special_tokens_in_a_file(tmp_path: Path) -> None:
    _directory(tmp_path, chat_template="{{ bos_token }}{{ eos_token }}", eos_token="<|im_end|>")
    named = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|endoftext|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    assert TextModel.load(tmp_path).render_chat(MESSAGES) == "<|im_start|><|im_end|>"


def test_refuses_templates_that_cannot_be_read(tmp_path: Path) -> None:
    _directory(tmp_path, chat_template=[{"name": "default"}])
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template: must be"):
        TextModel.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: .*utf-8"):
        TextModel.load(tmp_path)


def test_refuses_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model"):
        TextModel.load(tmp_path / "missing")
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        TextModel.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json: "):
        TextModel.load(tmp_path)
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    with pytest.raises(ModelError, match="not a GGUF file"):
        TextModel.load(text)


def test_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "import router.web.server\n"
        "from tests.router_server import smollm2_text\n"
        "smollm2_text().encode('hi')\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
