"""Sums over all processes' /metrics are right, and every series of api.md has vLLM's labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from tests.cluster import PATIENT, Cluster, Up
from tests.scrape import Scrape, total_over

pytestmark = pytest.mark.e2e

VLLM_LABELS = {"model_name", "engine"}

ROUTER_HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
)
WORKER_SERIES = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_swapped",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
    "gpu_cache_usage_factor",
    "cache_config_info",
    "iteration_tokens_total_count",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "nixl_xfer_time_seconds_count",
    "nixl_post_time_seconds_count",
    "nixl_bytes_transferred_count",
    "nixl_num_descriptors_count",
    "nixl_num_failed_transfers_total",
)


@dataclass(frozen=True)
class Grown:
    """All processes' series before and after some requests."""

    cluster: Cluster
    before: dict[str, Scrape]
    after: dict[str, Scrape]

    def __call__(self, name: str, process: str | None = None, **labels: str) -> float:
        """Return how much a series grew, over all processes or on one."""
        names = self.after if process is None else [process]
        after = total_over((self.after[one] for one in names), name, **labels)
        return after - total_over((self.before[one] for one in names), name, **labels)


def scrape(cluster: Cluster) -> dict[str, Scrape]:
    """Read every process, once no request holds anything."""
    workers = cluster.wait_until_idle()
    return {**workers, "router": cluster.router()}


def read_tokens(answer: httpx.Response) -> Iterator[str]:
    """Read a few events: by then the request has joined its batch. Dropping the rest ends it."""
    lines = answer.iter_lines()
    for _ in range(20):
        next(lines)
    return lines


@pytest.fixture(scope="module")
def grown(up: Up) -> Grown:
    """Send 14 requests that end in each way: 8 by length, 4 by stop, 1 left, 1 refused."""
    cluster = up("--executor", "mock", "--set", "engine.mock_step_s=0.02", *PATIENT)
    before = scrape(cluster)
    url, eos, the = f"{cluster.url}/v1/completions", "2", "504"

    def ask(prompt: list[int], wish: str, **fields: object) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 5, **fields}
        return cluster.http.post(url, json=body, headers={"x-dovetail-disaggregate": wish})

    for at, wish in enumerate(("always", "never", "always", "auto")):
        prompt = [at * 100 + step for step in range(40)]
        for _ in range(2):  # the second finds 32 tokens in the cache
            assert ask(prompt, wish).status_code == 200
    for wish in ("always", "never"):
        ended = ask([7] * 20, wish, logit_bias={eos: 100}, cache_salt=wish)
        assert ended.json()["choices"][0]["finish_reason"] == "stop"
        cut = ask([8] * 20, wish, logit_bias={the: 100}, stop="The", cache_salt=wish)
        assert cut.json()["choices"][0]["stop_reason"] == "The"
    body = {"prompt": [9] * 20, "max_tokens": 2000, "stream": True}
    with cluster.http.stream("POST", url, json=body) as left:
        read_tokens(left)
    assert ask([1] * 9000, "auto").status_code == 400
    return Grown(cluster, before, scrape(cluster))


def test_every_request_is_counted_once(grown: Grown) -> None:
    name = "vllm:request_success_total"
    assert grown(name) == 13
    assert grown(name, finished_reason="length") == 8
    assert grown(name, finished_reason="stop") == 4
    assert grown(name, finished_reason="abort") == 1
    assert grown(name, finished_reason="error") == 0
    counted = ("request_prompt_tokens", "request_params_n", "request_generation_tokens")
    assert [grown(f"vllm:{one}_count") for one in counted] == [13] * 3


def test_each_series_is_where_it_belongs_with_vllm_s_labels(grown: Grown) -> None:
    router = grown.after["router"]
    histograms = [f"vllm:{name}" for name in ROUTER_HISTOGRAMS]
    for name in histograms:
        assert router.labels(f"{name}_count"), name
        for suffix in ("_sum", "_count"):
            assert all(labels.keys() == VLLM_LABELS for labels in router.labels(name + suffix))
        assert all(one.keys() == {*VLLM_LABELS, "le"} for one in router.labels(f"{name}_bucket"))
    (success, *_) = router.labels("vllm:request_success_total")
    assert success.keys() == {*VLLM_LABELS, "finished_reason"}
    for worker in ("prefill-0", "decode-0"):
        series = grown.after[worker]
        for name in WORKER_SERIES:
            (labels,) = series.labels(f"vllm:{name}")
            assert labels.keys() >= VLLM_LABELS, name
            assert labels["engine"] == worker
            assert labels["model_name"] == grown.cluster.model
            assert not router.labels(f"vllm:{name}"), name
        assert not {name for name in series.names if name.startswith("vllm:request_")}
        (config,) = series.labels("vllm:cache_config_info")
        assert config["block_size"] == "16"


