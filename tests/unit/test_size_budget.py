"""The size budget: files of 500 lines, functions of 60."""

from __future__ import annotations

from pathlib import Path

from tests.size_budget import FILE_LINES, FUNCTION_LINES, breaches


def function(name: str, lines: int, kind: str = "def") -> str:
    return f"{kind} {name}():\n" + "    pass\n" * (lines - 1)


def test_files_and_functions_up_to_their_budget_pass(tmp_path: Path) -> None:
    text = function("long", FUNCTION_LINES) + "x = 1\n" * (FILE_LINES - FUNCTION_LINES)
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "full.py").write_text(text)
    assert breaches(tmp_path, ["core"]) == []


def test_each_one_that_is_too_long_is_named_with_its_length(tmp_path: Path) -> None:
    nested = tmp_path / "core" / "inner"
    nested.mkdir(parents=True)
    (nested / "a.py").write_text("x = 1\n" * (FILE_LINES + 1))
    functions = function("fine", 3) + function("slow", FUNCTION_LINES + 1, "async def")
    method = "class C:\n    " + function("m", FUNCTION_LINES + 2).replace("\n", "\n    ").rstrip()
    (nested / "b.py").write_text(f"{functions}{method}\n")
    assert breaches(tmp_path, ["core"]) == [
        f"core/inner/a.py: {FILE_LINES + 1} lines, at most {FILE_LINES}",
        f"core/inner/b.py:4: slow has {FUNCTION_LINES + 1} lines, at most {FUNCTION_LINES}",
        f"core/inner/b.py:{FUNCTION_LINES + 6}: m has {FUNCTION_LINES + 2} lines, "
        f"at most {FUNCTION_LINES}",
    ]


def test_generated_code_has_no_budget(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "rpc_pb2_grpc.py").write_text("x = 1\n" * (FILE_LINES + 1))
    assert breaches(tmp_path, ["core"]) == []
