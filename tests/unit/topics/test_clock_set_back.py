"""The wall clock is set back far while the broker runs: what was due by the wrong clock has yet to come, for everybody.

As when NTP finds the time after the broker has started. No restart is needed for what `test_clock_ahead` promises.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.delayed.index_pump import AHEAD_MS_MAX
from broker.errors import PostdateError
from broker.model import Position
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import CrashPolicy
from broker.topics.control import seek
from broker.topics.registry import Registry
from tests.depth import every_pair
from tests.harness import DAY_MS, Node, Outgoing
from tests.unit.topics.change_world import (
    BUCKETS,
    DELIVERED,
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
from tests.unit.topics.test_clock_ahead import MINUTE_MS, STEPS, listed

TYPES = [SubscriptionType.SHARED, SubscriptionType.KEY_SHARED]
SECONDS = 3
"""Virtual: by then the clock was looked at twice."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tracker", "type_", "is_there", "by"), every_pair([BUCKETS, MEMORY], TYPES, [False, True], STEPS)
)
def test_a_clock_set_back_while_the_broker_runs_breaks_no_promise(
    tracker: str, type_: int, by: str, is_there: bool
):
    off_ms = STEPS[by]

    async def scenario(node: Node) -> Node:
        for name in ("one", "two"):
            await node.create_subscription(TOPIC, name, type_=type_)
        topic = node.topic(TOPIC)
        soon = await node.produce(TOPIC, messages(3, deliver_after_ms=2 * 60_000))
        later = await node.produce(TOPIC, messages(5, deliver_after_ms=10 * DAY_MS))
        (keyed,) = await node.produce(
            TOPIC, [Outgoing(b"keyed", deliver_after_ms=HOUR_MS, schedule_key="key")]
        )
        await asyncio.sleep(10)  # sealed
        inboxes = [node.attach(topic, topic.subscription(n), permits=0) for n in ("one", "two") if is_there]
        step(node, off_ms)
        during = await node.produce(TOPIC, messages(2, deliver_after_ms=4 * 366 * DAY_MS))
        await asyncio.sleep(10)  # whatever is due by now is taken, sealed, merged
        step(node, -off_ms)
        await asyncio.sleep(SECONDS)
        everything = sorted([*soon, *later, keyed, *during])
        assert await listed(node) == everything
        assert await counted(topic) == len(everything)
        with pytest.raises(PostdateError, match="key"):
            await node.produce(TOPIC, [Outgoing(b"second", deliver_after_ms=HOUR_MS, schedule_key="key")])
        (replaced,) = await node.produce(
            TOPIC, [Outgoing(b"other", deliver_after_ms=HOUR_MS, schedule_key="key")], replace=True
        )
        assert await cancel(topic, [soon[0], later[0]]) == [DONE] * 2
        assert await move(topic, [later[1]], deliver_after_ms=HOUR_MS) == [DONE]
        assert await move(topic, [soon[1]], deliver_after_ms=2 * DAY_MS) == [DONE]
        assert not await is_pending(topic, keyed)
        left = sorted({*everything, replaced} - {soon[0], later[0], keyed})
        assert await listed(node) == left
        inboxes = inboxes or [node.attach(topic, topic.subscription(name)) for name in ("one", "two")]
        for inbox in inboxes:
            inbox.consumer.grant(100, 0)
            inbox.subscription.work.set()
        await asyncio.sleep(1)
        assert [times_of(inbox) for inbox in inboxes] == [[], []], "nothing is early"
        for ms in (60_000, HOUR_MS, 2 * DAY_MS, 8 * DAY_MS, 8 * 366 * DAY_MS):
            step(node, ms)
            await asyncio.sleep(5)
            for inbox in inboxes:
                times_of(inbox)
        for inbox in inboxes:
            assert sorted(position for position, _ in times_of(inbox)) == left, "each once, none lost"
            assert all(each.sent_ms >= each.deliver_at_ms and each.attempt == 1 for each in inbox.received)
            assert await inbox.ack(left) == []
        assert topic.index.rebuilds == 1
        assert (await node.broker.verify_topic(TOPIC)).findings == []
        return node

    run(scenario, tracker=tracker)


