"""control_plane.rpc.inbox: what comes is handled in order, failures where they are heard of."""

from __future__ import annotations

import pytest

from control_plane.rpc.inbox import Inbox

pytestmark = pytest.mark.anyio


async def test_all_that_came_is_taken_at_once_and_in_order() -> None:
    inbox: Inbox[list[int]] = Inbox()
    done: list[int] = []
    inbox.put(lambda owner: owner.append(1))
    inbox.put(lambda owner: owner.append(2))
    for callback in await inbox.take():
        callback(done)
    assert done == [1, 2]


async def test_a_failure_is_raised_by_the_owner_after_what_came_before_it() -> None:
    inbox: Inbox[list[int]] = Inbox()
    done: list[int] = []
    inbox.put(lambda owner: owner.append(1))
    inbox.fail(ValueError("the thread ended"))
    first, failure = await inbox.take()
    first(done)
    with pytest.raises(ValueError, match="the thread ended"):
        failure(done)
    assert done == [1]
