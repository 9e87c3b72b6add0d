"""Consumers that stay connected and do nothing: their messages go to others, on time, and without using up attempts."""

from __future__ import annotations

import asyncio

import pytest

from postdate_api.v1 import admin_pb2, consumer_pb2
from tests.wire.conftest import Message, Wire, eventually, ids_of, sets
from tests.wire.test_reclaim import metric

SHARED, KEY_SHARED, FAILOVER = 1, 2, 4


@pytest.mark.parametrize("type_", [SHARED, KEY_SHARED, FAILOVER])
async def test_what_a_hung_consumer_lets_run_out_goes_to_the_one_that_works(wire: Wire, type_: int):
    policy = admin_pb2.SubscriptionPolicy(lease_ms=600, max_delivery_attempts=3)
    await wire.create_subscription("t", type=type_, policy=policy)
    hung = await wire.subscribe("t")
    messages = [Message(payload=b"%d" % i, key=f"k{i % 7}") for i in range(40)]
    ids = await wire.produce("t", *messages)
    await hung.deliveries(40)
    working = await wire.subscribe("t")
    arrived = await working.deliveries(40)
    assert sorted(ids_of(arrived)) == sorted(ids)
    assert {each.delivery_attempt for each in arrived} == {2}
    assert await working.ack(ids) == []
    later = await wire.produce("t", *messages[:14])
    assert sorted(ids_of(await working.deliveries(14))) == sorted(later)
    stats = await wire.stats("t")
    assert stats.subscriptions[0].dead_letter_messages == 0


async def test_who_says_something_again_gets_messages_again(wire: Wire):
    await wire.create_subscription("t", policy=admin_pb2.SubscriptionPolicy(lease_ms=400))
    hung = await wire.subscribe("t")
    await wire.produce("t", b"x")
    await hung.delivery()
    working = await wire.subscribe("t")
    [again] = await working.deliveries(1)
    subscription = wire.broker.registry.topic("t").subscription("s")
    assert [each.silent for each in subscription.consumers] == [False, True]
    await hung.send(permits=consumer_pb2.Permits(messages=1))
    await eventually(lambda: not any(each.silent for each in subscription.consumers))
    await working.ack(ids_of([again]))
    ids = await wire.produce("t", *[b"x"] * 4)
    working.cancel()
    while (delivery := ids_of([await hung.delivery()])[0]) not in ids:
        pass  # what it was sent before, again and again, and did not read
    assert delivery in ids


async def test_a_lone_consumer_that_says_nothing_still_gets_what_ran_out(wire: Wire):
    await wire.create_subscription("t", policy=admin_pb2.SubscriptionPolicy(lease_ms=100))
    stream = await wire.subscribe("t")
    await wire.produce("t", b"x")
    assert [(await stream.delivery()).delivery_attempt for _ in range(3)] == [1, 2, 3]


async def test_leases_of_receive_end_without_anybody_looking(wire: Wire):
    policy = admin_pb2.SubscriptionPolicy(max_delivery_attempts=1)
    await wire.create_subscription("t", policy=policy)
    await wire.produce("t", b"x")
    assert len((await wire.receive("t", lease_ms=150)).deliveries) == 1
    subscription = wire.broker.registry.topic("t").subscription("s")
    await eventually(lambda: bool(subscription.dead_letters))
    [counts] = (await wire.stats("t")).subscriptions
    assert (counts.leased_messages, counts.ready_messages, counts.dead_letter_messages) == (0, 0, 1)


async def test_leases_of_receive_are_counted_rightly_by_who_only_scrapes(wire: Wire):
    await wire.create_subscription("t")
    await wire.produce("t", b"x")
    assert len((await wire.receive("t", lease_ms=150)).deliveries) == 1
    labels = '{subscription="s",topic="t"}'
    for _ in range(100):
        if await metric(wire, f"postdate_ready_messages{labels}") == 1:
            break
        await asyncio.sleep(0.05)
    assert await metric(wire, f"postdate_leased_messages{labels}") == 0


async def test_a_repeated_receive_sends_only_what_is_still_held(wire: Wire):
    await wire.create_subscription("t")
    ids = await wire.produce("t", b"a", b"b", b"c")
    first = await wire.receive("t", max_messages=3, attempt_id="k")
    assert await wire.receive("t", max_messages=3, attempt_id="k") == first
    await wire.ack("t", ids[:1])
    repeated = await wire.receive("t", max_messages=3, attempt_id="k")
    assert (ids_of(repeated.deliveries), repeated.consumer_id) == (ids[1:], first.consumer_id)
    await wire.ack("t", ids[1:])
    assert not (await wire.receive("t", max_messages=3, attempt_id="k")).deliveries


async def test_a_repeated_receive_does_not_send_what_was_given_back_for_later(wire: Wire):
    await wire.create_subscription("t")
    ids = await wire.produce("t", b"a")
    first = await wire.receive("t", attempt_id="k")
    nack = consumer_pb2.NackRequest(
        topic="t",
        subscription="s",
        consumer_id=first.consumer_id,
        entries=sets(ids),
        redeliver_after_ms=3_600_000,
    )
    await wire.consumer.Nack(nack)
    assert not (await wire.receive("t", attempt_id="k")).deliveries
