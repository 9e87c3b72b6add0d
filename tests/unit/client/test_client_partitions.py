"""Handlers over a topic that is spread over several, where two partitions may give the same id."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import postdate
from tests.unit.client.fake_server import FakeBroker


def consuming(client: postdate.Client) -> postdate.PartitionedSubscription:
    return client.subscribe_partitioned("t", "s", partitions=2)


async def fill(client: postdate.Client) -> None:
    async with client.partitioned_producer("t", partitions=2) as producer:
        first, second = await producer.send(b"a"), await producer.send(b"b")
    assert (first.id, first.topic, second.topic) == (second.id, "t-000", "t-001")


def acked(broker: FakeBroker) -> list[int]:
    return [len(broker.topic(topic).subscriptions["s"].acked) for topic in ("t-000", "t-001")]


async def test_messages_with_the_same_id_are_handled_side_by_side(
    broker: FakeBroker, client: postdate.Client
) -> None:
    both = asyncio.Barrier(2)
    async with (
        consuming(client) as subscription,
        client.producer("t-000") as first,
        client.producer("t-001") as second,
    ):
        ids = [(await first.send(b"a")).id]

        async def handle(message: postdate.Message) -> None:
            if message.payload == b"a":
                ids.append((await second.send(b"b")).id)
            await both.wait()
            subscription.stop()

        async with asyncio.timeout(10):
            await subscription.run(handle)
    assert ids[0] == ids[1]
    assert acked(broker) == [1, 1]


async def test_what_is_handled_over_a_broken_connection_is_begun_once_on_each_partition(
    broker: FakeBroker, client: postdate.Client
) -> None:
    await fill(client)
    begun: list[bytes] = []
    both, again = asyncio.Barrier(3), asyncio.Event()
    async with consuming(client) as subscription:

        async def handle(message: postdate.Message) -> None:
            begun.append(message.payload)
            await both.wait()
            await again.wait()

        running = asyncio.ensure_future(subscription.run(handle))
        async with asyncio.timeout(10):
            await both.wait()
            broker.cut()
            while sum(open.topic in ("t-000", "t-001") for open in broker.opens) < 4:
                await asyncio.sleep(0.01)
            again.set()
            while acked(broker) != [1, 1]:
                await asyncio.sleep(0.01)
            subscription.stop()
            await running
    assert sorted(begun) == [b"a", b"b"]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["ack", "nack"])
async def test_what_comes_anew_while_its_ack_waits_is_not_begun_again_and_after_a_nack_it_is(
    broker: FakeBroker, client: postdate.Client, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    """The broker gave it out over the next connection before the ack got there."""
    await fill(client)
    begun: list[bytes] = []
    again, confirm = asyncio.Event(), asyncio.Event()
    async with consuming(client) as subscription:

        async def handle(message: postdate.Message) -> None:
            begun.append(message.payload)
            if len(begun) <= 2:
                await again.wait()
                if verb == "nack":
                    raise ValueError

        running = asyncio.ensure_future(subscription.run(handle))
        await until(lambda: len(begun) == 2)
        waiting = [broker.topic(topic).subscriptions["s"] for topic in ("t-000", "t-001")]
        for each in waiting:
            each.paused = True
        broker.cut()
        # The client knows it, too: a nack before that would be for nobody.
        await until(
            lambda: caplog.text.count("connected again") == 2 and not any(each.held for each in waiting)
        )
        broker.knobs.hold_confirms = confirm
        again.set()
        await until(lambda: sum(frame.HasField(verb) for frame in broker.frames) == 2)
        await fill(client)
        for each in waiting:
            each.paused = False
        new = 2 if verb == "ack" else 4
        await until(lambda: len(begun) >= 2 + new)  # what was there before came before these
        confirm.set()
        await until(lambda: acked(broker) == [2, 2])
        subscription.stop()
        async with asyncio.timeout(10):
            await running
    assert sorted(begun[2:]) == sorted([b"a", b"b"] * (new // 2))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_handler_that_goes_on_after_its_nack_may_end_after_the_one_that_came_anew(
    broker: FakeBroker, client: postdate.Client, caplog: pytest.LogCaptureFixture
) -> None:
    await fill(client)
    begun: list[bytes] = []
    ended = 0
    go = asyncio.Event()
    async with consuming(client) as subscription:

        async def handle(message: postdate.Message) -> None:
            nonlocal ended
            begun.append(message.payload)
            if len(begun) <= 2:
                await message.nack()
                await go.wait()
            ended += 1

        running = asyncio.ensure_future(subscription.run(handle))
        await until(lambda: acked(broker) == [1, 1])
        go.set()
        await until(lambda: ended == 4)
        subscription.stop()
        async with asyncio.timeout(10):
            await running
    assert sorted(begun) == [b"a", b"a", b"b", b"b"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
