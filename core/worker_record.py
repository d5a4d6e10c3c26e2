"""What a worker says of itself in etcd and in every handshake."""

from __future__ import annotations

import enum

import msgspec

from core.ids import Boot, WorkerId

PROTOCOL_VERSION = 3
"""Version of the gRPC messages; 1: first; 2: log-probabilities of prompts, which an older worker
would leave out; 3: orders to drain, and requests that move, which an older peer does not know."""


class Role(enum.StrEnum):
    """What a worker does; `both` serves whole requests alone (colocated)."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class WorkerRecord(msgspec.Struct, frozen=True):
    """One worker's entry under its lease.

    Attributes:
        registration: generation of its etcd lease, from 1; a lost lease changes only this.
        address: host:port of its gRPC server.
        metrics_address: host:port of its `/metrics`, `/health`.
        model: served model's name.
        model_fingerprint: hex; part of every block hash.
        layout: KvLayout.summary(); only equal ones can exchange blocks.
        numerics: id of kernels, instruction set, dtypes, TP size; equal ids promise equal tokens.
        max_model_len: tokens of prompt and output together that it can hold.
        transport: what the fabric uses ("nixl/ucx (cma)"), for people.
        is_draining: it takes nothing new.
    """

    worker_id: WorkerId
    boot: Boot
    registration: int
    role: Role
    address: str
    metrics_address: str
    model: str
    model_fingerprint: str
    layout: str
    numerics: str
    block_size: int
    block_bytes: int
    num_blocks: int
    max_model_len: int
    fabric: str
    transport: str
    pid: int
    protocol: int = PROTOCOL_VERSION
    is_draining: bool = False


class Hello(msgspec.Struct, frozen=True):
    """First message on every stream, both ways; a mismatch is refused with the difference named.

    Attributes:
        kind: who opens: "router" or "decode"; "worker" in the answer.
        boot: the opener's; the answer carries the worker's, which must be the expected one.
        expected_boot: the boot that the opener means to reach, or empty for any.
    """

    kind: str
    name: str
    boot: Boot
    expected_boot: str = ""
    cluster: str = "default"
    model_fingerprint: str = ""
    layout: str = ""
    protocol: int = PROTOCOL_VERSION
