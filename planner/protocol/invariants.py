"""What must hold at every moment (handoff.md), and what is wrong when it does not.

writable      a write lands in blocks that are reserved or quarantined for its own attempt, or in a
              mapped sink
owned         a step writes blocks that a sequence owns
source        the blocks that a write reads are held for it until it is DONE
tail          nothing stands behind the last token of a partial block that lands
accounting    one owner a block, and all that `Engine.check_invariants` says
radix         the tree holds only blocks whose every position is computed
contiguous    a client's streams lack no token and repeat none
oracle        every token is the one that its prefix gives
gauges        requests by state sum to the requests there are; blocks to the pool
crash         no process ends by itself
refused       no request fails although workers came back for it
stuck         after the faults, everything ends and every block is free or cached
left          a worker that leaves before its time is over owns, owes and awaits nothing
fenced        where nothing goes wrong and nothing is slow, nothing needs a fence
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from core.block_hash import BlockHash
from core.ids import BlockId, RequestId
from core.messages import WriteNotification
from engine.memory.block_pool import BlockState
from kv_transfer.transport import PeerName, Span
from planner.protocol.blocks import BlockContents
from planner.protocol.nic import Agent, PostedWrite
from planner.protocol.scenario import BLOCK_SIZE
from planner.protocol.worker import Worker

Violated = Callable[[str, str], None]
"""Told the invariant's name and what happened."""


class Violation(msgspec.Struct, frozen=True):
    """The first invariant that did not hold."""

    invariant: str
    text: str
    at: float


class EngineChecks:
    """Looks at an engine after each of its rounds."""

    def __init__(self, contents: BlockContents, violated: Violated) -> None:
        self._contents = contents
        self._violated = violated
        self._cached: dict[Worker, dict[BlockHash, BlockId]] = {}

    def step_writes(self, worker: Worker, block_ids: list[BlockId]) -> None:
        """A step may write blocks that a sequence owns, and no others."""
        pool = worker.engine.scheduler.state.memory.pool
        for block_id in block_ids:
            if pool.state(block_id) is not BlockState.OWNED:
                what = pool.state(block_id).name
                text = f"{worker.process}: a step writes block {block_id}, which is {what}"
                self._violated("owned", text)

    def after_round(self, worker: Worker) -> None:
        """Check the accounting, and what the radix tree has gained, where anything changed."""
        if not worker.engine.needs_check():
            return
        try:
            worker.engine.check_invariants()
        except AssertionError as error:
            self._violated("accounting", f"{worker.process}: {error!r}")
            return
        before = self._cached.get(worker, {})
        cache = worker.engine.scheduler.state.memory.cache
        now = self._cached[worker] = self._contents.cached(cache)
        if len(now) != len(cache):
            self._violated("radix", f"{worker.process}: holds blocks of no request's tokens")
        memory = worker.region.view()
        for block_hash, block_id in now.items():
            is_new = before.get(block_hash) != block_id
            if is_new and not self._contents.is_complete(block_hash, memory, block_id):
                text = f"block {block_id} is matchable, and its bytes are not its tokens'"
                self._violated("radix", f"{worker.process}: {text}")

    def has_left(self, worker: Worker) -> None:
        """Where there was time, all was finished or moved, and nothing can land any more."""
        is_late = worker.clock.now() >= worker.end.leave_by
        if is_late or worker.engine_driver.has_jobs:
            return
        counts = worker.engine.scheduler.state.memory.pool.counts()
        if counts.owned or counts.reserved or counts.quarantined:
            self._violated("left", f"{worker.process} left with {counts}")


class LandingChecks:
    """Looks at every span of a write that lands."""

    def __init__(
        self, contents: BlockContents, agent_of: Callable[[PeerName], Worker], violated: Violated
    ) -> None:
        self._contents = contents
        self._agent_of = agent_of
        self._violated = violated

    def landed(self, write: PostedWrite, index: int) -> None:
        """A span has just landed."""
        target = self._agent_of(write.remote.peer)
        if target.region.memory_at(write.remote.address) is None:
            text = f"{write.note.handoff} wrote to {target.process} where nothing is mapped"
            self._violated("writable", text)
        elif write.remote.address == target.region.address:
            self._check_target(write.note, write.target[index], target)
        source = self._agent_of(write.source)
        if source.process.is_alive and not write.is_cut:
            self._check_source(write.note, write.local[index], source)

    def _check_target(self, note: WriteNotification, span: Span, target: Worker) -> None:
        state = target.engine.scheduler.state
        writable = state.receiving.writable(note.handoff)
        for block_id in blocks_of(span, target):
            if block_id not in writable:
                what = state.memory.pool.state(block_id).name
                text = f"{note.handoff} wrote block {block_id} of {target.process}, which is {what}"
                self._violated("writable", text)
                return
        sequence = state.handoffs.get(note.handoff)
        if sequence is None:
            return
        num_tail = len(sequence.token_ids) % BLOCK_SIZE
        tail = sequence.block_ids[-1] if num_tail and sequence.block_ids else None
        if tail is not None and tail in blocks_of(span, target):
            memory = target.region.view()
            if not self._contents.is_tail_zero(memory, tail, num_tail):
                self._violated("tail", f"{note.handoff} brought bytes behind its last token")

    def _check_source(self, note: WriteNotification, span: Span, source: Worker) -> None:
        run = source.engine.scheduler.state.runs.get(RequestId(str(note.handoff)))
        held = {block for sequence in run.sequences for block in sequence.block_ids} if run else ()
        if not all(block_id in held for block_id in blocks_of(span, source)):
            text = f"{source.process} let go of blocks that a write of {note.handoff} reads"
            self._violated("source", text)


def blocks_of(span: Span, agent: Agent) -> list[BlockId]:
    """Return the blocks that a span covers."""
    size = agent.block_bytes
    first, end = span.offset // size, (span.offset + span.num_bytes - 1) // size + 1
    return [BlockId(block_id) for block_id in range(first, end)]
