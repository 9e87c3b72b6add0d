"""Quotas refuse and let in again; delayed delivery that is switched off leaves what is pending on time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from postdate_api.v1 import admin_pb2
from tests.wire.conftest import (
    Message,
    Refusal,
    Serve,
    Wire,
    batch,
    eventually,
    ids_of,
    now_ms,
    refused,
    within,
)

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


async def create(wire: Wire, topic: str = "t", **policy: Any) -> None:
    await within(
        wire.admin.CreateTopic(
            admin_pb2.CreateTopicRequest(name=topic, policy=admin_pb2.TopicPolicy(**policy))
        )
    )


async def update(wire: Wire, topic: str = "t", **policy: Any) -> None:
    await within(
        wire.admin.UpdateTopic(
            admin_pb2.UpdateTopicRequest(
                name=topic,
                policy=admin_pb2.TopicPolicy(**policy),
                update_mask=FieldMask(paths=list(policy)),
            )
        )
    )


async def refusal_of(wire: Wire, *messages: Message | bytes, topic: str = "t", **fields: Any) -> Refusal:
    return await refused(wire.producer.Produce(batch(topic, *messages, **fields)))


# -- what is pending ---------------------------------------------------------------------------------------------------


async def test_pending_messages_are_refused_at_the_limit_and_taken_again_after_acks(wire: Wire):
    await create(wire, max_pending_messages=10)
    await wire.create_subscription("t", "slow")
    await wire.create_subscription("t", "fast")
    ids = await wire.produce("t", *[b"x"] * 8)
    refusal = await refusal_of(wire, *[b"y"] * 3)
    assert (refusal.code, refusal.reason) == (EXHAUSTED, "PENDING_MESSAGES_EXCEEDED")
    assert refusal.metadata == {"max_pending_messages": "10"}
    assert refusal.retry_ms is not None and refusal.retry_ms > 0
    assert refusal.fields == ()
    await wire.produce("t", b"9", b"10")
    await refusal_of(wire, b"11")
    await wire.ack("t", ids, "fast")
    await refusal_of(wire, b"11")  # the one that is owed most decides
    await wire.ack("t", ids[:1], "slow")
    await wire.produce("t", b"11")
    await refusal_of(wire, b"12")
    await update(wire, max_pending_messages=0)
    await wire.produce("t", *[b"z"] * 100)


async def test_scheduled_and_leased_messages_are_pending_and_dead_letters_are_not(wire: Wire):
    await create(wire, max_pending_messages=2)
    later = Message(deliver_after_ms=3_600_000)
    stream = await wire.subscribe("t")
    await wire.produce("t", later, b"leased")
    leased = ids_of(await stream.deliveries(1))
    assert (await refusal_of(wire, later)).reason == "PENDING_MESSAGES_EXCEEDED"
    assert await stream.nack(leased, dead_letter=True) == []
    subscription = wire.broker.registry.topic("t").subscription("s")
    await eventually(lambda: subscription.unsettled_count() == 1)
    await wire.produce("t", later)
    assert (await refusal_of(wire, later)).reason == "PENDING_MESSAGES_EXCEEDED"


async def test_without_a_subscription_the_whole_log_is_pending(wire: Wire):
    await create(wire, max_pending_messages=2)
    await wire.produce("t", b"1", b"2")
    assert (await refusal_of(wire, b"3")).reason == "PENDING_MESSAGES_EXCEEDED"


async def test_pending_bytes_are_refused_at_the_limit_and_taken_again_after_acks(wire: Wire):
    await create(wire, max_pending_bytes=10_000)
    await wire.create_subscription("t")
    ids = await wire.produce("t", *[bytes(1_000)] * 9)
    refusal = await refusal_of(wire, bytes(1_000))
    assert (refusal.code, refusal.reason) == (EXHAUSTED, "PENDING_BYTES_EXCEEDED")
    assert refusal.metadata == {"max_pending_bytes": "10000"}
    assert refusal.retry_ms
    await wire.ack("t", ids[:5])
    await wire.produce("t", *[bytes(1_000)] * 4)
    await refusal_of(wire, *[bytes(1_000)] * 3)


async def test_the_limit_holds_with_many_batches_at_once(wire: Wire):
    await create(wire, max_pending_messages=100)

    async def attempt() -> str:
        try:
            await wire.produce("t", *[b"x"] * 7)
        except grpc.aio.AioRpcError as error:
            return Refusal.of_error(error).reason
        return "taken"

    outcomes = await asyncio.gather(*(attempt() for _ in range(50)))
    assert sorted(outcomes) == ["PENDING_MESSAGES_EXCEEDED"] * 36 + ["taken"] * 14


async def test_a_batch_beyond_the_limit_leaves_no_topic(serve: Serve):
    wire = await serve(max_pending_messages=2)
    refusal = await refusal_of(wire, b"1", b"2", b"3")
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.OUT_OF_RANGE, "BATCH_OVER_QUOTA"), (
        "never to be tried again"
    )
    assert await wire.topic_names() == []
    await wire.produce("t", b"1", b"2")


async def test_a_repeat_is_answered_before_any_quota(wire: Wire):
    await create(wire, max_pending_messages=1, max_produce_rate=1)
    message = Message(payload=b"x", sequence_id=1)
    first = await wire.produce("t", message, producer_name="p")
    for _ in range(3):
        assert await wire.produce("t", message, producer_name="p") == first
    assert (await refusal_of(wire, b"y")).reason == "PENDING_MESSAGES_EXCEEDED"


# -- the rate ----------------------------------------------------------------------------------------------------------


async def test_more_than_the_rate_is_refused_until_the_time_has_passed(wire: Wire):
    await create(wire, max_produce_rate=50)
    await wire.produce("t", *[b"x"] * 50)
    refusal = await refusal_of(wire, *[b"x"] * 50)
    assert (refusal.code, refusal.reason) == (EXHAUSTED, "PRODUCE_RATE_EXCEEDED")
    assert refusal.metadata == {"max_produce_rate": "50"}
    assert refusal.retry_ms is not None and 0 < refusal.retry_ms <= 1_000

    async def taken() -> None:
        while True:
            try:
                await wire.produce("t", *[b"x"] * 5)
            except grpc.aio.AioRpcError as error:
                retry_ms = Refusal.of_error(error).retry_ms
                assert retry_ms
                await asyncio.sleep(retry_ms / 1000)
            else:
                return

    await within(taken())
    await update(wire, max_produce_rate=0)
    await wire.produce("t", *[b"x"] * 500)


async def test_a_batch_of_more_than_a_second_s_worth_is_taken_by_a_rested_topic(wire: Wire):
    await create(wire, max_produce_rate=10)
    assert len(await wire.produce("t", *[b"x"] * 100)) == 100
    refusal = await refusal_of(wire, b"y")
    assert refusal.retry_ms is not None and refusal.retry_ms > 5_000


# -- delayed delivery --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        Message(deliver_after_ms=1),
        Message(deliver_at_ms=1_000_000_000_000),  # also a past time is a time
        Message(deliver_at_ms=4_000_000_000_000),
    ],
    ids=["a delay", "a past time", "a future time"],
)
async def test_a_topic_without_delays_refuses_messages_with_a_time(wire: Wire, message: Message):
    await create(wire, delayed_delivery=admin_pb2.DELAYED_DELIVERY_DISABLED)
    for messages in ([message], [Message()] * 20 + [message]):
        refusal = await refusal_of(wire, *messages)
        assert (refusal.code, refusal.reason) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "DELAYED_DELIVERY_DISABLED",
        )
        assert f"messages[{len(messages) - 1}]" in refusal.message
        assert refusal.retry_ms is None
    ids = await wire.produce("t", b"at once")
    stream = await wire.subscribe("t")
    assert (await stream.delivery()).id.entry_id == ids[0][1] == 0


async def test_a_broker_without_delays_refuses_and_makes_no_topic(serve: Serve):
    wire = await serve(delayed_delivery="disabled")
    refusal = await refusal_of(wire, Message(deliver_after_ms=1), topic="fresh")
    assert refusal.reason == "DELAYED_DELIVERY_DISABLED"
    assert await wire.topic_names() == []
    await create(wire, "own", delayed_delivery=admin_pb2.DELAYED_DELIVERY_ENABLED)
    await wire.produce("own", Message(deliver_after_ms=1))


async def test_what_is_pending_when_delays_are_switched_off_comes_on_time(wire: Wire):
    stream = await wire.subscribe("t")
    due = [now_ms() + 300, now_ms() + 150]
    ids = await wire.produce("t", *(Message(deliver_at_ms=each) for each in due))
    await update(wire, delayed_delivery=admin_pb2.DELAYED_DELIVERY_DISABLED)
    assert (await refusal_of(wire, Message(deliver_after_ms=1))).reason == "DELAYED_DELIVERY_DISABLED"
    for place in (1, 0):
        delivery = await stream.delivery()
        assert now_ms() >= due[place]
        assert (delivery.id.ledger_id, delivery.id.entry_id) == ids[place]
        assert delivery.deliver_at_ms == due[place]
    await update(wire, delayed_delivery=admin_pb2.DELAYED_DELIVERY_ENABLED)
    await wire.produce("t", Message(deliver_after_ms=1))
    await stream.delivery()


async def test_what_was_pending_before_a_restart_without_delays_comes_on_time(serve: Serve, tmp_path: Path):
    wire = await serve(data_dir=str(tmp_path / "d"))
    due_ms = now_ms() + 700
    ids = await wire.produce("t", Message(deliver_at_ms=due_ms), Message(deliver_at_ms=now_ms() + 3_600_000))
    await wire.stop()
    wire = await serve(data_dir=str(tmp_path / "d"), delayed_delivery="disabled")
    stream = await wire.subscribe("t")
    delivery = await stream.delivery()
    assert now_ms() >= due_ms
    assert (delivery.id.ledger_id, delivery.id.entry_id) == ids[0]
    assert (await refusal_of(wire, Message(deliver_after_ms=1))).reason == "DELAYED_DELIVERY_DISABLED"
    await stream.stays_quiet()
