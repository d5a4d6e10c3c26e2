"""The clients of a chaos run: requests at a steady rate, or all at once, to all routers in turn.

A client whose router is ended in the midst of an answer sees its connection break, and sends its
request again to another, as HTTP clients do; likewise one that insists on a prefill worker, and is
told by an error that there is none, while all of them are struck. Any other trouble is the
cluster's fault.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from statistics import median

from core.clock import Clock
from tests.chaos_client import Answered, ask
from tests.chaos_cluster import ChaosCluster
from tests.chaos_faults import Strike
from tests.chaos_judge import Fault, judge
from tests.chaos_requests import Request

_RETRY_S = 0.5
_MAX_TRIES = 100

_OUR_FAULT = 500
"""Never right, whoever is struck meanwhile."""


@dataclass
class Outcome:
    """What came of one request.

    Attributes:
        name: its `x-request-id`.
        broken: what came of the tries before the last.
        answered: what came on the last one.
        routers: whom it was sent to.
    """

    name: str
    request: Request
    began: float
    ended: float = 0.0
    broken: list[Answered] = field(default_factory=list[Answered])
    answered: Answered = field(default_factory=Answered)
    routers: list[str] = field(default_factory=list[str])

    def faults(self) -> list[Fault]:
        """Return what is wrong with it, the first of each answer."""
        # What came before a connection broke must be right, too.
        answers = (*(replace(one, has_left=True) for one in self.broken), self.answered)
        return [fault for answered in answers for fault in judge(self.request, answered)[:1]]

    def is_touched_by(self, strike: Strike, workers: Iterable[str]) -> bool:
        """Whether a strike hit who had it; the workers are those that it was sent to."""
        path = self.answered.path
        prefill = path.get("prefill_worker")
        through = {*self.routers, *workers, *([prefill] if prefill else [])}
        was_retried = path.get("attempt", 1) > 1 or path.get("decision") == "fallback"
        is_prefill = was_retried and strike.victim.startswith("prefill")
        return (strike.victim in through or is_prefill) and strike.overlaps(self.began, self.ended)


class Load:
    """Sends requests, and keeps what comes of each.

    Attributes:
        outcomes: in the order sent.

    Args:
        cluster: whom to send to.
        strikes: what befell whom so far; grows.
        routers: returns those that a load balancer would send to.
    """

    def __init__(
        self,
        cluster: ChaosCluster,
        strikes: Sequence[Strike],
        routers: Callable[[], Sequence[str]],
        clock: Clock,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._ports = cluster.ports
        self._prefills = cluster.shape.prefills
        self._strikes = strikes
        self._routers = routers
        self._clock = clock
        self._turn = itertools.count()

    async def send(self, requests: Sequence[Request], rate_hz: float = float("inf")) -> None:
        """Send so many a second, and return once the last is answered."""
        started = self._clock.now()
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(requests):
                await asyncio.sleep(max(0.0, started + number / rate_hz - self._clock.now()))
                name = f"chaos-{len(self.outcomes)}"
                outcome = Outcome(name, request, self._clock.now())
                self.outcomes.append(outcome)
                group.create_task(self._follow(outcome), name=name)

    async def _follow(self, outcome: Outcome) -> None:
        """Send one request, and again where that is its client's part."""
        for _ in range(_MAX_TRIES):
            router = self._choose(outcome)
            began = self._clock.now()
            outcome.routers.append(router)
            outcome.answered = await ask(self._ports[router], outcome.request, outcome.name)
            outcome.ended = self._clock.now()
            struck = {one for one in self._strikes if one.overlaps(began, outcome.ended)}
            if not self._must_try_again(outcome, router, struck):
                return
            outcome.broken.append(outcome.answered)
            await asyncio.sleep(_RETRY_S)

    def _choose(self, outcome: Outcome) -> str:
        """Return the next router in turn; not the one that just failed, where there is another."""
        last = outcome.routers[-1] if outcome.routers else None
        routers = self._routers()
        others = [name for name in routers if name != last] or routers
        return others[next(self._turn) % len(others)]

    def _must_try_again(self, outcome: Outcome, router: str, struck: Set[Strike]) -> bool:
        answered = outcome.answered
        is_whole = answered.has_left or (answered.num_ends and not answered.error)
        if is_whole and answered.status in (None, 200):
            return False
        if answered.status == _OUR_FAULT:
            return False
        if any(one.victim == router and one.ends_connections for one in struck):
            return True
        insists = outcome.request.disaggregate == "always"
        has_none = "no prefill worker" in answered.error
        return insists and has_none and {one.victim for one in struck} >= set(self._prefills)


def extra_latency_s(
    outcomes: Sequence[Outcome], strikes: Sequence[Strike], dispatches: dict[str, set[str]]
) -> tuple[int, float]:
    """Return how many requests a strike touched, and how much longer they took, in the median.

    Each is compared with the median of the untouched ones of about as many tokens. Clients that
    left tell nothing; nor do strikes on etcd, which no request passes through.
    """
    touched: list[Outcome] = []
    calm_by_size: dict[int, list[float]] = {}
    for outcome in outcomes:
        if outcome.answered.has_left:
            continue
        workers = dispatches.get(outcome.name, set())
        if any(outcome.is_touched_by(strike, workers) for strike in strikes):
            touched.append(outcome)
        else:
            calm_by_size.setdefault(_size(outcome), []).append(outcome.ended - outcome.began)
    extra = [
        outcome.ended - outcome.began - median(calm_by_size[_size(outcome)])
        for outcome in touched
        if _size(outcome) in calm_by_size
    ]
    return len(touched), median(extra) if extra else 0.0


def _size(outcome: Outcome) -> int:
    return max((len(one.token_ids) for one in outcome.request.expected), default=0) // 10
