"""What a seed means: the cluster's shape, the requests, and the faults, as plain values."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from core.sampling_params import SamplingParams
from core.worker_record import Role
from kv_transfer.inprocess.model import Dice, Frozen
from planner.protocol.network import Latency
from router.dispatch.interface import Disaggregate

ROUTERS = ("router-0", "router-1")
PREFILLS = ("prefill-0", "prefill-1")
DECODES = ("decode-0", "decode-1")
WORKERS = PREFILLS + DECODES
BLOCK_SIZE = 4

START_S = 0.4
"""The cluster is up about then; the first request may come a little too early."""

FAULTS_END_S = 6.0
"""No fault lasts longer than until this second of virtual time."""

T = TypeVar("T")


class RequestPlan(msgspec.Struct, frozen=True):
    """One client.

    Attributes:
        at: virtual second of its request.
        router: which one it asks while that lives.
        leaves_after: tokens after which it disconnects.
        leaves_at: seconds after which it does.
        stops_after: tokens of its first sample after which a stop string ends that sample.
    """

    at: float
    prompt: tuple[int, ...]
    sampling: SamplingParams
    router: str = ROUTERS[0]
    disaggregate: Disaggregate = Disaggregate.AUTO
    priority: int = 0
    leaves_after: int | None = None
    leaves_at: float | None = None
    stops_after: int | None = None


class FaultKind(enum.StrEnum):
    """What goes wrong, and what an operator orders.

    KILL        a process dies, and is started again under its name after `duration`
    FREEZE      it stands still for `duration`
    PARTITION   nothing gets from `target` to `other` for `duration`
    RESET       the connections between `target` and `other` are lost
    LOSSY       writes fail, and notifications are lost, for `duration`
    ETCD_AWAY   etcd does not answer for `duration`
    LEASE_LOST  somebody revokes a worker's lease
    DRAIN       a worker is ordered to leave within `duration`; another life follows
    TERMINATE   SIGTERM: the same, and the time for it is the worker's own
    SWITCH      a worker is ordered another role, and its own again after `duration`
    """

    KILL = "kill"
    FREEZE = "freeze"
    PARTITION = "partition"
    RESET = "reset"
    LOSSY = "lossy"
    ETCD_AWAY = "etcd away"
    LEASE_LOST = "lease lost"
    DRAIN = "drain"
    TERMINATE = "terminate"
    SWITCH = "switch"


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of them.

    Attributes:
        at: virtual second.
        how: of FREEZE: what of it stands still.
        buffered: of KILL: descriptors of each of its writes that land yet.
        hits_messages, hits_writes: of PARTITION: what is stopped.
        forgets: of ETCD_AWAY: whether every lease ran out.
        role: of SWITCH: the other role.
    """

    kind: FaultKind
    at: float
    duration: float = 0.0
    target: str = ""
    other: str = ""
    how: Frozen = Frozen.ALL
    buffered: int = 0
    hits_messages: bool = True
    hits_writes: bool = True
    forgets: bool = False
    role: Role = Role.BOTH


class Scenario(msgspec.Struct, frozen=True):
    """A whole run.

    Attributes:
        seed: of the run's dice.
        step_s: of the modelled device.
        descriptor_max_s: between a write's events, uniform.
        must_poll: whether bytes arrive only while their target polls.
    """

    seed: int
    requests: tuple[RequestPlan, ...]
    faults: tuple[Fault, ...]
    decode_blocks: int = 16
    prefill_blocks: int = 16
    chunk_tokens: int = 8
    step_s: float = 0.004
    max_inflight: int = 1
    max_slots: int = 8
    max_waiting: int = 64
    descriptor_max_s: float = 0.005
    must_poll: bool = False
    latency: Latency = Latency()

    @property
    def is_quick(self) -> bool:
        """Whether nothing takes so long, or goes so wrong, that a fence would be right."""
        is_smooth = not self.latency.slow_share and self.descriptor_max_s <= _QUICK_DESCRIPTOR_S
        return is_smooth and not self.faults


_QUICK_DESCRIPTOR_S = 0.02

_LATENCIES = (
    Latency(slow_share=0.0),
    Latency(),
    Latency(max_s=0.02, slow_share=0.1, slow_max_s=0.4),
)


def scenario_of(seed: int, dice: Dice) -> Scenario:
    """Draw a scenario.

    Args:
        seed: its name.
        dice: seeded with it.
    """
    is_moving = dice.random() < 0.2
    requests = _requests(dice, (14,) if is_moving else (1, 2, 6, 14))
    busy = [request.at for request in requests]
    faults = (*_faults(dice, busy), *(_moves(dice, max(busy)) if is_moving else ()))
    return Scenario(
        seed=seed,
        requests=requests,
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
        decode_blocks=9 + dice.randrange(11),
        prefill_blocks=9 + dice.randrange(12),
        chunk_tokens=BLOCK_SIZE * (1 + dice.randrange(3)),
        step_s=pick(dice, (0.05, 0.1) if is_moving else (0.004, 0.02, 0.1)),
        max_inflight=1 + dice.randrange(2),
        max_slots=pick(dice, (3, 4, 8)),
        max_waiting=pick(dice, (1, 64, 64)),
        # Slow writes are hit by more faults.
        descriptor_max_s=pick(dice, (0.002, 0.02, 0.06, 0.2)),
        must_poll=dice.random() < 0.5,
        latency=pick(dice, _LATENCIES),
    )


def pick(dice: Dice, choices: Sequence[T]) -> T:
    """Draw one of several."""
    return choices[dice.randrange(len(choices))]


