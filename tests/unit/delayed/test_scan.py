from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.delayed.bucket_tracker import BucketTracker
from broker.delayed.bucket_values import BucketPolicyValues
from broker.delayed.due_rows import DueRows, Key
from broker.delayed.memory_tracker import MemoryTracker
from broker.delayed.mutable_bucket import BLOCK_ROWS
from broker.delayed.scan import Page, UnreadSegments, scan, unsorted_in_memory
from broker.delayed.tracker import ENTRY_AFTER_ALL, Frontier
from tests.unit.delayed.test_bucket_tracker import NOW, World

LAST: Key = (1 << 62, 0, 0)


def columns_of(keys: list[Key]) -> DueRows:
    times, ledgers, entries = zip(*keys, strict=True) if keys else ((), (), ())
    return DueRows(
        np.array(times, dtype=np.int64),
        np.array(ledgers, dtype=np.int64),
        np.array(entries, dtype=np.uint32),
    )


def unread_of(segments: list[list[Key]], reads: list[int]) -> UnreadSegments:
    async def read(number: int) -> DueRows:
        reads.append(number)
        return columns_of(segments[number])

    return UnreadSegments(
        columns_of([min(keys) for keys in segments]),
        columns_of([max(keys) for keys in segments]),
        np.array([len(keys) for keys in segments], dtype=np.int64),
        read,
    )


def keys_of(page: Page) -> list[Key]:
    rows = page.entries
    return [rows.key(i) for i in range(len(rows))]


keys = st.tuples(st.integers(1, 30), st.integers(1, 2), st.integers(0, 3))
buckets = st.lists(st.lists(st.lists(keys, min_size=1, max_size=4), max_size=3), max_size=3)


@given(st.lists(keys, max_size=8), buckets, keys, keys, st.integers(1, 6))
def test_pages_hold_every_entry_of_a_range_once_and_in_order(memory, buckets, start, end, limit):
    everything = {*memory, *(key for segments in buckets for segment in segments for key in segment)}
    expected = sorted(key for key in everything if start <= key < end)
    found: list[Key] = []

    async def page_by_page() -> None:
        at = start
        while at < end:
            unread = [unread_of(segments, []) for segments in buckets if segments]
            page = await scan(columns_of(memory), unread, at, end, limit)
            assert len(page.entries) <= limit
            assert page.is_last or page.end > at
            found.extend(keys_of(page))
            at = end if page.is_last else page.end

    asyncio.run(page_by_page())
    assert found == expected


@pytest.mark.slow
async def test_a_page_reads_only_the_segments_that_it_needs():
    rng = random.Random(1)
    reads: list[int] = []
    segments = [
        sorted((rng.randrange(hour * 3600, hour * 3600 + 3600), 1, hour * 1000 + i) for i in range(1000))
        for hour in range(50)
    ]
    page = await scan(columns_of([]), [unread_of(segments, reads)], (10 * 3600, 0, 0), LAST, 500)
    assert len(page.entries) == 500
    assert reads == [10]


async def test_more_entries_of_one_time_than_a_page_holds():
    segments = [[(5, 1, 10 * part + i) for i in range(10)] for part in range(4)]
    found, at = [], (0, 0, 0)
    for _ in range(14):
        page = await scan(columns_of([]), [unread_of(segments, [])], at, LAST, 3)
        found += keys_of(page)
        at = page.end
    assert found == [(5, 1, i) for i in range(40)]
    assert page.is_last


@pytest.mark.slow
@pytest.mark.parametrize("bucket_count", [1, 3])
@pytest.mark.parametrize("place", [0, 1, 50_000, 99_999])
async def test_a_page_of_one_millisecond_costs_what_it_shows(bucket_count: int, place: int):
    """Counted in rows: borders by time alone made each page read all that is due in its millisecond."""
    reads: list[int] = []
    everything = [(5, 1, i) for i in range(100_000)]
    segments = [everything[i : i + 100] for i in range(0, len(everything), 100)]
    unread = [unread_of(segments[i::bucket_count], reads) for i in range(bucket_count)]
    page = await scan(columns_of([]), unread, everything[place], LAST, 150)
    assert keys_of(page) == everything[place : place + 150]
    assert 0 < len(reads) <= 4 + 2 * bucket_count


async def test_all_pages_of_one_millisecond_read_each_segment_about_once():
    reads: list[int] = []
    everything = [(5, 1, i) for i in range(10_000)]
    unread = unread_of([everything[i : i + 100] for i in range(0, len(everything), 100)], reads)
    found, at, is_last = [], (0, 0, 0), False
    while not is_last:
        page = await scan(columns_of([]), [unread], at, LAST, 1_000)
        found += keys_of(page)
        at, is_last = page.end, page.is_last
    assert found == everything
    assert len(reads) <= 1.5 * 100


async def test_a_segment_that_cannot_be_read_is_told():
    async def read(_: int) -> DueRows:
        raise OSError("gone")

    one, border = np.array([1], dtype=np.int64), columns_of([(5, 1, 0)])
    with pytest.raises(OSError, match="gone"):
        await scan(columns_of([]), [UnreadSegments(border, border, one, read)], (0, 0, 0), LAST, 3)


