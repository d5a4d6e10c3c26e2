"""Request bodies. null stands for "not given" in every field that may be left out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from core.worker_record import Role
from router.api.generation_params import MAX_ALTERNATIVES, MAX_SAMPLES, MAX_STOP_STRINGS
from router.api.requests import MAX_PROMPTS

TokenId = Annotated[int, Meta(ge=0)]
_TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
_Alternatives = Annotated[int, Meta(ge=0, le=MAX_ALTERNATIVES)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Text = Annotated[str, Meta(min_length=1)]


def _says(text: str) -> Meta:
    return Meta(description=text)


class StreamOptions(msgspec.Struct):
    """What a stream says besides its choices."""

    include_usage: Annotated[
        bool | None, _says("a last chunk with `choices: []` and the usage of the whole request")
    ] = None
    continuous_usage_stats: Annotated[
        bool | None, _says("usage so far in every chunk; with include_usage only (vLLM's)")
    ] = None


class _Generate(msgspec.Struct, kw_only=True):
    """What chat and text completions share."""

    model: Annotated[str | None, _says("the served model's name; left out: that one")] = None
    stream: Annotated[bool | None, _says("answer with server-sent events")] = None
    stream_options: StreamOptions | None = None
    n: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None, _says("choices a prompt; 1 by default")
    ] = None
    best_of: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None,
        _says("samples to choose the n likeliest from; no streams"),
    ] = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        _says("chat: the rest of the context by default; completions: 16. 0 with echo only"),
    ] = None
    max_completion_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None, _says("the same as max_tokens")
    ] = None
    min_tokens: Annotated[Annotated[int, Meta(ge=0)] | None, _says("vLLM's")] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None, _says("1 by default; 0: greedy")
    ] = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[Annotated[int, Meta(ge=-1)] | None, _says("0 and -1: all (vLLM's)")] = None
    min_p: Annotated[_Share | None, _says("vLLM's")] = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0)] | None, _says("1 changes nothing (vLLM's)")
    ] = None
    logit_bias: Annotated[
        dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None, _says("by token id")
    ] = None
    seed: Annotated[
        Annotated[int, Meta(extra_json_schema={"minimum": -(1 << 63), "maximum": (1 << 64) - 1})]
        | None,
        _says("equal requests with equal seeds have equal answers"),
    ] = None
    stop: Annotated[
        _Text | Annotated[list[_Text], Meta(max_length=MAX_STOP_STRINGS)] | None,
        _says("texts that end a choice"),
    ] = None
    stop_token_ids: Annotated[list[TokenId] | None, _says("vLLM's")] = None
    include_stop_str_in_output: Annotated[bool | None, _says("vLLM's")] = None
    ignore_eos: Annotated[bool | None, _says("vLLM's")] = None
    skip_special_tokens: Annotated[bool | None, _says("true by default (vLLM's)")] = None
    bad_words: Annotated[_Text | list[_Text] | None, _says("never generated (vLLM's)")] = None
    add_special_tokens: Annotated[bool | None, _says("BOS before the prompt (vLLM's)")] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        _says("keep so many tokens of the prompt's end; -1: what fits (vLLM's)"),
    ] = None
    prompt_logprobs: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_ALTERNATIVES)] | None,
        _says("alternatives for each prompt token; no streams (vLLM's)"),
    ] = None
    return_token_ids: Annotated[bool | None, _says("`token_ids` in every choice (vLLM's)")] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None,
        _says("lower runs first (vLLM's)"),
    ] = None
    cache_salt: Annotated[
        _Text | None, _says("prefixes are reused among requests of equal salts only (vLLM's)")
    ] = None
    user: Annotated[Any, _says("accepted, without effect")] = None
    metadata: Annotated[Any, _says("accepted, without effect")] = None


class TextPart(msgspec.Struct, kw_only=True):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None


class ChatCompletionRequest(_Generate, kw_only=True):
    """A chat. Fields of OpenAI's API that would change the answer and are not here get 400."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[_Alternatives | None, _says("with logprobs only")] = None
    add_generation_prompt: Annotated[bool | None, _says("true by default (vLLM's)")] = None
    continue_final_message: Annotated[
        bool | None, _says("go on with the last message; without add_generation_prompt (vLLM's)")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, _says("variables of the template (vLLM's)")
    ] = None


class CompletionRequest(_Generate, kw_only=True):
    """A text to go on with, or several."""

    prompt: Annotated[
        _Text | Annotated[list[_Text | TokenId | _TokenIds], Meta(min_length=1)],
        _says(
            f"a text, up to {MAX_PROMPTS} texts, token ids, or up to {MAX_PROMPTS} lists of them"
        ),
    ]
    echo: Annotated[bool | None, _says("begin each choice with its prompt")] = None
    logprobs: _Alternatives | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A text, or the messages of a chat under the model's template; one of both is needed."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids."""

    tokens: list[TokenId]
    model: str | None = None


class DrainRequest(msgspec.Struct, kw_only=True):
    """Which worker leaves; what still runs after `deadline_s` is failed over to others. Without
    `force`, not the last one that serves requests."""

    worker: str
    deadline_s: Annotated[float, Meta(ge=0)] | None = None
    force: bool | None = False


class RoleRequest(msgspec.Struct, kw_only=True):
    """Which worker does what from now on. Without `force`, the last one that serves requests goes
    on doing so."""

    worker: str
    role: Role
    force: bool | None = False
