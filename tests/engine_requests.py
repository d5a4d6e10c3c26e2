"""Requests of scheduler scenarios, and the events that they pick from all."""

from __future__ import annotations

from typing import TypeVar

from core.ids import Attempt, HandoffId, RequestId
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from engine.events import Event
from tests.replica import EOS

E = TypeVar("E", bound=Event)
LONG = list(range(100, 150))  # 50 tokens: 3 full blocks of 16 and a tail


def handoff_of(name: str, trial: int = 1) -> HandoffId:
    return HandoffId(RequestId(name), Attempt(1, trial))


def request_of(
    name: str,
    prompt: list[int],
    *,
    n: int = 1,
    max_tokens: int = 16,
    outputs: tuple[tuple[int, ...], ...] = (),
    priority: int = 0,
    logit_bias: tuple[tuple[int, float], ...] = (),
) -> EngineRequest:
    sampling = SamplingParams(
        n=n, max_tokens=max_tokens, seed=5, eos_token_ids=(EOS,), logit_bias=logit_bias
    )
    return EngineRequest(
        RequestId(name), tuple(prompt), sampling, outputs=outputs, priority=priority
    )


def of_kind(events: list[Event], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]
