"""Byte-level BPE in GGUF files: splitters by name, flags, templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGUFWriter
from tokenizers import Regex, Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from core.errors import ModelError
from router.text.bpe_pre_tokenizers import SPLITTING_BY_NAME, pre_tokenizer
from router.text.text_model import TextModel
from tests.gguf_files import Write, write_vocabulary
from tests.nasty_texts import NASTY_TEXTS

KNOWN_TO_BOTH = sorted(GGUF_PRE_TOKENIZER_SPLITS.keys() & SPLITTING_BY_NAME.keys())
MESSAGES = [{"role": "user", "content": "hi"}]

# Words that each pattern alone would not give; as llama.cpp's published patterns split them.
SPLITS = {
    "default": ("abc12345 d!?e", ["abc", "123", "45", "Ġd", "!?", "e"]),
    "gpt-2": ("it's 1234  x", ["it", "'s", "Ġ1234", "Ġ", "Ġx"]),
    "smollm": ("a 12  3", ["a", "Ġ", "1", "2", "ĠĠ", "3"]),
    "llama-bpe": ("IT'S 12345!\n", ["IT", "'S", "Ġ", "123", "45", "!Ċ"]),
    "qwen2": ("IT'S 123", ["IT", "'S", "Ġ", "1", "2", "3"]),
    "tekken": ("camelCase's 12", ["camel", "Case", "'s", "Ġ", "1", "2"]),
    "gpt-4o": ("camelCase's 1234/", ["camel", "Case's", "Ġ", "123", "4", "/"]),
    "falcon": ("ab-1234", ["ab", "-", "123", "4"]),
    "deepseek-coder": ("ab  c1, 23", ["ab", "Ġ", "Ġc", "1", ",", "Ġ", "2", "3"]),
    "deepseek-v3": ("#include 1234 あx", ["#include", "Ġ", "123", "4", "Ġ", "ãģĤ", "x"]),
}


def _words(name: str, text: str) -> list[str]:
    splitter = pre_tokenizer(SPLITTING_BY_NAME[name])
    return [word for word, _ in splitter.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", KNOWN_TO_BOTH)
def test_splits_as_transformers_does_for_a_name(name: str) -> None:
    expected = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for text in NASTY_TEXTS:
        assert _words(name, text) == [word for word, _ in expected.pre_tokenize_str(text)]


def test_enough_names_are_compared() -> None:
    assert {"llama-bpe", "qwen2", "tekken", "gpt-4o"} <= set(KNOWN_TO_BOTH)


@pytest.mark.parametrize("name", ["gpt-2", "phi-2"])
def test_gpt2_splits_as_the_library_s_own(name: str) -> None:
    expected = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    for text in NASTY_TEXTS:
        assert _words(name, text) == [word for word, _ in expected.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", SPLITS)
def test_splits_as_published(name: str) -> None:
    text, words = SPLITS[name]
    assert _words(name, text) == words


def test_no_splitter_loses_a_byte() -> None:
    for name in SPLITTING_BY_NAME:
        for text in NASTY_TEXTS:
            assert len("".join(_words(name, text))) == len(text.encode()), (name, text)


def _trained(name: str) -> Tokenizer:
    tokenizer = Tokenizer(BPE(ignore_merges=SPLITTING_BY_NAME[name].ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer(SPLITTING_BY_NAME[name])
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        show_progress=False,
        special_tokens=["<s>", "</s>", "<|eot: end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(NASTY_TEXTS * 3, trainer)
    return tokenizer


def _write(path: Path, tokenizer: Tokenizer, pre: str | None, more: Write | None = None) -> Path:
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = sorted(model["vocab"], key=model["vocab"].__getitem__)

    def keys(writer: GGUFWriter) -> None:
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_eot_token_id(2)
        if more is not None:
            more(writer)

    return write_vocabulary(
        path,
        model="gpt2",
        tokens=vocabulary,
        kinds=[3] * 3 + [1] * (len(vocabulary) - 3),
        merges=[" ".join(pair) for pair in model["merges"]],
        more=keys,
    )


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "smollm", "tekken"])
def test_encodes_as_the_tokenizer_that_was_converted(name: str, tmp_path: Path) -> None:
    original = _trained(name)
    text = TextModel.load(_write(tmp_path / "a.gguf", original, name))
    for sample in NASTY_TEXTS:
        ids = original.encode(sample).ids
        assert text.encode(sample, add_special_tokens=False) == ids
        assert text.decode(ids) == sample


def test_bos_and_eos_by_flag_and_by_name(tmp_path: Path) -> None:
    original = _trained("llama-bpe")

    def both(writer: GGUFWriter) -> None:
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)

    def neither(writer: GGUFWriter) -> None:
        writer.add_add_bos_token(False)

    path = tmp_path / "a.gguf"
    inner = original.encode("hi").ids
    for pre, more, expected in (
        ("qwen2", None, inner),
        ("qwen2", both, [0, *inner, 1]),
        ("llama-bpe", None, [0, *inner]),
        ("llama-bpe", neither, inner),
    ):
        assert TextModel.load(_write(path, original, pre, more)).encode("hi") == expected
    assert TextModel.load(path).eos_token_ids == (1, 2)


def test_a_file_without_a_name_is_split_as_by_default(tmp_path: Path) -> None:
    original = _trained("default")
    text = TextModel.load(_write(tmp_path / "a.gguf", original, None))
    sample = "abc12345 d!?e"
    assert text.encode(sample) == original.encode(sample).ids


def test_templates_by_name(tmp_path: Path) -> None:
    def templates(writer: GGUFWriter) -> None:
        writer.add_chat_template(
            [
                {"name": "default", "template": "{{ bos_token }}plain"},
                {"name": "tool_use", "template": "{{ eos_token }}{{ tools | length }} tools"},
            ]
        )

    text = TextModel.load(_write(tmp_path / "a.gguf", _trained("qwen2"), "qwen2", templates))
    assert text.render_chat(MESSAGES) == "<s>plain"
    assert text.render_chat(MESSAGES, variables={"tools": [{}, {}]}) == "</s>2 tools"
    # The template wrote BOS: as rendered prompts are encoded, there is no second one.
    assert text.encode("<s>plain", add_special_tokens=False).count(0) == 1


def test_refuses_an_unknown_name_with_those_it_knows(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.gguf", _trained("gpt-2"), "odd")
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre = 'odd': must be one of .*'qwen2'"):
        TextModel.load(path)


def test_refuses_another_kind(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "a.gguf", model="t5", tokens=["a"], kinds=[1])
    with pytest.raises(ModelError, match=r"model = 't5': must be 'gpt2' .* or 'llama'"):
        TextModel.load(path)
