"""One decode worker, two prefill workers and a fabric whose writes land late, in any order.

The world interprets the effects of the real state machines as the pools do. `actions` is everything
that could happen next, `faults` everything that could go wrong; whoever drives it picks. It checks
on the way that whatever may still land, lands in blocks of its own attempt, that tokens are right
and sent once, and that nobody lets go of blocks under a write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, assert_never

from core.ids import Attempt, BlockId, Boot, HandoffId, RequestId, WorkerId
from core.messages import (
    HandoffSettled,
    PrefillAsk,
    PrefillCandidate,
    RegionDescriptor,
    SettleHandoff,
    WriteNotification,
)
from core.request import EngineRequest, FinishReason
from core.sampling_params import SamplingParams
from kv_transfer.handoff import decode_messages as d
from kv_transfer.handoff import decode_side, prefill_side, quarantine
from kv_transfer.handoff import prefill_messages as p
from kv_transfer.handoff.agent_renewal import is_renewal_due
from kv_transfer.handoff.tombstones import Tombstones

BLOCK = 4
NUM_BLOCKS = 10
TRY_S = 10.0
DEADLINE_S = 300.0
QUARANTINE_S = 5.0
HERE = Boot("decode")


def token_of(request_id: RequestId, sample: int) -> int:
    return 1000 * int(request_id) + sample


def content_of(request_id: RequestId, block: int) -> str:
    return f"{request_id}:{block}"


@dataclass
class Write:
    """A posted write; each of its blocks lands by itself."""

    writer: PrefillWorld
    number: int
    note: WriteNotification
    left: dict[BlockId, str]
    sources: tuple[BlockId, ...]
    is_over: bool = False  # its writer knows
    is_cut: bool = False  # its agent was destroyed: reads no source any more

    @property
    def is_whole(self) -> bool:
        return len(self.left) == self.note.num_blocks

    @property
    def is_unseen(self) -> bool:
        return not self.left and not self.is_over and self.writer.runs


@dataclass
class Connection:
    """A stream to a prefill worker. Old ones go on delivering what was sent on them."""

    prefill: PrefillWorld
    to_prefill: deque[Any] = field(default_factory=deque)
    to_decode: deque[Any] = field(default_factory=deque)
    is_open: bool = False
    is_lost_here: bool = False
    is_lost_there: bool = False

    @property
    def is_opening(self) -> bool:
        return not (self.is_open or self.is_lost_here) and self.prefill.runs

    @property
    def is_half_lost(self) -> bool:
        return self.is_lost_here and not self.is_lost_there


@dataclass
class PrefillWorld:
    boot: Boot
    sides: dict[HandoffId, prefill_side.PrefillSide] = field(default_factory=dict)
    asked_on: dict[HandoffId, Connection] = field(default_factory=dict)
    tombstones: Tombstones = field(default_factory=Tombstones)
    computing: dict[HandoffId, int] = field(default_factory=dict)
    held: dict[HandoffId, tuple[BlockId, ...]] = field(default_factory=dict)
    events: deque[tuple[HandoffId, p.Event]] = field(default_factory=deque)
    next_block: int = 0
    is_frozen: bool = False
    is_dead: bool = False

    @property
    def runs(self) -> bool:
        return not (self.is_frozen or self.is_dead)


@dataclass
class RequestWorld:
    side: decode_side.DecodeSide
    ends: tuple[bool, ...]
    num_cached: int
    emitted: dict[int, int] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    result: str = ""


class HandoffWorld:
    def __init__(self) -> None:
        self.now = 1.0
        self.state_of: dict[BlockId, tuple[str, HandoffId | None]] = {
            BlockId(i): ("free", None) for i in range(NUM_BLOCKS)
        }
        self.bytes_of: dict[BlockId, str] = {}
        self.tables: dict[HandoffId, tuple[BlockId, ...]] = {}
        self.waiting: deque[tuple[HandoffId, RequestId]] = deque()
        self.requests: dict[RequestId, RequestWorld] = {}
        self.quarantine = quarantine.Quarantine(quarantine_s=QUARANTINE_S)
        self.fence_due = False
        self.writes: list[Write] = []
        self.notes: list[WriteNotification] = []
        self.boots = 0
        self.has_faults = False
        self.prefills = [self.boot_prefill(), self.boot_prefill()]
        self.connections: list[Connection] = []

    def boot_prefill(self) -> PrefillWorld:
        self.boots += 1
        return PrefillWorld(Boot(f"prefill-{self.boots}"))

    # --- decode: interprets its effects -----------------------------------------------------

    def decode_event(self, request_id: RequestId, event: d.Event) -> None:
        request = self.requests[request_id]
        request.side, effects = decode_side.advance(request.side, event, self.now)
        for effect in effects:
            self.do_decode(request_id, request, effect)

    def do_decode(self, request_id: RequestId, request: RequestWorld, effect: d.Effect) -> None:
        match effect:
            case d.Ask():
                self.send_ask(effect)
            case d.Settle():
                boot = effect.candidate.boot
                entered = quarantine.Enter(
                    effect.handoff, effect.candidate.worker_id, boot, effect.generation
                )
                self.quarantine_event(entered)
                self.settle_on_a_stream(boot, effect.handoff)
            case d.EmitTokens():
                assert effect.tokens.token_ids
                for sample in effect.samples:
                    assert sample not in request.emitted, "a token was emitted twice"
                    assert sample not in request.aborted
                    request.emitted[sample] = effect.tokens.token_ids[sample]
            case d.Join():
                self.join(request_id, request, effect)
            case d.AttemptEnded():
                pass
            case _:
                self.leave(request_id, request, effect)

    def leave(
        self,
        request_id: RequestId,
        request: RequestWorld,
        effect: d.Retry | d.ComputeLocally | d.EndReservation | d.Fail,
    ) -> None:
        match effect:
            case d.Retry():
                self.abandon(effect.handoff, untouched=effect.untouched)
                self.waiting.appendleft((effect.successor, request_id))
                outputs = effect.request.outputs
                for sample, token in request.emitted.items():
                    assert outputs[sample] == (token,), "an emitted token is not forced"
            case d.ComputeLocally():
                self.abandon(effect.handoff, untouched=effect.untouched)
                request.result = "local"
            case d.EndReservation():
                self.waiting = deque(w for w in self.waiting if w[0] != effect.handoff)
                self.abandon(effect.handoff, untouched=effect.untouched)
                request.result = request.result or "ended"
            case d.Fail():
                request.result = "failed"
            case _:
                assert_never(effect)

    def send_ask(self, ask: d.Ask) -> None:
        prefill = self.find(ask.candidate.boot)
        if prefill is None:
            self.decode_event(
                ask.handoff.request_id, d.AskUndelivered(ask.handoff, "connection refused")
            )
            return
        region = RegionDescriptor(
            WorkerId("d"), HERE, self.quarantine.generation, 0, NUM_BLOCKS, 1, "layout", b""
        )
        message = PrefillAsk(
            ask.handoff, ask.request, ask.first_block, ask.blocks, region, ask.remaining_s
        )
        self.connect(prefill).to_prefill.append(message)

    def settle_on_a_stream(self, boot: Boot, handoff: HandoffId) -> None:
        for connection in self.connections:
            if connection.prefill.boot != boot or connection.is_lost_here:
                continue
            if connection.is_open:
                connection.to_prefill.append(SettleHandoff(handoff))
                continue
            unsent = [ask for ask in connection.to_prefill if ask.handoff == handoff]
            for ask in unsent:
                connection.to_prefill.remove(ask)
                self.quarantine_event(quarantine.Settled(handoff))

    def find(self, boot: Boot) -> PrefillWorld | None:
        return next((w for w in self.prefills if w.boot == boot and not w.is_dead), None)

    def connect(self, prefill: PrefillWorld) -> Connection:
        for connection in self.connections:
            if connection.prefill is prefill and not connection.is_lost_here:
                return connection
        opened = Connection(prefill)
        self.connections.append(opened)
        return opened

    def open(self, connection: Connection) -> None:
        connection.is_open = True
        for handoff in self.quarantine.handoffs_of(connection.prefill.boot):
            connection.to_prefill.append(SettleHandoff(handoff))

    def abandon(self, handoff: HandoffId, *, untouched: bool) -> None:
        for block in self.tables.pop(handoff, ()):
            if self.state_of[block] == ("reserved", handoff):
                self.state_of[block] = ("free", None) if untouched else ("quarantined", handoff)
            else:
                assert self.state_of[block][0] == "cached"
                self.state_of[block] = ("free", None)

    def join(self, request_id: RequestId, request: RequestWorld, effect: d.Join) -> None:
        prompt_blocks = self.tables.pop(effect.handoff)
        for index, block in enumerate(prompt_blocks):
            state, owner = self.state_of[block]
            assert state == "cached" or (state == "reserved" and owner == effect.handoff)
            if state == "reserved":
                assert self.bytes_of[block] == content_of(request_id, index), "wrong KV joined"
            self.state_of[block] = ("free", None)  # it ran and finished
        n = request.side.request.sampling.n
        tokens = effect.first_tokens or tuple(o[0] for o in request.side.request.outputs)
        assert tokens == tuple(token_of(request_id, i) for i in range(n))
        request.result = "joined"

    def quarantine_event(self, event: quarantine.Event) -> None:
        self.quarantine, effects = quarantine.advance(self.quarantine, event, self.now)
        for effect in effects:
            match effect:
                case quarantine.StartFence():
                    self.tell_all(d.RegionRevoked(self.quarantine.generation))
                    self.fence_due = True
                case quarantine.Free():
                    for block, state in self.state_of.items():
                        if state == ("quarantined", effect.handoff):
                            self.state_of[block] = ("free", None)
                case quarantine.ReleaseSinks():
                    # During a fence the current address may have become a sink already.
                    newest = self.quarantine.generation + self.fence_due
                    assert not any(w.left and w.note.generation < newest for w in self.writes), (
                        "a sink was unmapped that a write may still reach"
                    )
                case _:
                    assert_never(effect)

    # --- prefill: interprets its effects ----------------------------------------------------

    def prefill_event(self, prefill: PrefillWorld, handoff: HandoffId, event: p.Event) -> None:
        side = prefill.sides.get(handoff)
        if side is None:
            return
        prefill.sides[handoff], effects = prefill_side.advance(side, event, self.now)
        for effect in effects:
            self.do_prefill(prefill, handoff, effect)

    def do_prefill(self, prefill: PrefillWorld, handoff: HandoffId, effect: p.Effect) -> None:
        match effect:
            case p.Compute():
                prefill.computing[handoff] = -1
            case p.Push():
                self.post(prefill, handoff, effect)
            case p.Tell():
                connection = prefill.asked_on[handoff]
                if not connection.is_lost_there:
                    connection.to_decode.append(effect.message)
            case p.StopComputing():
                prefill.computing.pop(handoff, None)
            case p.Release():
                mine = set(prefill.held.pop(handoff, ()))
                for write in self.writes:
                    reads = write.writer is prefill and not write.is_cut and write.left
                    assert not (reads and mine & set(write.sources)), "released under a write"
            case p.Forget():
                prefill.sides.pop(handoff, None)
                prefill.computing.pop(handoff, None)
                if effect.may_land:
                    prefill.tombstones.place(handoff, self.now, may_land=True)
            case _:
                assert_never(effect)

    def post(self, prefill: PrefillWorld, handoff: HandoffId, push: p.Push) -> None:
        side = prefill.sides[handoff]
        contents = {
            target: content_of(handoff.request_id, push.first_block + i)
            for i, target in enumerate(push.targets)
        }
        assert set(push.sources) <= set(prefill.held[handoff])
        note = WriteNotification(
            handoff,
            prefill.boot,
            side.ask.region.boot,
            (0, 0),
            side.ask.region.generation,
            push.first_block,
            len(push.targets),
        )
        self.writes.append(Write(prefill, push.number, note, contents, push.sources))

    def receive_at_prefill(self, connection: Connection) -> None:
        prefill = connection.prefill
        message = connection.to_prefill.popleft()
        handoff = message.handoff
        if isinstance(message, PrefillAsk):
            terms = prefill_side.PrefillTerms("layout", BLOCK, 1, TRY_S)
            is_settled = handoff in prefill.tombstones
            side, effects = prefill_side.receive(message, terms, self.now, is_settled=is_settled)
            prefill.asked_on[handoff] = connection
            if side is not None:
                prefill.sides[handoff] = side
            for effect in effects:
                self.do_prefill(prefill, handoff, effect)
        elif handoff in prefill.sides:
            prefill.asked_on[handoff] = connection
            self.prefill_event(prefill, handoff, p.SettleRequested())
        elif not prefill.tombstones.may_land(handoff):
            prefill.tombstones.place(handoff, self.now, may_land=False)
            connection.to_decode.append(HandoffSettled(handoff))

    def compute(self, prefill: PrefillWorld, handoff: HandoffId) -> None:
        request = prefill.sides[handoff].ask.request
        done = prefill.computing[handoff]
        if done < 0:
            num = -(-len(request.prompt) // BLOCK)
            first = prefill.next_block
            prefill.next_block += num
            prefill.held[handoff] = tuple(BlockId(first + i) for i in range(num))
            prefill.computing[handoff] = 0
            self.prefill_event(prefill, handoff, p.PromptAdmitted(prefill.held[handoff], 0))
            return
        done = min(done + BLOCK, len(request.prompt))
        prefill.computing[handoff] = done
        self.prefill_event(prefill, handoff, p.ChunkComputed(done))
        if done < len(request.prompt):
            return
        prefill.computing.pop(handoff, None)
        ends = self.requests[handoff.request_id].ends
        for sample in range(0 if request.outputs else request.sampling.n):
            reason = FinishReason.STOP if ends[sample] else None
            token = token_of(handoff.request_id, sample)
            event = p.TokenSampled(sample, token, (), reason)
            self.prefill_event(prefill, handoff, event)

    # --- the work: whatever may happen next, without a fault ---------------------------------

    def actions(self) -> list[Callable[[], None]]:
        """Everything that could happen next, in any order."""
        running = [w for w in self.prefills if w.runs]
        heard = [c for c in self.connections if c.prefill.runs and c.is_open]
        return [
            *self.decode_actions(),
            *(partial(self.open, c) for c in self.connections if c.is_opening),
            *(partial(self.receive_at_prefill, c) for c in heard if c.to_prefill),
            *(partial(self.close_there, c) for c in heard if c.is_half_lost and not c.to_prefill),
            *(partial(self.compute, w, h) for w in running for h in w.computing),
            *(partial(self.land, w, block) for w in self.writes for block in sorted(w.left)),
            *(partial(self.see_done, w) for w in self.writes if w.is_unseen),
        ]

    def decode_actions(self) -> list[Callable[[], None]]:
        actions: list[Callable[[], None]] = [partial(self.notify, note) for note in self.notes]
        actions += [
            partial(self.receive_at_decode, c)
            for c in self.connections
            if c.to_decode and not c.is_lost_here
        ]
        if self.fence_due:
            actions.append(self.fence)
        elif self.waiting and len(self.free_blocks()) >= self.num_blocks(self.waiting[0][1]):
            actions.append(self.reserve)
        return actions

    def free_blocks(self) -> list[BlockId]:
        return [block for block, state in self.state_of.items() if state[0] == "free"]

    def num_blocks(self, request_id: RequestId) -> int:
        return -(-len(self.requests[request_id].side.request.prompt) // BLOCK)

    def reserve(self) -> None:
        handoff, request_id = self.waiting.popleft()
        num, free = self.num_blocks(request_id), self.free_blocks()
        num_cached = min(self.requests[request_id].num_cached, num - 1)
        self.tables[handoff] = tuple(free[:num])
        for i, block in enumerate(free[:num]):
            self.state_of[block] = ("cached", None) if i < num_cached else ("reserved", handoff)
            self.bytes_of[block] = "stale"
        reserved = d.BlocksReserved(
            handoff, self.tables[handoff], num_cached, self.quarantine.generation
        )
        self.decode_event(request_id, reserved)

    def receive_at_decode(self, connection: Connection) -> None:
        message = connection.to_decode.popleft()
        if isinstance(message, HandoffSettled):
            self.quarantine_event(quarantine.Settled(message.handoff))
        else:
            self.decode_event(message.handoff.request_id, message)

    def notify(self, note: WriteNotification) -> None:
        self.notes.remove(note)
        self.decode_event(note.handoff.request_id, note)

    def fence(self) -> None:
        self.fence_due = False
        self.quarantine_event(quarantine.Fenced(self.quarantine.generation + 1))

    def land(self, write: Write, block: BlockId) -> None:
        """Lands whether its writer runs, is frozen or is dead."""
        content = write.left.pop(block)
        if write.note.generation == self.quarantine.generation:
            self.bytes_of[block] = content
        if not write.left:
            self.notes.append(write.note)

    def see_done(self, write: Write) -> None:
        write.is_over = True
        self.prefill_event(write.writer, write.note.handoff, p.WriteDone(write.number))

    def close_there(self, connection: Connection) -> None:
        connection.is_lost_there = True
        for handoff in list(connection.prefill.sides):
            if connection.prefill.asked_on[handoff] is connection:
                self.prefill_event(connection.prefill, handoff, p.DecodeLost())

    def start(
        self, num_tokens: int, ends: list[bool], allow_local: bool, first: int, num_cached: int
    ) -> None:
        request_id = RequestId(str(len(self.requests) + 1))
        sampling = SamplingParams(n=len(ends))
        order = [self.prefills[first], self.prefills[1 - first]]
        terms = decode_side.DecodeTerms(
            boot=HERE,
            block_size=BLOCK,
            candidates=tuple(PrefillCandidate(WorkerId(w.boot), w.boot, "") for w in order),
            allow_local=allow_local,
            deadline=self.now + DEADLINE_S,
            try_s=TRY_S,
        )
        handoff = HandoffId(request_id, Attempt(1, 1))
        request = EngineRequest(request_id, tuple(range(num_tokens)), sampling)
        side = decode_side.DecodeSide(terms, request, handoff)
        self.requests[request_id] = RequestWorld(side, tuple(ends), num_cached)
        self.waiting.append((handoff, request_id))

    def time_passes(self, seconds: float, starving: bool) -> None:
        self.now += seconds
        self.tell_all(d.Tick())
        self.quarantine_event(quarantine.Tick(starving=starving))
        for prefill in self.prefills:
            if prefill.runs:
                self.prefill_time(prefill)

    def prefill_time(self, prefill: PrefillWorld) -> None:
        prefill.tombstones.expire(self.now)
        for handoff in list(prefill.sides):
            self.prefill_event(prefill, handoff, p.Tick())
        if is_renewal_due(prefill.sides.values(), self.now, QUARANTINE_S):
            for write in self.writes:
                write.is_cut = write.is_cut or write.writer is prefill
                write.is_over = write.is_over or write.writer is prefill
            for handoff, side in list(prefill.sides.items()):
                self.prefill_event(prefill, handoff, p.AgentDestroyed(side.num_posted))

    # --- the faults -------------------------------------------------------------------------

    def faults(self) -> dict[str, list[Callable[[], None]]]:
        """Everything that could go wrong next, by kind."""
        running = {i: r for i, r in self.requests.items() if not r.result}
        posted = [w for w in self.writes if not w.is_over and w.writer.runs]
        return {
            "abort": [partial(self.abort, i) for i in running],
            "abort a sample": [
                partial(self.abort_sample, i, sample)
                for i, r in running.items()
                for sample in range(r.side.request.sampling.n)
            ],
            "write fails": [partial(self.fail_a_write, w) for w in posted],
            "write refused": [partial(self.refuse_a_write, w) for w in posted if w.is_whole],
            "notification lost": [partial(self.notes.remove, note) for note in self.notes],
            "freeze or thaw": [partial(self.freeze_or_thaw, w) for w in self.prefills],
            "stream lost": [partial(self.lose_streams, w, False) for w in self.prefills],
            "stream replaced": [partial(self.lose_streams, w, True) for w in self.prefills],
            "kill": [partial(self.kill, i) for i in range(len(self.prefills))],
        }

    def abort(self, request_id: RequestId) -> None:
        self.decode_event(request_id, d.Aborted())
        assert self.requests[request_id].result == "ended"

    def abort_sample(self, request_id: RequestId, sample: int) -> None:
        self.requests[request_id].aborted.add(sample)
        self.decode_event(request_id, d.SampleAborted(sample))

    def fail_a_write(self, write: Write) -> None:
        """What has not landed may still land."""
        write.is_over = True
        failed = p.WriteFailed(write.number, "reset")
        self.prefill_event(write.writer, write.note.handoff, failed)

    def refuse_a_write(self, write: Write) -> None:
        """It was never posted."""
        self.writes.remove(write)
        refused = p.WriteRefused(write.number, "unknown peer")
        self.prefill_event(write.writer, write.note.handoff, refused)

    def freeze_or_thaw(self, prefill: PrefillWorld) -> None:
        prefill.is_frozen = not prefill.is_frozen

    def kill(self, which: int) -> None:
        dead = self.prefills[which]
        dead.is_dead = True
        for connection in self.connections:
            if connection.prefill is dead:
                self.lose(connection)
                connection.to_prefill.clear()
        self.prefills[which] = self.boot_prefill()

    def lose_streams(self, prefill: PrefillWorld, connect_again: bool) -> None:
        """What was sent on one may still arrive, after what is sent on its successor."""
        for connection in self.connections:
            if connection.prefill is prefill:
                self.lose(connection)
        if connect_again:
            self.connect(prefill)

    def lose(self, connection: Connection) -> None:
        if connection.is_lost_here:
            return
        connection.is_lost_here = True
        if connection.is_open:
            self.tell_all(d.PeerLost(connection.prefill.boot, "stream lost"))
            return
        unsent = list(connection.to_prefill)
        connection.to_prefill.clear()
        for ask in unsent:
            lost = d.AskUndelivered(ask.handoff, "connection refused")
            self.decode_event(ask.handoff.request_id, lost)

    def tell_all(self, event: d.Event) -> None:
        for request_id, request in list(self.requests.items()):
            if not request.result:
                self.decode_event(request_id, event)

    # --- what must hold ---------------------------------------------------------------------

    def check(self) -> None:
        """What must hold after everything that happens."""
        self.what_may_land_belongs_to_its_attempt()
        self.emitted_tokens_are_right()

    def what_may_land_belongs_to_its_attempt(self) -> None:
        for write in self.writes:
            if write.note.generation != self.quarantine.generation:
                continue
            for block in write.left:
                state, owner = self.state_of[block]
                assert state in ("reserved", "quarantined"), f"block {block} is {state}"
                assert owner == write.note.handoff

    def emitted_tokens_are_right(self) -> None:
        for request_id, request in self.requests.items():
            for sample, token in request.emitted.items():
                assert token == token_of(request_id, sample)

    def settle_down(self) -> None:
        """No more faults: let everything happen that can, and time pass."""
        for prefill in self.prefills:
            prefill.is_frozen = False
        for _ in range(40):
            while actions := self.actions():
                actions[0]()
                self.check()
            self.time_passes(1.0, starving=False)
        self.everything_ended()
        self.everything_is_back()

    def everything_ended(self) -> None:
        for request in self.requests.values():
            assert request.result, "a request never ended"
            if request.result == "joined":
                n = request.side.request.sampling.n
                assert request.emitted.keys() | request.aborted == set(range(n))
            if not self.has_faults:
                assert request.result == "joined", "without a fault, no request may be lost"

    def everything_is_back(self) -> None:
        assert not self.quarantine.entries
        assert {state for state, _ in self.state_of.values()} == {"free"}
        for prefill in self.prefills:
            assert not prefill.sides
            assert not prefill.held
            assert not prefill.computing
