"""The committed protobuf modules are what the .proto says now."""

from __future__ import annotations

import re
from pathlib import Path

from control_plane.rpc.generate import GENERATED, PROTO, generate


def test_generated_modules_are_current(tmp_path: Path) -> None:
    generate(tmp_path)
    for name in GENERATED:
        committed, generated = (
            without_version((directory / name).read_text())
            for directory in (PROTO.parent, tmp_path)
        )
        assert committed == generated, (
            f"{name} is stale: run `python -m control_plane.rpc.generate`"
        )


def without_version(module: str) -> list[str]:
    """Leave out the compiler's version, which need not be the one that was used."""
    return [line for line in module.splitlines() if not re.search(r"Version|^    \d+,$", line)]
