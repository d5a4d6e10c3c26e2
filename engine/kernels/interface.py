"""What an executor asks of a kernel set, op by op. Tensors live on the executor's device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.paged_kv import PagedKv


class LinearWeight(Protocol):
    """One matrix in the order of memory that its kernel wants."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, [rows, in_features] -> [rows, out_features]."""
        ...


class Kernels(Protocol):
    """One implementation of every op.

    The residual stream and norms are float32 whatever the weights are; a linear layer rounds its
    input to its weights' type and returns that type, except for logits, which are float32
    throughout (rounded to bf16 they tie, and a tie is a wrong greedy token).
    """

    def pack(self, parts: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> LinearWeight:
        """Prepare the rows of `parts`, each [out_features, in_features], as one matrix.

        Args:
            parts: its weights.
            biases: one a part, each [out_features]; or none.
        """
        ...

    def pack_logits(self, weight: Tensor) -> LinearWeight:
        """Prepare the output projection, float32."""
        ...

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Return float32 rows [tokens, hidden] of `table`."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return float32 [rows, hidden]; both inputs are float32."""
        ...

    def qk_norm(self, qkv: Tensor, scale: Tensor, eps: float) -> Tensor:
        """Normalize each query head and each key head by itself.

        Args:
            qkv: [tokens, (heads + 2 * kv_heads) * head_dim].
            scale: float32 [heads + kv_heads, head_dim].
            eps: added to the mean square.

        Returns:
            float32, of the same shape.
        """
        ...

    def rope_kv_write(
        self, qkv: Tensor, layer: int, pool: PagedKv, batch: AttentionBatch, *, rotary: bool
    ) -> Tensor:
        """Rotate queries and keys, write keys and values into the pool.

        Args:
            qkv: [tokens, (heads + 2 * kv_heads) * head_dim].
            layer: whose part of the blocks.
            pool: rounds keys and values to its own type.
            batch: positions and places of the rows.
            rotary: whether this layer rotates at all.

        Returns:
            Queries divided by sqrt(head_dim), [tokens, heads, head_dim].
        """
        ...

    def attention(
        self, queries: Tensor, layer: int, pool: PagedKv, batch: AttentionBatch, window: int | None
    ) -> Tensor:
        """Return [tokens, heads * head_dim]: each row attends to its sequence up to itself.

        Args:
            queries: scaled, [tokens, heads, head_dim].
            layer: whose keys and values.
            pool: where they are.
            batch: places of the rows.
            window: positions that a row sees, its own included; None: all. `batch` was made for
                this one.
        """
        ...

    def gated_silu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, [rows, 2 * inner] -> [rows, inner]."""
        ...
