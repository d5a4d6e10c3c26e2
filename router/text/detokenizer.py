"""Token ids to text while they arrive; what was emitted never has to be taken back.

A token may end within a character. `ByteDetokenizer` knows each token's bytes and holds back an
incomplete UTF-8 sequence. Tokenizers of other kinds give no bytes for a token, so
`WindowDetokenizer` decodes a short window twice and emits the difference (vLLM's and
text-generation-inference's way). The increments, `flush()` included, join to the full decode.
(One exception is deliberate: where byte tokens of SentencePiece hold something that is no UTF-8,
its decoder gives up the whole run of byte tokens; here only what is wrong becomes U+FFFD.)
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 8
"""Tokens of the prompt that a window begins with: some, as the last ones may be hidden."""


class Detokenizer(Protocol):
    """One sample's text."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that is certain now."""
        ...

    def flush(self) -> str:
        """Return the rest: an incomplete character becomes U+FFFD. Nothing may be fed after."""
        ...


class ByteDetokenizer:
    """For byte-level BPE, and SentencePiece with byte pieces.

    Args:
        bytes_by_id: each token's bytes; empty where the token is not shown.
        strip_first_space: drop the space that the text begins with, if any.
    """

    __slots__ = ("_bytes_by_id", "_incomplete", "_strips")

    def __init__(self, bytes_by_id: Sequence[bytes], *, strip_first_space: bool = False) -> None:
        self._bytes_by_id = bytes_by_id
        self._incomplete = b""  # the beginning of a character
        self._strips = strip_first_space

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that is certain now."""
        table = self._bytes_by_id
        known = len(table)
        raw = b"".join([table[i] for i in token_ids if 0 <= i < known])
        if self._strips and raw:
            self._strips = False
            raw = raw.removeprefix(b" ")
        return self._decode(raw, final=False)

    def flush(self) -> str:
        """Return the rest."""
        return self._decode(b"", final=True)

    def _decode(self, raw: bytes, *, final: bool) -> str:
        # Python and `tokenizers` (Rust's from_utf8_lossy) both replace maximal subparts. This is
        # what an incremental decoder of `codecs` calls; making and calling one costs more.
        data = self._incomplete + raw
        text, num_decoded = codecs.utf_8_decode(data, "replace", final)
        self._incomplete = data[num_decoded:]
        return text


class WindowDetokenizer:
    """For every other kind of tokenizer.

    The window begins where the text was last certain, one emission further back than needed, since
    decoders treat the first token of a text (its leading space) specially.

    Args:
        after: the tokens before the first one, whose text is not emitted again.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, after: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(after[-_CONTEXT_TOKENS:])
        self._start = 0
        self._read = len(self._ids)

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that is certain now."""
        pieces: list[str] = []
        for token_id in token_ids:
            self._ids.append(token_id)
            pieces.append(self._advance(final=False))
        return "".join(pieces)

    def flush(self) -> str:
        """Return the rest."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        if len(after) <= len(before) or (after.endswith(_REPLACEMENT) and not final):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
