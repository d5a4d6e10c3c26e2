"""Speeds of workers that have not measured themselves yet: those of their fastest peer.

A fixed stand-in would be slower than what most machines measure. The policy prefers the fast, so a
worker that was just started would get no request while its peers are idle, and never be measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from core.messages import WorkerLoad
from router.policy.cost import Speeds, single_step_s
from router.policy.views import WorkerView


def with_peers_speeds(workers: Sequence[WorkerView], speeds: Speeds) -> list[WorkerView]:
    """Return the workers, each unknown speed replaced by the best one known in its role."""
    roles = {worker.role for worker in workers if not _is_measured(worker.load)}
    best = {role: _best([w.load for w in workers if w.role is role], speeds) for role in roles}
    return [_filled(worker, best.get(worker.role, _NOTHING)) for worker in workers]


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


def _filled(worker: WorkerView, best: WorkerLoad) -> WorkerView:
    if best == _NOTHING or _is_measured(worker.load):
        return worker
    load = worker.load
    filled = replace(
        load,
        prefill_tokens_per_s=load.prefill_tokens_per_s or best.prefill_tokens_per_s,
        decode_step_s=load.decode_step_s or best.decode_step_s,
        transfer_bytes_per_s=load.transfer_bytes_per_s or best.transfer_bytes_per_s,
    )
    return replace(worker, load=filled)