async def test_the_bucket_tracker_shows_what_it_holds_wherever_that_is():
    world, rng = World(), random.Random(4)
    for ledger_id in range(1, 8):
        world.add(ledger_id, [NOW + rng.randrange(1, 60_000) for _ in range(12)])
        if ledger_id % 2:
            await world.seal()
    await world.tracker.load(NOW + 5_000)
    world.tracker.take_due(NOW + 3_000, 1_000)
    expected = sorted(row for row in world.rows if row[0] > NOW + 3_000)
    assert world.tracker.stats().loaded_count
    found, at = [], (NOW + 3_001, 0, 0)
    while True:
        page = await scan(*world.tracker.parts_between(at, LAST, 7), at, LAST, 7)
        found += keys_of(page)
        at = page.end
        if page.is_last:
            break
    assert found == expected


async def test_pages_go_on_within_a_millisecond_that_fills_many_segments():
    world = World(BucketPolicyValues(max_segment_entries=4))
    world.add(1, [NOW + 1_000] * 60 + [NOW + 1_001] * 3)
    await world.seal()
    found, at = [], (NOW + 1, 0, 0)
    for _ in range(20):
        page = await scan(*world.tracker.parts_between(at, LAST, 4), at, LAST, 4)
        assert page.end > at
        found += keys_of(page)
        at = page.end
        if page.is_last:
            break
    assert found == world.rows


async def test_doubled_entries_do_not_hide_what_follows_them():
    doubled = [(time, 1, 0) for time in range(1, 6)]
    unread = [unread_of([[*doubled, (7, 1, 0)]], []), unread_of([doubled], []), unread_of([doubled], [])]
    found, at = [], (0, 0, 0)
    while True:
        page = await scan(columns_of([]), unread, at, LAST, 3)
        found += keys_of(page)
        at = page.end
        if page.is_last:
            break
    assert found == [*doubled, (7, 1, 0)]


async def test_the_memory_tracker_shows_what_it_holds_with_exact_times():
    rng = random.Random(5)
    times = {(1, i): NOW + rng.randrange(1, 60_000) for i in range(50)}

    async def times_of(ledger_id: int, entry_ids):
        return np.array([times[ledger_id, i] for i in entry_ids.tolist()], dtype=np.int64)

    tracker = MemoryTracker(times_of, Frontier(NOW, *ENTRY_AFTER_ALL), tick_ms=1_000)
    tracker.add(1, np.arange(50, dtype=np.uint32), np.array(list(times.values()), dtype=np.int64))
    while tracker.needs_load(NOW):
        await tracker.load(NOW)
    start, end = (NOW + 700, 0, 0), (NOW + 40_500, 0, 0)
    page = await scan(*tracker.parts_between(start, end, 100), start, end, 100)
    assert keys_of(page) == sorted(
        (time, *position) for position, time in times.items() if NOW + 700 <= time < NOW + 40_500
    )
    assert page.is_last


HERD = 50_000
"""As many as a bucket in memory holds by default, and fewer than are loaded together."""


async def tracker_with_herd(where: str) -> BucketTracker | MemoryTracker:
    """A tracker that holds many entries of one millisecond in memory."""
    ids, due_ms = np.arange(HERD, dtype=np.uint32), NOW + 1_000
    times = np.full(HERD, due_ms, dtype=np.int64)

    async def times_of(ledger_id: int, entry_ids):
        return times[entry_ids]

    tracker: BucketTracker | MemoryTracker
    if where == "memory tracker":
        tracker = MemoryTracker(times_of, Frontier(NOW, *ENTRY_AFTER_ALL), tick_ms=1_000)
    else:
        tracker = World(BucketPolicyValues()).tracker
    for first in range(0, HERD, 500):
        some = slice(first, first + 500)
        tracker.add(1, ids[some], times[some])
    while where != "unsealed" and tracker.needs_load(due_ms):
        await tracker.load(due_ms)
    assert tracker.count() == HERD
    assert tracker.stats().loaded_count == (0 if where == "unsealed" else HERD)
    return tracker


@pytest.mark.parametrize("where", ["unsealed", "loaded", "memory tracker"])
@pytest.mark.parametrize("place", [0, 1, HERD // 2, HERD - 100])
async def test_a_page_of_one_millisecond_in_memory_costs_what_it_shows(where: str, place: int):
    """Counted in rows: each page sorted all that was due in its millisecond."""
    tracker = await tracker_with_herd(where)
    start, looked = (NOW + 1_000, 1, place), 0
    in_memory, unread = tracker.parts_between(start, LAST, 100)

    def counted(segments: UnreadSegments) -> UnreadSegments:
        async def read(number: int) -> DueRows:
            nonlocal looked
            rows = await segments.read(number)
            looked += len(rows)
            return rows

        return replace(segments, read=read)

    page = await scan(in_memory, [counted(segments) for segments in unread], start, LAST, 100)
    assert keys_of(page) == [(NOW + 1_000, 1, place + i) for i in range(100)]
    assert len(in_memory) + looked <= 2 * BLOCK_ROWS


@given(st.lists(st.lists(keys, min_size=1, max_size=4), max_size=4))
def test_rows_in_memory_have_the_borders_of_their_parts(blocks):
    unsorted = unsorted_in_memory([columns_of(block) for block in blocks])
    assert [unsorted.first.key(i) for i in range(len(blocks))] == [min(block) for block in blocks]
    assert [unsorted.last.key(i) for i in range(len(blocks))] == [max(block) for block in blocks]
    assert unsorted.counts.tolist() == [len(block) for block in blocks]
