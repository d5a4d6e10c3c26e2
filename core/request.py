"""A request as a worker's engine sees it, and what the engine says about its tokens."""

from __future__ import annotations

import enum

import msgspec

from core.ids import RequestId
from core.sampling_params import SamplingParams


class FinishReason(enum.StrEnum):
    """Why a sample ended; the values are OpenAI's, plus vLLM's `abort` and `error`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class EngineRequest(msgspec.Struct, frozen=True):
    """The client's words as token ids; never changes while the request lives.

    Attributes:
        prompt: at least one token id.
        outputs: tokens emitted already, one tuple a sample, when a request goes on elsewhere; they
            are forced, never sampled again. Empty for a fresh request.
        namespace: adapter, tenant and cache salt, length-prefixed (see `core.block_hash`).
        priority: lower runs first, 0 by default (vLLM's sense).
    """

    request_id: RequestId
    prompt: tuple[int, ...]
    sampling: SamplingParams
    outputs: tuple[tuple[int, ...], ...] = ()
    namespace: bytes = b""
    priority: int = 0

    @property
    def carried(self) -> tuple[int, ...]:
        """The tokens whose KV moves when another worker has it: the prompt and, where there is one
        sample, its outputs but the last, which is still to be computed."""
        if self.sampling.n > 1 or not self.outputs:
            return self.prompt
        return self.prompt + self.outputs[0][:-1]

    def for_peer(self) -> EngineRequest:
        """Return what a peer is asked for: the KV of `carried`."""
        if self.sampling.n > 1 or not self.outputs:
            return self
        last = self.outputs[0][-1:]
        return msgspec.structs.replace(self, prompt=self.carried, outputs=(last,))

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt's log-probabilities are to be told. They come before the first token,
        so with outputs they have been."""
        return self.sampling.prompt_logprobs is not None and not self.outputs


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities (natural log, of the unmodified logits) at one position.

    Attributes:
        chosen: that of the token that was sampled.
        top_ids: the most likely ids, most likely first.
        top: their log-probabilities.
    """

    chosen: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities (natural log, of the unmodified logits) of consecutive prompt tokens, each
    given the tokens before it. The first token of a prompt has none.

    Attributes:
        start: index in the prompt of the first token here, at least 1.
        chosen: one a token.
        ranks: one a token, from 1: how many of the vocabulary are at least as likely.
        num_top: alternatives a token.
        top_ids: `num_top` ids a token, most likely first, one token's after the other's.
        top: their log-probabilities.
    """

    start: int
    chosen: tuple[float, ...]
    ranks: tuple[int, ...]
    num_top: int = 0
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()

    @property
    def end(self) -> int:
        """Index in the prompt of the token after the last one here."""
        return self.start + len(self.chosen)

    def since(self, position: int) -> PromptLogprobs | None:
        """Return the part from a prompt token on, None where that is nothing."""
        skip = position - self.start
        if skip <= 0:
            return self
        if position >= self.end:
            return None
        first = skip * self.num_top
        return PromptLogprobs(
            start=position,
            chosen=self.chosen[skip:],
            ranks=self.ranks[skip:],
            num_top=self.num_top,
            top_ids=self.top_ids[first:],
            top=self.top[first:],
        )


class TokenUpdate(msgspec.Struct, frozen=True):
    """New tokens of one sample. Receivers take only the current dispatch and the next index.

    Attributes:
        dispatch: the router's count; 1 for the first.
        start_index: index, among the sample's generated tokens, of the first of `token_ids`.
        token_ids: may be empty when only `finish_reason` is news (an abort).
        logprobs: one an id when asked for, else empty.
        finish_reason: set on a sample's last update.
    """

    request_id: RequestId
    sample_index: int
    dispatch: int
    start_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
