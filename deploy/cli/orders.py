"""`dovetail drain` and `dovetail role`: tell the router, and wait until the worker has obeyed."""

from __future__ import annotations

import time
from collections.abc import Mapping

from core.clock import Clock
from core.errors import DovetailError, UsageError
from deploy.api_client import START_ADVICE, ApiAddress, ApiClient, ApiRefusal
from deploy.cli.status import ClusterStatus, WorkerStatus
from deploy.terminal import say

_MARGIN_S = 15.0
"""Beyond a drain's deadline: what is left is failed over, and the process ends."""

_ROLE_S = 60.0 + _MARGIN_S
"""The default of `control_plane.drain_s`, and the same."""

_POLL_S = 0.2

_SLIP, _TROUBLE = 400, 500


def run_drain(
    api: ApiAddress, worker: str, *, deadline_s: float, is_forced: bool, clock: Clock
) -> int:
    """Have a worker leave, and return the exit code once it has.

    Args:
        is_forced: even if no request can be served then.

    Raises:
        UsageError: no such worker, or none that may leave.
        DovetailError: no cluster answers, or the worker did not leave in time.
    """
    client = ApiClient(api, advice=START_ADVICE, timeout_s=10.0)
    before = _find(client, worker)
    _order(client, "/drain", {"worker": worker, "deadline_s": deadline_s, "force": is_forced})
    say(f"{worker} takes no new requests; what runs there finishes or moves away")
    end = clock.now() + deadline_s + _MARGIN_S
    while clock.now() < end:
        now = _find(client, worker)
        if now is None:
            say(f"{worker} has left")
            return 0
        if _is_another(now, before):
            say(f"{worker} has left, and was started again since: pid {now.pid}")
            return 0
        time.sleep(_POLL_S)
    msg = f"{worker} has not left within {deadline_s:g} s; see its log, and `dovetail status`"
    raise DovetailError(msg)


def run_role(api: ApiAddress, worker: str, role: str, *, is_forced: bool, clock: Clock) -> int:
    """Have a worker change its role, and return the exit code once it has.

    Args:
        is_forced: even if no request can be served then.

    Raises:
        UsageError: no such worker, or none that may change.
        DovetailError: no cluster answers, the worker still drains after `_ROLE_S`, or never
            will have the role: it ended, or got another order.
    """
    client = ApiClient(api, advice=START_ADVICE, timeout_s=10.0)
    before = _find(client, worker)
    _order(client, "/role", {"worker": worker, "role": role, "force": is_forced})
    say(f"{worker} takes no more work of its present role; what runs finishes or moves away")
    end = clock.now() + _ROLE_S
    has_drained = False
    while clock.now() < end:
        now = _find(client, worker)
        if now is None:
            msg = f"{worker} has left, and never had role {role}"
            raise DovetailError(msg)
        is_live = now.state == "live"
        if is_live and now.role == role:
            say(f"{worker} has role {role}")
            return 0
        if is_live and _is_another(now, before):
            msg = f"{worker} ended, and was started again with role {now.role}: order it again"
            raise DovetailError(msg)
        if is_live and has_drained:
            msg = f"{worker} has role {now.role}, not {role}: it got another order meanwhile"
            raise DovetailError(msg)
        has_drained = now.state == "draining"
        time.sleep(_POLL_S)
    msg = f"{worker} does not have role {role} yet; see its log, and `dovetail status`"
    raise DovetailError(msg)


def _order(client: ApiClient, path: str, body: Mapping[str, object]) -> None:
    try:
        client.post(path, body)
    except ApiRefusal as refusal:
        if _SLIP <= refusal.status < _TROUBLE:
            raise UsageError(str(refusal)) from None
        raise


def _is_another(now: WorkerStatus, before: WorkerStatus | None) -> bool:
    """Return whether a worker's process is not the one that was there before the order. Processes
    of two containers may well have one pid."""
    return before is not None and now.boot != before.boot


def _find(client: ApiClient, worker: str) -> WorkerStatus | None:
    workers = client.get("/status", ClusterStatus).workers
    return next((one for one in workers if one.id == worker), None)
