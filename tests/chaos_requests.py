"""What the clients of a chaos run ask for, and what they must be answered: functions of the dice.

The oracle knows nothing of what the cluster does: the mock's arithmetic over the prompt's tokens,
and the tokenizer over whole answers.
"""

from __future__ import annotations

import enum
import functools
import random
from dataclasses import dataclass
from typing import Any

from core.sampling_params import SamplingParams
from engine.executor.mock_tokens import expected_tokens, marks_of, prompt_logprobs_of
from tests.router_server import smollm2_text

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"

GENERATED_LOGPROB = -0.5
"""The mock's, of every token that it draws."""

_LONGEST = 1600
"""Tokens of a long prompt."""


class Way(enum.StrEnum):
    """How a client goes away: by a reset, as one that was killed; by FIN, as one that closed."""

    RESET = "reset"
    CLOSE = "close"


@dataclass(frozen=True)
class Leaving:
    """When a client goes away: whichever comes first.

    Attributes:
        after_s: seconds from when its request was sent.
        after_events: events of its stream that it has read; 0: none, and only half of its request
            has been sent.
    """

    way: Way
    after_s: float
    after_events: int


@dataclass(frozen=True)
class Expected:
    """One choice of a right answer.

    Attributes:
        logprobs: of the echoed prompt's tokens, the first's being None, and of the tokens; empty
            where they are not asked for.
    """

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        prompts: token ids of each; chat has one.
        sampling: what the oracle needs of it.
        stop: a stop string that comes in some choice, by which the router aborts that one; or "".
        leaves: None: its client stays.
        closes_half: its client stops sending, and goes on reading.
        known: the right choices, where another oracle than the mock's has said them.
    """

    path: str
    body: dict[str, Any]
    disaggregate: str
    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    echo: bool = False
    stop: str = ""
    leaves: Leaving | None = None
    closes_half: bool = False
    known: tuple[Expected, ...] = ()

    @property
    def is_stream(self) -> bool:
        """Whether it is answered event by event."""
        return self.body["stream"]

    @property
    def num_choices(self) -> int:
        """Choices of a whole answer."""
        return len(self.prompts) * self.sampling.n

    @functools.cached_property
    def expected(self) -> tuple[Expected, ...]:
        """The right choices, by their index."""
        samples = range(self.sampling.n)
        return self.known or tuple(
            self._expect(prompt, at) for prompt in self.prompts for at in samples
        )

    def _expect(self, prompt: tuple[int, ...], sample_index: int) -> Expected:
        token_ids = _tokens(prompt, self.sampling, sample_index)
        cut = _cut_at(self.stop, token_ids)
        token_ids = token_ids[:cut]
        text = _decoded(token_ids)
        is_cut = self.stop != "" and self.stop in text
        scores = _scores(prompt) if self.echo else ()
        is_scored = self.body.get("logprobs") is not None
        echoed = smollm2_text().decode(prompt, skip_special_tokens=False) if self.echo else ""
        return Expected(
            prompt=prompt,
            token_ids=token_ids,
            text=echoed + (text[: text.index(self.stop)] if is_cut else text),
            finish_reason="stop" if is_cut else "length",
            logprobs=(*scores, *[GENERATED_LOGPROB] * len(token_ids)) if is_scored else (),
        )


class Drawing:
    """Draws the requests of one seed; many prompts begin alike, on and off block borders."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(f"requests of {seed}")
        self._shared = [self._ids(400) for _ in range(4)]

    def draw(self) -> Request:
        """Return the next request."""
        dice = self._dice
        is_chat = dice.random() < 0.25
        prompts, asked = self._chat() if is_chat else self._completion()
        sampling = SamplingParams(
            n=dice.choice((1, 1, 1, 1, 2, 3)) if len(prompts) == 1 else 1,
            seed=dice.randrange(1 << 32),
            temperature=dice.choice((0.0, 0.7, 1.0)),
            max_tokens=dice.choice((1, 2, 80, *(dice.randint(1, 80) for _ in range(5)))),
            eos_token_ids=smollm2_text().eos_token_ids,
        )
        echo = not is_chat and dice.random() < 0.1
        asked |= _fields(sampling) | self._extras(is_chat=is_chat, echo=echo)
        stop = self._stop(prompts[0], sampling) if dice.random() < 0.12 else ""
        if stop:
            asked["stop"] = stop
        leaves = self._leaving() if dice.random() < 0.2 else None
        return Request(
            path=CHAT if is_chat else TEXT,
            body=asked,
            disaggregate=dice.choice(("auto", "auto", "auto", "always", "never")),
            prompts=prompts,
            sampling=sampling,
            echo=echo,
            stop=stop,
            leaves=leaves,
            closes_half=leaves is None and dice.random() < 0.05,
        )

    def _chat(self) -> tuple[tuple[tuple[int, ...], ...], dict[str, Any]]:
        words = " ".join(f"w{self._dice.randrange(99)}" for _ in range(self._dice.randrange(60)))
        messages = [{"role": "user", "content": f"Say in other words: {words}"}]
        text = smollm2_text()
        ids = text.encode(text.render_chat(messages), add_special_tokens=False)
        return (tuple(ids),), {"messages": messages}

    def _completion(self) -> tuple[tuple[tuple[int, ...], ...], dict[str, Any]]:
        count = 2 if self._dice.random() < 0.06 else 1
        prompts = tuple(self._prompt() for _ in range(count))
        return prompts, {"prompt": prompts if count > 1 else prompts[0]}

    def _prompt(self) -> tuple[int, ...]:
        dice = self._dice
        head = dice.choice(self._shared)[: dice.choice((0, 0, 47, 48, 160, 333))]
        longest = _LONGEST if dice.random() < 0.1 else 400
        length = dice.choice((1, 15, 16, 17, *(dice.randint(1, longest) for _ in range(6))))
        return head + self._ids(length)

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._dice.choices(range(smollm2_text().vocab_size), k=count))

    def _extras(self, *, is_chat: bool, echo: bool) -> dict[str, Any]:
        dice = self._dice
        extras: dict[str, Any] = {"stream": dice.random() < 0.65}
        if extras["stream"] and dice.random() < 0.5:
            extras["stream_options"] = {"include_usage": True}
        if echo:
            extras |= {"echo": True, "logprobs": dice.randrange(3)}
        elif dice.random() < 0.15:
            extras |= {"logprobs": True, "top_logprobs": 1} if is_chat else {"logprobs": 1}
        if dice.random() < 0.1:
            extras["cache_salt"] = f"tenant {dice.randrange(3)}"
        if dice.random() < 0.3:
            extras["priority"] = dice.randint(-1, 1)
        if dice.random() < 0.2:
            extras |= penalties(dice)
        return extras

    def _stop(self, prompt: tuple[int, ...], sampling: SamplingParams) -> str:
        """Return the text of a token of the first sample; "" where it is no plain text."""
        token_id = self._dice.choice(_tokens(prompt, sampling, 0))
        text = _decoded((token_id,))
        return text if text.isascii() else ""

    def _leaving(self) -> Leaving:
        dice = self._dice
        return Leaving(
            way=dice.choice(tuple(Way)),
            after_s=dice.uniform(0.0, 3.0),
            after_events=dice.choice((0, *(dice.randint(1, 40) for _ in range(5)))),
        )


