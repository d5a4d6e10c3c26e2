"""Tokenizer, templates and end tokens from a GGUF file's metadata."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from core.errors import ModelError
from router.text.gguf_bpe import byte_level_tokenizer
from router.text.gguf_metadata import GgufValue
from router.text.gguf_sentencepiece import sentencepiece_tokenizer
from router.text.gguf_vocabulary import GgufVocabulary, read_vocabulary
from router.text.tokenizer_source import TokenizerSource

_BUILDERS = {"gpt2": byte_level_tokenizer, "llama": sentencepiece_tokenizer}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_TEMPLATE_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def load_gguf(path: Path) -> TokenizerSource:
    """Read what the router needs of a GGUF file.

    Raises:
        ModelError: no GGUF file, or a tokenizer of another kind; says what would be right.
    """
    vocabulary = read_vocabulary(path)
    ends = {vocabulary.token_id(key) for key in _END_KEYS}
    specials = {name: vocabulary.token_id(key) for name, key in _TEMPLATE_TOKENS.items()}
    metadata = vocabulary.metadata
    return TokenizerSource(
        name=str(metadata.get("general.name") or path.stem),
        tokenizer=_tokenizer(vocabulary),
        eos_token_ids=tuple(sorted(index for index in ends if index is not None)),
        special_tokens={
            name: vocabulary.tokens[index] for name, index in specials.items() if index is not None
        },
        chat_template=_text(metadata.get("tokenizer.chat_template")),
        tool_use_template=_text(metadata.get("tokenizer.chat_template.tool_use")),
        max_model_len=_context(metadata),
    )


def _tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    kind = vocabulary.value("model")
    build = _BUILDERS.get(kind) if isinstance(kind, str) else None
    if build is None:
        msg = (
            f"{vocabulary.path}: tokenizer.ggml.model = {kind!r}: must be 'gpt2' (byte-level BPE) "
            "or 'llama' (SentencePiece BPE)"
        )
        raise ModelError(msg)
    return build(vocabulary)


def _text(value: GgufValue | None) -> str | None:
    return value if isinstance(value, str) else None


def _context(metadata: dict[str, GgufValue]) -> int:
    value = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return value if isinstance(value, int) else 0
