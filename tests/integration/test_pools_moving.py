"""A decode worker with both pools, as processes have them: it hands over what runs, KV and all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from control_plane.roles.pools import Pools
from core.clock import SystemClock
from core.ids import new_boot
from core.messages import DrainWorker, MoveRequest, RequestMoved, WorkerOrder
from core.request import EngineRequest
from core.worker_record import Hello, Role
from decode_pool.ports import DecodePorts
from decode_pool.worker import DecodeWorker
from engine.events import CacheChanged
from kv_transfer.inprocess.model import Faults, Frozen
from prefill_pool import worker as prefill_worker
from prefill_pool.ports import PrefillPorts
from prefill_pool.worker import PrefillWorker
from tests.pool_cluster import (
    Answer,
    Machine,
    MemoryStream,
    PoolCluster,
    RouterEnd,
    join_streams,
    pool_cluster,
    request_of,
    served,
    until,
)

pytestmark = pytest.mark.anyio


class Mover(RouterEnd):
    """A router that keeps what moved."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[RequestMoved] = []

    def on_message(self, stream: MemoryStream, message: object) -> None:
        if isinstance(message, RequestMoved):
            self.moved.append(message)
        else:
            super().on_message(stream, message)


class Leaver:
    """A worker with both pools beside a cluster's own, and its router."""

    def __init__(self, cluster: PoolCluster, role: Role = Role.DECODE) -> None:
        self.cluster = cluster
        self.machine = Machine(cluster, "decode-1", role, 64)
        self.orders: list[WorkerOrder] = []
        whose = (self.machine.record, cluster.config, SystemClock())
        self.decode, self.prefill = DecodeWorker(*whose), PrefillWorker(*whose)
        self.pools = Pools(role, self.decode, self.prefill, self.orders.append)
        self.router = Mover()
        self.cache_changes: list[CacheChanged] = []

    async def start(self) -> None:
        machine, pools = self.machine, self.pools
        await machine.start_threads(
            pools.on_engine_events, pools.on_failure, self.decode.on_notification
        )
        machine.task = asyncio.create_task(self._run())
        join_streams(
            Hello("router", "router-1", new_boot()), self.router, machine.hello, pools.front
        )
        self.cluster.prefill_machines.append(machine)
        self.cluster.prefills.append(self.prefill)

    async def _run(self) -> None:
        machine = self.machine
        async with asyncio.TaskGroup() as group:
            group.create_task(
                self.prefill.run(
                    PrefillPorts(
                        machine.engine,
                        machine.fabric,
                        machine.region,
                        machine.new_transport,
                        on_renewed=self.decode.renewed,
                    )
                )
            )
            group.create_task(
                self.decode.run(
                    DecodePorts(
                        machine.engine,
                        machine.fabric,
                        machine.region,
                        self.cluster.connect,
                        self.cache_changes.append,
                        lambda _: None,
                        lambda _: None,
                        on_moved=self.prefill.expect,
                        without_writes=self.prefill.without_writes,
                    )
                )
            )


@asynccontextmanager
async def leaving(
    num_prefills: int = 0,
    role: Role = Role.DECODE,
    faults: Faults | None = None,
    prompt_token_s: float = 0.0,
) -> AsyncGenerator[Leaver]:
    async with pool_cluster(
        num_prefills=num_prefills, faults=faults, prompt_token_s=prompt_token_s
    ) as cluster:
        leaver = Leaver(cluster, role)
        await leaver.start()
        yield leaver
        await leaver.machine.stop()


async def move(leaver: Leaver, request: EngineRequest) -> RequestMoved:
    """Ask for a request, and return its last word."""
    leaver.router.stream.send(MoveRequest(request.request_id, 1))
    await until(lambda: bool(leaver.router.moved))
    return leaver.router.moved[0]


def go_on(leaver: Leaver, request: EngineRequest, first: Answer) -> Answer:
    """Have the cluster's decode worker go on, as a router would."""
    outputs = tuple(tuple(first.tokens[i]) for i in range(request.sampling.n))
    moved = EngineRequest(request.request_id, request.prompt, request.sampling, outputs)
    return leaver.cluster.router.start(moved, (leaver.machine.candidate,), dispatch=2)


