"""One router process: text, dispatch and HTTP, fed by the registry and the cache ledger.

Whatever fails that should not ends the process, with exit code 1: see `deploy.process_end`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from contextlib import AsyncExitStack
from functools import partial
from typing import NamedTuple

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from control_plane.etcd.client import EtcdClient
from control_plane.etcd.prefix_watch import PrefixWatch
from control_plane.ledger.metrics import LedgerCollector
from control_plane.ledger.reader import LedgerReader
from control_plane.preemptions import watch_preemptions
from control_plane.registry import Registry
from control_plane.rpc.client import connect
from control_plane.rpc.refusals import PeersRefused
from core.clock import Clock, SystemClock
from core.config import Config
from core.errors import ModelError
from core.ids import new_boot
from core.log import configure
from core.worker_record import Hello
from deploy.address import reachable_url
from deploy.options import RouterOptions
from deploy.process_end import ProcessEnd
from deploy.readiness import Readiness, announce
from engine.models.read_spec import read_spec
from router.dispatch.dispatcher import RouterDispatcher
from router.entropy import Entropy
from router.text.text_model import TextModel
from router.web.app import create_app
from router.web.server import ApiServer, raise_open_file_limit

_log = logging.getLogger(__name__)

DRAIN_S = 5.0
"""From SIGTERM until answers that still run are ended; the launcher, which takes the whole cluster
down, waits 10 s."""


async def run_router(config: Config, options: RouterOptions) -> None:
    """Serve until SIGTERM or SIGINT; needs no worker to start, and is ready once it knows from etcd
    which there are.

    Raises:
        UsageError: before readiness: the model's text side, a setting or the port cannot be used.
        ExceptionGroup: something failed that should not.
    """
    configure(config.log, process=options.name)
    raise_open_file_limit()
    end = ProcessEnd()
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        text = await asyncio.to_thread(TextModel.load, options.model_path)
        hello = await asyncio.to_thread(router_hello, config, options)
        refused = PeersRefused()
        dispatcher = RouterDispatcher(
            config,
            hello=hello,
            connect=partial(connect, refused=refused),
            clock=clock,
            rng=Entropy(),
            refused=refused,
        )
        registry = CollectorRegistry()
        registry.register(refused)
        server = _server(config, dispatcher, text, clock, registry)
        running = asyncio.create_task(dispatcher.run(), name="dispatch")
        end.must_run(running)
        followed = await _follow_cluster(config, dispatcher, clock, end, stack)
        registry.register(LedgerCollector(lambda: followed.ledger.counters))
        server.start()
        end.must_run(asyncio.create_task(server.wait(), name="http server"))
        url = reachable_url(config.http.host, server.port)
        if await end.comes_after(followed.workers.wait_listed()):
            _spare_the_collector()
            announce(options.ready_fd, Readiness(options.name, os.getpid(), url))
        await end.wait()
        await server.stop(DRAIN_S)
        await dispatcher.stop()
        await running


_YOUNG_OBJECTS = 20_000
"""Allocations between collections: a few dozen requests' worth, instead of one's."""


def _spare_the_collector() -> None:
    """Leave what lives as long as the process (modules, a vocabulary's tokens) out of every garbage
    collection to come: walking it took a third of a request's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])


def router_hello(config: Config, options: RouterOptions) -> Hello:
    """Return what this router says first on every stream.

    It names the model whose text side it has, so that a worker of another one, whose vocabulary
    other ids belong to, refuses its stream and says why. A directory with a text side alone has no
    such name: its router takes any worker.
    """
    try:
        model_fingerprint = read_spec(options.model_path).fingerprint
    except ModelError as error:
        _log.warning("workers of any model are taken: %s", error)
        model_fingerprint = ""
    return Hello(
        kind="router",
        name=options.name,
        boot=new_boot(),
        cluster=config.control_plane.cluster,
        model_fingerprint=model_fingerprint,
    )


def _server(
    config: Config,
    dispatcher: RouterDispatcher,
    text: TextModel,
    clock: Clock,
    registry: CollectorRegistry,
) -> ApiServer:
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    registry.register(dispatcher.metrics)
    app = create_app(
        dispatcher=dispatcher, text=text, config=config, clock=clock, registry=registry
    )
    return ApiServer(app, config.http.host, config.http.port, http=config.http, clock=clock)


class _Followed(NamedTuple):
    """What a router follows in etcd."""

    workers: PrefixWatch
    ledger: LedgerReader


async def _follow_cluster(
    config: Config,
    dispatcher: RouterDispatcher,
    clock: Clock,
    end: ProcessEnd,
    stack: AsyncExitStack,
) -> _Followed:
    """Tell the dispatcher who is there, what their caches hold and who is short of memory, for as
    long as `stack` lives."""
    settings = config.control_plane
    client = EtcdClient(settings, clock=clock)
    await client.connect()
    stack.push_async_callback(client.close)
    registry = Registry(
        client, settings.cluster, clock, lease_s=settings.lease_s, on_failure=end.fail
    )
    workers = registry.watch_workers(dispatcher.on_worker_change)
    stack.push_async_callback(workers.close)
    ledger = LedgerReader(client, settings.cluster, dispatcher, on_failure=end.fail)
    stack.push_async_callback(ledger.close)
    preemptions = watch_preemptions(
        client, settings.cluster, dispatcher.on_preempted, on_failure=end.fail
    )
    stack.push_async_callback(preemptions.close)
    return _Followed(workers, ledger)
