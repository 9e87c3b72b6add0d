"""Looks at what is pending: borders, races, limits and damage. Pages against a model: `test_scheduled_pages`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest

from broker.errors import Corrupt, InvalidRequest, Unavailable
from broker.model import ROW, Position
from broker.storage.records import Produced
from broker.topics import scheduled
from broker.topics.schedule_values import DueRange, Scheduled, ScheduledState
from tests.unit.delayed.gated_buckets import IS_BACKGROUND, TOPIC_ID, spin
from tests.unit.topics.pending_world import EVERYTHING, NOW, PendingWorld

HOUR = 3_600_000


@pytest.fixture(params=["bucket", "memory"])
def world(request) -> PendingWorld:
    return PendingWorld(request.param)


@pytest.fixture
def bucket_world() -> PendingWorld:
    return PendingWorld("bucket")


def places(shown: Sequence[Scheduled]) -> list[tuple[int, int, int]]:
    return [(each.deliver_at_ms, *each.position) for each in shown]


async def test_get_shows_a_message_that_waits_as_it_is_now(world: PendingWorld):
    world.add(1, [(NOW + HOUR, "order-1"), (NOW + HOUR, "")], b"payload")
    position = Position(1, 0)
    expected = Scheduled(
        position, "order-1", NOW + HOUR, NOW - 5, ScheduledState.WAITING, 0, world.waiting[position].frame
    )
    assert await world.look.get(position) == expected
    world.move(position, NOW + 2 * HOUR)
    world.move(position, NOW + 3 * HOUR)
    moved = await world.look.get(position)
    assert moved is not None
    assert (moved.deliver_at_ms, moved.revision) == (NOW + 3 * HOUR, 2)
    other = await world.look.get(Position(1, 1))
    assert other is not None
    assert other.schedule_key == ""


async def test_get_of_what_is_due_asks_whether_it_was_sent(world: PendingWorld):
    world.add(1, [(NOW + 1, ""), (NOW + 2, "")])
    await world.take(NOW + 2)
    assert await world.look.get(Position(1, 0)) is None
    world.due.add(Position(1, 0))
    found = await world.look.get(Position(1, 0))
    assert found is not None
    assert found.state is ScheduledState.DUE


async def test_get_of_what_is_not_pending_is_nothing(world: PendingWorld):
    world.add(1, [(NOW + HOUR, ""), (NOW + HOUR, "")])
    world.cancel(Position(1, 0))
    rows = np.zeros(1, dtype=ROW)
    rows["length"], rows["offset"] = 2, 2 * len(world.waiting[Position(1, 1)].frame)
    world.log.append(Produced(TOPIC_ID, 1, 2, NOW, np.zeros(1, dtype=np.int64), rows, b"xy"))
    world.due.update((Position(1, 0), Position(1, 2), Position(1, 3), Position(2, 0)))
    for position in ((1, 0), (1, 2), (1, 3), (2, 0), (0, 0)):
        assert await world.look.get(Position(*position)) is None
    world.add(2, [(NOW + HOUR, "")])
    world.drop(1)
    assert await world.look.get(Position(1, 1)) is None


async def test_a_range_begins_with_its_start_and_ends_before_its_end(world: PendingWorld):
    world.add(1, [(NOW + i, "") for i in range(1, 8)])
    await world.seal()
    page = await world.look.page(DueRange(NOW + 3, NOW + 6), "", None, 10)
    assert [each.deliver_at_ms - NOW for each in page.scheduled] == [3, 4, 5]
    assert page.next is None
    assert list((await world.look.page(DueRange(NOW + 6, NOW + 6), "", None, 10)).scheduled) == []


async def test_what_is_not_after_the_frontier_is_due_and_not_listed(world: PendingWorld):
    world.add(1, [(NOW + 5, ""), (NOW + 5, ""), (NOW + 6, "")])
    await world.caught_up()
    while world.tracker.needs_load(NOW + 5):
        await world.tracker.load(NOW + 5)
    assert world.tracker.take_due(NOW + 5, 1) is not None  # the other one of its millisecond is due too
    world.add(1, [(NOW + 2, "")])
    page = await world.look.page(EVERYTHING, "", None, 10)
    assert places(page.scheduled) == [(NOW + 6, 1, 2)]
    assert (await world.look.count(EVERYTHING, 0)).bars == ((0, 1),)


async def test_what_goes_while_a_page_is_read_is_not_in_it(bucket_world: PendingWorld):
    world = bucket_world
    world.add(1, [(NOW + 10_000 * i, "") for i in range(1, 7)])
    await world.seal()
    IS_BACKGROUND.set(True)
    look = asyncio.create_task(world.look.page(EVERYTHING, "", None, 10))
    IS_BACKGROUND.set(False)
    await spin()
    assert world.executor.stopped
    assert (world.kept.keepers, world.log.keeps_files) == (1, True)
    world.cancel(Position(1, 2))
    world.move(Position(1, 4), NOW + 15_000)
    await world.take(NOW + 10_000)
    while world.executor.let_go():
        await spin()
    page = await look
    assert places(page.scheduled) == [(NOW + 10_000 * (i + 1), 1, i) for i in (1, 3, 5)]
    assert (world.kept.keepers, world.log.keeps_files) == (0, False)


async def test_what_goes_after_it_was_found_is_not_in_the_page(world: PendingWorld):
    world.add(1, [(NOW + HOUR + i, "k" if i in (0, 4) else "") for i in range(6)])
    scan, scans = world.look._scan, 0

    async def scanning(*arguments):
        nonlocal scans
        scans += 1
        if scans == 2:
            world.cancel(Position(1, 0))
        return await scan(*arguments)

    with patch.object(world.look, "_scan", scanning):
        page = await world.look.page(EVERYTHING, "k", None, 2)
    assert scans > 1
    assert places(page.scheduled) == world.places(EVERYTHING, "k") == [(NOW + HOUR + 4, 1, 4)]


async def test_a_page_ends_early_where_messages_are_large(world: PendingWorld):
    world.add(1, [(NOW + HOUR + i, "k") for i in range(5)], b"p" * 1_000)
    world.add(2, [(NOW + HOUR + i, "k") for i in range(5)], b"p" * 1_000)
    for key_prefix in ("", "k"):
        with patch.object(scheduled, "PAGE_BYTES_MAX", 3_500):
            page = await world.look.page(EVERYTHING, key_prefix, None, 10)
        assert places(page.scheduled) == world.places()[:3]
        assert page.next == world.places()[3]
        with patch.object(scheduled, "PAGE_BYTES_MAX", 10):
            page = await world.look.page(EVERYTHING, key_prefix, page.next, 10)
        assert places(page.scheduled) == world.places()[3:4]


async def test_a_page_with_a_prefix_looks_at_a_bounded_number_of_messages(world: PendingWorld):
    world.add(1, [(NOW + HOUR + i, "b" if i == 9 else "a") for i in range(12)])
    pages: list[list[int]] = []
    start = None
    with patch.object(scheduled, "LOOKED_MAX", 4):
        while not pages or start is not None:
            page = await world.look.page(EVERYTHING, "b", start, 2)
            pages.append([each.position.entry_id for each in page.scheduled])
            start = page.next
    assert [found for found in pages if found] == [[9]]
    assert len(pages) == 3


async def test_frames_of_messages_without_a_key_are_not_read_for_a_prefix(world: PendingWorld):
    world.add(1, [(NOW + HOUR, "a"), (NOW + HOUR, ""), (NOW + HOUR, "ab")], b"p" * 100)
    await world.flush_ledgers()
    file = world.vfs.open("ledgers/1.0.data")
    frame = world.waiting[Position(1, 1)].frame
    at = file.pread(file.size(), 0).index(frame, 100)
    file.pwrite([b"damage"], at + 50)
    with patch.object(scheduled, "_UNASKED_BYTES", 1):
        page = await world.look.page(EVERYTHING, "a", None, 10)
    assert [each.schedule_key for each in page.scheduled] == ["a", "ab"]
    # Where it is wanted, it is read and found damaged: it is left out.
    page = await world.look.page(EVERYTHING, "", None, 10)
    assert [each.schedule_key for each in page.scheduled] == ["a", "ab"]


async def test_a_damaged_segment_is_told_and_counts_go_on(bucket_world: PendingWorld):
    world = bucket_world
    world.add(1, [(NOW + HOUR + 10_000 * i, "") for i in range(6)])
    await world.seal()
    file = world.vfs.open(world.storage.path(1))
    file.pwrite([b"damage"], file.size() - 6)
    with pytest.raises(Corrupt):
        await world.look.page(EVERYTHING, "", None, 10)
    with pytest.raises(Corrupt):
        await world.look.count_matching(EVERYTHING, "")
    assert sum(count for _, count in (await world.look.count(EVERYTHING, HOUR)).bars) == 6
    assert world.kept.keepers == 0


async def test_a_disk_that_fails_is_told(bucket_world: PendingWorld):
    world = bucket_world
    world.add(1, [(NOW + HOUR, "")])
    await world.seal()
    with patch.object(world.vfs, "open", side_effect=OSError("the disk is gone")), pytest.raises(Unavailable):
        await world.look.next_matching(EVERYTHING, "", (0, 0, 0), 10, world.lsn)


async def test_a_count_reads_nothing(bucket_world: PendingWorld):
    world = bucket_world
    world.add(1, [(NOW + HOUR + 1_000 * i, "") for i in range(40)])
    await world.seal()
    world.add(1, [(NOW + 9 * HOUR, "")])
    calls = world.executor.calls
    counts = await world.look.count(DueRange(NOW + HOUR + 10_000, NOW + HOUR + 30_000), 5_000)
    assert counts.before + sum(count for _, count in counts.bars) + counts.after == 41
    assert not counts.is_exact
    counts = await world.look.count(DueRange(NOW, NOW + 9 * HOUR), 9 * HOUR)
    assert (counts.bars, counts.before, counts.after, counts.is_exact) == (((NOW, 40),), 0, 1, True)
    assert world.executor.calls == calls


async def test_an_open_range_has_bars_where_messages_are_due(world: PendingWorld):
    assert (await world.look.count(EVERYTHING, 1)).bars == ()
    world.add(1, [(NOW + HOUR, ""), (NOW + 100 * HOUR, "")])
    counts = await world.look.count(EVERYTHING, HOUR)
    assert sum(count for _, count in counts.bars) == 2
    assert all(start_ms % HOUR == 0 for start_ms, _ in counts.bars)
    with pytest.raises(InvalidRequest) as refused:
        await world.look.count(EVERYTHING, 1_000)
    assert (refused.value.reason, refused.value.facts["limit"]) == ("TOO_MANY_BARS", 10_000)
    assert (await world.look.count(DueRange(NOW + HOUR, NOW + HOUR + 9_000), 1)).before == 0


async def test_counts_are_not_called_exact_while_the_index_is_not(world: PendingWorld):
    world.add(1, [(NOW + HOUR, "")])
    assert (await world.look.count(EVERYTHING, 0)).is_exact
    world.is_exact = False
    assert not (await world.look.count(EVERYTHING, 0)).is_exact


async def test_an_index_that_does_not_catch_up_is_told(world: PendingWorld):
    async def never() -> None:
        await asyncio.get_running_loop().create_future()

    world.caught_up = never  # type: ignore[method-assign]
    with patch.object(scheduled, "_INDEXED_SECONDS_MAX", 0.0):
        for look in (
            world.look.page(EVERYTHING, "", None, 1),
            world.look.count(EVERYTHING, 0),
            world.look.count_matching(EVERYTHING, ""),
            world.look.next_matching(EVERYTHING, "", (0, 0, 0), 1, 0),
        ):
            with pytest.raises(Unavailable) as refused:
                await look
            assert refused.value.reason == "INDEX_NOT_BUILT"
