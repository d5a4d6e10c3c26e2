"""What a handoff world consists of: unchanging values in a scene that is cheap to copy.

A model checker copies the scene for everything that may happen next, so nothing in it refers to
anything else but by name, and what changes is replaced.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from core.ids import BlockId, Boot, HandoffId, RequestId, WorkerId
from core.messages import WriteNotification
from engine.events import Reserved
from kv_transfer.handoff.decode_messages import Event
from kv_transfer.handoff.decode_side import DecodeSide
from kv_transfer.handoff.prefill_side import PrefillSide
from kv_transfer.handoff.quarantine import Quarantine
from kv_transfer.handoff.tombstones import Tombstones

BLOCK = 4
TRY_S = 10.0
DEADLINE_S = 300.0
QUARANTINE_S = 5.0
HERE = Boot("decode")

WriteKey = tuple[HandoffId, int]
Contents = tuple[tuple[BlockId, str], ...]


class Action(NamedTuple):
    """Something that may happen: a method of the world and its arguments."""

    kind: str
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(map(str, self.args))})"


class Block(NamedTuple):
    """One of decode's blocks: free, cached, reserved or quarantined for an attempt."""

    state: str = "free"
    owner: HandoffId | None = None
    content: str = ""


FREE = Block()
CACHED = Block("cached")


