"""The run state of requests: small, and apart from the client's words (`EngineRequest`, frozen).

A *sequence* is tokens plus a block table. There is no prefill phase and no decode phase: a sequence
has tokens whose KV is computed, tokens whose step is in flight, and the rest, which it catches up
with; at the end of that it is sampled.

    tokens   | prompt ........................ | generated ....... |
             | num_computed ........ | pending ....... | uncomputed |

A request with n samples runs one *trunk* over its prompt, which forks into n sequences. One whose
KV a peer brings runs a trunk over all that comes. A request with one sample that is computed here
needs none: its prompt and its forced outputs are one run of known tokens from the start, like those
of a preempted sample.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence as Ordered

import msgspec

from core.block_hash import BlockHash
from core.ids import BlockId, HandoffId, RequestId, SlotId
from core.request import EngineRequest
from engine.events import Mode
from engine.memory.block_table import BlockTable


class Phase(enum.Enum):
    """Where a sequence is; each phase is one owner's."""

    WAITING = "waiting"
    """In the waiting queue, without blocks."""
    RECEIVING = "receiving"
    """Its reserved blocks wait for a peer's writes."""
    RUNNING = "running"
    """Has blocks, and a slot or waits for one."""
    PREEMPTED = "preempted"
    """Lost its slot; waits for steps in flight, then for blocks."""
    HELD = "held"
    """A prompt computed for a peer; its blocks stay until the writes are done."""
    ENDED = "ended"
    """Nothing of it is sampled any more; blocks go when steps in flight have retired."""


class Pending(msgspec.Struct, frozen=True):
    """One submitted, not yet applied work item.

    Attributes:
        max_tokens: most tokens that it can add; 0 for a chunk without sampling.
    """

    num_query: int
    max_tokens: int


class RequestRun:
    """What all samples of one request share.

    Attributes:
        mode, handoff: RECEIVE turns LOCAL, without a handoff, when the prompt's KV is complete or
            the cache holds all reusable blocks.
        arrival: number in the order of arrival.
        num_prompt: prompt tokens.
        max_tokens: most tokens that this engine generates for a sample: the first only, where a
            peer goes on.
        live: the samples that can still produce tokens, by sample index; before the fork, all that
            were not cancelled and did not end with their forced outputs.
        cached_tokens: prompt tokens found in the cache at the first admission; None before.
        received_tokens: prompt tokens that came over the fabric.
        peer_cached_tokens: prompt tokens that the peer found in its cache.
        next_scored: the first prompt token whose log-probability is to be told yet; None where none
            is, since nobody asked for them, they were told, or the peer tells them.
        is_prompt_counted: whether the prompt's tokens were counted, here or (a request that comes
            with outputs) where its first token was sampled.
    """

    __slots__ = (
        "arrival",
        "cached_tokens",
        "handoff",
        "is_prompt_counted",
        "live",
        "max_tokens",
        "mode",
        "next_scored",
        "num_prompt",
        "peer_cached_tokens",
        "received_tokens",
        "request",
        "sequences",
    )

    def __init__(
        self, request: EngineRequest, mode: Mode, arrival: int, handoff: HandoffId | None
    ) -> None:
        self.request = request
        self.num_prompt = len(request.prompt)
        self.mode = mode
        self.max_tokens = 1 if mode is Mode.PREFILL else request.sampling.max_tokens
        self.arrival = arrival
        self.handoff = handoff
        self.live: set[int] = set(range(request.sampling.n))
        self.sequences: list[Sequence] = []
        self.cached_tokens: int | None = None
        self.received_tokens = 0
        self.peer_cached_tokens = 0
        is_scored = request.wants_prompt_logprobs and self.num_prompt > 1
        self.next_scored: int | None = 1 if is_scored else None
        self.is_prompt_counted = bool(request.outputs) and mode is not Mode.PREFILL

    @property
    def request_id(self) -> RequestId:
        """The request's name."""
        return self.request.request_id

    def start(self) -> Sequence:
        """Return the sequence that the request waits as: its only sample with all its known
        tokens, or a trunk over the prompt; with a peer, over what the peer's KV covers.

        A trunk draws one first token a sample, none where outputs are forced.
        """
        request, num_samples = self.request, self.request.sampling.n
        if self.mode is Mode.LOCAL and num_samples == 1:
            return Sequence(self, (*request.prompt, *self.outputs_of(0)))
        tokens = request.carried if self.mode is Mode.RECEIVE else request.prompt
        return Sequence(self, tokens, num_first_tokens=0 if request.outputs else num_samples)

    def outputs_of(self, sample_index: int) -> tuple[int, ...]:
        """Return a sample's forced tokens."""
        return self.request.outputs[sample_index] if self.request.outputs else ()


