"""Two hundred clients leave at random points of their prompt's transfer, over real writes between
real processes; the next requests take the pool at once, and every answer is right."""

from __future__ import annotations

import asyncio
import random
from statistics import median
from urllib.parse import urlsplit

import pytest

from core.clock import SystemClock
from core.sampling_params import SamplingParams
from tests.asked import prompt_of
from tests.chaos_client import Answered, ask
from tests.chaos_judge import judge
from tests.chaos_requests import TEXT, Leaving, Request, Way
from tests.cluster import IDLE_WITHIN_S, PATIENT, Up
from tests.faults import deaths, scrape, wait_idle
from tests.router_server import smollm2_text

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_NUM_ABORTS = 200
_LENGTH = 320
_NEXT_LENGTH = 64


def _request(
    length: int, salt: int, disaggregate: str, max_tokens: int, leaves_s: float | None = None
) -> Request:
    prompt = tuple(prompt_of(length, salt))
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, eos_token_ids=smollm2_text().eos_token_ids
    )
    asked = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body = asked | {"return_token_ids": True, "stream": True}
    leaves = None if leaves_s is None else Leaving(Way.RESET, leaves_s, after_events=99)
    return Request(TEXT, body, disaggregate, (prompt,), sampling, leaves=leaves)


async def _right(port: int, request: Request) -> Answered:
    answered = await ask(port, request)
    assert judge(request, answered) == []
    return answered


async def _usual_s(port: int) -> float:
    """Return how long a request takes that nobody aborts."""
    clock, taken = SystemClock(), list[float]()
    for salt in range(9000, 9007):
        started = clock.now()
        await _right(port, _request(_LENGTH, salt, "always", 4))
        taken.append(clock.now() - started)
    return median(taken)


async def _leave_and_go_on(port: int) -> None:
    dice = random.Random(5)
    usual_s = await _usual_s(port)
    for number in range(_NUM_ABORTS):
        leaves_s = dice.uniform(0.2, 0.9) * usual_s
        await _right(port, _request(_LENGTH, 10 * number, "always", 4, leaves_s))
        # They need nearly all blocks, and read them while the writer of the one that left goes on.
        following = [_request(_NEXT_LENGTH, 10 * number + i, "never", 40) for i in (1, 2, 3)]
        await asyncio.gather(*(_right(port, request) for request in following))


def test_every_answer_after_an_abort_is_right(up: Up) -> None:
    cluster = up(
        "--executor", "mock", *PATIENT,
        "--set", f"engine.kv_memory={25 * 1024}",  # 25 blocks, of which 20 and 24 are wanted
        "--set", "engine.chunk_tokens=64",
        "--set", "engine.mock_prompt_token_s=0.0001",
        "--set", "engine.mock_step_s=0.001",
    )  # fmt: skip
    port = urlsplit(cluster.url).port
    assert port
    asyncio.run(_leave_and_go_on(port))
    outcomes = scrape(cluster, "decode-0").by_label("dovetail:handoffs_total", "outcome")
    assert outcomes["aborted"] > _NUM_ABORTS / 4, outcomes
    wait_idle(cluster, "prefill-0", "decode-0", timeout_s=IDLE_WITHIN_S)
    assert deaths(cluster) == []
