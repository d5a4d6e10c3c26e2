"""The seeded simulation of the handoff: no seed shows a violation, and a seed names one run."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.clock import SystemClock
from planner.protocol.__main__ import main, run_seed

NUM_SEEDS = 2000
NUM_PARTS = 8


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What the cluster says of its faults is not news here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_no_seed_violates_an_invariant(part: int) -> None:
    for seed in range(part, NUM_SEEDS, NUM_PARTS):
        outcome = run_seed(seed)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"
        assert sum(outcome.endings.values()) == len(outcome.scenario.requests)


def test_equal_seeds_give_equal_events_and_others_do_not() -> None:
    digests = [run_seed(seed).digest for seed in range(20)]
    assert digests == [run_seed(seed).digest for seed in range(20)]
    assert len(set(digests)) == len(digests)


def test_the_events_do_not_depend_on_the_process() -> None:
    """Sets and dicts of texts have another order in every process."""
    command = [sys.executable, "-m", "planner.protocol", "--digests", "--seeds", "25"]
    outputs = [
        subprocess.run(
            command,
            env={"PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert len(outputs[0].splitlines()) == 25
    assert outputs[0] == outputs[1]


def test_the_command_says_how_much_it_ran() -> None:
    out = io.StringIO()
    assert main(["--seeds", "3", "--first", "5"], out, SystemClock()) == 0
    assert out.getvalue().startswith("3 seeds, ")
    assert "0 violations" in out.getvalue()


@pytest.mark.parametrize("text", ["0", "-1"])
def test_the_command_refuses_a_number_of_seeds_that_runs_none(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--seeds", text], io.StringIO(), SystemClock())
    assert ended.value.code == 2
    assert f"--seeds: {text}: must be greater than 0" in capsys.readouterr().err
