"""Attempts of names or requests that a peer should not have sent: told, never the worker's end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from core.block_hash import BlockHash
from core.clock import ManualClock
from core.ids import Attempt, BlockId, Boot, HandoffId, RequestId, WorkerId
from core.messages import (
    BlockRun,
    HandoffFailed,
    HandoffRefused,
    HandoffSettled,
    PrefillAsk,
    RegionDescriptor,
)
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from engine.events import CacheChanged
from kv_transfer.handoff.prefill_side import Terms
from prefill_pool.attempts import Attempts

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
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class World:
    """The attempts, an engine and a decode worker's stream."""

    def __init__(self) -> None:
        self.engine, self.stream = Engine(), Stream()
        self.callbacks: list[Callable[[Attempts], None]] = []
        self.cache_changes: list[CacheChanged] = []
        engine: Any = self.engine
        pusher: Any = None  # nothing here gets as far as a write
        self.attempts = Attempts(
            Terms("layout", 16, 64, 10.0),
            engine,
            pusher,
            later=self.callbacks.append,
            on_cache_changed=self.cache_changes.append,
            clock=ManualClock(),
            quarantine_s=5.0,
        )

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
        while self.callbacks:
            self.callbacks.pop(0)(self.attempts)


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


async def test_the_ledger_hears_of_each_change_of_the_cache() -> None:
    world = World()
    changes = [CacheChanged((BlockHash(bytes(16)),), ()), CacheChanged((), ())]
    world.attempts.engine_says([*changes])
    assert world.cache_changes == changes
