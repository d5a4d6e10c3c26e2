"""The floors of coverage: whole where decisions are made, 90% of a package, 75% of a file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.coverage_floors import File, Report, Summary, breaches, main, pure_modules

PURE = frozenset({"engine.memory", "core.config"})


def file(covered: int, *, missing: int = 0, jumps: int = 0) -> File:
    """A file of `covered` lines that are executed, `missing` that are not, and untaken branches."""
    summary = Summary(covered + missing, covered, jumps, 0)
    lines = list(range(100, 100 + missing))
    return File(summary, lines, [(index, -1) for index in range(jumps)])


def report(**changed: File) -> Report:
    """What reaches every floor, but for the files that are given, by name."""
    paths = {
        "config": "core/config.py",
        "ids": "core/ids.py",
        "pool": "engine/memory/block_pool.py",
        "tree": "engine/memory/__init__.py",
        "engine": "engine/engine.py",
        "memory_map": "engine/memory_map.py",
    }
    return Report({path: changed.get(name, file(100)) for name, path in paths.items()})


def test_nothing_is_said_of_what_reaches_its_floor() -> None:
    almost = report(ids=file(90, missing=10), engine=file(80, missing=20))
    assert breaches(almost, PURE) == []


@pytest.mark.parametrize("name", ["config", "pool", "tree"])
def test_a_pure_module_is_covered_whole(name: str) -> None:
    (line,) = breaches(report(**{name: file(2999, missing=1)}), PURE)
    assert line.endswith(": 99.9% covered, at least 100%: 100")
    (line,) = breaches(report(**{name: file(999, jumps=1)}), PURE)
    assert line.endswith(": 99.9% covered, at least 100%: 0->-1")


def test_a_name_that_only_begins_like_a_pure_package_is_not_pure() -> None:
    assert breaches(report(memory_map=file(80, missing=20)), PURE) == []


def test_a_package_s_pure_modules_do_not_make_up_for_the_others() -> None:
    (line,) = breaches(report(ids=file(89, missing=11)), PURE)
    assert line == "core: 89.0% covered, at least 90%"


def test_a_large_package_does_not_hide_a_file() -> None:
    found = breaches(report(engine=file(1000), memory_map=file(74, missing=26)), PURE)
    assert found == [
        "engine/memory_map.py: 74.0% covered, at least 75%: "
        "100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111 and 14 more"
    ]


def test_a_pure_module_that_is_not_measured_is_told() -> None:
    found = breaches(report(), PURE | {"engine.scheduling"})
    assert found == ["engine.scheduling: pure by .importlinter, and not measured"]


def test_an_empty_file_is_covered() -> None:
    assert breaches(report(tree=file(0)), PURE) == []


def test_the_contract_names_the_pure_modules() -> None:
    text = (Path(__file__).parents[2] / ".importlinter").read_text()
    pure = pure_modules(text)
    assert {"engine.memory", "engine.scheduling", "kv_transfer.handoff", "router.policy"} <= pure
    assert "asyncio" not in pure


def test_the_command_tells_each_breach_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pure = pure_modules((Path(__file__).parents[2] / ".importlinter").read_text())
    whole = Report({f"{name.replace('.', '/')}.py": file(10) for name in pure})
    path = tmp_path / "coverage.json"
    path.write_bytes(msgspec.json.encode(whole))
    assert main([str(path)]) == 0
    assert capsys.readouterr().err == ""
    whole.files["core/config.py"] = file(9, missing=1)
    path.write_bytes(msgspec.json.encode(whole))
    assert main([str(path)]) == 1
    assert capsys.readouterr().err == ("core/config.py: 90.0% covered, at least 100%: 100\n")
