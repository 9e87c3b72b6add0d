"""Bulk changes of a whole broker on virtual time: what is changed once, through restarts, refusals and other changes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from broker.delayed.scan import scan
from broker.errors import InvalidRequest, LimitReached, NotFound, OutOfRange, Unavailable
from broker.policy import TopicPolicy
from broker.storage.bulk import BulkDefinition, BulkEnd, BulkKind, BulkStanding
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import START_MS, SimClock
from broker.testing.sim_loop import Latency, SimLoop, run_sim
from broker.topics.bulk_changes import _STEPS_AT_ONCE
from broker.topics.schedule_values import Cancel, DueRange, Move
from tests.harness import Node, Outgoing, small_config
from tests.moving import moves

TOPIC = "orders"
HOUR_MS = 3_600_000
CANCEL = BulkDefinition(BulkKind.CANCEL)
LATER = BulkDefinition(BulkKind.SHIFT, 10 * 60_000)


def run(scenario: Callable[[Node, SimClock], Awaitable[None]], **settings: object) -> None:
    async def whole(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, small_config(**{"bulk_step_messages": 3, **settings})).open()
        await node.create_subscription(TOPIC, "all")
        await scenario(node, clock)

    run_sim(whole, 1, latency=Latency(max_ms=1.0, slow_every=0))


async def fill(node: Node, count: int, *, prefix: str = "k", first_ms: int = START_MS + HOUR_MS) -> None:
    """Messages that are due a minute after one another."""
    await node.produce(
        TOPIC,
        [
            Outgoing(
                f"{prefix}{at}".encode(), deliver_at_ms=first_ms + 60_000 * at, schedule_key=f"{prefix}-{at}"
            )
            for at in range(count)
        ],
    )


def again(node: Node, clock: SimClock) -> Node:
    return Node(node.vfs, clock, node.broker.config).open()


async def begin(node: Node, definition: BulkDefinition) -> int:
    now_ms = node.clock.now_ms()
    return await node.broker.bulk_changes.begin(node.topic(TOPIC), replace(definition, begin_ms=now_ms))


async def ended(node: Node, bulk_id: int) -> BulkStanding:
    while not (standing := node.broker.bulk_changes.standing(node.topic(TOPIC), bulk_id)).end:
        await asyncio.sleep(0.01)
    return standing


async def minutes(node: Node) -> list[int]:
    """The due times of what waits, in minutes after the first one's."""
    times = await node.topic(TOPIC).schedule.times(DueRange(), 10_000)
    assert times is not None
    return [(ms - START_MS - HOUR_MS) // 60_000 for ms in times.tolist()]


def counts(standing: BulkStanding) -> tuple[BulkEnd, int, int, int, int]:
    progress = standing.progress
    return standing.end, standing.definition.total, progress.examined, progress.matched, progress.done


@pytest.mark.slow
def test_each_message_is_moved_once_also_where_it_matches_again() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        await fill(node, 20)
        standing = await ended(node, await begin(node, LATER))
        assert await minutes(node) == list(range(10, 30))
        assert (standing.end, standing.progress.matched, standing.progress.done) == (BulkEnd.DONE, 20, 20)
        earlier = await ended(node, await begin(node, BulkDefinition(BulkKind.SHIFT, -10 * 60_000)))
        assert counts(earlier)[3:] == (20, 20)
        assert await minutes(node) == list(range(20))

    run(scenario)


def test_a_filter_is_of_times_and_keys_and_counts_tell_the_way() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        await fill(node, 10, prefix="a")
        await fill(node, 10, prefix="b")
        first_ms = START_MS + HOUR_MS
        some = replace(CANCEL, key_prefix="b-", start_ms=first_ms + 120_000, end_ms=first_ms + 360_000)
        assert counts(await ended(node, await begin(node, replace(some, dry_run=True)))) == (
            BulkEnd.DONE,
            8,
            8,
            4,
            4,
        )
        assert len(await minutes(node)) == 20
        assert counts(await ended(node, await begin(node, some))) == (BulkEnd.DONE, 8, 8, 4, 4)
        assert await minutes(node) == sorted([*range(10), 0, 1, 6, 7, 8, 9])
        assert counts(await ended(node, await begin(node, some)))[1:] == (4, 4, 0, 0)

    run(scenario)


def test_what_comes_meanwhile_is_changed_if_its_place_was_not_passed() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        await fill(node, 30)
        bulk_id = await begin(node, CANCEL)
        while node.broker.bulk_changes.standing(node.topic(TOPIC), bulk_id).progress.done < 9:
            await asyncio.sleep(0.001)
        await fill(node, 1, prefix="early", first_ms=START_MS + HOUR_MS - 60_000)
        await fill(node, 1, prefix="late", first_ms=START_MS + 3 * HOUR_MS)
        assert (await ended(node, bulk_id)).progress.done == 31
        assert await minutes(node) == [-1]

    run(scenario)


@pytest.mark.slow
def test_what_somebody_moves_meanwhile_is_not_moved_and_is_cancelled() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        for definition, left in ((LATER, [*range(10, 29), 110]), (CANCEL, [])):
            await node.topic(TOPIC).schedule.change([f"k-{at}" for at in range(20)], Cancel(), dry_run=False)
            await fill(node, 20)
            bulk_id = await begin(node, definition)
            while node.broker.bulk_changes.standing(node.topic(TOPIC), bulk_id).progress.done < 3:
                await asyncio.sleep(0.001)
            move = Move(deliver_at_ms=START_MS + HOUR_MS + 110 * 60_000)
            await node.topic(TOPIC).schedule.change(["k-19"], move, dry_run=False)
            await ended(node, bulk_id)
            assert await minutes(node) == left

    run(scenario)


def test_they_are_made_one_after_the_other_and_each_finds_what_the_ones_before_left() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        await fill(node, 10)
        ids = [await begin(node, definition) for definition in (LATER, LATER, CANCEL)]
        assert ids == [1, 2, 3]
        standings = [await ended(node, bulk_id) for bulk_id in ids]
        assert [standing.progress.done for standing in standings] == [10, 10, 10]
        assert await minutes(node) == []

    run(scenario)


@pytest.mark.slow
def test_a_restart_goes_on_and_changes_nothing_twice() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        await fill(node, 60)
        bulk_id = await begin(node, LATER)
        topic = node.topic(TOPIC)
        for _ in range(4):
            done = node.broker.bulk_changes.standing(node.topic(TOPIC), bulk_id).progress.done
            while node.broker.bulk_changes.standing(node.topic(TOPIC), bulk_id).progress.done < done + 6:
                await asyncio.sleep(0.0005)
            await node.stop()
            node = again(node, clock)
        assert node.topic(TOPIC) is not topic
        assert counts(await ended(node, bulk_id))[3:] == (60, 60)
        assert await minutes(node) == list(range(10, 70))
        await node.stop()

    run(scenario)


def test_a_request_id_begins_one_also_after_a_restart() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        await fill(node, 5)
        named = replace(LATER, request_id="r")
        assert list(await asyncio.gather(begin(node, named), begin(node, named))) == [1, 1]
        await ended(node, 1)
        await node.stop()
        node = again(node, clock)
        assert await begin(node, named) == 1
        with pytest.raises(InvalidRequest, match="another request"):
            await begin(node, replace(named, new_ms=5))
        delay = replace(CANCEL, kind=BulkKind.DELAY, request_id="d")
        first = await begin(node, replace(delay, new_ms=clock.now_ms() + 1_000))
        await asyncio.sleep(0.5)
        assert await begin(node, replace(delay, new_ms=clock.now_ms() + 1_000)) == first
        await node.stop()

    run(scenario)


def test_cancelled_ones_end_where_they_are() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        await fill(node, 30)
        first, second = await begin(node, CANCEL), await begin(node, CANCEL)
        bulk, topic = node.broker.bulk_changes, node.topic(TOPIC)
        assert (await bulk.cancel(topic, second)).end is BulkEnd.CANCELLED
        while bulk.standing(topic, first).progress.done < 6:
            await asyncio.sleep(0.001)
        both = await asyncio.gather(bulk.cancel(topic, first), bulk.cancel(topic, first))
        assert both[0] == both[1] == await bulk.cancel(topic, first)
        assert len(await minutes(node)) == 30 - both[0].progress.done > 0
        await asyncio.sleep(1)
        assert len(await minutes(node)) == 30 - both[0].progress.done
        with pytest.raises(NotFound, match="no bulk change 9"):
            await bulk.cancel(topic, 9)

    run(scenario)


def test_a_step_that_was_begun_before_a_cancel_was_answered_changes_nothing() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        await fill(node, 6)
        bulk, topic = node.broker.bulk_changes, node.topic(TOPIC)
        room, waits = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            waits.set()
            await room.wait()

        beginning = asyncio.ensure_future(begin(node, CANCEL))
        await asyncio.sleep(0)  # it has asked for room
        bulk._wait_room = wait
        bulk_id = await beginning
        await waits.wait()
        assert (await bulk.cancel(topic, bulk_id)).end is BulkEnd.CANCELLED
        room.set()
        await asyncio.sleep(1)
        assert await minutes(node) == list(range(6))

    run(scenario)


def test_one_that_cannot_go_on_fails_with_the_reason_and_the_next_one_is_made() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        await fill(node, 9)
        await node.topic(TOPIC).change_policy(TopicPolicy(max_delay_ms=HOUR_MS + 14 * 60_000 + 30_000))
        with moves(node.broker, "postdate_bulk_changes_failed"):
            failed = await ended(node, await begin(node, LATER))
        assert (failed.end, failed.failure_reason, failed.progress.done) == (
            BulkEnd.FAILED,
            "DELIVER_AT_TOO_FAR",
            3,
        )
        sixth = (await node.topic(TOPIC).schedule.get("k-5")).position
        assert f"delay of message {sixth.ledger_id}:{sixth.entry_id} exceeds" in failed.failure
        assert await minutes(node) == [*range(3, 9), *range(10, 13)]
        with pytest.raises(OutOfRange):
            await begin(node, BulkDefinition(BulkKind.MOVE, START_MS + 3 * HOUR_MS))
        assert (await ended(node, await begin(node, CANCEL))).progress.done == 9
        counters = node.broker.counters
        assert (counters.bulk_changes_begun, counters.bulk_changes_ended, counters.bulk_changes_failed) == (
            2,
            2,
            1,
        )

    run(scenario)


def test_one_that_fails_while_the_journal_takes_nothing_fails_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while the broker stops: its journal is closed before its tasks are ended."""

    async def scenario(node: Node, clock: SimClock) -> None:
        await fill(node, 3)
        await node.topic(TOPIC).change_policy(TopicPolicy(max_delay_ms=2 * HOUR_MS))
        bulk_id = await begin(node, BulkDefinition(BulkKind.SHIFT, 2 * HOUR_MS))
        refused_at: list[int] = []

        def refuse(*_: object) -> None:
            refused_at.append(clock.now_ms())
            raise Unavailable("The journal is closed")

        with monkeypatch.context() as patched:
            patched.setattr(node.broker.journal, "submit", refuse)
            await asyncio.sleep(3)
        assert len(refused_at) >= 2
        assert (await ended(node, bulk_id)).failure_reason == "DELIVER_AT_TOO_FAR"
        assert (node.broker.supervisor.failure, node.failures) == (None, [])

    run(scenario)


def test_one_that_meets_a_damaged_index_fails_and_the_next_one_is_made() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        await fill(node, 60)
        await asyncio.sleep(20)
        await node.stop()
        node = again(node, clock)
        await node.topic(TOPIC).index.caught_up()
        (path,) = [path for path in node.vfs.snapshot() if "/buckets/" in path]
        whole = node.vfs.snapshot()[path]
        file = node.vfs.open(path)
        file.pwrite([bytes(each ^ 0xFF for each in whole)], 0)
        failed = await ended(node, await begin(node, CANCEL))
        assert (failed.end, failed.failure_reason) == (BulkEnd.FAILED, "CORRUPT")
        assert path not in failed.failure, "clients are told no names of files"
        file.pwrite([whole], 0)
        assert (await ended(node, await begin(node, CANCEL))).progress.done == 60
        await node.stop()

    run(scenario)


def test_dry_runs_are_forgotten_before_changes_whose_call_may_be_repeated() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        await fill(node, 6)
        topic = node.topic(TOPIC)
        named = replace(LATER, request_id="once")
        first = await begin(node, named)
        for _ in range(5):
            await ended(node, await begin(node, replace(CANCEL, dry_run=True)))
        assert topic.bulk.ids() == [first, 5, 6]
        await topic.change_policy(TopicPolicy(max_delay_ms=1))  # which would refuse it, were it a new one
        assert await begin(node, named) == first

    run(scenario, bulk_ended_kept=3)


def test_a_topic_whose_index_is_being_built_takes_no_turn_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        await fill(node, 9)
        others = []
        for number in range(_STEPS_AT_ONCE):
            await node.create_subscription(f"t{number}", "all")
            await node.produce(f"t{number}", [Outgoing(b"x", deliver_at_ms=START_MS + HOUR_MS)])
            others.append(node.topic(f"t{number}"))
            begins = iter([None])

            async def wait_built(begins: Iterator[None] = begins) -> None:
                if next(begins, 0) is not None:
                    await asyncio.Event().wait()

            monkeypatch.setattr(others[-1].index, "wait_built", wait_built)
            await node.broker.bulk_changes.begin(others[-1], replace(CANCEL, begin_ms=START_MS))
        begun_ms = clock.now_ms()
        assert (await ended(node, await begin(node, CANCEL))).progress.done == 9
        assert clock.now_ms() - begun_ms < 1_000
        assert all(other.bulk.unended_ids() for other in others)

    run(scenario)


def test_what_was_moved_already_is_passed_in_large_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a step has room for one message more, and thousands follow that are none."""
    limits: list[int] = []

    async def counted(*arguments: Any) -> Any:
        limits.append(arguments[-1])
        return await scan(*arguments)

    monkeypatch.setattr("broker.topics.scheduled.scan", counted)

    async def scenario(node: Node, clock: SimClock) -> None:
        for number, count in enumerate((60, 60, 60, 59)):
            await fill(node, count, prefix=f"p{number}", first_ms=START_MS + (number + 1) * HOUR_MS)
        await fill(node, 5, prefix="last", first_ms=START_MS + 9 * HOUR_MS)
        moved = await ended(node, await begin(node, BulkDefinition(BulkKind.MOVE, START_MS + 8 * HOUR_MS)))
        assert moved.progress.done == 244
        assert len(limits) < 20

    run(scenario, bulk_step_messages=120)


@pytest.mark.slow
def test_there_is_a_limit_and_those_that_ended_are_forgotten() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        await fill(node, 30)
        bulk, topic = node.broker.bulk_changes, node.topic(TOPIC)
        begun = await asyncio.gather(*(begin(node, LATER) for _ in range(3)), return_exceptions=True)
        assert [(each.reason, str(each)) for each in begun if isinstance(each, LimitReached)] == [
            ("TOO_MANY_BULK_CHANGES", "Topic 'orders' has 2 bulk changes that have not ended, the limit")
        ]
        for bulk_id in (1, 2):
            await ended(node, bulk_id)
        for bulk_id in (3, 4, 5):
            assert await ended(node, await begin(node, LATER)) == bulk.standing(topic, bulk_id)
        assert topic.bulk.ids() == [3, 4, 5]
        await node.stop()
        node = again(node, clock)
        assert node.topic(TOPIC).bulk.ids() == [3, 4, 5]
        assert await begin(node, LATER) == 6
        await node.stop()

    run(scenario, bulk_unended_max=2, bulk_ended_kept=3)


def test_a_topic_that_is_deleted_ends_its_own() -> None:
    async def scenario(node: Node, clock: SimClock) -> None:
        await fill(node, 30)
        await begin(node, CANCEL)
        await node.broker.registry.delete_topic(TOPIC)
        await asyncio.sleep(2)
        assert node.failures == []

    run(scenario)
