"""Byte-level BPE from a GGUF file (`tokenizer.ggml.model` = "gpt2"): GPT-2, Llama 3, Qwen, SmolLM.

The splitter's name matters: transformers 5.24 knows some of them only, and splits a run of spaces
before a digit otherwise than SmolLM2 was trained on.
"""

from __future__ import annotations

from typing import cast

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from core.errors import ModelError
from router.text.bpe_pre_tokenizers import SPLITTING_BY_NAME, Splitting, pre_tokenizer
from router.text.gguf_vocabulary import GgufVocabulary, add_bos_and_eos, add_special_tokens


def byte_level_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    """Return the tokenizer.

    Raises:
        ModelError: no merges, or a splitter of an unknown name.
    """
    splitting = _splitting(vocabulary)
    merges = cast("list[str]", vocabulary.array("merges"))
    tokenizer = Tokenizer(
        BPE(
            vocab={token: index for index, token in enumerate(vocabulary.tokens)},
            merges=[(left, right) for left, _, right in (pair.partition(" ") for pair in merges)],
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=splitting.ignore_merges,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizer(splitting)
    tokenizer.decoder = decoders.ByteLevel()
    add_special_tokens(tokenizer, vocabulary)
    add_bos_and_eos(tokenizer, vocabulary, default_bos=splitting.add_bos)
    return tokenizer


def _splitting(vocabulary: GgufVocabulary) -> Splitting:
    name = vocabulary.value("pre")
    splitting = SPLITTING_BY_NAME.get(name if isinstance(name, str) else "")
    if splitting is None:
        known = ", ".join(repr(name) for name in sorted(SPLITTING_BY_NAME) if name)
        msg = f"{vocabulary.path}: tokenizer.ggml.pre = {name!r}: must be one of {known}"
        raise ModelError(msg)
    return splitting
