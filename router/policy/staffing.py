"""Which roles it takes to serve, and which worker an operator may therefore not take away."""

from __future__ import annotations

from collections.abc import Collection

from core.errors import RequestError
from core.ids import WorkerId
from core.messages import DrainWorker, WorkerOrder
from core.worker_record import Role


def can_serve(roles: Collection[Role], *, is_strict: bool) -> bool:
    """Return whether workers of these roles can serve requests.

    Args:
        is_strict: a decode worker computes no prompt (`disaggregation.fallback = "strict"`).
    """
    if Role.BOTH in roles:
        return True
    return Role.DECODE in roles and (Role.PREFILL in roles or not is_strict)


def refusal(
    worker_id: WorkerId,
    role: Role,
    order: WorkerOrder,
    others: Collection[Role],
    *,
    is_strict: bool,
) -> RequestError | None:
    """Return why a worker may not be ordered so: requests could be served, and no longer can.

    Args:
        role: the worker's present one.
        others: of all that serve the same model, and go on doing so.
    """
    left = [*others] if isinstance(order, DrainWorker) else [*others, order.role]
    if can_serve(left, is_strict=is_strict) or not can_serve([*others, role], is_strict=is_strict):
        return None
    decodes = Role.DECODE in left
    what = "prefill worker, which strict mode needs" if decodes else "worker that decodes"
    param, value = ("worker", worker_id) if isinstance(order, DrainWorker) else ("role", order.role)
    msg = (
        f"{param} = {str(value)!r}: {worker_id} is the last {what}; start another one first, or "
        'force it ("force": true, --force): then no request is served'
    )
    return RequestError(msg, status=409, param=param, code="last_worker")