@TRACKERS
@pytest.mark.parametrize("next_life", [False, True])
def test_an_index_that_holds_nothing_notices_as_well(tracker: str, next_life: bool):
    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "one")
        positions = await node.produce(TOPIC, messages(5, deliver_after_ms=HOUR_MS))
        step(node, DAY_MS)
        await asyncio.sleep(40)  # all was taken, and nothing is left to be written
        assert node.topic(TOPIC).index.tracker.is_idle
        step(node, -DAY_MS)
        await asyncio.sleep(SECONDS)
        assert await listed(node) == positions
        if next_life:
            await node.checkpoint()
            node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
            assert not node.topic(TOPIC)._index.clock_was_ahead, "the manifest says when the index is"
            assert await listed(node) == positions
        assert await cancel(node.topic(TOPIC), positions[:1]) == [DONE]
        inbox = node.attach(node.topic(TOPIC), node.topic(TOPIC).subscription("one"))
        step(node, HOUR_MS)
        await asyncio.sleep(SECONDS)
        assert sorted(position for position, _ in times_of(inbox)) == positions[1:]
        return node

    run(scenario, tracker=tracker)


@TRACKERS
@pytest.mark.parametrize("by", STEPS)
def test_a_clock_that_was_ahead_at_the_start_and_is_set_back_leaves_what_is_pending_to_be_changed(
    tracker: str, by: str
):
    """A start does not know what was sent before; what is due after the right time was not."""

    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "one")
        positions = await node.produce(TOPIC, messages(3, deliver_after_ms=2 * MINUTE_MS))
        await node.stop()
        step(node, STEPS[by])
        node = Node(node.vfs, node.clock, node.config).open()
        await asyncio.sleep(SECONDS)  # nobody is connected
        step(node, -STEPS[by])
        await asyncio.sleep(SECONDS)
        topic = node.topic(TOPIC)
        assert await listed(node) == positions
        assert await cancel(topic, positions[:1]) == [DONE]
        assert await move(topic, positions[1:2], deliver_after_ms=HOUR_MS) == [DONE]
        inbox = node.attach(topic, topic.subscription("one"))
        step(node, HOUR_MS)
        await asyncio.sleep(SECONDS)
        assert sorted(position for position, _ in times_of(inbox)) == positions[1:]
        return node

    run(scenario, tracker=tracker)


