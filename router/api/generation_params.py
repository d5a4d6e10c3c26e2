"""The fields that chat and text completions share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from core.sampling_params import SamplingParams
from router.api.fields import FieldReader, ReadField, refuse

MAX_SAMPLES = 128
MAX_STOP_STRINGS = 64
MAX_ALTERNATIVES = 20
"""OpenAI's bound on `top_logprobs`, vLLM's default `max_logprobs`."""

_MAX_BAD_WORDS = 1024
_MAX_BIAS = 100
_MIN_SEED, _MAX_SEED = -(1 << 63), (1 << 64) - 1

_WITHOUT_EFFECT = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "prediction",
    "spaces_between_special_tokens",
}

_UNSUPPORTED: Mapping[str, Sequence[object]] = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "allowed_token_ids": (),
    "logits_processors": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structural_tag": (),
    "return_tokens_as_token_ids": (False,),
}
"""Known fields, each with the values (besides null and empty) that change nothing."""


class Vocabulary(msgspec.Struct, frozen=True):
    """What validation must know of the model.

    Attributes:
        size: ids are below it.
        eos_token_ids: ids that end a generation.
    """

    size: int
    eos_token_ids: tuple[int, ...]


class GenerationParams(msgspec.Struct, frozen=True):
    """How to generate and how to answer, for every prompt of one HTTP request.

    Attributes:
        sampling: complete but for `max_tokens`, which needs the prompt's length (`fit_to_context`),
            and a seed that was not given. Its `n`: samples to generate. Its `prompt_logprobs` serve
            both the field of that name and `echo` with `logprobs`.
        has_seed: whether the client gave a seed, which then is that of every prompt; else each has
            its own, as in vLLM, drawn before it is sent: tokens are a function of what is sent.
        n: choices to return; fewer than `sampling.n` with `best_of`.
        max_tokens: as given, None where it was not; 0 (with `echo`): the prompt alone.
        bad_words: texts that are not to be generated; their tokens are not known yet.
        logprobs: alternatives to return; None: no logprobs at all.
        prompt_logprobs: likewise in vLLM's field for those of the prompt.
        echo: whether the text begins with the prompt, and `logprobs` with its tokens.
        ignored: unknown fields, by name.
    """

    sampling: SamplingParams
    model: str | None = None
    has_seed: bool = False
    n: int = 1
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    cache_salt: str = ""
    priority: int = 0
    ignored: tuple[str, ...] = ()


def read_params(
    reader: FieldReader, vocabulary: Vocabulary, *, logprobs: int | None, echo: bool = False
) -> GenerationParams:
    """Read the shared fields; the caller reads its own and sets `ignored`. Fields that nobody may
    set come last, so that few are left to look for them among.

    Args:
        logprobs: alternatives that the caller's own field asks for, None for no logprobs.
        echo: the caller's own field; only with it may nothing be generated.

    Raises:
        RequestError: 400; names the field, its value and what would be right.
    """
    n = reader.integer("n", 1, MAX_SAMPLES) or 1
    best_of = _read_best_of(reader, n)
    max_tokens = _read_max_tokens(reader, least=0 if echo else 1)
    stream = reader.boolean("stream", default=False)
    if stream and best_of > n:
        refuse("best_of", best_of, f"equal to n ({n}) when stream is true")
    include_usage, continuous_usage = _read_stream_options(reader, stream=stream)
    asks_logprobs = logprobs is not None or best_of > n
    prompt_logprobs = _read_prompt_logprobs(reader, stream=stream)
    seed = reader.integer("seed", _MIN_SEED, _MAX_SEED)
    sampling = SamplingParams(
        n=best_of,
        logprobs=(logprobs or 0) if asks_logprobs else None,
        prompt_logprobs=_most(prompt_logprobs, logprobs if echo else None),
        eos_token_ids=vocabulary.eos_token_ids,
        seed=(seed or 0) & _MAX_SEED,
        **_read_of_vocabulary(reader, vocabulary.size),
        **reader.read_given(_SAMPLING),
    )
    if max_tokens is not None and sampling.min_tokens > max_tokens:
        refuse("min_tokens", sampling.min_tokens, f"at most max_tokens ({max_tokens})")
    params = GenerationParams(
        sampling=sampling,
        has_seed=seed is not None,
        n=n,
        max_tokens=max_tokens,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=echo,
        **reader.read_given(_ANSWER),
    )
    reader.accept(_WITHOUT_EFFECT)
    reader.refuse_effect(_UNSUPPORTED)
    return params


def _read_best_of(reader: FieldReader, n: int) -> int:
    best_of = reader.integer("best_of", 1, MAX_SAMPLES)
    if best_of is not None and best_of < n:
        refuse("best_of", best_of, f"at least n ({n})")
    return best_of or n


def _read_max_tokens(reader: FieldReader, *, least: int) -> int | None:
    max_tokens = reader.integer("max_tokens", least)
    newer = reader.integer("max_completion_tokens", least)
    if max_tokens is not None and newer is not None and max_tokens != newer:
        refuse("max_completion_tokens", newer, f"equal to max_tokens ({max_tokens}) if both come")
    return newer if max_tokens is None else max_tokens


def _read_prompt_logprobs(reader: FieldReader, *, stream: bool) -> int | None:
    count = reader.integer("prompt_logprobs", 0, MAX_ALTERNATIVES)
    if count is not None and stream:
        refuse("prompt_logprobs", count, "left out when stream is true")  # as in vLLM
    return count


def _most(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)


def _read_stream_options(reader: FieldReader, *, stream: bool) -> tuple[bool, bool]:
    given = reader.mapping("stream_options")
    if not given:
        return False, False
    if not stream:
        refuse("stream_options", given, "left out unless stream is true")
    options = FieldReader(given, "stream_options.")
    include_usage = options.boolean("include_usage", default=False)
    continuous_usage = options.boolean("continuous_usage_stats", default=False)
    return include_usage, include_usage and continuous_usage


def _read_of_vocabulary(reader: FieldReader, size: int) -> dict[str, Any]:
    """Read the sampling fields whose bounds are the vocabulary's."""
    top_k = reader.integer("top_k", -1)
    fields: dict[str, Any] = {}
    if top_k is not None:
        # More than the vocabulary keeps all, as in vLLM; and it would not fit on the wire.
        fields["top_k"] = min(max(0, top_k), size)
    if biases := reader.mapping("logit_bias"):
        fields["logit_bias"] = _logit_bias(biases, size)
    if stops := reader.token_ids("stop_token_ids", size):
        fields["stop_token_ids"] = stops
    return fields


