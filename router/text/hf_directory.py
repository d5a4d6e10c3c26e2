"""A tokenizer from a Hugging Face model directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
from tokenizers import Tokenizer

from core.errors import ModelError
from router.text.tokenizer_source import TokenizerSource

_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def load_directory(path: Path) -> TokenizerSource:
    """Read tokenizer, template and end tokens from a directory.

    Files: `tokenizer.json` (needed), `tokenizer_config.json`, `special_tokens_map.json`,
    `chat_template.jinja`, `additional_chat_templates/tool_use.jinja`, `generation_config.json`,
    `config.json`.

    Raises:
        ModelError: no `tokenizer.json`, or a file that cannot be read; names it.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        msg = f"{path}: no tokenizer.json; a model directory needs one (a 'fast' tokenizer)"
        raise ModelError(msg)
    try:
        tokenizer = Tokenizer.from_buffer(file.read_bytes())
    except Exception as error:  # noqa: BLE001 - `tokenizers` raises bare Exception for bad files
        msg = f"{file}: {error}"
        raise ModelError(msg) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _read_json(path / "tokenizer_config.json")
    config = _read_json(path / "config.json")
    special_tokens = _special_tokens(path, settings)
    templates = _chat_templates(path, settings)
    return TokenizerSource(
        name=path.resolve().name,
        tokenizer=tokenizer,
        eos_token_ids=_eos_ids(path, tokenizer, special_tokens.get("eos_token"), config),
        special_tokens=special_tokens,
        chat_template=templates.get("default"),
        tool_use_template=templates.get("tool_use"),
        max_model_len=_positive(config.get("max_position_embeddings")),
    )


def _read_json(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, OSError) as error:
        msg = f"{file}: {error}"
        raise ModelError(msg) from None


def _content(token: object) -> str | None:
    """A token stands as text, or as an object with its text under `content`."""
    if isinstance(token, Mapping):
        token = msgspec.convert(token, dict[str, Any]).get("content")
    return token if isinstance(token, str) else None


def _eos_ids(
    path: Path, tokenizer: Tokenizer, eos_token: str | None, config: Mapping[str, Any]
) -> tuple[int, ...]:
    """The tokenizer's EOS and the generation config's, which may list several (as vLLM does)."""
    ids = {tokenizer.token_to_id(eos_token)} if eos_token else set[int | None]()
    listed = _read_json(path / "generation_config.json").get("eos_token_id")
    if listed is None:
        listed = config.get("eos_token_id")
    ids.update(cast("list[int]", listed) if isinstance(listed, list) else [listed])
    return tuple(sorted(index for index in ids if isinstance(index, int)))


def _special_tokens(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Older models name them in a file of their own."""
    named = {**_read_json(path / "special_tokens_map.json"), **settings}
    return {name: text for name in _TEMPLATE_TOKENS if (text := _content(named.get(name)))}


def _chat_templates(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return templates by name; files win over `tokenizer_config.json`, as in transformers."""
    file = path / "chat_template.jinja"
    if file.is_file():
        others = (path / "additional_chat_templates").glob("*.jinja")
        return {"default": _read_text(file), **{other.stem: _read_text(other) for other in others}}
    template = settings.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    try:
        named = msgspec.convert(template or [], list[dict[str, str]])
        return {entry["name"]: entry["template"] for entry in named}
    except (msgspec.ValidationError, KeyError):
        msg = (
            f"{path / 'tokenizer_config.json'}: chat_template: must be a text, or a list of "
            "objects with name and template"
        )
        raise ModelError(msg) from None


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{file}: {error}"
        raise ModelError(msg) from None


def _positive(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0
