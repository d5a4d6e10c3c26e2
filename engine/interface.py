"""The engine as its pool sees it; `engine.engine.Engine` implements it.

Every method runs on the engine's own thread, between steps (`engine.engine_thread.EngineThread`
carries calls there), so none of them locks and all are quick.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from core.ids import HandoffId, RequestId
from core.request import EngineRequest
from engine.events import EngineStats, Event, Mode


class EngineApi(Protocol):
    """add -> (events of step) -> finished | abort; see `engine.events` for the three modes."""

    def add(self, request: EngineRequest, mode: Mode, *, handoff: HandoffId | None = None) -> None:
        """Queue a request without blocks.

        Args:
            request: `outputs` that are not empty are forced (never sampled again, never
                re-emitted).
            handoff: for RECEIVE, the attempt that the reservation will belong to.

        Raises:
            RequestError: longer than `max_model_len` or than the pool can ever hold (400,
                `context_length_exceeded`), a token id beyond the vocabulary (400,
                `invalid_token_id`), or `max_waiting` reached (429).
        """
        ...

    def kv_arrived(
        self,
        handoff: HandoffId,
        first_tokens: Sequence[int],
        *,
        num_received: int,
        num_peer_cached: int = 0,
    ) -> None:
        """All writes of this attempt are in: its blocks become owned and its samples run.

        Full blocks enter the radix cache (insert if absent). With n samples the request
        forks here, sharing all blocks copy-on-write. Samples whose first token ended them do not
        run. No `Generated` is emitted for the first tokens: the pool sent them on already.

        Args:
            first_tokens: one a sample, or empty when the request's outputs were forced.
            num_received: prompt tokens that came over the fabric, for the counters.
            num_peer_cached: prompt tokens that the peer found in its cache, for the counters.
        """
        ...

    def retry(self, handoff: HandoffId, successor: HandoffId, request: EngineRequest) -> None:
        """Abandon an attempt: its inbound blocks go to quarantine under `handoff`, and the request
        queues at the front for fresh ones under `successor` (a `Reserved` follows)."""
        ...

    def compute_locally(self, handoff: HandoffId, request: EngineRequest) -> None:
        """Abandon an attempt for good: its inbound blocks go to quarantine under `handoff`, and
        the request queues at the front as LOCAL."""
        ...

    def end_reservation(
        self, handoff: HandoffId, *, quarantine: bool, answered: bool = False
    ) -> None:
        """End a RECEIVE request before it joined: its inbound blocks are freed, or quarantined
        where a write may still land in them.

        Args:
            answered: its first tokens were emitted, so its prompt counts as received.
        """
        ...

    def end_quarantine(self, handoff: HandoffId) -> int:
        """Free the blocks of a settled or fenced attempt; return how many (0: none, harmless)."""
        ...

    def release(self, request_id: RequestId) -> None:
        """PREFILL: the writes are done (or the fabric's agent is destroyed); let go of the
        blocks."""
        ...

    def abort(self, request_id: RequestId, sample_index: int | None = None) -> None:
        """End a LOCAL or joined request (or one sample of it), or an unfinished PREFILL.

        Takes effect at the next step, and emits nothing. Blocks of a PREFILL request that has
        started stay held until `release`.
        """
        ...

    def step(self, tell: Callable[[list[Event]], object] | None = None) -> list[Event]:
        """Run one iteration: schedule, submit, and apply what is due. Returns what happened.

        Args:
            tell: called with the events of scheduling, if any, before the step computes: a peer is
                asked for its KV, and cached blocks are sent, while it does. Those are then not
                returned.
        """
        ...

    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        ...

    def settle(self) -> None:
        """Wait until no step is being computed: the pool may move then. What the steps told comes
        out of the next `step`."""
        ...

    def stats(self) -> EngineStats:
        """Return the gauges and counters."""
        ...

    def check_invariants(self) -> None:
        """Assert the pool's, radix cache's and scheduler's invariants; takes time in proportion to
        the pool, so it is called when idle, once per change, and by tests."""
        ...
