"""Every rule of the handoff protocol, how it is broken, and what is then violated.

Those of the protocol itself are broken under the model checker, within bounds in which the unbroken
protocol violates nothing; the rest under a probe, a short run of the part that keeps the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from tests import handoff_breaks as breaks
from tests import handoff_part_breaks as parts
from tests import handoff_probes as probes
from tests.handoff_breaks import Break
from tests.handoff_checker import Bounds


class Rule(NamedTuple):
    """One row of the table.

    Attributes:
        text: the rule.
        breaks: switches it off.
        where: what then finds a violation: bounds for the checker, or a probe.
        violated: what it says, a regular expression; empty where the part's own invariants, or the
            oracle of its tokens, notice.
    """

    text: str
    breaks: Break
    where: Bounds | Callable[[], object]
    violated: str

    @property
    def name(self) -> str:
        """How it is broken, in a test's name."""
        return getattr(self.breaks, "__name__", "breaks")


def within(*faults: str, **fields: Any) -> Bounds:
    """Return the smallest bounds: one prefill worker, a prompt of one block, one fault."""
    smallest = Bounds(", ".join(faults) or "no fault", faults, num_tokens=4)
    return replace(smallest, **fields)


_LATE = "a write may land in a (free|cached) block"

MODEL_RULES = [
    Rule(
        "an abandoned attempt's blocks are quarantined: retry",
        breaks.retried_blocks_are_free_at_once,
        within("stream lost", num_prefills=2),
        _LATE,
    ),
    Rule(
        "an abandoned attempt's blocks are quarantined: abort",
        breaks.aborted_blocks_are_free_at_once,
        within("abort"),
        _LATE,
    ),
    Rule(
        "an abandoned attempt's blocks are quarantined: local prefill",
        breaks.fallen_back_blocks_are_free_at_once,
        within("suspect"),
        _LATE,
    ),
    Rule(
        "every attempt gets fresh blocks",
        breaks.a_retry_keeps_its_blocks,
        within("suspect", num_prefills=2),
        "another attempt's block",
    ),
    Rule(
        "a receiver takes the current attempt's messages only",
        breaks.another_attempts_messages_count,
        within("write fails"),
        "joined",
    ),
    Rule(
        "so it does of refusals",
        breaks.another_attempts_refusal_counts,
        within("suspect", "ask refused", num_prefills=2, max_faults=2),
        _LATE,
    ),
    Rule(
        "the ask names the blocks that are missing",
        breaks.blocks_are_named_from_the_first_on,
        within(num_tokens=8, num_cached=1),
        _LATE,
    ),
    Rule(
        "join when the union of notifications is complete",
        breaks.the_last_blocks_notification_joins,
        within(num_tokens=8),
        "wrong KV joined",
    ),
    Rule(
        "join when notified, not when told",
        breaks.first_tokens_join,
        within(),
        "wrong KV joined",
    ),
    Rule(
        "token messages never change block ownership",
        breaks.a_final_first_token_frees_the_blocks,
        within(ends=(True,)),
        _LATE,
    ),
    Rule(
        "the client has its first token at once",
        breaks.a_first_token_waits_for_the_kv,
        within(),
        "a first token was kept back",
    ),
    Rule(
        "a retry forces what was emitted",
        breaks.a_retry_forgets_what_was_emitted,
        within("write fails"),
        "not forced",
    ),
    Rule(
        "a sibling's abort never cancels the handoff",
        breaks.a_siblings_abort_ends_the_handoff,
        within("abort a sample", ends=(False, False)),
        "a sibling's abort ended",
    ),
    Rule(
        "an aborted sample gets nothing more",
        breaks.an_aborted_samples_token_is_sent,
        within("abort a sample", ends=(False, False)),
        "aborted sample was emitted",
    ),
    Rule(
        "a receiving request is cancellable",
        breaks.a_receiving_request_cannot_be_aborted,
        within("abort"),
        "an abort changed nothing",
    ),
    Rule(
        "no progress moves on to the next",
        breaks.silence_is_borne_for_ever,
        within("freeze"),
        "nothing but its deadline",
    ),
    Rule(
        "a settle that overtakes its ask leaves a tombstone",
        breaks.no_tombstone_refuses_an_ask,
        within("stream replaced"),
        _LATE,
    ),
    Rule(
        "settle is idempotent: what is unknown is settled",
        breaks.a_settle_of_what_is_unknown_has_no_answer,
        within("abort"),
        "a fence without a fault",
    ),
    Rule(
        "a settle is answered when every write is DONE",
        breaks.a_settle_is_answered_at_once,
        within("abort"),
        _LATE,
    ),
    Rule(
        "FAILED is not settled",
        breaks.a_settle_is_answered_when_nothing_is_pending,
        within("write fails", "slow", max_faults=2),
        _LATE,
    ),
    Rule(
        "FAILED is not DONE",
        breaks.a_failed_write_counts_as_done,
        within("write fails"),
        "blocks that were let go of|released under a write",
    ),
    Rule(
        "an attempt of which a write FAILED is never settled later",
        breaks.a_failed_write_is_forgotten,
        within("write fails", "slow", max_faults=2),
        _LATE,
    ),
    Rule(
        "own blocks are let go of only after DONE",
        breaks.blocks_are_let_go_of_at_a_settle,
        within("abort"),
        "released under a write",
    ),
    Rule(
        "or after the agent was destroyed",
        breaks.blocks_are_let_go_of_after_a_failure,
        within("write fails"),
        "released under a write",
    ),
    Rule(
        "the quarantine begins before its end may be told",
        breaks.a_settle_is_sent_before_the_quarantine_begins,
        within("abort"),
        "is never freed",
    ),
    Rule(
        "a lost lease is no proof",
        breaks.a_lost_lease_ends_a_quarantine,
        within("suspect"),
        _LATE,
    ),
    Rule(
        "a closed socket is no proof",
        breaks.a_closed_socket_ends_a_quarantine,
        within("stream lost"),
        _LATE,
    ),
    Rule(
        "a reaped process is no proof",
        breaks.a_reaped_process_ends_a_quarantine,
        within("kill"),
        _LATE,
    ),
    Rule(
        "time is no proof",
        breaks.time_ends_a_quarantine,
        within("freeze"),
        _LATE,
    ),
    Rule(
        "a fence ends what nobody settles",
        breaks.no_fence_is_made,
        within("kill"),
        "circles",
    ),
    Rule(
        "without memory for fresh blocks, a request waits for a fence",
        breaks.no_fence_is_made,
        within("freeze", num_prefills=2, num_blocks=1),
        "nothing but its deadline",
    ),
    Rule(
        "the fence is over before blocks are free",
        breaks.blocks_are_free_when_a_fence_begins,
        within("freeze"),
        _LATE,
    ),
    Rule(
        "copies under way may land for 20 ms after a fence",
        breaks.blocks_are_free_as_soon_as_fenced,
        within("freeze"),
        _LATE,
    ),
    Rule(
        "a fence ends quarantines of the generation before it only",
        breaks.a_fence_frees_what_came_after_it,
        within("abort", "slow"),
        _LATE,
    ),
    Rule(
        "attempts under way at a fence are retried",
        breaks.attempts_go_on_over_a_fence,
        within("suspect", "slow", num_prefills=2, max_faults=2),
        "wrong KV joined",
    ),
    Rule(
        "a descriptor of an older region generation is used no more",
        breaks.asks_go_out_while_a_fence_is_under_way,
        within("suspect", "slow", num_prefills=2, max_faults=2),
        "wrong KV joined",
    ),
    Rule(
        "the sink stays while a boot that knew it may write",
        breaks.sinks_go_with_the_fence,
        within("freeze"),
        "a sink was unmapped",
    ),
]

