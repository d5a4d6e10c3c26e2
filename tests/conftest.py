"""What every test shares."""

from __future__ import annotations

import pytest

from core.environment import let_threads_sleep
from tests.figures import LINES, Figures

let_threads_sleep()


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


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Show what `figures` collected."""
    lines = config.stash.get(LINES, [])
    if lines:
        terminalreporter.section("figures")
    for line in lines:
        terminalreporter.write_line(line)
