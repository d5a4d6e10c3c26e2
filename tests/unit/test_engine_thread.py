"""The engine's thread: order, idleness, failures, the end."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from core.clock import Clock, ManualClock
from core.ids import RequestId
from engine.engine_thread import EngineStopped, EngineThread
from engine.events import Admitted, Event, Generated, Mode, Reserved
from engine.executor.interface import Handle, StepPlan
from engine.interface import EngineApi
from tests.replica import Replica
from tests.unit.test_engine_scheduler import LONG, handoff_of, request_of


class Told:
    """What reached the loop, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.failures: list[BaseException] = []
        self.is_finished = asyncio.Event()

    def on_events(self, events: list[Event]) -> None:
        self.events += events
        if any(isinstance(event, Generated) and event.finish_reason for event in events):
            self.is_finished.set()

    def on_failure(self, error: BaseException) -> None:
        self.failures.append(error)
        self.is_finished.set()


def thread_of(
    replica: Replica, told: Told, *, idle_check_s: float = 0.5, clock: Clock | None = None
) -> EngineThread:
    thread = EngineThread(
        replica.engine,
        loop=asyncio.get_running_loop(),
        on_events=told.on_events,
        on_failure=told.on_failure,
        idle_check_s=idle_check_s,
        clock=clock,
    )
    thread.start()
    return thread


@pytest.mark.anyio
async def test_a_request_runs_and_events_come_before_later_results() -> None:
    replica, told = Replica(), Told()
    thread = thread_of(replica, told)
    request = request_of("a", LONG, max_tokens=20)
    replica.requests[request.request_id] = request
    await thread.call(lambda engine: engine.add(request, Mode.LOCAL))
    while True:
        generated = await thread.call(lambda engine: engine.stats().generated_tokens)
        told_so_far = sum(len(e.token_ids) for e in told.events if isinstance(e, Generated))
        assert told_so_far >= generated
        if generated == 20:
            break
    replica.events = told.events
    replica.assert_all_right()
    name = await thread.call(lambda engine: threading.current_thread().name)
    assert name == "engine"
    await thread.stop()


