"""`python -m bench [NAME...]`: runs the named benchmarks, or all."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator

from bench import (
    accuracy,
    engine,
    gemm,
    handoff,
    prefix_index,
    receiving,
    router,
    shared_core,
    start,
    step_share,
    system,
    ttft,
)
from bench.figures import Figure, bench_line, table
from core.environment import let_threads_sleep

BENCHES: dict[str, Callable[[], Iterator[Figure]]] = {
    "accuracy": accuracy.run,
    "engine": engine.run,
    "gemm": gemm.run,
    "handoff": handoff.run,
    "prefix_index": prefix_index.run,
    "receiving": receiving.run,
    "router": router.run,
    "shared_core": shared_core.run,
    "start": start.run,
    "step_share": step_share.run,
    "system": system.run,
    "ttft": ttft.run,
}


def main() -> int:
    """Run, print each figure's line as it is known, then the table."""
    let_threads_sleep()
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if an aim is missed")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHES]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHES)}")
    figures: list[Figure] = []
    for name in arguments.names or BENCHES:
        for measured in BENCHES[name]():
            figures.append(measured)
            _say(bench_line(measured))
    for line in table(figures):
        _say(line)
    missed = any(measured.holds is False for measured in figures)
    return 1 if missed and arguments.strict else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
