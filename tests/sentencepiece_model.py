"""A tiny SentencePiece BPE model with Llama 2's settings, and the GGUF file of it."""

from __future__ import annotations

import functools
import io
from pathlib import Path

from gguf import GGUFWriter
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from tests.gguf_files import Write, write_vocabulary
from tests.nasty_texts import NASTY_TEXTS

USER_DEFINED = ("[INST]", "[/INST]")
VOCAB_SIZE = 600

_ENGLISH = (
    "The quick brown fox jumps over the lazy dog, again and again, while the others sleep.",
    "It was the best of times, it was the worst of times; and there the matter rests.",
    "    indented   code\n\treturn value  # and a comment",
    "aaaa aaaaaa a aa aaa ababab abab ba bab",
)


@functools.cache
def trained(*, has_bytes: bool = True) -> SentencePieceProcessor:
    """Return the model, trained once: byte fallback, split digits, a dummy prefix, and nothing
    normalized."""
    model = io.BytesIO()
    texts = [line for text in (*_ENGLISH, *NASTY_TEXTS) for line in text.split("\n") if line]
    SentencePieceTrainer.train(
        sentence_iterator=iter([line.replace("\x00", "") for line in texts] * 3),
        model_writer=model,
        vocab_size=VOCAB_SIZE if has_bytes else VOCAB_SIZE - 256,
        model_type="bpe",
        byte_fallback=has_bytes,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        character_coverage=0.98,
        user_defined_symbols=list(USER_DEFINED),
        num_threads=1,
        minloglevel=2,
    )
    return SentencePieceProcessor(model_proto=model.getvalue())


def write_gguf(path: Path, more: Write | None = None, *, has_bytes: bool = True) -> Path:
    """Write the model as llama.cpp's converter does."""
    model = trained(has_bytes=has_bytes)
    ids = range(model.vocab_size())

    def keys(writer: GGUFWriter) -> None:
        writer.add_bos_token_id(model.bos_id())
        writer.add_eos_token_id(model.eos_id())
        writer.add_unk_token_id(model.unk_id())
        if more is not None:
            more(writer)

    return write_vocabulary(
        path,
        model="llama",
        tokens=[model.id_to_piece(index) for index in ids],
        kinds=[_kind(model, index) for index in ids],
        scores=[model.get_score(index) for index in ids],
        more=keys,
    )


def _kind(model: SentencePieceProcessor, index: int) -> int:
    if model.is_unknown(index):
        return 2
    if model.is_control(index):
        return 3
    if model.is_byte(index):
        return 6
    return 4 if model.id_to_piece(index) in USER_DEFINED else 1
