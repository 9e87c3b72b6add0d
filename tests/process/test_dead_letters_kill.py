"""kill -9 while messages are given up, and while others come due: each is in one place, and none is forgotten or hurried."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import grpc

from broker.runtime.vfs import LocalVfs
from broker.storage.alive import read_alive
from postdate_api.v1 import admin_pb2, admin_pb2_grpc, consumer_pb2, message_pb2, producer_pb2
from tests.depth import at_depth
from tests.process.conftest import LIMIT_SECONDS, SMALL, BrokerProcess, Start

MESSAGES = at_depth(change=150, deep=400)
NAMED = {"topic": "t", "subscription": "s"}


def admin(broker: BrokerProcess) -> Any:
    return admin_pb2_grpc.AdminServiceStub(broker.channel)


async def produce(broker: BrokerProcess, *messages: message_pb2.Message) -> None:
    await broker.producer.Produce(producer_pb2.ProduceRequest(topic="t", messages=messages))


async def nack_all(broker: BrokerProcess, enough: asyncio.Event) -> None:
    """Give back whatever comes until the broker goes; says so when some of it was confirmed."""
    call = broker.consumer.Subscribe()
    confirmed = 0
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        opening = consumer_pb2.Open(**NAMED, permits=consumer_pb2.Permits(messages=20))
        await call.write(consumer_pb2.SubscribeRequest(open=opening))
        async for frame in call:
            confirmed += frame.HasField("confirmed")
            if confirmed >= 10:
                enough.set()
            for delivery in frame.batch.deliveries:
                id_ = message_pb2.EntrySet(ledger_id=delivery.id.ledger_id, entry_ids=[delivery.id.entry_id])
                await call.write(
                    consumer_pb2.SubscribeRequest(nack=consumer_pb2.Nack(request_id=1, entries=[id_]))
                )
                await call.write(consumer_pb2.SubscribeRequest(permits=consumer_pb2.Permits(messages=1)))


async def letters_of(broker: BrokerProcess) -> list[admin_pb2.DeadLetter]:
    request = admin_pb2.ListDeadLettersRequest(**NAMED, page_size=1_000, view=message_pb2.MESSAGE_VIEW_FULL)
    return list((await admin(broker).ListDeadLetters(request)).dead_letters)


async def stats_of(broker: BrokerProcess) -> admin_pb2.SubscriptionStats:
    response = await admin(broker).GetStats(admin_pb2.GetStatsRequest(topics=["t"]))
    stats: admin_pb2.SubscriptionStats = response.topics[0].subscriptions[0]
    return stats


async def test_each_message_that_is_given_up_is_one_dead_letter(start: Start, tmp_path: Path):
    settings = {**SMALL, "data_dir": str(tmp_path / "data")}
    broker = await (await start(**settings)).serving()
    policy = admin_pb2.SubscriptionPolicy(max_delivery_attempts=2, initial_backoff_ms=0)
    await admin(broker).CreateSubscription(
        admin_pb2.CreateSubscriptionRequest(topic="t", name="s", policy=policy)
    )
    await produce(broker, *(message_pb2.Message(payload=b"%d" % i) for i in range(MESSAGES)))
    for _ in range(at_depth(change=1, deep=4)):
        enough = asyncio.Event()
        nacking = asyncio.create_task(nack_all(broker, enough))
        async with asyncio.timeout(LIMIT_SECONDS):
            await enough.wait()
        await broker.kill()
        await nacking
        broker = await (await start(**settings)).serving()
        letters, stats = await letters_of(broker), await stats_of(broker)
        payloads = {each.message.payload for each in letters}
        assert len(payloads) == len(letters) == stats.dead_letter_messages
        assert len(letters) + stats.ready_messages + stats.scheduled_messages == MESSAGES
    nacking = asyncio.create_task(nack_all(broker, asyncio.Event()))
    async with asyncio.timeout(LIMIT_SECONDS):
        while (await stats_of(broker)).dead_letter_messages < MESSAGES:
            await asyncio.sleep(0.01)
    nacking.cancel()
    letters = await letters_of(broker)
    assert sorted(int(each.message.payload) for each in letters) == list(range(MESSAGES))
    assert {each.delivery_attempts for each in letters} == {2}
    assert (await stats_of(broker)).ready_messages == 0


async def nack_one(broker: BrokerProcess, reason: str = "") -> None:
    """Take the next message, and give it back."""
    received = await broker.consumer.Receive(
        consumer_pb2.ReceiveRequest(**NAMED, max_messages=1, wait_ms=10_000)
    )
    [delivery] = received.deliveries
    id_ = message_pb2.EntrySet(ledger_id=delivery.id.ledger_id, entry_ids=[delivery.id.entry_id])
    await broker.consumer.Nack(
        consumer_pb2.NackRequest(**NAMED, consumer_id=received.consumer_id, entries=[id_], reason=reason)
    )


async def test_the_reason_of_a_nack_is_in_the_dead_letter_whatever_ended_the_broker(
    start: Start, tmp_path: Path
):
    settings = {**SMALL, "data_dir": str(tmp_path / "data")}
    broker = await (await start(**settings)).serving()
    policy = admin_pb2.SubscriptionPolicy(max_delivery_attempts=3, initial_backoff_ms=0)
    await admin(broker).CreateSubscription(
        admin_pb2.CreateSubscriptionRequest(topic="t", name="s", policy=policy)
    )
    await produce(broker, message_pb2.Message(payload=b"m"))
    await nack_one(broker, "boom")
    await broker.kill()
    broker = await (await start(**settings)).serving()
    await nack_one(broker)
    broker.process.terminate()
    await broker.wait()
    broker = await (await start(**settings)).serving()
    await nack_one(broker)
    line = broker.logged("Messages are moved to the dead letters")
    assert (line["topic"], line["reason"], line["last_reason"]) == ("t", "max_delivery_attempts", "boom")
    await broker.kill()
    broker = await (await start(**settings)).serving()
    [letter] = await letters_of(broker)
    assert (letter.reason, letter.last_reason, letter.delivery_attempts) == (
        "max_delivery_attempts",
        "boom",
        3,
    )


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def test_after_a_kill_only_what_came_due_meanwhile_is_overdue(start: Start, tmp_path: Path):
    settings = {
        "data_dir": str(tmp_path / "data"),
        "overdue_action": "dead_letter",
        "disk_reserve_bytes": "0",
    }
    broker = await (await start(**settings)).serving()
    await admin(broker).CreateSubscription(admin_pb2.CreateSubscriptionRequest(topic="t", name="s"))
    in_life_ms = now_ms() + 100
    await produce(broker, message_pb2.Message(payload=b"in life", deliver_at_ms=in_life_ms))

    def noted_ms() -> int:
        alive = read_alive(LocalVfs(), str(tmp_path / "data" / "alive"))
        return alive.alive_ms if alive else 0

    async with asyncio.timeout(LIMIT_SECONDS):
        while noted_ms() <= in_life_ms:
            await asyncio.sleep(0.02)
    in_absence_ms = now_ms() + 3_000
    await produce(broker, message_pb2.Message(payload=b"in absence", deliver_at_ms=in_absence_ms))
    await broker.kill()
    assert noted_ms() < in_absence_ms
    await asyncio.sleep(max(0, in_absence_ms + 1 - now_ms()) / 1000)
    broker = await (await start(**settings)).serving()
    async with asyncio.timeout(LIMIT_SECONDS):
        while not (letters := await letters_of(broker)):
            await asyncio.sleep(0.02)
    assert [(each.message.payload, each.reason) for each in letters] == [(b"in absence", "overdue")]
    assert (await stats_of(broker)).ready_messages == 1
