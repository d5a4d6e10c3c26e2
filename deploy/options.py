"""What the command line hands to each kind of process, beside its `Config`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from core.ids import WorkerId
from core.worker_record import Role


class WorkerOptions(msgspec.Struct, frozen=True):
    """One worker process.

    Attributes:
        model_path: an existing Hugging Face directory or GGUF file.
        listen_host, listen_port: where its gRPC server binds; port 0 is any free one.
        advertise_host: the host under which others reach it; what it registers in etcd.
        ready_fd: file descriptor on which `deploy.readiness.announce` tells the launcher; None when
            the process was started by hand.
    """

    worker_id: WorkerId
    role: Role
    model_path: Path
    listen_host: str = "127.0.0.1"
    listen_port: int = 0
    advertise_host: str = "127.0.0.1"
    ready_fd: int | None = None


class RouterOptions(msgspec.Struct, frozen=True):
    """One router process; it binds to `config.http`.

    Attributes:
        name: its name on streams and in logs.
        model_path: where the tokenizer and the chat template come from.
        ready_fd: as for a worker.
    """

    name: str
    model_path: Path
    ready_fd: int | None = None


class UpOptions(msgspec.Struct, frozen=True):
    """A whole cluster on this machine.

    Attributes:
        num_prefill, num_decode, num_colocated: workers by role; at least one can decode.
        model_path: as for a worker.
        log_directory: where each process's stderr goes, one file each; None: to our stderr.
        num_routers: at least 1; each has a port of its own.
    """

    num_prefill: int
    num_decode: int
    num_colocated: int
    model_path: Path
    log_directory: Path | None = None
    num_routers: int = 1

    @property
    def num_workers(self) -> int:
        """Worker processes in all."""
        return self.num_prefill + self.num_decode + self.num_colocated
