"""Deliveries that are read as columns, and the messages that are made of them as they are taken."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.model import ROW
from broker.rpc.encode import encode_batch_response
from postdate._deliveries import Deliveries, read_response
from postdate._held import Ready
from postdate.message import Message
from postdate_api.v1 import consumer_pb2, message_pb2

HOLDER: Any = None

deliveries = st.builds(
    consumer_pb2.Delivery,
    id=st.builds(message_pb2.MessageId, ledger_id=st.integers(1, 2**63), entry_id=st.integers(0, 2**32)),
    message=st.builds(
        message_pb2.Message,
        payload=st.binary(max_size=20),
        key=st.text(max_size=3),
        properties=st.dictionaries(st.text(max_size=2), st.text(max_size=2), max_size=2),
        deliver_after_ms=st.integers(0, 2**40),
        ttl_ms=st.integers(0, 2**30),
        event_time_ms=st.integers(0, 2**40),
        traceparent=st.text(max_size=3),
    ),
    publish_time_ms=st.integers(0, 2**40),
    deliver_at_ms=st.integers(0, 2**40),
    delivery_attempt=st.integers(1, 2**32 - 1),
)


def frame(listed: Sequence[consumer_pb2.Delivery]) -> bytes:
    batch = consumer_pb2.Batch(deliveries=listed)
    return consumer_pb2.SubscribeResponse(batch=batch).SerializeToString()


def read(raw: bytes) -> Deliveries:
    found = read_response(raw)
    assert isinstance(found, Deliveries)
    return found


def shown(message: Message) -> tuple[Any, ...]:
    return (
        *(message.id, message.payload, message.key, dict(message.properties), message.ttl),
        *(message.traceparent, message.attempt, message.publish_time, message.deliver_at, message.event_time),
    )


def delivery_of(ledger_id: int, entry_id: int, payload: bytes = b"x") -> consumer_pb2.Delivery:
    return consumer_pb2.Delivery(
        id=message_pb2.MessageId(ledger_id=ledger_id, entry_id=entry_id),
        message=message_pb2.Message(payload=payload),
        delivery_attempt=1,
    )


@pytest.mark.slow
@given(st.lists(deliveries, max_size=8))
def test_columns_and_the_parser_of_the_api_give_the_same(listed: list[consumer_pb2.Delivery]) -> None:
    ours, theirs = read(frame(listed)), Deliveries(listed)
    assert len(ours) == len(listed)
    for place in range(len(listed)):
        message = Message(ours, place, HOLDER)
        assert shown(message) == shown(Message(theirs, place, HOLDER))
        assert message.id == (listed[place].id.ledger_id, listed[place].id.entry_id)
        assert message.payload == listed[place].message.payload
        assert message.key == listed[place].message.key


@pytest.mark.parametrize(
    ("listed", "is_typed"),
    [
        ([(7, 1, b"a"), (8, 2, b"b")], False),
        ([(7, 1, b""), (8, 2, b"b")], True),  # one field less than there are messages
        ([(7, 0, b"a"), (7, 1, b"b")], True),
    ],
)
def test_what_all_have_is_read_from_columns_alone(listed: list[Any], is_typed: bool) -> None:
    found = read(frame([delivery_of(*each) for each in listed]))
    for place, (ledger_id, entry_id, payload) in enumerate(listed):
        message = Message(found, place, HOLDER)
        assert (message.id, message.payload) == ((ledger_id, entry_id), payload)
    assert (found._typed is not None) == is_typed


def test_a_frame_as_the_broker_writes_it_is_read_from_columns() -> None:
    count = 40
    typed = [delivery_of(3, entry_id, b"%d" % entry_id) for entry_id in range(count)]
    frames = [
        b"\x12" + bytes((each.message.ByteSize(),)) + each.message.SerializeToString() for each in typed
    ]
    rows = np.zeros(count, dtype=ROW)
    rows["length"] = list(map(len, frames))
    rows["publish_time_ms"] = 1_700_000_000_000
    batch: Any = _Batch(rows, frames)
    found = read(encode_batch_response(batch))
    assert (found.ledger_ids, found.entry_ids) == ([3] * count, list(range(count)))
    assert [found.payload(place) for place in range(count)] == [b"%d" % place for place in range(count)]
    assert found._typed is None
    message = Message(found, 39, HOLDER)
    assert message.publish_time == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert message.deliver_at - message.publish_time == timedelta(milliseconds=5)


class _Batch:
    """A batch as the broker hands it out."""

    def __init__(self, rows: Any, frames: list[bytes]) -> None:
        count = len(frames)
        self.rows, self.frames = rows, frames
        self.ledger_ids = np.full(count, 3)
        self.entry_ids = np.arange(count)
        self.deliver_at_ms = rows["publish_time_ms"].astype(np.int64) + 5
        self.attempts = np.ones(count, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.frames)


def test_what_was_read_whole_is_not_kept_on_the_wire_form_too() -> None:
    tracemalloc.start()
    try:
        found = read(frame([delivery_of(7, entry_id, bytes(1 << 18)) for entry_id in (1, 2)]))
        before = tracemalloc.get_traced_memory()[0]
        message = Message(found, 1, HOLDER)
        assert message.key == ""
        assert before - tracemalloc.get_traced_memory()[0] > 1 << 18
        assert found._payloads is None  # nor the columns
    finally:
        tracemalloc.stop()
    assert message.payload == bytes(1 << 18)


def test_threads_may_ask_at_once() -> None:
    found = read(frame([delivery_of(7, entry_id) for entry_id in (1, 2)]))
    parse = consumer_pb2.SubscribeResponse.FromString
    calls: list[int] = []

    def interrupted(raw: bytes) -> Any:
        calls.append(len(raw))
        if len(calls) == 1:
            assert found.typed[1].id.entry_id == 2  # another thread's turn
        return parse(raw)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consumer_pb2.SubscribeResponse, "FromString", staticmethod(interrupted))
        assert found.typed[0].id.entry_id == 1
    assert calls[0] == calls[1]


def test_a_batch_behind_a_field_that_nobody_knows_is_read_too() -> None:
    raw = b"\xf8\x06\x2a" + frame([delivery_of(7, 1)])  # field 111
    assert read(raw).entry_ids == [1]


def test_other_frames_are_read_as_before() -> None:
    confirmed = consumer_pb2.SubscribeResponse(confirmed=consumer_pb2.Confirmed(request_id=3))
    assert read_response(confirmed.SerializeToString()) == confirmed


# -- what waits to be taken ---------------------------------------------------------------------------------------------


def ready_with(*sizes: int) -> Ready:
    """Messages 0, 1, 2 and so on, that came so many at a time."""
    ready, first = Ready(), 0
    for size in sizes:
        listed = [delivery_of(7, entry_id) for entry_id in range(first, first + size)]
        ready.add(Deliveries(listed), HOLDER, 10.0 + first)
        first += size
    return ready


def numbers(messages: Sequence[Message]) -> list[int]:
    return [message.id.entry_id for message in messages]


def test_messages_are_taken_in_order_over_the_deliveries_that_brought_them() -> None:
    ready = ready_with(3, 1, 4)
    assert len(ready) == 8
    assert numbers(ready.take(2)) == [0, 1]
    assert next(ready.current).id.entry_id == 2
    assert numbers(ready.take(3)) == [3, 4, 5]
    assert len(ready) == 2
    assert numbers(ready.take(100)) == [6, 7]
    assert not ready
    assert ready.take(1) == []


def test_messages_that_were_made_wait_on_before_what_comes_later() -> None:
    ready = ready_with(2, 2)
    ready.take(1)
    made = ready.made()
    assert numbers(made) == [1, 2, 3]
    assert [message.held_until for message in made] == [10.0, 12.0, 12.0]
    ready.add(Deliveries([delivery_of(7, 4)]), HOLDER, 0.0)
    taken = ready.take(2)
    assert taken[0] is made[0]  # what was changed of it counts
    assert taken[1] is made[1]
    assert numbers(list(ready)) == [3, 4]
    ready.replace([made[2]])
    assert numbers(ready.take(9)) == [3]


def test_nothing_waits_once_it_was_cleared() -> None:
    ready = ready_with(3, 3)
    ready.take(1)
    ready.clear()
    assert len(ready) == 0
    assert next(ready.current, None) is None
