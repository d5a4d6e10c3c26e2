"""Requests at the edges of length and reuse, on every path and executor; nothing is left after.

Each cluster serves all tests: the mock, whose every token is known, and the real model; both are
disaggregated (the header forces the handoff, however short the prompt) and colocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from core.sampling_params import SamplingParams
from engine.executor.mock_tokens import expected_tokens
from tests.cluster import PATIENT, Cluster, Up
from tests.router_server import smollm2_text
from tests.scrape import Scrape

pytestmark = pytest.mark.e2e

MODES = {
    "mock": ("--executor", "mock"),
    "mock-colocated": ("--executor", "mock", "--colocated", "1"),
    "model": (),
    "model-colocated": ("--colocated", "1"),
}
BLOCK = 16
EOS = smollm2_text().eos_token_ids[0]


@dataclass(frozen=True)
class Served:
    """A cluster, and requests to it that ask for their path."""

    cluster: Cluster
    is_colocated: bool
    is_mock: bool

    def post(self, **fields: object) -> httpx.Response:
        """Send a completion of token ids or text, greedy, through the fabric where there is one."""
        wish = "auto" if self.is_colocated else "always"
        headers = {"x-dovetail-trace": "1", "x-dovetail-disaggregate": wish}
        body = {"temperature": 0, "return_token_ids": True, **fields}
        url = f"{self.cluster.url}/v1/completions"
        return self.cluster.http.post(url, json=body, headers=headers)

    def complete(self, **fields: object) -> dict[str, Any]:
        """Return the answer, whose first choice's tokens are right."""
        answer = self.post(**fields)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(params=MODES)
def served(request: pytest.FixtureRequest, up: Up) -> Iterator[Served]:
    """Yield each cluster; after the test, nothing may be held there."""
    mode: str = request.param
    cluster = up(*MODES[mode], *PATIENT)
    yield Served(cluster, "colocated" in mode, "mock" in mode)
    cluster.wait_until_idle()


def prompt_of(length: int, salt: int) -> list[int]:
    """Return token ids that no other test's prompt begins with."""
    return [1000 + salt * 37 + (at * 7919) % 30_000 for at in range(length)]


def grown(before: Mapping[str, Scrape], after: Mapping[str, Scrape], name: str) -> dict[str, int]:
    """Return how much a counter grew, by worker."""
    return {worker: int(after[worker].total(name) - before[worker].total(name)) for worker in after}


def oracle(prompt: Sequence[int], max_tokens: int) -> list[int]:
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0, eos_token_ids=smollm2_text().eos_token_ids
    )
    return list(expected_tokens(prompt, sampling, vocab_size=smollm2_text().vocab_size))


def test_one_token_is_one_token(served: Served) -> None:
    answer = served.complete(prompt=prompt_of(20, 1), max_tokens=1)
    choice = answer["choices"][0]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == 1
    assert choice["finish_reason"] == "length"


def test_end_of_text_as_first_token(served: Served) -> None:
    answer = served.complete(prompt=prompt_of(20, 2), max_tokens=8, logit_bias={EOS: 100})
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert choice["token_ids"] == [EOS]
    assert answer["usage"]["completion_tokens"] == 1


def test_a_stop_string_that_the_first_token_completes(served: Served) -> None:
    forced = smollm2_text().encode(" dog", add_special_tokens=False)
    assert len(forced) == 1
    answer = served.complete(
        prompt=prompt_of(20, 3), max_tokens=8, logit_bias={forced[0]: 100}, stop=["og"]
    )
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (" d", "stop")
    assert choice["stop_reason"] == "og"
    assert choice["token_ids"] == forced
    assert answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_prompts_around_a_block(served: Served, length: int) -> None:
    prompt = prompt_of(length, 100 + length)
    answer = served.complete(prompt=prompt, max_tokens=BLOCK + 4)
    tokens = answer["choices"][0]["token_ids"]
    assert answer["usage"]["prompt_tokens"] == length
    if served.is_mock:
        assert tokens == oracle(prompt, BLOCK + 4)
    if not served.is_colocated:
        assert answer["dovetail"]["blocks_transferred"] == -(-length // BLOCK)
    again = served.complete(prompt=prompt, max_tokens=BLOCK + 4)
    assert again["choices"][0]["token_ids"] == tokens


def test_a_prompt_over_the_context_takes_no_slot(served: Served) -> None:
    context = served.cluster.client().models.list().data[0].model_dump()["max_model_len"]
    before = served.cluster.workers()
    for length, max_tokens in ((context, 1), (context + 5, 1), (50, context)):
        refused = served.post(prompt=prompt_of(length, 4), max_tokens=max_tokens)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
    after = served.cluster.wait_until_idle()
    assert set(grown(before, after, "dovetail:engine_steps_total").values()) == {0}
    assert set(grown(before, after, "vllm:prefix_cache_queries_total").values()) == {0}


@pytest.mark.parametrize("prompt", ["", [], [""], [[]]])
def test_an_empty_prompt_is_refused(served: Served, prompt: object) -> None:
    refused = served.post(prompt=prompt)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "empty_prompt"


def test_samples_share_the_blocks_of_their_prompt(served: Served) -> None:
    """50 tokens: 3 full blocks stay shared, the tail is cloned by all but the last sharer."""
    prompt = prompt_of(50, 5)
    before = served.cluster.workers()
    answer = served.complete(prompt=prompt, max_tokens=4, n=4, temperature=1, seed=11)
    after = served.cluster.wait_until_idle()
    decode = "colocated-0" if served.is_colocated else "decode-0"
    prefill = "colocated-0" if served.is_colocated else "prefill-0"
    copies = grown(before, after, "dovetail:block_copies_total")
    assert copies == dict.fromkeys(copies, 0) | {decode: 3}
    computed_for = "prompt_tokens" if served.is_colocated else "peer_prompt_tokens"
    name = f"dovetail:{computed_for}_total"
    computed = {
        worker: after[worker].total(name, source="local_compute")
        - before[worker].total(name, source="local_compute")
        for worker in after
    }
    assert computed == dict.fromkeys(computed, 0) | {prefill: 50}
    assert answer["usage"]["prompt_tokens"] == 50
    assert answer["usage"]["completion_tokens"] == 16
    alone = [
        served.complete(prompt=prompt, max_tokens=4, n=n, temperature=1, seed=11) for n in (1, 4)
    ]
    samples = [choice["token_ids"] for choice in answer["choices"]]
    assert [choice["token_ids"] for choice in alone[1]["choices"]] == samples
    assert alone[0]["choices"][0]["token_ids"] == samples[0]
    assert len({tuple(sample) for sample in samples}) == 4


def test_a_repeated_prompt_is_not_moved_again(served: Served) -> None:
    prompt = prompt_of(53, 6)
    first = served.complete(prompt=prompt, max_tokens=6)
    second = served.complete(prompt=prompt, max_tokens=6)
    longer = served.complete(prompt=prompt + prompt_of(20, 7), max_tokens=6)
    assert cached(first) == 0
    assert cached(second) == 48
    assert second["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    path = second["dovetail"]
    assert path["blocks_transferred"] == path["bytes_transferred"] == 0
    assert path["blocks_reused_decode"] == 3
    assert cached(longer) == 48
    if not served.is_colocated:
        assert first["dovetail"]["blocks_transferred"] == 4
        assert longer["dovetail"]["blocks_transferred"] == 2
        assert longer["dovetail"]["prefill_worker"] == "prefill-0"


def cached(answer: Mapping[str, Any]) -> int:
    """Return the answer's cached prompt tokens."""
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]
