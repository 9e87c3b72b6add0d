"""Seek and skip: a subscription begins elsewhere, and nobody else notices."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from postdate_api.v1 import admin_pb2, consumer_pb2, message_pb2
from tests.wire.conftest import (
    Id,
    Message,
    Refusal,
    Serve,
    Stream,
    Wire,
    batch,
    eventually,
    failures_of,
    ids_of,
    now_ms,
    refused,
    sets,
    within,
)

SHARED, KEY_SHARED, EXCLUSIVE, FAILOVER = 1, 2, 3, 4
LATEST, EARLIEST = 1, 2
TYPES = pytest.mark.parametrize(
    "type_", [SHARED, KEY_SHARED, EXCLUSIVE, FAILOVER], ids=["SHARED", "KEY_SHARED", "EXCLUSIVE", "FAILOVER"]
)
LATER = Message(payload=b"later", deliver_after_ms=3_600_000)


async def seek(wire: Wire, topic: str = "t", subscription: str = "s", **target: object) -> Id:
    request = admin_pb2.SeekRequest(topic=topic, subscription=subscription, **target)
    position = (await within(wire.admin.Seek(request))).position
    return position.ledger_id, position.entry_id


async def skip_all(wire: Wire, topic: str = "t", subscription: str = "s", **fields: str) -> int:
    request = admin_pb2.SkipAllRequest(topic=topic, subscription=subscription, **fields)
    return (await within(wire.admin.SkipAll(request))).skipped_messages


async def counts(wire: Wire, subscription: str = "s", topic: str = "t") -> tuple[int, int, int]:
    """Ready, leased, scheduled."""
    found = {each.name: each for each in (await wire.stats(topic)).subscriptions}[subscription]
    return found.ready_messages, found.leased_messages, found.scheduled_messages


def id_of(id_: Id) -> message_pb2.MessageId:
    return message_pb2.MessageId(ledger_id=id_[0], entry_id=id_[1])


async def ends_with_draining(stream: Stream) -> None:
    """The stream says that it ends, and ends well."""
    while (frame := await stream.read()).WhichOneof("frame") != "draining":
        assert frame.WhichOneof("frame") == "heartbeat", frame
    assert await stream.read() is None
    assert await within(stream.call.code()) == grpc.StatusCode.OK


# -- where to ----------------------------------------------------------------------------------------------------------


@TYPES
async def test_seek_to_the_earliest_brings_back_what_was_settled(wire: Wire, type_: int):
    ids = await wire.produce("t", b"1", b"2", b"3")
    stream = await wire.subscribe("t", type=type_)
    await stream.deliveries(3)
    await stream.ack(ids)
    assert await seek(wire, initial_position=EARLIEST) == ids[0]
    await ends_with_draining(stream)
    again = await (await wire.subscribe("t", type=type_)).deliveries(3)
    assert ids_of(again) == ids
    assert [each.delivery_attempt for each in again] == [1, 1, 1]


async def test_seek_to_an_id_begins_with_that_message(wire: Wire):
    ids = await wire.produce("t", b"1", b"2", b"3", b"4")
    stream = await wire.subscribe("t")
    await stream.deliveries(4)
    await stream.ack(ids)
    assert await seek(wire, id=id_of(ids[2])) == ids[2]
    assert ids_of(await (await wire.subscribe("t")).deliveries(2)) == ids[2:]


async def test_seek_forward_to_an_id_skips_what_lies_before(wire: Wire):
    ids = await wire.produce("t", b"1", LATER, b"3", b"4", LATER)
    await wire.create_subscription("t", initial_position=EARLIEST)
    assert await seek(wire, id=id_of(ids[3])) == ids[3]
    assert await counts(wire) == (1, 0, 1)
    stream = await wire.subscribe("t")
    assert ids_of(await stream.deliveries(1)) == [ids[3]]
    await stream.stays_quiet()


async def test_seek_to_an_id_behind_its_ledger_begins_with_the_next_one(serve: Serve):
    wire = await serve(ledger_max_entries=2)
    ids = [id_ for _ in range(4) for id_ in await wire.produce("t", b"x")]
    assert ids[1][0] != ids[2][0]
    await wire.create_subscription("t", initial_position=EARLIEST)
    assert await seek(wire, id=id_of((ids[0][0], 2))) == ids[2]
    assert ids_of(await (await wire.subscribe("t")).deliveries(2)) == ids[2:]
    assert await seek(wire, id=id_of((ids[3][0], 2))) == (ids[3][0], 2), "the next one to come"


async def test_seek_to_a_time_begins_with_the_first_message_stored_then(serve: Serve):
    wire = await serve(ledger_max_entries=3)
    ids: list[Id] = []
    times: list[int] = []
    for number in range(8):
        response = await within(wire.producer.Produce(batch("t", b"%d" % number)))
        ids.append((response.ids[0].ledger_id, response.ids[0].first_entry_id))
        times.append(response.publish_time_ms)
        await eventually(lambda: now_ms() > times[-1])  # each has a time of its own
    await wire.create_subscription("t", initial_position=EARLIEST)
    for index, time_ms in enumerate(times):
        assert await seek(wire, publish_time_ms=time_ms) == ids[index]
    assert await seek(wire, publish_time_ms=times[4] + 1) == ids[5]
    assert await seek(wire, publish_time_ms=0) == ids[0]
    assert await counts(wire) == (8, 0, 0)
    for nowhere in ({"publish_time_ms": now_ms() + 3_600_000}, {"initial_position": 0}):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await seek(wire, **nowhere)
        assert Refusal.of_error(refused.value).reason == "INVALID_SEEK_TARGET"
    assert await counts(wire) == (8, 0, 0)
    await seek(wire, publish_time_ms=times[6])
    assert ids_of(await (await wire.subscribe("t")).deliveries(2)) == ids[6:]


async def test_seek_to_the_latest_is_owed_only_what_comes(wire: Wire):
    await wire.produce("t", b"1", LATER)
    stream = await wire.subscribe("t")
    await stream.delivery()
    await seek(wire, initial_position=LATEST)
    assert await counts(wire) == (0, 0, 0)
    stream = await wire.subscribe("t")
    await wire.produce("t", b"new", Message(payload=b"new, delayed", deliver_after_ms=50))
    assert [each.message.payload for each in await stream.deliveries(2)] == [b"new", b"new, delayed"]


@pytest.mark.parametrize(
    "target",
    [{}, {"publish_time_ms": -1}, {"id": message_pb2.MessageId()}, {"initial_position": 9}],
    ids=["none", "negative time", "no id", "no position"],
)
async def test_seek_to_nowhere_is_refused(wire: Wire, target: dict[str, object]):
    await wire.create_subscription("t")
    refusal = await refused(wire.admin.Seek(admin_pb2.SeekRequest(topic="t", subscription="s", **target)))
    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT


async def test_seek_beyond_the_last_message_is_refused(wire: Wire):
    ((ledger_id, entry_id),) = await wire.produce("t", b"1")
    await wire.create_subscription("t", initial_position=EARLIEST)
    for beyond in (ledger_id, entry_id + 2), (ledger_id + 1, 0):
        request = admin_pb2.SeekRequest(topic="t", subscription="s", id=id_of(beyond))
        assert (await refused(wire.admin.Seek(request))).reason == "POSITION_NOT_FOUND"
    assert await counts(wire) == (1, 0, 0)


async def test_seek_and_skip_of_what_is_not_there_are_refused(wire: Wire):
    await wire.create_subscription("t")
    for topic, subscription, reason in (
        ("t", "nobody", "SUBSCRIPTION_NOT_FOUND"),
        ("none", "s", "TOPIC_NOT_FOUND"),
        ("t", "a/b", "INVALID_NAME"),
    ):
        names = {"topic": topic, "subscription": subscription}
        calls = (
            wire.admin.Seek(admin_pb2.SeekRequest(initial_position=EARLIEST, **names)),
            wire.admin.SkipAll(admin_pb2.SkipAllRequest(**names)),
            wire.admin.Pause(admin_pb2.PauseRequest(**names)),
            wire.admin.Resume(admin_pb2.ResumeRequest(**names)),
        )
        for call in calls:
            assert (await refused(call)).reason == reason


# -- what is pending, leased, on its way ---------------------------------------------------------------------------------


@TYPES
async def test_skip_all_leaves_nothing_scheduled_and_delivers_what_comes_later(wire: Wire, type_: int):
    await wire.create_subscription("t", type=type_, policy=admin_pb2.SubscriptionPolicy(honor_delay=True))
    soon = [Message(payload=b"pending", deliver_after_ms=300 + i) for i in range(100)]
    await wire.produce("t", *soon)
    assert sum(await counts(wire)) == 100
    assert await skip_all(wire) == 100
    assert await counts(wire) == (0, 0, 0)
    stream = await wire.subscribe("t")
    await wire.produce("t", Message(payload=b"after", deliver_after_ms=600))
    assert (await stream.delivery()).message.payload == b"after"  # and none of those due before it
    assert await counts(wire) == (0, 1, 0)


async def test_skip_all_counts_what_is_out_too(wire: Wire):
    await wire.produce("t", b"1", b"2", b"3", LATER)
    stream = await wire.subscribe("t")
    first, *_ = await stream.deliveries(3)
    await stream.ack(ids_of([first]))
    assert await skip_all(wire) == 3
    assert await skip_all(wire) == 0


async def test_what_was_out_is_nobodys_after_a_seek(wire: Wire):
    ids = await wire.produce("t", b"1", b"2", b"3")
    stream = await wire.subscribe("t")
    await stream.deliveries(3)
    await seek(wire, id=id_of(ids[1]))
    request = consumer_pb2.NackRequest(
        topic="t", subscription="s", consumer_id=stream.consumer_id, entries=sets(ids)
    )
    failures = failures_of((await within(wire.consumer.Nack(request))).failures)
    assert failures == dict.fromkeys(ids, "NOT_FOUND")
    assert await counts(wire) == (2, 0, 0)
    # An acknowledgement of what lies after the start still counts: it can have been sent.
    assert failures_of(await wire.ack("t", ids)) == {ids[0]: "NOT_FOUND"}
    assert await counts(wire) == (0, 0, 0)


async def test_attempts_and_waits_begin_anew_after_a_seek(wire: Wire):
    ids = await wire.produce("t", b"1")
    stream = await wire.subscribe("t")
    await stream.delivery()
    await stream.nack(ids, redeliver_after_ms=3_600_000)
    assert await counts(wire) == (0, 0, 1)
    await seek(wire, initial_position=EARLIEST)
    assert await counts(wire) == (1, 0, 0)
    assert (await (await wire.subscribe("t")).delivery()).delivery_attempt == 1


async def test_seek_back_over_pending_messages_keeps_their_time(wire: Wire):
    due_ms = now_ms() + 400
    await wire.produce("t", b"now", Message(payload=b"pending", deliver_at_ms=due_ms))
    stream = await wire.subscribe("t")
    await stream.delivery()
    await skip_all(wire)
    await seek(wire, initial_position=EARLIEST)
    assert sum(await counts(wire)) == 2
    stream = await wire.subscribe("t")
    payloads = [each.message.payload for each in await stream.deliveries(2)]
    assert payloads == [b"now", b"pending"]
    assert now_ms() >= due_ms
    await stream.stays_quiet()


async def test_seek_back_beside_another_subscription_leaves_that_one_alone(wire: Wire):
    await wire.create_subscription("t", "other", initial_position=EARLIEST)
    ids = await wire.produce("t", b"1", b"2", Message(payload=b"3", deliver_after_ms=500))
    mine, others = await wire.subscribe("t"), await wire.subscribe("t", "other")
    await seek(wire, initial_position=EARLIEST)
    await ends_with_draining(mine)
    mine = await wire.subscribe("t")
    await mine.deliveries(2)
    await mine.ack(ids[:2])
    await others.deliveries(2)
    await others.ack(ids[:1])
    await seek(wire, initial_position=EARLIEST)
    mine = await wire.subscribe("t")
    assert sorted(ids_of(await mine.deliveries(3))) == ids
    assert ids_of(await others.deliveries(1)) == ids[2:]
    await others.stays_quiet()
    assert await counts(wire, "other") == (0, 2, 0)


async def test_nothing_confirmed_comes_back_after_a_seek_forward(wire: Wire):
    ids = await wire.produce("t", *[b"x"] * 6)
    stream = await wire.subscribe("t")
    await stream.deliveries(6)
    await stream.ack(ids[:5])
    await seek(wire, id=id_of(ids[5]))
    stream = await wire.subscribe("t")
    assert ids_of(await stream.deliveries(1)) == ids[5:]
    await stream.stays_quiet()


async def test_a_waiting_receive_returns_empty_at_a_seek(wire: Wire):
    await wire.create_subscription("t")
    waiting = asyncio.ensure_future(wire.receive("t", wait_ms=9_000))
    (subscription,) = wire.broker.registry.topic("t").subscriptions.values()
    await eventually(lambda: len(subscription.consumers) == 1)
    await seek(wire, initial_position=LATEST)
    assert not (await waiting).deliveries


async def test_a_repeated_attempt_returns_nothing_that_was_skipped(wire: Wire):
    await wire.create_subscription("t", initial_position=EARLIEST)
    await wire.produce("t", b"1")
    first = await wire.receive("t", wait_ms=5_000, attempt_id="a")
    again = await wire.receive("t", attempt_id="a")
    assert len(first.deliveries) == 1
    assert again == first
    await skip_all(wire)
    assert not (await wire.receive("t", attempt_id="a")).deliveries


async def test_a_new_consumer_may_come_before_the_old_stream_has_ended(wire: Wire):
    ids = await wire.produce("t", b"1", b"2")
    old = await wire.subscribe("t", type=EXCLUSIVE)
    await old.deliveries(2)
    await old.ack(ids)
    await seek(wire, initial_position=EARLIEST)
    new = await wire.subscribe("t", type=EXCLUSIVE)  # the old one was not read to its end
    assert ids_of(await new.deliveries(2)) == ids
    await ends_with_draining(old)
    assert (await wire.stats("t")).subscriptions[0].consumers == 1
    assert await new.ack(ids) == []


async def test_seek_survives_a_restart(serve: Serve, tmp_path):
    folder = str(tmp_path / "data")
    wire = await serve(data_dir=folder)
    ids = await wire.produce("t", b"1", b"2", b"3", LATER)
    stream = await wire.subscribe("t")
    await stream.deliveries(3)
    await stream.ack(ids[:3])
    await seek(wire, id=id_of(ids[1]))
    await wire.disconnect()
    await wire.stop()
    wire = await serve(data_dir=folder)
    assert await counts(wire) == (2, 0, 1)
    stream = await wire.subscribe("t")
    assert ids_of(await stream.deliveries(2)) == ids[1:3]
    await skip_all(wire)
    await wire.disconnect()
    await wire.stop()
    wire = await serve(data_dir=folder)
    assert await counts(wire) == (0, 0, 0)


async def test_a_repeated_request_moves_nothing_twice(wire: Wire):
    await wire.produce("t", b"1", b"2")
    await wire.create_subscription("t", initial_position=EARLIEST)
    assert await skip_all(wire, request_id="r") == 2
    await wire.produce("t", b"3")
    assert await skip_all(wire, request_id="r") == 2
    assert await counts(wire) == (1, 0, 0)


async def test_unsubscribing_with_messages_out_ends_the_stream_and_leaves_the_others(wire: Wire):
    await wire.create_subscription("t", "other", initial_position=EARLIEST)
    ids = await wire.produce("t", b"1", LATER)
    stream, other = await wire.subscribe("t"), await wire.subscribe("t", "other")
    await wire.produce("t", b"2")
    await stream.deliveries(1)
    await within(wire.admin.DeleteSubscription(admin_pb2.DeleteSubscriptionRequest(topic="t", name="s")))
    assert (await stream.refusal()).reason == "SUBSCRIPTION_NOT_FOUND"
    assert ids[0] in ids_of(await other.deliveries(2))
    assert [each.name for each in (await wire.stats("t")).subscriptions] == ["other"]


async def test_deleting_a_topic_with_messages_out_ends_its_streams(wire: Wire):
    await wire.produce("t", b"1", LATER)
    stream = await wire.subscribe("t")
    await stream.delivery()
    await within(wire.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(name="t")))
    assert (await stream.refusal()).reason == "TOPIC_NOT_FOUND"
    await wire.produce("t", b"again")
    assert [each.message.payload for each in await (await wire.subscribe("t")).deliveries(1)] == [b"again"]
    assert await counts(wire) == (0, 1, 0)
