"""One row to sample from, by the torch sampler and by a native kernel table."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from core.request import TokenLogprobs
from core.sampling_params import SamplingParams
from engine.executor.native_sampling import SampledSequence, Wish, Wishes, resolve
from engine.kernels.cpu.abi import DrawItem
from engine.sampling import sampler, slot_sampling
from engine.sampling.logprobs import to_host

Floats = npt.NDArray[np.float32]

_CPU = torch.device("cpu")
_GUARD = np.float32(12345.0)


@dataclass
class Scene:
    """A row and what is asked of it; nothing by default: greedy, no history."""

    logits: Floats
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    tokens: Sequence[int] = (0,)
    num_prompt: int = 1
    sample_index: int = 0
    allowed: npt.NDArray[np.bool_] | None = None


def by_torch(scene: Scene) -> tuple[int, TokenLogprobs | None]:
    """Return the reference's token and log-probabilities."""
    tokens = torch.tensor([scene.tokens], dtype=torch.int64)
    sequences = sampler.Sequences(
        token_ids=tokens,
        slots=torch.zeros(1, dtype=torch.int64),
        num_prompt=torch.tensor([scene.num_prompt]),
        positions=torch.tensor([tokens.shape[1]]),
        longest=tokens.shape[1],
    )
    allowed = None if scene.allowed is None else torch.from_numpy(scene.allowed)
    row = sampler.SampleRow(slot_sampling.resolve(scene.params, _CPU), scene.sample_index, allowed)
    sampled = sampler.sample(torch.from_numpy(scene.logits.copy())[None], [row], sequences)
    logprobs = None if sampled.logprobs is None else to_host(sampled.logprobs)[0]
    return int(sampled.token_ids[0]), logprobs


def drawn_from(asked: Sequence[Wish]) -> tuple[Any, Wishes]:
    """Return the items of draws as the library makes them from their sequences, with the wishes."""
    items = (DrawItem * len(asked))()
    for item, wish in zip(items, asked, strict=True):
        ctypes.memmove(ctypes.byref(item), ctypes.byref(wish.sequence.item), ctypes.sizeof(item))
        item.sampling.position = item.sampling.num_history = wish.num_tokens
    return items, Wishes(items, asked)


def by_kernel(table: Any, scene: Scene) -> tuple[int, TokenLogprobs | None]:
    """Return the same of a kernel table; nothing beyond the logits and the scratch is touched."""
    vocab_size = len(scene.logits)
    sampling = resolve(scene.params, vocab_size)
    tokens = np.array(scene.tokens, np.int32)
    sequence = SampledSequence(sampling, tokens, scene.num_prompt, scene.sample_index)
    (item,), wishes = drawn_from([Wish(0, sequence, len(tokens), scene.allowed)])
    logits = np.append(scene.logits, _GUARD)
    scratch = np.full(2 * vocab_size + 4096 + 1, np.nan, np.float32)  # what is there means nothing
    scratch[-1] = _GUARD
    item.token = table.sample(
        logits.ctypes.data,
        vocab_size,
        byref(item.sampling),
        scratch.ctypes.data,
        item.chosen,
        item.top_ids,
        item.top,
    )
    assert logits[-1] == scratch[-1] == _GUARD
    return item.token, wishes.logprobs().get(0)


def is_clear(scene: Scene) -> bool:
    """Whether the last bits of sums of probabilities do not matter for top_p."""
    p = scene.params.top_p
    nearby = (min(p * factor, 1.0) for factor in (1 - 1e-5, 1 + 1e-5))
    tokens = {by_torch(with_params(scene, top_p=top_p))[0] for top_p in nearby}
    return p == 1 or tokens == {by_torch(scene)[0]}


def with_params(scene: Scene, **changes: Any) -> Scene:
    """Return the scene with some parameters changed."""
    params = msgspec.structs.replace(scene.params, **changes)
    return Scene(
        scene.logits, params, scene.tokens, scene.num_prompt, scene.sample_index, scene.allowed
    )
