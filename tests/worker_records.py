"""A worker's record with what a test does not care about filled in."""

from __future__ import annotations

from typing import Any

import msgspec

from core.ids import Boot, WorkerId
from core.worker_record import Role, WorkerRecord

_RECORD = WorkerRecord(
    worker_id=WorkerId("w0"),
    boot=Boot("b0"),
    registration=0,
    role=Role.DECODE,
    address="127.0.0.1:1",
    metrics_address="127.0.0.1:2",
    model="m",
    model_fingerprint="f",
    layout="l",
    numerics="n",
    block_size=16,
    block_bytes=1024,
    num_blocks=8,
    max_model_len=128,
    fabric="inprocess",
    transport="inprocess",
    pid=1,
)


def worker_record(**changes: Any) -> WorkerRecord:
    """Return a record; `changes` are fields of it."""
    return msgspec.structs.replace(_RECORD, **changes)
