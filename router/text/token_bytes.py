"""Byte-level BPE's alphabet: one printable character a byte (GPT-2, Radford et al. 2019)."""

from __future__ import annotations


def _byte_by_char() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    chars.update({chr(256 + offset): byte for offset, byte in enumerate(others)})
    return chars


BYTE_BY_CHAR = _byte_by_char()
"""The byte that each character of a byte-level token stands for."""


def token_bytes(token: str) -> bytes:
    """Return the bytes that a byte-level token stands for.

    A token with a character outside the alphabet (an added token with a space in it, say) stands
    for its own UTF-8, as the `tokenizers` decoder has it.
    """
    try:
        return bytes([BYTE_BY_CHAR[char] for char in token])
    except KeyError:
        return token.encode()
