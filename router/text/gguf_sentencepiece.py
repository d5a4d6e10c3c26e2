"""SentencePiece BPE from a GGUF file (`tokenizer.ggml.model` = "llama"): Llama 2, Mistral.

A GGUF file has scores where `tokenizers` wants merges. SentencePiece joins the neighbours whose
union has the best score, so the merges are all pairs of pieces whose union is a piece, best score
first (as transformers derives them from a `tokenizer.model`). Characters that no piece has become
byte pieces (`<0xE6>`).

Texts are prepared as llama.cpp prepares them: a space before the text and after each special
token, spaces as `▁`.
"""

from __future__ import annotations

from typing import cast

from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from core.errors import ModelError
from router.text.gguf_vocabulary import (
    BYTE,
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    GgufVocabulary,
    add_bos_and_eos,
    add_special_tokens,
)

_SPACE = "▁"
_NEVER_MERGED = (UNKNOWN, CONTROL, USER_DEFINED, BYTE)


def sentencepiece_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    """Return the tokenizer.

    Raises:
        ModelError: no scores, or fewer than tokens.
    """
    has_prefix = vocabulary.flag("add_space_prefix", default=True)
    unknown = vocabulary.token_id("unknown_token_id")
    has_bytes = BYTE in vocabulary.kinds
    tokenizer = Tokenizer(
        BPE(
            vocab={token: index for index, token in enumerate(vocabulary.tokens)},
            merges=_merges(vocabulary),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    add_special_tokens(tokenizer, vocabulary)
    add_bos_and_eos(tokenizer, vocabulary, default_bos=True)
    return tokenizer


def _merges(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Return the pairs that may be joined, best first; of equal scores the smaller id."""
    scores = cast("list[float]", vocabulary.array("scores"))
    if len(scores) < len(vocabulary.tokens):
        msg = (
            f"{vocabulary.path}: {len(scores)} tokenizer.ggml.scores for "
            f"{len(vocabulary.tokens)} tokens; convert the model with its tokenizer"
        )
        raise ModelError(msg)
    ids = {
        token: index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind not in _NEVER_MERGED
    }
    ordered = sorted(ids.items(), key=lambda item: (-scores[item[1]], item[1]))
    return [
        (token[:at], token[at:])
        for token, _ in ordered
        for at in range(1, len(token))
        if token[:at] in ids and token[at:] in ids
    ]
