"""What the parts of the scheduler share, and how a sequence leaves the running batch."""

from __future__ import annotations

from core.ids import HandoffId, RequestId
from engine.events import Event, Mode, Preempted
from engine.memory.kv_memory import KvMemory
from engine.scheduling.batch import Batch
from engine.scheduling.counters import Counters
from engine.scheduling.forecast import LengthHistory
from engine.scheduling.plan_builder import PlanBuilder
from engine.scheduling.receiving import Receiving
from engine.scheduling.retirement import Retirement
from engine.scheduling.sequence import Phase, RequestRun, Sequence
from engine.scheduling.settings import SchedulerSettings
from engine.scheduling.waiting_queue import WaitingQueue


class SchedulerState:
    """The queues, each the one owner of a phase.

    Attributes:
        runs: every request that is not over, by id.
        handoffs: RECEIVE sequences that wait or receive, by attempt.
        held: PREFILL sequences whose blocks are a peer's source.
        events: what happened since the last drain, in order.
    """

    def __init__(self, settings: SchedulerSettings, fingerprint: bytes) -> None:
        self.settings = settings
        self.memory = KvMemory(settings.num_blocks, settings.block_size, fingerprint)
        self.plan = PlanBuilder()
        self.waiting = WaitingQueue()
        self.batch = Batch(settings.max_slots, self.plan)
        self.receiving = Receiving(self.memory, settings.max_receiving_share)
        self.retirement = Retirement(self.memory, self.waiting)
        self.history = LengthHistory()
        self.counters = Counters()
        self.runs: dict[RequestId, RequestRun] = {}
        self.handoffs: dict[HandoffId, Sequence] = {}
        self.held: dict[RequestId, Sequence] = {}
        self.events: list[Event] = []

    def end(self, sequence: Sequence) -> None:
        """Nothing of a waiting, running or preempted sequence is sampled any more."""
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.phase is Phase.RUNNING:
            self.batch.leave(sequence)
            self.retirement.let_go(sequence)
        sequence.phase = Phase.ENDED  # a preempted one's blocks are on their way already
        self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Take a sequence out of its request, and the request out once it has none left."""
        run = sequence.run
        run.sequences.remove(sequence)
        if not run.sequences and self.runs.get(run.request_id) is run:
            del self.runs[run.request_id]

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks; it queues again when steps in flight have retired."""
        self.batch.leave(sequence)
        sequence.phase = Phase.PREEMPTED
        self.counters.preemptions += 1
        self.events.append(Preempted(sequence.run.request_id, sequence.sample_index))
        self.retirement.let_go(sequence)

    def hold_for_peer(self, sequence: Sequence) -> None:
        """A PREFILL sequence computes no more; its blocks stay until `release`."""
        self.batch.leave(sequence)
        sequence.phase = Phase.HELD
        self.held[sequence.run.request_id] = sequence

    def turn_local(self, sequence: Sequence) -> None:
        """A RECEIVE request needs no peer (any more): from here on it is like any other."""
        run = sequence.run
        if run.handoff is not None:
            del self.handoffs[run.handoff]
            run.handoff = None
            run.mode = Mode.LOCAL

    def complete_prompt(self, run: RequestRun) -> None:
        """Count a request's prompt tokens by source, once; see `EngineStats`."""
        if run.is_prompt_counted:
            return
        run.is_prompt_counted = True
        counters, cached = self.counters, run.cached_tokens or 0
        if run.mode is Mode.PREFILL:
            counters.peer_tokens_cached += cached
            counters.peer_tokens_computed += run.num_prompt - cached
            return
        counters.prompt_tokens_cached += cached
        counters.prompt_tokens_received += run.received_tokens
        counters.prompt_tokens_computed += run.num_prompt - cached - run.received_tokens
        counters.prefix_queries += run.num_prompt
        counters.prefix_hits += max(cached, run.peer_cached_tokens)
