"""The KV layout as data: where a block's bytes for (layer, head, k|v, token) lie, per layer.

Kernels and transports read this object; nobody assumes an order in code. Default order, per block:

    [layer][kv_head][k|v][token][head_dim]

so one block is one contiguous descriptor, and a group of layers is contiguous inside it.
"""

from __future__ import annotations

import enum
import hashlib

import msgspec

VERSION = 1
"""Version of this description; 1: first."""


class KvDtype(enum.StrEnum):
    """Element type of cached keys and values."""

    F32 = "f32"
    BF16 = "bf16"

    @property
    def num_bytes(self) -> int:
        """Bytes an element."""
        return 4 if self is KvDtype.F32 else 2


class LayerLayout(msgspec.Struct, frozen=True):
    """One layer's place in a block. All numbers are bytes from the block's start.

    element(head, kv, token, dim) = offset + head * head_stride + kv * kv_stride
                                    + token * token_stride + dim * dtype.num_bytes

    Attributes:
        kv_stride: distance from a head's keys to its values.
        scale_offset: where the tile's scales start, from the tile's start; -1: no scales.
        tile_order: order inside a [token, head_dim] tile; only "token_major" today.
    """

    offset: int
    head_stride: int
    kv_stride: int
    token_stride: int
    dtype: KvDtype
    scale_offset: int = -1
    tile_order: str = "token_major"


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
        named = {
            "version": self.version,
            "model": self.model,
            "block_size": self.block_size,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "num_layers": self.num_layers,
            "dtype": dtypes,
            "block_bytes": self.block_bytes,
            "fingerprint": self.fingerprint(),
        }
        return " ".join(f"{name}={value}" for name, value in named.items())

    def difference(self, other: KvLayout) -> str | None:
        """Name the first field in which the layouts differ, with both values; None if they
        agree."""
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine!r} here, {theirs!r} there"
        return None

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
    token_stride = head_dim * dtype.num_bytes
    kv_stride = block_size * token_stride
    head_stride = 2 * kv_stride
    layer_bytes = num_kv_heads * head_stride
    layers = tuple(
        LayerLayout(
            offset=layer * layer_bytes,
            head_stride=head_stride,
            kv_stride=kv_stride,
            token_stride=token_stride,
            dtype=dtype,
        )
        for layer in range(num_layers)
    )
    return KvLayout(
        model=model,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_bytes=num_layers * layer_bytes,
        layers=layers,
    )
