"""Which tokenizers' decoders say of one token alone which bytes it stands for."""

from __future__ import annotations

from typing import Any

import pytest

from router.text.token_bytes import ByteLevelDecoder, PieceDecoder, read_decoder

PIECES: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        ({"type": "ByteLevel"}, ByteLevelDecoder),
        ({"type": "Sequence", "decoders": PIECES}, PieceDecoder(strips_first_space=False)),
        ({"type": "Sequence", "decoders": [*PIECES, STRIP]}, PieceDecoder(strips_first_space=True)),
        ({"type": "Sequence", "decoders": PIECES[:2]}, None),
        ({"type": "WordPiece", "prefix": "##"}, None),
        (None, None),
    ],
)
def test_of_which_decoders(decoder: dict[str, Any] | None, expected: Any) -> None:
    found = read_decoder(decoder)
    assert isinstance(found, expected) if isinstance(expected, type) else found == expected
