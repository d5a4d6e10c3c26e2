"""Attempts of names or requests that a peer should not have sent: told, never the worker's end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from core.clock import ManualClock
from core.ids import Attempt, BlockId, Boot, HandoffId, RequestId, WorkerId
from core.messages import (
    BlockRun,
    HandoffFailed,
    HandoffRefused,
    HandoffScored,
    HandoffSettled,
    PrefillAsk,
    RegionDescriptor,
)
from core.request import EngineRequest, PromptLogprobs
from core.sampling_params import SamplingParams
from core.worker_record import Hello
from engine.events import Admitted, Computed, Generated, Mode, Scored
from kv_transfer.handoff.prefill_messages import Push
from kv_transfer.handoff.prefill_side import PrefillTerms
from kv_transfer.transport import Poll, TransferState
from prefill_pool.attempts import EXPECTED_S, Attempts

pytestmark = pytest.mark.anyio

HANDOFF = HandoffId(RequestId("r~life.1"), Attempt(1, 1))


class Engine:
    """An `EngineThread` whose engine answers what the test says."""

    def __init__(self) -> None:
        self.answers: list[asyncio.Future[None]] = []
        self.posted: list[Callable[[Any], object]] = []

    def call(self, _: Callable[[Any], None]) -> asyncio.Future[None]:
        self.answers.append(asyncio.get_running_loop().create_future())
        return self.answers[-1]

    def post(self, work: Callable[[Any], object]) -> None:
        self.posted.append(work)


class Stream:
    """Keeps what was sent."""

    def __init__(self) -> None:
        self.peer = Hello("decode", "d", Boot("d"))
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Writes:
    """A `Pusher` whose writes end when the test says."""

    def __init__(self) -> None:
        self.ends: list[Callable[[Poll], None]] = []
        self.forgotten: list[tuple[str, Boot]] = []

    def push(self, ask: PrefillAsk, push: Push, on_end: Callable[[Poll], None]) -> None:
        self.ends.append(on_end)

    def forget(self, worker_id: str, boot: Boot) -> None:
        self.forgotten.append((worker_id, boot))


class World:
    """The attempts, an engine and a decode worker's stream."""

    def __init__(self) -> None:
        self.engine, self.stream, self.writes = Engine(), Stream(), Writes()
        self.clock = ManualClock()
        self.callbacks: list[Callable[[Attempts], None]] = []
        engine: Any = self.engine
        pusher: Any = self.writes
        self.attempts = Attempts(
            PrefillTerms("layout", 16, 64, 10.0),
            engine,
            pusher,
            later=self.callbacks.append,
            clock=self.clock,
            quarantine_s=5.0,
        )

        self.open(self.stream)

    def open(self, stream: Any) -> None:
        self.attempts.stream_opened(stream)

    def close(self, stream: Any) -> None:
        self.attempts.stream_closed(stream)

    def compute(self) -> None:
        name = RequestId(str(HANDOFF))
        admitted = Admitted(name, Mode.PREFILL, (BlockId(3),), 0)
        token = Generated(name, 0, 0, (7,))
        self.attempts.engine_says([admitted, Computed(name, 2), token])

    def end_write(self, poll: Poll) -> None:
        self.writes.ends.pop(0)(poll)
        self.run_callbacks()

    def run_callbacks(self) -> None:
        while self.callbacks:
            self.callbacks.pop(0)(self.attempts)

    def ask(self) -> None:
        region = RegionDescriptor(WorkerId("d"), Boot("d"), 0, 0, 640, 64, "layout", b"")
        request = EngineRequest(HANDOFF.request_id, (1, 2), SamplingParams())
        stream: Any = self.stream
        ask = PrefillAsk(HANDOFF, request, 0, (BlockRun(BlockId(0), 1),), region, 1.0)
        self.attempts.asked(stream, ask)

    async def answer(self, error: Exception | None) -> None:
        answer = self.engine.answers[-1]
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)
        await asyncio.sleep(0)  # its callbacks
        self.run_callbacks()


