"""50 mixed requests at once, some of whose clients leave: every answer right, every block back.

The mock executor computes each token from the pool's bytes, so a token that is not the oracle's was
computed from a block that was late, lost, shared wrongly or freed too early.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from core.sampling_params import SamplingParams
from engine.executor.mock_tokens import expected_tokens
from engine.models.read_spec import read_spec
from tests.cluster import Cluster, Up
from tests.router_server import smollm2_path, smollm2_text
from tests.scrape import total_over

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]

NUM_REQUESTS = 50
VOCAB_SIZE = read_spec(smollm2_path()).vocab_size
SLOW = ("--set", "engine.mock_prompt_token_s=0.0002", "--set", "engine.chunk_tokens=64")
"""Prompts take up to ten steps and 0.1 s, so that clients leave in the middle of handoffs."""
SMALL = ("--set", "engine.kv_memory=98304")
"""96 blocks of 1 KiB a worker: some requests wait, some are preempted, caches are evicted."""

CLUSTERS = {
    "2p2d": ("--prefill", "2", "--decode", "2", *SLOW),
    "small-pools": (*SLOW, *SMALL),
    "colocated": ("--colocated", "1", *SLOW, *SMALL),
}


@dataclass(frozen=True)
class Asked:
    """One client's request.

    Attributes:
        prompt: token ids; None for chat, whose ids the answer tells.
        leaves_after_s: seconds after which the client closes its connection; None: it stays.
    """

    prompt: list[int] | None
    n: int
    seed: int
    temperature: float
    max_tokens: int
    stream: bool
    leaves_after_s: float | None
    disaggregate: str

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.prompt is None else "/v1/completions"

    @property
    def body(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "n": self.n,
            "seed": self.seed,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "stream": self.stream,
            "return_token_ids": True,
        }
        if self.prompt is None:
            words = " ".join(str(self.seed + at) for at in range(self.seed % 60))
            fields["messages"] = [{"role": "user", "content": f"Add these: {words}"}]
        else:
            fields["prompt"] = self.prompt
        return fields


@dataclass
class Answered:
    """What came back, up to its end.

    Attributes:
        token_ids: by choice.
    """

    prompt: list[int] = field(default_factory=list[int])
    token_ids: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    finish_reasons: dict[int, str] = field(default_factory=dict[int, str])
    is_whole: bool = False

    def take(self, answer: Mapping[str, Any]) -> None:
        """Take a chunk, or a whole answer."""
        assert "error" not in answer, answer
        self.prompt = answer.get("prompt_token_ids") or self.prompt
        for choice in answer["choices"]:
            self.prompt = choice.get("prompt_token_ids") or self.prompt
            self.token_ids.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
            if choice["finish_reason"] is not None:
                self.finish_reasons[choice["index"]] = choice["finish_reason"]


def draw(dice: random.Random) -> Asked:
    """Return a request; a third of the prompts begin like others, on and off block borders."""
    prompt: list[int] | None = None
    if dice.random() < 0.8:
        shared = random.Random(dice.randrange(3)).choices(range(1000), k=200)
        head = shared[: dice.choice((0, 0, 48, 100, 160))]
        length = dice.choice((1, 2, 15, 16, 17, dice.randint(1, 100), dice.randint(1, 600)))
        prompt = (head + dice.choices(range(VOCAB_SIZE), k=600))[:length]
    return Asked(
        prompt=prompt,
        n=dice.choice((1, 1, 1, 2, 3)),
        seed=dice.randrange(1 << 32),
        temperature=dice.choice((0.0, 0.7, 1.0)),
        max_tokens=dice.choice((1, 2, dice.randint(1, 60))),
        stream=dice.random() < 0.6,
        leaves_after_s=dice.uniform(0, 0.5) if dice.random() < 0.3 else None,
        disaggregate=dice.choice(("auto", "auto", "always", "never")),
    )


async def ask(client: httpx.AsyncClient, asked: Asked, disaggregate: str) -> Answered:
    """Send a request and read its answer, until it ends or the client leaves."""
    answered = Answered()
    sent = asyncio.create_task(send(client, asked, disaggregate, answered))
    await asyncio.wait({sent}, timeout=asked.leaves_after_s)
    if sent.done():
        sent.result()
    else:
        sent.cancel()
        await asyncio.gather(sent, return_exceptions=True)
    return answered


async def send(
    client: httpx.AsyncClient, asked: Asked, disaggregate: str, answered: Answered
) -> None:
    """Put into `answered` what comes."""
    headers = {"x-dovetail-disaggregate": disaggregate}
    async with client.stream("POST", asked.path, json=asked.body, headers=headers) as answer:
        if not asked.stream or answer.status_code != 200:
            body = await answer.aread()
            assert answer.status_code == 200, body.decode()
            answered.take(json.loads(body))
            answered.is_whole = True
            return
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                answered.is_whole = True
            elif line.startswith("data: "):
                answered.take(json.loads(line.removeprefix("data: ")))


def check(asked: Asked, answered: Answered) -> None:
    """Assert that every token is the oracle's: all of a whole answer, else those that came."""
    if asked.prompt is not None and answered.is_whole:
        assert answered.prompt == asked.prompt
    sampling = SamplingParams(
        n=asked.n,
        seed=asked.seed,
        temperature=asked.temperature,
        max_tokens=asked.max_tokens,
        eos_token_ids=smollm2_text().eos_token_ids,
    )
    if answered.is_whole:
        assert answered.token_ids.keys() == set(range(asked.n))
        assert answered.finish_reasons == dict.fromkeys(range(asked.n), "length")
    for index, token_ids in answered.token_ids.items():
        expected = expected_tokens(
            answered.prompt, sampling, vocab_size=VOCAB_SIZE, sample_index=index
        )
        whole = list(expected) if answered.is_whole else list(expected)[: len(token_ids)]
        assert token_ids == whole, asked


async def ask_all(cluster: Cluster, requests: list[Asked], *, is_colocated: bool) -> list[Answered]:
    """Send all at once."""
    limits = httpx.Limits(max_connections=len(requests))
    async with httpx.AsyncClient(
        base_url=cluster.url, trust_env=False, timeout=120, limits=limits
    ) as client:
        return await asyncio.gather(
            *(ask(client, one, "auto" if is_colocated else one.disaggregate) for one in requests)
        )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", CLUSTERS)
async def test_every_answer_is_right_and_every_block_is_back(up: Up, shape: str, seed: int) -> None:
    cluster = up("--executor", "mock", *CLUSTERS[shape])
    dice = random.Random(seed)
    requests = [draw(dice) for _ in range(NUM_REQUESTS)]
    before = total_over([cluster.router()], "vllm:request_success_total")
    answers = await ask_all(cluster, requests, is_colocated=shape == "colocated")
    cluster.wait_until_idle()
    for asked, answered in zip(requests, answers, strict=True):
        check(asked, answered)
    stayed = [one for one in requests if one.leaves_after_s is None]
    assert len(stayed) >= NUM_REQUESTS // 2
    assert sum(answered.is_whole for answered in answers) >= len(stayed)
    router = cluster.router()
    assert router.total("vllm:request_success_total") - before <= NUM_REQUESTS
    assert router.total("vllm:request_success_total", finished_reason="error") == 0
    assert router.total("dovetail:requests") == router.total("dovetail:http_requests") == 0
