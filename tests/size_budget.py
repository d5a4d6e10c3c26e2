"""Fails when a file or a function outgrows its budget: `python -m tests.size_budget`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

FILE_LINES = 500
FUNCTION_LINES = 60

FOLDERS = (
    "core",
    "engine",
    "kv_transfer",
    "control_plane",
    "router",
    "prefill_pool",
    "decode_pool",
    "planner",
    "deploy",
    "bench",
    "tests",
)

_GENERATED = "_pb2"


def breaches(root: Path, folders: Sequence[str] = FOLDERS) -> list[str]:
    """Return one line per file or function that is too long, with its length and its budget.

    Generated code (`*_pb2*.py`) is nobody's to shorten.
    """
    found: list[str] = []
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            if _GENERATED not in path.name:
                found += _of_file(path.read_text(encoding="utf-8"), str(path.relative_to(root)))
    return found


def _of_file(text: str, name: str) -> Iterator[str]:
    length = len(text.splitlines())
    if length > FILE_LINES:
        yield f"{name}: {length} lines, at most {FILE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        assert node.end_lineno is not None
        length = node.end_lineno - node.lineno + 1
        if length > FUNCTION_LINES:
            yield f"{name}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}"


def main() -> int:
    """Print the breaches of this checkout.

    Returns:
        Exit code: 1 where there are any.
    """
    found = breaches(Path(__file__).parents[1])
    for line in found:
        sys.stderr.write(f"{line}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
