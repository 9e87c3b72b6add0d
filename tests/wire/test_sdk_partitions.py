"""The SDK's producer and consumer of a topic that is spread over several, against a real broker."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

import pytest

import postdate
import postdate.sync
import postdate.sync.testing
from postdate import OutgoingMessage, partition_of, partition_topics
from tests.wire.conftest import Wire, within

EARLIEST = postdate.InitialPosition.EARLIEST
TOPICS = partition_topics("orders", 4)


@pytest.fixture
async def client(wire: Wire) -> AsyncIterator[postdate.Client]:
    async with postdate.connect(wire.server.grpc_address, retry_for=timedelta(seconds=5)) as connected:
        yield connected


def producing(client: postdate.Client, **options: Any) -> postdate.PartitionedProducer:
    return client.partitioned_producer("orders", partitions=4, **options)


def consuming(client: postdate.Client, **options: Any) -> postdate.PartitionedSubscription:
    options.setdefault("initial_position", EARLIEST)
    return client.subscribe_partitioned("orders", "s", partitions=4, **options)


async def take(subscription: postdate.PartitionedSubscription, count: int) -> list[postdate.Message]:
    return [await within(anext(subscription)) for _ in range(count)]


async def counts(client: postdate.Client, name: str) -> list[int]:
    return [sum(getattr(each, name) for each in stats.subscriptions) for stats in await client.stats(*TOPICS)]


async def fill(client: postdate.Client, *per_topic: int) -> None:
    for topic, count in zip(TOPICS, per_topic, strict=True):
        await client.topics.create(topic)
        async with client.producer(topic) as producer:
            if count:
                await producer.send_many([b"x"] * count)


@pytest.mark.parametrize(
    ("key", "of_2", "of_3", "of_8", "of_1000"),
    [
        ("a", 0, 2, 0, 168),
        ("17", 1, 1, 1, 721),
        ("123456789", 0, 2, 4, 412),  # the check value of crc32c, 0xe3069283; mixed 2893054412
        ("käse", 1, 1, 7, 279),
        ("customer-4711", 0, 0, 2, 610),
    ],
)
def test_keys_fall_where_they_always_fell(key: str, of_2: int, of_3: int, of_8: int, of_1000: int) -> None:
    assert [partition_of(key, partitions) for partitions in (1, 2, 3, 8, 1000)] == [
        0,
        of_2,
        of_3,
        of_8,
        of_1000,
    ]


def test_keys_spread_evenly_also_those_of_one_consumer() -> None:
    keys = [f"customer-{number}" for number in range(8_000)]
    found = Counter(partition_of(key, 8) for key in keys)
    assert sorted(found) == list(range(8))
    assert min(found.values()) > 850
    assert max(found.values()) < 1150


def test_names_are_in_order_and_stay_with_more_partitions() -> None:
    assert partition_topics("orders", 3) == ("orders-000", "orders-001", "orders-002")
    names = partition_topics("orders", 1000)
    assert list(names) == sorted(names)
    assert names[:3] == partition_topics("orders", 3)


@pytest.mark.parametrize("partitions", [0, -1, 1001])
def test_number_of_partitions_has_bounds(partitions: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 1000"):
        partition_topics("orders", partitions)
    with pytest.raises(ValueError, match="between 1 and 1000"):
        partition_of("key", partitions)


async def test_each_message_goes_to_the_partition_of_its_key(client: postdate.Client):
    keys = [str(number) for number in range(40)]
    async with consuming(client) as subscription, producing(client) as producer:
        receipts = list(await asyncio.gather(*(producer.send(key.encode(), key=key) for key in keys[:20])))
        receipts += await producer.send_many([OutgoingMessage(key.encode(), key=key) for key in keys[20:]])
        assert [receipt.topic for receipt in receipts] == [producer.topic_of(key) for key in keys]
        assert {receipt.topic for receipt in receipts} == set(TOPICS)
        by_id = {(receipt.topic, receipt.id): key for receipt, key in zip(receipts, keys, strict=True)}
        for message in await take(subscription, 40):
            assert message.payload.decode() == message.key == by_id.pop((message.topic, message.id))
            assert message.topic == TOPICS[partition_of(message.key, 4)]
            await message.ack()
    assert await counts(client, "ready_messages") == [0] * 4


async def test_without_a_key_partitions_take_turns_and_a_list_stays_together(client: postdate.Client):
    async with producing(client) as producer:
        assert [(await producer.send(b"x")).topic for _ in range(5)] == [*TOPICS, TOPICS[0]]
        receipts = await producer.send_many([b"a", OutgoingMessage(b"b"), b"c"])
        assert [receipt.topic for receipt in receipts] == [TOPICS[1]] * 3
        assert (await producer.send(b"x")).topic == TOPICS[2]


async def test_schedule_key_alone_names_the_partition(client: postdate.Client):
    hour = timedelta(hours=1)
    async with producing(client) as producer:
        first = await producer.send(b"a", schedule_key="reminder-17", deliver_after=hour)
        assert first.topic == producer.topic_of("reminder-17")
        with pytest.raises(postdate.AlreadyExists):
            await producer.send(b"b", schedule_key="reminder-17", deliver_after=hour)
        (second,) = await producer.send_many(
            [OutgoingMessage(b"c", schedule_key="reminder-17", deliver_after=hour)], replace=True
        )
    assert second.topic == first.topic


async def test_repeat_by_another_producer_is_stored_once(client: postdate.Client):
    for topic in TOPICS:
        await client.topics.create(topic, postdate.TopicPolicy(dedup_window=timedelta(minutes=1)))
    batch = [OutgoingMessage(b"x", key=str(number), sequence_id=number) for number in range(1, 31)]
    async with producing(client, producer_name="web-1") as producer:
        first = await producer.send_many(batch)
        with pytest.raises(ValueError, match="needs a key"):
            await producer.send(b"x", sequence_id=31)
    async with producing(client, producer_name="web-1") as producer:
        again = await producer.send_many(batch)
    assert [(receipt.topic, receipt.id) for receipt in again] == [
        (receipt.topic, receipt.id) for receipt in first
    ]
    assert [receipt.duplicate for receipt in (*first, *again)] == [False] * 30 + [True] * 30


async def test_list_that_leaves_before_a_message_comes_before_it(client: postdate.Client):
    for topic in TOPICS:
        await client.topics.create(topic, postdate.TopicPolicy(dedup_window=timedelta(minutes=1)))
    async with producing(client, producer_name="web-1") as producer:
        listed = asyncio.ensure_future(
            producer.send_many([OutgoingMessage(b"x", key=str(number)) for number in range(20)])
        )
        later = [asyncio.ensure_future(producer.send(b"y", key=str(number))) for number in range(20)]
        receipts = await within(listed)
        for before, each in zip(receipts, later, strict=True):
            after = await within(each)
            assert (after.topic, after.duplicate) == (before.topic, False)
            assert after.id > before.id


async def test_failure_of_one_partition_says_how_many_were_stored(client: postdate.Client):
    keys = [str(number) for number in range(20)]
    away = [key for key in keys if partition_of(key, 4) == 2]
    for topic in TOPICS:
        policy = postdate.TopicPolicy(max_delay=timedelta(minutes=1 if topic == TOPICS[2] else 600))
        await client.topics.create(topic, policy)
    assert len(away) > 1
    async with producing(client) as producer:
        with pytest.raises(postdate.PartlyStored) as caught:
            await producer.send_many(
                [OutgoingMessage(b"x", key=key, deliver_after=timedelta(hours=1)) for key in keys]
            )
        assert caught.value.stored_count == 20 - len(away)
        with pytest.raises(ValueError, match="deliver_at"):
            await producer.send_many(
                [
                    OutgoingMessage(b"y", key="0"),
                    OutgoingMessage(b"y", key="1", deliver_at=datetime(2030, 1, 1)),
                ]
            )
    stats = await client.stats(*TOPICS)
    assert sum(each.scheduled_messages for each in stats) == 20 - len(away)


async def test_busy_partition_does_not_hold_up_the_others(client: postdate.Client):
    await fill(client, 500, 5, 5, 5)
    async with consuming(client, permits=400) as subscription:
        held = [len(await within(each.kept())) for each in subscription._subscriptions]
        while held != [100, 5, 5, 5]:
            await asyncio.sleep(0.01)
            held = [len(await within(each.kept())) for each in subscription._subscriptions]
        first = await take(subscription, 20)
    assert Counter(message.topic for message in first) == dict.fromkeys(TOPICS, 5)


async def eventually_leased(client: postdate.Client, count: int) -> None:
    async with asyncio.timeout(10):
        while sum(await counts(client, "leased_messages")) != count:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("permits", "each"), [(40, 10), (43, 10), (2, 1), (None, 250)])
async def test_permits_are_for_all_together(client: postdate.Client, permits: int | None, each: int):
    await fill(client, 600, 600, 600, 600)
    async with consuming(client, permits=permits) as subscription:
        (message,) = await take(subscription, 1)
        await eventually_leased(client, 4 * each + (0 if each > 1 else 1))
        assert max(await counts(client, "leased_messages")) <= each + 1
        await message.ack()


async def test_messages_are_settled_where_they_came_from(client: postdate.Client):
    await fill(client, 1, 1, 1, 1)
    async with consuming(client) as subscription:
        acked, nacked, released, kept = await take(subscription, 4)
        await acked.ack()
        await nacked.nack(timedelta(0))
        await released.release()
        await kept.extend()
        again = {message.topic: message for message in await take(subscription, 2)}
        assert {topic: message.attempt for topic, message in again.items()} == {
            nacked.topic: 2,
            released.topic: 1,
        }
        for message in (*again.values(), kept):
            message.ack_nowait()
        await subscription.wait_confirmed()
        assert await counts(client, "leased_messages") == [0] * 4
    assert await counts(client, "ready_messages") == [0] * 4


async def test_run_handles_all_partitions_with_one_concurrency(client: postdate.Client):
    await fill(client, 50, 1, 0, 50)
    running = most = 0
    seen: Counter[str] = Counter()
    async with consuming(client) as subscription:

        async def handle(message: postdate.Message) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1
            seen[message.topic] += 1
            if seen.total() == 101:
                subscription.stop()

        await within(subscription.run(handle, concurrency=7))
    assert (most, running) == (7, 0)
    assert seen == {TOPICS[0]: 50, TOPICS[1]: 1, TOPICS[3]: 50}
    assert await counts(client, "ready_messages") == [0] * 4


async def test_many_are_taken_of_all_partitions_and_acked_where_they_came_from(client: postdate.Client):
    await fill(client, 50, 1, 0, 50)
    async with consuming(client) as subscription:
        while sum([len(await within(each.kept())) for each in subscription._subscriptions]) < 101:
            await asyncio.sleep(0.01)
        first = await within(subscription.receive_many(40))
        assert Counter(message.topic for message in first).most_common() == [
            (TOPICS[0], 20),
            (TOPICS[3], 19),
            (TOPICS[1], 1),
        ]
        rest = await within(subscription.receive_many())
        assert len(rest) == 61
        assert await subscription.receive_many(timeout=timedelta(milliseconds=1)) == []
        with pytest.raises(ValueError, match="max_messages"):
            await subscription.receive_many(0)
        await subscription.ack_many([*first, *rest[1:]])
        assert await counts(client, "leased_messages") == [int(rest[0].topic == topic) for topic in TOPICS], (
            "all others are settled"
        )
        subscription.ack_nowait(rest[0])
        await subscription.wait_confirmed()
    assert await counts(client, "ready_messages") == [0] * 4


@pytest.mark.parametrize("way", ["iterate", "receive_many", "run"])
async def test_a_limit_is_for_all_partitions_and_what_was_sent_beyond_it_goes_back_uncounted(
    client: postdate.Client, way: str
):
    await fill(client, 30, 30, 30, 30)
    taken: list[postdate.Message] = []

    async def handle(message: postdate.Message) -> None:
        await asyncio.sleep(0)
        taken.append(message)

    async with consuming(client, limit=50) as subscription:
        if way == "run":
            await within(subscription.run(handle, concurrency=20))
        elif way == "iterate":
            taken += [message async for message in subscription]
            await subscription.ack_many(taken)
        else:
            while messages := await within(subscription.receive_many(20)):
                taken += messages
            await subscription.ack_many(taken)
    assert len(taken) == 50
    async with consuming(client) as subscription:
        rest = await take(subscription, 70)
        assert {message.attempt for message in rest} == {1}
        await subscription.ack_many(rest)


async def test_what_was_taken_beside_a_partition_that_is_deleted_is_not_lost(client: postdate.Client):
    await fill(client, 5, 0, 0, 0)
    async with consuming(client) as subscription:
        while len(await within(subscription._subscriptions[0].kept())) < 5:
            await asyncio.sleep(0.01)
        await client.topics.delete(TOPICS[2])
        while subscription._subscriptions[2]._stream.error is None:
            await asyncio.sleep(0.01)
        assert len(await within(subscription.receive_many())) == 5
        with pytest.raises(postdate.NotFound, match=TOPICS[2]):
            await within(subscription.receive_many())


async def test_leaving_hands_back_what_was_not_taken_of_every_partition(client: postdate.Client):
    await fill(client, 10, 10, 10, 10)
    async with consuming(client) as subscription:
        await take(subscription, 6)
    assert await counts(client, "leased_messages") == [0] * 4
    with pytest.raises(StopAsyncIteration):
        await anext(subscription)
    async with consuming(client) as subscription:
        assert {message.attempt for message in await take(subscription, 40)} == {1}


async def test_partition_that_breaks_reconnects_alone(client: postdate.Client):
    await fill(client, 1, 1, 1, 1)
    async with consuming(client) as subscription:
        taken = {message.topic: message for message in await take(subscription, 4)}
        await client.subscriptions.seek(TOPICS[2], "s", EARLIEST)
        (again,) = await take(subscription, 1)
        assert (again.topic, again.id) == (TOPICS[2], taken[TOPICS[2]].id)
        assert [subscription._inbox.connection_of(taken[topic]) for topic in TOPICS] == [1, 1, 2, 1]
        taken[TOPICS[2]] = again
        for message in taken.values():
            await message.ack()
    assert await counts(client, "ready_messages") == [0] * 4


async def test_partition_that_is_deleted_is_raised_beside_busy_ones(client: postdate.Client):
    await fill(client, 200, 200, 0, 200)
    async with consuming(client) as subscription:
        await take(subscription, 3)
        await client.topics.delete(TOPICS[2])
        with pytest.raises(postdate.NotFound, match=TOPICS[2]):
            await take(subscription, 597)
            await take(subscription, 1)


async def test_partition_that_cannot_be_opened_leaves_none_open(client: postdate.Client):
    await client.topics.create(TOPICS[2])
    await client.subscriptions.create(TOPICS[2], "s", type=postdate.SubscriptionType.EXCLUSIVE)
    subscription = consuming(client, type=postdate.SubscriptionType.SHARED)
    with pytest.raises(postdate.PostdateError):
        await within(subscription.open())
    assert await counts(client, "consumers") == [0] * 4


async def test_opening_twice_is_refused_and_harms_nothing(client: postdate.Client):
    await fill(client, 1, 0, 0, 0)
    async with consuming(client) as subscription:
        with pytest.raises(RuntimeError, match="opened once"):
            await subscription.open()
        (message,) = await take(subscription, 1)
        await message.ack()


def test_without_async() -> None:
    with (
        postdate.sync.testing.broker() as fake,
        fake.client() as client,
        client.subscribe_partitioned("orders", "s", partitions=3) as subscription,
    ):
        with client.partitioned_producer("orders", partitions=3) as producer:
            receipt = producer.send(b"later", key="17", deliver_after=timedelta(days=1))
            producer.send_many([OutgoingMessage(b"now", key=str(number)) for number in range(9)])
        for _ in range(9):
            with next(subscription).processing() as message:
                assert message.payload == b"now"
        fake.advance(timedelta(days=1))
        seen: list[tuple[str, bytes]] = []

        def handle(message: postdate.sync.Message) -> None:
            seen.append((message.topic, message.payload))
            subscription.stop()

        subscription.run(handle)
        assert seen == [(receipt.topic, b"later")]
