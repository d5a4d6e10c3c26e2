"""What receiving costs a decode worker: generated tokens a second while a peer's blocks arrive,
over those while none do.

The engine decodes on one core, as a decode worker of one thread. A process on another writes
prompts of 256 tokens into the same pool over NIXL, as many as answers of 128 tokens at this speed
would need; the transfer thread waits for their notifications as in a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator

import msgspec

from bench.engine_child import ROOT, Task
from bench.engine_ours import TimedEngine
from bench.figures import Figure, figure
from bench.handoff_fabric import Introduction
from bench.interleave import interleave, ratios
from core.clock import SystemClock
from core.config import Config, EngineConfig
from core.environment import child_environment
from core.ids import BlockId, Boot
from deploy.model_path import resolve_model
from deploy.worker.replica import load_executor, make_engine, plan_replica
from kv_transfer.descriptors import paired_spans
from kv_transfer.nixl.transport import NixlTransport
from kv_transfer.region import HostRegion
from kv_transfer.transfer_thread import TransferThread
from kv_transfer.transport import Notification, PeerName, RemoteRegion, TransferState

ROUNDS = 9
AIM = 0.98
PROMPT_BLOCKS = 16
_OUTPUT_TOKENS = 128
_TASK = Task("decode", 8, 512)
_ENGINE_BLOCKS = 1024
_TARGET = PeerName("target@1")
_CONFIG = Config(engine=EngineConfig(threads=1))
_CLOCK = SystemClock()


def run() -> Iterator[Figure]:
    """Yield the ratio, and both rates."""
    before = os.sched_getaffinity(0)
    cores = sorted(before)[:2]
    os.sched_setaffinity(0, {cores[0]})
    try:
        with _decoding() as (engine, region), _fabric(region) as fabric:
            rate = _rate(engine)

            def receiving(_: int) -> float:
                prompts_per_s = rate / _OUTPUT_TOKENS
                return fabric.while_receiving(lambda: _rate(engine), prompts_per_s, cores[-1])

            def alone(_: int) -> float:
                return _rate(engine)

            samples = interleave({"alone": alone, "receiving": receiving}, ROUNDS)
    finally:
        os.sched_setaffinity(0, before)
    for name, rates in samples.items():
        yield figure(f"receiving.{name}", rates, "tokens/s", against=f"{_TASK.name}, 1 thread")
    yield figure(
        "receiving.share",
        ratios(samples, "receiving", "alone"),
        "of the tokens/s",
        against="not receiving",
        at_least=AIM,
    )


def _rate(engine: TimedEngine) -> float:
    total = [engine.measure(_TASK) for _ in range(3)]
    return sum(tokens for tokens, _ in total) / sum(seconds for _, seconds in total)


@contextlib.contextmanager
def _decoding() -> Generator[tuple[TimedEngine, HostRegion]]:
    """An engine whose pool has room for arrivals behind its own blocks."""
    model = resolve_model("")
    plan = msgspec.structs.replace(plan_replica(_CONFIG, model), num_blocks=_ENGINE_BLOCKS)
    num_bytes = (_ENGINE_BLOCKS + PROMPT_BLOCKS) * plan.layout.block_bytes
    with contextlib.closing(HostRegion(num_bytes)) as region:
        region.prefault()
        executor = load_executor(_CONFIG, plan, model, region)
        with contextlib.closing(make_engine(_CONFIG, plan, executor)) as engine:
            yield TimedEngine(engine, plan.spec.vocab_size), region


class _Fabric:
    """This process's side of the fabric, on a loop of its own thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, introduction: bytes) -> None:
        self._loop = loop
        self._introduction = introduction
        self.num_arrived = 0

    def while_receiving(
        self, measure: Callable[[], float], prompts_per_s: float, core: int
    ) -> float:
        """Measure while a writer's prompts arrive."""
        writing = asyncio.run_coroutine_threadsafe(self._write(prompts_per_s, core), self._loop)
        process = writing.result()
        arrived = self.num_arrived
        rate = measure()
        num_arrived = self.num_arrived - arrived
        asyncio.run_coroutine_threadsafe(_end(process), self._loop).result()
        assert num_arrived > 0, "nothing arrived meanwhile"
        return rate

    async def _write(self, prompts_per_s: float, core: int) -> asyncio.subprocess.Process:
        command = (sys.executable, "-m", "bench.receiving", str(prompts_per_s), str(core))
        process = await asyncio.create_subprocess_exec(
            *command,
            env=child_environment(),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(self._introduction + b"\n")
        await process.stdout.readline()  # its first prompt is here
        return process


async def _end(process: asyncio.subprocess.Process) -> None:
    process.kill()
    await process.wait()


@contextlib.contextmanager
def _fabric(region: HostRegion) -> Generator[_Fabric]:
    transport = NixlTransport(_TARGET)
    transport.register(region)
    remote = RemoteRegion(_TARGET, Boot("1"), region.address, region.num_bytes, 0)
    introduction = msgspec.json.encode(Introduction(remote, transport.metadata()))
    loop = asyncio.new_event_loop()
    runner = threading.Thread(target=loop.run_forever, daemon=True)
    runner.start()
    fabric = _Fabric(loop, introduction)

    def arrived(_: Notification) -> None:
        fabric.num_arrived += 1

    thread = TransferThread(
        transport, loop=loop, on_notification=arrived, poll_s=0.0001, clock=_CLOCK
    )
    thread.start()
    thread.watch()
    try:
        yield fabric
    finally:
        asyncio.run_coroutine_threadsafe(thread.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        runner.join()
        loop.close()


async def _write_prompts(prompts_per_s: float) -> None:
    """The writer: a prompt's blocks into the end of the target's pool, at a pace."""
    introduction = msgspec.json.decode(sys.stdin.buffer.readline(), type=Introduction)
    target = introduction.region
    block_bytes = target.num_bytes // (_ENGINE_BLOCKS + PROMPT_BLOCKS)
    region = HostRegion(PROMPT_BLOCKS * block_bytes)
    transport = NixlTransport(PeerName(f"writer-{os.getpid()}@1"))
    transport.register(region)
    transport.add_peer(_TARGET, introduction.metadata)
    loop = asyncio.get_running_loop()
    thread = TransferThread(
        transport, loop=loop, on_notification=lambda _: None, poll_s=0.0001, clock=_CLOCK
    )
    thread.start()
    sources = [BlockId(block) for block in range(PROMPT_BLOCKS)]
    targets = [BlockId(_ENGINE_BLOCKS + block) for block in sources]
    local, there = paired_spans(sources, targets, block_bytes)
    due = _CLOCK.now()
    while True:
        outcome = await thread.write(target, local, there, b"prompt")
        assert outcome.state is TransferState.DONE, outcome
        sys.stdout.write("written\n")
        sys.stdout.flush()
        due += 1 / prompts_per_s
        await asyncio.sleep(max(0.0, due - _CLOCK.now()))


if __name__ == "__main__":
    os.sched_setaffinity(0, {int(sys.argv[2])})
    asyncio.run(_write_prompts(float(sys.argv[1])))
