"""How the workers of one machine share its cores. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from core.errors import UsageError


class CpuShare(msgspec.Struct, frozen=True):
    """One worker's part.

    Attributes:
        threads: arithmetic threads, at least 1.
        cpus: cores that it is pinned to; empty: not pinned, since there are too few for all.
    """

    threads: int
    cpus: tuple[int, ...]


def share_cpus(cpus: Sequence[int], num_workers: int, threads: int = 0) -> list[CpuShare]:
    """Divide cores evenly into disjoint runs of neighbours.

    Args:
        cpus: cores that this process may use.
        num_workers: at least 1.
        threads: arithmetic threads a worker; 0: as many as its even share of the cores.
    """
    even = len(cpus) // num_workers
    wanted = threads or max(1, even)
    if wanted > even:
        return [CpuShare(threads=wanted, cpus=()) for _ in range(num_workers)]
    # Left-over cores stay with the router and etcd.
    starts = range(0, num_workers * even, even)
    return [CpuShare(threads=wanted, cpus=tuple(cpus[start : start + wanted])) for start in starts]


def parse_cpus(text: str) -> frozenset[int]:
    """Read a list of cores as Linux writes it: `0,2,4-7`.

    Raises:
        UsageError: not such a list.
    """
    cpus: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            msg = f"--cpus {text!r}: must be numbers and ranges of cores, such as 0,2,4-7"
            raise UsageError(msg)
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
