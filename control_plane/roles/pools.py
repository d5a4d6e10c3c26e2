"""Both pools of one worker, on one engine and one fabric, and which of them takes new work.

    role             requests of routers    asks of decode workers       routers hear the load of
    prefill          refused: wrong_role    taken                        the prefill pool
    decode, both     taken                  of moved requests, else      the decode pool
                                            refused: wrong_role
    while it drains  refused: draining      of moved requests, else      the same
                                            refused: draining

A worker of any role has both: a decode worker hands over what it runs by answering asks, as a
prefill worker does.
"""

from __future__ import annotations

from typing import Protocol

from control_plane.roles.router_front import OnOrder, RouterFront
from control_plane.rpc.interface import StreamListener
from core.messages import RouterToWorker
from core.worker_record import Role
from engine.events import Event


class Pool(Protocol):
    """What both have."""

    @property
    def num_open(self) -> int:
        """What is under way, and all else that another worker may yet want of this one."""
        ...

    @property
    def path_failure(self) -> str:
        """Why no KV moves; empty where it does."""
        ...

    def on_engine_events(self, events: list[Event]) -> None:
        """Take the events of one step; those of unknown requests change nothing."""
        ...

    def refuse(self, reason: str) -> None:
        """Take nothing new: "draining" or "wrong_role"; "" takes it again."""
        ...


class DecodePool(Pool, StreamListener[RouterToWorker], Protocol):
    """`decode_pool.worker.DecodeWorker`."""

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        ...

    def on_failure(self, error: BaseException) -> None:
        """End the process with what ended a thread."""
        ...

    def serve_as(self, role: Role) -> None:
        """Requests that come from now on are those of a worker of this role."""
        ...

    def fail_over(self, message: str) -> None:
        """End what is left, for routers to go on with elsewhere."""
        ...


class PrefillPool(Pool, Protocol):
    """`prefill_pool.worker.PrefillWorker`."""

    @property
    def router_streams(self) -> StreamListener[RouterToWorker]:
        """Who hears routers while this pool has the role."""
        ...

    @property
    def num_attempts(self) -> int:
        """Attempts under way."""
        ...


class Pools:
    """Lives on the loop.

    Args:
        on_order: hears what operators ask of this worker.

    Attributes:
        front: the listener for routers.
    """

    def __init__(
        self, role: Role, decode: DecodePool, prefill: PrefillPool, on_order: OnOrder
    ) -> None:
        self._decode = decode
        self._prefill = prefill
        self.front = RouterFront(on_order)
        self.serve_as(role)

    # --- the threads ------------------------------------------------------------------------

    def on_engine_events(self, events: list[Event]) -> None:
        """For `EngineThread`: each pool knows its own requests by their names."""
        self._decode.on_engine_events(events)
        # Of no meaning without attempts: a decode worker's every step would wake another task.
        if self._prefill.num_attempts:
            self._prefill.on_engine_events(events)

    def on_failure(self, error: BaseException) -> None:
        """For `EngineThread` and `TransferThread`: end the process with what ended the thread."""
        self._decode.on_failure(error)

    # --- what is taken ----------------------------------------------------------------------

    def serve_as(self, role: Role) -> None:
        """Take the new work of a role. What the role before took must be over."""
        takes_prompts = role is Role.PREFILL
        self._decode.serve_as(role)
        self.front.hand_to(self._prefill.router_streams if takes_prompts else self._decode)
        self._decode.refuse("wrong_role" if takes_prompts else "")
        self._prefill.refuse("" if takes_prompts else "wrong_role")

    def drain(self) -> None:
        """Take nothing new. Routers, who hear of it at once, ask for what they would move."""
        self._decode.refuse("draining")
        self._prefill.refuse("draining")

    def fail_over(self) -> None:
        """End the requests that are left, for routers to go on with elsewhere."""
        self._decode.fail_over("its worker drained, and its time to do so was over")

    @property
    def path_failure(self) -> str:
        """Why no KV moves to or from anybody; empty where it does."""
        return self._prefill.path_failure or self._decode.path_failure

    @property
    def num_running(self) -> int:
        """Requests and attempts under way."""
        return self._decode.num_requests + self._prefill.num_attempts

    @property
    def num_open(self) -> int:
        """The same, and all else that another worker may yet want of this one."""
        return self._decode.num_open + self._prefill.num_open
