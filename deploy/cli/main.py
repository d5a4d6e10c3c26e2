"""The entry point of `dovetail`: a user's slip is one line on stderr and exit code 2.

Nothing but the standard library is imported before the platform was checked, so that a wrong
Python or a missing wheel is one clear line, not a traceback.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence

from core.environment import let_grpc_be_quiet, let_threads_sleep, pip_command
from deploy.cli.platform_check import missing_package, unsupported
from deploy.terminal import complain

USAGE_ERROR = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` excludes the program's name."""
    problem = unsupported(sys.version_info[:2], sys.platform, platform.machine())
    if problem is not None:
        complain(problem)
        return USAGE_ERROR
    let_threads_sleep()
    let_grpc_be_quiet()
    try:
        # Imported here: it needs third-party packages and a new Python, which were checked above.
        from deploy.cli.commands import run  # noqa: PLC0415

        return run(sys.argv[1:] if argv is None else argv)
    except ModuleNotFoundError as error:
        advice = missing_package(error.name or "", pip_command())
        if advice is None:
            raise
        complain(advice)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
