"""At its end a trunk becomes its request's samples, sharing blocks copy-on-write."""

from __future__ import annotations

from collections.abc import Mapping

from engine.scheduling.sequence import Sequence
from engine.scheduling.state import SchedulerState
from engine.token_rules import end_of


def fork(state: SchedulerState, trunk: Sequence, outputs: Mapping[int, tuple[int, ...]]) -> None:
    """Replace a trunk that is computed by its live samples.

    The first takes over the trunk's table, the others share its blocks. Samples whose outputs ended
    them do not run: whoever made these tokens has told so. Two kinds of samples queue alone, at the
    front, to be matched anew: one without any token, which recomputes the prompt's last block; and
    one of whose further forced outputs the cache holds whole blocks.

    Args:
        outputs: generated tokens so far, by sample index.
    """
    run = trunk.run
    table = trunk.table
    for sample_index in sorted(run.live):
        tokens = outputs[sample_index]
        if end_of(tokens, run.request.sampling) is not None:
            run.live.discard(sample_index)
            state.history.record(len(tokens))
            continue
        sample = Sequence(run, (*run.request.prompt, *tokens), sample_index=sample_index)
        sample.hashes = list(trunk.hashes)
        if not tokens or _is_cached_beyond(state, trunk, sample):
            state.waiting.push(sample, at_front=True)
            continue
        sample.num_computed = len(trunk.token_ids)
        if trunk.table is not None:
            sample.table, trunk.table = trunk.table, None
        else:
            assert table is not None
            sample.table = table.fork()
            state.memory.hold(table.block_ids)
        state.batch.join(sample)
    state.end(trunk)


def _is_cached_beyond(state: SchedulerState, trunk: Sequence, sample: Sequence) -> bool:
    memory, run = state.memory, sample.run
    num_blocks = len(trunk.token_ids) // memory.block_size + 1
    if memory.num_reusable(len(sample.token_ids)) < num_blocks:
        return False
    memory.extend_hashes(sample.hashes, sample.token_ids, run.request.namespace)
    return memory.holds_prefix(sample.hashes, num_blocks)
