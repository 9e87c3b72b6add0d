"""Pause and resume: nothing is delivered in between, and nothing else changes."""

from __future__ import annotations

import asyncio

import pytest

from postdate_api.v1 import admin_pb2, consumer_pb2
from tests.wire.conftest import Message, Serve, Wire, eventually, ids_of, now_ms, within
from tests.wire.test_seek import TYPES, counts

SHARED, KEY_SHARED, EXCLUSIVE, FAILOVER = 1, 2, 3, 4
EARLIEST = 2


async def pause(wire: Wire, **fields: str) -> admin_pb2.Subscription:
    request = admin_pb2.PauseRequest(topic="t", subscription="s", **fields)
    return (await within(wire.admin.Pause(request))).subscription


async def resume(wire: Wire) -> admin_pb2.Subscription:
    return (
        await within(wire.admin.Resume(admin_pb2.ResumeRequest(topic="t", subscription="s")))
    ).subscription


async def is_paused(wire: Wire) -> bool:
    request = admin_pb2.GetSubscriptionRequest(topic="t", name="s")
    shown = (await within(wire.admin.GetSubscription(request))).subscription.paused
    assert (await wire.stats("t")).subscriptions[0].paused == shown
    return shown


@TYPES
async def test_a_paused_subscription_delivers_nothing_until_it_is_resumed(wire: Wire, type_: int):
    stream = await wire.subscribe("t", type=type_, initial_position=EARLIEST)
    first = await wire.produce("t", b"before")
    await stream.deliveries(1)
    assert (await pause(wire)).paused
    assert await is_paused(wire)
    ids = await wire.produce("t", b"1", Message(payload=b"2", deliver_after_ms=30), b"3")
    await stream.stays_quiet()
    assert await stream.ack(first) == []  # what is out can be settled
    assert sum(await counts(wire)) == 3
    assert not (await resume(wire)).paused
    assert sorted(ids_of(await stream.deliveries(3))) == ids
    assert await stream.ack(ids) == []
    assert not await is_paused(wire)
    assert await counts(wire) == (0, 0, 0)


async def test_what_came_due_meanwhile_is_delivered_at_once_and_the_rest_on_time(wire: Wire):
    stream = await wire.subscribe("t")
    await pause(wire)
    later_ms = now_ms() + 700
    (due,) = await wire.produce("t", Message(payload=b"due", deliver_after_ms=50))
    (later,) = await wire.produce("t", Message(payload=b"later", deliver_at_ms=later_ms))
    await stream.stays_quiet()
    assert sum(await counts(wire)) == 2
    await resume(wire)
    assert ids_of(await stream.deliveries(1)) == [due]
    assert ids_of(await stream.deliveries(1)) == [later]
    assert now_ms() >= later_ms


async def test_a_nack_and_a_lease_that_ends_count_while_it_is_paused(wire: Wire):
    nacked, held = await wire.produce("t", b"1", b"2")
    stream = await wire.subscribe("t", permits=1)
    assert ids_of(await stream.deliveries(1)) == [nacked]
    other = await wire.subscribe("t", permits=1, lease_ms=200)
    assert ids_of(await other.deliveries(1)) == [held]
    await pause(wire)
    await stream.send(permits=consumer_pb2.Permits(messages=10))
    assert await stream.nack([nacked], redeliver_after_ms=1) == []
    (subscription,) = wire.broker.registry.topic("t").subscriptions.values()
    await eventually(lambda: not subscription.states.leases.count())
    await stream.stays_quiet()
    assert await counts(wire) == (2, 0, 0)
    await resume(wire)
    assert [each.delivery_attempt for each in await stream.deliveries(2)] == [2, 2], (
        "the other has no permits"
    )
    assert await stream.ack([nacked, held]) == []


async def test_what_expires_while_it_is_paused_is_not_delivered(wire: Wire):
    stream = await wire.subscribe("t", permits=1)
    (held,) = await wire.produce("t", b"held")
    await stream.deliveries(1)
    await pause(wire)
    await stream.send(permits=consumer_pb2.Permits(messages=10))
    _, lasting = await wire.produce("t", Message(payload=b"expires", ttl_ms=1), Message(payload=b"lasts"))
    assert await stream.extend([held], 60_000) == []
    published_ms = now_ms()
    await eventually(lambda: now_ms() > published_ms + 1)
    await resume(wire)
    assert ids_of(await stream.deliveries(1)) == [lasting]
    await stream.stays_quiet()
    assert await stream.ack([held, lasting]) == []


