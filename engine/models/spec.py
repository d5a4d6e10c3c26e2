"""`ModelSpec`: the numbers that define a decoder, whatever file they came from."""

from __future__ import annotations

from typing import Literal

import msgspec

from core.config import KvDtypeChoice
from core.kv_layout import KvDtype, KvLayout, Tile, TileOrder, blocks_of
from engine.models.rope_scaling import RopeScaling

Architecture = Literal["llama", "mistral", "qwen2", "qwen3", "smollm3"]
ActivationKind = Literal["silu"]


class ModelSpec(msgspec.Struct, frozen=True):
    """One decoder-only transformer of the llama family.

    What its members differ in is said by fields, and the program is compiled from these alone.

    Attributes:
        name: from the file's or directory's name, without its quantization suffix.
        architecture: as the files name it.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP.
        rope_theta: base of the rotary frequencies (Su et al. 2021), unscaled.
        rope_scaling: None where the frequencies are the plain ones.
        nope_layers: layers that do not rotate queries and keys (NoPE, Kazemnejad et al. 2023).
        norm_eps: added to the mean square in RMSNorm.
        tied_embeddings: the output projection is the embedding table.
        qkv_bias, output_bias, mlp_bias: the query, key and value projections add a bias; the
            attention's output projection; the three of the MLP.
        qk_norm: queries and keys are RMS-normalized head by head before they are rotated.
        sliding_window: positions that a sliding layer sees, its own included; None: all.
        sliding_layers: layers that see no further; empty without a window.
        max_positions: the context length that it was trained for.
        bos_token_id: None where the model has none.
        eos_token_ids: all ids that end a turn, as the files declare them.
        fingerprint: 32 hex digits; see `engine.models.fingerprint`.
    """

    name: str
    architecture: Architecture
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool
    max_positions: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    activation: ActivationKind
    fingerprint: str
    rope_scaling: RopeScaling | None = None
    nope_layers: tuple[int, ...] = ()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()

    def window_of(self, layer: int) -> int | None:
        """Return how many positions a layer sees, its own included; None: all."""
        return self.sliding_window if layer in self.sliding_layers else None

    def arithmetic(self) -> bytes:
        """Encode the fields that decide a token, for the fingerprint: not names, not limits."""
        unrelated = {"name", "max_positions", "bos_token_id", "eos_token_ids", "fingerprint"}
        fields = {name: value for name, value in _items(self) if name not in unrelated}
        return msgspec.json.encode(fields, order="deterministic")


def _items(spec: ModelSpec) -> list[tuple[str, object]]:
    return [(name, getattr(spec, name)) for name in spec.__struct_fields__]


def kv_dtype_for(choice: KvDtypeChoice) -> KvDtype:
    """Resolve `engine.kv_dtype`: "auto" is bf16."""
    return KvDtype.BF16 if choice == "auto" else KvDtype(choice)


def kv_layout_for(
    spec: ModelSpec, kv_dtype: KvDtype, block_size: int, tile_order: TileOrder = "token_major"
) -> KvLayout:
    """Return the block-major layout of this model's KV on one rank.

    Args:
        spec: the model.
        kv_dtype: element type.
        block_size: token positions a block.
        tile_order: what the executor reads.

    Raises:
        ValueError: there is no tile of this type, order and shape.
    """
    return blocks_of(
        Tile(block_size, spec.head_dim, kv_dtype, tile_order),
        model=spec.fingerprint,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
    )