def _requests(dice: Dice, max_tokens: Sequence[int]) -> tuple[RequestPlan, ...]:
    shared = _tokens(dice, 12)
    window_s = pick(dice, (0.05, 0.4, 1.5))
    plans: list[RequestPlan] = []
    for _ in range(3 + dice.randrange(4)):
        at = START_S + dice.uniform(0.0, window_s)
        plan = _request(dice, shared, at, pick(dice, max_tokens))
        if plans and dice.random() < 0.15:
            plan = msgspec.structs.replace(plan, prompt=pick(dice, plans).prompt)
        plans.append(plan)
    return tuple(plans)


def _request(dice: Dice, shared: tuple[int, ...], at: float, max_tokens: int) -> RequestPlan:
    prefix = shared[: BLOCK_SIZE * dice.randrange(4)] if dice.random() < 0.6 else ()
    num_own = 1 + dice.randrange(20 - len(prefix))
    if dice.random() < 0.3:
        num_own = -(-num_own // BLOCK_SIZE) * BLOCK_SIZE
    n = pick(dice, (1, 1, 1, 2, 3))
    sampling = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        temperature=pick(dice, (0.0, 1.0, 1.0)),
        seed=dice.randrange(1 << 32),
    )
    mood = dice.random()
    stop_share = 0.35 if n == 1 else 0.5
    return RequestPlan(
        at=at,
        prompt=prefix + _tokens(dice, num_own),
        sampling=sampling,
        disaggregate=pick(dice, (Disaggregate.ALWAYS, Disaggregate.ALWAYS, Disaggregate.AUTO)),
        router=pick(dice, ROUTERS),
        priority=dice.randrange(2),
        leaves_after=dice.randrange(max_tokens) if mood < 0.1 else None,
        leaves_at=dice.uniform(0.0, 0.3) if 0.1 <= mood < 0.25 else None,
        stops_after=1 + dice.randrange(2) if 0.25 <= mood < stop_share else None,
    )


def _tokens(dice: Dice, count: int) -> tuple[int, ...]:
    return tuple(dice.randrange(900) for _ in range(count))


def _faults(dice: Dice, busy: Sequence[float]) -> tuple[Fault, ...]:
    """Draw faults, most of them a little after the seconds of `busy`, when there is much to hit."""
    faults: list[Fault] = []
    for _ in range(pick(dice, (0, 1, 2, 2, 3, 3, 4, 5))):
        after_s = dice.uniform(0.0, pick(dice, (0.02, 0.1, 0.5, 1.5)))
        at = pick(dice, busy) + after_s
        faults.append(_fault(dice, at))
    return tuple(faults)


def _moves(dice: Dice, busy: float) -> tuple[Fault, ...]:
    """Have a decode worker hand over what it runs, and perhaps die as it does."""
    kind = pick(dice, (FaultKind.DRAIN, FaultKind.TERMINATE, FaultKind.SWITCH))
    worker, at = pick(dice, DECODES), busy + dice.uniform(0.1, 1.2)
    order = Fault(kind, at, dice.uniform(0.5, 3.0), worker, role=Role.PREFILL)
    if dice.random() < 0.5:
        return (order,)
    death_at = at + dice.uniform(0.0, pick(dice, (0.02, 0.3)))
    return order, Fault(FaultKind.KILL, death_at, 0.5, worker, buffered=dice.randrange(4))


_KINDS = (
    *(FaultKind.KILL,) * 3,
    *(FaultKind.FREEZE,) * 3,
    *(FaultKind.PARTITION,) * 2,
    *(FaultKind.RESET,) * 3,
    *(FaultKind.LOSSY,) * 2,
    FaultKind.ETCD_AWAY,
    FaultKind.LEASE_LOST,
    *(FaultKind.DRAIN,) * 2,
    FaultKind.TERMINATE,
    *(FaultKind.SWITCH,) * 2,
)


def _fault(dice: Dice, at: float) -> Fault:
    kind = pick(dice, _KINDS)
    duration = min(dice.uniform(0.05, pick(dice, (0.3, 1.5, 1.5, 4.0))), FAULTS_END_S - at)
    target = pick(dice, (*WORKERS, *ROUTERS))
    worker = pick(dice, WORKERS)
    match kind:
        case FaultKind.KILL:
            buffered = dice.randrange(4)
            return Fault(kind, at, duration, target, buffered=buffered)
        case FaultKind.FREEZE:
            return Fault(kind, at, duration, target, how=pick(dice, tuple(Frozen)))
        case FaultKind.PARTITION | FaultKind.RESET:
            return _between(dice, kind, at, duration)
        case FaultKind.LOSSY:
            return Fault(kind, at, duration)
        case FaultKind.ETCD_AWAY:
            return Fault(kind, at, duration, forgets=dice.random() < 0.5)
        case FaultKind.LEASE_LOST | FaultKind.TERMINATE:
            return Fault(kind, at, target=worker)
        case FaultKind.DRAIN:
            return Fault(kind, at, duration, worker)
        case FaultKind.SWITCH:
            other = Role.DECODE if worker in PREFILLS else Role.PREFILL
            return Fault(kind, at, duration, worker, role=pick(dice, (other, other, Role.BOTH)))


def _between(dice: Dice, kind: FaultKind, at: float, duration: float) -> Fault:
    one, another = pick(dice, (DECODES, DECODES[::-1]))
    other = pick(dice, (*PREFILLS, *PREFILLS, *ROUTERS, another))
    ends = (one, other) if dice.random() < 0.5 else (other, one)
    hits = pick(dice, ((True, True), (True, False), (False, True)))
    return Fault(kind, at, duration, *ends, hits_messages=hits[0], hits_writes=hits[1])
