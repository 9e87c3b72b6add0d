"""Counts on virtual time: what is hidden, what comes due, and what is found out after a start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from broker.model import START
from broker.policy import SubscriptionPolicy
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import Latency, SimLoop, run_sim
from broker.topics import control, counts, oldest
from broker.topics.topic import Topic
from tests.depth import at_depth
from tests.harness import EARLIEST, LATEST, Node, Outgoing, small_config

HOUR_MS = 3_600_000
Scenario = Callable[[Node, SimClock], Coroutine[Any, Any, None]]


def run(scenario: Scenario, **config: object) -> None:
    async def whole(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, small_config(**config)).open()
        await scenario(node, clock)

    run_sim(whole, seed=1)


async def restarted(node: Node) -> Node:
    await node.stop()
    return Node(node.vfs, node.clock, node.config).open()


async def found(topic: Topic, name: str) -> tuple[int, int, int]:
    """Ready, leased, scheduled."""
    await topic.counts.wait_exact(60.0)
    each = topic.subscription_counts(topic.subscription(name))
    return each.ready, each.leased, each.scheduled


def delayed(count: int, after_ms: int) -> list[Outgoing]:
    return [Outgoing(b"x", deliver_after_ms=after_ms + i) for i in range(count)]


@pytest.mark.parametrize("tracker", ["bucket", "memory"])
@pytest.mark.parametrize("after", ["at once", "after a restart"])
def test_what_is_hidden_stays_hidden_until_it_is_due_and_after(tracker, after):
    async def scenario(node: Node, _: SimClock) -> None:
        await node.create_subscription("t", "all", position=EARLIEST)
        ids = await node.produce("t", delayed(4, 5_000) + delayed(4, 60_000))
        more = await node.produce("t", delayed(3, 5_000))
        await node.create_subscription("t", "latest", position=LATEST)
        await node.create_subscription("t", "middle", position=EARLIEST)
        topic = node.topic("t")
        await control.seek(topic, topic.subscription("middle"), ids[2])
        if after == "after a restart":
            node = await restarted(node)
            topic = node.topic("t")
        await node.produce("t", delayed(2, 5_000))
        assert ids[0].ledger_id != more[0].ledger_id
        assert [await found(topic, name) for name in ("all", "latest", "middle")] == [
            (0, 0, 13),
            (0, 0, 2),
            (0, 0, 11),
        ]
        await asyncio.sleep(10)
        assert [await found(topic, name) for name in ("all", "latest", "middle")] == [
            (9, 0, 4),
            (2, 0, 0),
            (7, 0, 4),
        ]
        await asyncio.sleep(100)
        assert [await found(topic, name) for name in ("all", "latest", "middle")] == [
            (13, 0, 0),
            (2, 0, 0),
            (11, 0, 0),
        ]
        assert topic.counts._hidden == {}, "nothing is kept for what is known to be over"

    run(scenario, tracker=tracker, tick_ms=20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(at_depth(change=1, deep=4)))
def test_what_comes_due_while_the_log_is_read_is_counted_once(seed, monkeypatch):
    monkeypatch.setattr(counts, "SCAN_ROWS", 3)

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, small_config(clock_recheck_ms=10)).open()
        await node.create_subscription("t", "all", position=EARLIEST)
        for _batch in range(5):
            await node.produce("t", [Outgoing(b"x", deliver_after_ms=2_000 + i * 37) for i in range(8)])
        ids = await node.produce("t", delayed(3, 60_000))
        await node.create_subscription("t", "middle", position=EARLIEST)
        await node.checkpoint()  # what is read next is on disk
        topic = node.topic("t")
        await control.seek(topic, topic.subscription("middle"), ids[1])
        for name, owed in (("middle", 2), ("all", 43)):
            assert await found(topic, name) == (0, 0, owed)
        await asyncio.sleep(1.9)
        for _attempt in range(12):  # again and again, while they come due
            topic.counts.recount(topic.subscription("middle"))
            await asyncio.sleep(0.03)
            assert await found(topic, "middle") == (0, 0, 2)
            (hidden,) = topic.counts._hidden.values()
            assert topic.index.scheduled_count() - hidden.before == 2
        await asyncio.sleep(100)
        assert await found(topic, "middle") == (2, 0, 0)
        assert topic.counts._hidden == {}

    loop = SimLoop(seed, latency=Latency(max_ms=8.0, slow_every=0))
    try:
        loop.run_until_complete(scenario(loop, SimClock(loop)))
    finally:
        loop.cancel_leftovers()
        loop.close()


def test_what_was_settled_before_its_time_is_not_scheduled_under_a_rule_that_honours_it():
    async def scenario(node: Node, _: SimClock) -> None:
        subscription = await node.create_subscription(
            "t", "s", type_=SubscriptionType.EXCLUSIVE, position=EARLIEST
        )
        ids = await node.produce("t", delayed(6, 60_000))
        topic = node.topic("t")
        inbox = await node.subscribe("t", "s")
        await inbox.wait(6)
        await inbox.ack([ids[0], ids[3]])
        assert await found(topic, "s") == (0, 4, 0)
        await control.update_policy(
            topic, subscription, SubscriptionPolicy(honor_delay=True), {"honor_delay"}
        )
        assert inbox.consumer.ended
        inbox.detach()
        await asyncio.sleep(1)
        assert await found(topic, "s") == (0, 0, 4)
        again = await node.subscribe("t", "s")
        await asyncio.sleep(1)
        assert again.poll() == []
        assert await found(topic, "s") == (0, 0, 4)
        node = await restarted(node)
        assert await found(node.topic("t"), "s") == (0, 0, 4)
        await asyncio.sleep(100)
        assert await found(node.topic("t"), "s") == (4, 0, 0)

    run(scenario)


def test_a_lease_that_ends_without_a_consumer_is_over_when_it_is_looked_at():
    async def scenario(node: Node, _: SimClock) -> None:
        subscription = await node.create_subscription("t", "s", position=EARLIEST)
        await node.produce("t", [Outgoing(b"1")])
        topic = node.topic("t")
        inbox = await node.subscribe("t", "s", lease_ms=1_000)
        await inbox.wait(1)
        topic.subscriptions.detach(subscription, inbox.consumer, keep_leases=True)  # as Receive does
        assert await found(topic, "s") == (0, 1, 0)
        await asyncio.sleep(2)
        subscription.consumers.expire_leases()
        await asyncio.sleep(1)
        assert await found(topic, "s") == (1, 0, 0)

    run(scenario)


def test_the_oldest_ready_one_has_an_age_though_it_is_sent_while_it_is_sought(monkeypatch):
    """With a subscription that delivers all the time that happens often."""

    async def scenario(node: Node, clock: SimClock) -> None:
        policy = SubscriptionPolicy(max_leased_messages=1)
        subscription = await node.create_subscription("t", "s", position=EARLIEST, policy=policy)
        topic = node.topic("t")
        published_ms = clock.now_ms()
        await node.produce("t", [Outgoing(b"1"), Outgoing(b"2")])
        await asyncio.sleep(5)
        read_rows = topic.log.read_rows

        async def read_and_lose(*args: Any) -> Any:
            rows = await read_rows(*args)
            if not topic.counts.of(subscription).leased:
                await (await node.subscribe("t", "s")).wait(1)
            return rows

        monkeypatch.setattr(topic.log, "read_rows", read_and_lose)
        age_ms = await topic.counts.find_oldest_age_ms(subscription)
        assert await found(topic, "s") == (1, 1, 0)
        assert clock.now_ms() - published_ms - 100 <= age_ms <= clock.now_ms() - published_ms

    run(scenario)


@pytest.mark.parametrize("rows", [1, 1_000])
def test_the_oldest_ready_one_is_found_whatever_it_waited_for(rows, monkeypatch):
    monkeypatch.setattr(oldest, "_ROWS", rows)

    async def scenario(node: Node, clock: SimClock) -> None:
        subscription = await node.create_subscription("t", "s", position=EARLIEST)
        topic = node.topic("t")
        published_ms = clock.now_ms()
        (slow,) = await node.produce("t", [Outgoing(b"slow", deliver_after_ms=9_000)])
        await node.produce("t", [Outgoing(b"far", deliver_after_ms=HOUR_MS)] * 7)
        await asyncio.sleep(5)
        middle_ms = clock.now_ms()
        (middle,) = await node.produce("t", [Outgoing(b"middle")])
        assert await topic.counts.find_oldest_age_ms(subscription) == clock.now_ms() - middle_ms
        await asyncio.sleep(10)
        assert await topic.counts.find_oldest_age_ms(subscription) == clock.now_ms() - middle_ms
        assert (
            topic.counts.known_oldest_age_ms(subscription, topic.counts.of(subscription))
            == clock.now_ms() - middle_ms
        )
        inbox = await node.subscribe("t", "s")
        await inbox.wait(2)
        assert await topic.counts.find_oldest_age_ms(subscription) == 0
        await inbox.ack([middle])
        await inbox.nack([slow], 3_000)
        nacked_ms = clock.now_ms()
        inbox.detach()
        await asyncio.sleep(1)
        assert await topic.counts.find_oldest_age_ms(subscription) == 0
        await asyncio.sleep(5)
        age_ms = await topic.counts.find_oldest_age_ms(subscription)
        assert clock.now_ms() - nacked_ms - 3_000 <= age_ms <= clock.now_ms() - nacked_ms - 2_990
        inbox = await node.subscribe("t", "s")
        await inbox.wait(1)
        inbox.detach()  # it comes back at once, and is as old as it was
        for _ in range(2):
            await asyncio.sleep(1)
            topic = node.topic("t")
            age_ms = await topic.counts.find_oldest_age_ms(topic.subscription("s"))
            assert age_ms == clock.now_ms() - published_ms - 9_000
            node = await restarted(node)

    run(scenario)


def test_a_subscription_that_begins_at_the_start_has_nothing_hidden():
    async def scenario(node: Node, _: SimClock) -> None:
        subscription = await node.create_subscription("t", "s", position=EARLIEST)
        await node.produce("t", delayed(5, 60_000))
        topic = node.topic("t")
        await control.seek(topic, subscription, START)
        assert topic.counts._hidden == {}
        assert topic.counts.is_exact
        await control.skip_all(topic, subscription)
        assert topic.counts.is_exact, "at the end everything is hidden: no row is read"
        assert await found(topic, "s") == (0, 0, 0)

    run(scenario)
