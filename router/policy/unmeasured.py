"""Speeds of workers that have not measured themselves yet: those of their fastest peer.

A fixed stand-in would be slower than what most machines measure. The policy prefers the fast, so a
worker that was just started would get no request while its peers are idle, and never be measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from core.messages import WorkerLoad
from core.worker_record import Role
from router.policy.cost import Speeds, single_step_s
from router.policy.views import WorkerView


class PeersSpeeds:
    """Fills unknown speeds in. Loads change with heartbeats and requests come more often, so what
    was worked out for the last loads is kept.

    Args:
        speeds: scale steps, see `single_step_s`.
    """

    __slots__ = ("_filled", "_loads", "_roles", "_speeds")

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds
        self._roles: list[Role] = []
        self._loads: list[WorkerLoad] = []
        self._filled: list[WorkerLoad] = []

    def of(self, workers: Sequence[WorkerView]) -> list[WorkerView]:
        """Return the workers, each unknown speed replaced by the best one known in its role."""
        loads = [worker.load for worker in workers]
        roles = [worker.role for worker in workers]
        if loads != self._loads or roles != self._roles:
            self._loads, self._roles = loads, roles
            self._filled = self._fill(loads, roles)
        return [
            worker if load is worker.load else replace(worker, load=load)
            for worker, load in zip(workers, self._filled, strict=True)
        ]

    def _fill(self, loads: list[WorkerLoad], roles: list[Role]) -> list[WorkerLoad]:
        pairs = list(zip(loads, roles, strict=True))
        best = {
            role: _best([load for load, its in pairs if its is role], self._speeds)
            for role in {role for load, role in pairs if not _is_measured(load)}
        }
        return [_filled(load, best.get(role, _NOTHING)) for load, role in pairs]


_NOTHING = WorkerLoad()


def _is_measured(load: WorkerLoad) -> bool:
    return None not in (load.prefill_tokens_per_s, load.decode_step_s, load.transfer_bytes_per_s)


def _best(loads: Sequence[WorkerLoad], speeds: Speeds) -> WorkerLoad:
    return WorkerLoad(
        prefill_tokens_per_s=max(_known(load.prefill_tokens_per_s for load in loads), default=None),
        decode_step_s=min(_known(single_step_s(load, speeds) for load in loads), default=None),
        transfer_bytes_per_s=max(_known(load.transfer_bytes_per_s for load in loads), default=None),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _filled(load: WorkerLoad, best: WorkerLoad) -> WorkerLoad:
    if best == _NOTHING or _is_measured(load):
        return load
    return replace(
        load,
        prefill_tokens_per_s=load.prefill_tokens_per_s or best.prefill_tokens_per_s,
        decode_step_s=load.decode_step_s or best.decode_step_s,
        transfer_bytes_per_s=load.transfer_bytes_per_s or best.transfer_bytes_per_s,
    )
