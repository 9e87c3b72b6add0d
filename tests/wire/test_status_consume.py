"""Refusals of the consumer's calls: status, reason, field, and that nothing is stored."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from postdate_api.v1 import admin_pb2, consumer_pb2, message_pb2
from tests.depth import deep_but
from tests.wire.conftest import (
    Message,
    Refusal,
    Serve,
    Wire,
    eventually,
    failures_of,
    ids_of,
    on_shared,
    refused,
    sets,
    within,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
SHARED, KEY_SHARED, EXCLUSIVE, FAILOVER = 1, 2, 3, 4
INT64_MAX = (1 << 63) - 1
SUBSCRIBE = "/postdate.v1.ConsumerService/Subscribe"

BAD_NAMES = {
    "empty": "",
    "slash": "a/b",
    "parent": "..",
    "NUL": "a\0",
    "trailing newline": "a\n",
    "256 characters": "a" * 256,
    "look-alike": "аbc",
}


@dataclass(frozen=True)
class Case:
    """A frame or request that is refused."""

    name: str
    fields: dict[str, Any]
    reason: str
    field: str = ""
    code: grpc.StatusCode = INVALID
    told: str = ""


def named(case: Case) -> str:
    return case.name


# -- the first frame ---------------------------------------------------------------------------------------------------

OPEN_CASES = [
    *(Case(f"topic: {n}", {"topic": v}, "INVALID_NAME", "open.topic") for n, v in BAD_NAMES.items()),
    *(
        Case(f"subscription: {n}", {"subscription": v}, "INVALID_NAME", "open.subscription")
        for n, v in BAD_NAMES.items()
    ),
    Case("a type that is none", {"type": 99}, "INVALID_SUBSCRIPTION_TYPE", "open.type"),
    Case(
        "a position that is none",
        {"initial_position": 99},
        "INVALID_INITIAL_POSITION",
        "open.initial_position",
    ),
    Case("lease of 0", {"lease_ms": 0}, "INVALID_LEASE_MS", "open.lease_ms"),
    Case("negative lease", {"lease_ms": -1}, "INVALID_LEASE_MS", "open.lease_ms"),
    Case(
        "lease over the limit", {"lease_ms": 43_200_001}, "INVALID_LEASE_MS", "open.lease_ms", told="43200000"
    ),
    Case("greatest lease", {"lease_ms": INT64_MAX}, "INVALID_LEASE_MS", "open.lease_ms"),
    Case(
        "SHARED without delays",
        {"type": SHARED, "honor_delay": False},
        "HONOR_DELAY_MISMATCH",
        code=PRECONDITION,
    ),
    Case(
        "KEY_SHARED without delays",
        {"type": KEY_SHARED, "honor_delay": False},
        "HONOR_DELAY_MISMATCH",
        code=PRECONDITION,
    ),
]


@on_shared
@pytest.mark.parametrize("case", OPEN_CASES, ids=named)
async def test_bad_open_is_refused_and_nothing_is_stored(shared: Wire, case: Case):
    opening = consumer_pb2.Open(**{"topic": "t", "subscription": "s", **case.fields})
    stream = shared.stream()
    await stream.send(open=opening)
    refusal = await stream.refusal()
    assert (refusal.code, refusal.reason) == (case.code, case.reason)
    assert refusal.fields == ((case.field,) if case.field else ())
    assert case.told in refusal.message
    assert await shared.topic_names() == []


FIRST_FRAMES = {
    "permits": {"permits": consumer_pb2.Permits(messages=1)},
    "ack": {"ack": consumer_pb2.Ack(request_id=1, entries=sets([(1, 0)]))},
    "nack": {"nack": consumer_pb2.Nack()},
    "extend": {"extend": consumer_pb2.Extend()},
    "drain": {"drain": consumer_pb2.Drain()},
    "no frame": {},
}


@on_shared
@pytest.mark.parametrize("frame", FIRST_FRAMES.values(), ids=FIRST_FRAMES.keys())
async def test_first_frame_that_is_not_open_is_refused(shared: Wire, frame: dict[str, Any]):
    stream = shared.stream()
    await stream.send(**frame)
    refusal = await stream.refusal()
    assert (refusal.code, refusal.reason, refusal.fields) == (INVALID, "OPEN_EXPECTED", ("open",))


async def test_stream_that_ends_before_its_first_frame_is_refused(wire: Wire):
    stream = wire.stream()
    await stream.call.done_writing()
    assert (await stream.refusal()).reason == "OPEN_EXPECTED"


@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x0a\x05\x0a\x7f", b"\x0a\x03\x0a\x01\xff"])
@pytest.mark.parametrize("opened", [False, True], ids=["first frame", "later frame"])
async def test_garbage_on_the_stream_is_invalid_argument(wire: Wire, raw: bytes, opened: bool):
    call = wire.raw_stream(SUBSCRIBE)()
    if opened:
        opening = consumer_pb2.SubscribeRequest(open=consumer_pb2.Open(topic="t", subscription="s"))
        await within(call.write(opening.SerializeToString()))
        assert consumer_pb2.SubscribeResponse.FromString(await within(call.read())).HasField("opened")
    await within(call.write(raw))
    refusal = await refused(call.read())
    assert (refusal.code, refusal.reason) == (INVALID, "MALFORMED_REQUEST")


# -- later frames, and the same by single calls ------------------------------------------------------------------------

ONE = sets([(1, 0)])
WITH_RELEASE: dict[str, Any] = {"redeliver_after_ms": 1, "dead_letter": True, "reason": "r"}

FRAME_CASES = [
    Case("open twice", {"open": consumer_pb2.Open(topic="t", subscription="s")}, "ALREADY_OPEN", "open"),
    Case("no frame", {}, "EMPTY_FRAME", "frame"),
    Case(
        "ack of an empty set",
        {"ack": consumer_pb2.Ack(entries=[*ONE, message_pb2.EntrySet(ledger_id=1)])},
        "EMPTY_ENTRY_SET",
        "ack.entries[1].entry_ids",
    ),
    Case(
        "nack of an empty set",
        {"nack": consumer_pb2.Nack(entries=[*ONE, message_pb2.EntrySet(ledger_id=1)])},
        "EMPTY_ENTRY_SET",
        "nack.entries[1].entry_ids",
    ),
    Case(
        "extend of an empty set",
        {"extend": consumer_pb2.Extend(entries=[*ONE, message_pb2.EntrySet(ledger_id=1)])},
        "EMPTY_ENTRY_SET",
        "extend.entries[1].entry_ids",
    ),
    Case(
        "negative redelivery",
        {"nack": consumer_pb2.Nack(entries=ONE, redeliver_after_ms=-1)},
        "INVALID_REDELIVER_AFTER_MS",
        "nack.redeliver_after_ms",
    ),
    Case(
        "greatest redelivery",
        {"nack": consumer_pb2.Nack(entries=ONE, redeliver_after_ms=INT64_MAX)},
        "INVALID_REDELIVER_AFTER_MS",
        "nack.redeliver_after_ms",
    ),
    Case(
        "reason of limit + 1",
        {"nack": consumer_pb2.Nack(entries=ONE, reason="é" * 513)},
        "REASON_TOO_LARGE",
        "nack.reason",
    ),
    *(
        Case(
            f"release with {field}",
            {"nack": consumer_pb2.Nack(entries=ONE, release=True, **{field: value})},
            "INVALID_RELEASE",
            "nack.release",
        )
        for field, value in WITH_RELEASE.items()
    ),
    Case(
        "negative lease",
        {"extend": consumer_pb2.Extend(entries=ONE, lease_ms=-1)},
        "INVALID_LEASE_MS",
        "extend.lease_ms",
    ),
    Case(
        "lease over the limit",
        {"extend": consumer_pb2.Extend(entries=ONE, lease_ms=43_200_001)},
        "INVALID_LEASE_MS",
        "extend.lease_ms",
    ),
]


@pytest.mark.parametrize("case", FRAME_CASES, ids=named)
async def test_bad_frame_ends_the_stream_and_its_messages_go_to_others(wire: Wire, case: Case):
    ids = await wire.produce("t", b"x")
    stream = await wire.subscribe("t")
    await stream.delivery()
    await stream.send(**case.fields)
    refusal = await stream.refusal()
    assert (refusal.code, refusal.reason) == (case.code, case.reason)
    assert refusal.fields == ((case.field,) if case.field else ())
    other = await wire.subscribe("t")
    delivery = await other.delivery()
    assert (ids_of([delivery]), delivery.delivery_attempt) == (ids, 2)


CALL_CASES = [
    *(
        Case(f"{call}: {name} as {kind}", {"call": call, kind: value}, "INVALID_NAME", kind)
        for call in ("Receive", "Acknowledge", "Nack", "ExtendLease")
        for kind in ("topic", "subscription")
        for name, value in BAD_NAMES.items()
    ),
    Case("Receive: negative wait", {"call": "Receive", "wait_ms": -1}, "INVALID_WAIT_MS", "wait_ms"),
    Case("Receive: wait over the limit", {"call": "Receive", "wait_ms": 60_001}, "INVALID_WAIT_MS", "wait_ms", told="60000"),
    Case("Receive: too many", {"call": "Receive", "max_messages": 2_001}, "INVALID_MAX_MESSAGES", "max_messages", told="2000"),
    Case("Receive: greatest number", {"call": "Receive", "max_messages": (1 << 32) - 1}, "INVALID_MAX_MESSAGES", "max_messages"),
    Case("Receive: negative lease", {"call": "Receive", "lease_ms": -1}, "INVALID_LEASE_MS", "lease_ms"),
    Case("Receive: lease over the limit", {"call": "Receive", "lease_ms": 43_200_001}, "INVALID_LEASE_MS", "lease_ms"),
    Case("Receive: a position that is none", {"call": "Receive", "initial_position": 99}, "INVALID_INITIAL_POSITION", "initial_position"),
]  # fmt: skip

REQUESTS = {
    "Receive": consumer_pb2.ReceiveRequest,
    "Acknowledge": consumer_pb2.AcknowledgeRequest,
    "Nack": consumer_pb2.NackRequest,
    "ExtendLease": consumer_pb2.ExtendLeaseRequest,
}


@on_shared
@pytest.mark.parametrize("case", CALL_CASES, ids=named)
async def test_bad_call_is_refused_and_nothing_is_stored(shared: Wire, case: Case):
    fields = {"topic": "t", "subscription": "s", **case.fields}
    call = fields.pop("call")
    refusal = await refused(getattr(shared.consumer, call)(REQUESTS[call](**fields)))
    assert (refusal.code, refusal.reason, refusal.fields) == (INVALID, case.reason, (case.field,))
    assert case.told in refusal.message
    assert await shared.topic_names() == []


SETTLE_CASES = [
    Case(
        "Acknowledge: empty set",
        {"call": "Acknowledge", "entries": [message_pb2.EntrySet(ledger_id=1)]},
        "EMPTY_ENTRY_SET",
        "entries[0].entry_ids",
    ),
    Case(
        "Nack: empty set",
        {"call": "Nack", "entries": [message_pb2.EntrySet(ledger_id=1)]},
        "EMPTY_ENTRY_SET",
        "entries[0].entry_ids",
    ),
    Case(
        "ExtendLease: empty set",
        {"call": "ExtendLease", "entries": [message_pb2.EntrySet(ledger_id=1)]},
        "EMPTY_ENTRY_SET",
        "entries[0].entry_ids",
    ),
    Case(
        "Nack: negative",
        {"call": "Nack", "redeliver_after_ms": -1},
        "INVALID_REDELIVER_AFTER_MS",
        "redeliver_after_ms",
    ),
    Case(
        "Nack: overflow",
        {"call": "Nack", "redeliver_after_ms": INT64_MAX},
        "INVALID_REDELIVER_AFTER_MS",
        "redeliver_after_ms",
    ),
    Case("Nack: reason", {"call": "Nack", "reason": "r" * 1025}, "REASON_TOO_LARGE", "reason"),
    *(
        Case(
            f"Nack: release with {field}",
            {"call": "Nack", "release": True, field: value},
            "INVALID_RELEASE",
            "release",
        )
        for field, value in WITH_RELEASE.items()
    ),
    Case("ExtendLease: negative", {"call": "ExtendLease", "lease_ms": -5}, "INVALID_LEASE_MS", "lease_ms"),
    Case(
        "ExtendLease: overflow",
        {"call": "ExtendLease", "lease_ms": INT64_MAX},
        "INVALID_LEASE_MS",
        "lease_ms",
    ),
]


@pytest.mark.parametrize("case", SETTLE_CASES, ids=named)
async def test_bad_settling_call_is_refused_and_the_lease_stays(wire: Wire, case: Case):
    ids = await wire.produce("t", b"x")
    received = await wire.receive("t", wait_ms=1000)
    assert ids_of(received.deliveries) == ids
    fields = {"topic": "t", "subscription": "s", "entries": sets(ids), **case.fields}
    call = fields.pop("call")
    if call != "Acknowledge":
        fields["consumer_id"] = received.consumer_id
    refusal = await refused(getattr(wire.consumer, call)(REQUESTS[call](**fields)))
    assert (refusal.code, refusal.reason) == (case.code, case.reason)
    assert refusal.fields == ((case.field,) if case.field else ())
    stats = (await wire.stats("t")).subscriptions[0]
    assert (stats.leased_messages, stats.ready_messages) == (1, 0)


# -- topics and subscriptions that are not there -----------------------------------------------------------------------


@pytest.mark.parametrize("call", ["Acknowledge", "Nack", "ExtendLease"])
async def test_settling_calls_create_nothing(wire: Wire, call: str):
    request = REQUESTS[call](topic="t", subscription="s", entries=ONE)
    refusal = await refused(getattr(wire.consumer, call)(request))
    assert (refusal.code, refusal.reason, refusal.metadata) == (NOT_FOUND, "TOPIC_NOT_FOUND", {"topic": "t"})
    await wire.produce("t", b"x")
    refusal = await refused(getattr(wire.consumer, call)(request))
    assert (refusal.code, refusal.reason) == (NOT_FOUND, "SUBSCRIPTION_NOT_FOUND")
    assert refusal.metadata == {"topic": "t", "subscription": "s"}
    assert not (await wire.stats("t")).subscriptions


@pytest.mark.parametrize("how", ["Subscribe", "Receive"])
@pytest.mark.parametrize(
    ("settings", "topic_is_there", "reason"),
    [
        ({"auto_create_topics": False}, False, "TOPIC_NOT_FOUND"),
        ({"auto_create_subscriptions": False}, False, "TOPIC_NOT_FOUND"),
        ({"auto_create_subscriptions": False}, True, "SUBSCRIPTION_NOT_FOUND"),
    ],
    ids=["no topics", "no topic, no subscriptions", "no subscriptions"],
)
async def test_nothing_is_created_where_auto_creation_is_off(
    serve: Serve, how: str, settings: dict[str, bool], topic_is_there: bool, reason: str
):
    wire = await serve(**settings)
    if topic_is_there:
        await wire.produce("t", b"x")
    if how == "Subscribe":
        stream = wire.stream()
        await stream.send(open=consumer_pb2.Open(topic="t", subscription="s"))
        refusal = await stream.refusal()
    else:
        refusal = await refused(wire.receive("t"))
    assert (refusal.code, refusal.reason) == (NOT_FOUND, reason)
    assert await wire.topic_names() == ["t"] * topic_is_there


# -- types -------------------------------------------------------------------------------------------------------------


async def test_second_consumer_of_an_exclusive_subscription_is_refused(wire: Wire):
    first = await wire.subscribe("t", type=EXCLUSIVE)
    second = wire.stream()
    await second.send(open=consumer_pb2.Open(topic="t", subscription="s"))
    refusal = await second.refusal()
    assert (refusal.code, refusal.reason) == (PRECONDITION, "CONSUMER_ALREADY_CONNECTED")
    ids = await wire.produce("t", b"x")
    assert ids_of(await first.deliveries(1)) == ids
    assert await first.close() is grpc.StatusCode.OK
    third = await wire.subscribe("t", type=EXCLUSIVE)
    assert ids_of(await third.deliveries(1)) == ids


@pytest.mark.parametrize("asked", [SHARED, FAILOVER])
async def test_other_subscription_type_is_refused(wire: Wire, asked: Any):
    await wire.create_subscription("t", type=EXCLUSIVE)
    stream = wire.stream()
    await stream.send(open=consumer_pb2.Open(topic="t", subscription="s", type=asked))
    refusal = await stream.refusal()
    assert (refusal.code, refusal.reason) == (PRECONDITION, "SUBSCRIPTION_TYPE_MISMATCH")
    assert refusal.metadata == {"type": "EXCLUSIVE"}


@pytest.mark.parametrize("type_", [KEY_SHARED, EXCLUSIVE, FAILOVER])
async def test_receive_works_on_shared_only(wire: Wire, type_: int):
    await wire.create_subscription("t", type=type_)
    refusal = await refused(wire.receive("t"))
    assert (refusal.code, refusal.reason) == (PRECONDITION, "SUBSCRIPTION_TYPE_MISMATCH")


async def test_other_honor_delay_is_refused(wire: Wire):
    await wire.create_subscription("t", type=EXCLUSIVE)
    stream = wire.stream()
    await stream.send(open=consumer_pb2.Open(topic="t", subscription="s", honor_delay=True))
    assert (await stream.refusal()).reason == "HONOR_DELAY_MISMATCH"


async def test_too_many_consumers_and_subscriptions_are_resource_exhausted(serve: Serve):
    wire = await serve(consumers_per_subscription_max=1, subscriptions_per_topic_max=1)
    await wire.subscribe("t")
    for subscription, reason in (("s", "TOO_MANY_CONSUMERS"), ("other", "TOO_MANY_SUBSCRIPTIONS")):
        stream = wire.stream()
        await stream.send(open=consumer_pb2.Open(topic="t", subscription=subscription))
        refusal = await stream.refusal()
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        assert refusal.retry_ms


# -- ids ---------------------------------------------------------------------------------------------------------------

NEVER_SENT = {
    "next entry": (0, 1),
    "far entry": (0, 1_000_000),
    "greatest entry of 32 bits": (0, (1 << 32) - 1),
    "entry of 33 bits": (0, 1 << 32),
    "greatest entry": (0, (1 << 64) - 1),
    "ledger 0": (None, 0),
    "a later ledger": (1, 0),
    "greatest ledger of 48 bits": ((1 << 48) - 2, 0),
    "ledger of 49 bits": (1 << 48, 0),
    "greatest ledger": ((1 << 64) - 10, 0),
    "another topic's": (-1, 0),
    "greatest of all": ((1 << 64) - 10, (1 << 64) - 1),
}


SETTLED = tuple(itertools.product(NEVER_SENT, (False, True)))


@pytest.mark.parametrize(
    ("name", "settled"), deep_but([each for each in SETTLED if not each[1]] + [SETTLED[-1]], SETTLED)
)
async def test_ids_that_were_never_sent_are_not_found(wire: Wire, name: str, settled: bool):
    await wire.produce("another", b"x")
    [mine] = await wire.produce("t", b"x")
    stream = await wire.subscribe("t")
    await stream.delivery()
    if settled:
        assert await stream.ack([mine]) == []
    shift, entry_id = NEVER_SENT[name]
    bad = (0 if shift is None else mine[0] + shift, entry_id)
    assert failures_of(await stream.ack([bad])) == {bad: "NOT_FOUND"}
    assert failures_of(await stream.nack([bad])) == {bad: "NOT_FOUND"}
    assert failures_of(await stream.extend([bad], 1000)) == {bad: "NOT_FOUND"}
    failures = await wire.ack("t", [bad])
    assert failures_of(failures) == {bad: "NOT_FOUND"}
    assert Refusal.of(failures[0].error).code is NOT_FOUND
    # What is right in the same request is done.
    if not settled:
        assert failures_of(await stream.ack([mine, bad])) == {bad: "NOT_FOUND"}
        assert (await wire.stats("t")).subscriptions[0].leased_messages == 0


async def test_message_that_is_still_scheduled_is_not_found(wire: Wire):
    ids = await wire.produce("t", Message(payload=b"later", deliver_after_ms=3_600_000), b"now")
    stream = await wire.subscribe("t")
    assert (await stream.delivery()).message.payload == b"now"
    assert failures_of(await stream.ack(ids)) == {ids[0]: "NOT_FOUND"}
    assert failures_of(await stream.nack([ids[0]])) == {ids[0]: "NOT_FOUND"}
    assert (await wire.stats("t")).scheduled_messages == 1


async def test_ids_of_another_subscription_are_not_found(wire: Wire):
    await wire.produce("t", b"before")
    await wire.subscribe("t", "first")
    await wire.create_subscription("t", "second")  # LATEST
    [old] = [(1, 0)]
    assert failures_of(await wire.ack("t", [old], "second")) == {old: "NOT_FOUND"}


async def test_ack_twice_is_fine(wire: Wire):
    ids = await wire.produce("t", b"a", b"b", b"c")
    stream = await wire.subscribe("t")
    await stream.deliveries(3)
    for each in (ids[1:2], ids[1:2], ids, ids):
        assert await stream.ack(each) == []
        assert await wire.ack("t", each) == []


async def test_leases_of_others_are_lost(wire: Wire):
    ids = await wire.produce("t", b"x")
    holder = await wire.subscribe("t")
    await holder.delivery()
    other = await wire.subscribe("t")
    for failures in (await other.nack(ids), await other.extend(ids, 5000)):
        assert failures_of(failures) == {ids[0]: "LEASE_LOST"}
        assert Refusal.of(failures[0].error).code is PRECONDITION
    for consumer_id in ("", "nobody", other.consumer_id):
        request = consumer_pb2.NackRequest(
            topic="t", subscription="s", consumer_id=consumer_id, entries=sets(ids)
        )
        assert failures_of((await wire.consumer.Nack(request)).failures) == {ids[0]: "LEASE_LOST"}
    # An acknowledgement counts from anyone.
    assert await other.ack(ids) == []
    assert failures_of(await holder.nack(ids)) == {ids[0]: "LEASE_LOST"}


PERMITS = {
    "greatest of each": [((1 << 32) - 1, (1 << 64) - 1)] * 3,
    "greatest bytes": [(1, (1 << 64) - 1)],
    "more bytes than a signed integer holds": [(10, 1 << 63)] * 2,
    "none": [(0, 0)],
    "bytes only": [(0, 1000)],
}


@pytest.mark.parametrize("grants", PERMITS.values(), ids=PERMITS.keys())
async def test_permits_of_any_size_are_taken(wire: Wire, grants: list[tuple[int, int]]):
    stream = await wire.subscribe("t", permits=1)
    for messages, bytes_ in grants:
        await stream.send(permits=consumer_pb2.Permits(messages=messages, bytes=bytes_))
    ids = await wire.produce("t", b"x")
    assert ids_of(await stream.deliveries(1)) == ids


async def test_a_consumer_name_of_any_length_is_taken(wire: Wire):
    await wire.subscribe("t", consumer_name="📮" * 10_000)


# -- deletion ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["topic", "subscription"])
async def test_deletion_under_a_stream_ends_it_with_not_found(wire: Wire, what: str):
    await wire.produce("t", b"x")
    stream = await wire.subscribe("t")
    await stream.delivery()
    if what == "topic":
        await wire.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(name="t"))
    else:
        await wire.admin.DeleteSubscription(admin_pb2.DeleteSubscriptionRequest(topic="t", name="s"))
    refusal = await stream.refusal()
    assert (refusal.code, refusal.reason) == (NOT_FOUND, f"{what.upper()}_NOT_FOUND")


@pytest.mark.parametrize("what", ["topic", "subscription"])
async def test_deletion_ends_a_waiting_receive_with_not_found(wire: Wire, what: str):
    await wire.create_subscription("t")
    waiting = asyncio.ensure_future(wire.receive("t", wait_ms=30_000))
    await eventually(lambda: bool(wire.broker.registry.topic("t").subscription("s").consumers))
    if what == "topic":
        await wire.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(name="t"))
    else:
        await wire.admin.DeleteSubscription(admin_pb2.DeleteSubscriptionRequest(topic="t", name="s"))
    assert (await refused(waiting)).reason == f"{what.upper()}_NOT_FOUND"
