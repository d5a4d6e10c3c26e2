"""`make chaos`: a cluster under load and every fault of the table; of no answer anything is lost,
wrong or repeated, and nothing of any request is left. One `CHAOS {json}` line a seed.

Every fifth seed freezes etcd for a minute at a time. A seed fixes the requests, who leaves when,
and who is hit by what, though not what the machine makes of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from core.clock import Clock, SystemClock
from core.environment import let_threads_sleep
from tests.chaos_cluster import MODEL, STEADY, ChaosCluster
from tests.chaos_faults import OUTAGE_TABLE, TABLE, Entry, Strikes
from tests.chaos_judge import Kind
from tests.chaos_load import Load, Outcome, extra_latency_s
from tests.chaos_model import draw_for_model, with_known_answers
from tests.chaos_requests import Drawing, Request
from tests.etcd_server import EtcdServer

SECONDS_BETWEEN_FAULTS = 3.0


class Plan(NamedTuple):
    """What one run does.

    Attributes:
        rate_hz: requests a second; inf: all at once.
        every_s: seconds between faults, from and to.
    """

    seed: int
    rate_hz: float = float("inf")
    every_s: tuple[float, float] = (SECONDS_BETWEEN_FAULTS, SECONDS_BETWEEN_FAULTS)
    table: Sequence[Entry] = TABLE


class Report(NamedTuple):
    """What a run found.

    Attributes:
        found: what is wrong, each with the request that shows it.
        leaks: what is left of requests that are over.
        complaints: errors in logs, and processes that ended badly.
    """

    seed: int
    seconds: float
    outcomes: Sequence[Outcome]
    found: dict[str, list[str]]
    leaks: list[str]
    complaints: list[str]
    faults: Counter[str]
    num_touched: int
    extra_latency_s: float

    @property
    def is_clean(self) -> bool:
        """Whether nothing at all is wrong."""
        return not (any(self.found.values()) or self.leaks or self.complaints)

    @property
    def num_left(self) -> int:
        """Clients that went away before the end."""
        return sum(outcome.answered.has_left for outcome in self.outcomes)

    def line(self) -> str:
        """Return the figures."""
        figures: dict[str, Any] = {
            "seed": self.seed,
            "requests": len(self.outcomes),
            **{kind: len(found) for kind, found in self.found.items()},
            "leaked": len(self.leaks),
            "complaints": len(self.complaints),
            "faults": dict(sorted(self.faults.items())),
            "left": self.num_left,
            "retried": sum(bool(outcome.broken) for outcome in self.outcomes),
            "touched": self.num_touched,
            "extra_latency_s": round(self.extra_latency_s, 3),
            "seconds": round(self.seconds, 1),
        }
        return f"CHAOS {json.dumps(figures)}"

    def details(self) -> list[str]:
        """Return a line for each thing that is wrong."""
        found = [f"{kind}: {text}" for kind, texts in self.found.items() for text in texts]
        return [*found, *(f"leaked: {one}" for one in self.leaks), *self.complaints]


def run(cluster: ChaosCluster, requests: Sequence[Request], plan: Plan, clock: Clock) -> Report:
    """Send the requests under strikes, wait until all is calm, and judge."""
    # Worked out now: there is no processor to spare while they run.
    assert all(request.expected for request in requests)
    started = clock.now()
    dice = random.Random(f"strikes of {plan.seed}")
    strikes = Strikes(cluster, dice, clock, table=plan.table, every_s=plan.every_s)
    load = Load(cluster, strikes.done, strikes.routers, clock)
    asyncio.run(_send_under(strikes, load, requests, plan.rate_hz))
    found: dict[str, list[str]] = {kind.value: [] for kind in Kind}
    for outcome in load.outcomes:
        for fault in outcome.faults():
            found[fault.kind].append(f"{outcome.name} at {outcome.routers}: {fault.text}")
    cluster.wait_live()
    dispatches = cluster.dispatches()
    num_touched, extra_s = extra_latency_s(load.outcomes, strikes.done, dispatches)
    return Report(
        seed=plan.seed,
        seconds=clock.now() - started,
        outcomes=load.outcomes,
        found=found,
        leaks=cluster.leaks(),
        complaints=cluster.complaints(),
        faults=strikes.counts,
        num_touched=num_touched,
        extra_latency_s=extra_s,
    )


async def _send_under(
    strikes: Strikes, load: Load, requests: Sequence[Request], rate_hz: float
) -> None:
    """Send all, under strikes until the last is answered; return once all processes run."""
    are_over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(strikes.run(are_over))
        try:
            await load.send(requests, rate_hz)
        finally:
            are_over.set()


def drawn(seed: int, count: int) -> list[Request]:
    """Return a seed's requests to the mock."""
    drawing = Drawing(seed)
    return [drawing.draw() for _ in range(count)]


def warm_up(cluster: ChaosCluster, requests: Sequence[Request]) -> list[Outcome]:
    """Send requests undisturbed, so that everyone is connected with everyone, and begin to count:
    what was opened for that stays open."""
    load = Load(cluster, [], lambda: cluster.shape.routers, SystemClock())
    asyncio.run(load.send(requests))
    assert cluster.leaks() == []
    cluster.begin()
    return load.outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """Run seeds, each on a cluster of its own; exit code 1 where anything is wrong."""
    arguments = _parser().parse_args(argv)
    let_threads_sleep()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    clean = [_run_seed(seed, arguments) for seed in seeds]  # the others, too, after a bad one
    return 0 if all(clean) else 1


def _run_seed(seed: int, arguments: argparse.Namespace) -> bool:
    count = arguments.requests or (100 if arguments.model else 2000)
    rate_hz = arguments.rate or (3.0 if arguments.model else 20.0)
    plan = Plan(seed, rate_hz, table=TABLE if seed % 5 else OUTAGE_TABLE)
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        place = Path(directory)
        shape = MODEL if arguments.model else STEADY
        with EtcdServer(place) as etcd, ChaosCluster(place, etcd, shape) as cluster:
            if arguments.model:
                requests = draw_for_model(seed, count)
                requests = with_known_answers(seed, requests, warm_up(cluster, requests))
            else:
                requests = drawn(seed, count)
                warm_up(cluster, drawn(0, 100))
            report = run(cluster, requests, plan, SystemClock())
    sys.stderr.writelines(f"{line}\n" for line in report.details())
    sys.stdout.write(f"{report.line()}\n")
    sys.stdout.flush()
    return report.is_clean


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="how many (default 10)")
    parser.add_argument("--first", type=int, default=1, help="the first of them (default 1)")
    parser.add_argument("--requests", type=int, default=0, help="default 2000; the model: 100")
    parser.add_argument("--rate", type=float, default=0.0, help="a second: 20; the model: 3")
    parser.add_argument("--model", action="store_true", help="the real model, not mock workers")
    return parser


if __name__ == "__main__":
    sys.exit(main())
