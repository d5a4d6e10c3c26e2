"""The `dovetail` object: a request's path and times, for those who asked with x-dovetail-trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from core.lifetime import Duration, Lifetime, RequestTrace

_ROUTER_DURATIONS = {
    "router_queue_s": Duration.ROUTER_QUEUE,
    "ttft_s": Duration.TTFT,
    "decode_s": Duration.DECODE,
    "e2e_s": Duration.E2E,
}


def trace_object(
    traces: Sequence[RequestTrace | None], lifetimes: Sequence[Lifetime]
) -> dict[str, Any]:
    """Return the object of one prompt; of several prompts, `{"requests": [...]}`, one each.

    All fields of `core.lifetime.RequestTrace` (null where unknown), and the router's durations, in
    seconds.
    """
    objects = [_one(trace, times) for trace, times in zip(traces, lifetimes, strict=True)]
    return objects[0] if len(objects) == 1 else {"requests": objects}


def _one(trace: RequestTrace | None, lifetime: Lifetime) -> dict[str, Any]:
    shape: dict[str, Any] = {} if trace is None else msgspec.structs.asdict(trace)
    for name, duration in _ROUTER_DURATIONS.items():
        shape[name] = lifetime.seconds(duration)
    return shape
