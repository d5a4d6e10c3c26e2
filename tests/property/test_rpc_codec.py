"""Every message survives the wire, alone and joined with others in one frame."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from control_plane.rpc import codec
from core.ids import RequestId
from core.lifetime import PrefillDecision, RequestTrace
from core.messages import AbortRequest, PathReport, RequestRefused, TokenBatch, WorkerLoad
from core.worker_record import Hello
from tests.message_strategies import structs

ANY_MESSAGE = st.one_of(*[structs(struct) for struct in get_args(codec.AnyMessage)])
FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("struct", get_args(codec.AnyMessage), ids=lambda struct: struct.__name__)
@given(data=st.data())
@FEW
def test_a_message_survives(struct: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(structs(struct))
    frame = codec.Frame.FromString(codec.encode(message))
    assert codec.messages_of(frame) == [message]


@given(st.lists(ANY_MESSAGE, max_size=6))
@FEW
def test_joined_frames_are_one_frame_in_order(messages: list[Any]) -> None:
    joined = b"".join(codec.encode(message) for message in messages)
    assert codec.messages_of(codec.Frame.FromString(joined)) == messages


@given(structs(Hello))
@FEW
def test_a_hello_survives(hello: Hello) -> None:
    assert codec.hello_of(codec.Frame.FromString(codec.encode_hello(hello))) == hello


def test_a_message_of_an_unknown_kind_is_an_error() -> None:
    unknown_field_in_a_message = bytes([0x12, 0x03, 0xFA, 0x7F, 0x00])
    frame = codec.Frame.FromString(unknown_field_in_a_message)
    with pytest.raises(ValueError, match="kind that this protocol version does not know"):
        codec.messages_of(frame)


def test_a_batch_that_announces_other_counts_is_an_error() -> None:
    wire = codec.Frame(messages=[{"token_batch": {"request_ids": ["a"], "token_ids": [1, 2]}}])
    with pytest.raises(ValueError, match="2 entries announces 1"):
        codec.messages_of(wire)


def test_an_empty_batch_survives() -> None:
    batch = TokenBatch(())
    assert codec.messages_of(codec.Frame.FromString(codec.encode(batch))) == [batch]


def test_a_decision_is_one_of_those_that_both_sides_know() -> None:
    report = PathReport(RequestId("r"), 1, RequestTrace("d0", PrefillDecision.LOCAL))
    frame = codec.Frame.FromString(codec.encode(report))
    (read,) = codec.messages_of(frame)
    assert isinstance(read, PathReport)
    assert read.trace.decision is PrefillDecision.LOCAL
    frame.messages[0].path_report.trace.decision = "elsewhere"
    with pytest.raises(ValueError, match="elsewhere"):
        codec.messages_of(frame)


def test_a_field_out_of_range_is_the_senders_error() -> None:
    with pytest.raises(ValueError, match="range"):
        codec.encode(AbortRequest(RequestId("r"), dispatch=-1))


def test_a_load_of_nothing_is_no_absent_load() -> None:
    refusal = RequestRefused(RequestId("a"), 1, "overloaded", "busy", load=WorkerLoad())
    frame = codec.Frame.FromString(codec.encode(refusal))
    assert codec.messages_of(frame) == [refusal]
