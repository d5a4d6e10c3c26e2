"""One decode worker, prefill workers and a fabric whose writes land late, in any order.

The world interprets the effects of the real state machines as the pools do. `actions` is everything
that happens sooner or later, `chances` what may happen or not, `faults.possible` what could go
wrong; whoever drives it picks, and checks the invariants after each.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Self

from core.ids import Attempt, Boot, HandoffId, RequestId, WorkerId
from core.messages import PrefillCandidate
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from kv_transfer.handoff import decode_messages as d
from kv_transfer.handoff import decode_side, quarantine
from tests.handoff_decode_end import DecodeEnd
from tests.handoff_faults import Faults, boot_prefill
from tests.handoff_invariants import check, check_end
from tests.handoff_prefill_end import PrefillEnd
from tests.handoff_scene import (
    BLOCK,
    DEADLINE_S,
    HERE,
    TRY_S,
    Action,
    Request,
    Scene,
    Write,
    WriteKey,
)

MOMENT_S = 0.011
"""Two are longer than the grace after a fence, one is not."""

STARVING_S = 0.3
"""Longer than a quarantine is borne while a request starves for blocks."""

DRAIN_S = 5.0
"""How long a dead process's socket buffers may go on landing."""


class HandoffWorld:
    """The scene and everything that may happen in it; an action is run by `perform`."""

    def __init__(
        self, *, num_blocks: int = 10, chunk_tokens: int = BLOCK, num_prefills: int = 2
    ) -> None:
        self._take(Scene(num_blocks, chunk_tokens))
        for index in range(num_prefills):
            boot_prefill(self.scene, WorkerId(f"p{index}"))

    def _take(self, scene: Scene) -> None:
        self.scene = scene
        self.decode = DecodeEnd(scene)
        self.prefill = PrefillEnd(scene)
        self.faults = Faults(scene, self.decode)

    def copy(self) -> Self:
        """Return a world in the same state."""
        twin = object.__new__(type(self))
        twin._take(self.scene.copy())
        return twin

    def perform(self, action: Action) -> None:
        """Let something happen."""
        attrgetter(action.kind)(self)(*action.args)

    def start(
        self,
        num_tokens: int,
        ends: list[bool],
        *,
        allow_local: bool,
        first: int = 0,
        num_cached: int = 0,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """A request comes; `first`: the prefill worker to ask first."""
        scene = self.scene
        request_id = RequestId(str(len(scene.requests) + 1))
        living = [w for w in scene.prefills.values() if w.died_at is None]
        order = living[first:] + living[:first]
        terms = decode_side.DecodeTerms(
            boot=HERE,
            block_size=BLOCK,
            candidates=tuple(PrefillCandidate(w.worker_id, w.boot, "") for w in order),
            allow_local=allow_local,
            deadline=scene.now + deadline_s,
            try_s=TRY_S,
        )
        handoff = HandoffId(request_id, Attempt(1, 1))
        sampling = SamplingParams(n=len(ends))
        request = EngineRequest(request_id, tuple(range(num_tokens)), sampling)
        side = decode_side.DecodeSide(terms, request, handoff)
        scene.requests[request_id] = Request(side, tuple(ends), num_cached)
        scene.waiting = (*scene.waiting, (handoff, request_id))

    # --- what happens without a fault -------------------------------------------------------

    def actions(self) -> list[Action]:
        """Everything that happens sooner or later, in any order, unless something else ends it."""
        return [
            *self._decode_actions(),
            *self._stream_actions(),
            *self._prefill_actions(),
            *self._write_actions(),
        ]

    def chances(self) -> list[Action]:
        """What may happen at any time, or never."""
        scene = self.scene
        late = [key for key, write in scene.writes.items() if not self._is_healthy(write)]
        frozen = [w.boot for w in scene.prefills.values() if w.is_frozen and w.died_at is None]
        return [
            *(Action("land", (key, block)) for key in late for block, _ in scene.writes[key].left),
            *(Action("prefill.thaw", (boot,)) for boot in frozen),
            *(Action("decode.see_replacement", (boot,)) for boot in self._replaced()),
        ]

    def _decode_actions(self) -> Iterator[Action]:
        scene = self.scene
        yield from (Action("decode.notify", (index,)) for index in range(len(scene.notes)))
        if scene.fence:
            yield Action(f"decode.{scene.fence}")
        if scene.reserved and not scene.quarantine.is_fencing:
            yield Action("decode.tell_reserved")
        if scene.waiting and not scene.is_starving:
            yield Action("decode.reserve")
        entries = scene.quarantine.entries.values()
        if any(entry.free_at is not None for entry in entries):
            yield Action("pass_time", (MOMENT_S,))
        elif scene.is_starving and any(scene.now < e.since + STARVING_S for e in entries):
            yield Action("pass_time", (STARVING_S,))

    def _stream_actions(self) -> Iterator[Action]:
        for number, connection in self.scene.connections.items():
            prefill = self.scene.prefills[connection.boot]
            if connection.to_decode:
                yield Action("decode.receive", (number,))
            if prefill.died_at is not None:
                yield Action("decode.lose_dead", (number,))
            elif prefill.is_frozen:
                continue
            elif not connection.is_open:
                yield Action("decode.open", (number,))
            elif connection.to_prefill:
                yield Action("prefill.receive", (number,))
            elif connection.is_lost_here:
                yield Action("prefill.close", (number,))

    def _prefill_actions(self) -> Iterator[Action]:
        for prefill in self.scene.prefills.values():
            if prefill.runs:
                for handoff in prefill.computing:
                    yield Action("prefill.compute", (prefill.boot, handoff))

    def _write_actions(self) -> Iterator[Action]:
        for key, write in self.scene.writes.items():
            if self._is_healthy(write):
                yield from (Action("land", (key, block)) for block, _ in write.left)
                if not write.left:
                    yield Action("prefill.see_done", (key,))

    def _is_healthy(self, write: Write) -> bool:
        return not write.is_over and self.scene.prefills[write.writer].runs

    def _replaced(self) -> list[Boot]:
        """Boots that decode holds to be gone once it has reached their successor."""
        scene = self.scene
        connected = {connection.boot for connection in scene.connections.values()}
        return [
            boot
            for _, boot in sorted(scene.quarantine.sink_holders)
            if scene.prefills[boot].died_at is not None and boot not in connected
        ]

    def land(self, key: WriteKey, block: int) -> None:
        """One block of a write lands, whether its writer runs, is frozen or is dead."""
        write = self.scene.writes[key]
        content = next(c for c in write.left if c[0] == block)
        self.decode.land(content, write.note.generation)
        left = tuple(c for c in write.left if c[0] != block)
        if not left:
            self.scene.notes = (*self.scene.notes, write.note)
        self.scene.change_write(key, left=left)

    def pass_time(self, seconds: float) -> None:
        """Let time pass; everybody who runs looks at the clock."""
        scene = self.scene
        scene.now += seconds
        for key, write in list(scene.writes.items()):
            died_at = scene.prefills[write.writer].died_at
            if died_at is not None and scene.now >= died_at + DRAIN_S:
                scene.change_write(key, left=())
        self.decode.tell_all(d.Tick())
        self.decode.quarantine_event(quarantine.Tick(starving=scene.is_starving))
        for boot, prefill in scene.prefills.items():
            if prefill.runs:
                self.prefill.tick(boot)

    def settle_down(self) -> None:
        """No more faults: let everything happen that can, and time pass."""
        for boot in self.scene.prefills:
            self.prefill.thaw(boot)
        for _ in range(40):
            while actions := [*self.actions(), *self.chances()]:
                self.perform(actions[0])
                check(self.scene)
            self.pass_time(1.0)
        check_end(self.scene)
