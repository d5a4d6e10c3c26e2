"""`make soak`: ten minutes of load and churn; what lives through them does not grow.

Clients come and leave; one prefill and one decode worker are killed, drained and started again over
and over, others are frozen, switch roles, and lose their leases. Two workers and two routers live
from beginning to end: their memory, open files and threads are compared between the first quarter
after a warm-up and the last, and so are etcd's keys and the size of its data.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import psutil

from core.clock import Clock, SystemClock
from core.environment import let_threads_sleep
from core.worker_record import Role
from tests.chaos_cluster import STEADY, ChaosCluster
from tests.chaos_judge import Kind
from tests.chaos_load import Load
from tests.chaos_run import drawn, warm_up
from tests.etcd_server import EtcdServer

RATE_HZ = 15.0
_SAMPLE_S = 5.0
_CHURN_S = 6.0
_LIVING = ("prefill-0", "decode-0", "router-0", "router-1")
_CHURNED = ("prefill-1", "decode-1")

_MAY_GROW = {"MiB": 0.03, "files": 0.0, "threads": 0.0, "etcd keys": 0.0, "etcd MiB": 0.0}
"""By what share, beside `_SLACK`; memory that leaks with requests grows by more."""
_SLACK = {"MiB": 3.0, "files": 4.0, "threads": 8.0, "etcd keys": 4.0, "etcd MiB": 1.0}

_COMPACTING = {"auto-compaction-mode": "periodic", "auto-compaction-retention": "1m"}
"""As `dovetail up` has it, for a shorter time: only history that is kept may look like growth."""

Sample = Mapping[str, float]
"""Sizes by "what of whom"."""


class Sizes:
    """Samples of what must not grow."""

    def __init__(self, cluster: ChaosCluster) -> None:
        self._cluster = cluster
        self.samples: list[Sample] = []

    def take(self) -> None:
        """Add a sample; etcd must answer."""
        sample: dict[str, float] = {}
        for name in _LIVING:
            process = psutil.Process(self._cluster.pid(name))
            sample[f"MiB of {name}"] = process.memory_info().rss / (1 << 20)
            sample[f"files of {name}"] = process.num_fds()
            sample[f"threads of {name}"] = process.num_threads()
        ctl = self._cluster.etcd.ctl
        sample["etcd keys"] = len(ctl("get", "--prefix", "--keys-only", "/dovetail/").split())
        (status,) = json.loads(ctl("endpoint", "status", "--write-out=json"))
        sample["etcd MiB"] = status["Status"]["dbSizeInUse"] / (1 << 20)
        self.samples.append(sample)

    def growth(self) -> dict[str, tuple[float, float]]:
        """Return each size's median in the first quarter after the warm-up (a quarter, too), and in
        the last."""
        quarter = max(1, len(self.samples) // 4)
        early, late = self.samples[quarter : 2 * quarter], self.samples[-quarter:]
        return {
            what: (median(one[what] for one in early), median(one[what] for one in late))
            for what in self.samples[0]
        }


def grown(growth: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return what has grown by more than it may."""
    found: list[str] = []
    for what, (early, late) in growth.items():
        kind = what.partition(" of ")[0]
        if late > early * (1 + _MAY_GROW[kind]) + _SLACK[kind]:
            found.append(f"{what}: {early:.1f}, then {late:.1f}")
    return found


async def churn(cluster: ChaosCluster, dice: random.Random, is_over: asyncio.Event) -> int:
    """Have workers come and go until it is over; return how often something was done."""
    count = 0
    while not is_over.is_set():
        await _befall(cluster, dice, dice.choice(_CHURNED))
        count += 1
        await asyncio.sleep(dice.uniform(0.3, 1.0) * _CHURN_S)
    return count


async def _befall(cluster: ChaosCluster, dice: random.Random, worker: str) -> None:
    router = dice.choice(cluster.shape.routers)
    what = dice.choice(("kill", "drain", "switch", "freeze", "revoke"))
    if what in ("kill", "drain"):
        if what == "kill":
            cluster.kill(worker)
        else:
            await asyncio.to_thread(cluster.order, router, "drain", {"worker": worker})
            await asyncio.to_thread(cluster.wait_left, worker)
        cluster.start(worker)
        await asyncio.to_thread(cluster.wait_ready, worker)
    elif what == "switch":
        own = Role(worker.partition("-")[0])
        for role in (Role.BOTH, own):
            order = {"worker": worker, "role": role.value}
            await asyncio.to_thread(cluster.order, router, "role", order)
            await asyncio.to_thread(cluster.wait_known, router, worker, role)
    elif what == "freeze":
        cluster.freeze(worker)
        await asyncio.sleep(dice.uniform(0.5, 4.0))
        cluster.thaw(worker)
    else:
        listed = await asyncio.to_thread(cluster.etcd.ctl, "lease", "list")
        _, *leases = listed.splitlines()
        if leases:
            await asyncio.to_thread(cluster.etcd.ctl, "lease", "revoke", dice.choice(leases))
    for name in cluster.shape.routers:
        await asyncio.to_thread(cluster.wait_known, name, worker)


async def soak(cluster: ChaosCluster, minutes: float, clock: Clock) -> tuple[Load, Sizes, int]:
    """Load the cluster for so long; return what came of it."""
    load, sizes = Load(cluster, [], lambda: cluster.shape.routers, clock), Sizes(cluster)
    requests = drawn(1, int(RATE_HZ * 60 * minutes))
    is_over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        churning = group.create_task(churn(cluster, random.Random("churn"), is_over))
        sampling = group.create_task(_sample(sizes))
        await load.send(requests, RATE_HZ)
        is_over.set()
        count = await churning
        sampling.cancel()
    return load, sizes, count


async def _sample(sizes: Sizes) -> None:
    while True:
        await asyncio.sleep(_SAMPLE_S)
        await asyncio.to_thread(sizes.take)


def main(argv: Sequence[str] | None = None) -> int:
    """Soak; exit code 1 where anything grew, or an answer was not right."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="default 10")
    minutes = parser.parse_args(argv).minutes
    let_threads_sleep()
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        place = Path(directory)
        with (
            EtcdServer(place, flags=_COMPACTING) as etcd,
            ChaosCluster(place, etcd, STEADY) as cluster,
        ):
            warm_up(cluster, drawn(0, 100))
            load, sizes, num_churned = asyncio.run(soak(cluster, minutes, SystemClock()))
            cluster.wait_live()
            leaks, complaints = cluster.leaks(), cluster.complaints()
    faults = [fault for outcome in load.outcomes for fault in outcome.faults()]
    growth = sizes.growth()
    wrong = [*(f"{one.kind}: {one.text}" for one in faults), *grown(growth), *leaks, *complaints]
    sys.stderr.writelines(f"{line}\n" for line in wrong)
    figures = {
        "minutes": minutes,
        "requests": len(load.outcomes),
        "left": sum(outcome.answered.has_left for outcome in load.outcomes),
        "churned": num_churned,
        **{kind.value: sum(one.kind is kind for one in faults) for kind in Kind},
        "leaked": len(leaks),
        "grown": len(grown(growth)),
        "sizes": {what: [round(one, 1) for one in pair] for what, pair in growth.items()},
    }
    sys.stdout.write(f"SOAK {json.dumps(figures)}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