async def test_receive_on_a_paused_subscription_returns_empty_after_its_wait(wire: Wire):
    await wire.create_subscription("t", initial_position=EARLIEST)
    await wire.produce("t", b"1")
    await pause(wire)
    assert not (await wire.receive("t", wait_ms=50)).deliveries
    assert not (await wire.receive("t", wait_ms=0)).deliveries
    waiting = asyncio.ensure_future(wire.receive("t", wait_ms=9_000))
    (subscription,) = wire.broker.registry.topic("t").subscriptions.values()
    await eventually(lambda: len(subscription.consumers) == 1)
    await resume(wire)
    assert len((await waiting).deliveries) == 1


async def test_a_pause_survives_a_restart_and_new_consumers(serve: Serve, tmp_path):
    folder = str(tmp_path / "data")
    wire = await serve(data_dir=folder)
    await wire.create_subscription("t", initial_position=EARLIEST)
    await pause(wire)
    await wire.produce("t", b"1")
    await wire.disconnect()
    await wire.stop()
    wire = await serve(data_dir=folder)
    assert await is_paused(wire)
    stream = await wire.subscribe("t")
    await stream.stays_quiet()
    await resume(wire)
    assert (await stream.delivery()).message.payload == b"1"
    await wire.disconnect()
    await wire.stop()
    wire = await serve(data_dir=folder)
    assert not await is_paused(wire)


async def test_seek_on_a_paused_subscription_leaves_it_paused(wire: Wire):
    ids = await wire.produce("t", b"1")
    stream = await wire.subscribe("t")
    await stream.deliveries(1)
    await stream.ack(ids)
    await pause(wire)
    request = admin_pb2.SeekRequest(topic="t", subscription="s", initial_position=EARLIEST)
    await within(wire.admin.Seek(request))
    stream = await wire.subscribe("t")
    await stream.stays_quiet()
    assert await is_paused(wire)
    assert await counts(wire) == (1, 0, 0)
    await resume(wire)
    assert ids_of(await stream.deliveries(1)) == ids


async def test_pausing_twice_and_resuming_what_is_not_paused_changes_nothing(wire: Wire):
    await wire.create_subscription("t", initial_position=EARLIEST)
    assert (await pause(wire)).paused
    assert (await pause(wire)).paused
    assert not (await resume(wire)).paused
    assert not (await resume(wire)).paused
    assert (await pause(wire, request_id="r")).paused
    await resume(wire)
    assert (await pause(wire, request_id="r")).paused, "the first answer"
    assert not await is_paused(wire)


@TYPES
async def test_pause_in_the_middle_of_a_herd_loses_and_doubles_nothing(wire: Wire, type_: int):
    stream = await wire.subscribe("t", permits=700, type=type_)
    ids = await wire.produce(
        "t", *[Message(payload=b"x", key=str(i), deliver_after_ms=50) for i in range(3_000)]
    )
    got = await stream.deliveries(700)
    await pause(wire)
    await stream.send(permits=consumer_pb2.Permits(messages=5_000))
    assert await stream.ack(ids_of(got)) == []
    await stream.stays_quiet()
    assert await counts(wire) == (2_300, 0, 0)
    await resume(wire)
    got += await stream.deliveries(2_300)
    assert sorted(ids_of(got)) == ids
    await stream.stays_quiet()


@pytest.mark.parametrize("paused", [True, False])
async def test_two_changes_at_once_do_not_undo_each_other(wire: Wire, paused: bool):
    await wire.create_subscription("t")
    if not paused:
        await pause(wire)
    update = admin_pb2.UpdateSubscriptionRequest(
        topic="t", name="s", policy=admin_pb2.SubscriptionPolicy(lease_ms=1_234)
    )
    update.update_mask.paths.append("lease_ms")
    await asyncio.gather(
        pause(wire) if paused else resume(wire), within(wire.admin.UpdateSubscription(update))
    )
    shown = await within(wire.admin.GetSubscription(admin_pb2.GetSubscriptionRequest(topic="t", name="s")))
    assert shown.subscription.paused == paused
    assert shown.subscription.policy.lease_ms == 1_234
