"""Twenty varied prompts for the default model: 1 to 3,000 tokens, plain, code, unicode, chat."""

from __future__ import annotations

import functools
import random
from typing import NamedTuple

from tests.router_server import smollm2_text

Message = dict[str, str]


class Prompt(NamedTuple):
    """One prompt.

    Attributes:
        token_ids: what the model reads.
        messages: the chat that renders to it; None: the ids themselves are sent.
    """

    name: str
    token_ids: list[int]
    messages: list[Message] | None = None


def story(seed: int, num_tokens: int) -> list[int]:
    """Return plain text, as token ids: the same for the same seed, unlike that of other seeds."""
    dice = random.Random(seed)
    sentences: list[str] = []
    for day in range(1, 3 + num_tokens // 10):
        who, what, where = (dice.choice(words) for words in (_WHO, _WHAT, _WHERE))
        sentences.append(f"On day {day * dice.randint(1, 9)} {who} {what} {where}.")
    token_ids = smollm2_text().encode(" ".join(sentences))[:num_tokens]
    assert len(token_ids) == num_tokens
    return token_ids


@functools.cache
def twenty_prompts() -> tuple[Prompt, ...]:
    """Return all; lengths lie on, before and after the borders of blocks and of chunks."""
    lengths = (1, 2, 15, 16, 17, 33, 64, 65, 200, 513, 1200, 3000)
    plain = [Prompt(f"story of {n} tokens", story(n, n)) for n in lengths]
    texts = [Prompt(name, smollm2_text().encode(text)) for name, text in _TEXTS.items()]
    chats = [Prompt(name, _rendered(chat), chat) for name, chat in _chats().items()]
    prompts = (*plain, *texts, *chats)
    assert len(prompts) == 20
    return prompts


def _rendered(messages: list[Message]) -> list[int]:
    text = smollm2_text()
    return text.encode(text.render_chat(messages), add_special_tokens=False)


_WHO = (
    "the old captain", "a young physicist", "Maria", "the mayor of Lisbon", "our neighbour's cat",
    "Dr. Okafor", "the night shift", "an orchestra", "the last lighthouse keeper", "John",
)  # fmt: skip
_WHAT = (
    "measured the temperature of the water", "wrote a letter to the editor", "lost 42 coins",
    "found a map", "repaired the clock", "explained gravity", "baked bread", "sang quietly",
    "counted 1,024 stars", "painted the door green",
)  # fmt: skip
_WHERE = (
    "near the harbour", "in the library", "before breakfast", "under the bridge", "at 7:30",
    "behind the theatre", "without telling anyone", "on the roof", "for the third time",
    "because the train was late",
)  # fmt: skip

_TEXTS = {
    "languages": (
        "Le chat dort sur la fenêtre. Die Straße führt über den Fluß. Быстрая лиса прыгает. "
        "東京は日本の首都です。서울은 한국의 수도이다. القاهرة عاصمة مصر. "
        "नई दिल्ली भारत की राजधानी है।"
    ),
    "emoji and joiners": (
        "\U0001f469\u200d\U0001f469\u200d\U0001f467 went to the 🏖️ with 🇫🇷 and 🇯🇵: "
        "e\u0301 ≠ é, \ufb01 ≠ fi, \u200b∑∫√∞ \U0001d518\U0001d52b\U0001d526 🤖🤖🤖"
    ),
    "white space": "\n\n\t  a \r\n   b\u00a0c\n\n\n1234567890   12.5e-3\t\t|\n",
    "code": (
        "def fibonacci(n: int) -> int:\n"
        '    """Return the n-th Fibonacci number."""\n'
        "    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n\n"
        "class Stack:\n    def __init__(self) -> None:\n        self.items = []\n\n    def push("
    ),
}


def _chats() -> dict[str, list[Message]]:
    report = smollm2_text().decode(story(7, 700))
    return {
        "chat": [{"role": "user", "content": "What is the capital of France?"}],
        "chat with a system message": [
            {"role": "system", "content": "You are a pirate. Answer in one sentence."},
            {"role": "user", "content": "Who are you?"},
            {"role": "assistant", "content": "Arr, I be Captain Flint!"},
            {"role": "user", "content": "And where is your ship?"},
        ],
        "chat in unicode": [{"role": "user", "content": "Übersetze „Guten Morgen“: 早上好 → ? 🙂"}],
        "long chat": [
            {"role": "system", "content": "Summarize reports."},
            {"role": "user", "content": f"Summarize this report.\n\n{report}"},
        ],
    }
