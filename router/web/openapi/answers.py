"""Bodies of answers. Fields with a default may be missing."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Error(msgspec.Struct):
    """What went wrong: the field, its value, and what would be right."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """Every error's body, and the last event of a stream that failed."""

    error: Error


class PromptTokensDetails(msgspec.Struct):
    """Of `prompt_tokens`."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of the whole request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenLogprob(msgspec.Struct):
    """A token and its log-probability; -9999 for one that was made impossible."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """A token of the answer, and the likeliest at its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat choice."""

    content: list[ChosenLogprob]
    refusal: None


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of a text choice; an echoed prompt's first token has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _Choice(msgspec.Struct, kw_only=True):
    index: int
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None = None
    token_ids: list[int] = []


class AssistantMessage(msgspec.Struct):
    """What was generated."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Choice, kw_only=True):
    """One choice."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatDelta(msgspec.Struct):
    """What a chunk adds; the role comes with the first token."""

    content: str
    role: Literal["assistant"] | None = None


class ChatChunkChoice(_Choice, kw_only=True):
    """What a chunk adds to one choice."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None


class CompletionChoice(_Choice, kw_only=True):
    """One choice, or in a chunk what it adds to one."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] = []
    prompt_logprobs: list[dict[str, Any] | None] = []


class _Answer(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    dovetail: dict[str, Any] = {}


class ChatCompletion(_Answer, kw_only=True):
    """A whole chat answer."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] = []
    prompt_logprobs: list[dict[str, Any] | None] = []


class ChatCompletionChunk(_Answer, kw_only=True):
    """An event of a chat stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] = []


class Completion(_Answer, kw_only=True):
    """A whole text answer."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(_Answer, kw_only=True):
    """An event of a text stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Model(msgspec.Struct):
    """A served model; `max_model_len` counts tokens of prompt and answer together."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(msgspec.Struct):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


class Tokens(msgspec.Struct):
    """Token ids; their texts on wish."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] = []


class Text(msgspec.Struct):
    """The text of tokens."""

    prompt: str


class Health(msgspec.Struct):
    """Whether the process serves."""

    status: str


class Version(msgspec.Struct):
    """The installed version."""

    version: str


class Ordered(msgspec.Struct):
    """An order that a worker was told."""

    worker: str
    order: str


class Status(msgspec.Struct):
    """The cluster as this router sees it."""

    workers: list[dict[str, Any]]
    requests: dict[str, Any]