def penalties(dice: random.Random) -> dict[str, float]:
    """Return one or two penalties."""
    names = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    return {name: dice.choice((0.5, 1.2)) for name in dice.sample(names, dice.randint(1, 2))}


def _fields(sampling: SamplingParams) -> dict[str, Any]:
    return {
        "n": sampling.n,
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "return_token_ids": True,
    }


def _tokens(
    prompt: tuple[int, ...], sampling: SamplingParams, sample_index: int
) -> tuple[int, ...]:
    vocab_size = smollm2_text().vocab_size
    return expected_tokens(prompt, sampling, vocab_size=vocab_size, sample_index=sample_index)


def _cut_at(stop: str, token_ids: tuple[int, ...]) -> int:
    """Return the number of tokens up to the one that completes the stop string; else all."""
    counts = range(1, len(token_ids) + 1) if stop else ()
    return next((k for k in counts if stop in _decoded(token_ids[:k])), len(token_ids))


def _decoded(token_ids: tuple[int, ...]) -> str:
    return smollm2_text().decode(token_ids)


def _scores(prompt: tuple[int, ...]) -> tuple[float | None, ...]:
    if len(prompt) == 1:
        return (None,)
    marks = marks_of(prompt[:-1], 0)
    scored = prompt_logprobs_of(marks, prompt, 1, 0, smollm2_text().vocab_size)
    return (None, *scored.chosen)
