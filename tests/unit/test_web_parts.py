"""The small parts of the HTTP side, without HTTP."""

from __future__ import annotations

import asyncio

import pytest

from core.clock import ManualClock
from core.ids import Attempt, HandoffId, client_id_of
from router.entropy import Entropy
from router.fast_histogram import FastHistogram
from router.web.asgi import Message
from router.web.event_stream import EventStream
from router.web.request_ids import RequestNames, accept_or_make

pytestmark = pytest.mark.anyio


class Sent:
    """An ASGI `send` that keeps what it was given."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def __call__(self, message: Message) -> None:
        self.messages.append(message)

    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages if "body" in message]


async def comments_of(stream: EventStream) -> None:
    """Let the keep-alive look once; it would sleep next."""
    stream.keep_alive()
    for _ in range(3):
        await asyncio.sleep(0)
    stream.close()


async def test_nothing_is_sent_before_the_first_event_or_silence() -> None:
    clock, sent = ManualClock(), Sent()
    stream = EventStream(sent, clock, 15.0)
    clock.advance(14.9)
    await comments_of(stream)
    assert sent.messages == []
    assert not stream.has_started
    clock.advance(0.1)
    await comments_of(stream)
    assert sent.messages[0]["status"] == 200
    assert all(body.startswith(b":") and body.endswith(b"\n\n") for body in sent.bodies())


async def test_a_client_that_does_not_read_gets_one_comment_at_a_time() -> None:
    clock, asked = ManualClock(), list[Message]()

    async def never_taken(message: Message) -> None:
        asked.append(message)
        await asyncio.Event().wait()

    stream = EventStream(never_taken, clock, 15.0)
    for _ in range(3):
        clock.advance(15.0)
        stream.keep_alive()
        await asyncio.sleep(0)
    stream.close()
    await asyncio.sleep(0)
    assert len(asked) == 1


async def test_an_event_breaks_the_silence() -> None:
    clock, sent = ManualClock(), Sent()
    stream = EventStream(sent, clock, 15.0)
    clock.advance(15.0)
    await stream.write(b"data: x\n\n")
    await comments_of(stream)
    await stream.write(b"data: y\n\n", last=True)
    assert sent.bodies() == [b"data: x\n\n", b"data: y\n\n"]
    assert [message.get("more_body") for message in sent.messages] == [None, True, False]


async def test_no_comment_follows_the_end_however_long_a_client_takes_to_read_it() -> None:
    clock, sent = ManualClock(), Sent()
    stream = EventStream(sent, clock, 15.0)
    await stream.write(b"data: x\n\n")
    clock.advance(15.0)
    stream.keep_alive()  # a comment is about to be sent
    await stream.write(b"data: y\n\n", last=True)
    for _ in range(3):
        await asyncio.sleep(0)
    assert sent.bodies() == [b"data: x\n\n", b"data: y\n\n"]


def test_names_are_never_used_twice_and_hold_the_clients() -> None:
    lives = [RequestNames() for _ in range(3)]  # two restarts
    made = [names.new(client) for names in lives for client in ("a", "b.1", "a", "a")]
    assert len(set(made)) == len(made)
    assert [client_id_of(name) for name in made] == ["a", "b.1", "a", "a"] * 3
    assert client_id_of(str(HandoffId(made[1], Attempt(7, 2)))) == "b.1"


@pytest.mark.parametrize("given", [None, "", "a b", "a\n", "ä", "x" * 129])
def test_unsafe_names_are_replaced(given: str | None) -> None:
    entropy = Entropy()
    made = accept_or_make(given, entropy)
    assert len(made) == 32
    assert made != accept_or_make(given, entropy)


def test_entropy_goes_on_after_its_first_piece() -> None:
    entropy = Entropy()
    drawn = [entropy.bits64() for _ in range(2000)]  # of 512 a piece
    assert len(set(drawn)) == len(drawn)
    assert max(drawn) > 1 << 63 > min(drawn)
    numbers = [entropy.random() for _ in range(2000)]
    assert 0 <= min(numbers) < 0.01
    assert 0.99 < max(numbers) < 1
    assert len(entropy.take(4096)) == 4096


def test_a_value_on_a_bound_belongs_below_it() -> None:
    histogram = FastHistogram(("a", "b"), "text", ("label",), (1.0, 2.0))
    held = histogram.labelled(("x",))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        held.observe(value)
    assert histogram.labelled(("x",)) is held
    metrics = list(histogram.collect())
    assert [metric.name for metric in metrics] == ["a", "b"]
    values = {(sample.name, sample.labels.get("le")): sample.value for sample in metrics[0].samples}
    assert values == {
        ("a_bucket", "1.0"): 2.0,
        ("a_bucket", "2.0"): 4.0,
        ("a_bucket", "+Inf"): 5.0,
        ("a_count", None): 5.0,
        ("a_sum", None): 8.0,
    }
