"""Whatever comes on a prefill worker's stream, or as a notification of a write, a decode worker
serves on: each request ends, those that nobody lied about are right, and every block comes back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from core.ids import Attempt, Boot, HandoffId, RequestId
from core.messages import (
    FirstTokens,
    HandoffFailed,
    HandoffProgress,
    HandoffRefused,
    HandoffScored,
    HandoffSettled,
    PrefillCandidate,
    WriteNotification,
)
from core.request import EngineRequest, FinishReason, PromptLogprobs, TokenLogprobs
from kv_transfer.transport import Notification, PeerName
from prefill_pool.worker import PrefillWorker
from tests.message_strategies import structs
from tests.pool_cluster import (
    EOS,
    VOCAB,
    Answer,
    PoolCluster,
    pool_cluster,
    request_of,
    served,
    until,
)

VICTIMS = ("a", "b")
"""Of these anything is said; of others whatever is not of their current attempt."""

SMALL = st.integers(0, 3)
SETTINGS = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
CURRENT = st.builds(
    HandoffId,
    st.sampled_from(VICTIMS).map(RequestId),
    st.just(Attempt(1, 1)) | st.just(Attempt(1, 2)),
)
OTHERS = st.builds(
    HandoffId,
    st.sampled_from([*VICTIMS, "nobody"]).map(RequestId),
    st.builds(Attempt, SMALL, SMALL),
) | st.just(HandoffId(RequestId("good"), Attempt(1, 9)))
HANDOFFS = CURRENT | CURRENT | CURRENT | OTHERS
SECONDS = st.sampled_from([0.0, 0.1, -1.0, float("nan"), float("inf")])
REASONS = st.sampled_from([None, None, None, *FinishReason])
FIRST_TOKENS = st.integers(1, 3).flatmap(
    lambda n: structs(
        FirstTokens,
        handoff=HANDOFFS,
        token_ids=st.tuples(*[st.integers(0, VOCAB - 1) | st.just(2**32 - 1)] * n),
        finish_reasons=st.tuples(*[REASONS] * n),
        logprobs=st.just(()) | st.tuples(*[structs(TokenLogprobs)] * n),
        cached_tokens=SMALL | st.just(2**32 - 1),
        queue_s=SECONDS,
        prefill_s=SECONDS,
    )
)
WRITES = structs(
    WriteNotification,
    handoff=HANDOFFS,
    rank_pair=st.just((0, 0)) | st.tuples(SMALL, SMALL),
    generation=st.integers(-1, 2),
    first_block=st.integers(-9, 9) | st.just(2**31),
    num_blocks=st.integers(-9, 9) | st.just(2**31),
    checksum=st.none() | SMALL,
)
WORDS = st.one_of(
    FIRST_TOKENS,
    structs(HandoffProgress, handoffs=st.lists(HANDOFFS, max_size=3).map(tuple)),
    structs(HandoffScored, handoff=HANDOFFS, logprobs=structs(PromptLogprobs, start=SMALL)),
    structs(HandoffRefused, handoff=HANDOFFS),
    structs(HandoffFailed, handoff=HANDOFFS),
    structs(HandoffSettled, handoff=HANDOFFS),
    WRITES.map(msgspec.msgpack.encode),
    st.binary(max_size=12),
)
SCRIPTS = st.lists(st.tuples(st.sampled_from([0.0, 0.004, 0.015]), WORDS), min_size=1, max_size=8)
SAMPLINGS = st.fixed_dictionaries(
    {"n": st.integers(1, 2), "prompt_logprobs": st.none() | SMALL, "logprobs": st.none() | SMALL}
)


@pytest.fixture(scope="module")
def pools() -> Iterator[tuple[asyncio.Runner, PoolCluster]]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        opened = pool_cluster(num_prefills=2, try_s=0.3, quarantine_s=0.1, prompt_token_s=0.0008)
        cluster = runner.run(stack.enter_async_context(opened))
        yield runner, cluster
        runner.run(stack.aclose())


class Round:
    """Two requests of which anything is said, and one that nobody lies about."""

    def __init__(self, cluster: PoolCluster, number: int, sampling: dict[str, Any]) -> None:
        self._cluster = cluster
        self._number = number
        base = 20 * number % 900
        prompt = range(base, base + 30)
        self._good = request_of(self._name("good"), prompt, n=2, logprobs=1)
        self._victims = [
            request_of(self._name(name), [*prompt, at], **sampling)
            for at, name in enumerate(VICTIMS)
        ]

    async def run(self, script: list[tuple[float, Any]]) -> None:
        cluster = self._cluster
        first, second = cluster.candidates
        victims = [self._start(one, (first,)) for one in self._victims[:1]]
        victims += [self._start(one, (first, second)) for one in self._victims[1:]]
        good = self._start(self._good, (first,))
        for wait_s, word in script:
            await asyncio.sleep(wait_s)
            self._say(word)
        for request, answer in zip((*self._victims, self._good), (*victims, good), strict=True):
            await served(answer, request)
        cluster.expect(self._good, good)
        await cluster.until_idle()
        assert not cluster.decode_machine.task.done()
        cluster.router.answers.clear()

    def _start(self, request: EngineRequest, candidates: tuple[PrefillCandidate, ...]) -> Answer:
        return self._cluster.router.start(request, candidates)

    def _say(self, word: Any) -> None:
        """Say it in the first prefill worker's place."""
        cluster = self._cluster
        machine = cluster.prefill_machines[0]
        if isinstance(word, bytes):
            cluster.decode.on_notification(Notification(PeerName("prefill-0"), self._write(word)))
            return
        stream = next(one for one in cluster.streams if one.peer.boot == machine.record.boot)
        stream.other.send(self._named(word))

    def _write(self, payload: bytes) -> bytes:
        """Return a notification of this round's requests, as from the first prefill worker."""
        try:
            write = msgspec.msgpack.decode(payload, type=WriteNotification)
        except msgspec.DecodeError:
            return payload
        source = self._cluster.prefill_machines[0].record.boot
        target = self._cluster.decode_machine.record.boot
        named = msgspec.structs.replace(
            write, handoff=self._handoff(write.handoff), source=source, target=target
        )
        if named.num_blocks > 0:  # a lie about what has landed, which no receiver can see
            named = msgspec.structs.replace(named, source=Boot("another"))
        return msgspec.msgpack.encode(named)

    def _named(self, word: Any) -> Any:
        if isinstance(word, HandoffProgress):
            return HandoffProgress(tuple(map(self._handoff, word.handoffs)))
        return msgspec.structs.replace(word, handoff=self._handoff(word.handoff))

    def _handoff(self, handoff: HandoffId) -> HandoffId:
        return HandoffId(RequestId(self._name(handoff.request_id)), handoff.attempt)

    def _name(self, name: str) -> str:
        return f"{name}-{self._number}"


