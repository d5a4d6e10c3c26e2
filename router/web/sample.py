"""One sample's way from token updates to text: detokenize, find stop strings, end."""

from __future__ import annotations

from core.request import EngineRequest, FinishReason, TokenLogprobs, TokenUpdate
from router.api.answers import Delta
from router.api.generation_params import GenerationParams
from router.text.stop_strings import StopMatcher
from router.text.text_model import TextModel


class Sample:
    """The run state of one sample.

    Attributes:
        num_tokens: generated tokens that count, the one that completed a stop string included.
        finish_reason: set once it ended; nothing is taken after.
        ended_by_text: a stop string ended it, so the worker does not know.
        last_arrival: monotonic seconds of its last tokens, None before the first.
    """

    __slots__ = (
        "_detokenizer",
        "_include_stop",
        "_logprob_sum",
        "_matcher",
        "_min_tokens",
        "_sampling",
        "_shows_nothing",
        "ended_by_text",
        "finish_reason",
        "last_arrival",
        "num_tokens",
    )

    def __init__(self, text: TextModel, params: GenerationParams, request: EngineRequest) -> None:
        sampling = request.sampling
        self._detokenizer = text.detokenizer(
            skip_special_tokens=params.skip_special_tokens, after=request.prompt
        )
        self._include_stop = params.include_stop_str_in_output
        self._matcher = (
            StopMatcher(params.stop, include_in_output=self._include_stop) if params.stop else None
        )
        self._min_tokens = sampling.min_tokens
        self._shows_nothing = params.max_tokens == 0
        self._sampling = sampling
        self._logprob_sum = 0.0
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.ended_by_text = False
        self.last_arrival: float | None = None

    @property
    def mean_logprob(self) -> float:
        """Log-probability per token, by which `best_of` chooses (OpenAI's rule)."""
        return self._logprob_sum / max(1, self.num_tokens)

    def feed(self, update: TokenUpdate) -> Delta | None:
        """Take an update; None when the sample had ended before."""
        if self.finish_reason is not None:
            return None
        if self._shows_nothing:
            return self._end_at_once(update)
        if self._matcher is None:
            return self._take(update, self._text_of(update), len(update.token_ids))
        return self._feed_matching(update, self._matcher)

    def _end_at_once(self, update: TokenUpdate) -> Delta:
        """With `max_tokens` of 0: drop the one token that the engine generated all the same."""
        self.ended_by_text = update.finish_reason is None
        self.finish_reason = FinishReason.LENGTH
        return Delta("", (), finish_reason=self.finish_reason)

    def _text_of(self, update: TokenUpdate) -> str:
        shown, ended = update.token_ids, update.finish_reason is not None
        if ended and self._ends_by_token(update) and not self._include_stop:
            shown = shown[:-1]
        text = self._detokenizer.feed(shown)
        return text + self._detokenizer.flush() if ended else text

    def _ends_by_token(self, update: TokenUpdate) -> bool:
        return (
            update.finish_reason is FinishReason.STOP
            and bool(update.token_ids)
            and self._sampling.ends_with(update.token_ids[-1])
        )

    def _feed_matching(self, update: TokenUpdate, matcher: StopMatcher) -> Delta:
        """Token by token, since the one that completes a stop string is the last that counts."""
        hides_last = self._ends_by_token(update) and not self._include_stop
        last = len(update.token_ids) - 1
        text = ""
        for at, token_id in enumerate(update.token_ids):
            if at == last and hides_last:
                break
            piece = self._detokenizer.feed((token_id,))
            if self.num_tokens + at + 1 <= self._min_tokens:
                text += piece
                continue
            text += matcher.feed(piece)
            if matcher.matched is not None:
                return self._end_by_text(update, text, at + 1, matcher.matched)
        if update.finish_reason is not None:
            text += matcher.feed(self._detokenizer.flush())
            if matcher.matched is not None:
                return self._end_by_text(update, text, last + 1, matcher.matched)
            text += matcher.flush()
        return self._take(update, text, last + 1)

    def _end_by_text(self, update: TokenUpdate, text: str, count: int, stop: str) -> Delta:
        self.ended_by_text = update.finish_reason is None
        return self._take(update, text, count, FinishReason.STOP, stop)

    def _take(
        self,
        update: TokenUpdate,
        text: str,
        count: int,
        finish_reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
    ) -> Delta:
        logprobs: tuple[TokenLogprobs, ...] = update.logprobs[:count]
        for entry in logprobs:
            self._logprob_sum += entry.chosen
        self.num_tokens += count
        self.finish_reason = finish_reason or update.finish_reason
        if stop_reason is None and self._ends_by_token(update):
            last = update.token_ids[-1]
            stop_reason = None if last in self._sampling.eos_token_ids else last
        return Delta(text, update.token_ids[:count], logprobs, self.finish_reason, stop_reason)
