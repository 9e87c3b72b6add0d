"""Batches taken back before they were sent: they can be changed, keep their place, count no attempt.

Every way in which a batch leaves a consumer's outbox without its stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from broker.model import Position
from broker.policy import SubscriptionPolicy
from broker.subscriptions.consumer import Consumer
from broker.subscriptions.entry_states import State
from broker.subscriptions.subscription import Subscription
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import CrashPolicy
from broker.topics import control
from broker.topics.topic import Topic
from tests.harness import Node, Outgoing
from tests.unit.topics.change_world import DONE, HOUR_MS, TOPIC, cancel, messages, move, run, step, times_of

TYPES = pytest.mark.parametrize(
    "type_",
    list(SubscriptionType),
)


def drains(topic: Topic, subscription: Subscription, consumer: Consumer) -> None:
    """The client, or the broker with its Draining, wants no more to be sent."""
    subscription.consumers.drain(consumer)


def breaks(topic: Topic, subscription: Subscription, consumer: Consumer) -> None:
    topic.subscriptions.detach(subscription, consumer)


def hands_back(topic: Topic, subscription: Subscription, consumer: Consumer) -> None:
    consumer.hands_back = True
    topic.subscriptions.detach(subscription, consumer)


def is_late(topic: Topic, subscription: Subscription, consumer: Consumer) -> None:
    """The stream does not come to send it before the lease ends."""
    consumer.paused = True  # else it is handed out again at once


WAYS = pytest.mark.parametrize("leaves", [drains, breaks, hands_back, is_late])


def attach(node: Node, subscription: Subscription, permits: int = 10, permit_bytes: int = 0) -> Consumer:
    """A consumer whose stream does not come to write."""
    consumer = Consumer(f"c{next(node.consumer_numbers)}", "c", 30_000)
    consumer.grant(permits, permit_bytes)
    node.topic(TOPIC).subscriptions.attach(subscription, consumer)
    return consumer


async def handed_out(node: Node, type_: int, count: int = 3) -> tuple[Subscription, Consumer, list[Position]]:
    policy = SubscriptionPolicy(honor_delay=True, max_delivery_attempts=1)
    subscription = await node.create_subscription(TOPIC, "one", type_=type_, policy=policy)
    consumer = attach(node, subscription)
    positions = await node.produce(TOPIC, messages(count, deliver_after_ms=50, key="k"))
    await asyncio.sleep(1)
    assert subscription.states.leases.count() == count
    return subscription, consumer, positions


def records(node: Node) -> int:
    return node.broker.journal.next_lsn


@TYPES
@WAYS
def test_what_was_never_sent_can_be_changed_and_is_no_attempt(
    type_: int, leaves: Callable[[Topic, Subscription, Consumer], None]
):
    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        subscription, consumer, positions = await handed_out(node, type_)
        before = records(node)
        leaves(topic, subscription, consumer)
        await asyncio.sleep(consumer.lease_ms / 1000)
        assert consumer.next_nowait() is None
        assert subscription.states.leases.count() == 0
        assert records(node) == before, "no record says that it was sent"
        assert await cancel(topic, positions[:1]) == [DONE]
        assert await move(topic, positions[1:2], deliver_after_ms=HOUR_MS) == [DONE]
        topic.subscriptions.detach(subscription, consumer)
        inbox = node.attach(topic, subscription)
        await asyncio.sleep(1)
        assert [position for position, _ in times_of(inbox)] == positions[2:]
        step(node, HOUR_MS)
        await asyncio.sleep(5)
        assert [position for position, _ in times_of(inbox)] == [positions[2], positions[1]]
        assert {each.attempt for each in inbox.received} == {1}
        assert await inbox.ack(positions[1:]) == []
        assert subscription.unsettled_count() == 0
        return node

    run(scenario)


@TYPES
@WAYS
def test_what_was_never_sent_comes_after_a_crash(
    type_: int, leaves: Callable[[Topic, Subscription, Consumer], None]
):
    async def scenario(node: Node) -> Node:
        subscription, consumer, positions = await handed_out(node, type_)
        await node.checkpoint()
        leaves(node.topic(TOPIC), subscription, consumer)
        await asyncio.sleep(consumer.lease_ms / 1000)
        node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
        inbox = node.attach(node.topic(TOPIC), node.topic(TOPIC).subscription("one"))
        await asyncio.sleep(1)
        assert [position for position, _ in times_of(inbox)] == positions
        assert {each.attempt for each in inbox.received} == {1}
        return node

    run(scenario)


@TYPES
def test_what_was_sent_before_comes_back_by_a_record_and_before_what_was_not(type_: int):
    """Of one key: two are sent, two more wait to be, two are not handed out yet; then the stream breaks."""

    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        subscription = await node.create_subscription(TOPIC, "one", type_=type_)
        consumer = attach(node, subscription, permits=2)
        positions = await node.produce(TOPIC, [Outgoing(b"%d" % i, key="k") for i in range(6)])
        await asyncio.sleep(0.1)
        assert consumer.next_nowait() is not None
        consumer.grant(2, 0)
        subscription.work.set()
        await asyncio.sleep(0.1)
        assert subscription.states.leases.count() == 4
        others = (
            []
            if type_ == SubscriptionType.EXCLUSIVE
            else [node.attach(topic, subscription) for _ in range(2)]
        )
        await asyncio.sleep(0.1)
        for other in others if type_ == SubscriptionType.SHARED else ():
            await other.ack([position for position, _ in times_of(other)])
        topic.subscriptions.detach(subscription, consumer)
        others = others or [node.attach(topic, subscription)]
        await asyncio.sleep(1)
        for other in others:
            other.poll()
        received = sorted((each.sent_ns, each.position) for other in others for each in other.received)
        attempts = {each.position: each.attempt for other in others for each in other.received}
        assert attempts == {position: 2 if position in positions[:2] else 1 for position in positions}
        if type_ != SubscriptionType.SHARED:
            assert [position for _, position in received] == positions
        return node

    run(scenario, ledger_max_entries=100)


def test_a_key_keeps_its_order_when_its_consumer_drains_before_it_was_sent_anything():
    """The rest of the key is parked meanwhile, and goes to another consumer, behind what was taken back."""

    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        subscription = await node.create_subscription(TOPIC, "one", type_=SubscriptionType.KEY_SHARED)
        consumers = [attach(node, subscription, permits=2) for _ in range(2)]
        positions = await node.produce(TOPIC, [Outgoing(b"%d" % i, key="k") for i in range(6)])
        await asyncio.sleep(0.1)
        (owner,) = (each for each in consumers if subscription.states.leases.holds(each.consumer_id))
        inbox = node.attach(topic, subscription, permits=0)
        topic.subscriptions.detach(subscription, next(each for each in consumers if each is not owner))
        await asyncio.sleep(0.1)
        subscription.consumers.drain(owner)
        await asyncio.sleep(0.1)
        inbox.consumer.grant(10, 0)
        subscription.work.set()
        await asyncio.sleep(1)
        assert [position for position, _ in times_of(inbox)] == positions
        return node

    run(scenario, ledger_max_entries=100)


def test_a_key_keeps_its_order_when_what_was_never_sent_is_parked_and_catch_up_begins_again():
    """At the second catch-up it must not be as new as what is found by position, behind what becomes due meanwhile."""

    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        subscription = await node.create_subscription(TOPIC, "one", type_=SubscriptionType.KEY_SHARED)
        consumer = attach(node, subscription)
        keys = [f"key-{number}" for number in range(8)]
        await node.produce(TOPIC, [Outgoing(b"first", key=key) for key in keys])
        await asyncio.sleep(0.1)
        full, taking = (node.attach(topic, subscription, permits=permits) for permits in (0, 1_000))
        topic.subscriptions.detach(subscription, consumer)
        await asyncio.sleep(0.1)
        assert 0 < subscription.states.count(State.PARKED) < len(keys)
        subscription.begin_catchup(subscription.frontier_ms)  # as when the replay queue overflows
        await asyncio.sleep(0.1)
        taking.consumer.permits = 0
        subscription.begin_catchup(subscription.frontier_ms)
        await node.produce(TOPIC, [Outgoing(b"second", key=key, deliver_after_ms=50) for key in keys])
        await asyncio.sleep(0.1)
        full.consumer.grant(100, 0)
        subscription.work.set()
        await asyncio.sleep(0.1)
        full.poll()
        half = len(full.received) // 2
        assert [each.payload for each in full.received] == [b"first"] * half + [b"second"] * half
        assert {each.attempt for each in full.received} == {1}
        return node

    run(scenario, ledger_max_entries=100)


def test_a_key_keeps_its_order_when_a_dispatcher_finds_what_came_back_behind_what_is_new():
    """Both wait in the redelivery queue: one that is due again after a step back of the clock, and one that came back."""

    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        subscription = await node.create_subscription(TOPIC, "one", type_=SubscriptionType.KEY_SHARED)
        consumer = attach(node, subscription, permits=1)
        await node.produce(TOPIC, [Outgoing(b"timed", key="k", deliver_after_ms=1_000)])
        await node.produce(TOPIC, [Outgoing(b"at once", key="k")])
        await asyncio.sleep(1.5)
        step(node, -1_000)
        consumer.grant(1, 0)
        assert consumer.next_nowait() is not None
        subscription.work.set()
        await asyncio.sleep(0.1)
        assert subscription.states.count(State.QUEUED) == 1, "it waits for its time once more"
        consumer.permits = 0
        await asyncio.sleep(2)
        topic.subscriptions.detach(subscription, consumer)
        passing = attach(node, subscription, permits=0)
        await asyncio.sleep(0.1)
        topic.subscriptions.detach(subscription, passing)
        inbox = node.attach(topic, subscription, permits=1)
        assert [each.payload for each in await inbox.wait(2)] == [b"at once", b"timed"]
        return node

    run(scenario, ledger_max_entries=100)


@pytest.mark.slow
@pytest.mark.parametrize("permit_bytes", [0, 5, 1_000])
def test_permits_are_there_again_for_what_its_stream_did_not_come_to_send(permit_bytes: int):
    """A consumer that reads again after hours gets what it granted, once, and can acknowledge it."""

    async def scenario(node: Node) -> Node:
        subscription = await node.create_subscription(TOPIC, "one")
        consumer = attach(node, subscription, permits=2, permit_bytes=permit_bytes)
        positions = await node.produce(TOPIC, [Outgoing(b"%d" % i) for i in range(3)])
        await asyncio.sleep(HOUR_MS / 1000)
        batch = consumer.next_nowait()
        assert batch is not None
        count = 1 if permit_bytes == 5 else 2
        assert batch.entry_ids.tolist() == [each.entry_id for each in positions[:count]]
        assert batch.attempts.tolist() == [1] * count
        assert consumer.permits == 2 - count
        assert consumer.permit_bytes == max(0, permit_bytes - batch.frames_bytes)
        assert subscription.states.leases.count() == count
        assert subscription.counters.lease_expired_messages == 0
        return node

    run(scenario)


def test_other_settings_take_back_what_was_not_sent():
    """A subscription that ignores times begins to honour them: what was handed out early waits, and is not sent twice."""

    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        policy = SubscriptionPolicy(honor_delay=False, max_delivery_attempts=1)
        subscription = await node.create_subscription(
            TOPIC, "one", type_=SubscriptionType.FAILOVER, policy=policy
        )
        consumer = attach(node, subscription)
        positions = await node.produce(TOPIC, messages(3, deliver_after_ms=HOUR_MS))
        await asyncio.sleep(1)
        assert subscription.states.leases.count() == 3
        await control.update_policy(
            topic, subscription, SubscriptionPolicy(honor_delay=True), {"honor_delay"}
        )
        topic.subscriptions.detach(subscription, consumer)  # as its stream does, which is told to end
        assert await cancel(topic, positions[:1]) == [DONE]
        assert await move(topic, positions[1:2], deliver_after_ms=2 * HOUR_MS) == [DONE]
        inbox = node.attach(topic, subscription)
        await asyncio.sleep(5)
        assert times_of(inbox) == []
        step(node, HOUR_MS)
        await asyncio.sleep(5)
        assert [position for position, _ in times_of(inbox)] == positions[2:]
        step(node, HOUR_MS)
        await asyncio.sleep(5)
        assert [position for position, _ in times_of(inbox)] == [positions[2], positions[1]]
        assert {each.attempt for each in inbox.received} == {1}
        return node

    run(scenario)