def _logit_bias(given: Mapping[str, Any], vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases: list[tuple[int, float]] = []
    for key, value in given.items():
        if not _is_token_id(key, vocab_size):
            refuse("logit_bias", {key: value}, f"keyed by token ids from 0 to {vocab_size - 1}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse("logit_bias", {key: value}, "an object of numbers")
        if not -_MAX_BIAS <= value <= _MAX_BIAS:
            refuse("logit_bias", {key: value}, f"between -{_MAX_BIAS} and {_MAX_BIAS}")
        biases.append((int(key), float(value)))
    return tuple(biases)


def _is_token_id(key: str, vocab_size: int) -> bool:
    # By length first: int() refuses thousands of digits with an error of its own.
    is_number = key.isascii() and key.isdigit() and len(key) <= len(str(vocab_size))
    return is_number and int(key) < vocab_size


def _truncation(reader: FieldReader, name: str) -> int | None:
    keep = reader.integer(name, -1)
    if keep == 0:
        refuse(name, keep, "at least 1, or -1 for what the context holds")
    return keep


def _cache_salt(reader: FieldReader, name: str) -> str:
    salt = reader.text(name)
    if salt == "":
        refuse(name, salt, "a string that is not empty")
    return salt or ""


def _number(default: float, low: float, high: float, *, above_low: bool = False) -> ReadField:
    return lambda reader, name: reader.number(name, default, low, high, above_low=above_low)


def _boolean(*, default: bool) -> ReadField:
    return lambda reader, name: reader.boolean(name, default=default)


_DEFAULTS = SamplingParams()
_SAMPLING: Mapping[str, ReadField] = {
    "min_tokens": lambda reader, name: reader.integer(name, 0) or 0,
    "temperature": _number(_DEFAULTS.temperature, 0, 2),
    "top_p": _number(_DEFAULTS.top_p, 0, 1, above_low=True),
    "min_p": _number(_DEFAULTS.min_p, 0, 1),
    "repetition_penalty": _number(_DEFAULTS.repetition_penalty, 0, math.inf, above_low=True),
    "presence_penalty": _number(_DEFAULTS.presence_penalty, -2, 2),
    "frequency_penalty": _number(_DEFAULTS.frequency_penalty, -2, 2),
    "ignore_eos": _boolean(default=False),
}
"""Those of `SamplingParams`, by its fields' names."""

_ANSWER: Mapping[str, ReadField] = {
    "model": lambda reader, name: reader.text(name),
    "stop": lambda reader, name: reader.texts(name, max_items=MAX_STOP_STRINGS),
    "bad_words": lambda reader, name: reader.texts(name, max_items=_MAX_BAD_WORDS),
    "include_stop_str_in_output": _boolean(default=False),
    "skip_special_tokens": _boolean(default=True),
    "truncate_prompt_tokens": _truncation,
    "return_token_ids": _boolean(default=False),
    "cache_salt": _cache_salt,
    "priority": lambda reader, name: reader.integer(name, -(1 << 31), (1 << 31) - 1) or 0,
}
"""Those of `GenerationParams`, by its fields' names."""
