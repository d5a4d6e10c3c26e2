"""Every op in torch, on any device: correct first, and as fast as torch's own kernels allow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.interface import LinearWeight
from engine.kernels.linear_weight import pack_linear
from engine.kernels.paged_attention import QUERY_TILE, TileMasks, attend_chunk, attend_group
from engine.kernels.paged_kv import PagedKv
from engine.kernels.rope import rotate


class ReferenceKernels:
    """Implements `engine.kernels.interface.Kernels`.

    Args:
        weights: type of the linear layers.
        kv: type of the cache. Attention computes in bf16 where both are, else in float32.
        device: where everything lives.
    """

    def __init__(self, weights: torch.dtype, kv: torch.dtype, device: torch.device) -> None:
        self._weights = weights
        self._device = device
        both = {weights, kv} == {torch.bfloat16}
        self.attention_dtype = torch.bfloat16 if both else torch.float32
        square = torch.full((QUERY_TILE, QUERY_TILE), -math.inf, dtype=self.attention_dtype)
        self._masks = TileMasks(future=square.triu(1).to(device), past=square.tril(-1).to(device))

    def pack(self, parts: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> LinearWeight:
        """Prepare a stack of matrices."""
        return pack_linear(self._stack(parts), self._stack(biases) if biases else None)

    def _stack(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.to(self._device, self._weights) for part in parts])

    def pack_logits(self, weight: Tensor) -> LinearWeight:
        """Prepare the output projection."""
        return pack_linear(weight.to(self._device, torch.float32))

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Look up rows."""
        return functional.embedding(token_ids, table).float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalize rows."""
        return functional.rms_norm(x, weight.shape, weight, eps)

    def qk_norm(self, qkv: Tensor, scale: Tensor, eps: float) -> Tensor:
        """Normalize heads."""
        num_normed, head_dim = scale.shape
        heads = qkv.float().view(qkv.shape[0], -1, head_dim)
        normed = functional.rms_norm(heads[:, :num_normed], (head_dim,), None, eps) * scale
        return torch.cat((normed, heads[:, num_normed:]), dim=1).flatten(1)

    def rope_kv_write(
        self, qkv: Tensor, layer: int, pool: PagedKv, batch: AttentionBatch, *, rotary: bool
    ) -> Tensor:
        """Rotate and store."""
        tokens = qkv.shape[0]
        heads = qkv.view(tokens, -1, pool.head_dim)
        first_value = heads.shape[1] - pool.num_kv_heads
        first_key = first_value - pool.num_kv_heads
        rotated = heads[:, :first_value].float()
        if rotary:
            rotated = rotate(rotated, batch.cos, batch.sin)
        keys_values = torch.empty(
            (tokens, pool.num_kv_heads, 2, pool.head_dim), dtype=pool.dtype, device=qkv.device
        )
        keys_values[:, :, 0] = rotated[:, first_key:]
        keys_values[:, :, 1] = heads[:, first_value:]
        pool.write(layer, batch.write_rows, keys_values)
        return (rotated[:, :first_key] * (pool.head_dim**-0.5)).to(self.attention_dtype)

    def attention(
        self, queries: Tensor, layer: int, pool: PagedKv, batch: AttentionBatch, window: int | None
    ) -> Tensor:
        """Attend all rows."""
        masks = self._masks._replace(window=window)
        parts = [
            attend_group(queries[group.first : group.last], layer, pool, group, window)
            for group in batch.groups
        ]
        parts += [
            attend_chunk(queries[chunk.first : chunk.last], layer, pool, chunk, masks)
            for chunk in batch.chunks
        ]
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended.flatten(1)

    def gated_silu(self, gate_up: Tensor) -> Tensor:
        """Apply the gate."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)
