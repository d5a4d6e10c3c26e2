"""The KV layout as data: where a block's bytes for (layer, head, k|v, token) lie, per layer.

Kernels and transports read this object; nobody assumes an order in code. Default order, per block:

    [layer][kv_head][k|v][token][head_dim]

so one block is one contiguous descriptor, and a group of layers is contiguous inside it. The last
two axes are a tile, whose inner order is data too: executors differ in the one that they read fast.
"""

from __future__ import annotations

import enum
import hashlib
from typing import Literal

import msgspec

TileOrder = Literal["token_major", "pairs", "quads"]
"""Order inside a tile of keys; values are [token][head_dim] in all of them.

- ``token_major``: [token][head_dim], f32 or bf16.
- ``pairs``: [head_dim / 2][token][2], f32 or bf16: a vector register takes a pair of all tokens.
- ``quads``: [head_dim / 4][token][4] of int8, head_dim rounded up to a multiple of 4 (of values
  too), then a float32 scale a token from the next 64 bytes on, padded to 64. A key's bytes are
  quant + 128, unsigned, of the key after a Hadamard transform; a value's are its quants.
"""

VERSION = 1
"""Version of this description; 1: first."""


_SCALE_BYTES = 4
_SCALES_ALIGNED = 64
"""Bytes of a vector register and of a cache line."""


class KvDtype(enum.StrEnum):
    """Element type of cached keys and values."""

    F32 = "f32"
    BF16 = "bf16"
    INT8 = "int8"

    @property
    def num_bytes(self) -> int:
        """Bytes an element."""
        return {KvDtype.F32: 4, KvDtype.BF16: 2, KvDtype.INT8: 1}[self]


class LayerLayout(msgspec.Struct, frozen=True):
    """One layer's place in a block. All numbers are bytes from the block's start.

    tile(head, kv) = offset + head * head_stride + kv * kv_stride
    element(head, kv, token, dim) = tile(head, kv) + token * token_stride + dim * dtype.num_bytes

    The latter holds for values, and for keys of a "token_major" tile.

    Attributes:
        kv_stride: distance from a head's keys to its values.
        scale_offset: where the tile's scales start, from the tile's start; -1: no scales.
        tile_order: order inside a tile of keys.
    """

    offset: int
    head_stride: int
    kv_stride: int
    token_stride: int
    dtype: KvDtype
    scale_offset: int = -1
    tile_order: TileOrder = "token_major"


class KvLayout(msgspec.Struct, frozen=True):
    """Layout of one rank's blocks in one KV group.

    Attributes:
        model: fingerprint of weights and arithmetic that fill the cache (hex); see `engine.models`.
        block_size: token positions a block.
        num_kv_heads: heads of this rank.
        block_bytes: distance from one block to the next.
    """

    model: str
    block_size: int
    num_kv_heads: int
    head_dim: int
    block_bytes: int
    layers: tuple[LayerLayout, ...]
    version: int = VERSION

    @property
    def num_layers(self) -> int:
        """Layers that keep KV."""
        return len(self.layers)

    def fingerprint(self) -> str:
        """Return 32 hex digits that are equal iff two pools can exchange blocks byte for byte."""
        encoded = msgspec.json.encode(self)
        return hashlib.blake2b(encoded, digest_size=16).hexdigest()

    def summary(self) -> str:
        """Return the layout in one line for records and handshakes: equal iff `fingerprint` is.

        Peers compare it as a whole, and `summary_difference` names what differs.
        """
        dtypes = "+".join(sorted({layer.dtype.value for layer in self.layers}))
        orders = "+".join(sorted({layer.tile_order for layer in self.layers}))
        named = {
            "version": self.version,
            "model": self.model,
            "block_size": self.block_size,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "num_layers": self.num_layers,
            "dtype": dtypes,
            "tile_order": orders,
            "block_bytes": self.block_bytes,
            "fingerprint": self.fingerprint(),
        }
        return " ".join(f"{name}={value}" for name, value in named.items())

    def difference(self, other: KvLayout) -> str | None:
        """Name the first field of the summaries in which the layouts differ, with both values; None
        if they agree."""
        found = summary_difference(self.summary(), other.summary())
        if found is None:
            return None
        name, mine, theirs = found
        return f"{name.removeprefix('layout.')}: {mine} here, {theirs} there"

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)


