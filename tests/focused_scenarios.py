"""Scenarios of the simulation in which a rare order of events is likelier than in drawn ones."""

from __future__ import annotations

import random
from collections.abc import Callable

from msgspec.structs import replace

from planner.protocol.network import Latency
from planner.protocol.scenario import (
    DECODES,
    PREFILLS,
    Fault,
    FaultKind,
    Scenario,
)
from router.dispatch.interface import Disaggregate

Focus = Callable[[Scenario, random.Random], Scenario]
"""Turns a drawn scenario into one in which a rare order of events is likelier."""


def as_drawn(scenario: Scenario, dice: random.Random) -> Scenario:
    """Return the scenario itself."""
    del dice
    return scenario


def _handoffs_only(scenario: Scenario, at: Callable[[], float]) -> Scenario:
    """Let nobody leave, and every prompt be computed elsewhere."""
    requests = [
        replace(
            plan,
            at=at(),
            disaggregate=Disaggregate.ALWAYS,
            leaves_after=None,
            leaves_at=None,
            stops_after=None,
        )
        for plan in scenario.requests
    ]
    return replace(scenario, requests=tuple(requests), decode_blocks=30, prefill_blocks=30)


def asks_on_lost_connections(scenario: Scenario, dice: random.Random) -> Scenario:
    """Connections are lost as asks travel on them, and opened anew at once for others."""
    pairs = [(decode, prefill) for decode in DECODES for prefill in PREFILLS]
    faults = [
        Fault(FaultKind.RESET, dice.uniform(0.45, 0.8), target=decode, other=prefill)
        for decode, prefill in pairs * 3
    ]
    crowd = replace(scenario, requests=scenario.requests * 3, max_waiting=64)
    busy = _handoffs_only(crowd, lambda: dice.uniform(0.4, 0.8))
    latency = Latency(max_s=0.02, slow_share=0.2, slow_max_s=0.2)
    return replace(busy, faults=tuple(faults), latency=latency, step_s=0.004)


def frozen_targets(scenario: Scenario, dice: random.Random) -> Scenario:
    """Decode workers freeze under slow writes, until their writers destroy their agents."""
    faults = [
        Fault(FaultKind.FREEZE, dice.uniform(0.45, 0.7), dice.uniform(1.2, 2.5), target=name)
        for name in DECODES
    ]
    busy = _handoffs_only(scenario, lambda: dice.uniform(0.4, 0.6))
    return replace(busy, faults=tuple(faults), descriptor_max_s=0.2, must_poll=False)


def frozen_writers(scenario: Scenario, dice: random.Random) -> Scenario:
    """Prefill workers freeze under slow writes, for longer than their silence is borne."""
    faults = [
        Fault(FaultKind.FREEZE, dice.uniform(0.45, 0.7), dice.uniform(0.8, 2.0), target=name)
        for name in PREFILLS
    ]
    busy = _handoffs_only(scenario, lambda: dice.uniform(0.4, 0.6))
    return replace(busy, faults=tuple(faults), descriptor_max_s=0.2, must_poll=False)


def restarted_writers(scenario: Scenario, dice: random.Random) -> Scenario:
    """Prefill workers die under slow writes, and are back at once."""
    faults = [
        Fault(FaultKind.KILL, dice.uniform(0.45, 0.6), 0.01, target=name, buffered=3)
        for name in PREFILLS
    ]
    busy = _handoffs_only(scenario, lambda: dice.uniform(0.4, 1.0))
    return replace(
        busy, faults=tuple(faults), descriptor_max_s=0.5, must_poll=False, latency=Latency()
    )


def frozen_twins(scenario: Scenario, dice: random.Random) -> Scenario:
    """Decode workers freeze under long requests, and thaw when these run elsewhere."""
    faults = [
        Fault(FaultKind.FREEZE, dice.uniform(0.5, 1.5), dice.uniform(0.7, 2.0), target=name)
        for name in DECODES
    ]
    busy = _handoffs_only(scenario, lambda: dice.uniform(0.4, 0.8))
    requests = [
        replace(plan, sampling=replace(plan.sampling, max_tokens=14)) for plan in busy.requests
    ]
    return replace(busy, requests=tuple(requests), faults=tuple(faults), step_s=0.1)


def moves_during_fences(scenario: Scenario, dice: random.Random) -> Scenario:
    """Decode workers hand over what they run while writes that failed make them move their KV."""
    leaver = DECODES[dice.randrange(len(DECODES))]
    faults = [
        Fault(FaultKind.LOSSY, dice.uniform(0.6, 0.9), 0.4),
        Fault(FaultKind.DRAIN, dice.uniform(1.0, 1.3), 4.0, leaver),
    ]
    crowd = replace(scenario, requests=scenario.requests * 2, max_waiting=64)
    busy = _handoffs_only(crowd, lambda: dice.uniform(0.4, 1.0))
    requests = [
        replace(plan, sampling=replace(plan.sampling, max_tokens=14)) for plan in busy.requests
    ]
    return replace(
        busy,
        requests=tuple(requests),
        faults=tuple(faults),
        step_s=0.05,
        descriptor_max_s=0.2,
        must_poll=False,
        latency=Latency(),
    )
