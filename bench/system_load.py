"""Clients that each ask for one streamed completion after another, over raw HTTP/1.1, and how fast
the tokens came."""

from __future__ import annotations

import asyncio
import random
import statistics

import msgspec

from core.clock import SystemClock

CLIENTS = 16
REQUESTS_A_CLIENT = 2
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 128
_VOCABULARY = (1000, 40_000)
_clock = SystemClock()


class Measured(msgspec.Struct):
    """What came of one load.

    Attributes:
        tokens_per_s: outputs of all clients.
        ttft_s: median.
    """

    tokens_per_s: float
    ttft_s: float


async def load(port: int, model: str, seed: int) -> Measured:
    """Run all clients to their end.

    Args:
        port: of an OpenAI-compatible server here.
        model: as it names it.
        seed: other prompts for another one.

    Raises:
        RuntimeError: an answer was not 200, or shorter than asked for.
    """
    dice = random.Random(seed)  # noqa: S311 - prompts, not secrets
    prompts = [
        [
            [dice.randrange(*_VOCABULARY) for _ in range(PROMPT_TOKENS)]
            for _ in range(REQUESTS_A_CLIENT)
        ]
        for _ in range(CLIENTS)
    ]
    started = _clock.now()
    ttfts = await asyncio.gather(*(_client(port, model, own) for own in prompts))
    seconds = _clock.now() - started
    num_tokens = CLIENTS * REQUESTS_A_CLIENT * OUTPUT_TOKENS
    return Measured(num_tokens / seconds, statistics.median(one for each in ttfts for one in each))


async def _client(port: int, model: str, prompts: list[list[int]]) -> list[float]:
    return [await _request(port, model, prompt) for prompt in prompts]


async def _request(port: int, model: str, prompt: list[int]) -> float:
    """Return the time to the first token. A connection each: the same for every server."""
    body = msgspec.json.encode(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    started = _clock.now()
    writer.write(head.encode() + body)
    first, usage, lines = 0.0, 0, b""
    while line := await reader.readline():
        lines = (lines + line)[-2000:]
        if not line.startswith(b"data: {"):
            continue
        first = first or _clock.now() - started
        chunk = msgspec.json.decode(line[6:])
        usage = (chunk.get("usage") or {}).get("completion_tokens", usage)
    writer.close()
    if usage != OUTPUT_TOKENS:
        msg = f"port {port}: {usage} tokens instead of {OUTPUT_TOKENS}: {lines.decode()}"
        raise RuntimeError(msg)
    return first
