"""A worker asked without a router: what a router adds is the difference.

The client speaks the routers' own protocol and sends what the router sends. Everything is counted
and timed as `bench.router_load` does it over HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from typing import Any

from bench.router_load import Load, Measured
from bench.router_pace import lateness_s
from control_plane.rpc.client import connect
from control_plane.rpc.interface import Stream
from core.clock import SystemClock
from core.config import ControlPlaneConfig
from core.ids import Boot, RequestId, WorkerId, new_boot
from core.messages import PrefillCandidate, StartRequest, TokenBatch, WorkerToRouter
from core.request import EngineRequest, TokenUpdate
from core.sampling_params import SamplingParams
from core.worker_record import Hello

_clock = SystemClock()
_CANDIDATE = PrefillCandidate(WorkerId("prefill-0"), Boot("0" * 32), "127.0.0.1:1")


async def run_direct(load: Load, *, address: str, prompt: Sequence[int]) -> Measured:
    """Run all clients on one stream to the worker at `address`."""
    clients = _Clients(load, tuple(prompt))
    hello = Hello("router", "bench", new_boot())
    stream = await connect(address, hello, clients, config=ControlPlaneConfig(), clock=_clock)
    measured = await clients.run()
    stream.close("done")
    return measured


class _Clients:
    """The stream's listener: as many requests at a time as there are clients."""

    def __init__(self, load: Load, prompt: tuple[int, ...]) -> None:
        self._load = load
        self._prompt = prompt
        self._stream: Stream[Any]
        self._dice = random.Random(0)  # noqa: S311 - lengths, not secrets
        self._names = itertools.count()
        self._sent_at: dict[RequestId, float] = {}
        self._measured = Measured()
        self._until = 0.0
        self._num_running = load.clients
        self._ended = asyncio.Event()

    async def run(self) -> Measured:
        """Let them ask until their time is over; return once all answers are complete."""
        load, loop = self._load, asyncio.get_running_loop()
        started = _clock.now()
        self._until = started + load.seconds
        for number in range(load.clients):
            loop.call_later(number * load.spread_s, self._begin)
        await self._ended.wait()
        self._measured.seconds = _clock.now() - started
        return self._measured

    def on_open(self, stream: Stream[Any]) -> None:
        """The worker is there."""
        self._stream = stream

    def on_message(self, stream: Stream[Any], message: WorkerToRouter) -> None:
        """Take tokens; loads and reports are not needed."""
        del stream
        if isinstance(message, TokenBatch):
            now = _clock.now()
            for update in message.updates:
                self._take(update, now)

    def on_suspect(self, stream: Stream[Any], *, suspect: bool) -> None:
        """The machine is busy."""

    def on_closed(self, stream: Stream[Any], reason: str) -> None:
        """We closed it, or the requests never end."""

    def _begin(self) -> None:
        now = _clock.now()
        if now >= self._until:
            self._num_running -= 1
            if self._num_running == 0:
                self._ended.set()
            return
        name = RequestId(f"bench~0.{next(self._names)}")
        least, most = self._load.tokens
        sampling = SamplingParams(
            max_tokens=self._dice.randint(least, most), temperature=0, ignore_eos=True
        )
        request = EngineRequest(name, self._prompt, sampling, priority=self._load.pace_us)
        self._sent_at[name] = now
        self._stream.send(StartRequest(request, 1, (_CANDIDATE,), 600.0))

    def _take(self, update: TokenUpdate, now: float) -> None:
        measured = self._measured
        measured.num_chunks += 1
        if update.start_index == 0:
            measured.ttft.append(now - self._sent_at.pop(update.request_id))
        elif self._load.pace_us:
            measured.lateness.append(lateness_s(self._load.pace_s, now))
        if update.finish_reason is not None:
            measured.num_requests += 1
            self._begin()
