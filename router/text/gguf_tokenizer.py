"""A `tokenizers` tokenizer from a GGUF file's metadata: byte-level BPE.

The names of pre-tokenizers are llama.cpp's (`tokenizer.ggml.pre`). They matter: transformers 5.24
reads a GGUF file without them and splits a run of spaces before a digit otherwise than the model
was trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from core.errors import ModelError
from router.text.gguf_metadata import GgufValue, read_metadata
from router.text.tokenizer_source import TokenizerSource

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

_CONTROL = 3
_USER_DEFINED = 4
"""`tokenizer.ggml.token_type`: 3 is a special token, 4 one that text is split at."""

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_TEMPLATE_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def load_gguf(path: Path) -> TokenizerSource:
    """Read tokenizer, template and end tokens from a GGUF file.

    Raises:
        ModelError: no GGUF file, or a tokenizer of another kind; says what would be right.
    """
    metadata = read_metadata(path)
    _check_kind(path, metadata)
    tokens = _strings(path, metadata, "tokenizer.ggml.tokens")
    merges = _strings(path, metadata, "tokenizer.ggml.merges")
    tokenizer = Tokenizer(
        BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[(left, right) for left, _, right in (pair.partition(" ") for pair in merges)],
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=metadata.get("tokenizer.ggml.pre") == "llama-bpe",
        )
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(path, str(metadata.get("tokenizer.ggml.pre", "")))
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, cast("list[int]", metadata.get("tokenizer.ggml.token_type", [])))
    _add_bos(tokenizer, tokens, metadata)
    architecture = metadata.get("general.architecture")
    context = metadata.get(f"{architecture}.context_length", 0)
    template = metadata.get("tokenizer.chat_template")
    return TokenizerSource(
        name=str(metadata.get("general.name") or path.stem),
        tokenizer=tokenizer,
        eos_token_ids=tuple(sorted({i for key in _END_KEYS if (i := _id(metadata, key)) >= 0})),
        special_tokens={
            name: tokens[index]
            for name, key in _TEMPLATE_TOKENS.items()
            if 0 <= (index := _id(metadata, key)) < len(tokens)
        },
        chat_template=template if isinstance(template, str) else None,
        max_model_len=context if isinstance(context, int) else 0,
    )


def _check_kind(path: Path, metadata: dict[str, GgufValue]) -> None:
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        msg = f"{path}: tokenizer.ggml.model = {kind!r}: must be 'gpt2' (byte-level BPE)"
        raise ModelError(msg)


def _strings(path: Path, metadata: dict[str, GgufValue], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list):
        msg = f"{path}: {key} is missing; convert the model with its tokenizer"
        raise ModelError(msg)
    return cast("list[str]", value)


def _id(metadata: dict[str, GgufValue], key: str) -> int:
    value = metadata.get(f"tokenizer.ggml.{key}", -1)
    return value if isinstance(value, int) else -1


def _pre_tokenizer(path: Path, name: str) -> pre_tokenizers.PreTokenizer:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        return _sequence(pre_tokenizers.Digits(individual_digits=True), gpt2)
    if name in ("gpt-2", "gpt2"):
        return gpt2
    pattern = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "qwen2": _QWEN2}.get(name)
    if pattern is None:
        msg = (
            f"{path}: tokenizer.ggml.pre = {name!r}: must be one of "
            "'smollm', 'gpt-2', 'llama-bpe', 'qwen2'"
        )
        raise ModelError(msg)
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return _sequence(split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))


def _sequence(*parts: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(list(parts))


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    pairs = list(zip(tokens, kinds, strict=False))
    special = [_added(token, special=True) for token, kind in pairs if kind == _CONTROL]
    plain = [_added(token, special=False) for token, kind in pairs if kind == _USER_DEFINED]
    # The stubs of `tokenizers` leave these lists untyped.
    tokenizer.add_special_tokens(special)  # pyright: ignore[reportUnknownMemberType]
    tokenizer.add_tokens(plain)  # pyright: ignore[reportUnknownMemberType]


def _added(token: str, *, special: bool) -> AddedToken:
    return AddedToken(token, normalized=False, special=special)


def _add_bos(tokenizer: Tokenizer, tokens: Sequence[str], metadata: dict[str, GgufValue]) -> None:
    bos = _id(metadata, "bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token") is not True or bos < 0:
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
    )
