"""When an end of a stream beats, and when it answers."""

from __future__ import annotations

import math

from control_plane.rpc.beats import Beats
from core.shared_ticks import last_multiple, next_multiple, sleep_s


def beats(
    *, answers: bool = False, heartbeat_s: float = 0.5, suspect_s: float = 2.0, now: float = 10.3
) -> Beats:
    return Beats(answers=answers, heartbeat_s=heartbeat_s, suspect_s=suspect_s, now=now)


def test_multiples_come_after_now() -> None:
    assert next_multiple(0.5, 10.3) == 10.5
    assert next_multiple(0.5, 10.5) == 11.0
    assert next_multiple(5.0, 0.0) == 5.0
    assert last_multiple(1.0, 10.3) == 10.0
    assert last_multiple(1.0, 10.0) == 10.0


def test_nobody_wakes_before_the_time() -> None:
    assert sleep_s(10.5, 10.3) > 10.5 - 10.3
    assert 0.0 < sleep_s(10.3, 10.5) < 0.01


def test_an_idle_end_beats_once_a_period_at_times_that_all_streams_share() -> None:
    end = beats()
    due: list[float] = []
    for _ in range(3):
        due.append(end.due_at)
        assert not end.take_due(end.due_at - 0.01), "not before its time"
        assert end.take_due(due[-1])
        end.sent(due[-1])
    assert due == [11.0, 12.0, 13.0]
    assert beats(now=10.9).due_at == 11.0


def test_what_just_left_stands_for_a_heartbeat() -> None:
    end = beats()
    end.sent(10.8)
    assert not end.take_due(11.0)
    assert end.due_at == 12.0
    end.sent(11.7)
    assert end.take_due(12.0), "or the peer would hear nothing for 1.3 s"


def test_a_period_leaves_suspicion_room_for_a_late_heartbeat() -> None:
    assert beats(suspect_s=60.0).due_at == 11.0
    assert beats(heartbeat_s=0.5, suspect_s=1.5, now=9.1).due_at == 9.75
    assert beats(heartbeat_s=0.5, suspect_s=0.6).due_at == 10.5


def test_an_opener_answers_and_has_no_pace_of_its_own() -> None:
    end = beats(answers=True, now=10.0)
    assert end.due_at == math.inf
    assert not end.take_due(1e9)
    assert not end.is_answer_due(10.4), "it said hello just now"
    assert end.is_answer_due(10.5)
    end.sent(10.5)
    assert not end.is_answer_due(10.6), "tokens are not answered one by one"
    assert not beats(now=10.0).is_answer_due(99.0), "or both would answer for ever"
