"""The hot message: all tokens of a step, as columns, so that no object is made per token.

Most updates are one token without logprobs that ends nothing; what is alike in all is left out.
"""

from __future__ import annotations

from itertools import chain, repeat
from typing import Any, TypeVar

from control_plane.rpc import dovetail_pb2
from control_plane.rpc.struct_codec import (
    finish_reason_from_wire,
    finish_reason_to_wire,
    struct_codec,
)
from core.ids import RequestId
from core.messages import TokenBatch
from core.request import TokenLogprobs, TokenUpdate

T = TypeVar("T")

_LOGPROBS = struct_codec(TokenLogprobs)


def encode(batch: TokenBatch) -> dict[str, Any]:
    """Return the columns of `batch`, as the message's constructor takes them."""
    updates = batch.updates
    columns: dict[str, Any] = {
        "request_ids": [update.request_id for update in updates],
        "sample_indices": [update.sample_index for update in updates],
        "dispatches": [update.dispatch for update in updates],
        "start_indices": [update.start_index for update in updates],
        "token_ids": [token_id for update in updates for token_id in update.token_ids],
    }
    num_tokens = [len(update.token_ids) for update in updates]
    if num_tokens.count(1) != len(updates):
        columns["num_tokens"] = num_tokens
    if any(update.logprobs for update in updates):
        columns["num_logprobs"] = [len(update.logprobs) for update in updates]
        every = chain.from_iterable([update.logprobs for update in updates])
        columns["logprobs"] = [_LOGPROBS.encode(logprobs) for logprobs in every]
    if any(update.finish_reason for update in updates):
        columns["finish_reasons"] = [
            finish_reason_to_wire(update.finish_reason) for update in updates
        ]
    return columns


def decode(wire: dovetail_pb2.TokenBatch) -> TokenBatch:
    """Return the updates.

    Raises:
        ValueError: columns of unequal length, or a finish reason that is not known here.
    """
    request_ids = list(wire.request_ids)
    num_updates = len(request_ids)
    token_ids = _split(list(wire.token_ids), list(wire.num_tokens) or [1] * num_updates)
    logprobs = (
        _split([_LOGPROBS.decode(one) for one in wire.logprobs], list(wire.num_logprobs))
        if wire.num_logprobs
        else repeat((), num_updates)
    )
    reasons = (
        [finish_reason_from_wire(number) for number in wire.finish_reasons]
        if wire.finish_reasons
        else repeat(None, num_updates)
    )
    columns = zip(
        request_ids,
        wire.sample_indices,
        wire.dispatches,
        wire.start_indices,
        token_ids,
        logprobs,
        reasons,
        strict=True,
    )
    return TokenBatch(
        tuple(
            [
                TokenUpdate(RequestId(request_id), sample, dispatch, start, ids, probs, reason)
                for request_id, sample, dispatch, start, ids, probs, reason in columns
            ]
        )
    )


def _split(values: list[T], counts: list[int]) -> list[tuple[T, ...]]:
    if len(values) != sum(counts):
        msg = f"a token batch of {len(values)} entries announces {sum(counts)}"
        raise ValueError(msg)
    if len(values) == len(counts) and counts.count(1) == len(counts):
        return [(value,) for value in values]
    parts: list[tuple[T, ...]] = []
    start = 0
    for count in counts:
        parts.append(tuple(values[start : start + count]))
        start += count
    return parts