@pytest.mark.anyio
async def test_a_peer_is_asked_before_the_step_that_runs_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a step takes 50 ms, a decode worker would else ask for a prompt 50 ms later."""
    replica, told = Replica(), Told()
    is_asked, was_asked = threading.Event(), list[bool]()

    def on_events(events: list[Event]) -> None:
        told.on_events(events)
        if any(isinstance(event, Admitted | Reserved) for event in events):
            is_asked.set()

    submit = replica.executor.submit

    def submit_once_asked(plan: StepPlan) -> Handle:
        was_asked.append(is_asked.wait(5))
        return submit(plan)

    monkeypatch.setattr(replica.executor, "submit", submit_once_asked)
    thread = EngineThread(replica.engine, loop=asyncio.get_running_loop(), on_events=on_events)
    local, received = request_of("a", LONG, max_tokens=2), request_of("b", LONG[:-1], max_tokens=2)
    thread.post(lambda engine: engine.add(local, Mode.LOCAL))
    thread.post(lambda engine: engine.add(received, Mode.RECEIVE, handoff=handoff_of("b")))
    thread.start()
    await told.is_finished.wait()
    assert all(was_asked)
    kinds = [type(event) for event in told.events]
    assert kinds[:2] == [Admitted, Reserved]
    await thread.stop()


@pytest.mark.anyio
async def test_it_sleeps_while_idle_and_checks_invariants_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica, told = Replica(), Told()
    loop, is_checked = asyncio.get_running_loop(), asyncio.Event()
    num_checks = num_looks = 0
    has_work, check_invariants = replica.engine.has_work, replica.engine.check_invariants

    def check() -> None:
        nonlocal num_checks
        num_checks += 1
        check_invariants()
        loop.call_soon_threadsafe(is_checked.set)

    def look() -> bool:
        nonlocal num_looks
        num_looks += 1
        return has_work()

    monkeypatch.setattr(replica.engine, "check_invariants", check)
    monkeypatch.setattr(replica.engine, "has_work", look)
    thread = thread_of(replica, told, idle_check_s=0.01)
    await thread.call(lambda engine: engine.add(request_of("a", LONG, max_tokens=1), Mode.LOCAL))
    await is_checked.wait()
    before, cpu = num_looks, time.process_time()
    await asyncio.sleep(0.2)  # nothing to await: what is shown is that nothing happens
    assert num_looks - before <= 1
    assert time.process_time() - cpu < 0.1
    assert num_checks == 1
    await thread.stop()


@pytest.mark.anyio
async def test_reading_gauges_neither_repeats_the_idle_check_nor_defers_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica, told, clock = Replica(), Told(), ManualClock()
    loop, is_checked = asyncio.get_running_loop(), asyncio.Event()
    check_invariants, checked_at = replica.engine.check_invariants, list[float]()

    def check() -> None:
        checked_at.append(clock.now())
        check_invariants()
        loop.call_soon_threadsafe(is_checked.set)

    monkeypatch.setattr(replica.engine, "check_invariants", check)
    thread = thread_of(replica, told, idle_check_s=60.0, clock=clock)

    async def read_twice_a_second(seconds: int) -> None:
        for _ in range(2 * seconds):
            await thread.call(lambda engine: engine.stats())
            clock.advance(0.5)

    await read_twice_a_second(70)
    assert not checked_at  # nothing has happened yet
    await thread.call(lambda engine: engine.add(request_of("a", LONG, max_tokens=1), Mode.LOCAL))
    while await thread.call(lambda engine: engine.has_work()):
        pass
    await read_twice_a_second(70)
    await is_checked.wait()
    await read_twice_a_second(70)
    assert len(checked_at) == 1
    assert checked_at[0] >= 70.0 + 60.0
    is_checked.clear()
    await thread.call(lambda engine: engine.abort(RequestId("nobody")))
    while await thread.call(lambda engine: engine.has_work()):
        pass
    await read_twice_a_second(70)
    await is_checked.wait()
    assert len(checked_at) == 2
    await thread.stop()


@pytest.mark.anyio
async def test_an_exception_of_a_call_is_the_callers() -> None:
    replica, told = Replica(), Told()
    thread = thread_of(replica, told)
    with pytest.raises(ValueError, match="prompt is empty"):
        await thread.call(lambda engine: engine.add(request_of("a", []), Mode.LOCAL))
    cancelled = thread.call(lambda engine: engine.stats())
    cancelled.cancel()
    assert (await thread.call(lambda engine: engine.stats())).num_running == 0
    await thread.stop()
    assert not told.failures


@pytest.mark.anyio
async def test_a_failing_step_is_reported_and_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica, told = Replica(), Told()

    def break_down(tell: object = None) -> list[Event]:
        msg = "device lost"
        raise RuntimeError(msg)

    monkeypatch.setattr(replica.engine, "step", break_down)
    thread = thread_of(replica, told)
    thread.post(lambda engine: engine.add(request_of("a", LONG), Mode.LOCAL))
    await told.is_finished.wait()
    assert [str(error) for error in told.failures] == ["device lost"]
    with pytest.raises(EngineStopped):
        await thread.call(lambda engine: engine.stats())
    thread.post(lambda engine: engine.abort(RequestId("a")))
    await thread.stop()


@pytest.mark.anyio
async def test_a_failing_post_reaches_the_loops_handler() -> None:
    contexts: list[dict[str, object]] = []
    loop, replica = asyncio.get_running_loop(), Replica()
    loop.set_exception_handler(lambda _, context: contexts.append(context))
    thread = EngineThread(replica.engine, loop=loop, on_events=lambda events: None)

    def fail(engine: EngineApi) -> None:
        msg = "not again"
        raise RuntimeError(msg)

    thread.post(fail)
    late = thread.call(lambda engine: engine.stats())
    thread.start()
    with pytest.raises(EngineStopped):
        await late
    await thread.stop()
    loop.set_exception_handler(None)
    assert [str(context["exception"]) for context in contexts] == ["not again"]


@pytest.mark.anyio
async def test_stopping_runs_what_was_called_and_closes_the_engine() -> None:
    replica, told = Replica(max_inflight=2), Told()
    thread = thread_of(replica, told)
    thread.post(lambda engine: engine.add(request_of("a", LONG, max_tokens=10), Mode.LOCAL))
    last = thread.call(lambda engine: engine.stats().num_waiting)
    await thread.stop()
    assert await last in (0, 1)
    assert not [t for t in threading.enumerate() if t.name == "engine"]
    assert not replica.engine._in_flight
    await EngineThread(
        replica.engine, loop=asyncio.get_running_loop(), on_events=told.on_events
    ).stop()  # never started
