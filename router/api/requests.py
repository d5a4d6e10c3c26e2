"""The bodies of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from core.errors import RequestError
from router.api.fields import FieldReader, check_token_ids, is_token_ids, refuse
from router.api.generation_params import (
    MAX_ALTERNATIVES,
    GenerationParams,
    Vocabulary,
    read_params,
)
from router.api.messages import read_messages

MAX_PROMPTS = 256

Prompt = str | tuple[int, ...]
"""One prompt: text, or token ids."""

_P = TypeVar("_P", str, tuple[int, ...])

_CHAT_WITHOUT_EFFECT = {"parallel_tool_calls", "include_reasoning"}

_COMPLETION_UNSUPPORTED: Mapping[str, Sequence[object]] = {"suffix": ()}

_CHAT_UNSUPPORTED: Mapping[str, Sequence[object]] = {
    "tools": (),
    "tool_choice": ("none", "auto"),  # without tools both mean none
    "functions": (),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "documents": (),
    "chat_template": (),
    "echo": (False,),
    "mm_processor_kwargs": (),
}


class ChatRequest(msgspec.Struct, frozen=True):
    """A validated chat request.

    Attributes:
        messages: for the template; each with `role` and a string `content`.
        continue_final_message: the prompt ends within the last message.
        template_variables: `chat_template_kwargs`.
        add_special_tokens: add BOS even though templates write their own (vLLM's extension).
    """

    params: GenerationParams
    messages: tuple[dict[str, Any], ...]
    add_generation_prompt: bool
    continue_final_message: bool
    template_variables: dict[str, Any]
    add_special_tokens: bool


class CompletionRequest(msgspec.Struct, frozen=True):
    """A validated text completion request, with at least one prompt, none of them empty."""

    params: GenerationParams
    prompts: tuple[Prompt, ...]
    add_special_tokens: bool


_RequestT = TypeVar("_RequestT", ChatRequest, CompletionRequest)


def read_chat(body: Mapping[str, Any], vocabulary: Vocabulary) -> ChatRequest:
    """Validate the body of a chat request.

    Raises:
        RequestError: 400; names the field, its value and what would be right.
    """
    reader = FieldReader(body)
    messages = read_messages(_required(reader, "messages"))
    params = read_params(reader, vocabulary, logprobs=_chat_logprobs(reader))
    reader.accept(_CHAT_WITHOUT_EFFECT)
    reader.refuse_effect(_CHAT_UNSUPPORTED)
    add_generation_prompt = reader.boolean("add_generation_prompt", default=True)
    continue_final = reader.boolean("continue_final_message", default=False)
    if continue_final and add_generation_prompt:
        refuse("continue_final_message", True, "false unless add_generation_prompt is false")
    request = ChatRequest(
        params=params,
        messages=messages.messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final,
        template_variables=reader.mapping("chat_template_kwargs"),
        add_special_tokens=reader.boolean("add_special_tokens", default=False),
    )
    return _with_ignored(request, (*reader.unknown(), *messages.ignored))


def read_completion(body: Mapping[str, Any], vocabulary: Vocabulary) -> CompletionRequest:
    """Validate the body of a text completion request.

    Raises:
        RequestError: 400; names the field, its value and what would be right.
    """
    reader = FieldReader(body)
    prompts = read_prompts(_required(reader, "prompt"), vocabulary.size)
    params = read_params(
        reader,
        vocabulary,
        logprobs=reader.integer("logprobs", 0, MAX_ALTERNATIVES),
        echo=reader.boolean("echo", default=False),
    )
    reader.refuse_effect(_COMPLETION_UNSUPPORTED)
    request = CompletionRequest(
        params=params,
        prompts=prompts,
        add_special_tokens=reader.boolean("add_special_tokens", default=True),
    )
    return _with_ignored(request, reader.unknown())


def read_prompts(value: object, vocab_size: int) -> tuple[Prompt, ...]:
    """Return a completion's prompts: a string, strings, token ids, or lists of token ids.

    Raises:
        RequestError: 400; another shape, an empty prompt, or ids outside the vocabulary.
    """
    right = "a string, a list of strings, a list of token ids, or a list of such lists"
    if isinstance(value, str):
        return (_not_empty(value),)
    items = cast("list[object]", value)
    if not isinstance(value, list):
        refuse("prompt", items, right)
    if is_token_ids(items):
        return (_token_prompt(items, vocab_size),)
    if len(items) > MAX_PROMPTS:
        refuse("prompt", len(items), f"at most {MAX_PROMPTS} prompts")
    if all(isinstance(item, str) for item in items):
        return tuple(_not_empty(item) for item in cast("list[str]", items))
    if all(is_token_ids(item) for item in items):
        return tuple(_token_prompt(item, vocab_size) for item in items)
    return refuse("prompt", items, right)


def _token_prompt(item: object, vocab_size: int) -> tuple[int, ...]:
    token_ids = tuple(cast("list[int]", item))
    check_token_ids("prompt", token_ids, vocab_size)
    return _not_empty(token_ids)


def _not_empty(prompt: _P) -> _P:
    if not prompt:
        msg = "prompt: must not be empty"
        raise RequestError(msg, param="prompt", code="empty_prompt")
    return prompt


def _required(reader: FieldReader, name: str) -> object:
    value = reader.raw(name)
    if value is None:
        msg = f"{name}: is required"
        raise RequestError(msg, param=name, code="missing_required_parameter")
    return value


def _chat_logprobs(reader: FieldReader) -> int | None:
    wanted = reader.boolean("logprobs", default=False)
    top = reader.integer("top_logprobs", 0, MAX_ALTERNATIVES)
    if top and not wanted:
        refuse("top_logprobs", top, "left out unless logprobs is true")
    return (top or 0) if wanted else None


def _with_ignored(request: _RequestT, ignored: Sequence[str]) -> _RequestT:
    if not ignored:
        return request
    params = msgspec.structs.replace(request.params, ignored=tuple(ignored))
    return msgspec.structs.replace(request, params=params)
