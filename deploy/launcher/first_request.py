"""The launcher's own chat request: proof that the whole path works, and a look at it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from core.clock import Clock
from core.errors import DovetailError
from deploy.api_client import ApiClient, ApiRefusal, Unreachable

QUESTION = "What is the capital of France? Answer in one short sentence."
_MAX_TOKENS = 32
_POLL_S = 0.05


class FirstAnswer(msgspec.Struct, frozen=True):
    """What came back.

    Attributes:
        path: the trace object; None where the router's debug headers are off.
        ttft_s: seconds from sending to the first text, as the client sees it.
    """

    text: str
    path: dict[str, Any] | None
    ttft_s: float


class _Health(msgspec.Struct):
    """Any JSON object."""


def ask(client: ApiClient, model: str, *, through_fabric: bool, clock: Clock) -> FirstAnswer:
    """Send `QUESTION` and return the answer; blocking.

    Args:
        through_fabric: ask for a prefill worker, however short the prompt is.

    Raises:
        DovetailError: no answer.
    """
    headers = {"x-dovetail-trace": "1"}
    if through_fabric:
        headers["x-dovetail-disaggregate"] = "always"
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
    }
    sent, first = clock.now(), None
    texts: list[str] = []
    path: dict[str, Any] | None = None
    for chunk in client.chat(body, headers):
        if first is None and chunk.choices:
            first = clock.now()
        texts.append(chunk.text)
        path = chunk.dovetail or path
    if first is None:
        msg = "the first request came back without a token"
        raise DovetailError(msg)
    return FirstAnswer(text="".join(texts).strip(), path=path, ttft_s=first - sent)


async def wait_until_ready(client: ApiClient, *, timeout_s: float, clock: Clock) -> None:
    """Return when the router says that it could serve.

    Raises:
        DovetailError: it still could not after `timeout_s`.
    """
    deadline = clock.now() + timeout_s
    while True:
        try:
            await asyncio.to_thread(client.get, "/health/ready", _Health)
        except (ApiRefusal, Unreachable):
            if clock.now() > deadline:
                msg = f"the router found no worker that could serve within {timeout_s:g} s"
                raise DovetailError(msg) from None
            await asyncio.sleep(_POLL_S)
        else:
            return


def describe(answer: FirstAnswer) -> list[str]:
    """Return what a person reads: question, answer, path."""
    lines = [f"asked       {QUESTION}", f"answered    {' '.join(answer.text.split())}"]
    return [*lines, f"path        {_path(answer)}"]


def _path(answer: FirstAnswer) -> str:
    ttft = f"first token after {1000 * answer.ttft_s:.0f} ms"
    path = answer.path
    if path is None:
        return f"not shown (router.debug_headers is off); {ttft}"
    decode = path.get("decode_worker")
    if path.get("prefill_worker") is None:
        return f"{decode} alone ({path.get('decision', 'reason unknown')}); {ttft}"
    blocks = path.get("blocks_transferred", 0)
    moved = f"{blocks} KV block{'' if blocks == 1 else 's'}"
    num_bytes = path.get("bytes_transferred")
    if num_bytes:
        moved += f" ({num_bytes / 1e6:.2f} MB)"
    return f"{path['prefill_worker']} -> {moved} -> {decode}; {ttft}"
