"""What could go wrong in a handoff world, by kind."""

from __future__ import annotations

from core.ids import Boot, RequestId, WorkerId
from core.messages import PrefillAsk
from kv_transfer.handoff import decode_messages as d
from kv_transfer.handoff import quarantine
from kv_transfer.handoff.tombstones import Tombstones
from tests.handoff_decode_end import DecodeEnd
from tests.handoff_scene import Action, Prefill, Scene

IDLE_S = 6.0
"""Longer than a quarantine without an answer."""

LONG_S = 11.0
"""Longer than a try without progress."""


class Faults:
    """Offers and carries out faults; each method is one."""

    def __init__(self, scene: Scene, decode: DecodeEnd) -> None:
        self._scene = scene
        self._decode = decode

    def possible(self) -> dict[str, list[Action]]:
        """Return everything that could go wrong next, by kind."""
        return {
            "abort": self._aborts(),
            "abort a sample": self._sample_aborts(),
            **self._fabric_faults(),
            **self._process_faults(),
            "ask refused": [
                Action("prefill.receive", (number, "draining")) for number in self._asking()
            ],
            "engine refuses": [
                Action("prefill.engine_refuses", (worker.boot, handoff))
                for worker in self._running()
                for handoff, done in worker.computing.items()
                if done < 0
            ],
            "slow": [Action("pass_time", (IDLE_S,))],
            "very slow": [Action("pass_time", (LONG_S,))],
        }

    def _fabric_faults(self) -> dict[str, list[Action]]:
        running = {worker.boot for worker in self._running()}
        posted = {
            key: write
            for key, write in self._scene.writes.items()
            if write.writer in running and not write.is_over
        }
        whole = [key for key, write in posted.items() if write.is_whole]
        notes = range(len(self._scene.notes))
        return {
            "write fails": [Action("prefill.fail", (key,)) for key in posted],
            "write refused": [Action("prefill.refuse", (key,)) for key in whole],
            "notification lost": [Action("faults.lose_note", (index,)) for index in notes],
        }

    def _process_faults(self) -> dict[str, list[Action]]:
        scene = self._scene
        connections = scene.connections.values()
        streamed = sorted({c.boot for c in connections if c.is_open and not c.is_lost_here})
        living = [w.boot for w in scene.prefills.values() if w.died_at is None]
        return {
            "freeze": [Action("faults.freeze", (worker.boot,)) for worker in self._running()],
            "kill": [Action("faults.kill", (boot,)) for boot in living],
            "stream lost": [Action("faults.lose_streams", (boot,)) for boot in streamed],
            "stream replaced": [Action("faults.replace_stream", (boot,)) for boot in streamed],
            "suspect": [Action("faults.suspect", (boot,)) for boot in streamed],
        }

    def _running(self) -> list[Prefill]:
        return [worker for worker in self._scene.prefills.values() if worker.runs]

    def _aborts(self) -> list[Action]:
        requests = self._scene.requests.items()
        return [Action("faults.abort", (key,)) for key, request in requests if not request.result]

    def _sample_aborts(self) -> list[Action]:
        return [
            Action("faults.abort_sample", (key, sample))
            for key, request in self._scene.requests.items()
            if not request.result
            for sample in range(request.side.request.sampling.n)
            if sample not in request.aborted
        ]

    def _asking(self) -> list[int]:
        running = {worker.boot for worker in self._running()}
        return [
            number
            for number, connection in self._scene.connections.items()
            if connection.is_open and connection.boot in running
            if connection.to_prefill and isinstance(connection.to_prefill[0], PrefillAsk)
        ]

    def abort(self, request_id: RequestId) -> None:
        """The router wants no more of a request, which is over with that."""
        self._decode.event(request_id, d.Aborted())
        assert self._scene.requests[request_id].result == "ended", "an abort changed nothing"

    def abort_sample(self, request_id: RequestId, sample: int) -> None:
        """The router wants no more of one sample; the others go on."""
        request = self._scene.requests[request_id]
        self._scene.change_request(request_id, aborted=request.aborted | {sample})
        self._decode.event(request_id, d.SampleAborted(sample))
        after = self._scene.requests[request_id]
        is_wanted = len(after.side.ended) < after.side.request.sampling.n
        assert not (is_wanted and after.result), "a sibling's abort ended the handoff"

    def lose_note(self, index: int) -> None:
        """A notification never comes."""
        notes = self._scene.notes
        self._scene.notes = notes[:index] + notes[index + 1 :]

    def freeze(self, boot: Boot) -> None:
        """A worker stops; its network card goes on writing."""
        self._scene.change_prefill(boot, is_frozen=True)

    def kill(self, boot: Boot) -> None:
        """A worker dies, with bytes in its buffers, and is started again."""
        scene = self._scene
        scene.change_prefill(boot, died_at=scene.now, sides={}, held={}, computing={})
        for number, connection in list(scene.connections.items()):
            if connection.boot == boot and connection.is_open:
                scene.change_connection(number, to_prefill=())
            if connection.boot == boot and connection.is_lost_here:
                del scene.connections[number]
        for key, write in list(scene.writes.items()):
            if write.writer == boot:
                scene.change_write(key)
        boot_prefill(scene, scene.prefills[boot].worker_id)

    def lose_streams(self, boot: Boot) -> None:
        """Decode's streams to a worker break. What was sent may still arrive, later."""
        for number, connection in list(self._scene.connections.items()):
            if connection.boot == boot:
                self._decode.lose(number)

    def replace_stream(self, boot: Boot) -> None:
        """As before, and decode connects anew."""
        self.lose_streams(boot)
        self._scene.connect(boot)

    def suspect(self, boot: Boot) -> None:
        """A worker's heartbeats stop, and come back."""
        self._decode.tell_all(d.PeerLost(boot, "heartbeats stopped"))
        self._decode.quarantine_event(quarantine.PeerHeard(boot))


def boot_prefill(scene: Scene, worker_id: WorkerId) -> None:
    """Start a life of a prefill worker."""
    boot = Boot(f"{worker_id}.{len(scene.prefills)}")
    scene.prefills[boot] = Prefill(worker_id, boot, Tombstones())
