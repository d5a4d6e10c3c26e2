"""The committed protobuf modules are what the .proto says now."""

from __future__ import annotations

from pathlib import Path

from control_plane.rpc.generate import GENERATED, PROTO, generate


def test_generated_modules_are_current(tmp_path: Path) -> None:
    generate(tmp_path)
    for name in GENERATED:
        assert (tmp_path / name).read_text() == (PROTO.parent / name).read_text(), (
            f"{name} is stale: run `python -m control_plane.rpc.generate`"
        )
