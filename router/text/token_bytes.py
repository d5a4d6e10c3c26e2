"""The bytes that a token stands for, where the tokenizer's decoder says so token by token.

Byte-level BPE has an alphabet of one printable character a byte (GPT-2, Radford et al. 2019).
SentencePiece writes spaces as `▁`, and bytes that no piece covers as `<0xE6>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenDecoder(Protocol):
    """A tokenizer's decoder, as far as it concerns one token.

    Attributes:
        strips_first_space: the decoder drops the space that a text begins with.
    """

    @property
    def strips_first_space(self) -> bool: ...

    def token_bytes(self, token: str) -> bytes:
        """Return the bytes that `token`, as the vocabulary writes it, stands for."""
        ...


class ByteLevelDecoder:
    """Byte-level BPE."""

    strips_first_space = False

    def token_bytes(self, token: str) -> bytes:
        """Return a token's bytes.

        A token with a character outside the alphabet (an added token with a space in it, say)
        stands for its own UTF-8, as the `tokenizers` decoder has it.
        """
        try:
            return bytes([BYTE_BY_CHAR[char] for char in token])
        except KeyError:
            return token.encode()


class PieceDecoder(NamedTuple):
    """SentencePiece with byte pieces."""

    strips_first_space: bool

    def token_bytes(self, token: str) -> bytes:
        """Return a piece's bytes."""
        piece = _BYTE_PIECE.fullmatch(token)
        return bytes.fromhex(piece[1]) if piece else token.replace("▁", " ").encode()


def read_decoder(decoder: Mapping[str, Any] | None) -> TokenDecoder | None:
    """Return what a `tokenizer.json`'s `decoder` does to a token.

    None where a token's bytes depend on its neighbours, or the decoder is of another kind.
    """
    if decoder is None:
        return None
    if decoder["type"] == "ByteLevel":
        return ByteLevelDecoder()
    steps = decoder.get("decoders")
    if steps == _PIECE_STEPS:
        return PieceDecoder(strips_first_space=False)
    if steps == [*_PIECE_STEPS, _STRIP]:
        return PieceDecoder(strips_first_space=True)
    return None


_PIECE_STEPS = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
"""The decoder of Llama 2 and Mistral; Gemma's ends here."""
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _byte_by_char() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    chars.update({chr(256 + offset): byte for offset, byte in enumerate(others)})
    return chars


BYTE_BY_CHAR = _byte_by_char()
"""The byte that each character of a byte-level token stands for."""
