"""What every executor refuses of a plan, in the same words."""

from __future__ import annotations

from collections.abc import Container

from core.ids import SlotId
from engine.executor.interface import SlotAdded, refuse_adapter


def check_added(
    added: SlotAdded, taken: Container[SlotId], *, num_slots: int, max_tokens: int
) -> None:
    """Refuse a sequence that has no place.

    Raises:
        ValueError: names the slot and what would be right.
    """
    if not 0 <= added.slot < num_slots or added.slot in taken:
        msg = f"slot {added.slot}: must be free and below {num_slots}"
        raise ValueError(msg)
    if not added.num_computed < len(added.token_ids) <= max_tokens:
        msg = (
            f"slot {added.slot}: {len(added.token_ids)} tokens, {added.num_computed} computed; "
            f"at most {max_tokens} tokens, and at least one to compute"
        )
        raise ValueError(msg)
    refuse_adapter(added)


def check_group(group: int) -> None:
    """Refuse a second KV group.

    Raises:
        ValueError: it is not 0.
    """
    if group:
        msg = f"KV group {group}: this model has one group, 0"
        raise ValueError(msg)