class Sequence:
    """One row's tokens and progress.

    Attributes:
        num_first_tokens: tokens to draw when the last known token is computed: 1; n for a trunk of
            n samples; 0 for a trunk whose samples' outputs are forced after the prompt.
        hashes: of the full blocks of `token_ids`, as many as were needed so far.
        num_computed: positions whose KV is computed, by applied steps.
    """

    __slots__ = (
        "hashes",
        "num_computed",
        "num_first_tokens",
        "pending",
        "phase",
        "run",
        "sample_index",
        "slot",
        "table",
        "token_ids",
    )

    def __init__(
        self,
        run: RequestRun,
        token_ids: Ordered[int],
        *,
        sample_index: int = 0,
        num_first_tokens: int = 1,
    ) -> None:
        self.run = run
        self.token_ids = list(token_ids)
        self.sample_index = sample_index
        self.num_first_tokens = num_first_tokens
        self.phase = Phase.WAITING
        self.table: BlockTable | None = None
        self.hashes: list[BlockHash] = []
        self.num_computed = 0
        self.pending: deque[Pending] = deque()
        self.slot: SlotId | None = None
        run.sequences.append(self)

    @property
    def blocks(self) -> BlockTable:
        """The block table of a sequence that has one."""
        assert self.table is not None
        return self.table

    @property
    def block_ids(self) -> list[BlockId]:
        """Its blocks; empty without a table."""
        return [] if self.table is None else self.table.block_ids

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order of service: priority, then arrival, then sample; smaller first."""
        return (self.run.request.priority, self.run.arrival, self.sample_index)

    @property
    def num_outputs(self) -> int:
        """Generated tokens, forced ones included."""
        return len(self.token_ids) - self.run.num_prompt

    @property
    def num_scheduled(self) -> int:
        """Upper bound of the positions computed once all pending work is applied."""
        return self.num_computed + (sum(p.num_query for p in self.pending) if self.pending else 0)

    @property
    def num_to_come(self) -> int:
        """Most tokens that pending work can add."""
        return sum(p.max_tokens for p in self.pending) if self.pending else 0

    @property
    def is_sampling(self) -> bool:
        """Whether pending work samples."""
        return self.num_to_come > 0

    @property
    def num_behind(self) -> int:
        """Known tokens that no step computes yet; 0 once the last one is being sampled."""
        return 0 if self.is_sampling else len(self.token_ids) - self.num_scheduled

    def is_catching_up(self) -> bool:
        """Whether it has prompt or recomputed tokens left for chunks."""
        return self.num_behind > 0 and not self.is_decoding()

    def is_decoding(self) -> bool:
        """Whether its next work is one generated token, to be sampled from."""
        num_tokens = len(self.token_ids)
        num_outputs = num_tokens - self.run.num_prompt
        if self.pending:
            num_to_come = self.num_to_come
            is_next = num_to_come > 0 or (num_outputs > 0 and self.num_behind == 1)
        else:  # as each step asks of each sequence
            num_to_come = 0
            is_next = num_outputs > 0 and num_tokens - self.num_computed == 1
        has_room = num_outputs + num_to_come < self.run.max_tokens
        return is_next and has_room and self.num_first_tokens == 1

    @property
    def num_seats(self) -> int:
        """Slots that it needs in the end: a trunk forks into its request's live samples."""
        forks = self.num_first_tokens != 1 and self.run.mode is not Mode.PREFILL
        return len(self.run.live) if forks else 1

    @property
    def is_preemptible(self) -> bool:
        """Whether its blocks can be taken: not a peer's source, and not in the midst of a fork."""
        is_forking = self.num_first_tokens != 1 and self.num_behind == 0
        return self.run.mode is not Mode.PREFILL and not is_forking
