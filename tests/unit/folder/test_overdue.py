"""Messages whose time came while the broker was down: delivered, expired or dead letters, as their topic says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from broker.folder.overdue import plan_absences
from broker.policy import (
    OVERDUE_DEAD_LETTER,
    OVERDUE_DELIVER,
    OVERDUE_EXPIRE,
    SubscriptionPolicy,
    TopicPolicy,
)
from broker.storage.alive import ABSENCES_MAX, Absence, read_alive
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import CrashPolicy
from broker.testing.sim_clock import SimClock
from tests.harness import DAY_MS, Node, Outgoing, small_config
from tests.unit.topics.letters import letters, on_node, owed

MINUTE_MS = 60_000
EXPIRE = TopicPolicy(overdue_action=OVERDUE_EXPIRE)
DEAD_LETTER = TopicPolicy(overdue_action=OVERDUE_DEAD_LETTER)
ALIVE = "data/alive"


async def made(node: Node, policy: TopicPolicy, *names: str, topic: str = "orders") -> None:
    await node.broker.registry.create_topic(topic, policy)
    for name in names:
        await node.create_subscription(topic, name)


def later(payload: bytes, after_ms: int) -> Outgoing:
    return Outgoing(payload, deliver_after_ms=after_ms)


def step(node: Node, ms: int) -> None:
    assert isinstance(node.clock, SimClock)
    node.clock.step(ms)


async def killed(node: Node, seconds: float) -> Node:
    """The process ends without a word; the next one, not yet opened, comes after a while."""
    node.abandon()
    node.broker._lock.close()  # type: ignore[union-attr]
    await asyncio.sleep(seconds)
    return Node(node.vfs, node.clock, node.config)


async def stopped(node: Node, seconds: float) -> Node:
    await node.stop()
    await asyncio.sleep(seconds)
    return Node(node.vfs, node.clock, node.config)


async def cut(node: Node, seconds: float) -> Node:
    node = node.crash(CrashPolicy.LOSE_UNSYNCED)
    await asyncio.sleep(seconds)
    return node


END = pytest.mark.parametrize("end", [killed, stopped, cut])
End = Callable[[Node, float], Coroutine[Any, Any, Node]]


async def history(node: Node, end: End) -> Node:
    """Messages due at once, while the broker lives, while it is down, and after it is back; nobody is connected."""
    await node.produce("orders", [Outgoing(b"at once")])
    await node.produce("orders", [later(b"in life", 10_000), later(b"in absence", MINUTE_MS)])
    await node.produce("orders", [later(b"later", 10 * MINUTE_MS), later(b"absence too", MINUTE_MS + 1)])
    await asyncio.sleep(45)
    node = (await end(node, 120)).open()
    await asyncio.sleep(5)
    return node


@pytest.mark.slow
@END
def test_expired_where_the_topic_says_so_on_every_subscription(end):
    async def scenario(node: Node) -> None:
        await made(node, EXPIRE, "connects", "never connects")
        node = await history(node, end)
        assert await owed(node, "orders", "never connects") == [b"at once", b"in life", b"later"]
        inbox = await node.subscribe("orders", "connects")
        first = await inbox.wait(2)
        assert [each.payload for each in first] == [b"at once", b"in life"]
        await inbox.ack([each.position for each in first])
        assert [each.payload for each in await inbox.wait(1)] == [b"later"]
        assert inbox.subscription.counters.expired_messages == 2

    on_node(scenario)


@END
def test_dead_letters_where_the_topic_says_so(end):
    async def scenario(node: Node) -> None:
        await made(node, DEAD_LETTER, "a", "b")
        node = await history(node, end)
        for name in ("a", "b"):
            assert await owed(node, "orders", name) == [b"at once", b"in life", b"later"]
            found = await letters(node, name=name)
            assert sorted(found) == [b"absence too", b"in absence"]
            assert {(each["reason"], each["attempts"]) for each in found.values()} == {("overdue", "0")}
        node = await cut(node, 120)
        node.open()
        await asyncio.sleep(5)
        assert len(await letters(node, name="a")) == 2

    on_node(scenario)


@END
@pytest.mark.parametrize("policy", [TopicPolicy(), TopicPolicy(overdue_action=OVERDUE_DELIVER)])
def test_delivered_late_where_nothing_else_is_said(end, policy):
    async def scenario(node: Node) -> None:
        await made(node, policy, "s")
        await made(node, EXPIRE, "s", topic="another")
        node = await history(node, end)
        assert len(await owed(node, "orders", "s")) == 5
        inbox = await node.subscribe("orders", "s")
        assert len(await inbox.wait(4)) == 4

    on_node(scenario)


def test_the_brokers_own_setting_counts_where_the_topic_has_none():
    async def scenario(node: Node) -> None:
        await made(node, TopicPolicy(), "s")
        node = await history(node, killed)
        assert await owed(node, "orders", "s") == [b"at once", b"in life", b"later"]

    on_node(scenario, config=small_config(overdue_action="expire"))


def test_who_ignores_delays_is_not_concerned():
    async def scenario(node: Node) -> None:
        await made(node, EXPIRE)
        await node.create_subscription("orders", "ignores", type_=SubscriptionType.EXCLUSIVE)
        honours = SubscriptionPolicy(honor_delay=True)
        await node.create_subscription("orders", "honours", type_=SubscriptionType.EXCLUSIVE, policy=honours)
        node = await history(node, killed)
        assert len(await owed(node, "orders", "ignores")) == 5
        assert len(await owed(node, "orders", "honours")) == 3

    on_node(scenario)


@pytest.mark.slow
def test_a_broker_that_idled_for_long_knows_when_it_was_killed():
    """Nothing was produced and no checkpoint written for an hour: only the file says that somebody was there."""

    async def scenario(node: Node) -> None:
        await made(node, EXPIRE, "s")
        await node.produce("orders", [later(b"in life", 59 * MINUTE_MS), later(b"absence", 61 * MINUTE_MS)])
        await asyncio.sleep(3_600)
        node = (await killed(node, 3_600)).open()
        await asyncio.sleep(5)
        assert await owed(node, "orders", "s") == [b"in life"]

    on_node(scenario)


def test_an_action_that_was_set_later_counts_from_then_on():
    async def scenario(node: Node) -> None:
        await made(node, TopicPolicy(), "s")
        await node.produce("orders", [later(b"in life", 100_000), later(b"absence", 300_000)])
        assert read_alive(node.vfs, ALIVE) is None
        await asyncio.sleep(200)
        await node.topic("orders").change_policy(EXPIRE)
        await asyncio.sleep(3)
        node = (await killed(node, 200)).open()
        await asyncio.sleep(5)
        assert await owed(node, "orders", "s") == [b"in life"]
        await node.topic("orders").change_policy(TopicPolicy())
        await asyncio.sleep(3)
        assert read_alive(node.vfs, ALIVE) is None, "an old file would make an absence of a life"

    on_node(scenario)


def test_what_was_sent_is_not_overdue_though_nobody_noted_the_time_since():
    async def scenario(node: Node) -> None:
        await made(node, EXPIRE, "s")
        await node.produce("orders", [later(b"sent", 3_400), later(b"not sent", 6_000)])
        inbox = await node.subscribe("orders", "s", permits=1)
        [delivery] = await inbox.wait(1)
        await inbox.nack([delivery.position], 1_000)
        alive = read_alive(node.vfs, ALIVE)
        assert alive is not None
        assert alive.alive_ms < delivery.deliver_at_ms, "the test needs a moment between two signs of life"
        node = (await killed(node, 60)).open()
        await asyncio.sleep(5)
        assert await owed(node, "orders", "s") == [b"sent"]

    on_node(scenario)


@pytest.mark.parametrize("step_ms", [-DAY_MS, -MINUTE_MS])
def test_a_clock_that_was_set_back_meanwhile_makes_nothing_overdue(step_ms):
    async def scenario(node: Node) -> None:
        await made(node, EXPIRE, "s")
        await node.produce("orders", [later(b"x", 40_000)])
        await asyncio.sleep(5)
        node = await killed(node, 50)
        step(node, step_ms)
        node.open()
        await asyncio.sleep(5)
        assert await owed(node, "orders", "s") == [b"x"]
        inbox = await node.subscribe("orders", "s")
        await asyncio.sleep(5)
        assert inbox.poll() == []
        step(node, -step_ms)
        assert [each.payload for each in await inbox.wait(1)] == [b"x"]

    on_node(scenario)


def test_what_a_stepped_clock_makes_due_in_life_is_delivered():
    async def scenario(node: Node) -> None:
        await made(node, EXPIRE, "s")
        await node.produce("orders", [later(b"x", DAY_MS)])
        step(node, 2 * DAY_MS)
        await asyncio.sleep(3)
        node = (await killed(node, 5)).open()
        await asyncio.sleep(5)
        assert await owed(node, "orders", "s") == [b"x"]

    on_node(scenario)


@pytest.mark.parametrize("damage", [b"", b"PDAL", b"\x00" * 24])
def test_a_file_that_a_power_cut_damaged_is_no_obstacle(damage):
    async def scenario(node: Node) -> None:
        await made(node, EXPIRE, "s")
        await node.produce("orders", [later(b"absence", 100_000)])
        await asyncio.sleep(5)
        node = await killed(node, 200)
        node.vfs.remove(ALIVE)
        file = node.vfs.open(ALIVE, create=True)
        file.pwrite([damage], 0)
        file.close()
        node.open()
        await asyncio.sleep(5)
        assert await owed(node, "orders", "s") == []  # the journal says who lived when
        assert read_alive(node.vfs, ALIVE) is not None

    on_node(scenario)


def test_absences_add_up_to_a_limit():
    pending = (Absence(1, 2), Absence(5, 9))
    # Two seconds of doubt count as if the broker had been there.
    assert plan_absences(pending, 10, 2_020) == (*pending, Absence(2_010, 2_020))
    assert plan_absences(pending, 10, 2_010) == pending
    assert plan_absences((), 21, 20) == ()
    many = tuple(Absence(i, i + 1) for i in range(ABSENCES_MAX))
    assert plan_absences(many, 500, 2_600) == (*many[1:], Absence(2_500, 2_600))