def summary_difference(here: str, there: str) -> tuple[str, str, str] | None:
    """Return the first field in which two summaries differ, its value here and there; None if they
    agree. Texts that are no summaries differ as a whole, in ``layout``."""
    if here == there:
        return None
    mine, theirs = _fields_of(here), _fields_of(there)
    for name, value in mine.items():
        if theirs.get(name, value) != value:
            return f"layout.{name}", value, theirs[name]
    return "layout", here, there


def _fields_of(summary: str) -> dict[str, str]:
    pairs = (field.partition("=") for field in summary.split(" "))
    return {name: value for name, separator, value in pairs if separator}


class Tile(msgspec.Struct, frozen=True):
    """One block's [token, head_dim] of one layer, one head, keys or values.

    Raises:
        ValueError: there is no tile of this type, order and shape.
    """

    block_size: int
    head_dim: int
    dtype: KvDtype
    order: TileOrder = "token_major"

    def __post_init__(self) -> None:
        """Refuse what no executor reads."""
        if (self.dtype is KvDtype.INT8) != (self.order == "quads"):
            msg = (
                f"{self.dtype.value} in tile order {self.order!r}: int8 is kept in 'quads', and "
                "nothing else is"
            )
            raise ValueError(msg)
        if self.order != "token_major" and (self.block_size % 8 or self.head_dim % 2):
            msg = (
                f"block_size {self.block_size}, head_dim {self.head_dim}: must be multiples of 8 "
                f"and of 2 in tile order {self.order!r}"
            )
            raise ValueError(msg)

    @property
    def token_stride(self) -> int:
        """Bytes from a token to the next, where tokens stand apart."""
        return self.head_dim * self.dtype.num_bytes

    @property
    def scale_offset(self) -> int:
        """Where the scales start; -1: there are none."""
        if self.order != "quads":
            return -1
        return _round_up(self.block_size * _round_up(self.head_dim, 4), _SCALES_ALIGNED)

    @property
    def num_bytes(self) -> int:
        """Bytes, with scales."""
        if self.order != "quads":
            return self.block_size * self.token_stride
        return _round_up(self.scale_offset + self.block_size * _SCALE_BYTES, _SCALES_ALIGNED)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def blocks_of(tile: Tile, *, model: str, num_layers: int, num_kv_heads: int) -> KvLayout:
    """Return the default order ``[block][layer][kv_head][k|v]`` of tiles."""
    head_stride = 2 * tile.num_bytes
    layer_bytes = num_kv_heads * head_stride
    layers = tuple(
        LayerLayout(
            offset=layer * layer_bytes,
            head_stride=head_stride,
            kv_stride=tile.num_bytes,
            token_stride=tile.token_stride,
            dtype=tile.dtype,
            scale_offset=tile.scale_offset,
            tile_order=tile.order,
        )
        for layer in range(num_layers)
    )
    return KvLayout(
        model=model,
        block_size=tile.block_size,
        num_kv_heads=num_kv_heads,
        head_dim=tile.head_dim,
        block_bytes=num_layers * layer_bytes,
        layers=layers,
    )


def block_major(
    *,
    model: str,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: KvDtype,
) -> KvLayout:
    """Return the default order ``[block][layer][kv_head][k|v][token][head_dim]``."""
    tile = Tile(block_size, head_dim, dtype)
    return blocks_of(tile, model=model, num_layers=num_layers, num_kv_heads=num_kv_heads)
