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

from core.clock import Clock
from core.config import Config
from core.worker_record import Role, WorkerRecord
from decode_pool.worker import DecodeWorker
from deploy.worker.router_front import OnOrder, RouterFront
from engine.events import Event
from prefill_pool.worker import PrefillWorker


class Pools:
    """Lives on the loop.

    Args:
        on_order: hears what operators ask of this worker.

    Attributes:
        front: the listener for routers.
    """

    def __init__(
        self, record: WorkerRecord, config: Config, clock: Clock, on_order: OnOrder
    ) -> None:
        self.decode = DecodeWorker(record, config, clock)
        self.prefill = PrefillWorker(record, config, clock)
        self.front = RouterFront(on_order)
        self.serve_as(record.role)

    # --- the threads ------------------------------------------------------------------------

    def on_engine_events(self, events: list[Event]) -> None:
        """For `EngineThread`: each pool knows its own requests by their names."""
        self.decode.on_engine_events(events)
        if self.prefill.num_attempts:
            self.prefill.on_engine_events(events)

    def on_failure(self, error: BaseException) -> None:
        """For `EngineThread` and `TransferThread`: end the process with what ended the thread."""
        self.decode.on_failure(error)

    # --- what is taken ----------------------------------------------------------------------

    def serve_as(self, role: Role) -> None:
        """Take the new work of a role. What the role before took must be over."""
        takes_prompts = role is Role.PREFILL
        self.decode.serve_as(role)
        self.front.hand_to(self.prefill.router_streams if takes_prompts else self.decode)
        self.decode.refuse("wrong_role" if takes_prompts else "")
        self.prefill.refuse("" if takes_prompts else "wrong_role")

    def drain(self) -> None:
        """Take nothing new. Routers, who hear of it at once, ask for what they would move."""
        self.decode.refuse("draining")
        self.prefill.refuse("draining")

    def fail_over(self) -> None:
        """End what is left, for routers to go on with elsewhere."""
        self.decode.fail_over("its worker drained, and its time to do so was over")

    @property
    def path_failure(self) -> str:
        """Why no KV moves to or from anybody; empty where it does."""
        return self.prefill.path_failure or self.decode.path_failure

    @property
    def num_running(self) -> int:
        """Requests and attempts under way."""
        return self.decode.num_requests + self.prefill.num_attempts

    @property
    def num_open(self) -> int:
        """The same, and all else that another worker may yet want of this one."""
        return self.decode.num_open + self.prefill.num_open