def told(token_id: int, reason: FinishReason | None) -> list[tuple[float, Any]]:
    """Return first tokens before any are computed, at several moments."""
    handoff = HandoffId(RequestId(VICTIMS[0]), Attempt(1, 1))
    tokens = FirstTokens(handoff, (token_id,), (), (reason,), 0, 0.0, 0.0)
    return [(0.002, tokens)] * 8


def test_any_words_of_a_prefill_worker_harm_nobody_else(
    pools: tuple[asyncio.Runner, PoolCluster],
) -> None:
    runner, cluster = pools
    rounds, errors = itertools.count(), list[dict[str, Any]]()
    runner.get_loop().set_exception_handler(lambda _, context: errors.append(context))
    runner.run(Round(cluster, next(rounds), {}).run([]))  # connects

    @SETTINGS
    @given(SCRIPTS, SAMPLINGS)
    @example(told(EOS, None), {})
    @example(told(20, FinishReason.STOP), {})
    def fuzz(script: list[tuple[float, Any]], sampling: dict[str, Any]) -> None:
        runner.run(Round(cluster, next(rounds), sampling).run(script))
        assert not errors, errors

    fuzz()


@pytest.mark.anyio
async def test_a_worker_does_not_end_the_quarantine_of_another_s_writes() -> None:
    """The first asked stands still for ever; what may still come of it is not the second's to
    say."""
    async with pool_cluster(num_prefills=2, quarantine_s=60.0, prompt_token_s=0.001) as cluster:
        first, second = cluster.candidates
        for base, candidate in ((100, first), (200, second)):
            connecting = request_of(f"connecting-{base}", range(base, base + 30))
            await served(cluster.router.start(connecting, (candidate,)), connecting)
        left = request_of("left", range(300, 390))
        answer = cluster.router.start(left, (first,))
        await until(lambda: bool(under_way(cluster.prefills[0])))
        cluster.freeze_prefill(0)
        cluster.expect(left, await served(answer, left))
        settled = HandoffSettled(HandoffId(left.request_id, Attempt(1, 1)))
        stream = next(one for one in cluster.streams if one.peer.boot == second.boot)
        stream.other.send(settled)
        behind = request_of("behind", range(500, 530))
        await served(cluster.router.start(behind, (second,)), behind)
        stats = cluster.decode.stats()
        assert stats is not None
        assert stats.quarantined_attempts == 1


def under_way(prefill: PrefillWorker) -> int:
    """Return how many attempts a prefill worker works on."""
    stats = prefill.stats()
    return 0 if stats is None else sum(stats.attempts_by_stage.values())
