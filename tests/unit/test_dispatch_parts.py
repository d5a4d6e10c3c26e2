"""Timers, pending work and the stream to the client."""

from __future__ import annotations

import asyncio

import pytest

from core.errors import RequestError
from core.ids import RequestId
from core.lifetime import Lifetime, PrefillDecision, RequestTrace
from core.request import TokenUpdate
from router.dispatch.failure import Trouble, error_of
from router.dispatch.pending_work import SURELY_ARRIVED_S, PendingWork
from router.dispatch.recent_preemptions import HALF_LIFE_S, RecentPreemptions
from router.dispatch.recent_requests import RecentRequests
from router.dispatch.timers import Timers
from router.dispatch.token_stream import RequestStream


def test_timers_fire_in_order_and_only_the_latest_setting_counts() -> None:
    timers: Timers[str] = Timers()
    assert timers.next_due() is None
    assert timers.set("a", 5.0)
    assert not timers.set("b", 7.0)
    assert timers.set("c", 1.0)
    assert not timers.set("c", 1.0)
    timers.set("c", 9.0)
    timers.discard("b")
    timers.discard("unknown")
    assert timers.next_due() == 5.0
    assert timers.pop_due(4.9) == []
    timers.set("d", 2.0)
    assert timers.pop_due(5.0) == ["d", "a"]
    assert timers.pop_due(100.0) == ["c"]
    assert timers.next_due() is None


def test_outdated_timers_do_not_pile_up() -> None:
    timers: Timers[int] = Timers()
    for step in range(10_000):
        timers.set(step % 3, float(step))
    assert timers.num_entries <= 65
    assert timers.pop_due(1e9) == [9_997 % 3, 9_998 % 3, 9_999 % 3]


def test_pending_work_counts_until_a_load_must_have_seen_it() -> None:
    pending = PendingWork()
    pending.add(RequestId("a"), 100, 0.0)
    pending.add(RequestId("b"), 10, 0.2)
    pending.add(RequestId("b"), 20, 0.2)
    assert (len(pending), pending.num_tokens) == (2, 120)
    pending.load_came(SURELY_ARRIVED_S)
    assert (len(pending), pending.num_tokens) == (1, 20)
    pending.discard(RequestId("a"))
    pending.discard(RequestId("b"))
    assert (len(pending), pending.num_tokens) == (0, 0)
    pending.add(RequestId("c"), 5, 1.0)
    pending.clear()
    assert (len(pending), pending.num_tokens) == (0, 0)


def test_every_trouble_has_words_a_status_and_the_right_retry_after() -> None:
    for trouble in Trouble:
        error = error_of(trouble, "because")
        assert error.message.endswith(": because")
        assert error.code == trouble.value
        assert (error.retry_after_s is not None) == (error.status in (429, 503))
        assert error.retry_after_s is None or error.retry_after_s <= 60


class Calls:
    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.finished: list[tuple[str, int]] = []
        self.stream = RequestStream(
            RequestId("r"),
            Lifetime(),
            on_abort=self.aborted.append,
            on_finish_sample=lambda request_id, sample: self.finished.append((request_id, sample)),
        )


def update(index: int) -> TokenUpdate:
    return TokenUpdate(RequestId("r"), 0, 1, index, (index,))


@pytest.mark.anyio
async def test_updates_that_came_together_are_read_together() -> None:
    stream = Calls().stream
    reader = aiter(stream)
    stream.put(update(0))
    stream.put(update(1))
    assert await anext(reader) == [update(0), update(1)]
    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.put(update(2))
    assert await waiting == [update(2)]
    stream.put(update(3))
    stream.end(None)
    assert await anext(reader) == [update(3)]
    with pytest.raises(StopAsyncIteration):
        await anext(reader)
    with pytest.raises(StopAsyncIteration):
        await anext(reader)


@pytest.mark.anyio
async def test_an_error_comes_after_the_tokens_before_it() -> None:
    stream = Calls().stream
    stream.put(update(0))
    stream.end(RequestError("gone", status=503))
    reader = aiter(stream)
    assert await anext(reader) == [update(0)]
    for _ in range(2):
        with pytest.raises(RequestError, match="gone"):
            await anext(reader)


@pytest.mark.anyio
async def test_a_cancelled_read_loses_nothing() -> None:
    stream = Calls().stream
    reader = aiter(stream)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(reader), 0.001)
    stream.put(update(0))
    assert await anext(reader) == [update(0)]


def test_abort_and_finish_sample_name_the_request() -> None:
    calls = Calls()
    calls.stream.abort()
    calls.stream.finish_sample(2)
    assert calls.aborted == ["r"]
    assert calls.finished == [("r", 2)]


def test_cached_tokens_are_those_of_the_first_attempt_that_told() -> None:
    stream = Calls().stream
    assert stream.trace is None
    stream.report(RequestTrace("d0", PrefillDecision.DISAGGREGATED, attempt=1, cached_tokens=16), 1)
    final = RequestTrace(
        "d0", PrefillDecision.DISAGGREGATED, attempt=2, cached_tokens=32, bytes_transferred=9
    )
    stream.report(final, 1)
    assert stream.trace == final
    stream.report(RequestTrace("d1", PrefillDecision.LOCAL, attempt=1, cached_tokens=480), 2)
    assert stream.trace == RequestTrace("d1", PrefillDecision.LOCAL, attempt=2, cached_tokens=32)


def test_recent_requests_forget_the_oldest() -> None:
    recent = RecentRequests()
    first = RequestId("first")
    recent.remember(first)
    assert first in recent
    for number in range(4096):
        recent.remember(RequestId(str(number)))
    assert first not in recent
    assert RequestId("0") in recent


def test_preemptions_count_from_the_first_load_and_fade() -> None:
    recent = RecentPreemptions()
    recent.told(7, 0.0)  # all before this router came
    assert recent.count == 0.0
    recent.told(9, 0.5)
    assert recent.count == 2.0
    recent.told(9, 0.5 + HALF_LIFE_S)
    assert recent.count == pytest.approx(1.0)
    recent.told(10, 0.5 + 2 * HALF_LIFE_S)
    assert recent.count == pytest.approx(1.5)
