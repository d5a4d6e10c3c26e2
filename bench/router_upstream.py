"""A mock upstream for the peer router, as fast as the mock workers that ours has: a raw ASGI app.

`python -m uvicorn bench.router_upstream:app`, in the peer's environment, which has nothing of this
project's. It answers /v1/completions as vLLM does with a NIXL connector: the prefill leg with the
parameters of the transfer, the decode leg with tokens.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from bench.router_pace import next_tick
from core.clock import SystemClock

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]

_JSON = [(b"content-type", b"application/json")]
_EVENTS = [(b"content-type", b"text/event-stream")]
_USAGE = {"prompt_tokens": 20, "completion_tokens": 1, "total_tokens": 21}
_CHOICE = {"index": 0, "text": " time", "logprobs": None, "finish_reason": "length"}
_HEAD = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "mock"}
_WHOLE = json.dumps({**_HEAD, "choices": [_CHOICE], "usage": _USAGE}).encode()
_PREFILLED = json.dumps(
    {
        **_HEAD,
        "choices": [_CHOICE],
        "usage": _USAGE,
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [1, 2],
            "remote_engine_id": "0",
            "remote_host": "127.0.0.1",
            "remote_port": 1,
        },
    }
).encode()
_EVENT = f"data: {json.dumps({**_HEAD, 'choices': [_CHOICE]})}\n\n".encode()
_DONE = b"data: [DONE]\n\n"

_clock = SystemClock()


async def app(scope: _Message, receive: _Receive, send: _Send) -> None:
    """Answer one request; whatever is no completion is a probe."""
    if scope["type"] != "http":
        return
    if scope["path"] != "/v1/completions":
        await _answer(send, b'{"object":"list","data":[{"id":"mock","object":"model"}]}')
        return
    fields = json.loads(await _body(receive))
    if (fields.get("kv_transfer_params") or {}).get("do_remote_decode"):
        await _answer(send, _PREFILLED)
    elif fields.get("stream"):
        await _stream(send, fields["max_tokens"], fields.get("priority", 0) * 1e-6)
    else:
        await _answer(send, _WHOLE)


async def _body(receive: _Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def _answer(send: _Send, body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [*_JSON, length]})
    await send({"type": "http.response.body", "body": body})


async def _stream(send: _Send, num_tokens: int, pace_s: float) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
    for number in range(num_tokens):
        if number:
            await next_tick(pace_s, _clock)
        await send({"type": "http.response.body", "body": _EVENT, "more_body": True})
    await send({"type": "http.response.body", "body": _DONE})