async def test_a_name_that_is_in_use_fails_the_second_ask_and_keeps_the_first_attempt() -> None:
    world = World()
    world.ask()
    await world.answer(None)
    world.ask()
    (failed,) = world.stream.sent
    assert isinstance(failed, HandoffFailed), "a refusal would say that nothing is written"
    assert failed.handoff == HANDOFF
    assert len(world.engine.answers) == 1, "the engine was asked once"
    stream: Any = world.stream
    world.attempts.settle(stream, HANDOFF)
    assert world.engine.posted, "the first attempt can still be stopped"
    assert world.stream.sent[1:] == [HandoffSettled(HANDOFF)]
    assert len(world.attempts) == 0


async def test_what_the_engine_does_not_take_is_refused_and_forgotten() -> None:
    world = World()
    world.ask()
    await world.answer(ValueError("request r is here already"))
    (refused,) = world.stream.sent
    assert isinstance(refused, HandoffRefused)
    assert refused.message == "request r is here already"
    assert len(world.attempts) == 0


async def test_a_connection_goes_with_the_last_write_to_a_worker_that_left() -> None:
    world = World()
    world.ask()
    await world.answer(None)
    world.compute()
    world.close(world.stream)
    assert world.writes.forgotten == [], "a write is under way, and closing would fail it"
    world.end_write(Poll(TransferState.DONE))
    assert world.writes.forgotten == [("d", Boot("d"))]


async def test_it_goes_with_the_stream_when_nothing_is_under_way() -> None:
    world = World()
    world.ask()
    await world.answer(None)
    world.compute()
    world.end_write(Poll(TransferState.DONE))
    assert len(world.attempts) == 0
    assert world.writes.forgotten == [], "it may ask again"
    again = Stream()
    world.open(again)
    world.close(world.stream)
    assert world.writes.forgotten == [], "it had connected anew"
    world.close(again)
    assert world.writes.forgotten == [("d", Boot("d"))]


async def test_a_write_that_was_not_posted_keeps_no_block() -> None:
    world = World()
    world.ask()
    await world.answer(None)
    world.compute()
    world.stream.sent.clear()
    world.end_write(Poll(TransferState.REFUSED, "unknown peer"))
    assert world.stream.sent == [HandoffFailed(HANDOFF, "unknown peer", is_fabric=True)]
    assert len(world.attempts) == 0
    stream: Any = world.stream
    world.attempts.settle(stream, HANDOFF)
    assert world.stream.sent[-1] == HandoffSettled(HANDOFF)


async def test_scores_go_to_who_asked_and_to_nobody_when_the_attempt_is_over() -> None:
    world = World()
    world.ask()
    logprobs = PromptLogprobs(1, (-0.5,), (1,))
    world.attempts.engine_says([Scored(RequestId(str(HANDOFF)), logprobs)])
    world.attempts.engine_says([Scored(RequestId("over"), logprobs)])
    assert world.stream.sent == [HandoffScored(HANDOFF, logprobs)]


async def test_one_ask_of_a_request_that_moved_away_is_taken_whatever_is_refused() -> None:
    world = World()
    world.attempts.refuse("draining")
    world.attempts.expect(HANDOFF.request_id)
    assert world.attempts.num_expected == 1
    assert world.attempts.busy.is_set(), "it is not waited for for ever"
    world.ask()
    assert world.attempts.num_expected == 0
    assert len(world.attempts) == 1
    await world.answer(None)
    stream: Any = world.stream
    world.attempts.settle(stream, HANDOFF)
    assert not world.attempts.busy.is_set()
    world.stream.sent.clear()
    world.ask()
    (refused,) = world.stream.sent
    assert isinstance(refused, HandoffRefused)


async def test_a_request_that_moved_away_is_waited_for_shortly() -> None:
    world = World()
    world.attempts.refuse("draining")
    world.attempts.expect(HANDOFF.request_id)
    world.clock.advance(EXPECTED_S / 2)
    world.attempts.tick()
    assert world.attempts.num_expected == 1
    world.clock.advance(EXPECTED_S)
    world.attempts.tick()
    assert world.attempts.num_expected == 0
    assert not world.attempts.busy.is_set()
    world.ask()
    (refused,) = world.stream.sent
    assert isinstance(refused, HandoffRefused)
    assert refused.reason == "draining"
