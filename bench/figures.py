"""One measured figure, what it is held against, and how it is printed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec


class Figure(msgspec.Struct, frozen=True):
    """A line of the table, and of `BENCH {json}`.

    Attributes:
        name: dotted, such as "ttft.512".
        value: what was measured: the median of the samples.
        against: what it is compared with, or empty.
        aim: such as "<= 1.1"; None where there is none.
        holds: whether the aim is met; None without one.
        n: number of samples.
        min, median: of the samples.
    """

    name: str
    value: float
    unit: str
    against: str
    aim: str | None
    holds: bool | None
    n: int
    min: float
    median: float


def figure(
    name: str,
    samples: Sequence[float],
    unit: str,
    *,
    against: str = "",
    at_most: float | None = None,
    at_least: float | None = None,
) -> Figure:
    """Make a figure of its samples, with an aim on one side or none."""
    median = statistics.median(samples)
    aim, holds = None, None
    if at_most is not None:
        aim, holds = f"<= {at_most:g}", median <= at_most
    elif at_least is not None:
        aim, holds = f">= {at_least:g}", median >= at_least
    return Figure(
        name=name,
        value=median,
        unit=unit,
        against=against,
        aim=aim,
        holds=holds,
        n=len(samples),
        min=min(samples),
        median=median,
    )


def bench_line(measured: Figure) -> str:
    """Return the line that programs read."""
    return f"BENCH {msgspec.json.encode(measured).decode()}"


def table(figures: Sequence[Figure]) -> list[str]:
    """Return the lines that people read, in columns."""
    rows = [("FIGURE", "VALUE", "UNIT", "AIM", "HOLDS", "N", "MIN", "AGAINST")]
    rows += [
        (
            measured.name,
            f"{measured.value:.4g}",
            measured.unit,
            measured.aim or "-",
            {True: "yes", False: "NO", None: "-"}[measured.holds],
            str(measured.n),
            f"{measured.min:.4g}",
            measured.against or "-",
        )
        for measured in figures
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
