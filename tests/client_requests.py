"""What clients send, and how they read the answer: recorded from the clients themselves.

Each was pointed at a recording server (November 2026): openai 3.57 under langchain-openai 1.7.4 and
litellm 1.110.2, guidellm 0.8.1, aiperf 0.13.0, lm-eval 0.4. `vllm bench serve` is written down from
its source (vllm/benchmarks/lib/endpoint_request_func.py). Only the model's name and the texts are
ours.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


class ClientRequest(NamedTuple):
    """One request.

    Attributes:
        client: who sends it.
        headers: those that are its own.
    """

    client: str
    path: str
    body: dict[str, Any]
    headers: tuple[tuple[str, str], ...] = ()


_USER = [{"role": "user", "content": "hi"}]
_GUIDELLM_USAGE = {"include_usage": True, "continuous_usage_stats": True}
_LANGCHAIN_TEXT = {
    "model": "smol",
    "frequency_penalty": 0,
    "logprobs": None,
    "max_tokens": 8,
    "n": 1,
    "presence_penalty": 0,
    "seed": None,
    "temperature": 0.7,
    "top_p": 1,
}

REQUESTS = (
    ClientRequest(
        "langchain ChatOpenAI.invoke",
        CHAT,
        {
            "model": "smol",
            "stream": False,
            "messages": [
                {"content": "s", "role": "system"},
                {"content": "hi", "role": "user"},
                {"content": "hello", "role": "assistant"},
                {"content": "x", "role": "user"},
            ],
            "max_completion_tokens": 8,
            "n": 1,
            "seed": 1,
            "stop": ["\n"],
            "temperature": 0.2,
        },
    ),
    ClientRequest(
        "langchain ChatOpenAI.stream, usage and logprobs",
        CHAT,
        {
            "model": "smol",
            "stream": True,
            "messages": _USER,
            "frequency_penalty": 0.1,
            "logprobs": True,
            "max_completion_tokens": 8,
            "presence_penalty": 0.1,
            "stream_options": {"include_usage": True},
            "top_logprobs": 2,
            "top_p": 0.9,
        },
    ),
    ClientRequest("langchain OpenAI.generate", TEXT, {**_LANGCHAIN_TEXT, "prompt": ["a", "b"]}),
    ClientRequest(
        "langchain OpenAI.stream", TEXT, {**_LANGCHAIN_TEXT, "prompt": "hi", "stream": True}
    ),
    ClientRequest(
        "litellm openai/, drop_params, extra_body",
        CHAT,
        {"model": "smol", "messages": _USER, "max_tokens": 8, "top_k": 5},
    ),
    ClientRequest(
        "litellm openai/, stream",
        CHAT,
        {
            "model": "smol",
            "messages": _USER,
            "temperature": 0,
            "max_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    ClientRequest(
        "litellm text-completion-openai/",
        TEXT,
        {"model": "smol", "prompt": "hi", "max_tokens": 4},
    ),
    ClientRequest(
        "guidellm chat_completions",
        CHAT,
        {
            "model": "smol",
            "stream": True,
            "stream_options": _GUIDELLM_USAGE,
            "max_completion_tokens": 8,
            "ignore_eos": True,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "1 0 m0 Finish"}]}],
        },
    ),
    ClientRequest(
        "guidellm text_completions",
        TEXT,
        {
            "model": "smol",
            "stream": True,
            "stream_options": _GUIDELLM_USAGE,
            "max_tokens": 8,
            "ignore_eos": True,
            "prompt": "1 0 m0 Finish medical want",
        },
    ),
    ClientRequest(
        "aiperf chat, streaming",
        CHAT,
        {
            "messages": _USER,
            "model": "smol",
            "stream": True,
            "max_completion_tokens": 8,
            "ignore_eos": True,
            "min_tokens": 8,
            "stream_options": {"include_usage": True},
        },
        (
            ("X-Request-ID", "67626e91-c734-4cd3-bf7a-ed791a1f95df"),
            ("X-Correlation-ID", "9c1fdb4f-3679-4fd1-8c11-9a5294d50333"),
            ("X-Session-Affinity", "9c1fdb4f-3679-4fd1-8c11-9a5294d50333"),
            ("Accept", "text/event-stream"),
        ),
    ),
    ClientRequest(
        "aiperf completions",
        TEXT,
        {"prompt": "hi", "model": "smol", "stream": False, "max_tokens": 8},
    ),
    ClientRequest(
        "vllm bench serve, openai",
        TEXT,
        {
            "model": "smol",
            "prompt": "hi",
            "repetition_penalty": 1.0,
            "max_tokens": 8,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 0,
        },
        (("x-request-id", "bench-0"),),
    ),
    ClientRequest(
        "vllm bench serve, openai-chat",
        CHAT,
        {
            "model": "smol",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "max_completion_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 0,
        },
    ),
    ClientRequest(
        "lm-eval loglikelihood",
        TEXT,
        {
            "model": "smol",
            "prompt": [[504, 3575, 282, 7158, 314, 7268], [504, 3575, 282, 7476, 314, 28030, 30]],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        },
    ),
    ClientRequest(
        "lm-eval generate_until",
        TEXT,
        {
            "prompt": [[6004]],
            "model": "smol",
            "max_tokens": 8,
            "temperature": 0,
            "stop": ["\n", "<|im_end|>"],
            "seed": 1234,
        },
    ),
    ClientRequest(
        "lm-eval local-chat-completions",
        CHAT,
        {
            "messages": _USER,
            "model": "smol",
            "max_tokens": 8,
            "temperature": 0,
            "stop": ["\n"],
            "seed": 1234,
        },
    ),
)


class Read(NamedTuple):
    """What a benchmark makes of a stream: its text, its output tokens, its chunks with a choice."""

    text: str
    output_tokens: int
    num_chunks: int


def read_as_vllm_bench(body: str, *, is_chat: bool) -> Read:
    """Read a stream as `vllm bench serve` does: usage counts only where there are no choices."""
    text, output_tokens, num_chunks = "", -1, 0
    for data in payloads(body):
        if choices := data.get("choices"):
            piece = choices[0]["delta"].get("content") if is_chat else choices[0].get("text")
            text += piece or ""
            num_chunks += 1
        elif usage := data.get("usage"):
            output_tokens = usage.get("completion_tokens")
    return Read(text, output_tokens, num_chunks)


def read_as_guidellm(body: str, *, is_chat: bool) -> Read:
    """Read a stream as guidellm does: the last usage of any chunk counts."""
    text, usage, num_chunks = "", {}, 0
    for data in payloads(body):
        choice: dict[str, Any] = (data.get("choices", []) or [{}])[0]
        if piece := choice.get("delta", {}).get("content") if is_chat else choice.get("text"):
            text += piece
            num_chunks += 1
        usage = data.get("usage", {}) or usage
    return Read(text, usage.get("completion_tokens") or 0, num_chunks)


def read_as_aiperf(body: str, *, is_chat: bool) -> Read:
    """Read a stream as aiperf does: by each chunk's `object`."""
    wanted = "chat.completion.chunk" if is_chat else "text_completion"
    text, output_tokens, num_chunks = "", 0, 0
    for data in payloads(body):
        assert data["object"] == wanted
        for choice in data.get("choices") or []:
            piece = choice.get("delta", {}).get("content") if is_chat else choice.get("text")
            text += piece or ""
            num_chunks += bool(piece)
        output_tokens = (data.get("usage") or {}).get("completion_tokens", output_tokens)
    return Read(text, output_tokens, num_chunks)


def read_as_lm_eval(answer: dict[str, Any], context_lengths: list[int]) -> list[tuple[float, bool]]:
    """Read an echo as lm-eval's loglikelihood does; the generated token stands last."""
    read: list[tuple[float, bool]] = []
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    for choice, length in zip(choices, context_lengths, strict=True):
        values = choice["logprobs"]["token_logprobs"][length:-1]
        top = choice["logprobs"]["top_logprobs"][length:-1]
        is_greedy = all(v == max(one.values()) for v, one in zip(values, top, strict=True))
        read.append((sum(values), is_greedy))
    return read


def payloads(body: str) -> list[dict[str, Any]]:
    """Return a whole stream's objects; asserts that it ends as every client wants."""
    lines = [line for line in body.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
