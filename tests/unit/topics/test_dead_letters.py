"""Messages that are given up, and their place then: one, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from functools import partial

import pytest

from broker.errors import LimitReached, Refused
from broker.model import Position
from broker.policy import SubscriptionPolicy, TopicPolicy
from broker.subscriptions.entry_states import PROMISED
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import CrashPolicy
from broker.topics import control
from broker.topics.dead_letter_frames import HOLDER_NAME
from tests.depth import at_depth
from tests.harness import EARLIEST, Node, Outgoing, small_config
from tests.unit.topics.letters import (
    DEAD,
    THREE,
    billing,
    held,
    letters,
    nack_dead,
    on_node,
    owed,
    subscription_of,
)


def sent(*payloads: bytes, key: str = "") -> list[Outgoing]:
    return [Outgoing(payload, key=key) for payload in payloads]


def test_three_deliveries_are_three_however_they_end():
    async def scenario(node: Node) -> None:
        inbox = await billing(node, lease_ms=1_000)
        [position] = await node.produce("orders", sent(b"x"))
        assert [each.attempt for each in await inbox.wait(1)] == [1]
        await inbox.nack([position])
        assert [each.attempt for each in await inbox.wait(1)] == [2]  # and its lease ends
        assert [each.attempt for each in await inbox.wait(1)] == [3]
        lost_ms = node.clock.now_ms()
        inbox.detach()  # its consumer vanishes
        await node.broker.dead_letters.wait_idle()
        letter = (await letters(node))[b"x"]
        assert (letter["attempts"], letter["reason"]) == ("3", "max_delivery_attempts")
        assert (letter["topic"], letter["subscription"]) == ("orders", "billing")
        assert Position(int(letter["ledger-id"]), int(letter["entry-id"])) == position
        assert lost_ms <= int(letter["time-ms"]) <= node.clock.now_ms()
        assert await owed(node, "orders", "billing") == []
        assert subscription_of(node).counters.dead_lettered_messages == 1

    on_node(scenario)


def test_without_a_limit_nothing_is_given_up():
    async def scenario(node: Node) -> None:
        inbox = await billing(node, SubscriptionPolicy(initial_backoff_ms=0))
        [position] = await node.produce("orders", sent(b"x"))
        for attempt in range(1, 40):
            assert [each.attempt for each in await inbox.wait(1)] == [attempt]
            await inbox.nack([position])
        assert held(node) == []

    on_node(scenario)


def test_one_delivery_is_enough_if_so_set_and_the_others_of_a_nack_come_back():
    async def scenario(node: Node) -> None:
        inbox = await billing(node, SubscriptionPolicy(max_delivery_attempts=1))
        await node.produce("orders", sent(b"x"))
        await inbox.nack([each.position for each in await inbox.wait(1)])
        assert list(await letters(node)) == [b"x"]

    on_node(scenario)


def test_of_one_nack_only_what_was_delivered_too_often_is_given_up():
    async def scenario(node: Node) -> None:
        inbox = await billing(node)
        await node.produce("orders", sent(b"old"))
        for _ in range(2):
            await inbox.nack([each.position for each in await inbox.wait(1)])
        await node.produce("orders", sent(b"new"))
        await inbox.nack([each.position for each in await inbox.wait(2)])
        assert [(each.payload, each.attempt) for each in await inbox.wait(1)] == [(b"new", 2)]
        assert list(await letters(node)) == [b"old"]

    on_node(scenario)


@pytest.mark.parametrize("policy", [CrashPolicy.LOSE_UNSYNCED, CrashPolicy.KEEP_ALL, None], ids=str)
def test_attempts_and_delays_survive_a_restart_and_a_crash(policy):
    async def scenario(node: Node) -> None:
        inbox = await billing(node)
        [position] = await node.produce("orders", sent(b"x"))
        due_ms = 0
        for attempt in (1, 2, 3):
            [delivery] = await inbox.wait(1)
            assert delivery.attempt == attempt
            assert delivery.sent_ms >= due_ms
            due_ms = node.clock.now_ms() + 60_000
            await inbox.nack(
                [position], 60_000, "boom" if attempt == 1 else ""
            )  # without one, the last one stays
            if attempt == 2:
                await node.checkpoint()
            if policy is None:
                await node.stop()
                node = Node(node.vfs, node.clock, node.config).open()
            else:
                node = node.crash(policy).open()
            inbox = await billing(node)
        letter = (await letters(node))[b"x"]
        assert letter["attempts"] == "3"
        assert (letter["reason"], letter["last-reason"]) == ("max_delivery_attempts", "boom")
        assert subscription_of(node).reasons.texts == {}
        await asyncio.sleep(200)
        assert inbox.poll() == []

    on_node(scenario)


def test_a_consumer_that_vanishes_as_the_broker_stops_leaves_a_dead_letter():
    async def scenario(node: Node) -> None:
        inbox = await billing(node, SubscriptionPolicy(max_delivery_attempts=1))
        await node.produce("orders", sent(b"x"))
        await inbox.wait(1)
        inbox.detach()
        await node.stop()
        node = Node(node.vfs, node.clock, node.config).open()
        assert list(await letters(node)) == [b"x"]

    on_node(scenario)


def test_dead_letters_are_known_after_a_checkpoint_and_forgotten_once_done():
    async def scenario(node: Node) -> None:
        inbox = await billing(node)
        await node.produce("orders", sent(b"1", b"2", b"3"))
        await nack_dead(inbox, [each.position for each in await inbox.wait(3)])
        dead = await node.subscribe(DEAD, HOLDER_NAME)
        first = (await dead.wait(3))[0]
        await dead.ack([first.position])
        await node.checkpoint()
        node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
        assert sorted(await letters(node)) == [b"2", b"3"]
        assert len(held(node)) == sum(map(len, subscription_of(node).dead_letters.values())) == 2

    on_node(scenario)


@pytest.mark.slow
def test_many_and_large_messages_go_in_several_records():
    async def scenario(node: Node) -> None:
        inbox = await billing(node, permits=5_000)
        for first in range(0, 1_200, 300):
            await node.produce("orders", [Outgoing(b"%d" % i) for i in range(first, first + 300)])
        await node.produce("orders", [Outgoing(b"L" * 900 + b"%d" % i) for i in range(20)])
        await nack_dead(inbox, [each.position for each in await inbox.wait(1_220)])
        assert len(await letters(node)) == 1_220
        assert await owed(node, "orders", "billing") == []

    on_node(scenario, config=small_config(ledger_max_entries=5_000))


def test_neither_a_full_disk_nor_quotas_nor_a_ttl_stand_in_the_way():
    async def scenario(node: Node) -> None:
        inbox = await billing(node)
        await node.produce("orders", [Outgoing(b"1"), Outgoing(b"2", ttl_ms=500)])
        policy = TopicPolicy(max_pending_messages=1, max_produce_rate=1, default_ttl_ms=10)
        await node.broker.registry.create_topic(DEAD, policy)
        node.broker._disk_full = True
        await nack_dead(inbox, [each.position for each in await inbox.wait(2)])
        await asyncio.sleep(60)
        assert sorted(await letters(node)) == [b"1", b"2"]
        dead = await node.subscribe(DEAD, HOLDER_NAME)
        assert sorted(each.payload for each in await dead.wait(2)) == [b"1", b"2"]

    on_node(scenario)


def test_the_topic_is_made_whatever_auto_creation_says_and_holds_what_comes_first():
    async def scenario(node: Node) -> None:
        await node.broker.registry.create_topic("orders", TopicPolicy())
        inbox = await billing(node)
        await node.produce("orders", sent(b"1", b"2"))
        positions = [each.position for each in await inbox.wait(2)]
        await asyncio.gather(*(nack_dead(inbox, [each]) for each in positions))
        assert sorted(await letters(node)) == [b"1", b"2"]

    on_node(scenario, config=small_config(auto_create_topics=False))


def test_a_topic_that_was_there_keeps_its_messages_out_of_it():
    async def scenario(node: Node) -> None:
        await node.create_subscription("mine", "reader")
        await node.produce("mine", sent(b"not dead"))
        inbox = await billing(node, SubscriptionPolicy(dead_letter_topic="mine"))
        await node.produce("orders", sent(b"dead"))
        await nack_dead(inbox, [(await inbox.wait(1))[0].position])
        assert await owed(node, "mine", HOLDER_NAME) == [b"dead"]
        assert await owed(node, "mine", "reader") == [b"not dead", b"dead"]

    on_node(scenario)


def test_dead_letters_do_not_die_again_by_themselves():
    async def scenario(node: Node) -> None:
        inbox = await billing(node, SubscriptionPolicy())
        await node.produce("orders", sent(b"x"))
        await nack_dead(inbox, [(await inbox.wait(1))[0].position])
        dead = await node.subscribe(DEAD, HOLDER_NAME)
        for _ in range(5):
            await dead.nack([(await dead.wait(1))[0].position])
        assert list(await letters(node)) == [b"x"]

    on_node(scenario, config=small_config(max_delivery_attempts=2, max_backoff_ms=100))


def test_what_cannot_become_a_dead_letter_waits_as_long_as_a_message_may():
    async def scenario(node: Node) -> None:
        inbox = await billing(
            node, SubscriptionPolicy(max_delivery_attempts=1, initial_backoff_ms=0, max_backoff_ms=50_000)
        )
        [position] = await node.produce("orders", sent(b"x"))
        await inbox.wait(1)
        began_ms = node.clock.now_ms()
        await inbox.nack([position], reason="boom")  # there may be no other topic
        assert "orders" in node.broker.registry.by_name
        node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()  # the wait is durable
        inbox = await billing(node)
        [again] = await inbox.wait(1)
        assert (again.attempt, again.sent_ms >= began_ms + 50_000) == (2, True)
        await node.broker.registry.delete_topic("filler")
        await inbox.nack([position])
        letter = (await letters(node))[b"x"]
        assert (letter["attempts"], letter["last-reason"]) == ("2", "boom")

    async def with_filler(node: Node) -> None:
        await node.broker.registry.create_topic("filler", TopicPolicy())
        await scenario(node)

    on_node(with_filler, config=small_config(topics_max=2))


@pytest.mark.parametrize(
    ("topics_max", "sentence"),
    [(10, "Messages are moved to the dead letters"), (2, "Dead letters could not be stored")],
)
def test_dead_letters_write_one_line_a_minute_with_the_messages_since(
    caplog: pytest.LogCaptureFixture, topics_max: int, sentence: str
):
    caplog.set_level("INFO")

    def counts() -> list[int]:
        """The messages of each line since the last call."""
        counted = [vars(each)["fields"]["messages"] for each in caplog.records if sentence in each.message]
        caplog.clear()
        return counted

    async def scenario(node: Node) -> None:
        await node.broker.registry.create_topic("filler", TopicPolicy())
        inbox = await billing(node, replace(THREE, max_backoff_ms=600_000))
        positions = await node.produce("orders", sent(*(b"%d" % each for each in range(22))))
        await inbox.wait(22)
        for position in positions[:20]:
            await nack_dead(inbox, [position], "boom")
            await node.broker.dead_letters.wait_idle()
        assert counts() == [1]
        await asyncio.sleep(60)
        await nack_dead(inbox, positions[20:], "later")
        await node.broker.dead_letters.wait_idle()
        assert counts() == [21]

    on_node(scenario, config=small_config(topics_max=topics_max))


def test_a_limit_of_topics_is_a_refusal_only_to_those_who_ask():
    async def scenario(node: Node) -> None:
        await billing(node)
        with pytest.raises(LimitReached):
            await node.broker.registry.topic_or_create("another")

    on_node(scenario, config=small_config(topics_max=1))


@pytest.mark.slow
def test_an_acknowledgement_on_the_way_to_the_dead_letters_wins_or_comes_too_late_but_not_both():
    """The message is a dead letter, or it was acknowledged; an acknowledgement that lost is answered all the same."""

    async def scenario(node: Node, steps: int) -> list[bytes]:
        inbox = await billing(node)
        positions = await node.produce("orders", sent(b"1", b"2", b"3"))
        await inbox.wait(3)
        giving_up = asyncio.create_task(nack_dead(inbox, positions))
        for _ in range(steps):
            await asyncio.sleep(0.0005 if steps % 2 else 0)
        assert await inbox.ack(positions[1:2]) == []
        await giving_up
        assert await owed(node, "orders", "billing") == []
        subscription = subscription_of(node)
        assert subscription.states.count(*PROMISED) == 0
        found = sorted(await letters(node))
        counters = subscription.counters
        assert counters.acked_messages + counters.dead_lettered_messages == 3
        assert counters.dead_lettered_messages == len(found)
        return found

    outcomes = [on_node(partial(scenario, steps=steps), seed=steps) for steps in range(1, 40)]
    assert all(found in ([b"1", b"2", b"3"], [b"1", b"3"]) for found in outcomes)
    assert [b"1", b"2", b"3"] in outcomes, "no acknowledgement came too late"
    assert [b"1", b"3"] in outcomes, "no acknowledgement came in time"


@pytest.mark.slow
def test_what_a_seek_takes_back_on_the_way_is_owed_again_and_no_dead_letter():
    async def scenario(node: Node) -> None:
        outcomes = set()
        for round_ in range(30):
            name = f"s{round_}"
            await node.create_subscription("orders", name, policy=THREE)
            inbox = await node.subscribe("orders", name)
            [position] = await node.produce("orders", sent(b"%d" % round_))
            await inbox.wait(1)
            giving_up = asyncio.create_task(nack_dead(inbox, [position]))
            for _ in range(round_):
                await asyncio.sleep(0)
            subscription = inbox.subscription
            await control.seek(node.topic("orders"), subscription, position)
            await giving_up
            await asyncio.sleep(1)
            dead = list(await letters(node, name=name))
            waits = not subscription.cursor.is_settled(position)
            assert waits or dead, "in neither place"
            outcomes.add((waits, bool(dead)))
            assert subscription.states.count(*PROMISED) == 0
            inbox.detach()
        assert (True, False) in outcomes, "no seek came in time"

    on_node(scenario)


async def deleted_source(node: Node) -> None:
    await node.broker.registry.delete_topic("orders")


async def deleted_subscription(node: Node) -> None:
    await node.topic("orders").subscriptions.delete("billing")


async def deleted_target(node: Node) -> None:
    if DEAD in node.broker.registry.by_name:
        await node.broker.registry.delete_topic(DEAD)


async def deleted_holder(node: Node) -> None:
    topic = node.broker.registry.by_name.get(DEAD)
    if topic is not None and topic.subscriptions.find(HOLDER_NAME):
        await topic.subscriptions.delete(HOLDER_NAME)


@pytest.mark.slow
@pytest.mark.parametrize("delete", [deleted_source, deleted_subscription, deleted_target, deleted_holder])
@pytest.mark.parametrize("seed", range(at_depth(change=4, deep=8)))
def test_what_is_deleted_on_the_way_breaks_nothing(delete, seed):
    async def scenario(node: Node) -> None:
        inbox = await billing(node)
        positions = await node.produce("orders", sent(b"1", b"2"))
        await inbox.wait(2)
        await nack_dead(inbox, positions[:1])
        giving_up = asyncio.create_task(nack_dead(inbox, positions[1:]))
        for _ in range(seed * 3):
            await asyncio.sleep(0)
        await delete(node)
        await giving_up
        await asyncio.sleep(1)
        if "orders" in node.broker.registry.by_name and delete is not deleted_subscription:
            # What was in the topic went with it; what came later has a place again.
            assert b"1" not in await letters(node)
            assert await owed(node, "orders", "billing") == []
            [third] = await node.produce("orders", sent(b"3"))
            await inbox.wait(1)
            await nack_dead(inbox, [third])
            assert b"3" in await letters(node)
        await node.checkpoint()
        node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()

    on_node(scenario, seed=seed)


@pytest.mark.parametrize("type_", [SubscriptionType.FAILOVER, SubscriptionType.EXCLUSIVE])
def test_the_others_keep_their_order_when_a_consumer_takes_over(type_):
    async def scenario(node: Node) -> None:
        policy = SubscriptionPolicy(max_delivery_attempts=2, initial_backoff_ms=0)
        await node.create_subscription("orders", "billing", type_=type_, position=EARLIEST, policy=policy)
        first = await node.subscribe("orders", "billing", permits=4)
        await node.produce("orders", sent(b"0", b"1", b"2", b"3"))
        await first.wait(4)
        await first.nack([first.received[1].position])
        assert [each.attempt for each in await first.wait(1)] == [2]
        await node.produce("orders", sent(b"4", b"5"))
        first.detach()
        second = await node.subscribe("orders", "billing")
        assert [each.payload for each in await second.wait(5)] == [b"0", b"2", b"3", b"4", b"5"]
        await node.broker.dead_letters.wait_idle()
        assert list(await letters(node)) == [b"1"]

    on_node(scenario)


def test_a_dead_letter_does_not_hold_up_its_key():
    async def scenario(node: Node) -> None:
        await node.create_subscription("orders", "billing", type_=SubscriptionType.KEY_SHARED, policy=THREE)
        inboxes = [await node.subscribe("orders", "billing", permits=1) for _ in range(3)]
        await node.produce("orders", sent(b"0", b"1", b"2", key="k"))
        got: list[bytes] = []
        rng = random.Random(3)
        async with asyncio.timeout(600):
            while len(got) < 2:
                for inbox in inboxes:
                    for delivery in inbox.poll():
                        if delivery.payload == b"0":
                            await inbox.nack([delivery.position])
                        else:
                            got.append(delivery.payload)
                            await inbox.ack([delivery.position])
                await asyncio.sleep(rng.random())
        await asyncio.sleep(10)
        for inbox in inboxes:
            for delivery in inbox.poll():
                await nack_dead(inbox, [delivery.position])
        assert got == [b"1", b"2"]
        assert await owed(node, "orders", "billing") == []

    on_node(scenario)


def test_a_subscription_that_would_have_no_place_is_refused():
    async def scenario(node: Node) -> None:
        for name, policy in (
            ("t" * 250, SubscriptionPolicy(max_delivery_attempts=1)),
            ("orders", SubscriptionPolicy(dead_letter_topic="orders")),
        ):
            topic = await node.broker.registry.topic_or_create(name)
            with pytest.raises(Refused) as caught:
                await topic.subscriptions.create("s", 1, EARLIEST, policy)
            assert caught.value.reason == "NO_DEAD_LETTER_TOPIC"
            assert topic.subscriptions.find("s") is None

    on_node(scenario)


def test_a_nack_that_would_have_no_place_is_refused_and_the_message_stays_leased():
    async def scenario(node: Node) -> None:
        name = "t" * 250
        inbox = await node.subscribe(name, "s")
        [position] = await node.produce(name, sent(b"x"))
        await inbox.wait(1)
        with pytest.raises(Refused):
            await nack_dead(inbox, [position])
        assert await inbox.ack([position]) == []

    on_node(scenario)
