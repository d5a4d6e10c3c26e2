"""Prefill's end of a handoff world: does what `prefill_side` says, as the pool does.

It checks on the way that only held blocks are read, and that none is let go of under a write.
"""

from __future__ import annotations

import copy
from typing import TypeVar, assert_never

from core.ids import BlockId, Boot, HandoffId
from core.messages import HandoffSettled, PrefillAsk, WriteNotification
from core.request import FinishReason
from kv_transfer.handoff import prefill_messages as p
from kv_transfer.handoff import prefill_side
from kv_transfer.handoff.agent_renewal import is_renewal_due
from tests.handoff_scene import (
    BLOCK,
    QUARANTINE_S,
    TRY_S,
    Prefill,
    Scene,
    Write,
    WriteKey,
    content_of,
    token_of,
)


class PrefillEnd:
    """Interprets effects; each method is one thing that happens at a prefill worker."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def event(self, boot: Boot, handoff: HandoffId, event: p.Event) -> None:
        """Feed an attempt; one that is over hears nothing."""
        prefill = self._scene.prefills[boot]
        side = prefill.sides.get(handoff)
        if side is None:
            return
        advanced, effects = prefill_side.advance(side, event, self._scene.now)
        if advanced is not side:
            self._scene.change_prefill(boot, sides={**prefill.sides, handoff: advanced})
        for effect in effects:
            self._do(boot, handoff, effect)

    def _do(self, boot: Boot, handoff: HandoffId, effect: p.Effect) -> None:
        scene, prefill = self._scene, self._scene.prefills[boot]
        match effect:
            case p.Compute():
                scene.change_prefill(boot, computing={**prefill.computing, handoff: -1})
            case p.Push():
                self._post(prefill, handoff, effect)
            case p.Tell():
                scene.send_to_decode(prefill.asked_on[handoff], effect.message)
            case p.StopComputing():
                scene.change_prefill(boot, computing=_without(prefill.computing, handoff))
            case p.Release():
                self._release(prefill, handoff)
            case p.Forget():
                self._forget(prefill, handoff, effect)
            case _:
                assert_never(effect)

    def _post(self, prefill: Prefill, handoff: HandoffId, push: p.Push) -> None:
        region = prefill.sides[handoff].ask.region
        contents = tuple(
            (target, content_of(handoff.request_id, push.first_block + index))
            for index, target in enumerate(push.targets)
        )
        assert set(push.sources) <= set(prefill.held[handoff]), "pushed what is not held"
        note = WriteNotification(
            handoff,
            prefill.boot,
            region.boot,
            (0, 0),
            region.generation,
            push.first_block,
            len(push.targets),
        )
        write = Write(prefill.boot, note, contents, push.sources)
        self._scene.writes[handoff, push.number] = write

    def _release(self, prefill: Prefill, handoff: HandoffId) -> None:
        for (key, _), write in self._scene.writes.items():
            assert key != handoff or write.is_cut or not write.left, "released under a write"
        self._scene.change_prefill(prefill.boot, held=_without(prefill.held, handoff))

    def _forget(self, prefill: Prefill, handoff: HandoffId, effect: p.Forget) -> None:
        self._scene.change_prefill(
            prefill.boot,
            sides=_without(prefill.sides, handoff),
            computing=_without(prefill.computing, handoff),
        )
        if effect.may_land:
            self._bury(prefill.boot, handoff, may_land=True)

    def _bury(self, boot: Boot, handoff: HandoffId, *, may_land: bool) -> None:
        tombstones = copy.deepcopy(self._scene.prefills[boot].tombstones)
        tombstones.place(handoff, self._scene.now, may_land=may_land)
        self._scene.change_prefill(boot, tombstones=tombstones)

    # --- messages ---------------------------------------------------------------------------

    def receive(self, number: int, refusing: str = "") -> None:
        """A message of decode comes; `refusing`: why no ask is taken."""
        scene = self._scene
        connection = scene.connections[number]
        message, *later = connection.to_prefill
        scene.change_connection(number, to_prefill=tuple(later))
        boot, handoff = connection.boot, message.handoff
        prefill = scene.prefills[boot]
        if isinstance(message, PrefillAsk):
            self._take(number, message, refusing)
        elif handoff in prefill.sides:
            scene.change_prefill(boot, asked_on={**prefill.asked_on, handoff: number})
            self.event(boot, handoff, p.SettleRequested())
        elif not prefill.tombstones.may_land(handoff):
            self._bury(boot, handoff, may_land=False)
            scene.send_to_decode(number, HandoffSettled(handoff))

    def _take(self, number: int, ask: PrefillAsk, refusing: str) -> None:
        scene, boot = self._scene, self._scene.connections[number].boot
        prefill, handoff = scene.prefills[boot], ask.handoff
        terms = prefill_side.PrefillTerms("layout", BLOCK, 1, TRY_S, refusing)
        is_settled = handoff in prefill.tombstones
        side, effects = prefill_side.receive(ask, terms, scene.now, is_settled=is_settled)
        scene.change_prefill(boot, asked_on={**prefill.asked_on, handoff: number})
        if side is not None:
            scene.change_prefill(boot, sides={**prefill.sides, handoff: side})
        for effect in effects:
            self._do(boot, handoff, effect)

    def close(self, number: int) -> None:
        """The worker sees that decode's end of a stream is gone."""
        connection = self._scene.connections.pop(number)
        prefill = self._scene.prefills[connection.boot]
        for handoff in prefill.sides:
            if prefill.asked_on[handoff] == number:
                self.event(connection.boot, handoff, p.DecodeLost())

    # --- the engine -------------------------------------------------------------------------

    def compute(self, boot: Boot, handoff: HandoffId) -> None:
        """The engine admits a prompt, or computes its next chunk; at the end it samples."""
        scene, prefill = self._scene, self._scene.prefills[boot]
        request, done = prefill.sides[handoff].ask.request, prefill.computing[handoff]
        if done < 0:
            self._admit(boot, handoff)
            return
        done = min(done + scene.chunk_tokens, len(request.prompt))
        scene.change_prefill(boot, computing={**prefill.computing, handoff: done})
        self.event(boot, handoff, p.ChunkComputed(done))
        if done < len(request.prompt):
            return
        prefill = scene.prefills[boot]
        scene.change_prefill(boot, computing=_without(prefill.computing, handoff))
        ends = scene.requests[handoff.request_id].ends
        for sample in range(0 if request.outputs else request.sampling.n):
            reason = FinishReason.STOP if ends[sample] else None
            token = token_of(handoff.request_id, sample)
            self.event(boot, handoff, p.TokenSampled(sample, token, (), reason))

    def _admit(self, boot: Boot, handoff: HandoffId) -> None:
        scene, prefill = self._scene, self._scene.prefills[boot]
        first, num = prefill.next_block, scene.num_blocks_of(handoff.request_id)
        blocks = tuple(BlockId(first + index) for index in range(num))
        scene.change_prefill(
            boot,
            next_block=first + num,
            held={**prefill.held, handoff: blocks},
            computing={**prefill.computing, handoff: 0},
        )
        self.event(boot, handoff, p.PromptAdmitted(blocks, 0))

    def engine_refuses(self, boot: Boot, handoff: HandoffId) -> None:
        """The engine's queue is full."""
        self.event(boot, handoff, p.EngineRefused("overloaded", "the queue is full"))

    def thaw(self, boot: Boot) -> None:
        """A frozen worker goes on."""
        self._scene.change_prefill(boot, is_frozen=False)

    # --- writes and time --------------------------------------------------------------------

    def see_done(self, key: WriteKey) -> None:
        """The agent says that a write is DONE."""
        self._end(key, p.WriteDone(key[1]))

    def fail(self, key: WriteKey) -> None:
        """A write FAILED; what has not landed may still land."""
        self._end(key, p.WriteFailed(key[1], "reset"))

    def refuse(self, key: WriteKey) -> None:
        """A write was not posted."""
        writer = self._scene.writes.pop(key).writer
        self.event(writer, key[0], p.WriteRefused(key[1], "unknown peer"))

    def _end(self, key: WriteKey, event: p.Event) -> None:
        writer = self._scene.writes[key].writer
        self._scene.change_write(key, is_over=True)
        self.event(writer, key[0], event)

    def tick(self, boot: Boot) -> None:
        """Time passed."""
        scene, prefill = self._scene, self._scene.prefills[boot]
        if len(prefill.tombstones):
            tombstones = copy.deepcopy(prefill.tombstones)
            tombstones.expire(scene.now)
            scene.change_prefill(boot, tombstones=tombstones)
        for handoff in prefill.sides:
            self.event(boot, handoff, p.Tick())
        sides = scene.prefills[boot].sides
        if not is_renewal_due(sides.values(), scene.now, QUARANTINE_S):
            return
        for key, write in list(scene.writes.items()):
            if write.writer == boot:
                scene.change_write(key, is_cut=True, is_over=True)
        for handoff, side in sides.items():
            self.event(boot, handoff, p.AgentDestroyed(side.num_posted))


_Value = TypeVar("_Value")


def _without(items: dict[HandoffId, _Value], key: HandoffId) -> dict[HandoffId, _Value]:
    return {kept: value for kept, value in items.items() if kept != key}
