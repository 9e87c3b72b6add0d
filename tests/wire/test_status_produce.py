"""Refusals of Produce and ProduceStream: status, reason, field, and that nothing is stored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import pytest_asyncio

from broker.model import DELIVER_AT_MS_MAX, DELIVER_AT_MS_MIN
from broker.rpc.encode import encode_varint
from postdate_api.v1 import admin_pb2, consumer_pb2, consumer_pb2_grpc, producer_pb2
from tests.wire.conftest import (
    Message,
    Refusal,
    Serve,
    Wire,
    batch,
    eventually,
    ids_of,
    now_ms,
    on_shared,
    one_for_all,
    refused,
    within,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
MIB = 1 << 20
INT64_MAX = (1 << 63) - 1
PRODUCE = "/postdate.v1.ProducerService/Produce"
OK = Message(payload=b"good")


@dataclass(frozen=True)
class Case:
    """One bad request. `build` is called when the case runs: the big ones are not kept."""

    name: str
    build: Callable[[], producer_pb2.ProduceRequest]
    reason: str
    field: str = ""
    code: grpc.StatusCode = INVALID
    told: str = ""  # is in the message


def at(position: int, **fields: Any) -> Callable[[], producer_pb2.ProduceRequest]:
    """A batch for a new topic whose message at `position` is bad, the others being good."""

    def build() -> producer_pb2.ProduceRequest:
        return batch("fresh", *[OK] * position, Message(**fields), OK)

    return build


def named(topic: str) -> Callable[[], producer_pb2.ProduceRequest]:
    return lambda: batch(topic, OK)


NAMES = {
    "empty": "",
    "slash": "a/b",
    "absolute": "/etc/passwd",
    "parent": "..",
    "current": ".",
    "parent path": "../orders",
    "leading dot": ".hidden",
    "leading dash": "-orders",
    "backslash": "a\\b",
    "NUL": "orders\0",
    "escape": "or\x1bders",
    "trailing newline": "orders\n",
    "leading newline": "\norders",
    "trailing space": "orders ",
    "tab": "or\tders",
    "256 characters": "a" * 256,
    "10,000 characters": "a" * 10_000,
    "Cyrillic look-alike": "оrders",
    "full-width look-alike": "ｏrders",
    "fraction slash": "a\u2044b",
    "right-to-left mark": "orders\u200f",
    "zero-width joiner": "or\u200dders",
    "Arabic digit": "orders\u0661",
    "percent": "%2e%2e",
    "colon": "a:b",
    "star": "*",
    "emoji": "orders📮",
}

CASES = [
    *(Case(f"topic: {name}", named(topic), "INVALID_NAME", "topic") for name, topic in NAMES.items()),
    Case("no message", lambda: batch("fresh"), "EMPTY_BATCH", "messages"),
    Case(
        "5,001 messages", lambda: batch("fresh", *[OK] * 5_001), "TOO_MANY_MESSAGES", "messages", told="5000"
    ),
    Case(
        "payload of 2 MiB",
        at(0, payload=bytes(2 * MIB)),
        "PAYLOAD_TOO_LARGE",
        "messages[0].payload",
        told="1048576",
    ),
    Case("payload of limit + 1", at(17, payload=bytes(MIB + 1)), "PAYLOAD_TOO_LARGE", "messages[17].payload"),
    Case("key of limit + 1", at(3, key="k" * 1025), "KEY_TOO_LARGE", "messages[3].key", told="1024"),
    Case("key too large in bytes, not characters", at(3, key="é" * 513), "KEY_TOO_LARGE", "messages[3].key"),
    Case(
        "65 properties",
        at(2, properties={f"p{i}": "" for i in range(65)}),
        "PROPERTIES_TOO_LARGE",
        "messages[2].properties",
        told="64",
    ),
    Case(
        "properties of limit + 1",
        at(2, properties={"p": "v" * (16 * 1024)}),
        "PROPERTIES_TOO_LARGE",
        "messages[2].properties",
        told="16384",
    ),
    Case(
        "both times",
        at(17, deliver_at_ms=DELIVER_AT_MS_MIN, deliver_after_ms=1),
        "INVALID_DELIVER_AFTER_MS",
        "messages[17].deliver_after_ms",
    ),
    Case(
        "negative deliver_at_ms",
        at(17, deliver_at_ms=-1),
        "INVALID_DELIVER_AT_MS",
        "messages[17].deliver_at_ms",
    ),
    Case(
        "negative deliver_after_ms",
        at(1, deliver_after_ms=-1),
        "INVALID_DELIVER_AFTER_MS",
        "messages[1].deliver_after_ms",
    ),
    Case(
        "least deliver_at_ms",
        at(1, deliver_at_ms=-(1 << 63)),
        "INVALID_DELIVER_AT_MS",
        "messages[1].deliver_at_ms",
    ),
    Case(
        "least deliver_after_ms",
        at(1, deliver_after_ms=-(1 << 63)),
        "INVALID_DELIVER_AFTER_MS",
        "messages[1].deliver_after_ms",
    ),
    Case(
        "greatest deliver_at_ms",
        at(1, deliver_at_ms=INT64_MAX),
        "INVALID_DELIVER_AT_MS",
        "messages[1].deliver_at_ms",
    ),
    Case(
        "greatest deliver_after_ms",
        at(1, deliver_after_ms=INT64_MAX),
        "INVALID_DELIVER_AFTER_MS",
        "messages[1].deliver_after_ms",
    ),
    Case(
        "end of time + 1",
        at(0, deliver_at_ms=DELIVER_AT_MS_MAX + 1),
        "INVALID_DELIVER_AT_MS",
        "messages[0].deliver_at_ms",
    ),
    Case(
        "delay that ends after the end of time",
        at(0, deliver_after_ms=DELIVER_AT_MS_MAX),
        "INVALID_DELIVER_AFTER_MS",
        "messages[0].deliver_after_ms",
    ),
    Case("negative ttl_ms", at(4, ttl_ms=-1), "INVALID_TTL_MS", "messages[4].ttl_ms"),
    Case("greatest ttl_ms", at(4, ttl_ms=INT64_MAX), "INVALID_TTL_MS", "messages[4].ttl_ms"),
    Case(
        "greatest ttl_ms with a time",
        at(4, ttl_ms=INT64_MAX, deliver_after_ms=1000),
        "INVALID_TTL_MS",
        "messages[4].ttl_ms",
    ),
    Case(
        "traceparent of limit + 1",
        at(3, traceparent="t" * 257),
        "TRACEPARENT_TOO_LARGE",
        "messages[3].traceparent",
        told="256",
    ),
    Case(
        "traceparent of 5 MB, in bulk",
        lambda: batch("fresh", *[OK] * 49, Message(traceparent="t" * 5_000_000)),
        "TRACEPARENT_TOO_LARGE",
        "messages[49].traceparent",
    ),
    Case(
        "schedule_key of limit + 1",
        at(1, schedule_key="k" * 513),
        "SCHEDULE_KEY_TOO_LARGE",
        "messages[1].schedule_key",
        told="512",
    ),
    Case(
        "schedule_key twice",
        lambda: batch("fresh", OK, Message(schedule_key="k"), Message(schedule_key="k"), replace=True),
        "SCHEDULE_KEY_REPEATED",
        "messages[2].schedule_key",
    ),
    Case(
        "sequence ids that fall",
        lambda: batch("fresh", OK, Message(sequence_id=2), Message(sequence_id=1), producer_name="p"),
        "SEQUENCE_NOT_RISING",
        "messages[2].sequence_id",
    ),
    Case(
        "producer_name of limit + 1",
        lambda: batch("fresh", OK, producer_name="p" * 256),
        "PRODUCER_NAME_TOO_LARGE",
        "producer_name",
        told="255",
    ),
]


@on_shared
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_bad_produce_is_refused_and_nothing_is_stored(shared: Wire, case: Case):
    refusal = await refused(shared.producer.Produce(case.build()))
    assert (refusal.code, refusal.reason) == (case.code, case.reason)
    assert refusal.fields == ((case.field,) if case.field else ())
    assert case.told in refusal.message
    assert refusal.message.isprintable() and len(refusal.message) < 500
    await nothing_is_stored(shared)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def storing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Wire]:
    """One broker for a table of requests, each among others that are stored."""
    async with one_for_all(tmp_path_factory) as wire:
        yield wire


@on_shared
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_bad_request_on_the_stream_is_answered_in_order_and_the_stream_goes_on(
    storing: Wire, case: Case
):
    bad = case.build()
    bad.request_id = 2
    call = storing.producer.ProduceStream()
    for request in (batch("good", b"1", request_id=1), bad, batch("good", b"3", request_id=3)):
        await within(call.write(request))
    first, second, third = [await within(call.read()) for _ in range(3)]
    assert [each.request_id for each in (first, second, third)] == [1, 2, 3]
    assert not first.HasField("error") and not third.HasField("error")
    assert not second.ids
    refusal = Refusal.of(second.error)
    assert (refusal.code, refusal.reason, refusal.fields) == (
        case.code,
        case.reason,
        (case.field,) if case.field else (),
    )
    assert (third.ids[0].first_entry_id, third.ids[0].ledger_id) == (1, first.ids[0].ledger_id)
    await within(call.done_writing())
    assert await within(call.read()) is grpc.aio.EOF  # type: ignore[attr-defined]
    assert await within(call.code()) is grpc.StatusCode.OK
    assert await storing.topic_names() == ["good"]
    await within(storing.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(name="good")))


async def nothing_is_stored(wire: Wire) -> None:
    """No topic was made, no record was written."""
    assert await wire.topic_names() == []
    assert wire.broker.journal.stats().records == 0


# -- bytes that are no request -----------------------------------------------------------------------------------------

GOOD = batch(
    "fresh", Message(payload=b"payload", key="key", properties={"name": "value"})
).SerializeToString()


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


TOPIC = field(1, b"fresh")

MALFORMED = {
    "garbage": b"\xff\xfe\xfd not protobuf",
    "an endless varint": b"\x20" + b"\xff" * 11,
    "cut in the middle": GOOD[: len(GOOD) // 2],
    "cut by one byte": GOOD[:-1],
    "a length beyond the end": TOPIC + b"\x12\xff\xff\xff\xff\x07",
    "topic is not UTF-8": field(1, b"fre\xffsh") + field(2, field(1, b"x")),
    "key is not UTF-8": TOPIC + field(2, field(2, b"\xc3\x28")),
    "key is a surrogate": TOPIC + field(2, field(2, b"\xed\xa0\x80")),
    "property name is not UTF-8": TOPIC + field(2, field(3, field(1, b"\xff") + field(2, b"v"))),
    "property value is not UTF-8": TOPIC + field(2, field(3, field(1, b"k") + field(2, b"\xff"))),
    "traceparent is not UTF-8": TOPIC + field(2, field(10, b"\xff")),
    "schedule_key is not UTF-8": TOPIC + field(2, field(6, b"\xff")),
    "a message that is garbage": TOPIC + field(2, b"\xff\xff\xff"),
    "a message cut short": TOPIC + field(2, b"\x0a\x05abc"),
    "payload as a varint": TOPIC + field(2, b"\x08\x01\x0f"),
    "groups 300 deep": TOPIC + b"\xfb\x01" * 300 + b"\xfc\x01" * 300,
}


@on_shared
@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED.keys())
async def test_bytes_that_are_no_request_are_invalid_argument(shared: Wire, raw: bytes):
    refusal = await refused(shared.raw(PRODUCE)(raw))
    assert (refusal.code, refusal.reason) == (INVALID, "MALFORMED_REQUEST")
    assert "protobuf" not in refusal.message.lower() and "Error" not in refusal.message
    await nothing_is_stored(shared)


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED.keys())
async def test_bytes_that_are_no_request_do_not_end_a_produce_stream(wire: Wire, raw: bytes):
    call = wire.raw_stream("/postdate.v1.ProducerService/ProduceStream")()
    for request in (raw, GOOD):
        await within(call.write(request))
    first = producer_pb2.ProduceResponse.FromString(await within(call.read()))
    assert Refusal.of(first.error).reason == "MALFORMED_REQUEST"
    second = producer_pb2.ProduceResponse.FromString(await within(call.read()))
    assert second.ids[0].count == 1
    call.cancel()


async def test_unknown_fields_are_taken_and_not_passed_on(wire: Wire):
    unknown = b"\xf8\x06\x2a"  # field 111, a varint
    raw = TOPIC + field(2, field(1, b"content") + unknown) + unknown
    await within(wire.raw(PRODUCE)(raw))
    stream = await wire.subscribe("fresh")
    delivery = await stream.delivery()
    assert delivery.message == Message(payload=b"content")


async def test_message_in_unusual_order_and_with_repeated_fields_arrives_as_protobuf_reads_it(wire: Wire):
    raw = TOPIC + field(2, field(2, b"old key") + field(1, b"old") + field(1, b"new") + field(2, b"new key"))
    await within(wire.raw(PRODUCE)(raw))
    stream = await wire.subscribe("fresh")
    assert (await stream.delivery()).message == Message(payload=b"new", key="new key")


OVERLONG = {
    "six payloads": b"\x0a\x80\x80\x40" + bytes(MIB),
    "an unknown field": b"\x7a\xc0\x96\xb1\x02" + bytes(5_000_000),
}


@pytest.mark.parametrize("count", [1, 50])
@pytest.mark.parametrize("kind", OVERLONG)
async def test_message_that_came_overlong_is_stored_so_that_a_default_client_can_read_it(
    wire: Wire, kind: str, count: int
):
    last = OVERLONG[kind] * (6 if kind == "six payloads" else 1) + b"\x12\x01k"
    head = b"\x12" + encode_varint(len(last))
    await within(wire.raw(PRODUCE)(TOPIC + field(2, field(1, b"x")) * (count - 1) + head + last))
    async with grpc.aio.insecure_channel(
        wire.server.grpc_address, options=[("grpc.use_local_subchannel_pool", 1)]
    ) as default:
        stub = consumer_pb2_grpc.ConsumerServiceStub(default)
        request = consumer_pb2.ReceiveRequest(
            topic="fresh", subscription="s", max_messages=count, wait_ms=1000
        )
        response = await within(stub.Receive(request))
    assert len(response.deliveries) == count
    assert response.deliveries[-1].message.key == "k"


# -- what is just within the limits ------------------------------------------------------------------------------------

FITTING = {
    "payload of exactly the limit": Message(payload=bytes(MIB)),
    "empty payload": Message(),
    "key of exactly the limit": Message(key="é" * 512),
    "64 properties": Message(properties={f"p{i}": str(i) for i in range(64)}),
    "properties of exactly the limit": Message(properties={"name": "v" * (16 * 1024 - 4)}),
    "everything at its limit": Message(
        payload=bytes(MIB),
        key="k" * 1024,
        properties={f"{i:02}": "v" * 254 for i in range(64)},
        traceparent="t" * 256,
    ),
    "an empty property": Message(properties={"": ""}),
    "text with every kind of character": Message(key="\0\n\u200f📮", properties={"\x1b": "\ufeff"}),
    "passed through": Message(payload=b"p", event_time_ms=-5, traceparent="00-ab-cd-01", sequence_id=7),
    "greatest numbers": Message(sequence_id=(1 << 64) - 1, event_time_ms=INT64_MAX),
}


@pytest.mark.parametrize("message", FITTING.values(), ids=FITTING.keys())
async def test_message_within_the_limits_arrives_unchanged(wire: Wire, message: Message):
    [stored] = await wire.produce("t", message)
    stream = await wire.subscribe("t")
    delivery = await stream.delivery()
    assert ids_of([delivery]) == [stored]
    assert delivery.message == message


async def test_batch_of_exactly_the_limit_has_consecutive_ids(wire: Wire):
    ids = await wire.produce("t", *[b"x"] * 5_000)
    assert ids == [(ids[0][0], i) for i in range(5_000)]
    stream = await wire.subscribe("t", permits=5_000)
    assert ids_of(await stream.deliveries(5_000)) == ids


@pytest.mark.parametrize("name", ["a", "0", "A.b_c~d-e", "a" * 255, "con", "a..b"])
async def test_names_of_the_allowed_form_are_taken(wire: Wire, name: str):
    await wire.produce(name, b"x")
    assert await wire.topic_names() == [name]


async def test_names_differ_by_case(wire: Wire):
    await wire.produce("Orders", b"upper")
    await wire.produce("orders", b"lower")
    assert (await (await wire.subscribe("orders")).delivery()).message.payload == b"lower"


# -- times -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deliver_at_ms", [1_000_000_000_000, 1_600_000_000_000], ids=["2001", "2020"])
async def test_past_times_are_delivered_at_once(wire: Wire, deliver_at_ms: int):
    stream = await wire.subscribe("t")
    before_ms = now_ms()
    await wire.produce("t", Message(payload=b"late", deliver_at_ms=deliver_at_ms))
    delivery = await stream.delivery()
    assert delivery.deliver_at_ms == delivery.publish_time_ms >= before_ms
    assert delivery.message.deliver_at_ms == deliver_at_ms


async def test_due_time_is_what_the_answer_allows_to_compute(wire: Wire):
    response = await within(wire.producer.Produce(batch("t", Message(deliver_after_ms=120), request_id=9)))
    assert response.request_id == 9
    stream = await wire.subscribe("t")
    delivery = await stream.delivery()
    assert delivery.publish_time_ms == response.publish_time_ms
    assert delivery.deliver_at_ms == response.publish_time_ms + 120 <= now_ms()


async def test_times_at_the_end_of_time_are_kept(wire: Wire):
    await wire.produce("t", Message(deliver_at_ms=DELIVER_AT_MS_MAX), Message(deliver_after_ms=1 << 47))
    assert (await wire.stats("t")).scheduled_messages == 2
    index = wire.broker.registry.topic("t").index
    await eventually(lambda: (index.tracker.stats().last_due_ms or 0) >= DELIVER_AT_MS_MAX)


async def test_expired_message_is_not_delivered(wire: Wire):
    await wire.produce("t", Message(payload=b"short", ttl_ms=1), Message(payload=b"long", ttl_ms=60_000))
    await asyncio.sleep(0.01)
    stream = await wire.subscribe("t")
    assert (await stream.delivery()).message.payload == b"long"


@pytest.mark.parametrize(
    "existing", [True, False], ids=["topic with a limit", "limit of the broker, new topic"]
)
@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"deliver_after_ms": 60_001}, "deliver_after_ms"),
        ({"deliver_at_ms": 4_000_000_000_000}, "deliver_at_ms"),
    ],
    ids=["relative", "absolute"],
)
async def test_delay_over_the_limit_is_out_of_range(
    serve: Serve, fields: dict[str, Any], asked: str, existing: bool
):
    wire = await serve(max_delay_ms=0 if existing else 60_000)
    if existing:
        policy = admin_pb2.TopicPolicy(max_delay_ms=60_000)
        await within(wire.admin.CreateTopic(admin_pb2.CreateTopicRequest(name="t", policy=policy)))
    records = wire.broker.journal.stats().records
    refusal = await refused(wire.producer.Produce(batch("t", OK, Message(**fields))))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.OUT_OF_RANGE, "DELIVER_AT_TOO_FAR")
    assert refusal.fields == (f"messages[1].{asked}",)
    assert refusal.metadata["max_delay_ms"] == "60000"
    assert "60000" in refusal.message
    assert wire.broker.journal.stats().records == records
    await wire.produce("t", Message(deliver_after_ms=60_000))


# -- topics that are not there, brokers that do not serve --------------------------------------------------------------


async def test_unknown_topic_is_not_found_without_auto_creation(serve: Serve):
    wire = await serve(auto_create_topics=False)
    refusal = await refused(wire.producer.Produce(batch("nowhere", OK)))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "TOPIC_NOT_FOUND")
    assert refusal.metadata == {"topic": "nowhere"}
    await nothing_is_stored(wire)


async def test_many_producers_that_create_one_topic_at_once_all_succeed(wire: Wire):
    answers = await asyncio.gather(*(wire.produce("t", b"%d" % i) for i in range(50)))
    assert sorted(answers) == [[(answers[0][0][0], i)] for i in range(50)]
    assert await wire.topic_names() == ["t"]


async def test_too_many_topics_are_resource_exhausted(serve: Serve):
    wire = await serve(topics_max=1)
    await wire.produce("one", b"x")
    refusal = await refused(wire.producer.Produce(batch("two", OK)))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_TOPICS")
    assert refusal.retry_ms


async def test_full_disk_refuses_producers_and_takes_acks(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    wire = await serve(disk_reserve_bytes=1000)
    ids = await wire.produce("t", b"x")
    stream = await wire.subscribe("t")
    monkeypatch.setattr(wire.broker._vfs, "free_bytes", lambda path: 999)
    wire.broker._check_disk()
    refusal = await refused(wire.producer.Produce(batch("t", OK)))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "DISK_RESERVE_REACHED")
    assert refusal.retry_ms
    assert ids_of(await stream.deliveries(1)) == ids
    assert await stream.ack(ids) == []


async def test_request_over_the_frame_limit_is_resource_exhausted(wire: Wire):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await within(wire.raw(PRODUCE)(bytes(17 * MIB)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_request_of_nearly_the_frame_limit_is_taken(wire: Wire):
    ids = await wire.produce("t", *[bytes(MIB - 1)] * 15)
    assert len(ids) == 15


async def test_produce_stream_pipelines_and_keeps_order(wire: Wire):
    call = wire.producer.ProduceStream()

    async def write() -> None:
        for i in range(600):  # more than the broker takes before it answers
            await call.write(batch("t", b"x", b"y", request_id=i))
        await call.done_writing()

    async def read() -> list[producer_pb2.ProduceResponse]:
        return [response async for response in call]

    _, answers = await within(asyncio.gather(write(), read()))
    assert [answer.request_id for answer in answers] == list(range(600))
    assert [answer.ids[0].first_entry_id for answer in answers] == list(range(0, 1200, 2))
    assert await call.code() is grpc.StatusCode.OK


async def test_batches_of_a_producer_that_vanishes_are_kept(wire: Wire):
    call = wire.producer.ProduceStream()
    await within(call.write(batch("t", b"answered", request_id=1)))
    await within(call.read())
    await within(call.write(batch("t", b"not answered", request_id=2)))
    call.cancel()
    stream = await wire.subscribe("t")
    assert (await stream.delivery()).message.payload == b"answered"
