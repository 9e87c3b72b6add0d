"""Lists of messages as the SDK writes them, against what protobuf writes for the same messages."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from postdate import OutgoingMessage
from postdate._batch import MESSAGE_OVERHEAD_BYTES, Destination, ListBatch, SharedBatch, list_batches
from postdate._encode import _tags, encode_message
from postdate._numbering import SEQUENCE_ID_MAX, Numbering
from postdate_api.v1 import message_pb2, producer_pb2

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DURATION_MS_MAX = 2**53 - 1
PAYLOADS = st.binary(max_size=300) | st.integers(0, 20_000).map(bytes)
OF_ONE_LENGTH = st.integers(0, 300).flatmap(
    lambda size: st.lists(st.binary(min_size=size, max_size=size), min_size=2, max_size=8)
)
TEXTS = st.text(max_size=200) | st.sampled_from(["", "k" * 127, "k" * 128, "ä" * 8_192])
MOMENTS = st.datetimes(timezones=st.just(UTC)) | st.sampled_from([EPOCH, EPOCH - timedelta(milliseconds=1)])
# At each width of a varint, and at the bounds of the field.
DURATIONS_MS = st.integers(0, DURATION_MS_MAX) | st.sampled_from(
    [0, DURATION_MS_MAX, *(2 ** (7 * width) + step for width in range(1, 8) for step in (-1, 0))]
)
DURATIONS = DURATIONS_MS.map(lambda ms: timedelta(milliseconds=ms)) | st.timedeltas(
    timedelta(0), timedelta(days=10_000)
)
SEQUENCE_IDS = st.integers(1, SEQUENCE_ID_MAX) | st.sampled_from([1, 127, 128, 2**63, SEQUENCE_ID_MAX])
TRACEPARENTS = st.sampled_from(["", "00-1234-5678-01"])


@st.composite
def outgoing_messages(draw: st.DrawFn) -> OutgoingMessage:
    due = draw(st.sampled_from(["", "deliver_at", "deliver_after"]))
    return OutgoingMessage(
        draw(PAYLOADS),
        key=draw(TEXTS),
        properties=draw(st.none() | st.dictionaries(TEXTS, TEXTS, max_size=3)),
        deliver_at=draw(MOMENTS) if due == "deliver_at" else None,
        deliver_after=draw(DURATIONS) if due == "deliver_after" else None,
        schedule_key=draw(TEXTS),
        ttl=draw(st.none() | DURATIONS.filter(bool)),
        event_time=draw(st.none() | MOMENTS),
        traceparent=draw(TRACEPARENTS),
    )


@st.composite
def lists(draw: st.DrawFn) -> list[OutgoingMessage]:
    """Lists whose fields are set in none, in some, or in all of the messages."""
    messages = draw(st.lists(outgoing_messages(), min_size=1, max_size=8))
    for field in draw(st.sets(st.sampled_from(["key", "properties", "ttl", "event_time", "traceparent"]))):
        value = getattr(messages[0], field)
        for message in messages:
            setattr(message, field, value)
    if draw(st.booleans()):
        for message in messages:
            message.deliver_at, message.deliver_after = None, draw(DURATIONS)
    return messages


def ceil_ms(span: timedelta) -> int:
    return -(-span // timedelta(milliseconds=1))


def typed(
    message: OutgoingMessage | bytes,
    *,
    sequence_id: int | None = None,
    traceparent: str = "",
    deliver_at: datetime | None = None,
    deliver_after: timedelta | None = None,
) -> message_pb2.Message:
    """The message as protobuf knows it."""
    if not isinstance(message, OutgoingMessage):
        message = OutgoingMessage(message, deliver_at=deliver_at, deliver_after=deliver_after)
    return message_pb2.Message(
        payload=message.payload,
        key=message.key,
        properties=message.properties or {},
        deliver_at_ms=0 if message.deliver_at is None else ceil_ms(message.deliver_at - EPOCH),
        deliver_after_ms=0 if message.deliver_after is None else ceil_ms(message.deliver_after),
        schedule_key=message.schedule_key,
        ttl_ms=0 if message.ttl is None else ceil_ms(message.ttl),
        sequence_id=sequence_id or 0,
        event_time_ms=0 if message.event_time is None else ceil_ms(message.event_time - EPOCH),
        traceparent=message.traceparent or traceparent,
    )


def batched(messages: Any, **options: Any) -> list[ListBatch]:
    defaults: dict[str, Any] = {
        "deliver_at": None,
        "deliver_after": None,
        "numbering": None,
        "traceparent": "",
        "messages_max": 1_000,
        "bytes_max": 2**20,
    }
    return list_batches(messages, Destination("t", "", replace=False), **{**defaults, **options})


def check_same(encoded: bytes, messages: list[message_pb2.Message], **fields: Any) -> None:
    request = producer_pb2.ProduceRequest(topic="t", messages=messages, join_answers=True, **fields)
    assert producer_pb2.ProduceRequest.FromString(encoded) == request
    if all(len(message.properties) < 2 for message in messages):  # of a map protobuf promises no order
        assert encoded == request.SerializeToString()


@pytest.mark.slow
@given(messages=lists(), traceparent=TRACEPARENTS)
async def test_a_list_of_messages_is_written_as_protobuf_does(
    messages: list[OutgoingMessage], traceparent: str
):
    (batch,) = batched(messages, traceparent=traceparent)
    check_same(batch.encode(), [typed(message, traceparent=traceparent) for message in messages])


@given(
    payloads=st.lists(PAYLOADS, min_size=1, max_size=8) | OF_ONE_LENGTH,
    moment=st.none() | MOMENTS,
    span=st.none() | DURATIONS,
    traceparent=TRACEPARENTS,
)
async def test_a_list_of_payloads_is_written_as_protobuf_does(
    payloads: list[bytes], moment: datetime | None, span: timedelta | None, traceparent: str
):
    times: dict[str, Any] = {"deliver_at": moment, "deliver_after": None if moment is not None else span}
    (batch,) = batched(payloads, traceparent=traceparent, **times)
    check_same(batch.encode(), [typed(each, traceparent=traceparent, **times) for each in payloads])


class ClocksSetBack(tzinfo):
    """A zone on the night in which its clocks are set back by an hour."""

    def utcoffset(self, moment: datetime | None) -> timedelta:
        return timedelta(hours=1 if moment is not None and moment.fold else 2)

    def dst(self, moment: datetime | None) -> timedelta:
        return self.utcoffset(moment) - timedelta(hours=1)

    def tzname(self, moment: datetime | None) -> str:
        return "winter" if moment is not None and moment.fold else "summer"


@pytest.mark.parametrize("field", ["deliver_at", "event_time"])
async def test_moments_that_are_equal_and_not_the_same_are_told_apart(field: str):
    """A local time that comes twice, as clocks are set back, compares equal to itself an hour later."""
    early = datetime(2030, 10, 27, 2, 30, tzinfo=ClocksSetBack())
    late = early.replace(fold=1)
    assert early == late
    assert late.astimezone(UTC) - early.astimezone(UTC) == timedelta(hours=1)
    given: list[dict[str, Any]] = [{field: moment} for moment in (early, late, early)]
    messages = [OutgoingMessage(b"x", **fields) for fields in given]
    (batch,) = batched(messages)
    check_same(batch.encode(), [typed(message) for message in messages])


@pytest.mark.slow
@given(message=lists(), payload=PAYLOADS, span=DURATIONS)
async def test_payloads_among_messages_have_the_times_of_the_list(
    message: list[OutgoingMessage], payload: bytes, span: timedelta
):
    mixed: list[OutgoingMessage | bytes] = [payload, *message, payload]
    (batch,) = batched(mixed, deliver_after=span)
    check_same(batch.encode(), [typed(each, deliver_after=span) for each in mixed])


@pytest.mark.slow
@given(message=outgoing_messages(), sequence_id=st.none() | SEQUENCE_IDS)
async def test_a_message_alone_is_written_as_protobuf_does(message: OutgoingMessage, sequence_id: int | None):
    encoded = encode_message(
        message.payload,
        key=message.key,
        properties=message.properties,
        deliver_at=message.deliver_at,
        deliver_after=message.deliver_after,
        schedule_key=message.schedule_key,
        ttl=message.ttl,
        sequence_id=sequence_id,
        event_time=message.event_time,
        traceparent=message.traceparent,
    )
    batch = SharedBatch(Destination("t", "p", replace=True))
    batch.request_id = 300
    for _ in range(2):
        batch.messages.append(encoded)
    same = [typed(message, sequence_id=sequence_id)] * 2
    check_same(batch.encode(), same, producer_name="p", request_id=300, replace=True)


@given(
    start=st.integers(0, 300) | st.integers(2**60, 2**61), count=st.integers(1, 400), as_bytes=st.booleans()
)
@example(start=126, count=2, as_bytes=True)
@example(start=127, count=129, as_bytes=True)
async def test_numbers_of_the_producers_own_rise_through_a_list(start: int, count: int, as_bytes: bool):
    numbering = Numbering(start)
    messages = [b"x" if as_bytes else OutgoingMessage(b"x", traceparent="t")] * count
    (batch,) = batched(messages, numbering=numbering)
    numbers = range(start + 1, start + 1 + count)
    check_same(batch.encode(), [typed(messages[0], sequence_id=number) for number in numbers])
    assert numbering.number(None) == start + count + 1


NEAR_NUMBERS = st.integers(2**40, 2**40 + 6)  # often with as many between the first and the last as there are


@given(
    numbers=st.lists(SEQUENCE_IDS, min_size=1, max_size=6) | st.lists(NEAR_NUMBERS, min_size=1, max_size=6)
)
@example(numbers=[200, 205, 202])
async def test_numbers_of_the_caller_are_written_as_given(numbers: list[int]):
    messages = [OutgoingMessage(b"x", sequence_id=number) for number in numbers]
    (batch,) = batched(messages, numbering=Numbering(1))
    check_same(batch.encode(), [typed(b"x", sequence_id=number) for number in numbers])


async def test_of_one_list_all_messages_have_a_number_or_none():
    for numbers in ([None, 5], [5, None], [None, 0], [0], [True], [2**64]):
        with pytest.raises((ValueError, TypeError)):
            batched([OutgoingMessage(b"x", sequence_id=each) for each in numbers], numbering=Numbering(1))
    with pytest.raises(ValueError, match="producer_name"):
        batched([OutgoingMessage(b"x"), OutgoingMessage(b"x", sequence_id=1)])


@given(
    sizes=st.lists(st.integers(0, 300), max_size=40),
    messages_max=st.integers(1, 12),
    bytes_max=st.integers(1, 1_500),
    as_bytes=st.booleans(),
)
async def test_a_list_is_cut_where_a_batch_is_full(
    sizes: list[int], messages_max: int, bytes_max: int, as_bytes: bool
):
    messages = [bytes(size) if as_bytes else OutgoingMessage(bytes(size)) for size in sizes]
    batches = batched(messages, messages_max=messages_max, bytes_max=bytes_max)
    sent = [
        each for batch in batches for each in producer_pb2.ProduceRequest.FromString(batch.encode()).messages
    ]
    assert [len(message.payload) for message in sent] == sizes
    at = 0
    for batch in batches:
        assert (batch.offset, 1 <= batch.count <= messages_max) == (at, True)
        weights = [size + MESSAGE_OVERHEAD_BYTES for size in sizes[at : at + batch.count + 1]]
        assert sum(weights[: batch.count]) <= bytes_max or batch.count == 1
        is_full = batch.count == messages_max or sum(weights) > bytes_max
        assert is_full or batch is batches[-1]
        at += batch.count


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        ({"payload": "text"}, TypeError, "payload must be bytes, not str"),
        ({"payload": bytearray(b"x")}, TypeError, "payload must be bytes, not bytearray"),
        ({"key": 5}, TypeError, "key must be a str, not int"),
        ({"key": "\ud800"}, ValueError, "key cannot be sent as UTF-8"),
        ({"schedule_key": b"k"}, TypeError, "schedule_key must be a str, not bytes"),
        ({"traceparent": 1.5}, TypeError, "traceparent must be a str"),
        ({"properties": ["a"]}, TypeError, "properties must be a mapping"),
        ({"properties": {"a": 5}}, TypeError, "must be a str, not int"),
        ({"properties": {"a": "\ud800"}}, ValueError, "cannot be sent as UTF-8"),
        ({"deliver_at": datetime(2030, 1, 1)}, ValueError, "deliver_at has no time zone"),
        ({"deliver_after": 5}, TypeError, "deliver_after must be a timedelta"),
        ({"deliver_after": timedelta(microseconds=-1)}, ValueError, "deliver_after is negative"),
        ({"deliver_after": timedelta.max}, ValueError, "deliver_after is too long"),
        ({"deliver_at": EPOCH, "deliver_after": timedelta(0)}, ValueError, "not both"),
        ({"ttl": timedelta(0)}, ValueError, "ttl must be greater than zero"),
        ({"event_time": 5}, TypeError, "event_time must be a datetime"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_what_cannot_be_sent_is_refused_wherever_it_stands(
    fields: dict[str, Any], kind: type[Exception], says: str, place: int
):
    messages = [OutgoingMessage(b"x", deliver_after=timedelta(seconds=second)) for second in range(3)]
    given = {"payload": b"x", **fields}
    messages[place] = OutgoingMessage(**given)
    with pytest.raises(kind, match=says):
        batched(messages)
    with pytest.raises(kind, match=says):
        batched([OutgoingMessage(**given)])


def test_a_field_that_the_encoder_does_not_know_is_an_error_at_import():
    with pytest.raises(LookupError, match="payload"):
        _tags(message_pb2.Message, payload=2)