@pytest.mark.parametrize("role", [Role.DECODE, Role.BOTH])
async def test_samples_go_on_elsewhere_with_the_prompt_s_kv_from_the_cache(role: Role) -> None:
    async with leaving(role=role) as leaver:
        request = request_of(
            "r", range(10, 51), n=2, max_tokens=40, logprobs=2, temperature=1.0, seed=5,
            presence_penalty=0.5, ignore_eos=True,
        )  # fmt: skip
        first = leaver.router.start(request)
        await first.until(lambda answer: len(answer.tokens[1]) >= 3)
        leaver.pools.drain()
        assert await move(leaver, request) == RequestMoved(request.request_id, 1, has_kv=True)
        told = {sample: len(first.tokens[sample]) for sample in (0, 1)}
        logprobs = {sample: list(first.logprobs[sample]) for sample in (0, 1)}
        second = await served(go_on(leaver, request, first), request)
        leaver.cluster.expect(request, second)
        (*_, trace) = second.traces
        assert (trace.prefill_worker, trace.attempt) == ("decode-1", 1)
        stats = await leaver.machine.stats()
        assert (stats.peer_tokens_cached, stats.peer_tokens_computed) == (40, 1)
        undisturbed = await served(leaver.cluster.router.start(request, (), dispatch=3), request)
        for sample in (0, 1):
            assert len(first.tokens[sample]) == told[sample], "no token after the last word"
            whole = logprobs[sample] + second.logprobs[sample]
            assert whole == undisturbed.logprobs[sample]
        await leaver.cluster.until_idle()
        await until(lambda: not leaver.pools.num_open)
        assert any(load.is_draining for load in leaver.router.loads)


async def test_a_lone_sample_goes_on_elsewhere_with_the_kv_of_its_output_too() -> None:
    async with leaving() as leaver:
        request = request_of("r", range(10, 51), max_tokens=60, ignore_eos=True)
        first = leaver.router.start(request)
        await first.until(lambda answer: len(answer.tokens[0]) >= 30)
        leaver.pools.drain()
        assert await move(leaver, request) == RequestMoved(request.request_id, 1, has_kv=True)
        num_moved = len(request.prompt) + len(first.tokens[0]) - 1
        second = await served(go_on(leaver, request, first), request)
        leaver.cluster.expect(request, second)
        stats = await leaver.machine.stats()
        block_size = leaver.machine.record.block_size
        num_cached = (num_moved - 1) // block_size * block_size
        told = (stats.peer_tokens_cached, stats.peer_tokens_computed)
        assert told == (num_cached, num_moved - num_cached)
        await leaver.cluster.until_idle()


async def test_one_whose_prompt_is_not_computed_brings_nothing_along() -> None:
    async with leaving(num_prefills=1, faults=Faults(min_delay_s=0.2, max_delay_s=0.2)) as leaver:
        request = request_of("r", range(10, 50))
        prefill = leaver.cluster.candidates[:1]
        first = leaver.router.start(request, prefill)
        await leaver.cluster.pushing()
        assert await move(leaver, request) == RequestMoved(request.request_id, 1, has_kv=False)
        assert leaver.pools.num_open, "a write of the prefill worker may still land"
        await until(lambda: not leaver.pools.num_open)
        assert not leaver.pools.num_running
        second = await served(go_on(leaver, request, first), request)
        leaver.cluster.expect(request, second)
        assert second.traces[-1].decision == "fallback", "it takes asks of moved requests only"


