"""What every test shares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from core.environment import let_threads_sleep
from tests.figures import LINES, Figures

let_threads_sleep()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Know what `tests/fault/test_chaos.py` is asked for on the command line."""
    parser.addoption("--chaos-seeds", default="1-5", help="seeds of test_chaos.py: FIRST-LAST")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Coroutine tests run on asyncio, as the product does; a module may share one loop."""
    return "asyncio"


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> Figures:
    """Show lines at the end of the run: `figures("largest difference 1e-4")`."""
    shown = pytestconfig.stash.setdefault(LINES, [])

    def show(*lines: str) -> None:
        shown.extend(lines)

    return show


@pytest.fixture
def untraced() -> Iterator[None]:
    """Keep coverage.py from watching a test that runs the same lines a thousand times: it would
    take three times as long. Others must reach these lines."""
    tracer = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(tracer)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand what `figures` collected to the process that reports, where this is not it."""
    output: dict[str, object] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["figures"] = session.config.stash.get(LINES, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take a test process's figures (pytest-xdist's hook; a process that crashed has none)."""
    lines = getattr(node, "workeroutput", {}).get("figures", [])
    node.config.stash.setdefault(LINES, []).extend(lines)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Show what `figures` collected."""
    lines = config.stash.get(LINES, [])
    if lines:
        terminalreporter.section("figures")
    for line in lines:
        terminalreporter.write_line(line)
