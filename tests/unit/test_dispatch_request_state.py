"""The request machine's corners, one by one; tests/property draws the rest."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from core.errors import RequestError
from core.ids import RequestId, WorkerId
from core.request import (
    EngineRequest,
    FinishReason,
    PromptLogprobs,
    TokenLogprobs,
    TokenUpdate,
)
from core.sampling_params import SamplingParams
from router.dispatch.request_state import (
    Abort,
    Dispatch,
    Effect,
    End,
    Phase,
    RequestState,
    RetryRules,
)
from router.policy.decision import RefusalReason

R = RequestId("r")
W0, W1 = WorkerId("w0"), WorkerId("w1")
RULES = RetryRules()
DICE = random.Random(0)


def machine(*, n: int = 1, outputs: tuple[tuple[int, ...], ...] = ()) -> RequestState:
    request = EngineRequest(R, (1, 2), SamplingParams(n=n, max_tokens=9), outputs=outputs)
    return RequestState(request, deadline=600.0)


def running(*, n: int = 1) -> RequestState:
    state = machine(n=n)
    assert state.begin() == (Dispatch(1, (), frozenset()),)
    assert state.sent(W0, 0.0, is_suspect=False) == []
    return state


def tokens(
    *ids: int,
    at: int = 0,
    sample: int = 0,
    dispatch: int = 1,
    end: FinishReason | None = None,
    logprobs: tuple[TokenLogprobs, ...] = (),
) -> TokenUpdate:
    return TokenUpdate(R, sample, dispatch, at, ids, logprobs, end)


def error(effects: Sequence[Effect]) -> RequestError:
    end = effects[-1]
    assert isinstance(end, End)
    assert end.error is not None
    return end.error


def test_a_request_runs_to_its_end() -> None:
    state = running()
    assert state.phase is Phase.DISPATCHED
    assert state.updated(tokens(5), 1.0) == (tokens(5),)
    assert state.phase is Phase.STREAMING
    last = tokens(6, at=1, end=FinishReason.STOP)
    assert state.updated(last, 2.0) == (last, End(None))
    assert state.phase is Phase.ENDED
    assert state.num_output_tokens == 2


def test_a_repetition_is_cut_to_what_is_new_with_its_logprobs() -> None:
    state = running()
    state.updated(tokens(5, 6), 1.0)
    assert state.updated(tokens(5, 6), 1.0) == ()
    assert state.updated(tokens(at=2), 1.0) == ()
    first, second = TokenLogprobs(-1.0), TokenLogprobs(-2.0)
    update = tokens(6, 7, at=1, logprobs=(first, second))
    assert state.updated(update, 1.0) == (tokens(7, at=2, logprobs=(second,)),)


@pytest.mark.parametrize(
    "update",
    [
        tokens(7, at=2),  # a gap
        tokens(5, end=FinishReason.LENGTH, sample=1),  # no such sample
        tokens(end=FinishReason.STOP),  # an end before tokens that are known
        tokens(6, at=1, end=FinishReason.ABORT),  # nobody asked for that
        tokens(6, at=1, end=FinishReason.ERROR),
    ],
)
def test_a_broken_stream_goes_on_elsewhere_and_the_worker_is_told(update: TokenUpdate) -> None:
    state = running()
    state.updated(tokens(5), 1.0)
    effects = state.updated(update, 2.0)
    assert effects == (Abort(W0, 1), Dispatch(2, ((5,),), frozenset({W0})))
    assert state.phase is Phase.WAITING
    state.sent(W1, 2.0, is_suspect=False)
    assert state.updated(tokens(9, at=1), 3.0) == (), "told already"
    assert state.updated(tokens(6, at=1, dispatch=2), 3.0) == (tokens(6, at=1, dispatch=2),)


def test_a_thawed_twin_is_told_once_though_its_stream_was_lost() -> None:
    state = running()
    state.stream_lost(W0, "reset", 1.0)
    state.sent(W1, 1.0, is_suspect=False)
    assert state.stale(1) == (), "a lost stream's requests are aborted by the worker"
    assert state.stale(7) == ()
    assert state.stream_lost(W0, "reset", 1.0) == (), "not there any more"


def test_a_finished_sample_takes_no_more_and_is_ended_at_the_next_worker() -> None:
    state = running(n=2)
    assert state.updated(tokens(5, end=FinishReason.STOP), 1.0) == (
        tokens(5, end=FinishReason.STOP),
    )
    assert state.updated(tokens(6, at=1), 1.0) == ()
    assert state.unfinished() == [(1, 0)]
    assert state.stream_lost(W0, "reset", 1.0) == (Dispatch(2, ((5,), ()), frozenset({W0})),)
    assert state.sent(W1, 1.0, is_suspect=False) == [Abort(W1, 2, 0)]


def test_stop_strings_end_samples_and_the_last_one_ends_all() -> None:
    state = running(n=2)
    assert state.finish_sample(1) == (Abort(W0, 1, 1),)
    assert state.finish_sample(1) == ()
    assert state.finish_sample(0) == (Abort(W0, 1, 0), End(None))
    assert state.finish_sample(0) == ()
    waiting = running(n=2)
    waiting.stream_lost(W0, "reset", 1.0)
    assert waiting.finish_sample(0) == ()
    assert waiting.finish_sample(1) == (End(None),)


def scores(start: int, end: int) -> PromptLogprobs:
    places = range(start, end)
    return PromptLogprobs(start, tuple(-float(at) for at in places), tuple(places))


def scored() -> RequestState:
    sampling = SamplingParams(max_tokens=9, prompt_logprobs=0)
    state = RequestState(EngineRequest(R, (1, 2, 3, 4), sampling), deadline=600.0)
    state.begin()
    state.sent(W0, 0.0, is_suspect=False)
    return state


def test_a_prompt_s_scores_go_on_where_they_stopped() -> None:
    state = scored()
    assert state.scored(1, scores(1, 3), 1.0) == (scores(1, 3),)
    assert state.progress_at == 1.0
    assert state.phase is Phase.DISPATCHED
    state.stream_lost(W0, "reset", 2.0)
    assert state.scored(1, scores(3, 4), 2.0) == (), "of a dispatch before, which is told"
    state.sent(W1, 2.0, is_suspect=False)
    assert state.scored(2, scores(1, 2), 3.0) == ()
    assert state.scored(2, scores(2, 4), 3.0) == (scores(3, 4),)
    assert state.updated(tokens(5, dispatch=2), 4.0) == (tokens(5, dispatch=2),)
    assert state.scored(3, scores(1, 4), 5.0) == ()


def test_a_gap_in_the_scores_or_a_token_too_early_is_broken() -> None:
    state = scored()
    told, again = state.scored(1, scores(2, 4), 1.0)
    assert told == Abort(W0, 1)
    assert again == Dispatch(2, (), frozenset({W0}))
    state = scored()
    state.scored(1, scores(1, 3), 1.0)
    told, again = state.updated(tokens(5), 2.0)
    assert told == Abort(W0, 1)
    assert again == Dispatch(2, (), frozenset({W0})), "without the token"


def test_a_refusal_starts_nothing_and_any_other_trouble_may_have() -> None:
    state = running()
    state.refused(1, "overloaded", "", 1.0)
    assert not state.has_lost_a_start
    state.sent(W1, 1.0, is_suspect=False)
    state.failed(2, "a fence", 2.0, retriable=True)
    assert state.has_lost_a_start
    state = running()
    state.stream_lost(W0, "reset", 1.0)
    assert state.has_lost_a_start


def test_refused_everywhere_waits_and_tries_again_until_patience_ends() -> None:
    state = running()
    again = state.refused(1, "overloaded", "256 wait", 10.0)
    assert again == (Dispatch(2, (), frozenset({W0})),)
    assert state.unplaced(RefusalReason.AVOIDED, 10.0, DICE) == ()
    assert 10.025 <= state.due() <= 10.05
    assert state.tick(10.01) == ()
    assert state.tick(10.05) == (Dispatch(3, (), frozenset()),)
    state.sent(W0, 10.05, is_suspect=False)
    assert state.refused(2, "overloaded", "", 11.0) == (), "of a dispatch before"
    refused = error(state.refused(3, "overloaded", "256 wait", 11.0))
    assert (refused.status, refused.retry_after_s, refused.code) == (429, 1.0, "overloaded")
    assert "256 wait" in refused.message


@pytest.mark.parametrize("reason", ["wrong_role", "draining", "no_prefill_worker"])
def test_other_refusals_are_borne_longer(reason: str) -> None:
    state = running()
    state.refused(1, reason, "", 10.0)
    assert state.unplaced(RefusalReason.AVOIDED, 11.5, DICE) == ()
    ended = error(state.unplaced(RefusalReason.AVOIDED, 25.0, DICE))
    assert ended.status == 503
    assert ended.retry_after_s


def test_back_off_doubles_and_restarts_after_progress() -> None:
    state = running()
    state.stream_lost(W0, "reset", 0.0)
    waits: list[float] = []
    for _ in range(8):
        state.unplaced(RefusalReason.NO_WORKER, 0.0, random.Random(1))
        waits.append(state.due())
        state.tick(state.due())
    doubled = [later / sooner for sooner, later in pairwise(waits)]
    assert doubled[:5] == pytest.approx([2.0] * 5)
    assert waits[-1] <= RULES.max_wait_s
    state.sent(W1, 1.0, is_suspect=False)
    state.updated(tokens(5, dispatch=state.number), 1.0)
    state.stream_lost(W1, "reset", 14.0)
    state.unplaced(RefusalReason.NO_WORKER, 14.0, random.Random(1))
    assert state.due() - 14.0 == pytest.approx(waits[0])


def test_a_worker_that_comes_up_ends_the_wait() -> None:
    state = running()
    assert state.worker_came_up() == ()
    state.stream_lost(W0, "reset", 0.0)
    state.unplaced(RefusalReason.AVOIDED, 0.0, DICE)
    assert state.worker_came_up() == (Dispatch(3, (), frozenset()),)
    assert state.worker_came_up() == ()


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        (RefusalReason.NO_WORKER, "no_worker"),
        (RefusalReason.NO_PREFILL_WORKER, "no_prefill_worker"),
    ],
)
def test_a_fresh_request_waits_shortly_for_a_worker(refusal: RefusalReason, code: str) -> None:
    state = machine()
    state.begin()
    assert state.unplaced(refusal, 10.0, DICE) == ()
    assert state.tick(state.due()) == (Dispatch(2, (), frozenset()),)
    ended = error(state.unplaced(refusal, 10.0 + RULES.fresh_patience_s, DICE))
    assert (ended.status, ended.code, ended.retry_after_s) == (503, code, 5.0)


def test_a_request_that_nobody_can_hold_ends_at_once() -> None:
    state = machine()
    state.begin()
    ended = error(state.unplaced(RefusalReason.TOO_LONG, 0.0, DICE))
    assert (ended.status, ended.code) == (400, "context_length_exceeded")


def test_what_no_other_worker_can_help_ends_at_once() -> None:
    too_long = error(running().refused(1, "too_long", "9 > 8", 1.0))
    assert (too_long.status, too_long.code) == (400, "context_length_exceeded")
    invalid = error(running().refused(1, "invalid", "token id 9", 1.0))
    assert (invalid.status, invalid.code) == (400, "invalid_token_id")
    state = running()
    assert state.failed(2, "x", 1.0, retriable=True) == ()
    failed = error(state.failed(1, "step failed", 1.0, retriable=False))
    assert (failed.status, failed.code) == (500, "generation_failed")
    assert "step failed" in failed.message


def test_a_worker_that_ends_it_for_want_of_time_says_so_a_little_late() -> None:
    late = error(running().failed(1, "its time is over", 600.0, retriable=False))
    assert (late.status, late.code, late.retry_after_s) == (503, "request_timeout", 1.0)


def test_a_retriable_failure_goes_on_elsewhere_and_was_ended_there() -> None:
    state = running()
    state.updated(tokens(5), 1.0)
    effects = state.failed(1, "x", 1.0, retriable=True)
    assert effects == (Dispatch(2, ((5,),), frozenset({W0})),)


def test_trouble_long_after_the_last_begins_anew() -> None:
    state = running()
    state.refused(1, "draining", "", 0.0)
    state.sent(W1, 0.0, is_suspect=False)
    effects = state.refused(2, "draining", "", 100.0)  # it queued there for long
    assert effects == (Dispatch(3, (), frozenset({W0, W1})),)


def test_a_request_that_kills_workers_is_not_sent_on_for_ever() -> None:
    state = running()
    for number in (2, 3):
        dispatch = state.stream_lost(W0, "reset", 1.0)[0]
        assert isinstance(dispatch, Dispatch)
        assert dispatch.number == number
        state.sent(W0, 1.0, is_suspect=False)
    assert error(state.stream_lost(W0, "reset", 1.0)).status == 503


def test_a_suspect_has_a_grace_and_then_loses_the_request() -> None:
    state = running()
    state.suspect(W1, 1.0, suspect=True)
    assert state.due() == 600.0
    state.suspect(W0, 1.0, suspect=True)
    assert state.due() == 3.0
    state.suspect(W0, 2.0, suspect=False)
    assert state.due() == 600.0
    state.suspect(W0, 5.0, suspect=True)
    assert state.tick(6.9) == ()
    assert state.tick(7.0) == (Abort(W0, 1), Dispatch(2, (), frozenset({W0})))
    state.sent(W0, 7.0, is_suspect=True)
    assert state.due() == 9.0


def test_a_worker_that_disowns_it_loses_it_after_a_silence() -> None:
    state = running()
    state.updated(tokens(5), 1.0)
    assert state.disowned(W0, 5.9) == ()
    assert state.disowned(W1, 9.0) == ()
    assert state.disowned(W0, 6.0) == (Abort(W0, 1), Dispatch(2, ((5,),), frozenset({W0})))


def test_the_deadline_ends_everything_and_after_it_nothing_happens() -> None:
    state = running()
    effects = state.tick(600.0)
    assert effects[0] == Abort(W0, 1)
    assert (error(effects).status, error(effects).code) == (503, "request_timeout")
    assert state.tick(601.0) == ()
    assert state.abort() == ()
    assert state.updated(tokens(5), 601.0) == ()
    assert state.worker_came_up() == ()


def test_an_abort_tells_the_worker_if_there_is_one() -> None:
    assert running().abort() == (Abort(W0, 1), End(None))
    state = running()
    state.stream_lost(W0, "reset", 1.0)
    assert state.abort() == (End(None),)


def test_a_request_may_begin_with_forced_outputs() -> None:
    state = machine(outputs=((5, 6),))
    assert state.begin() == (Dispatch(1, ((5, 6),), frozenset()),)
    state.sent(W0, 0.0, is_suspect=False)
    assert state.updated(tokens(7, at=2), 1.0) == (tokens(7, at=2),)


def test_a_dispatch_that_found_no_worker_leaves_nobody_to_tell() -> None:
    state = running()
    state.stream_lost(W0, "reset", 0.0)
    state.unplaced(RefusalReason.AVOIDED, 0.0, DICE)
    assert state.updated(tokens(5, dispatch=2), 1.0) == ()


@pytest.mark.parametrize(("has_kv", "source"), [(True, W0), (False, None)])
def test_a_request_that_moved_goes_on_elsewhere_from_where_it_was(
    has_kv: bool, source: WorkerId | None
) -> None:
    state = running()
    state.updated(tokens(5, 6), 1.0)
    assert state.moved(2, 20.0, has_kv=has_kv) == (), "of another dispatch"
    moved = Dispatch(2, ((5, 6),), frozenset({W0}), source)
    assert state.moved(1, 20.0, has_kv=has_kv) == (moved,)
    assert state.moved(1, 20.0, has_kv=has_kv) == ()
    assert state.updated(tokens(7, at=2), 20.0) == (), "it was the last word of that dispatch"
    state.unplaced(RefusalReason.AVOIDED, 20.0, DICE)
    again = state.tick(state.due())
    assert again == (Dispatch(3, ((5, 6),), frozenset(), source),), "it may still be asked"
    state.sent(W1, 21.0, is_suspect=False)
    state.stream_lost(W1, "reset", 22.0)
    assert state.number == 4
    assert state.phase is Phase.WAITING


def test_one_that_moved_is_not_refused_as_if_it_were_new() -> None:
    state = running()
    state.updated(tokens(5), 1.0)
    state.moved(1, 10.0, has_kv=True)
    state.sent(W1, 10.0, is_suspect=False)
    state.refused(2, "overloaded", "", 10.5)
    assert state.unplaced(RefusalReason.AVOIDED, 13.0, DICE) == ()
    ended = error(state.unplaced(RefusalReason.AVOIDED, 26.0, DICE))
    assert ended.code == "overloaded"
