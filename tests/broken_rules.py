"""handoff.md's rules, each broken once, for whoever must find the violation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests import focused_scenarios, leaving_breaks, rule_breaks
from tests.focused_scenarios import Focus, as_drawn
from tests.rule_breaks import Patch


class BrokenRule(NamedTuple):
    """One rule.

    Attributes:
        rule: as handoff.md has it.
        breaks: does away with it.
        violated: the invariants by which that may show.
        seed: finds it; others are tried when it no longer does.
    """

    rule: str
    breaks: Callable[[Patch], None]
    violated: frozenset[str]
    seed: int
    focus: Focus = as_drawn


_LATE = frozenset({"writable", "radix", "oracle", "tail"})
_ENDLESS = frozenset({"stuck", "refused"})


def _rule(
    rule: str,
    breaks: Callable[[Patch], None],
    violated: frozenset[str],
    *,
    seed: int = 0,
    focus: Focus = as_drawn,
) -> BrokenRule:
    return BrokenRule(rule, breaks, violated, seed, focus)


BROKEN_RULES = [
    _rule(
        "every attempt has fresh blocks; those of an abandoned one are quarantined",
        rule_breaks.no_quarantine,
        _LATE,
        seed=8,
    ),
    _rule(
        "a closed socket ends no quarantine",
        rule_breaks.lost_connection_ends_quarantine,
        _LATE,
        seed=52,
    ),
    _rule(
        "a lost lease or missing heartbeats end no quarantine",
        rule_breaks.suspicion_ends_quarantine,
        _LATE,
        focus=focused_scenarios.frozen_writers,
        seed=1,
    ),
    _rule(
        "a writer's death ends no quarantine: its buffers land yet",
        rule_breaks.restart_ends_quarantine,
        _LATE,
        focus=focused_scenarios.restarted_writers,
    ),
    _rule(
        "a settle is answered only when every handle is DONE",
        rule_breaks.settled_before_done,
        _LATE,
        seed=26,
    ),
    _rule(
        "FAILED is not settled",
        rule_breaks.failed_is_settled,
        _LATE | {"source"},
        seed=14,
    ),
    _rule(
        "destroying the agent settles nothing",
        rule_breaks.destroyed_agent_settles,
        _LATE,
        focus=focused_scenarios.frozen_targets,
        seed=1,
    ),
    _rule(
        "prefill lets go of its blocks only after DONE",
        rule_breaks.sources_freed_before_done,
        frozenset({"source", "tail"}),
    ),
    _rule(
        "a settle leaves a tombstone: it may overtake the ask",
        rule_breaks.no_tombstone,
        _LATE,
        focus=focused_scenarios.asks_on_lost_connections,
        seed=32,
    ),
    _rule(
        "a first token that ends the request frees no block in flight",
        rule_breaks.first_token_frees_blocks,
        _LATE,
        seed=5,
    ),
    _rule(
        "an abort quarantines what may still be written",
        rule_breaks.abort_forgets_blocks,
        _LATE,
    ),
    _rule(
        "an abort asks the writer to settle",
        rule_breaks.abort_does_not_settle,
        frozenset({"fenced", "stuck"}),
        seed=2,
    ),
    _rule(
        "a fence makes the address that peers know a sink",
        rule_breaks.fence_does_not_move,
        _LATE,
        seed=40,
    ),
    _rule(
        "attempts whose writes a fence loses are retried",
        rule_breaks.fence_retries_nobody,
        _LATE | {"stuck"},
        seed=10,
    ),
    _rule(
        "sinks stay mapped until every boot that held the address is gone",
        rule_breaks.sinks_go_at_once,
        frozenset({"writable"}),
        seed=1,
    ),
    _rule(
        "decode joins when the union is complete, whatever the order",
        rule_breaks.join_on_last_notification,
        _LATE | {"crash"},
        seed=5,
    ),
    _rule(
        "a notification counts for its attempt, boots and generation only",
        rule_breaks.notification_of_any_attempt,
        _LATE | {"crash"},
        seed=71,
    ),
    _rule(
        "inbound blocks are invisible to the radix tree until complete",
        rule_breaks.inbound_blocks_matchable,
        frozenset({"radix", "accounting"}),
    ),
    _rule(
        "hits are held from the reservation on",
        rule_breaks.hits_not_held,
        frozenset({"accounting", "crash", "radix", "owned"}),
        seed=1,
    ),
    _rule(
        "at most (n - 1) // block_size blocks of a prompt are reused",
        rule_breaks.whole_prompt_reused,
        _ENDLESS | {"crash", "oracle", "accounting"},
        seed=21,
    ),
    _rule(
        "the tail of a partial block is zeroed at allocation",
        rule_breaks.tail_not_zeroed,
        frozenset({"tail"}),
        seed=1,
    ),
    _rule(
        "a block that a launched step may write is reservable after that step",
        rule_breaks.freed_under_a_step,
        frozenset({"owned", "accounting"}),
        seed=6,
    ),
    _rule(
        "a retry forces what was emitted; nobody samples that position again",
        rule_breaks.retry_samples_again,
        frozenset({"contiguous", "crash"}),
        seed=1,
    ),
    _rule(
        "the router fixes the seed at admission",
        rule_breaks.retry_redraws_seed,
        frozenset({"oracle", "radix"}),
        seed=1,
    ),
    _rule(
        "a receiver takes only the current attempt and the next index",
        rule_breaks.any_token_taken,
        frozenset({"contiguous", "oracle", "crash"}),
        focus=focused_scenarios.frozen_twins,
        seed=78,
    ),
    _rule(
        "a sibling's abort never cancels the handoff",
        rule_breaks.sibling_cancels,
        _ENDLESS | {"crash", "contiguous"},
        seed=75,
    ),
    _rule(
        "a try without progress ends",
        rule_breaks.no_progress_is_borne,
        _ENDLESS,
        seed=3,
    ),
    _rule(
        "blocks under a stuck write are let go of with the agent",
        rule_breaks.agent_never_renewed,
        frozenset({"stuck"}),
        seed=1,
    ),
    _rule(
        "a dead decode worker's requests go elsewhere",
        rule_breaks.dead_worker_is_waited_for,
        _ENDLESS,
        seed=27,
    ),
    _rule(
        "a router with an old view gets a retriable wrong_role",
        leaving_breaks.wrong_role_is_final,
        frozenset({"refused"}),
        seed=18,
    ),
    _rule(
        "what a worker that drains does not take is taken elsewhere",
        leaving_breaks.draining_is_final,
        frozenset({"refused"}),
        seed=124,
    ),
    _rule(
        "what is left when a drain's time is over is failed over",
        leaving_breaks.what_is_left_fails,
        frozenset({"refused"}),
        seed=129,
    ),
    _rule(
        "a worker leaves when all it ran has been finished or moved",
        leaving_breaks.leaves_at_once,
        frozenset({"left"}),
        seed=1,
    ),
    _rule(
        "a worker that leaves waits for what may land yet",
        leaving_breaks.leaves_when_nothing_runs,
        frozenset({"left"}),
        seed=31,
    ),
    _rule(
        "a region moves only while no write reads it",
        leaving_breaks.moves_under_own_writes,
        frozenset({"radix", "oracle"}),
        seed=72,
        focus=focused_scenarios.moves_during_fences,
    ),
]
