"""core.lifetime: durations are differences of first stamps, and missing ones are None."""

from __future__ import annotations

from core.lifetime import Duration, Lifetime, Stamp


def test_duration_is_the_difference_of_its_stamps() -> None:
    lifetime = Lifetime()
    lifetime.stamp(Stamp.ARRIVED, 10.0)
    lifetime.stamp(Stamp.FIRST_TOKEN, 10.25)
    assert lifetime.seconds(Duration.TTFT) == 0.25
    assert lifetime.at(Stamp.ARRIVED) == 10.0


def test_only_the_first_of_equal_stamps_counts() -> None:
    lifetime = Lifetime()
    lifetime.stamp(Stamp.ARRIVED, 1.0)
    lifetime.stamp(Stamp.FIRST_TOKEN, 2.0)
    lifetime.stamp(Stamp.FIRST_TOKEN, 9.0)
    assert lifetime.seconds(Duration.TTFT) == 1.0


def test_duration_without_both_stamps_is_none() -> None:
    lifetime = Lifetime()
    assert lifetime.seconds(Duration.TTFT) is None
    lifetime.stamp(Stamp.ARRIVED, 1.0)
    assert lifetime.seconds(Duration.TTFT) is None
    assert lifetime.at(Stamp.FIRST_TOKEN) is None


def test_kv_that_came_before_the_first_token_exposes_nothing() -> None:
    lifetime = Lifetime()
    lifetime.stamp(Stamp.KV_COMPLETE, 1.0)
    lifetime.stamp(Stamp.FIRST_TOKEN_RECEIVED, 1.5)
    assert lifetime.seconds(Duration.EXPOSED_TRANSFER) == 0.0


def test_no_duration_crosses_processes() -> None:
    processes = (
        {Stamp.ARRIVED, Stamp.DISPATCHED, Stamp.FIRST_TOKEN, Stamp.FINISHED},
        {
            Stamp.RECEIVED,
            Stamp.RESERVED,
            Stamp.ASKED,
            Stamp.FIRST_TOKEN_RECEIVED,
            Stamp.KV_COMPLETE,
            Stamp.JOINED,
        },
        {Stamp.ASK_RECEIVED, Stamp.PREFILL_STARTED, Stamp.PREFILL_FINISHED},
    )
    for duration in Duration:
        assert any(set(duration.value) <= process for process in processes), duration
