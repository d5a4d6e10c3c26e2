"""At the end of its prompt a trunk becomes its request's samples, sharing blocks copy-on-write."""

from __future__ import annotations

from collections.abc import Mapping

from engine.scheduling.sequence import Sequence
from engine.scheduling.state import SchedulerState
from engine.token_rules import end_of


def fork(state: SchedulerState, trunk: Sequence, outputs: Mapping[int, tuple[int, ...]]) -> None:
    """Replace a trunk whose prompt is computed by its live samples.

    The first takes over the trunk's table, the others share its blocks. Samples whose outputs ended
    them do not run: whoever made these tokens has told so. A sample without any token queues
    alone, at the front: it recomputes the prompt's last block, the cache has the rest.

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
        if not tokens:
            state.waiting.push(sample, at_front=True)
            continue
        sample.num_computed = run.num_prompt
        if trunk.table is not None:
            sample.table, trunk.table = trunk.table, None
        else:
            assert table is not None
            sample.table = table.fork()
            state.memory.hold(table.block_ids)
        state.batch.join(sample)
    state.end(trunk)
