"""Whether logits are the same to the bit however a sequence is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from tests.step_driver import StepDriver, work


def ways(driver: StepDriver, tokens: Sequence[int], sizes: Sequence[int]) -> Iterator[Tensor]:
    """Yield the logits of the last half of a sequence, computed in every way that serving has.

    Args:
        driver: at least 17 slots, and blocks for so many of the sequences.
        tokens: of the sequence, at least four blocks.
        sizes: of chunks.
    """
    half = len(tokens) // 2
    for size in sizes:
        yield driver.chunked_logits(tokens, size)[half:]
    yield driver.chunked_logits(tokens, half, num_decodes=len(tokens) - half)[half:]
    for num_others in (1, 15):
        yield _beside_others(driver, tokens, num_others)
    yield _after_a_prefix(driver, tokens)
    yield driver.chunked_logits(tokens, len(tokens))[half:]  # again, in other blocks


def _beside_others(driver: StepDriver, tokens: Sequence[int], num_others: int) -> Tensor:
    """First half a chunk between others' chunks, then decodes beside their decodes."""
    half = len(tokens) // 2
    others = range(1, num_others + 1)
    added = [driver.added(slot, tokens[slot:], room=0) for slot in others]
    added.insert(num_others // 2, driver.added(0, tokens, room=0))
    lengths = {0: half} | {slot: 3 + 5 * slot % half for slot in others}
    order = [int(one.slot) for one in added]
    driver.logits(*(work(slot, lengths[slot]) for slot in order), added=tuple(added))
    rows: list[Tensor] = []
    for step in range(len(tokens) - half):
        at_work = [slot for slot in order if slot == 0 or step < 20]
        logits = driver.logits(*(work(slot, 1) for slot in at_work))
        rows.append(logits[at_work.index(0)])
    driver.remove(0, *others)
    return torch.stack(rows)


def _after_a_prefix(driver: StepDriver, tokens: Sequence[int]) -> Tensor:
    """Another sequence has computed the first blocks."""
    half, block_size = len(tokens) // 2, driver.layout.block_size
    num_shared = half // block_size
    driver.logits(work(1, len(tokens)), added=(driver.added(1, tokens, room=0),))
    added = driver.added(0, tokens, num_computed=num_shared * block_size, room=0)
    shared = (*driver.tables[1][:num_shared], *added.block_tables[0][num_shared:])
    added = replace(added, block_tables=(shared,))
    logits = driver.logits(work(0, len(tokens) - num_shared * block_size), added=(added,))
    driver.remove(0, 1)
    return logits[half - num_shared * block_size :]