def test_prompt_tokens_of_all_processes_are_those_asked_for(grown: Grown) -> None:
    asked = grown("vllm:request_prompt_tokens_sum")
    assert asked == 8 * 40 + 4 * 20 + 20
    for name in ("vllm:prompt_tokens_total", "vllm:prefix_cache_queries_total"):
        assert grown(name) == asked
    by_source = "dovetail:prompt_tokens_total"
    for worker in ("prefill-0", "decode-0"):
        assert grown(by_source, worker) == grown("vllm:prompt_tokens_total", worker)
    # "always" twice and each time again, which the cache serves; the EOS that is forced.
    assert grown(by_source, source="local_cache") == 4 * 32
    assert grown("vllm:prefix_cache_hits_total") == 4 * 32
    assert grown(by_source, source="host_cache") == 0
    peers = grown("dovetail:peer_prompt_tokens_total")
    assert peers == grown("dovetail:peer_prompt_tokens_total", "prefill-0")
    assert peers == grown(by_source, source="transferred") > 0


def test_every_request_has_a_prefill_time_wherever_its_prompt_was_computed(grown: Grown) -> None:
    assert grown("vllm:request_prefill_time_seconds_count") == 12  # all but the one that left
    assert grown("vllm:request_inference_time_seconds_count") == 12
    inference = grown("vllm:request_inference_time_seconds_sum")
    parts = (grown(f"vllm:request_{part}_time_seconds_sum") for part in ("prefill", "decode"))
    assert inference == pytest.approx(sum(parts))


def test_tokens_transfers_and_decisions_are_counted(grown: Grown) -> None:
    generated = grown("vllm:request_generation_tokens_sum")
    assert generated >= 8 * 5 + 4 + 1
    # The first token of a handoff is sampled by the prefill worker, all others where they run. A
    # client's leaving is seen a few tokens late.
    assert generated <= grown("vllm:generation_tokens_total") <= generated + 100
    pushed = grown("dovetail:blocks_pushed_total")
    assert grown("vllm:nixl_bytes_transferred_sum") == grown("dovetail:bytes_pushed_total") > 0
    assert pushed * 1024 == grown("vllm:nixl_bytes_transferred_sum")
    assert grown("vllm:nixl_num_failed_transfers_total") == 0
    handoffs = grown("dovetail:handoffs_total", outcome="completed")
    assert handoffs == grown("dovetail:handoffs_total") == grown("dovetail:prefill_handoffs_total")
    assert handoffs == grown("dovetail:exposed_transfer_seconds_count") >= 3
    assert grown("dovetail:prompts_total") == grown("dovetail:disaggregation_decisions_total") == 13
    assert grown("dovetail:predicted_ttft_seconds_count") == 13
    assert grown("dovetail:actual_ttft_seconds_count") == 13


def test_gauges_are_shares_and_return_to_zero(grown: Grown) -> None:
    for worker in ("prefill-0", "decode-0"):
        series = grown.after[worker]
        assert series.total("vllm:kv_cache_usage_perc") == 0
        assert series.total("vllm:num_requests_running") == 0
        assert series.total("dovetail:engine_sequences") == 0
        assert sum(series.by_label("dovetail:transport_in_use", "transport").values()) == 1
    assert grown.after["router"].total("dovetail:requests") == 0
    assert grown.after["decode-0"].total("dovetail:worker_requests") == 0


@pytest.fixture
def running(grown: Grown) -> Iterator[Cluster]:
    """A cluster with one request of 100 prompt tokens running, for 80 s if nobody ends it."""
    cluster = grown.cluster
    body = {"prompt": [5] * 100, "max_tokens": 4000, "stream": True}
    with cluster.http.stream("POST", f"{cluster.url}/v1/completions", json=body) as answer:
        rest = read_tokens(answer)
        yield cluster
        next(rest)


def test_a_running_request_shows(running: Cluster) -> None:
    decode = running.workers()["decode-0"]
    blocks = decode.blocks
    assert blocks["owned"] >= 7
    assert decode.total("vllm:num_requests_running") == 1
    in_use = blocks["owned"] + blocks["reserved"] + blocks["quarantined"]
    assert decode.total("vllm:kv_cache_usage_perc") == pytest.approx(in_use / blocks["total"])
    router = running.router()
    assert router.by_label("dovetail:requests", "state")["streaming"] == 1
    assert router.by_label("dovetail:http_requests", "state")["streaming"] == 1
