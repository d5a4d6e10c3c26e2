"""Ways of breaking the rules of drains, moves, switches and of several routers, one a function."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from control_plane.roles.pools import Pools
from core.messages import RequestFailed
from decode_pool.requests import Requests
from prefill_pool.worker import PrefillWorker
from router.dispatch.request_state import RequestState

Patch = pytest.MonkeyPatch


def wrong_role_is_final(patch: Patch) -> None:
    refused = RequestState.refused

    def ends(self: Any, number: int, reason: str, message: str, now: float) -> Any:
        return refused(self, number, "invalid" if reason == "wrong_role" else reason, message, now)

    patch.setattr(RequestState, "refused", ends)


def draining_is_final(patch: Patch) -> None:
    refused = RequestState.refused

    def ends(self: Any, number: int, reason: str, message: str, now: float) -> Any:
        return refused(self, number, "invalid" if reason == "draining" else reason, message, now)

    patch.setattr(RequestState, "refused", ends)


def what_is_left_fails(patch: Patch) -> None:
    def fail(self: Any, message: str) -> None:
        for live in list(self._live.values()):
            self._end(live)
            failed = RequestFailed(live.request_id, live.start.dispatch, message, retriable=False)
            self._outbox.send(live.stream, failed)

    patch.setattr(Requests, "fail_over", fail)


def leaves_at_once(patch: Patch) -> None:
    patch.setattr(Pools, "num_open", property(lambda self: 0))


def leaves_when_nothing_runs(patch: Patch) -> None:
    patch.setattr(Pools, "num_open", Pools.num_running)


def moves_under_own_writes(patch: Patch) -> None:
    patch.setattr(PrefillWorker, "without_writes", lambda self: nullcontext())
