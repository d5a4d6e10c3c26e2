"""The committed protobuf modules are what the .proto says now."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from control_plane import rpc

GENERATE = """
import sys
from pathlib import Path
from control_plane.rpc.generate import generate
generate(Path(sys.argv[1]))
"""
GENERATE_BROKEN = """
import sys
from pathlib import Path
from control_plane.rpc import generate as module
module.PROTO = Path(sys.argv[1]) / "broken.proto"
"""


def test_generated_modules_are_current(tmp_path: Path) -> None:
    """In a process of its own: one that has loaded the compiler dies when it loads NIXL."""
    subprocess.run([sys.executable, "-c", GENERATE, str(tmp_path)], check=True)
    for name in ("dovetail_pb2.py", "dovetail_pb2.pyi"):
        committed, generated = (
            without_version((directory / name).read_text())
            for directory in (Path(rpc.__file__).parent, tmp_path)
        )
        assert committed == generated, (
            f"{name} is stale: run `python -m control_plane.rpc.generate`"
        )


def without_version(module: str) -> list[str]:
    """Leave out the compiler's version, which need not be the one that was used."""
    return [line for line in module.splitlines() if not re.search(r"Version|^    \d+,$", line)]


def test_a_proto_that_the_compiler_refuses_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "broken.proto").write_text('syntax = "proto3"; message {')
    program = GENERATE_BROKEN + GENERATE
    refused = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1
    assert "broken.proto:1:28: Expected message name." in refused.stderr
    assert "protoc ended with status 1 on broken.proto" in refused.stderr
