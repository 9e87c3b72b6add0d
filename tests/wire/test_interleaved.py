"""Immediate and delayed messages side by side, many of one delay, and consumers that come and go under them."""

from __future__ import annotations

import asyncio

import pytest

from tests.wire.conftest import Message, Wire, eventually, ids_of, now_ms
from tests.wire.test_seek import TYPES, counts

SHARED, KEY_SHARED, EXCLUSIVE, FAILOVER = 1, 2, 3, 4
EARLIEST = 2


@pytest.mark.parametrize("type_", [SHARED, KEY_SHARED], ids=["SHARED", "KEY_SHARED"])
async def test_delayed_messages_between_immediate_ones_hold_up_nothing_and_are_on_time(
    wire: Wire, type_: int
):
    stream = await wire.subscribe("t", type=type_)
    due_ms = now_ms() + 500
    for i in range(10):
        await wire.produce(
            "t",
            Message(payload=b"now %d" % i, key="k"),
            Message(payload=b"later %d" % i, key="k", deliver_at_ms=due_ms + i),
        )
    got = await stream.deliveries(10)
    assert [each.message.payload for each in got] == [b"now %d" % i for i in range(10)]
    for i in range(10):
        each = await stream.delivery()
        assert each.message.payload == b"later %d" % i
        assert now_ms() >= due_ms + i
    await stream.stays_quiet()


async def test_a_thousand_messages_of_one_delay_come_in_the_order_in_which_they_were_stored(wire: Wire):
    stream = await wire.subscribe("t", permits=1_000)
    due_ms = now_ms() + 400
    ids = []
    for _ in range(10):
        ids += await wire.produce("t", *[Message(payload=b"x", deliver_at_ms=due_ms)] * 100)
    assert ids_of(await stream.deliveries(1_000)) == ids


@TYPES
async def test_who_takes_over_gets_all_that_is_left_and_nothing_that_was_settled(wire: Wire, type_: int):
    messages = [Message(payload=b"x", key=str(i % 7), deliver_after_ms=i % 3 * 40) for i in range(60)]
    await wire.create_subscription("t", type=type_, initial_position=EARLIEST)
    ids = await wire.produce("t", *messages)
    left = set(ids)
    consumers = 0
    while left:
        consumers += 1
        stream = await wire.subscribe("t", permits=10)
        got = ids_of(await stream.deliveries(min(10, len(left))))
        assert len(set(got)) == len(got)
        assert set(got) <= left, "settled before"
        done = got[: max(1, len(got) * 2 // 3)]
        assert await stream.ack(done) == []
        left -= set(done)
        if consumers % 2:
            await stream.close()
        else:
            stream.cancel()
            await eventually(lambda: not wire.broker.registry.topic("t").subscription("s").consumers)
    assert consumers > 3
    async with asyncio.timeout(10):
        while await counts(wire) != (0, 0, 0):
            await asyncio.sleep(0.005)
