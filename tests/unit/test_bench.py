"""The benchmarks' arithmetic and format; the benchmarks themselves are no tests."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from bench.figures import bench_line, figure, table
from bench.interleave import interleave, ratios


def test_a_figure_is_the_median_and_says_whether_its_aim_holds() -> None:
    below = figure("ttft.512", [1.2, 1.0, 1.05], "ratio", against="colocated", at_most=1.1)
    assert (below.value, below.min, below.n, below.aim, below.holds) == (
        1.05,
        1.0,
        3,
        "<= 1.1",
        True,
    )
    assert figure("x", [1.2], "ratio", at_most=1.1).holds is False
    assert figure("x", [0.7], "ratio", at_least=0.6).holds is True
    assert figure("x", [0.5], "ratio", at_least=0.6).holds is False
    assert figure("x", [0.5], "ms").holds is None


def test_the_line_is_json_with_every_field() -> None:
    line = bench_line(figure("ttft.64", [2.0, 4.0], "ms", against="itself"))
    word, _, document = line.partition(" ")
    assert word == "BENCH"
    assert msgspec.json.decode(document) == {
        "name": "ttft.64",
        "value": 3.0,
        "unit": "ms",
        "against": "itself",
        "aim": None,
        "holds": None,
        "n": 2,
        "min": 2.0,
        "median": 3.0,
    }


def test_the_table_shows_a_missed_aim() -> None:
    lines = table([figure("a", [2.0], "ratio", at_most=1.1), figure("b", [1.0], "ms")])
    assert [line.split()[0] for line in lines] == ["FIGURE", "a", "b"]
    assert "NO" in lines[1]
    assert (
        len({line.index(word) for line, word in zip(lines, ("VALUE", "2", "1"), strict=True)}) == 1
    )


def test_contenders_take_turns_and_the_warm_up_does_not_count() -> None:
    calls: list[tuple[str, int]] = []

    def contender(name: str) -> Callable[[int], float]:
        def measure(number: int) -> float:
            calls.append((name, number))
            return float(len(calls))

        return measure

    samples = interleave({"a": contender("a"), "b": contender("b")}, 2, warm_up=1)
    assert calls == [("b", -1), ("a", -1), ("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert samples == {"a": [3.0, 6.0], "b": [4.0, 5.0]}
    assert ratios(samples, "a", "b") == [0.75, 1.2]
