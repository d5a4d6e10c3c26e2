"""Whole clusters against transformers, both in float32: every token and log-probability is its.

One axis at a time: who computes the prompt, what the caches hold, the chunk budget, the batch. The
main path answers all twenty prompts at length. Another axis answers those that it may change, but
for the longest, over one border of blocks: a wrong KV block shows in the tokens right after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import torch

from tests.answer_judge import Answer, judge
from tests.cluster import Cluster, Up
from tests.figures import Figures
from tests.oracle import smollm2
from tests.prompts import Prompt, story, twenty_prompts

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

EXACT = (
    "--set", "engine.weights=f32", "--set", "engine.kv_dtype=f32",
    "--set", f"engine.kv_memory={416 << 20}",  # 9,466 tokens
    # A busy machine must not add attempts, which belong to other tests.
    "--set", "control_plane.suspect_s=60", "--set", "kv_transfer.try_s=300",
)  # fmt: skip
NUM_TOKENS, NUM_FEW = 64, 24
"""Of an answer, on the main path and on other axes."""
BLOCK_SIZE = 16
LONG = 1000
"""From so many tokens on a prompt is answered on the main path only."""
TIMEOUT_S = 600.0
"""Generous: the machine may be busy."""


class Answered(NamedTuple):
    """An answer and the `dovetail` object: which way it took."""

    answer: Answer
    path: dict[str, Any]


@pytest.fixture(scope="class")
def cluster(up: Up, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A class's own cluster, by its `ARGUMENTS`; gone before the next one takes its memory."""
    assert request.cls is not None
    cluster = up(*EXACT, *request.cls.ARGUMENTS)
    yield cluster
    assert cluster.launched.stop() == 0, cluster.launched.transcript()


def ask(
    cluster: Cluster, prompt: Prompt, disaggregate: str = "auto", num_tokens: int = NUM_FEW
) -> Answered:
    """Send a prompt as ids to /v1/completions, or as its messages to /v1/chat/completions."""
    body: dict[str, Any] = {
        "model": cluster.model,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if prompt.messages is None:
        path = "/v1/completions"
        body |= {"prompt": prompt.token_ids, "logprobs": 1}
    else:
        path = "/v1/chat/completions"
        body |= {"messages": prompt.messages, "logprobs": True, "top_logprobs": 1}
    headers = {"x-dovetail-trace": "1", "x-dovetail-disaggregate": disaggregate}
    reply = httpx.post(
        cluster.url + path, json=body, headers=headers, timeout=TIMEOUT_S, trust_env=False
    )
    assert reply.status_code == 200, reply.text
    whole = reply.json()
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "length"
    if prompt.messages is None:
        assert choice["prompt_token_ids"] == prompt.token_ids
        logprobs = choice["logprobs"]["token_logprobs"]
        best = [max(alternatives.values()) for alternatives in choice["logprobs"]["top_logprobs"]]
    else:
        assert whole["prompt_token_ids"] == prompt.token_ids
        entries = choice["logprobs"]["content"]
        logprobs = [entry["logprob"] for entry in entries]
        best = [entry["top_logprobs"][0]["logprob"] for entry in entries]
    answer = Answer(prompt.name, prompt.token_ids, choice["token_ids"], logprobs, best)
    return Answered(answer, whole["dovetail"])


def ask_all(
    cluster: Cluster,
    prompts: Sequence[Prompt],
    disaggregate: str = "auto",
    *,
    clients: int = 6,
    num_tokens: int = NUM_FEW,
) -> list[Answered]:
    """Send prompts from so many clients at once; return the answers in their order."""
    asking = partial(ask, cluster, disaggregate=disaggregate, num_tokens=num_tokens)
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(asking, prompts))


def check(
    axis: str, answered: Sequence[Answered], figures: Figures, num_tokens: int = NUM_FEW
) -> None:
    """Judge the answers, and show what was found."""
    first, *unclear = judge([one.answer for one in answered], num_tokens)
    figures(f"oracle, {axis}: {first}", *unclear)


def check_scores(cluster: Cluster, decision: str, disaggregate: str, figures: Figures) -> None:
    """Have a prompt of several chunks scored, twice: a cache that holds it changes nothing."""
    prompt = story(300, 150)
    rows = smollm2().reference_logits(prompt).log_softmax(dim=-1)[:-1]
    wanted = rows.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    headers = {"x-dovetail-trace": "1", "x-dovetail-disaggregate": disaggregate}
    body = {"prompt": prompt, "prompt_logprobs": 1, "max_tokens": 1, "temperature": 0}
    difference = 0.0
    for _ in range(2):
        reply = cluster.http.post(f"{cluster.url}/v1/completions", json=body, headers=headers)
        whole = reply.json()
        assert whole["dovetail"]["decision"] == decision
        assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        (choice,) = whole["choices"]
        first, *positions = choice["prompt_logprobs"]
        assert first is None
        found = [
            one[str(token)]["logprob"] for token, one in zip(prompt[1:], positions, strict=True)
        ]
        off = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
        difference = max(difference, off)
    assert difference <= 1e-3
    figures(f"oracle, prompt logprobs, {decision}: largest difference {difference:.1e}")


