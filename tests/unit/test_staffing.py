"""Which roles serve requests, and whom no operator takes away by mistake."""

from __future__ import annotations

import pytest

from core.ids import WorkerId
from core.messages import DrainWorker, SwitchRole, WorkerOrder
from core.worker_record import Role
from router.policy.staffing import can_serve, refusal

P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH
LEAVE = DrainWorker(5.0)


@pytest.mark.parametrize(
    ("roles", "by_default", "in_strict_mode"),
    [
        ([], False, False),
        ([P], False, False),
        ([D], True, False),
        ([P, D], True, True),
        ([B], True, True),
    ],
)
def test_who_serves(roles: list[Role], *, by_default: bool, in_strict_mode: bool) -> None:
    assert can_serve(roles, is_strict=False) is by_default
    assert can_serve(roles, is_strict=True) is in_strict_mode


@pytest.mark.parametrize(
    ("role", "order", "others", "is_strict", "param"),
    [
        (D, LEAVE, [P], False, "worker"),
        (D, LEAVE, [P, D], False, None),
        (D, LEAVE, [P, B], False, None),
        (D, SwitchRole(P), [P], False, "role"),
        (D, SwitchRole(P), [B], False, None),
        (D, SwitchRole(B), [], False, None),
        (B, SwitchRole(D), [], False, None),
        (B, SwitchRole(D), [], True, "role"),
        (B, LEAVE, [], False, "worker"),
        (P, LEAVE, [D], False, None),
        (P, LEAVE, [D], True, "worker"),
        (P, SwitchRole(D), [D], True, "role"),
        (P, LEAVE, [D, P], True, None),
        (P, LEAVE, [], False, None),  # nothing was served before
        (D, LEAVE, [], True, None),
    ],
)
def test_whom_an_order_may_take_away(
    role: Role, order: WorkerOrder, others: list[Role], *, is_strict: bool, param: str | None
) -> None:
    refused = refusal(WorkerId("w"), role, order, others, is_strict=is_strict)
    assert (None if refused is None else refused.param) == param


def test_the_refusal_says_what_would_be_right() -> None:
    refused = refusal(WorkerId("w"), D, SwitchRole(P), [P], is_strict=False)
    assert refused is not None
    assert (refused.status, refused.code) == (409, "last_worker")
    assert refused.message == (
        "role = 'prefill': w is the last worker that decodes; start another one first, or "
        'force it ("force": true, --force): then no request is served'
    )
    strict = refusal(WorkerId("w"), P, LEAVE, [D], is_strict=True)
    assert strict is not None
    assert "worker = 'w': w is the last prefill worker, which strict mode needs" in strict.message
