"""Where things lie in etcd: everything of a cluster is under `/dovetail/<cluster>/`. Pure."""

from __future__ import annotations

import re

import msgspec

from core.errors import ConfigError
from core.ids import RequestId, WorkerId

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class ClusterKeys(msgspec.Struct, frozen=True):
    """Names the keys of one cluster.

    world                             a UUID, new whenever etcd lost its data
    workers/<worker>                  its WorkerRecord, under its lease
    ledger/<worker>/head              which snapshot holds, and up to which delta
    ledger/<worker>/delta             the last change, overwritten in place
    ledger/<worker>/snap/<generation>/<part>
    preempted/<request>               where it was preempted to, under its worker's lease
    """

    cluster: str

    def __post_init__(self) -> None:
        """Refuse names that would reach into another cluster's keys.

        Raises:
            ConfigError: not of `[A-Za-z0-9._-]`, or too long.
        """
        if not _NAME.fullmatch(self.cluster):
            msg = f"control_plane.cluster = {self.cluster!r}: use 1 to 128 of A-Z a-z 0-9 . _ -"
            raise ConfigError(msg)

    @property
    def world(self) -> str:
        """The key that tells one life of etcd's data from the next."""
        return f"/dovetail/{self.cluster}/world"

    @property
    def workers(self) -> str:
        """Prefix of all registrations."""
        return f"/dovetail/{self.cluster}/workers/"

    @property
    def ledger(self) -> str:
        """Prefix of all ledgers."""
        return f"/dovetail/{self.cluster}/ledger/"

    @property
    def preempted(self) -> str:
        """Prefix of all preemption records."""
        return f"/dovetail/{self.cluster}/preempted/"

    def worker(self, worker_id: WorkerId) -> str:
        """One worker's registration."""
        return self.workers + worker_id

    def head(self, worker_id: WorkerId) -> str:
        """One worker's ledger head."""
        return f"{self.ledger}{worker_id}/head"

    def delta(self, worker_id: WorkerId) -> str:
        """One worker's last delta."""
        return f"{self.ledger}{worker_id}/delta"

    def part(self, worker_id: WorkerId, generation: str, number: int) -> str:
        """One part of one snapshot."""
        return f"{self.ledger}{worker_id}/snap/{generation}/{number:06d}"

    def other_snapshots(self, worker_id: WorkerId, generation: str) -> list[tuple[str, str]]:
        """The ranges of all parts of all snapshots but this one."""
        snapshots = f"{self.ledger}{worker_id}/snap"
        return [
            (f"{snapshots}/", f"{snapshots}/{generation}/"),
            (f"{snapshots}/{generation}0", f"{snapshots}0"),  # "0" follows "/"
        ]

    def preemption(self, request_id: RequestId) -> str:
        """One request's preemption record."""
        return self.preempted + request_id
