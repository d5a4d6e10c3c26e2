"""`ModelSpec`: the numbers that define a decoder, whatever file they came from."""

from __future__ import annotations

from typing import Literal

import msgspec

from core.config import WeightsChoice
from core.kv_layout import KvDtype, KvLayout, block_major

Architecture = Literal["llama"]
ActivationKind = Literal["silu"]


class ModelSpec(msgspec.Struct, frozen=True):
    """One decoder-only transformer.

    Attributes:
        name: from the file's or directory's name, without its quantization suffix.
        architecture: family, which selects the program.
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP.
        rope_theta: base of the rotary frequencies (Su et al. 2021), unscaled.
        norm_eps: added to the mean square in RMSNorm.
        tied_embeddings: the output projection is the embedding table.
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

    def arithmetic(self) -> bytes:
        """Encode the fields that decide a token, for the fingerprint: not names, not limits."""
        unrelated = {"name", "max_positions", "bos_token_id", "eos_token_ids", "fingerprint"}
        fields = {name: value for name, value in _items(self) if name not in unrelated}
        return msgspec.json.encode(fields, order="deterministic")


def _items(spec: ModelSpec) -> list[tuple[str, object]]:
    return [(name, getattr(spec, name)) for name in spec.__struct_fields__]


def kv_dtype_for(choice: WeightsChoice) -> KvDtype:
    """Resolve `engine.kv_dtype`: "auto" is bf16."""
    return KvDtype.F32 if choice == "f32" else KvDtype.BF16


def kv_layout_for(spec: ModelSpec, kv_dtype: KvDtype, block_size: int) -> KvLayout:
    """Return the block-major layout of this model's KV on one rank."""
    return block_major(
        model=spec.fingerprint,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=block_size,
        dtype=kv_dtype,
    )
