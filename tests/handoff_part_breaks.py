"""Each breaks one rule of the handoff in a part that the handoff world merely stands in for."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from control_plane.etcd.lease import Lease
from core.block_hash import ROOT
from engine.executor.mock_pool import MockPool
from engine.memory.block_pool import BlockPool
from engine.memory.kv_memory import KvMemory
from engine.memory.radix_cache import RadixCache
from engine.scheduling import block_supply, forking, scheduler
from engine.scheduling.admission import Admission
from engine.scheduling.plan_builder import PlanBuilder
from engine.scheduling.receiving import Receiving
from engine.scheduling.retirement import Retirement
from engine.scheduling.waiting_queue import WaitingQueue
from kv_transfer.generations import Generations
from kv_transfer.handoff import decode_side, quarantine
from kv_transfer.handoff.arrivals import Arrivals
from kv_transfer.region import HostRegion
from router.dispatch import request_state
from router.dispatch.request_state import RequestState
from tests.handoff_breaks import Break, wrap

# --- names --------------------------------------------------------------------------------------


def _any_write(field: str, name: str) -> Break:
    """Have writes count whatever they say in `field`."""

    def breaks(patch: pytest.MonkeyPatch) -> None:
        def landed(original: Any, state: Any, write: Any, now: float) -> Any:
            right = {
                "source": state.candidate.boot,
                "target": state.terms.boot,
                "generation": state.generation,
                "rank_pair": (0, 0),
            }
            return original(state, replace(write, **{field: right[field]}), now)

        wrap(patch, decode_side, "_landed", landed)

    breaks.__name__ = name
    return breaks


any_writers_notification_counts = _any_write("source", "any_writers_notification_counts")
any_targets_notification_counts = _any_write("target", "any_targets_notification_counts")
any_generations_notification_counts = _any_write(
    "generation", "any_generations_notification_counts"
)
any_ranks_notification_counts = _any_write("rank_pair", "any_ranks_notification_counts")


def any_dispatchs_tokens_are_taken(patch: pytest.MonkeyPatch) -> None:
    def updated(original: Any, state: RequestState, update: Any, now: float) -> Any:
        return original(state, replace(update, dispatch=state.number), now)

    wrap(patch, RequestState, "updated", updated)


def known_tokens_are_taken_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request_state, "_without_known", lambda update, known: update)


def a_lease_counts_from_its_answer(patch: pytest.MonkeyPatch) -> None:
    def init(original: Any, lease: Any, *args: Any, clock: Any, **fields: Any) -> None:
        original(lease, *args, clock=clock, **{**fields, "sent_at": clock.now()})

    wrap(patch, Lease, "__init__", init)


# --- decode reserves, prefill pushes ------------------------------------------------------------


def receptions_take_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Receiving, "has_room", lambda self, count: True)


def the_queue_has_no_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingQueue, "__len__", lambda self: 0)


def prompts_take_what_there_is(patch: pytest.MonkeyPatch) -> None:
    def num_fresh(original: Any, admission: Any, sequence: Any, hits: Any) -> int:
        return min(1, original(admission, sequence, hits))

    wrap(patch, Admission, "_num_fresh", num_fresh)


def what_is_here_is_asked_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvMemory, "holds_prefix", lambda self, hashes, num_blocks: False)


def one_rank_is_enough(patch: pytest.MonkeyPatch) -> None:
    def is_complete(self: Arrivals) -> bool:
        return any(runs == ((self.first, self.end),) for runs in self.landed.values())

    patch.setattr(Arrivals, "is_complete", property(is_complete))


def tails_keep_their_bytes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlanBuilder, "zero", lambda self, block_ids: None)


def inbound_blocks_are_matchable(patch: pytest.MonkeyPatch) -> None:
    def reserve(original: Any, receiving: Any, handoff: Any, sequence: Any, hits: Any) -> None:
        original(receiving, handoff, sequence, hits)
        for index, block_hash in enumerate(sequence.hashes):
            parent = sequence.hashes[index - 1] if index else ROOT
            receiving._memory.cache.insert(block_hash, parent, sequence.block_ids[index])

    wrap(patch, Receiving, "reserve", reserve)


def blocks_to_be_computed_are_matchable(patch: pytest.MonkeyPatch) -> None:
    def release(original: Any, retirement: Any, sequence: Any) -> None:
        sequence.num_computed = len(sequence.token_ids)
        original(retirement, sequence)

    wrap(patch, Retirement, "_release", release)


def present_prefixes_are_inserted_again(patch: pytest.MonkeyPatch) -> None:
    def publish(original: Any, memory: Any, hashes: Any, table: Any) -> None:
        with patch.context() as inner:
            inner.setattr(RadixCache, "block_of", lambda self, block_hash: None)
            original(memory, hashes, table)

    wrap(patch, KvMemory, "publish", publish)


def hits_are_not_held(patch: pytest.MonkeyPatch) -> None:
    def reserve(original: Any, receiving: Any, *args: Any) -> None:
        with patch.context() as inner:
            inner.setattr(KvMemory, "hold", lambda self, block_ids: None)
            original(receiving, *args)

    wrap(patch, Receiving, "reserve", reserve)


def one_sample_joins(patch: pytest.MonkeyPatch) -> None:
    def fork(original: Any, state: Any, trunk: Any, outputs: Any) -> None:
        trunk.run.live &= {0}
        original(state, trunk, outputs)

    wrap(patch, scheduler, "fork", fork)
    wrap(patch, forking, "fork", fork)


def receptions_are_preempted(patch: pytest.MonkeyPatch) -> None:
    def make_room(original: Any, supply: Any) -> Any:
        state = supply._state
        if supply._survey().num_blocks > state.memory.num_available and len(state.receiving):
            state.receiving.end(next(iter(state.handoffs)), quarantine=False)
        return original(supply)

    wrap(patch, block_supply.BlockSupply, "make_room", make_room)


def blocks_are_free_under_a_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Retirement, "let_go", Retirement._release)


def whole_prompts_are_reused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvMemory, "num_reusable", lambda self, num_tokens: num_tokens // self.block_size)


def the_engine_frees_what_is_abandoned(patch: pytest.MonkeyPatch) -> None:
    def end(original: Any, receiving: Any, handoff: Any, *, quarantine: bool) -> None:
        original(receiving, handoff, quarantine=False)

    wrap(patch, Receiving, "end", end)


def quarantined_blocks_are_reserved_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "quarantine", BlockPool.cancel)


# --- the fence ----------------------------------------------------------------------------------


def the_starving_wait_like_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quarantine, "PRESSURE_S", 1e9)


def a_fence_moves_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostRegion, "_move", lambda self: None)


def steps_keep_the_base(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MockPool, "refresh", lambda self: None)


def a_fence_overtakes_outbound_writes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tests.handoff_probes.finish_outbound", lambda worker: None)


def old_descriptors_are_written_to(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Generations, "refusal", lambda self, remote: "")