class Write(Struct, frozen=True):
    """A posted write; each of its blocks lands by itself.

    Attributes:
        left: what has not landed: targets and what is written there.
        is_over: its writer knows that it ended.
        is_cut: its agent was destroyed, so it reads no source any more.
    """

    writer: Boot
    note: WriteNotification
    left: Contents
    sources: tuple[BlockId, ...]
    is_over: bool = False
    is_cut: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether nothing of it has landed."""
        return len(self.left) == self.note.num_blocks


class Connection(Struct, frozen=True):
    """A stream to a prefill worker. Old ones go on delivering what was sent on them."""

    boot: Boot
    to_prefill: tuple[Any, ...] = ()
    to_decode: tuple[Any, ...] = ()
    is_open: bool = False
    is_lost_here: bool = False


class Prefill(Struct, frozen=True):
    """One life of a prefill worker.

    Attributes:
        asked_on: the connection that an attempt's answers go to.
        computing: attempts in the engine, and the tokens that it has computed; -1 in its queue.
        held: source blocks of attempts.
        died_at: None while it lives.
    """

    worker_id: WorkerId
    boot: Boot
    tombstones: Tombstones
    sides: dict[HandoffId, PrefillSide] = {}
    asked_on: dict[HandoffId, int] = {}
    computing: dict[HandoffId, int] = {}
    held: dict[HandoffId, tuple[BlockId, ...]] = {}
    next_block: int = 0
    is_frozen: bool = False
    died_at: float | None = None

    @property
    def runs(self) -> bool:
        """Whether it takes part now."""
        return not self.is_frozen and self.died_at is None


class Request(Struct, frozen=True):
    """A request at the decode worker.

    Attributes:
        ends: one a sample: whether its first token ends it.
        emitted: token by sample, as the client got them.
        result: how it ended: joined, local, failed, ended; empty before.
    """

    side: DecodeSide
    ends: tuple[bool, ...]
    num_cached: int
    emitted: dict[int, int] = {}
    aborted: frozenset[int] = frozenset()
    result: str = ""


class Scene:
    """Everything that can change.

    Attributes:
        tables: blocks of attempts that have a reservation.
        waiting: attempts without blocks, in order.
        reserved: what the engine did and the handoff has not heard of yet.
        generation: of the memory; the quarantine learns of it later.
        moved_at: time of the last fence.
        fence: what is left of a fence: "" (nothing), "move_region", "tell_fenced".
        notes: notifications that decode has not seen.
    """

    def __init__(self, num_blocks: int, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        self.now = 1.0
        self.blocks = dict.fromkeys(map(BlockId, range(num_blocks)), FREE)
        self.tables: dict[HandoffId, tuple[BlockId, ...]] = {}
        self.waiting: tuple[tuple[HandoffId, RequestId], ...] = ()
        self.reserved: tuple[Reserved, ...] = ()
        self.requests: dict[RequestId, Request] = {}
        self.quarantine = Quarantine(quarantine_s=QUARANTINE_S)
        self.generation = 0
        self.moved_at = -1.0
        self.fence = ""
        self.writes: dict[WriteKey, Write] = {}
        self.notes: tuple[WriteNotification, ...] = ()
        self.prefills: dict[Boot, Prefill] = {}
        self.connections: dict[int, Connection] = {}
        self.num_connections = 0
        self.num_faults = 0
        self.num_aborts = 0

    def copy(self) -> Scene:
        """Return another scene that looks the same; the values in it are shared."""
        twin = copy.copy(self)
        twin.blocks = self.blocks.copy()
        twin.tables = self.tables.copy()
        twin.requests = self.requests.copy()
        twin.writes = self.writes.copy()
        twin.prefills = self.prefills.copy()
        twin.connections = self.connections.copy()
        return twin

    def change_request(self, request_id: RequestId, **fields: Any) -> None:
        """Replace fields of a request."""
        self.requests[request_id] = replace(self.requests[request_id], **fields)

    def change_prefill(self, boot: Boot, **fields: Any) -> None:
        """Replace fields of a prefill worker."""
        self.prefills[boot] = replace(self.prefills[boot], **fields)

    def change_write(self, key: WriteKey, **fields: Any) -> None:
        """Replace fields of a write; one of which nothing more can come is forgotten."""
        write = replace(self.writes[key], **fields)
        self.writes[key] = write
        if not write.left and (write.is_over or self.prefills[write.writer].died_at is not None):
            del self.writes[key]

    def change_connection(self, number: int, **fields: Any) -> None:
        """Replace fields of a connection."""
        self.connections[number] = replace(self.connections[number], **fields)

    def send_to_prefill(self, number: int, message: Any) -> None:
        """Put a message behind those that are under way to the prefill worker."""
        under_way = self.connections[number].to_prefill
        self.change_connection(number, to_prefill=(*under_way, message))

    def send_to_decode(self, number: int, message: Any) -> None:
        """Put a message behind those that are under way to decode, who hears no lost stream."""
        connection = self.connections.get(number)
        if connection is not None and not connection.is_lost_here:
            self.change_connection(number, to_decode=(*connection.to_decode, message))

    def connect(self, boot: Boot) -> int:
        """Return the number of the connection to a prefill worker; begins one if there is none."""
        for number, connection in self.connections.items():
            if connection.boot == boot and not connection.is_lost_here:
                return number
        self.num_connections += 1
        self.connections[self.num_connections] = Connection(boot)
        return self.num_connections

    def free_blocks(self) -> list[BlockId]:
        """Return decode's free blocks."""
        return [number for number, block in self.blocks.items() if block.state == "free"]

    def num_blocks_of(self, request_id: RequestId) -> int:
        """Return how many blocks a request's prompt takes."""
        return -(-len(self.requests[request_id].side.request.prompt) // BLOCK)

    @property
    def is_starving(self) -> bool:
        """Whether a request waits for blocks."""
        if not self.waiting:
            return False
        return len(self.free_blocks()) < self.num_blocks_of(self.waiting[0][1])


def token_of(request_id: RequestId, sample: int) -> int:
    """Return what prefill samples first."""
    return 1000 * int(request_id) + sample


def content_of(request_id: RequestId, block: int) -> str:
    """Return the KV of one prompt block."""
    return f"{request_id}:{block}"


def events_for(scene: Scene, event: Event) -> list[tuple[RequestId, Event]]:
    """Return an event for every request that is not over."""
    return [(key, event) for key, request in scene.requests.items() if not request.result]
