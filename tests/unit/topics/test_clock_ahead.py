"""A life of the broker under a clock that was wrong, by minutes or by years: the next life keeps every promise.

Machines start before they have asked anybody for the time. What such a life wrote down must not stand in the way.
"""

from __future__ import annotations

import asyncio

import pytest

from broker.errors import PostdateError
from broker.model import Position
from broker.policy import OVERDUE_EXPIRE, TopicPolicy
from broker.testing.mem_vfs import CrashPolicy
from broker.topics.schedule_values import DueRange
from tests.depth import every_pair
from tests.harness import DAY_MS, Node, Outgoing
from tests.unit.topics.change_world import (
    BUCKETS,
    DONE,
    HOUR_MS,
    MEMORY,
    TOPIC,
    TRACKERS,
    cancel,
    counted,
    is_pending,
    messages,
    move,
    run,
    step,
    times_of,
)

MINUTE_MS = 60_000
CORRECTIONS_MS = (2_000, 22_000, 59_000, 75_000)  # the index stands where it stood some twenty seconds before
STEPS = {"minutes": 5 * MINUTE_MS, "hours": 5 * HOUR_MS, "weeks": 20 * DAY_MS, "years": 3 * 366 * DAY_MS}


async def restart(node: Node, ending: str) -> Node:
    if ending == "stop":
        await node.stop()
        return Node(node.vfs, node.clock, node.config).open()
    await node.checkpoint()
    return node.crash(CrashPolicy.LOSE_UNSYNCED).open()


async def listed(node: Node) -> list[Position]:
    """Return what the schedule lists."""
    page = await node.topic(TOPIC).schedule.page(DueRange(), "", None, 100)
    return sorted(each.position for each in page.scheduled)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tracker", "ending", "direction", "by"),
    every_pair([BUCKETS, MEMORY], ["stop", "crash"], [1, -1], STEPS),
)
def test_one_life_under_a_wrong_clock_breaks_no_promise(tracker: str, ending: str, direction: int, by: str):
    off_ms = direction * STEPS[by]

    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "one")
        await node.create_subscription(TOPIC, "two")
        soon = await node.produce(TOPIC, messages(3, deliver_after_ms=2 * MINUTE_MS))
        later = await node.produce(TOPIC, messages(5, deliver_after_ms=10 * DAY_MS))
        (keyed,) = await node.produce(
            TOPIC, [Outgoing(b"keyed", deliver_after_ms=HOUR_MS, schedule_key="key")]
        )
        await asyncio.sleep(10)  # sealed
        (unsealed,) = await node.produce(
            TOPIC, [Outgoing(b"unsealed", deliver_after_ms=HOUR_MS, schedule_key="unsealed")]
        )
        node = await restart(node, ending)
        step(node, off_ms)
        node = await restart(node, ending)
        during = await node.produce(TOPIC, messages(2, deliver_after_ms=4 * 366 * DAY_MS))
        await asyncio.sleep(10)  # whatever is due by now is taken, sealed, merged; nobody is connected
        step(node, -off_ms)
        node = await restart(node, ending)
        await asyncio.sleep(5)
        topic = node.topic(TOPIC)
        everything = sorted([*soon, *later, keyed, unsealed, *during])
        assert await listed(node) == everything
        assert await counted(topic) == len(everything)
        for key in ("key", "unsealed"):
            with pytest.raises(PostdateError, match="key"):
                await node.produce(TOPIC, [Outgoing(b"second", deliver_after_ms=HOUR_MS, schedule_key=key)])
        (replaced,) = await node.produce(
            TOPIC, [Outgoing(b"other", deliver_after_ms=HOUR_MS, schedule_key="key")], replace=True
        )
        assert await cancel(topic, [soon[0], later[0]]) == [DONE] * 2
        assert await move(topic, [later[1]], deliver_after_ms=HOUR_MS) == [DONE]
        assert await move(topic, [soon[1]], deliver_after_ms=2 * DAY_MS) == [DONE]
        assert not await is_pending(topic, keyed)
        gone = {soon[0], later[0], keyed}
        left = sorted({*everything, replaced} - gone)
        assert await listed(node) == left
        inboxes = [node.attach(topic, topic.subscription(name)) for name in ("one", "two")]
        await asyncio.sleep(1)
        assert [times_of(inbox) for inbox in inboxes] == [[], []], "nothing is early"
        for ms in (MINUTE_MS, HOUR_MS, 2 * DAY_MS, 8 * DAY_MS, 8 * 366 * DAY_MS):
            step(node, ms)
            await asyncio.sleep(5)
            for inbox in inboxes:
                times_of(inbox)
        for inbox in inboxes:
            assert sorted(position for position, _ in times_of(inbox)) == left, "each once, none lost"
            assert all(each.sent_ms >= each.deliver_at_ms and each.attempt == 1 for each in inbox.received)
            assert await inbox.ack(left) == []
        assert (await node.broker.verify_topic(TOPIC)).findings == []
        return node

    run(scenario, tracker=tracker)


