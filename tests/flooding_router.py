"""A router process whose workers are faster than any client: tokens come in floods.

    python -m tests.flooding_router [http.key=value ...]

Says its port on stdout; ends with its stdin. /status tells how many tokens came, and how
many requests were not let go of yet.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop
from prometheus_client import CollectorRegistry

from core.clock import SystemClock
from core.config import Config, load
from core.ids import RequestId, WorkerId
from core.lifetime import Lifetime, Stamp
from core.messages import WorkerOrder
from core.request import EngineRequest, FinishReason, TokenUpdate
from router.dispatch.interface import GenerateRequest, ServedModel
from router.dispatch.token_stream import RequestStream
from router.web.app import create_app
from router.web.server import ApiServer, raise_open_file_limit
from tests.router_server import smollm2_text

_BURST = 16


class FloodingDispatcher:
    """Implements `router.dispatch.interface.Dispatcher`: `max_tokens` tokens a request, at once but
    for what else the loop has to do."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._tasks: dict[RequestId, asyncio.Task[None]] = {}

    def served_model(self) -> ServedModel | None:
        return ServedModel("smol", 1 << 20, 16, "f" * 32)

    def is_ready(self) -> bool:
        return True

    def start(self, request: GenerateRequest, lifetime: Lifetime) -> RequestStream:
        lifetime.stamp(Stamp.DISPATCHED, lifetime.at(Stamp.ARRIVED) or 0.0)
        name = request.request.request_id
        stream = RequestStream(
            name, lifetime, on_abort=self.cancel, on_finish_sample=lambda *_: None
        )
        self._tasks[name] = asyncio.create_task(self._flood(request.request, stream))
        return stream

    async def _flood(self, request: EngineRequest, stream: RequestStream) -> None:
        last = request.sampling.max_tokens - 1
        for at in range(last + 1):
            finish = FinishReason.LENGTH if at == last else None
            token_id = 1000 + at * 7919 % 30_000
            stream.put(TokenUpdate(request.request_id, 0, 1, at, (token_id,), (), finish))
            self.num_tokens += 1
            if at % _BURST == 0:
                await asyncio.sleep(0)
        stream.end(None)

    def order(self, worker_id: WorkerId, order: WorkerOrder, *, is_forced: bool = False) -> None:
        """There is no worker."""

    def cancel(self, request_id: RequestId) -> None:
        """Every request is let go of so, whether it ended or was given up."""
        task = self._tasks.pop(request_id, None)
        if task is not None:
            task.cancel()

    def num_requests(self) -> int:
        return len(self._tasks)

    def cluster_status(self) -> dict[str, object]:
        counts = {"open": len(self._tasks), "tokens": self.num_tokens}
        return {"workers": [], "requests": counts}


async def serve(config: Config) -> None:
    """Serve until stdin ends."""
    raise_open_file_limit()
    app = create_app(
        dispatcher=FloodingDispatcher(),
        text=smollm2_text(),
        config=config,
        clock=SystemClock(),
        registry=CollectorRegistry(),
    )
    server = ApiServer(app, "127.0.0.1", 0, http=config.http, clock=SystemClock())
    server.start()
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(drain_s=0.1)


if __name__ == "__main__":
    overrides = dict(argument.split("=", 1) for argument in sys.argv[1:])
    uvloop.run(serve(load({}, overrides)))
