"""`python -m planner.protocol --seeds 20000 [--first N]`: looks for violations.

A seed that shows one is shrunk and told: the invariant, the fewest faults and requests, and the
last events. Exit code 1 where any was found.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TextIO

from core.clock import Clock, SystemClock
from planner.protocol.scenario import scenario_of
from planner.protocol.shrink import run, shrink
from planner.protocol.simulation import Outcome

_PROGRESS_S = 10.0
_MAX_FOUND = 5


def main(arguments: Sequence[str], out: TextIO, clock: Clock) -> int:
    """Run seeds; return the exit code."""
    options = _parser().parse_args(arguments)
    logging.disable(logging.CRITICAL)  # what the cluster says of its faults is not news here
    seeds = range(options.first, options.first + options.seeds)
    if options.digests:
        for seed in seeds:
            print(seed, run_seed(seed).digest, file=out)
        return 0
    found = _run_all(seeds, out, clock)
    for outcome in found:
        _tell(shrink(outcome, random.Random), out)
    return 1 if found else 0


def run_seed(seed: int) -> Outcome:
    """Draw a seed's scenario and run it."""
    dice = random.Random(seed)  # noqa: S311 - a simulation's dice, which no secret depends on
    return run(scenario_of(seed, dice), random.Random)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m planner.protocol",
        description="Simulates clusters under random faults and checks the handoff's invariants.",
    )
    parser.add_argument("--seeds", type=_positive, default=1000, help="how many (1000)")
    parser.add_argument(
        "--digests", action="store_true", help="print the hash of each seed's events"
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number <= 0:
        msg = f"{text}: must be greater than 0"
        raise argparse.ArgumentTypeError(msg)
    return number


def _run_all(seeds: Iterable[int], out: TextIO, clock: Clock) -> list[Outcome]:
    """Run seeds until some violations were found, with a line of progress now and then."""
    found: list[Outcome] = []
    endings: Counter[str] = Counter()
    started = told = clock.now()
    num_run = num_events = 0
    for seed in seeds:
        outcome = run_seed(seed)
        num_run += 1
        num_events += outcome.num_events
        endings.update({ending.value: count for ending, count in outcome.endings.items()})
        if outcome.violation is not None:
            found.append(outcome)
            violation = outcome.violation
            print(f"seed {seed}: {violation.invariant}: {violation.text}", file=out, flush=True)
        if len(found) == _MAX_FOUND:
            break
        if clock.now() - told >= _PROGRESS_S:
            told = clock.now()
            print(f"{num_run} seeds, {len(found)} violations", file=out, flush=True)
    seconds = clock.now() - started
    requests = ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items()))
    rate = num_run / max(seconds, 1e-9)
    print(
        f"{num_run} seeds, {num_events} events, {len(found)} violations; requests: {requests}; "
        f"{rate:.1f} seeds/s",
        file=out,
    )
    return found


def _tell(outcome: Outcome, out: TextIO) -> None:
    violation, scenario = outcome.violation, outcome.scenario
    assert violation is not None
    print(f"\nseed {scenario.seed}: {violation.invariant}: {violation.text}", file=out)
    for request in scenario.requests:
        print(f"  {request}", file=out)
    for fault in scenario.faults:
        print(f"  {fault}", file=out)
    for line in outcome.tail:
        print(f"  {line}", file=out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdout, SystemClock()))
