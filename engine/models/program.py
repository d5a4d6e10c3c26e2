"""A model as data: a flat list of ops over named registers, run in order by any executor.

A register is a [rows, width] tensor; rows are the step's query tokens until `SelectRows` keeps
those that are sampled from. An op names the registers that it reads (`src`) and writes (`out`);
weights go by Hugging Face's names, and several names mean one matrix of their rows, stacked. What
another model needs (an all-reduce between ranks, routed experts) is another struct in the union.
"""

from __future__ import annotations

import msgspec

from engine.models.spec import ActivationKind


class Embed(msgspec.Struct, frozen=True):
    """out = weight[token ids]."""

    weight: str
    out: str


class Norm(msgspec.Struct, frozen=True):
    """out = src / sqrt(mean(src^2) + eps) * weight (RMSNorm, Zhang and Sennrich 2019)."""

    src: str
    weight: str
    eps: float
    out: str


class Linear(msgspec.Struct, frozen=True):
    """out = src @ stacked(weights).T + stacked(biases); without biases, nothing is added."""

    src: str
    weights: tuple[str, ...]
    out: str
    biases: tuple[str, ...] = ()


class QkNorm(msgspec.Struct, frozen=True):
    """out = src with each query head and each key head RMS-normalized by itself.

    `src` rows are [query heads | key heads | value heads]; a weight is [head_dim], the same for
    all heads of its kind.
    """

    src: str
    query_weight: str
    num_heads: int
    key_weight: str
    num_kv_heads: int
    eps: float
    out: str


class RopeKvWrite(msgspec.Struct, frozen=True):
    """Rotate queries and keys of `src` by position, write keys and values into the pool.

    `src` rows are [query heads | key heads | value heads], each head_dim wide; `out` receives the
    rotated queries. Keys and values are rounded to the pool's type here, before attention reads
    them. A layer without rotary embeddings (`rotary` false) only writes.
    """

    src: str
    layer: int
    out: str
    rotary: bool = True


class Attention(msgspec.Struct, frozen=True):
    """Causal grouped-query attention of `src` queries over their sequence's blocks.

    With a `window`, a query sees so many positions, its own included; None: all up to its own.
    """

    src: str
    layer: int
    out: str
    window: int | None = None


class Activation(msgspec.Struct, frozen=True):
    """out = act(left half of src) * right half of src."""

    src: str
    kind: ActivationKind
    out: str


class Add(msgspec.Struct, frozen=True):
    """out += src: a residual connection."""

    src: str
    out: str


class Signal(msgspec.Struct, frozen=True):
    """The layer's keys and values of this step are in the pool."""

    layer: int


class SelectRows(msgspec.Struct, frozen=True):
    """out = the rows of src that are sampled from."""

    src: str
    out: str


class Logits(msgspec.Struct, frozen=True):
    """out = src @ weight.T in float32: scores of the next token."""

    src: str
    weight: str
    out: str


Op = (
    Embed
    | Norm
    | Linear
    | QkNorm
    | RopeKvWrite
    | Attention
    | Activation
    | Add
    | Signal
    | SelectRows
    | Logits
)


class Program(msgspec.Struct, frozen=True):
    """All ops of one forward pass.

    Attributes:
        hidden: register of the final hidden states of sampled rows, [rows, hidden_size].
        logits: register of the scores, float32 [rows, vocab_size].
    """

    ops: tuple[Op, ...]
    hidden: str
    logits: str