@pytest.mark.parametrize("then", ["seek", "set back"])
def test_what_an_owner_before_may_have_sent_by_a_clock_ahead_is_not_changed(
    monkeypatch: pytest.MonkeyPatch, then: str
):
    """In a cluster: up to a time that has not come here, and whatever happens to a subscription meanwhile."""
    start = Registry.start

    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "one")
        positions = await node.produce(TOPIC, messages(3, deliver_after_ms=HOUR_MS))
        (later,) = await node.produce(TOPIC, messages(1, deliver_after_ms=3 * HOUR_MS))
        await node.stop()
        ceiling_ms = node.clock.now_ms() + 2 * HOUR_MS
        monkeypatch.setattr(Registry, "start", lambda registry, _: start(registry, ceiling_ms))
        node = Node(node.vfs, node.clock, node.config).open()
        monkeypatch.undo()
        topic = node.topic(TOPIC)
        assert await cancel(topic, positions[:1]) == [DELIVERED]
        if then == "seek":
            await seek(topic, topic.subscription("one"), Position(0, 0))
        else:
            step(node, HOUR_MS // 2)
            await node.produce(TOPIC, messages(1, deliver_after_ms=1))
            await asyncio.sleep(SECONDS)  # the frontier is there now
            step(node, -HOUR_MS // 2)
            await asyncio.sleep(SECONDS)
            assert topic.index.set_backs == 1
        assert await cancel(topic, [*positions, later]) == [DELIVERED] * 3 + [DONE]
        return node

    run(scenario)


@TRACKERS
@pytest.mark.parametrize("type_", TYPES)
def test_what_was_sent_by_the_wrong_clock_stays_sent(tracker: str, type_: int):
    """It is acknowledged, held, or came back: not changed, and what comes again waits for its time."""

    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        await node.create_subscription(TOPIC, "one", type_=type_)
        inbox = node.attach(topic, topic.subscription("one"), lease_ms=2 * HOUR_MS)
        sent = await node.produce(TOPIC, messages(3, deliver_after_ms=HOUR_MS, key="k"))
        step(node, 2 * HOUR_MS)
        await asyncio.sleep(SECONDS)
        assert len(inbox.poll()) == 3
        await inbox.ack(sent[:1])
        await inbox.nack(sent[1:2])
        step(node, -2 * HOUR_MS)
        await asyncio.sleep(SECONDS)
        (fresh,) = await node.produce(TOPIC, messages(1, deliver_after_ms=HOUR_MS, key="k"))
        assert await cancel(topic, sent) == [DELIVERED] * 3
        assert await move(topic, [*sent, fresh], deliver_after_ms=HOUR_MS) == [DELIVERED] * 3 + [DONE]
        inbox.received.clear()
        inbox.detach()
        inbox = node.attach(topic, topic.subscription("one"))
        await asyncio.sleep(60)
        assert times_of(inbox) == []
        step(node, HOUR_MS)
        await asyncio.sleep(SECONDS)
        assert sorted(position for position, _ in times_of(inbox)) == [sent[2], fresh], (
            "a nack's wait stands as written"
        )
        step(node, HOUR_MS)
        await asyncio.sleep(SECONDS)
        assert sorted(position for position, _ in times_of(inbox)) == [*sent[1:], fresh]
        assert {each.position: each.attempt for each in inbox.received} == {sent[1]: 2, sent[2]: 2, fresh: 1}
        return node

    run(scenario, tracker=tracker, ledger_max_entries=100)


@TRACKERS
@pytest.mark.parametrize("by_ms", [AHEAD_MS_MAX - 5_000, AHEAD_MS_MAX + 5_000])
def test_a_small_correction_reads_no_ledger_again(tracker: str, by_ms: int):
    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        await node.create_subscription(TOPIC, "one")
        inbox = node.attach(topic, topic.subscription("one"), lease_ms=HOUR_MS)
        positions = await node.produce(TOPIC, messages(1, deliver_after_ms=1_000))
        positions += await node.produce(TOPIC, messages(3, deliver_after_ms=30_000))
        await asyncio.sleep(1.5)
        step(node, -by_ms)
        await asyncio.sleep(SECONDS)
        assert topic.index.rebuilds == (by_ms > AHEAD_MS_MAX)
        await asyncio.sleep(300)
        assert [position for position, _ in times_of(inbox)] == positions
        assert {each.attempt for each in inbox.received} == {1}
        assert all(0 <= each.sent_ms - each.deliver_at_ms < 1_000 for each in inbox.received)
        return node

    run(scenario, tracker=tracker)


@TRACKERS
@pytest.mark.parametrize("kind", ["later", "earlier"])
def test_moves_on_their_way_when_the_clock_is_set_back_are_not_lost(
    tracker: str, kind: str, monkeypatch: pytest.MonkeyPatch
):
    """The index has not been told of them, or they are due by now."""

    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        await node.create_subscription(TOPIC, "one")
        inbox = node.attach(topic, topic.subscription("one"), lease_ms=HOUR_MS)
        positions = await node.produce(TOPIC, messages(6, deliver_after_ms=10 * HOUR_MS))
        (first,) = await node.produce(TOPIC, messages(1, deliver_after_ms=1_000))
        await asyncio.sleep(SECONDS)
        assert [position for position, _ in times_of(inbox)] == [first]
        tell = topic.index.changed

        def and_step(*arguments: Any) -> None:
            tell(*arguments)
            if topic.index.rebuilds == 0 and topic.index._feed.moved.count:
                step(node, -HOUR_MS)

        monkeypatch.setattr(topic.index, "changed", and_step)
        shift_ms = HOUR_MS if kind == "later" else -20 * HOUR_MS
        assert await move(topic, positions, shift_ms=shift_ms) == [DONE] * 6
        await asyncio.sleep(SECONDS)
        assert topic.index.rebuilds == 1
        if kind == "earlier":
            assert times_of(inbox) == [(first, inbox.received[0].deliver_at_ms)]
            step(node, HOUR_MS)
        else:
            assert await listed(node) == [*positions, first], "of what was sent the time has yet to come, too"
            step(node, 13 * HOUR_MS)
        await asyncio.sleep(10)
        assert sorted(position for position, _ in times_of(inbox)) == [*positions, first]
        assert (await node.broker.verify_topic(TOPIC)).findings == []
        return node

    run(scenario, tracker=tracker)
