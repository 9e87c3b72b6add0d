"""Bounds of a consumer: permits in messages and in bytes, and its outbox."""

from __future__ import annotations

import asyncio

import pytest

from postdate_api.v1 import consumer_pb2
from tests.wire.conftest import Id, Message, Serve, Wire, eventually, ids_of

KIB = 1024
FRAME = 4  # bytes that tag and length add to a payload of 10 KiB, and again around the message


async def test_permits_bound_the_messages_and_add_up(wire: Wire):
    ids = await wire.produce("t", *[b"x"] * 10)
    stream = await wire.subscribe("t", permits=3)
    assert ids_of(await stream.deliveries(3)) == ids[:3]
    await stream.stays_quiet()
    for messages in (1, 2):
        await stream.send(permits=consumer_pb2.Permits(messages=messages))
    assert ids_of(await stream.deliveries(3)) == ids[3:6]
    await stream.stays_quiet()
    await stream.send(permits=consumer_pb2.Permits(messages=100))
    assert ids_of(await stream.deliveries(4)) == ids[6:]
    more = await wire.produce("t", *[b"x"] * 96)
    assert ids_of(await stream.deliveries(96)) == more


async def test_no_permits_mean_no_messages(wire: Wire):
    await wire.produce("t", b"x", Message(deliver_after_ms=20))
    stream = await wire.subscribe("t", permits=0)
    await stream.stays_quiet()
    assert (await wire.stats("t")).subscriptions[0].leased_messages == 0


async def test_acks_and_nacks_do_not_give_permits(wire: Wire):
    ids = await wire.produce("t", b"1", b"2", b"3")
    stream = await wire.subscribe("t", permits=1)
    await stream.delivery()
    assert await stream.ack(ids[:1]) == []
    await stream.stays_quiet()


async def test_permits_of_one_do_not_leak_to_others(wire: Wire):
    one, two = await wire.subscribe("t", permits=2), await wire.subscribe("t", permits=0)
    await wire.produce("t", *[b"x"] * 5)
    await one.deliveries(2)
    await one.stays_quiet()
    await two.stays_quiet()


async def test_permits_in_bytes_bound_what_is_sent(wire: Wire):
    ids = await wire.produce("t", *[bytes(10 * KIB)] * 10)
    stream = await wire.subscribe("t", permits=100, permit_bytes=35 * KIB)
    assert ids_of(await stream.deliveries(3)) == ids[:3]
    await stream.stays_quiet()
    await stream.send(
        permits=consumer_pb2.Permits(messages=0, bytes=6 * KIB)
    )  # with the 5 KiB left: one more
    assert ids_of(await stream.deliveries(1)) == ids[3:4]
    await stream.stays_quiet()
    await stream.send(permits=consumer_pb2.Permits(messages=1, bytes=0))  # lifts the limit in bytes
    assert ids_of(await stream.deliveries(6)) == ids[4:]


async def test_message_beyond_the_byte_permits_is_sent_when_nothing_else_is_out(wire: Wire):
    ids = await wire.produce("t", bytes(100 * KIB), bytes(100 * KIB))
    stream = await wire.subscribe("t", permits=10, permit_bytes=10 * KIB)
    assert ids_of(await stream.deliveries(1)) == ids[:1]
    await stream.stays_quiet()  # no bytes are left, and one message is out
    await stream.send(permits=consumer_pb2.Permits(bytes=10 * KIB))
    await stream.stays_quiet()  # some are left, but one message is out
    assert await stream.ack(ids[:1]) == []
    assert ids_of(await stream.deliveries(1)) == ids[1:]


async def test_great_message_for_which_one_consumer_lacks_bytes_goes_to_another(wire: Wire):
    small = await wire.subscribe("t", permits=10, permit_bytes=10 * KIB)
    await wire.produce("t", bytes(5 * KIB))
    await small.delivery()
    great = await wire.produce("t", bytes(50 * KIB))
    await small.stays_quiet()
    other = await wire.subscribe("t")
    assert ids_of(await other.deliveries(1)) == great