async def test_what_ended_is_not_moved_and_what_is_left_fails_retriably() -> None:
    async with leaving() as leaver:
        ended = request_of("a", range(10, 30))
        running = request_of("b", range(9), max_tokens=200, ignore_eos=True)
        await served(leaver.router.start(ended), ended)
        answer = leaver.router.start(running)
        await answer.until(lambda found: len(found.tokens[0]) >= 2)
        leaver.router.stream.send(MoveRequest(ended.request_id, 1))
        leaver.router.stream.send(MoveRequest(running.request_id, 7))
        await until(lambda: leaver.pools.num_running == 1)
        leaver.pools.drain()
        leaver.pools.fail_over()
        await served(answer, running)
        assert answer.failed is not None
        assert answer.failed.retriable
        assert leaver.router.moved == []
        assert not leaver.pools.num_open


async def test_orders_go_to_the_process_and_a_role_decides_who_hears_the_rest() -> None:
    async with leaving() as leaver:
        router, request = leaver.router, request_of("r", range(10, 30))
        router.stream.send(DrainWorker(5.0))
        await until(lambda: leaver.orders == [DrainWorker(5.0)])
        router.stream.other.listener.on_suspect(router.stream.other, suspect=True)
        leaver.pools.serve_as(Role.PREFILL)
        refused = await served(router.start(request), request)
        assert refused.refused is not None
        assert refused.refused.reason == "wrong_role"
        other = leaver.cluster.router
        asked = await served(other.start(request, (leaver.machine.candidate,)), request)
        assert asked.traces[-1].prefill_worker == "decode-1"
        await until(lambda: router.loads[-1].transfer_bytes_per_s is None)
        leaver.pools.serve_as(Role.BOTH)
        again = request_of("s", range(10, 30))
        alone = await served(router.start(again), again)
        assert alone.traces[-1].decision == "colocated"
        router.stream.close("the router stops")
        await until(lambda: router.stream.other.is_closed)


async def test_while_its_region_moves_nothing_is_written_and_then_all_goes_on() -> None:
    async with leaving(prompt_token_s=0.002) as leaver:
        leaver.pools.serve_as(Role.PREFILL)
        request = request_of("r", range(10, 90))
        answer = leaver.cluster.router.start(request, (leaver.machine.candidate,))
        await leaver.cluster.pushing()
        async with leaver.prefill.without_writes():
            stats = leaver.prefill.stats()
            assert stats is not None
            before = stats.blocks_pushed
            await asyncio.sleep(0.1)  # three chunks' time
            stats = leaver.prefill.stats()
            assert stats is not None
            assert stats.blocks_pushed == before
            machine = leaver.machine
            await machine.engine.call(lambda _: machine.region.fence())
            await machine.fabric.call(lambda transport: transport.register(machine.region))
        leaver.cluster.expect(request, await served(answer, request))
        await until(lambda: leaver.router.loads[-1].fences == 1)
        assert any(change.stored for change in leaver.cache_changes), "of a prompt for a peer, too"
        await leaver.cluster.until_idle()


async def test_writes_that_do_not_end_lose_their_agent_before_the_region_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_worker, "QUIET_S", 0.05)
    async with leaving(faults=Faults(min_delay_s=0.01, max_delay_s=0.01)) as leaver:
        leaver.pools.serve_as(Role.PREFILL)
        cluster = leaver.cluster
        request = request_of("r", range(10, 90))
        answer = cluster.router.start(request, (leaver.machine.candidate,))
        await cluster.pushing()
        cluster.fabric.freeze(cluster.decode_machine.agent, Frozen.ALL)
        async with leaver.prefill.without_writes():
            stats = leaver.prefill.stats()
            assert stats is not None
        await until(lambda: (leaver.prefill.stats() or stats).agent_renewals == 1)
        cluster.fabric.thaw(cluster.decode_machine.agent)
        cluster.expect(request, await served(answer, request))
        await cluster.until_idle()


async def test_before_it_runs_there_is_nothing_to_wait_for() -> None:
    async with pool_cluster(num_prefills=0) as cluster:
        leaver = Leaver(cluster)
        async with leaver.prefill.without_writes():
            assert not leaver.pools.num_open
        leaver.prefill.expect(request_of("r", range(3)).request_id)
        assert not leaver.pools.num_running
        leaver.machine.region.close()
