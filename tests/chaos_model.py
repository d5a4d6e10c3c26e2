"""Chaos with the real model: its own undisturbed answers are the oracle, to the last bit of each
log-probability, for a token does not depend on who computes it, nor in which chunks or batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from core.sampling_params import SamplingParams
from tests.chaos_load import Outcome
from tests.chaos_requests import TEXT, Expected, Leaving, Request, Way, penalties
from tests.prompts import story
from tests.router_server import smollm2_text


def draw_for_model(seed: int, count: int) -> list[Request]:
    """Return a seed's requests: plain text to go on with, whose clients stay."""
    dice = random.Random(f"requests of {seed} to the model")
    return [_draw(dice) for _ in range(count)]


def with_known_answers(
    seed: int, requests: Sequence[Request], calm: Sequence[Outcome]
) -> list[Request]:
    """Return the requests with the answers of an undisturbed run, for another one: under another
    salt, so that no cache knows them, and with clients of whom some leave."""
    dice = random.Random(f"clients of {seed}")
    return [
        replace(
            request,
            body={**request.body, "cache_salt": "chaos"},
            known=_known(outcome),
            leaves=_leaving(dice) if dice.random() < 0.1 else None,
        )
        for request, outcome in zip(requests, calm, strict=True)
    ]


def _draw(dice: random.Random) -> Request:
    prompt = tuple(story(dice.randrange(1 << 30), dice.choice((15, 16, 64, 150, 300))))
    sampling = SamplingParams(
        n=dice.choice((1, 1, 1, 2)),
        seed=dice.randrange(1 << 32),
        temperature=dice.choice((0.0, 0.7, 1.0)),
        max_tokens=dice.choice((1, 8, 24, 40)),
        eos_token_ids=smollm2_text().eos_token_ids,
    )
    body: dict[str, Any] = {
        "prompt": prompt,
        "n": sampling.n,
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "return_token_ids": True,
        "stream": dice.random() < 0.65,
        "cache_salt": "calm",
    }
    if dice.random() < 0.3:
        body["logprobs"] = 2
    if dice.random() < 0.3:
        body |= penalties(dice)
    return Request(TEXT, body, dice.choice(("auto", "always", "always")), (prompt,), sampling)


def _leaving(dice: random.Random) -> Leaving:
    return Leaving(dice.choice(tuple(Way)), dice.uniform(0.5, 4.0), dice.randint(1, 20))


def _known(outcome: Outcome) -> tuple[Expected, ...]:
    """Return an undisturbed answer's choices; asserts that it has all of them."""
    answered = outcome.answered
    assert answered.status == 200, (outcome.name, answered)
    choices = [answered.told[index] for index in range(outcome.request.num_choices)]
    return tuple(
        Expected(
            prompt=outcome.request.prompts[0],
            token_ids=tuple(told.token_ids),
            text=told.text,
            finish_reason=told.finish_reasons[0],
            logprobs=tuple(told.logprobs),
        )
        for told in choices
    )
