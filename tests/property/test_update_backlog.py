"""Whatever is put and whenever it is taken, each sample's tokens come out whole and in order."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from core.ids import RequestId
from core.request import FinishReason, TokenLogprobs, TokenUpdate
from router.dispatch.update_backlog import UpdateBacklog

TOKENS = st.lists(st.integers(0, (1 << 32) - 1), max_size=3)
RUNS = st.lists(st.tuples(st.integers(0, 2), TOKENS, st.integers(1, 40)), max_size=12)
"""(sample, tokens of an update, how often it comes)."""


def logprobs_of(token_ids: list[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(-1.0 / (1 + one), tuple(range(num_top)), (-float("inf"),) * num_top)
        for one in token_ids
    )


def essence(updates: list[TokenUpdate]) -> dict[int, list[object]]:
    """Return each sample's tokens, with log-probabilities and ends, as one list."""
    found: dict[int, list[object]] = defaultdict(list)
    for update in updates:
        found[update.sample_index] += [*update.token_ids]
        found[-1 - update.sample_index] += [*update.logprobs]
    return found


@given(RUNS, st.sets(st.integers(0, 200)), st.integers(0, 2), st.booleans())
def test_nothing_is_lost_by_folding(
    runs: list[tuple[int, list[int], int]], takes: set[int], num_top: int, with_logprobs: bool
) -> None:
    backlog = UpdateBacklog()
    put: list[TokenUpdate] = []
    taken: list[TokenUpdate] = []
    starts = [0, 0, 0]
    for sample, tokens, times in runs:
        for _ in range(times):
            logprobs = logprobs_of(tokens, num_top) if with_logprobs else ()
            start = starts[sample]
            update = TokenUpdate(RequestId("r"), sample, 1, start, tuple(tokens), logprobs)
            starts[sample] += len(tokens)
            put.append(update)
            backlog.put(update)
            if len(put) in takes:
                taken += backlog.take()
                assert len(backlog) == 0
    assert len(backlog) <= 64 + 3
    for sample in range(3):
        last = TokenUpdate(RequestId("r"), sample, 1, starts[sample], (), (), FinishReason.STOP)
        put.append(last)
        backlog.put(last)
    taken += backlog.take()
    assert essence(taken) == essence(put)
    ends = [0, 0, 0]
    for update in taken:
        assert update.start_index == ends[update.sample_index]
        ends[update.sample_index] += len(update.token_ids)
    lasts = {update.sample_index: update.finish_reason for update in taken}
    assert lasts == dict.fromkeys(range(3), FinishReason.STOP)
