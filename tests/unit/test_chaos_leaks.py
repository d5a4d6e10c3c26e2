"""The judge of leaks names each kind, in the series that processes really show."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest

from decode_pool.live_request import RequestState
from decode_pool.metrics import DecodeCollector
from decode_pool.stats import EXPOSED_BUCKETS_S, DecodeStats, Histogram
from engine.events import EngineStats
from engine.metrics import EngineCollector
from prefill_pool.metrics import PrefillCollector
from prefill_pool.stats import PrefillStats
from router.dispatch.metrics import DispatchMetrics
from router.web.metrics import RouterMetrics
from tests.chaos_leaks import ROUTER_GAUGES, WORKER_GAUGES, grown, in_use, still_counted
from tests.scrape import Scrape

_ZEROS = {name: 0 for name in EngineStats.__struct_fields__ if "iteration" not in name}
_COUNTS: dict[str, Any] = {**_ZEROS, "blocks_total": 64, "blocks_free": 60, "blocks_cached": 4}
ENGINE = EngineStats(**_COUNTS)
DECODE = DecodeStats(
    requests_by_state=dict.fromkeys(RequestState, 0),
    handoffs_by_outcome={},
    decisions={},
    exposed_transfer=Histogram(EXPOSED_BUCKETS_S).snapshot(),
    quarantined_attempts=0,
    quarantine_s=1.0,
    fences=2,
)
PREFILL = PrefillStats(
    attempts_by_stage={"queued": 0, "pushing": 0},
    attempts_by_outcome={},
    writes_pending=0,
    tombstones=3,
    blocks_pushed=7,
    bytes_pushed=7,
    writes_failed=0,
    agent_renewals=0,
)


def scraped(registry: CollectorRegistry) -> Scrape:
    return Scrape(generate_latest(registry).decode())


def worker(*, without: str = "", **changes: Any) -> Scrape:
    """Return what a worker's `/metrics` says, with fields of its snapshots changed."""

    def changed(stats: Any) -> Any:
        fields = type(stats).__struct_fields__
        return replace(stats, **{name: changes[name] for name in changes if name in fields})

    engine = EngineCollector(
        lambda: changed(ENGINE), model_name="m", engine="decode-0", block_size=16
    )
    collectors = {
        "engine": engine,
        "decode": DecodeCollector(lambda: changed(DECODE)),
        "prefill": PrefillCollector(lambda: changed(PREFILL)),
    }
    registry = CollectorRegistry()
    for name, collector in collectors.items():
        if name != without:
            registry.register(collector)
    return scraped(registry)


def router(*, dispatched: int = 0, streaming: int = 0) -> Scrape:
    registry = CollectorRegistry()
    registry.register(DispatchMetrics(lambda: {"running": dispatched}, lambda: {"live": 4}))
    RouterMetrics(registry, 4096).num_by_state["streaming"] = streaming
    return scraped(registry)


def test_where_nothing_is_left_nothing_is_named() -> None:
    assert in_use({"decode-0": worker()}, {"router-0": router()}) == []


LEAKS_AT_A_WORKER: list[tuple[dict[str, Any], str]] = [
    ({"blocks_owned": 2, "blocks_free": 58}, "2 owned"),
    ({"blocks_reserved": 2, "blocks_free": 58}, "2 reserved"),
    ({"blocks_quarantined": 2, "blocks_free": 58}, "2 quarantined"),
    ({"blocks_free": 59}, "do not sum up"),
    ({"blocks_cached": 5}, "do not sum up"),
    ({"num_running": 3}, "3 vllm:num_requests_running"),
    ({"num_waiting": 3}, "3 vllm:num_requests_waiting"),
    ({"num_receiving": 3}, "3 dovetail:engine_sequences"),
    ({"num_held": 3}, "3 dovetail:engine_sequences"),
    ({"quarantined_attempts": 1}, "1 dovetail:quarantined_attempts"),
    ({"writes_pending": 1}, "1 dovetail:writes_pending"),
    ({"attempts_by_stage": {"queued": 0, "pushing": 1}}, "1 dovetail:prefill_attempts"),
    *(
        ({"requests_by_state": {**DECODE.requests_by_state, state: 1}}, "1 dovetail:worker_req")
        for state in RequestState
    ),
]


@pytest.mark.parametrize(("changes", "named"), LEAKS_AT_A_WORKER)
def test_each_leak_at_a_worker_is_named(changes: dict[str, Any], named: str) -> None:
    workers = {"decode-0": worker(), "decode-1": worker(**changes)}
    found = in_use(workers, {"router-0": router()})
    assert found
    assert all(text.startswith("decode-1: ") for text in found)
    assert any(named in text for text in found)


@pytest.mark.parametrize(
    ("series", "named"),
    [
        (router(dispatched=2), "2 dovetail:requests"),
        (router(streaming=2), "2 dovetail:http_requests"),
    ],
)
def test_each_leak_at_a_router_is_named(series: Scrape, named: str) -> None:
    found = in_use({"decode-0": worker()}, {"router-0": router(), "router-1": series})
    assert found == [f"router-1: {named}"]


@pytest.mark.parametrize("without", ["decode", "prefill"])
def test_a_series_that_is_not_shown_is_not_taken_for_zero(without: str) -> None:
    found = in_use({"decode-0": worker(without=without)}, {"router-0": Scrape("")})
    missing = {text.partition("no ")[2] for text in found}
    assert missing > {*ROUTER_GAUGES}
    assert missing < {*ROUTER_GAUGES, *WORKER_GAUGES}


def test_what_a_router_still_counts_at_a_worker_is_named() -> None:
    idle = {"requests_of_this_router": 0, "requests_on_their_way": 0}
    assert still_counted("router-0", {"decode-0": idle}) == []
    for count in idle:
        statuses = {"decode-0": idle, "decode-1": {**idle, count: 2}}
        assert still_counted("router-0", statuses) == [f"router-0: 2 {count} at decode-1"]


def test_what_there_is_more_of_is_named_and_less_is_no_leak() -> None:
    before = {"files of router-0": 20, "threads of router-0": 4, "etcd keys": 9}
    assert grown(before, before) == []
    assert grown(before, {**before, "files of router-0": 19}) == []
    assert grown(before, {**before, "files of router-0": 21}) == [
        "files of router-0: 21, at most 20 before"
    ]
    assert grown(before, {**before, "etcd keys": 10}) == ["etcd keys: 10, at most 9 before"]
