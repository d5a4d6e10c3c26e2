"""Decode's end of a handoff world: does what `decode_side` and `quarantine` say, as the pool does.

It checks on the way that tokens are right and sent once, that the KV that joins is that of the
prompt, and that no sink goes that a write may still reach.
"""

from __future__ import annotations

from typing import assert_never

from core.ids import BlockId, Boot, HandoffId, RequestId, WorkerId
from core.messages import FirstTokens, HandoffSettled, PrefillAsk, RegionDescriptor, SettleHandoff
from engine.events import Reserved
from kv_transfer.handoff import decode_messages as d
from kv_transfer.handoff import decode_side, quarantine
from tests.handoff_scene import (
    CACHED,
    FREE,
    HERE,
    Block,
    Scene,
    content_of,
    events_for,
    token_of,
)


class DecodeEnd:
    """Interprets effects; each method is one thing that happens at decode."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def event(self, request_id: RequestId, event: d.Event) -> None:
        """Feed a request's handoff."""
        side = self._scene.requests[request_id].side
        advanced, effects = decode_side.advance(side, event, self._scene.now)
        if advanced is not side:
            self._scene.change_request(request_id, side=advanced)
        for effect in effects:
            self._do(request_id, effect)

    def tell_all(self, event: d.Event) -> None:
        """Feed every handoff that is not over."""
        for request_id, told in events_for(self._scene, event):
            self.event(request_id, told)

    def _do(self, request_id: RequestId, effect: d.Effect) -> None:
        match effect:
            case d.Ask():
                self._send_ask(effect)
            case d.Settle():
                self._settle(effect)
            case d.EmitTokens():
                self._emit(request_id, effect)
            case d.Join():
                self._join(request_id, effect)
            case d.AttemptEnded():
                pass
            case _:
                self._leave(request_id, effect)

    def _emit(self, request_id: RequestId, effect: d.EmitTokens) -> None:
        request = self._scene.requests[request_id]
        emitted = dict(request.emitted)
        assert effect.tokens.token_ids
        for sample in effect.samples:
            assert sample not in emitted, "a token was emitted twice"
            assert sample not in request.aborted, "a token of an aborted sample was emitted"
            emitted[sample] = effect.tokens.token_ids[sample]
        self._scene.change_request(request_id, emitted=emitted)

    def _leave(
        self,
        request_id: RequestId,
        effect: d.Retry | d.ComputeLocally | d.EndReservation | d.Fail,
    ) -> None:
        scene = self._scene
        match effect:
            case d.Retry():
                self._abandon(effect.handoff, untouched=effect.untouched)
                scene.waiting = ((effect.successor, request_id), *scene.waiting)
                self._check_forced(request_id, effect.request.outputs)
            case d.ComputeLocally():
                self._abandon(effect.handoff, untouched=effect.untouched)
                self._check_forced(request_id, effect.request.outputs)
                scene.change_request(request_id, result="local")
            case d.EndReservation():
                scene.waiting = tuple(w for w in scene.waiting if w[0] != effect.handoff)
                self._abandon(effect.handoff, untouched=effect.untouched)
                result = scene.requests[request_id].result or "ended"
                scene.change_request(request_id, result=result)
            case d.Fail():
                scene.change_request(request_id, result="failed")
            case _:
                assert_never(effect)

    def _check_forced(self, request_id: RequestId, outputs: tuple[tuple[int, ...], ...]) -> None:
        for sample, token in self._scene.requests[request_id].emitted.items():
            forced = outputs[sample] if outputs else ()
            assert forced == (token,), "an emitted token is not forced"

    def _send_ask(self, ask: d.Ask) -> None:
        scene = self._scene
        prefill = scene.prefills[ask.candidate.boot]
        if prefill.died_at is not None:
            refused = d.AskUndelivered(ask.handoff, "connection refused")
            self.event(ask.handoff.request_id, refused)
            return
        generation, num_blocks = scene.quarantine.generation, len(scene.blocks)
        region = RegionDescriptor(WorkerId("d"), HERE, generation, 0, num_blocks, 1, "layout", b"")
        message = PrefillAsk(
            ask.handoff, ask.request, ask.first_block, ask.blocks, region, ask.remaining_s
        )
        scene.send_to_prefill(scene.connect(prefill.boot), message)

    def _settle(self, effect: d.Settle) -> None:
        scene, boot, handoff = self._scene, effect.candidate.boot, effect.handoff
        worker_id = effect.candidate.worker_id
        self.quarantine_event(quarantine.Enter(handoff, worker_id, boot, effect.generation))
        for number, connection in list(scene.connections.items()):
            if connection.boot != boot or connection.is_lost_here:
                continue
            if connection.is_open:
                scene.send_to_prefill(number, SettleHandoff(handoff))
                continue
            kept = tuple(ask for ask in connection.to_prefill if ask.handoff != handoff)
            if kept != connection.to_prefill:  # the ask never left
                scene.change_connection(number, to_prefill=kept)
                self.quarantine_event(quarantine.Settled(handoff))

    # --- the engine -------------------------------------------------------------------------

    def reserve(self) -> None:
        """The engine reserves blocks for the attempt that waits first."""
        scene = self._scene
        (handoff, request_id), *waiting = scene.waiting
        scene.waiting = tuple(waiting)
        num = scene.num_blocks_of(request_id)
        table = tuple(scene.free_blocks()[:num])
        num_cached = min(scene.requests[request_id].num_cached, num - 1)
        scene.tables[handoff] = table
        for index, block in enumerate(table):
            scene.blocks[block] = CACHED if index < num_cached else Block("reserved", handoff)
        scene.reserved = (*scene.reserved, Reserved(handoff, table, num_cached))

    def tell_reserved(self) -> None:
        """The handoff hears of the reservation that was made first."""
        scene = self._scene
        event, *later = scene.reserved
        scene.reserved = tuple(later)
        reserved = d.BlocksReserved(
            event.handoff, event.block_ids, event.num_cached_blocks, scene.quarantine.generation
        )
        request = scene.requests[event.handoff.request_id]
        if not request.result and request.side.handoff == event.handoff:
            self.event(event.handoff.request_id, reserved)

    def _abandon(self, handoff: HandoffId, *, untouched: bool) -> None:
        scene = self._scene
        for number in scene.tables.pop(handoff, ()):
            block = scene.blocks[number]
            if block.state == "reserved" and not untouched:
                scene.blocks[number] = Block("quarantined", handoff)
            else:
                scene.blocks[number] = FREE

    def _join(self, request_id: RequestId, effect: d.Join) -> None:
        scene = self._scene
        for index, number in enumerate(scene.tables.pop(effect.handoff)):
            block = scene.blocks[number]
            if block != CACHED:
                assert block.owner == effect.handoff, "another attempt's block joined"
                assert block.content == content_of(request_id, index), "wrong KV joined"
            scene.blocks[number] = FREE  # it ran and finished
        request = scene.requests[request_id].side.request
        tokens = effect.first_tokens or tuple(output[0] for output in request.outputs)
        right = tuple(token_of(request_id, i) for i in range(request.sampling.n))
        assert tokens == right, "wrong first tokens joined"
        scene.change_request(request_id, result="joined")

    # --- the quarantine ---------------------------------------------------------------------

    def quarantine_event(self, event: quarantine.Event) -> None:
        """Feed the quarantine."""
        scene = self._scene
        scene.quarantine, effects = quarantine.advance(scene.quarantine, event, scene.now)
        for effect in effects:
            match effect:
                case quarantine.StartFence():
                    self.tell_all(d.RegionRevoked(scene.quarantine.generation))
                    scene.fence = "move_region"
                case quarantine.Free():
                    self._free(effect.handoff)
                case quarantine.ReleaseSinks():
                    self._check_sinks()
                case _:
                    assert_never(effect)

    def _free(self, handoff: HandoffId) -> None:
        blocks = self._scene.blocks
        for number, block in blocks.items():
            if block.state == "quarantined" and block.owner == handoff:
                blocks[number] = FREE

    def _check_sinks(self) -> None:
        scene = self._scene
        late = [w for w in scene.writes.values() if w.left and w.note.generation < scene.generation]
        assert not late, "a sink was unmapped that a write may still reach"

    def move_region(self) -> None:
        """The fence itself: from now on the address that peers know is a sink."""
        self._scene.generation += 1
        self._scene.moved_at = self._scene.now
        self._scene.fence = "tell_fenced"

    def tell_fenced(self) -> None:
        """The new region is registered."""
        self._scene.fence = ""
        self.quarantine_event(quarantine.Fenced(self._scene.generation))

    # --- the streams ------------------------------------------------------------------------

    def open(self, number: int) -> None:
        """A stream to a prefill worker opened; what waited for it is sent."""
        scene = self._scene
        boot = scene.connections[number].boot
        scene.change_connection(number, is_open=True)
        self.quarantine_event(quarantine.PeerHeard(boot))
        for handoff in scene.quarantine.handoffs_of(boot):
            scene.send_to_prefill(number, SettleHandoff(handoff))

    def receive(self, number: int) -> None:
        """A message of a prefill worker comes."""
        scene = self._scene
        message, *later = scene.connections[number].to_decode
        scene.change_connection(number, to_decode=tuple(later))
        if isinstance(message, HandoffSettled):
            self.quarantine_event(quarantine.Settled(message.handoff))
        else:
            self.event(message.handoff.request_id, message)
            if isinstance(message, FirstTokens):
                self._check_told(message.handoff)

    def _check_told(self, handoff: HandoffId) -> None:
        request = self._scene.requests[handoff.request_id]
        if request.side.handoff == handoff and not request.side.request.outputs:
            told = request.emitted.keys() | request.aborted
            assert told or request.result, "a first token was kept back"

    def lose(self, number: int) -> None:
        """Decode sees that a stream is gone. What it had sent may still arrive."""
        scene = self._scene
        connection = scene.connections[number]
        if connection.is_lost_here:
            return
        if connection.is_open:
            scene.change_connection(number, is_lost_here=True, to_decode=())
            self.tell_all(d.PeerLost(connection.boot, "stream lost"))
            return
        del scene.connections[number]
        for ask in connection.to_prefill:
            lost = d.AskUndelivered(ask.handoff, "connection refused")
            self.event(ask.handoff.request_id, lost)

    def lose_dead(self, number: int) -> None:
        """As `lose`, of a stream whose other end is dead: nobody is left to close it."""
        self.lose(number)
        self._scene.connections.pop(number, None)

    def notify(self, index: int) -> None:
        """Decode sees one of the notifications that are there."""
        notes = self._scene.notes
        self._scene.notes = notes[:index] + notes[index + 1 :]
        self.event(notes[index].handoff.request_id, notes[index])

    def land(self, contents: tuple[BlockId, str], generation: int) -> None:
        """Bytes of a write arrive, in the pool or in a sink."""
        number, content = contents
        block = self._scene.blocks[number]
        if generation == self._scene.generation and block.state == "reserved":
            self._scene.blocks[number] = block._replace(content=content)

    def see_replacement(self, boot: Boot) -> None:
        """Another boot of a dead prefill worker was reached."""
        self.quarantine_event(quarantine.PeerGone(boot))