async def test_batches_stay_below_what_a_client_accepts(wire: Wire):
    ids = await wire.produce("t", *[bytes(100_000)] * 100)
    stream = await wire.subscribe("t", permits=100)
    got: list[Id] = []
    while len(got) < 100:
        frame = await stream.read()
        assert frame.ByteSize() < 3.5 * KIB * KIB
        got += ids_of(frame.batch.deliveries)
    assert got == ids


async def test_consumer_that_does_not_read_is_bounded_and_others_go_on(serve: Serve):
    wire = await serve(frame_bytes_max=1 << 20, heartbeat_ms=500)
    slow = await wire.subscribe("t", "slow", permits=1_000_000)
    same = await wire.subscribe("t", "slow", permits=1_000_000)
    other = await wire.subscribe("t", "other", permits=1_000_000)
    count = 400
    subscription = wire.broker.registry.topic("t").subscription("slow")
    [stuck] = [each for each in subscription.consumers if each.consumer_id == slow.consumer_id]

    async def produce() -> None:
        for _ in range(count // 10):
            await wire.produce("t", *[bytes(100_000)] * 10)

    _, elsewhere = await asyncio.gather(produce(), other.deliveries(count))
    assert len(set(ids_of(elsewhere))) == count

    # What the slow one holds is what its connection and its outbox take, and the rest goes to its neighbour.
    def held() -> int:
        return sum(map(len, subscription.states.leases.held(slow.consumer_id).values()))

    got: list[Id] = []
    while (
        len(got) + held() < count
    ):  # the slow one may still be taking some; a heartbeat ends a wait for those
        frame = await same.read()
        got += ids_of(frame.batch.deliveries)
    assert held() * 100_000 < 12 << 20
    assert stuck._waiting is not None and stuck._waiting.frames_bytes <= 1 << 20
    assert len(set(got)) == count - held()
    # Once it reads again it gets all that was its own.
    assert sorted(ids_of(await slow.deliveries(held())) + got) == sorted(ids_of(elsewhere))


async def test_consumer_that_reads_again_after_a_pause_gets_everything(serve: Serve):
    wire = await serve(frame_bytes_max=1 << 20)
    stream = await wire.subscribe("t", permits=1_000_000)
    ids = []
    for _ in range(30):
        ids += await wire.produce("t", *[bytes(100_000)] * 10)
    got = [id_ for _ in range(300) for id_ in ids_of(await stream.deliveries(1))]
    assert got == ids


async def test_consumer_that_vanishes_with_a_full_outbox_loses_nothing(serve: Serve):
    wire = await serve(frame_bytes_max=1 << 20)
    stream = await wire.subscribe("t", permits=1_000_000)
    ids = []
    for _ in range(20):
        ids += await wire.produce("t", *[bytes(100_000)] * 10)
    subscription = wire.broker.registry.topic("t").subscription("s")
    await eventually(lambda: subscription.states.leases.count() > 0)
    stream.cancel()
    other = await wire.subscribe("t")
    assert sorted(ids_of(await other.deliveries(200))) == ids


@pytest.mark.parametrize("consumers", [1, 3])
async def test_single_permits_one_by_one_deliver_everything(wire: Wire, consumers: int):
    streams = [await wire.subscribe("t", permits=1) for _ in range(consumers)]
    count = 60
    await wire.produce("t", *[Message(deliver_after_ms=i % 3 * 20) for i in range(count)])
    got: set[tuple[int, int]] = set()

    async def consume(stream):
        while len(got) < count:
            ids = ids_of(await stream.deliveries(1))
            await stream.ack(ids)
            got.update(ids)
            await stream.send(permits=consumer_pb2.Permits(messages=1))

    tasks = [asyncio.ensure_future(consume(stream)) for stream in streams]
    await eventually(lambda: len(got) == count)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (await wire.stats("t")).subscriptions[0].ready_messages == 0
