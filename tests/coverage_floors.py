"""Fails where the tests reach too little: `python -m tests.coverage_floors coverage.json`.

Covered is what coverage.py counts with branches on: executed lines and taken branches, of all.
Modules that decide must be covered whole: bugs there are interleavings, which nobody sees by use.
Which modules those are stands in `.importlinter`, once.
"""

from __future__ import annotations

import configparser
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

PACKAGE_FLOOR = 0.90
"""Of what a package has beside its pure modules."""

FILE_FLOOR = 0.75

_SHOWN = 12


class Summary(msgspec.Struct):
    """coverage.py's counts of one file."""

    num_statements: int
    covered_lines: int
    num_branches: int
    covered_branches: int


class File(msgspec.Struct):
    """coverage.py's words about one file.

    Attributes:
        missing_branches: pairs (from line, to line); a negative line is a way out of a function.
    """

    summary: Summary
    missing_lines: list[int]
    missing_branches: list[tuple[int, int]]


class Report(msgspec.Struct):
    """What `coverage json` writes.

    Attributes:
        files: by path, relative to the root of the checkout.
    """

    files: dict[str, File]


def pure_modules(importlinter: str) -> frozenset[str]:
    """Return the modules, and packages of modules, that the contract `pure` names.

    Args:
        importlinter: the text of `.importlinter`.
    """
    contracts = configparser.ConfigParser()
    contracts.read_string(importlinter)
    return frozenset(contracts["importlinter:contract:pure"]["source_modules"].split())


def breaches(report: Report, pure: frozenset[str]) -> list[str]:
    """Return one line per floor that is not reached.

    Args:
        pure: modules, or packages of modules, that must be covered whole.
    """
    found: list[str] = []
    seen: set[str] = set()
    others: dict[str, list[Summary]] = defaultdict(list)
    for path, file in sorted(report.files.items()):
        names = pure & set(_module_and_parents(path))
        seen |= names
        if not names:
            others[path.split("/")[0]].append(file.summary)
        found += _of_file(path, file, 1.0 if names else FILE_FLOOR)
    found += _of_packages(others)
    found += [f"{name}: pure by .importlinter, and not measured" for name in sorted(pure - seen)]
    return found


def _module_and_parents(path: str) -> Iterator[str]:
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    for length in range(1, len(parts) + 1):
        yield ".".join(parts[:length])


def _of_file(path: str, file: File, floor: float) -> Iterator[str]:
    share = _share([file.summary])
    if share < floor:
        yield f"{path}: {_percent(share)} covered, at least {floor:.0%}: {_missing(file)}"


def _of_packages(summaries_by_package: Mapping[str, Sequence[Summary]]) -> Iterator[str]:
    for package, summaries in sorted(summaries_by_package.items()):
        share = _share(summaries)
        if share < PACKAGE_FLOOR:
            yield f"{package}: {_percent(share)} covered, at least {PACKAGE_FLOOR:.0%}"


def _share(summaries: Sequence[Summary]) -> float:
    everything = sum(one.num_statements + one.num_branches for one in summaries)
    covered = sum(one.covered_lines + one.covered_branches for one in summaries)
    return covered / everything if everything else 1.0


def _percent(share: float) -> str:
    """Round down: 99.97% is not 100%."""
    return f"{int(share * 1000) / 10:.1f}%"


def _missing(file: File) -> str:
    jumps = [f"{start}->{end}" for start, end in file.missing_branches]
    missing = [*(str(line) for line in file.missing_lines), *jumps]
    shown = ", ".join(missing[:_SHOWN])
    return shown if len(missing) <= _SHOWN else f"{shown} and {len(missing) - _SHOWN} more"


def main(arguments: Sequence[str]) -> int:
    """Print the breaches of a report, given as the only argument.

    Returns:
        Exit code: 1 where there are any.
    """
    (path,) = arguments
    report = msgspec.json.decode(Path(path).read_bytes(), type=Report)
    importlinter = Path(__file__).parents[1] / ".importlinter"
    found = breaches(report, pure_modules(importlinter.read_text(encoding="utf-8")))
    for line in found:
        sys.stderr.write(f"{line}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
