"""Dead letters in the hands of operators: sent again, for one subscription only, or dropped."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from broker.model import Entries, Position, count_entries
from broker.policy import DELAYED_DISABLED, SubscriptionPolicy, TopicPolicy
from broker.testing.mem_vfs import CrashPolicy
from broker.topics import control
from broker.topics.dead_letter_frames import HOLDER_NAME, PREFIX
from tests.harness import EARLIEST, Inbox, Node, Outgoing, entries_of, small_config
from tests.unit.topics.letters import (
    DEAD,
    THREE,
    billing,
    held,
    letters,
    nack_dead,
    on_node,
    owed,
    stored,
    subscription_of,
)

SHARED_TOPIC = SubscriptionPolicy(dead_letter_topic="dead", initial_backoff_ms=0, max_delivery_attempts=3)


async def requeue(
    node: Node, chosen: Entries | None = None, after_ms: int = 0, name: str = "billing"
) -> Entries:
    return await node.broker.dead_letters.requeue(subscription_of(node, name=name), chosen, after_ms)


async def purge(node: Node, chosen: Entries | None = None, name: str = "billing") -> Entries:
    return await node.broker.dead_letters.purge(subscription_of(node, name=name), chosen)


async def with_letters(node: Node, *payloads: bytes, policy: SubscriptionPolicy = THREE) -> Inbox:
    """A subscription that has given up these messages."""
    inbox = await billing(node, policy)
    await node.produce("orders", [Outgoing(payload, key="k", ttl_ms=1_000) for payload in payloads])
    await nack_dead(inbox, [each.position for each in await inbox.wait(len(payloads))])
    return inbox


def test_requeued_messages_are_new_ones_for_one_subscription():
    async def scenario(node: Node) -> None:
        await node.create_subscription("orders", "other")
        inbox = await with_letters(node, b"1", b"2")
        other = await node.subscribe("orders", "other")
        await other.ack([each.position for each in await other.wait(2)])
        assert count_entries(await requeue(node)) == 2
        again = await inbox.wait(2)
        assert [(each.payload, each.attempt) for each in again] == [(b"1", 1), (b"2", 1)]
        await asyncio.sleep(5)
        assert other.poll() == []
        assert await owed(node, "orders", "other") == []
        assert held(node) == []
        frames = await stored(node, "orders")
        assert all(PREFIX.encode() not in frame for frame in frames.values())
        counters = subscription_of(node, DEAD, HOLDER_NAME).counters
        assert (counters.requeued_messages, counters.acked_messages) == (2, 0)
        # Attempts begin anew, and what is given up again is one dead letter.
        for attempt in (1, 2, 3):
            assert [each.attempt for each in again] == [attempt] * 2
            await inbox.nack([each.position for each in again])
            again = await inbox.wait(2) if attempt < 3 else []
        assert sorted(await letters(node)) == [b"1", b"2"]
        node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
        assert await owed(node, "orders", "other") == []
        assert sorted(await letters(node)) == [b"1", b"2"]

    on_node(scenario)


def test_only_those_chosen_are_requeued():
    async def scenario(node: Node) -> None:
        inbox = await with_letters(node, b"1", b"2", b"3")
        second = held(node)[1]
        nowhere = Position(second.ledger_id, 999)
        moved = await requeue(node, entries_of([second, nowhere]))
        assert moved == entries_of([second])
        assert [each.payload for each in await inbox.wait(1)] == [b"2"]
        assert sorted(await letters(node)) == [b"1", b"3"]
        assert await requeue(node, entries_of([second])) == {}  # it is none any more

    on_node(scenario)


def test_a_delay_counts_also_where_producers_may_not_delay():
    async def scenario(node: Node) -> None:
        inbox = await with_letters(node, b"x")
        other = await node.create_subscription("orders", "other")
        await node.topic("orders").change_policy(TopicPolicy(delayed_delivery=DELAYED_DISABLED))
        asked_ms = node.clock.now_ms()
        await requeue(node, after_ms=60_000)
        node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
        inbox = await billing(node)
        [again] = await inbox.wait(1)
        assert again.sent_ms >= asked_ms + 60_000
        assert again.deliver_at_ms >= asked_ms + 60_000
        assert await owed(node, "orders", other.name) == []

    on_node(scenario)


def test_two_requests_at_once_send_each_message_once():
    async def scenario(node: Node) -> None:
        inbox = await with_letters(node, *(b"%d" % i for i in range(30)))
        results = await asyncio.gather(requeue(node), requeue(node), purge(node))
        assert sum(map(count_entries, results)) == 30
        await asyncio.sleep(1)
        again = [each.payload for each in inbox.poll()]
        assert len(again) == len(set(again)) == count_entries(results[0]) + count_entries(results[1])
        assert held(node) == []

    on_node(scenario)


def test_what_a_consumer_of_the_dead_letters_holds_is_requeued_from_under_it():
    async def scenario(node: Node) -> None:
        inbox = await with_letters(node, b"x")
        dead = await node.subscribe(DEAD, HOLDER_NAME)
        [letter] = await dead.wait(1)
        await requeue(node)
        [again] = await inbox.wait(1)
        assert await inbox.ack([again.position]) == []
        assert await dead.nack([letter.position]) != []
        await asyncio.sleep(100)
        assert dead.poll() == []

    on_node(scenario)


def test_purged_messages_are_gone_for_good():
    async def scenario(node: Node) -> None:
        inbox = await with_letters(node, b"1", b"2", b"3")
        first = held(node)[0]
        assert await purge(node, entries_of([first, Position(1 << 40, 0)])) == entries_of([first])
        assert sorted(await letters(node)) == [b"2", b"3"]
        assert count_entries(await purge(node)) == 2
        assert count_entries(await purge(node)) == 0
        assert subscription_of(node, DEAD, HOLDER_NAME).counters.purged_messages == 3
        node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
        assert held(node) == []
        assert await owed(node, DEAD, HOLDER_NAME) == []
        await asyncio.sleep(10)
        assert inbox.poll() == []

    on_node(scenario)


def test_subscriptions_that_share_a_topic_see_their_own_only():
    async def scenario(node: Node) -> None:
        inboxes = {}
        for name in ("a", "b"):
            await node.create_subscription("orders", name, policy=SHARED_TOPIC)
            inboxes[name] = await node.subscribe("orders", name)
        await node.produce("orders", [Outgoing(b"1"), Outgoing(b"2")])
        for name, index in (("a", 0), ("b", 1)):
            delivered = await inboxes[name].wait(2)
            await nack_dead(inboxes[name], [delivered[index].position], reason=name)
            await inboxes[name].ack([delivered[1 - index].position])
        assert list(await letters(node, name="a")) == [b"1"]
        assert list(await letters(node, name="b")) == [b"2"]
        assert await owed(node, "dead", HOLDER_NAME) == [b"1", b"2"]
        assert await purge(node, entries_of(held(node, name="b")), name="a") == {}
        await requeue(node, name="b")
        assert [each.payload for each in await inboxes["b"].wait(1)] == [b"2"]
        await asyncio.sleep(10)
        assert inboxes["a"].poll() == []
        assert list(await letters(node, name="a")) == [b"1"]

    on_node(scenario)


def test_dead_letters_stay_known_when_later_ones_go_elsewhere():
    async def scenario(node: Node) -> None:
        inbox = await with_letters(node, b"1")
        topic, subscription = node.topic("orders"), subscription_of(node)
        await control.update_policy(
            topic, subscription, SubscriptionPolicy(dead_letter_topic="elsewhere"), {"dead_letter_topic"}
        )
        await node.produce("orders", [Outgoing(b"2")])
        await nack_dead(inbox, [(await inbox.wait(1))[0].position])
        assert await owed(node, "elsewhere", HOLDER_NAME) == [b"2"]
        assert list(await letters(node)) == [b"1", b"2"]
        assert [place.topic.name for place in node.broker.dead_letters.places(subscription)] == [
            DEAD,
            "elsewhere",
        ]
        assert count_entries(await requeue(node)) == 2
        assert sorted(each.payload for each in await inbox.wait(2)) == [b"1", b"2"]

    on_node(scenario)


@pytest.mark.parametrize("next_life", [False, True])
def test_dead_letters_under_a_default_name_of_an_earlier_broker_are_listed_and_requeued(next_life: bool):
    """Names with a "~" led to another topic by default: what lies there is found by where it lies, not by name."""

    async def scenario(node: Node) -> None:
        old = f"or~ders~billing~{HOLDER_NAME}"
        policy = SubscriptionPolicy(dead_letter_topic=old, max_delivery_attempts=3, initial_backoff_ms=0)
        await node.create_subscription("or~ders", "billing", policy=policy)
        inbox = await node.subscribe("or~ders", "billing")
        await node.produce("or~ders", [Outgoing(b"1")])
        await nack_dead(inbox, [(await inbox.wait(1))[0].position])
        topic, subscription = node.topic("or~ders"), subscription_of(node, "or~ders")
        await control.update_policy(topic, subscription, SubscriptionPolicy(), {"dead_letter_topic"})
        await node.produce("or~ders", [Outgoing(b"2")])
        await nack_dead(inbox, [(await inbox.wait(1))[0].position])
        if next_life:
            await node.stop()
            node = Node(node.vfs, node.clock, node.config).open()
            inbox = node.attach(node.topic("or~ders"), subscription_of(node, "or~ders"))
        subscription = subscription_of(node, "or~ders")
        places = [place.topic.name for place in node.broker.dead_letters.places(subscription)]
        assert places == [old, f"or~ders~billing~7~{HOLDER_NAME}"]
        assert list(await letters(node, "or~ders")) == [b"1", b"2"]
        assert count_entries(await node.broker.dead_letters.requeue(subscription, None, 0)) == 2
        assert sorted(each.payload for each in await inbox.wait(2)) == [b"1", b"2"]

    on_node(scenario)


def test_a_subscription_made_with_its_first_message_gets_requeued_ones_and_a_later_one_does_not():
    async def scenario(node: Node) -> None:
        await with_letters(node, b"x")
        await requeue(node)
        later = await node.create_subscription("orders", "later")
        assert await owed(node, "orders", later.name) == []
        early = await node.create_subscription("orders", "early", position=EARLIEST)
        assert await owed(node, "orders", early.name) == [b"x", b"x"]  # it is owed all that is stored

    on_node(scenario)


def test_the_subscription_may_go_while_its_messages_come_back():
    async def scenario(node: Node) -> None:
        await with_letters(node, *(b"%d" % i for i in range(20)))
        requeueing = asyncio.create_task(requeue(node))
        await asyncio.sleep(0)
        await node.topic("orders").subscriptions.delete("billing")
        await asyncio.wait([requeueing])
        requeueing.exception()
        await node.checkpoint()
        node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
        assert "billing" not in {each.name for each in node.topic("orders").subscriptions.values()}

    on_node(scenario)


@pytest.mark.parametrize("deleted", ["topic", "holder"])
def test_what_was_deleted_is_not_held_any_more(deleted):
    async def scenario(node: Node) -> None:
        await with_letters(node, b"x")
        if deleted == "topic":
            await node.broker.registry.delete_topic(DEAD)
        else:
            await node.topic(DEAD).subscriptions.delete(HOLDER_NAME)
        assert held(node) == []
        assert await requeue(node) == {}
        assert await purge(node) == {}
        await node.checkpoint()
        if deleted == "topic":
            assert subscription_of(node).dead_letters == {}

    on_node(scenario)


def test_large_ones_come_back_too():
    async def scenario(node: Node) -> None:
        inbox = await with_letters(node, *(b"%03d" % i + b"." * 1_500 for i in range(12)))
        assert count_entries(await requeue(node)) == 12
        assert [each.payload[:3] for each in await inbox.wait(12)] == [b"%03d" % i for i in range(12)]

    on_node(scenario, config=small_config(ledger_max_entries=5))


@pytest.mark.slow
def test_a_purge_of_all_leaves_what_was_given_up_while_it_was_on_its_way():
    async def scenario(node: Node, steps: int) -> int:
        inbox = await with_letters(node, b"1")
        await node.produce("orders", [Outgoing(b"2")])
        [second] = await inbox.wait(1)
        giving_up = asyncio.create_task(nack_dead(inbox, [second.position]))
        for _ in range(steps):
            await asyncio.sleep(0.0005 if steps % 2 else 0)
        purged = count_entries(await purge(node))
        await giving_up
        assert purged + len(held(node)) == 2, "one was purged that was not there yet"
        before = await owed(node, DEAD, HOLDER_NAME)
        node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
        assert await owed(node, DEAD, HOLDER_NAME) == before
        return purged

    assert {on_node(partial(scenario, steps=steps), seed=steps) for steps in range(40)} == {1, 2}
