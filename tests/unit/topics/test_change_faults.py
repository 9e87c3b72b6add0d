"""Faults that random schedules of cancels and moves have found, each in the fewest steps that show it."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from broker.delayed import index_feed
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import CrashPolicy
from broker.topics.schedule_values import Cancel, ChangeResult, DueRange
from tests.depth import at_depth
from tests.harness import Node, Outgoing
from tests.unit.topics.change_world import (
    DELIVERED,
    DONE,
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

HOUR_MS = 3_600_000


@TRACKERS
@pytest.mark.parametrize("type_", [SubscriptionType.SHARED, SubscriptionType.KEY_SHARED])
def test_what_is_due_and_is_moved_to_now_does_not_end_the_streams(tracker: str, type_: int):
    """It lies twice in the replay queue, under both times, and is read twice in one window."""

    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "one", type_=type_)
        topic = node.topic(TOPIC)
        inbox = node.attach(topic, topic.subscription("one"), permits=0)
        positions = await node.produce(TOPIC, messages(4, deliver_after_ms=50))
        await asyncio.sleep(0.2)
        assert await move(topic, positions, deliver_after_ms=0) == [DONE] * 4
        await asyncio.sleep(0.2)
        inbox.consumer.grant(10, 0)
        topic.subscription("one").work.set()
        await asyncio.sleep(1)
        assert inbox.consumer.closed_because is None
        assert sorted(position for position, _ in times_of(inbox)) == positions
        return node

    run(scenario, tracker=tracker)


def test_what_may_have_been_sent_before_a_restart_is_not_shown_as_pending():
    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "one")
        (sent,) = await node.produce(TOPIC, messages(1, deliver_after_ms=50))
        await asyncio.sleep(0.2)
        node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
        topic = node.topic(TOPIC)
        assert await cancel(topic, [sent]) == [DELIVERED]
        assert not await is_pending(topic, sent)
        await node.produce(TOPIC, messages(1, deliver_after_ms=50))
        await asyncio.sleep(0.2)  # the frontier moves on
        assert await cancel(topic, [sent]) == [DELIVERED]
        assert not await is_pending(topic, sent)
        return node

    run(scenario)


def test_counts_are_exact_after_a_restart_when_all_that_waited_was_cancelled_and_its_ledgers_went():
    """The manifest may still name a bucket with their rows."""

    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "one")
        topic = node.topic(TOPIC)
        positions = await node.produce(TOPIC, messages(3, deliver_after_ms=HOUR_MS))
        await asyncio.sleep(7)  # sealed
        assert len(topic.index_image().bucket_ids) == 1
        assert await cancel(topic, positions) == [DONE] * 3
        await asyncio.sleep(3)
        assert topic.log.ledger_count == 0, "dropped"
        assert len(topic.index_image().bucket_ids) == 1, "so few stale rows are not merged away"
        await node.checkpoint()
        node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
        await asyncio.sleep(1)
        assert await counted(node.topic(TOPIC)) == 0
        return node

    run(scenario, reclaim_interval_ms=1_000, ledger_max_age_ms=1_000)


def test_verify_does_not_mind_stale_rows_of_ledgers_that_are_gone():
    """Cancelled entries keep no ledger, and leave the index with the next merge."""

    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "one")
        topic = node.topic(TOPIC)
        gone = await node.produce(TOPIC, messages(4, deliver_after_ms=HOUR_MS))
        await node.produce(TOPIC, messages(4, deliver_after_ms=HOUR_MS))
        await asyncio.sleep(7)  # sealed
        assert await cancel(topic, gone) == [DONE] * 4
        await asyncio.sleep(3)
        assert topic.log.entry_count(gone[0].ledger_id) is None
        assert (await node.broker.verify_topic(TOPIC)).findings == []
        return node

    run(scenario, reclaim_interval_ms=1_000)


@TRACKERS
@pytest.mark.parametrize("turns", [1, 2])
def test_what_is_moved_back_to_where_it_was_counts_once(tracker: str, turns: int):
    """Its first row lies in a bucket, and is out of date, and then it is not."""

    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "one")
        topic = node.topic(TOPIC)
        positions = await node.produce(TOPIC, messages(3, deliver_after_ms=HOUR_MS))
        first_ms = (await topic.schedule.get(positions[0])).deliver_at_ms
        for _ in range(turns):
            await asyncio.sleep(7)  # sealed
            assert await move(topic, positions, deliver_at_ms=first_ms + HOUR_MS) == [DONE] * 3
            assert await counted(topic) == 3
            await asyncio.sleep(7)
            assert await move(topic, positions, deliver_at_ms=first_ms) == [DONE] * 3
            assert await counted(topic) == 3
        await asyncio.sleep(7)
        assert await cancel(topic, positions) == [DONE] * 3
        assert await counted(topic) == 0
        return node

    run(scenario, tracker=tracker)


@TRACKERS
def test_a_move_and_a_cancel_before_the_index_has_its_next_turn(
    tracker: str, monkeypatch: pytest.MonkeyPatch
):
    """The move waits to be added when the cancel comes: it must not be added after that."""

    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "one")
        topic = node.topic(TOPIC)
        (position,) = await node.produce(TOPIC, messages(1, deliver_after_ms=HOUR_MS))
        await topic.index.caught_up()
        pump, go_on = topic.index, asyncio.Event()
        inner = pump._step

        async def held() -> bool:
            await go_on.wait()
            return await inner()

        monkeypatch.setattr(pump, "_step", held)
        pump._work.set()
        await asyncio.sleep(2)
        assert await move(topic, [position], deliver_after_ms=2 * HOUR_MS) == [DONE]
        assert await cancel(topic, [position]) == [DONE]
        assert pump.scheduled_count() == 0
        go_on.set()
        assert await counted(topic) == 0
        return node

    run(scenario, tracker=tracker)


def test_no_part_of_a_move_is_left_out_when_a_seal_comes_between_its_ledgers(monkeypatch: pytest.MonkeyPatch):
    """The sealed bucket claims what it was told, and a restart adds only what was moved since."""

    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "one")
        topic = node.topic(TOPIC)
        positions = await node.produce(TOPIC, messages(4, deliver_after_ms=HOUR_MS))
        positions += await node.produce(TOPIC, messages(4, deliver_after_ms=HOUR_MS))
        assert positions[0].ledger_id != positions[-1].ledger_id
        await asyncio.sleep(7)  # sealed
        pump = topic.index
        monkeypatch.setattr(index_feed, "_INDEX_ROWS", 4)
        assert pump.upkeep is not None
        passed = pump.upkeep.passed
        marks = []

        def noted(position, lsn):
            marks.append((lsn, pump._feed.moved.count))
            passed(position, lsn)

        monkeypatch.setattr(pump.upkeep, "passed", noted)
        assert await move(topic, positions, deliver_after_ms=2_000) == [DONE] * 8
        await pump.caught_up()
        lsn = topic.applied_lsn
        assert all(waiting == 0 for mark, waiting in marks if mark == lsn), marks
        return node

    run(scenario)


@pytest.mark.parametrize("kind", ["due", "later"])
def test_counts_of_a_subscription_that_begins_behind_moved_messages(kind: str):
    """They are hidden from it, before the move and after it."""

    async def scenario(node: Node) -> Node:
        topic = node.topic(TOPIC)
        await node.create_subscription(TOPIC, "one")
        due = await node.produce(TOPIC, messages(1, deliver_after_ms=50))
        later = await node.produce(TOPIC, messages(2, deliver_after_ms=HOUR_MS))
        await asyncio.sleep(1)
        latest = await node.create_subscription(TOPIC, "latest")
        moved = due if kind == "due" else later
        assert await move(topic, moved, deliver_after_ms=2_000) == [DONE] * len(moved)
        await node.produce(TOPIC, messages(1))
        for _ in range(2):
            counts = topic.subscription_counts(latest)
            assert (counts.scheduled, counts.ready, counts.leased) == (0, 1, 0)
            await asyncio.sleep(5)
        return node

    run(scenario)


def test_a_key_always_names_a_message_while_it_is_replaced():
    """Somebody cancels by key while somebody else replaces: one of the two messages is found."""

    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "one")
        topic = node.topic(TOPIC)
        keyed = [Outgoing(b"x", deliver_after_ms=HOUR_MS, schedule_key="k")]
        await node.produce(TOPIC, keyed)
        accepted = await node.submit(TOPIC, keyed, replace=True)
        outcomes, _ = await asyncio.gather(
            topic.schedule.change(["k"], Cancel(), dry_run=False), accepted.durable
        )
        assert outcomes[0].result is DONE
        return node

    run(scenario)


def test_what_a_move_takes_out_of_the_redelivery_queue_counts_once(monkeypatch: pytest.MonkeyPatch):
    """The clock stepped back, so it waits there; the dispatcher has taken and reads it when it is moved."""

    async def scenario(node: Node) -> Node:
        inbox = await node.subscribe(TOPIC, "one")
        topic, subscription = node.topic(TOPIC), inbox.subscription
        (position,) = await node.produce(TOPIC, messages(1, deliver_after_ms=HOUR_MS))
        step(node, HOUR_MS + 10)
        read = topic.log.read
        stepped: list[int] = []

        async def step_back(*arguments):
            if not stepped:
                stepped.append(1)
                step(node, -1_000)  # too early: it waits in the redelivery queue
            elif len(stepped) == 1:
                stepped.append(2)
                assert await move(topic, [position], deliver_after_ms=HOUR_MS) == [DONE]
            return await read(*arguments)

        monkeypatch.setattr(topic.log, "read", step_back)
        await asyncio.sleep(5)
        assert stepped == [1, 2]
        assert inbox.poll() == []
        assert topic.index.scheduled_count() == 1
        assert subscription.states.redelivery.count_after(node.clock.now_ms()) == 0, "it waits in two places"
        step(node, 2 * HOUR_MS)
        assert [each.position for each in await inbox.wait(1)] == [position]
        await asyncio.sleep(5)
        assert inbox.poll() == []
        return node

    run(scenario)


def test_a_message_that_is_moved_to_now_while_it_is_read_lives_on_from_there(monkeypatch: pytest.MonkeyPatch):
    """Its time to live had passed under its old time; the row was read before the move."""

    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "one")
        topic = node.topic(TOPIC)
        (position,) = await node.produce(TOPIC, messages(1, deliver_after_ms=50, ttl_ms=HOUR_MS))
        await asyncio.sleep(1)
        read = topic.log.read
        moved: list[Any] = []

        async def read_and_move(*arguments):
            found = await read(*arguments)
            if not moved:
                moved.append(await move(topic, [position], deliver_after_ms=2 * HOUR_MS))
                step(node, 2 * HOUR_MS + 10)
            return found

        monkeypatch.setattr(topic.log, "read", read_and_move)
        inbox = await node.subscribe(TOPIC, "one")
        await asyncio.sleep(5)
        assert moved == [[DONE]]
        assert [each.position for each in inbox.poll()] == [position]
        return node

    run(scenario)


def test_a_move_to_now_that_is_decided_before_a_rebuild_and_applied_after_it_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
):
    """Its new time lay behind the frontier when it was decided, and before the one that the rebuild begins with."""

    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "one")
        topic = node.topic(TOPIC)
        (position,) = await node.produce(TOPIC, messages(1, deliver_after_ms=HOUR_MS))
        await topic.index.caught_up()
        inbox = await node.subscribe(TOPIC, "one")
        go_on, submit = asyncio.Event(), topic.submit_change

        async def submit_later(record) -> None:
            await go_on.wait()
            await submit(record)

        monkeypatch.setattr(
            topic, "submit_change", lambda record: asyncio.ensure_future(submit_later(record))
        )
        moving = asyncio.ensure_future(move(topic, [position], deliver_after_ms=0))
        await asyncio.sleep(0.2)
        await node.produce(TOPIC, messages(1, deliver_after_ms=50))
        await asyncio.sleep(1)
        assert len(inbox.poll()) == 1
        pump = topic.index
        pump._rebuild(pump.tracker.frontier)  # what a bucket that cannot be read brings about
        go_on.set()
        assert await moving == [DONE]
        await asyncio.sleep(5)
        assert [each.position for each in inbox.poll()] == [position]
        return node

    run(scenario)


def test_a_subscription_that_ignores_times_gets_what_is_moved_while_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
):
    """Held back from it, a message would never come: it reads each once, and takes no chunks."""

    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "one", type_=SubscriptionType.EXCLUSIVE)
        topic = node.topic(TOPIC)
        (position,) = await node.produce(TOPIC, messages(1, deliver_after_ms=HOUR_MS))
        read = topic.log.read
        moving: list[asyncio.Future[list[ChangeResult]]] = []

        async def read_while_moving(*arguments):
            found = await read(*arguments)
            if not moving:
                moving.append(asyncio.ensure_future(move(topic, [position], deliver_after_ms=2 * HOUR_MS)))
                while not topic.log.under_way.changing:
                    await asyncio.sleep(0)
            return found

        monkeypatch.setattr(topic.log, "read", read_while_moving)
        inbox = node.attach(topic, topic.subscription("one"))
        await asyncio.sleep(5)
        assert await moving[0] == [DONE]
        assert [each.position for each in inbox.poll()] == [position]
        return node

    run(scenario)


@pytest.mark.slow
@TRACKERS
@pytest.mark.parametrize("seconds", [2, 30])
def test_what_is_moved_away_and_back_again_and_again_counts_once(tracker: str, seconds: int):
    """Soon due, so that its rows are loaded; one by one, while others come due and seals and merges go on."""

    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "one")
        topic, rng, compared = node.topic(TOPIC), random.Random(seconds), 0
        delays_ms = [seconds * 1_000 + 300 * i for i in range(30)]
        positions = await node.produce(TOPIC, [Outgoing(b"x", deliver_after_ms=each) for each in delays_ms])
        looks = at_depth(change=20, deep=120)
        for _ in range(looks):
            at = rng.choice(positions)
            if await move(topic, [at], shift_ms=HOUR_MS) == [DONE] and rng.random() < 0.9:
                await move(topic, [at], shift_ms=-HOUR_MS)
            await asyncio.sleep(rng.choice((0.001, 0.05, 0.2)))
            frontier = topic.index.tracker.frontier
            page, count = await topic.schedule.page(DueRange(), "", None, 1_000), await counted(topic)
            if topic.index.tracker.frontier == frontier:  # else some came due between the two looks
                assert count == len(page.scheduled)
                compared += 1
        assert compared > looks // 2
        return node

    run(scenario, tracker=tracker)
