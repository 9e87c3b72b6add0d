"""Limits of the access file as callers meet them: refused with a reason and a delay, changed while the broker serves."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

import postdate
from broker.rpc import gathered_requests, producer
from postdate.commands.sending import send_patiently
from postdate_api.v1 import admin_pb2, consumer_pb2, message_pb2, producer_pb2, schedule_pb2
from tests.moving import moves
from tests.wire.access_files import ACCESS, Files, bearer
from tests.wire.conftest import Refusal, Serve, Wire, batch, eventually, refused, within

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
ADMIN, SHOP = bearer("admin-secret"), bearer("shop-secret")
RATE = '\n[[limit]]\nname = "shops"\nprincipals = ["token:shop", "jwt:*"]\nmessages_per_second = 10\n'


@pytest.fixture
def files(tmp_path: Path) -> Files:
    files = Files(tmp_path)
    files.access(ACCESS + RATE)
    return files


async def produce(wire: Wire, topic: str, count: int, metadata: Any = SHOP) -> producer_pb2.ProduceResponse:
    answer: producer_pb2.ProduceResponse = await within(
        wire.producer.Produce(batch(topic, *[b"x"] * count), metadata=metadata)
    )
    return answer


async def refusal_of(wire: Wire, topic: str, count: int, metadata: Any = SHOP) -> Refusal:
    return await refused(wire.producer.Produce(batch(topic, *[b"x"] * count), metadata=metadata))


async def in_force(wire: Wire, files: Files, text: str) -> None:
    """Return once the broker counts by another file."""
    assert wire.server._port._access is not None
    limiter = wire.server._port._access.limiter
    before = limiter._limits
    files.access(text)
    await eventually(lambda: limiter._limits is not before)


async def test_more_than_a_principal_s_rate_is_refused_whole_with_the_limit_and_a_delay(
    serve: Serve, files: Files
):
    wire = await serve(**files.settings)
    await produce(wire, "orders", 10)
    stored = wire.broker.registry.topic("orders").log.entry_total
    with moves(wire.broker, "postdate_limit_refusals", "postdate_refused_requests"):
        refusal = await refusal_of(wire, "orders", 10)
    left = refusal.metadata.pop("left")
    assert 0 <= int(left) < 10
    assert (refusal.code, refusal.reason, refusal.metadata) == (
        EXHAUSTED,
        "LIMIT_RATE_EXCEEDED",
        {"limit": "shops", "exceeded": "messages_per_second", "allowed": "10"},
    )
    assert refusal.retry_ms is not None and 0 < refusal.retry_ms <= 1_000
    assert wire.broker.registry.topic("orders").log.entry_total == stored
    await produce(wire, "orders", 10, bearer(files.jwt(sub="shop-1")))  # each principal has its own
    await produce(wire, "orders", 1_000, ADMIN)


async def test_batches_of_a_stream_are_refused_one_by_one_and_it_goes_on(serve: Serve, files: Files):
    wire = await serve(**files.settings)
    stream = wire.producer.ProduceStream(metadata=SHOP)
    for number, count in enumerate((5, 20, 5), 1):
        await within(stream.write(batch("orders", *[b"x"] * count, request_id=number)))
    answers = [await within(stream.read()) for _ in range(3)]
    assert [answer.HasField("error") for answer in answers] == [False, True, False]
    assert Refusal.of(answers[1].error).reason == "LIMIT_RATE_EXCEEDED"
    await within(stream.done_writing())


async def test_what_is_refused_for_another_reason_does_not_count(serve: Serve, files: Files):
    wire = await serve(**files.settings)
    policy = admin_pb2.TopicPolicy(max_pending_messages=5)
    await within(
        wire.admin.CreateTopic(admin_pb2.CreateTopicRequest(name="orders", policy=policy), metadata=ADMIN)
    )
    for _ in range(5):
        assert (await refusal_of(wire, "orders", 9)).reason == "BATCH_OVER_QUOTA"
    await produce(wire, "orders", 5)


async def test_the_sdk_is_told_how_long_to_wait_and_the_commands_wait(serve: Serve, files: Files):
    wire = await serve(**files.settings)
    messages = [postdate.OutgoingMessage(b"x")] * 8
    async with (
        postdate.connect(wire.server.grpc_address, token=lambda: "shop-secret") as client,
        client.producer("orders") as producer,
    ):
        await within(producer.send_many(messages))
        with pytest.raises(postdate.LimitReached) as caught:
            await within(producer.send_many(messages))
        assert (caught.value.reason, caught.value.metadata["exceeded"]) == (
            "LIMIT_RATE_EXCEEDED",
            "messages_per_second",
        )
        assert caught.value.retry_after is not None
        await asyncio.sleep(caught.value.retry_after.total_seconds())
        await within(producer.send_many(messages))
        await within(send_patiently(producer, messages, replace=False))
    assert wire.broker.registry.topic("orders").log.entry_total == 24


async def test_a_changed_file_holds_while_the_broker_serves_and_streams_go_on(serve: Serve, files: Files):
    wire = await serve(**files.settings)
    stream = wire.producer.ProduceStream(metadata=SHOP)

    async def ask(count: int) -> bool:
        await within(stream.write(batch("orders", *[b"x"] * count)))
        return not (await within(stream.read())).HasField("error")

    assert await ask(10)
    assert not await ask(10)
    await in_force(wire, files, ACCESS + RATE.replace("= 10\n", "= 100000\n"))
    async with asyncio.timeout(1):  # by the old rate it would take ten
        while not await ask(100):
            await asyncio.sleep(0.001)
    await in_force(wire, files, ACCESS)
    assert await ask(4_000)
    assert await ask(4_000)
    await in_force(wire, files, ACCESS + RATE)
    assert await ask(10)
    assert not await ask(10)
    files.access(ACCESS + RATE + "messages_per_minute = 1\n")
    await eventually(lambda: wire.broker.counters.security_reloads.get(("access", "failed"), 0) > 0)
    assert not await ask(10)  # the old ones stay


async def test_what_is_pending_of_topics_is_limited_for_all_callers_together(serve: Serve, files: Files):
    files.access(ACCESS + '[[limit]]\nname = "team"\ntopics = ["orders*"]\npending_messages = 10\n')
    wire = await serve(**files.settings)
    limiter = wire.server._port._access.limiter
    await eventually(lambda: limiter._totals["team"].messages.sum is not None)
    await produce(wire, "orders", 6)
    await produce(wire, "orders-2", 4, ADMIN)
    refusal = await refusal_of(wire, "orders", 1, ADMIN)
    facts = {"limit": "team", "exceeded": "pending_messages", "allowed": "10"}
    assert (refusal.code, refusal.reason, refusal.metadata) == (
        EXHAUSTED,
        "LIMIT_PENDING_EXCEEDED",
        {**facts, "left": "0"},
    )
    refusal = await refusal_of(wire, "orders", 11)
    assert (refusal.reason, refusal.metadata) == ("BATCH_OVER_LIMIT", facts)
    await produce(wire, "payroll", 100, ADMIN)
    await eventually(lambda: wire.broker.counters.limit_totals == {("team", "pending_messages"): (10, 10)})
    with moves(wire.broker, "postdate_limit_used", "postdate_limit_allowed"):
        await in_force(wire, files, ACCESS + '[[limit]]\nname = "team"\ntopics_max = 7\n')
        await eventually(lambda: wire.broker.counters.limit_totals == {("team", "topics_max"): (3, 7)})


@pytest.mark.parametrize(
    "call", ["produce", "subscribe", "create_topic", "create_subscription", "put_recurring"]
)
async def test_topics_are_limited_whichever_call_creates_them(serve: Serve, files: Files, call: str):
    files.access(ACCESS + '[[limit]]\nname = "team"\ntopics = ["orders*"]\ntopics_max = 2\n')
    wire = await serve(**files.settings)
    limiter = wire.server._port._access.limiter
    await eventually(lambda: limiter._totals["team"].topics.sum is not None)

    async def create(name: str) -> None:
        match call:
            case "produce":
                await produce(wire, name, 1, ADMIN)
            case "subscribe":
                stream = wire.stream_as(ADMIN)
                await stream.send(
                    open=consumer_pb2.Open(
                        topic=name, subscription="s", permits=consumer_pb2.Permits(messages=1)
                    )
                )
                await within(stream.call.read())
                stream.call.cancel()
            case "create_topic":
                await within(wire.admin.CreateTopic(admin_pb2.CreateTopicRequest(name=name), metadata=ADMIN))
            case "create_subscription":
                request = admin_pb2.CreateSubscriptionRequest(topic=name, name="s")
                await within(wire.admin.CreateSubscription(request, metadata=ADMIN))
            case "put_recurring":
                schedule = schedule_pb2.RecurringSchedule(
                    name="s", cron="0 3 * * *", message=message_pb2.Message(payload=b"x")
                )
                put = schedule_pb2.PutRecurringRequest(topic=name, schedule=schedule)
                await within(wire.schedule.PutRecurring(put, metadata=ADMIN))

    await create("orders-1")
    await create("orders-2")
    refusal = await refused(create("orders-3"))
    assert (refusal.code, refusal.reason) == (EXHAUSTED, "LIMIT_TOPICS_EXCEEDED")
    await create("payroll")
    assert sorted(wire.broker.registry.by_name) == ["orders-1", "orders-2", "payroll"]


async def test_triggers_and_backfills_count_as_what_is_produced(serve: Serve, files: Files):
    wire = await serve(**files.settings)
    schedule = schedule_pb2.RecurringSchedule(
        name="s", cron="* * * * *", message=message_pb2.Message(payload=b"x")
    )
    put = schedule_pb2.PutRecurringRequest(topic="orders", schedule=schedule)
    await within(wire.schedule.PutRecurring(put, metadata=SHOP))
    end_ms = time.time_ns() // 1_000_000 - 60_000
    backfill = schedule_pb2.BackfillRecurringRequest(
        topic="orders", name="s", start_ms=end_ms - 100 * 60_000, end_ms=end_ms
    )
    dry = schedule_pb2.BackfillRecurringRequest()
    dry.CopyFrom(backfill)
    dry.dry_run = True
    for _ in range(3):
        await within(wire.schedule.BackfillRecurring(dry, metadata=SHOP))
    answer = await within(wire.schedule.BackfillRecurring(backfill, metadata=SHOP))
    assert len(answer.times_ms) == 100
    refusal = await refused(wire.schedule.BackfillRecurring(backfill, metadata=SHOP))
    assert refusal.reason == "LIMIT_RATE_EXCEEDED"
    assert refusal.retry_ms is not None and refusal.retry_ms > 8_000  # the 90 that were too many
    trigger = schedule_pb2.TriggerRecurringRequest(topic="orders", name="s")
    assert (
        await refused(wire.schedule.TriggerRecurring(trigger, metadata=SHOP))
    ).reason == "LIMIT_RATE_EXCEEDED"


async def test_requests_that_gathered_are_refused_and_counted_each_once(
    serve: Serve, files: Files, monkeypatch: pytest.MonkeyPatch
):
    wire = await serve(**files.settings)
    counters = wire.broker.counters
    stream = wire.producer.ProduceStream(metadata=SHOP)
    await within(stream.write(batch("orders", *[b"x"] * 5)))
    await within(stream.read())  # from here on the stream may send there
    monkeypatch.setattr(gathered_requests, "_UNDER_WAY", 0)  # what comes waits until the stream ends
    monkeypatch.setattr(producer, "_APART_MAX", 0)
    for number in range(1, 6):
        await within(stream.write(batch("orders", *[b"x"] * 4, request_id=number)))
    await within(stream.done_writing())
    answers = [await within(stream.read()) for _ in range(5)]
    assert [answer.request_id for answer in answers] == [1, 2, 3, 4, 5]
    refusals = [Refusal.of(answer.error).reason for answer in answers if answer.HasField("error")]
    assert refusals == ["LIMIT_RATE_EXCEEDED"] * len(refusals)
    assert 0 < len(refusals) < 5
    assert counters.limit_refusals["shops", "messages_per_second"] == len(refusals)


async def test_requests_that_gathered_and_are_denied_are_counted_each_once(
    serve: Serve, files: Files, monkeypatch: pytest.MonkeyPatch
):
    wire = await serve(**files.settings)
    monkeypatch.setattr(gathered_requests, "_UNDER_WAY", 0)
    await wire.broker.registry.topic_or_create("payroll")
    stream = wire.producer.ProduceStream(metadata=SHOP)
    for number in range(3):
        await within(stream.write(batch("payroll", b"x", request_id=number)))
    await within(stream.done_writing())
    answers = [await within(stream.read()) for _ in range(3)]
    assert [Refusal.of(answer.error).reason for answer in answers] == ["PERMISSION_DENIED"] * 3
    assert wire.broker.counters.auth_failures["denied"] == 3
