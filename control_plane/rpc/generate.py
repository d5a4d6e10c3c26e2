"""Regenerates the committed protobuf modules: `python -m control_plane.rpc.generate`.

They are committed so that an installation needs no compiler; a test compares them with the .proto.
Only the messages: the one method is registered by hand, with frames as bytes (see `stream_end`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

from grpc_tools import protoc

PROTO = Path(__file__).with_name("dovetail.proto")
GENERATED = ("dovetail_pb2.py", "dovetail_pb2.pyi")


def generate(directory: Path) -> None:
    """Write the modules named in `GENERATED` into `directory`.

    Raises:
        RuntimeError: the compiler refused the .proto; it has said why on stderr.
    """
    status = cast(
        "int",
        protoc.main(  # pyright: ignore[reportUnknownMemberType] - has no types
            [
                "protoc",
                f"--proto_path={PROTO.parent}",
                f"--python_out={directory}",
                f"--pyi_out={directory}",
                PROTO.name,
            ]
        ),
    )
    if status != 0:
        msg = f"protoc ended with status {status} on {PROTO.name}"
        raise RuntimeError(msg)


if __name__ == "__main__":
    generate(PROTO.parent)
    sys.stdout.write(f"wrote {', '.join(GENERATED)}\n")