def check_handoffs(answered: Sequence[Answered]) -> None:
    """Assert that each prompt came from the prefill worker, but for what decode held already."""
    for answer, path in answered:
        assert path["decision"] == "disaggregated", (answer.name, path)
        moved = path["blocks_transferred"], path.get("blocks_reused_decode", 0)
        assert sum(moved) == -(-len(answer.prompt_ids) // BLOCK_SIZE), (answer.name, path)


def reused(answered: Sequence[Answered], side: str) -> list[int]:
    """Blocks found in the cache of the prefill or the decode worker."""
    return [path.get(f"blocks_reused_{side}", 0) for _, path in answered]


def reusable(prompts: Sequence[Prompt]) -> list[int]:
    """Blocks that a cache may serve: not the last token's."""
    return [(len(prompt.token_ids) - 1) // BLOCK_SIZE for prompt in prompts]


class TestDisaggregated:
    ARGUMENTS = ()

    def test_cold_caches(self, cluster: Cluster, figures: Figures) -> None:
        answered = ask_all(cluster, twenty_prompts(), "always", num_tokens=NUM_TOKENS)
        check_handoffs(answered)
        check("disaggregated", answered, figures, NUM_TOKENS)

    def test_prompt_logprobs(self, cluster: Cluster, figures: Figures) -> None:
        check_scores(cluster, "disaggregated", "always", figures)

    def test_the_same_prompts_again(self, cluster: Cluster, figures: Figures) -> None:
        """Decode holds all that can be reused: it computes the rest itself, and nothing moves."""
        prompts = [prompt for prompt in twenty_prompts() if 16 < len(prompt.token_ids) < 70]
        ask_all(cluster, prompts, "always")
        answered = ask_all(cluster, prompts, "always")
        assert {path["decision"] for _, path in answered} == {"local_hit"}
        assert reused(answered, "decode") == reusable(prompts)
        assert [path.get("blocks_transferred", 0) for _, path in answered] == [0] * len(prompts)
        check("the same prompts again", answered, figures)

    def test_shared_prefix_on_both_sides(self, cluster: Cluster, figures: Figures) -> None:
        prefix = story(201, 800)
        ask(cluster, Prompt("shared prefix", prefix), "always")
        prompts = [
            Prompt(f"shared prefix and {n} more", prefix + story(n, n)) for n in (17, 40, 150)
        ]
        answered = ask_all(cluster, prompts, "always")
        check_handoffs(answered)
        assert reused(answered, "decode") == [50, 50, 50]
        assert reused(answered, "prefill") == [50, 50, 50]
        check("a shared prefix on both sides", answered, figures)

    def test_prefix_on_the_decode_side_only(self, cluster: Cluster, figures: Figures) -> None:
        """The prefill worker computes the prefix too, and sends only what follows it."""
        prefix = story(202, 400)
        alone = ask(cluster, Prompt("prefix on decode", prefix), "never")
        prompt = Prompt("prefix on decode and 200 more", prefix + story(200, 200))
        longer = ask(cluster, prompt, "always")
        check_handoffs([longer])
        assert reused([longer], "decode") == [25]
        assert reused([longer], "prefill") == [0]
        check("a prefix on the decode side only", [alone, longer], figures)

    def test_prefix_on_the_prefill_side_only(self, cluster: Cluster, figures: Figures) -> None:
        """A decode worker that starts again has an empty cache."""
        prompts = [Prompt(f"prefix on prefill, {n}", story(n, n)) for n in (401, 49)]
        ask_all(cluster, prompts, "always")
        first = cluster.pid("decode-0")
        psutil.Process(first).kill()
        cluster.launched.wait_for(r"^decode-0 +died \(SIGKILL\)", 120)
        cluster.launched.wait_for(rf"^decode-0 +ready  pid (?!{first}\b)\d+", 120)
        answered = ask_all(cluster, prompts, "always")
        check_handoffs(answered)
        assert reused(answered, "decode") == [0, 0]
        assert reused(answered, "prefill") == reusable(prompts)
        check("a prefix on the prefill side only", answered, figures)


class TestColocated:
    ARGUMENTS = ("--colocated", "1")

    def test_cold_cache(self, cluster: Cluster, figures: Figures) -> None:
        prompts = [prompt for prompt in twenty_prompts() if len(prompt.token_ids) < LONG]
        answered = ask_all(cluster, prompts)
        assert {path["decision"] for _, path in answered} == {"colocated"}
        check("colocated", answered, figures)

    def test_prompt_logprobs(self, cluster: Cluster, figures: Figures) -> None:
        check_scores(cluster, "colocated", "auto", figures)

    def test_batch_of_16(self, cluster: Cluster, figures: Figures) -> None:
        """Chunks and decodes of fresh prompts, of 7 to 202 tokens, share steps."""
        fresh = [
            Prompt(f"batched story {i}", story(100 + i, 7 + 13 * i)) for i in range(15, -1, -1)
        ]
        check("16 at once", ask_all(cluster, fresh, clients=16), figures)


class TestSmallChunks:
    ARGUMENTS = ("--set", "engine.chunk_tokens=64")

    def test_cold_caches(self, cluster: Cluster, figures: Figures) -> None:
        """Prompts of a whole chunk, one token more, and up to 12 chunks."""
        prompts = [prompt for prompt in twenty_prompts() if 64 <= len(prompt.token_ids) < LONG]
        assert len(prompts) >= 8
        answered = ask_all(cluster, prompts, "always")
        check_handoffs(answered)
        check("disaggregated, chunks of 64", answered, figures)

    def test_prompt_logprobs(self, cluster: Cluster, figures: Figures) -> None:
        check_scores(cluster, "disaggregated", "always", figures)
