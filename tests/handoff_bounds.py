"""How far the model checker looks: `SMALL` in every test run, `LARGE` by `make check-model`.

python -m tests.handoff_bounds            all of LARGE: 5 million steps, 1 GB
python -m tests.handoff_bounds twice      those whose name has "twice" in it
"""

from __future__ import annotations

import sys

from core.clock import SystemClock
from tests.handoff_checker import Bounds, HandoffChecker, ViolationError

FABRIC = ("write fails", "write refused", "notification lost")
STREAMS = ("stream lost", "stream replaced", "suspect")
PROCESSES = ("freeze", "kill")
REFUSALS = ("ask refused", "engine refuses")
TIME = ("slow", "very slow")
FAULTS = (*FABRIC, *STREAMS, *PROCESSES, *REFUSALS, *TIME)

SMALL = (
    Bounds("any fault and an abort, two writes", ("abort", *FAULTS)),
    Bounds("any fault, two prefill workers", FAULTS, num_prefills=2, chunk_tokens=8),
    Bounds(
        "any fault and an abort, no local prefill",
        ("abort", *FAULTS),
        num_tokens=4,
        allow_local=False,
    ),
    Bounds("the first token ends it", ("abort", *FAULTS), ends=(True,), chunk_tokens=8),
    Bounds("samples are aborted", ("abort", "abort a sample"), max_aborts=2, ends=(False, True)),
    Bounds(
        "samples are aborted under faults",
        ("abort a sample", "stream lost", "write fails", "very slow"),
        max_aborts=2,
        ends=(True, False),
        chunk_tokens=8,
    ),
    Bounds(
        "no room for fresh blocks, one is a hit",
        ("write fails", "slow", "very slow", "freeze"),
        num_tokens=9,
        num_blocks=3,
        num_cached=1,
    ),
    Bounds("time runs out", ("abort", *TIME), num_tokens=4, max_faults=2, deadline_s=5.0),
)

LARGE = (
    *SMALL,
    Bounds("any fault twice and an abort", ("abort", *FAULTS), max_faults=2, num_tokens=4),
    Bounds("streams and writes twice", (*STREAMS, *FABRIC), max_faults=2, chunk_tokens=8),
    Bounds("two writes, two prefill workers", ("abort", *FAULTS), num_prefills=2),
    Bounds(
        "no room for fresh blocks, two prefill workers",
        FAULTS,
        num_blocks=3,
        num_prefills=2,
        chunk_tokens=8,
    ),
    Bounds(
        "two samples, two prefill workers",
        ("abort a sample", *FAULTS),
        max_aborts=2,
        num_tokens=4,
        ends=(False, True),
        num_prefills=2,
    ),
)


def main(words: list[str]) -> int:
    """Check the bounds whose names have all of `words` in them; print the reach of each.

    Returns:
        The exit code: 1 where a violation was found, 2 where no bounds are named so.
    """
    chosen = [bounds for bounds in LARGE if all(word in bounds.name for word in words)]
    if not chosen:
        names = "".join(f"\n  {bounds.name}" for bounds in LARGE)
        sys.stderr.write(f"no bounds are named {' '.join(words)!r}; there are{names}\n")
        return 2
    clock = SystemClock()
    for bounds in chosen:
        started = clock.now()
        try:
            reach = HandoffChecker(bounds).run()
        except ViolationError as violation:
            sys.stdout.write(f"{bounds.name}: {violation}\n")
            return 1
        sys.stdout.write(f"{reach}, {clock.now() - started:.0f} s\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