PROBED_RULES = [
    Rule(
        "a notification names the writer's boot",
        parts.any_writers_notification_counts,
        probes.only_writes_of_these_boots_and_this_generation_count,
        "counts",
    ),
    Rule(
        "a notification names the target's boot",
        parts.any_targets_notification_counts,
        probes.only_writes_of_these_boots_and_this_generation_count,
        "counts",
    ),
    Rule(
        "a notification names the region's generation",
        parts.any_generations_notification_counts,
        probes.only_writes_of_these_boots_and_this_generation_count,
        "counts",
    ),
    Rule(
        "a notification names the rank pair",
        parts.any_ranks_notification_counts,
        probes.only_writes_of_these_boots_and_this_generation_count,
        "counts",
    ),
    Rule(
        "a router takes the current dispatch only",
        parts.any_dispatchs_tokens_are_taken,
        probes.a_router_takes_each_index_once_of_its_current_dispatch,
        "a twin is heard",
    ),
    Rule(
        "a router takes the next index only",
        parts.known_tokens_are_taken_again,
        probes.a_router_takes_each_index_once_of_its_current_dispatch,
        "repeated or lost",
    ),
    Rule(
        "local fencing counts from a keepalive's sending",
        parts.a_lease_counts_from_its_answer,
        probes.a_lease_is_certain_from_when_it_was_sent_for,
        "may be another's",
    ),
    Rule(
        "reservations are at most 30% of the pool, or one request",
        parts.receptions_take_all,
        probes.receptions_take_their_share_or_one_request,
        "30%",
    ),
    Rule(
        "beyond max_waiting, decode refuses",
        parts.the_queue_has_no_end,
        probes.a_full_queue_refuses,
        "DID NOT RAISE",
    ),
    Rule(
        "prefill allocates a whole prompt or nothing",
        parts.prompts_take_what_there_is,
        probes.prefill_allocates_whole_prompts_or_nothing,
        "empty sequence",  # nobody is left to preempt: each holds a part and waits
    ),
    Rule(
        "all reusable blocks here: no handoff",
        parts.what_is_here_is_asked_for,
        probes.what_is_here_needs_no_handoff,
        "a handoff for what is here",
    ),
    Rule(
        "join when the union over all ranks is complete",
        parts.one_rank_is_enough,
        probes.every_rank_pair_is_awaited,
        "one rank's KV",
    ),
    Rule(
        "the tail of a partial block is zeroed",
        parts.tails_keep_their_bytes,
        probes.partial_tails_are_zeroed,
        "behind the tail",
    ),
    Rule(
        "inbound blocks are invisible until complete",
        parts.inbound_blocks_are_matchable,
        probes.inbound_blocks_are_invisible_until_complete,
        "block 0 is RESERVED",
    ),
    Rule(
        "and are told to the ledger then",
        parts.inbound_blocks_are_matchable,
        probes.joined_blocks_are_told_to_the_cache_then,
        "told before it was complete",
    ),
    Rule(
        "only blocks whose positions are computed are matchable",
        parts.blocks_to_be_computed_are_matchable,
        probes.only_computed_blocks_are_matchable,
        "",
    ),
    Rule(
        "insert if absent",
        parts.present_prefixes_are_inserted_again,
        probes.a_prefix_has_one_block,
        "",
    ),
    Rule(
        "hits are held from the reservation on",
        parts.hits_are_not_held,
        probes.hits_are_held_from_the_reservation_on,
        "",
    ),
    Rule(
        "n > 1: fork at the join",
        parts.one_sample_joins,
        probes.samples_fork_where_the_handoff_joins,
        "sample 1 is wrong",
    ),
    Rule(
        "a receiving sequence is not preemptible",
        parts.receptions_are_preempted,
        probes.receptions_are_not_preempted,
        "",
    ),
    Rule(
        "a block that a launched step may write is not reserved before",
        parts.blocks_are_free_under_a_step,
        probes.blocks_wait_for_the_steps_that_may_write_them,
        "under a step",
    ),
    Rule(
        "at most (n - 1) // block_size blocks are reused",
        parts.whole_prompts_are_reused,
        probes.a_shared_block_is_never_written,
        "a whole prompt was reused",
    ),
    Rule(
        "the engine keeps an abandoned attempt's blocks",
        parts.the_engine_frees_what_is_abandoned,
        probes.an_abandoned_attempts_blocks_are_nobodys,
        "abandoned attempt",
    ),
    Rule(
        "quarantined blocks are not reservable",
        parts.quarantined_blocks_are_reserved_again,
        probes.an_abandoned_attempts_blocks_are_nobodys,
        "",
    ),
    Rule(
        "under pool pressure a fence comes soon",
        parts.the_starving_wait_like_all,
        probes.starving_requests_fence_soon,
        "whole period",
    ),
    Rule(
        "no sink goes while a fence is under way",
        breaks.sinks_go_while_a_fence_is_under_way,
        probes.no_sink_goes_during_a_fence,
        "a sink went",
    ),
    Rule(
        "a fence makes the old address a sink",
        parts.a_fence_moves_nothing,
        probes.a_fence_takes_the_data_and_leaves_a_sink,
        "landed in the pool",
    ),
    Rule(
        "kernels re-read the base each step",
        parts.steps_keep_the_base,
        probes.steps_read_the_base_each_time,
        "",
    ),
    Rule(
        "no outbound transfer is in flight at a fence",
        parts.a_fence_overtakes_outbound_writes,
        probes.a_fence_waits_for_outbound_writes,
        "zeros under",
    ),
    Rule(
        "a stale region generation is refused",
        parts.old_descriptors_are_written_to,
        probes.stale_generations_are_refused,
        "old descriptor",
    ),
]

RULES = [*MODEL_RULES, *PROBED_RULES]