@TRACKERS
@pytest.mark.parametrize("ending", ["stop", "crash"])
def test_the_index_after_a_life_under_a_clock_that_was_ahead_begins_now(tracker: str, ending: str):
    """And not at its first look at the clock: a change that is asked for before would be refused as too late."""

    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "one")
        await node.produce(TOPIC, messages(3, deliver_after_ms=HOUR_MS))
        step(node, STEPS["years"])
        node = await restart(node, ending)
        await node.produce(TOPIC, messages(1, deliver_after_ms=HOUR_MS))  # so that its manifest is written
        await asyncio.sleep(10)
        ahead_ms = node.topic(TOPIC).index.tracker.frontier.deliver_at_ms
        step(node, -STEPS["years"])
        node = await restart(node, ending)
        index, now_ms = node.topic(TOPIC).index, node.clock.now_ms()
        assert index.tracker.frontier.deliver_at_ms == now_ms < ahead_ms - DAY_MS
        assert node.topic(TOPIC).subscription("one").unknown_through_ms == now_ms
        return node

    run(scenario, tracker=tracker)


def test_a_life_under_a_clock_that_was_ahead_hides_no_absence_after_it():
    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "one")
        await node.topic(TOPIC).change_policy(TopicPolicy(overdue_action=OVERDUE_EXPIRE))
        step(node, STEPS["years"])
        node = await restart(node, "stop")
        await asyncio.sleep(5)
        step(node, -STEPS["years"])
        node = await restart(node, "stop")
        await node.produce(TOPIC, messages(1, deliver_after_ms=10 * MINUTE_MS))
        await asyncio.sleep(5)
        await node.stop()
        step(node, HOUR_MS)
        node = Node(node.vfs, node.clock, node.config).open()
        inbox = node.attach(node.topic(TOPIC), node.topic(TOPIC).subscription("one"))
        await asyncio.sleep(5)
        assert times_of(inbox) == [], "it came due while nobody was there"
        return node

    run(scenario)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tracker", "ending", "by_ms"),
    every_pair([BUCKETS, MEMORY], ["stop", "crash"], [*CORRECTIONS_MS, 90_000]),
)
def test_a_small_correction_of_the_clock_reads_no_ledger_again(tracker: str, ending: str, by_ms: int):
    """The clock goes back by so much between two lives, and nothing is early, lost or twice."""

    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "one")
        await node.produce(TOPIC, [Outgoing(b"now")])
        soon = await node.produce(TOPIC, messages(3, deliver_after_ms=30_000))
        (keyed,) = await node.produce(
            TOPIC, [Outgoing(b"keyed", deliver_after_ms=HOUR_MS, schedule_key="key")]
        )
        await asyncio.sleep(20)  # sealed
        node = await restart(node, ending)
        step(node, -by_ms)
        node = await restart(node, ending)
        topic = node.topic(TOPIC)
        (between,) = await node.produce(TOPIC, messages(1, deliver_after_ms=1_000))
        await asyncio.sleep(0.5)
        is_far = by_ms > max(CORRECTIONS_MS)
        assert topic.index.rebuilds == int(is_far and tracker == BUCKETS)
        assert topic._index.clock_was_ahead == is_far
        inbox = node.attach(topic, topic.subscription("one"), lease_ms=HOUR_MS)
        await asyncio.sleep(200)
        inbox.poll()
        assert sorted(each.position for each in inbox.received)[1:] == [*soon, between]
        delayed = [each for each in inbox.received if each.position in {*soon, between}]
        assert all(0 <= each.sent_ms - each.deliver_at_ms < 1_000 for each in delayed)
        assert {each.attempt for each in inbox.received} == {1}
        with pytest.raises(PostdateError, match="key"):
            await node.produce(TOPIC, [Outgoing(b"second", deliver_after_ms=HOUR_MS, schedule_key="key")])
        assert await listed(node) == [keyed]
        assert (await node.broker.verify_topic(TOPIC)).findings == []
        return node

    run(scenario, tracker=tracker)
