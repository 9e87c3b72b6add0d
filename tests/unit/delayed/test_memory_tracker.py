from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from broker.delayed.due_rows import DueRows
from broker.delayed.loaded_rows import BLOCK_ROWS
from broker.delayed.memory_tracker import MemoryTracker
from broker.delayed.tracker import ENTRY_AFTER_ALL, DelayedDeliveryTracker, Frontier
from broker.errors import Corrupt
from broker.model import Array, Int64Column, UInt32Column
from broker.storage.blocks import BLOCK_ROWS as CHECKED_ROWS

NOW = 1_700_000_000_000
HOUR = 3_600_000
DAY = 24 * HOUR
Row = tuple[int, int, int]
Build = Callable[..., MemoryTracker]


class Ledgers:
    """Rows as ledgers would store them, with the effective times that a tracker asks for."""

    def __init__(self) -> None:
        self.times: dict[int, Int64Column] = {}
        self.read_lengths: list[int] = []
        self.failing = False
        self.damaged: set[tuple[int, int]] = set()  # ledgers and blocks of them

    async def read_times(self, ledger_id: int, entry_ids: UInt32Column) -> Int64Column:
        assert np.all(entry_ids[1:] > entry_ids[:-1])
        self.read_lengths.append(len(entry_ids))
        if self.failing:
            raise OSError("the disk is gone")
        if self.damaged & {(ledger_id, entry_id // CHECKED_ROWS) for entry_id in entry_ids.tolist()}:
            raise Corrupt("rows of a ledger are damaged")
        return self.times[ledger_id][entry_ids]

    def store(self, tracker: DelayedDeliveryTracker, ledger_id: int, times: Array | list[int]) -> None:
        """Append rows to a ledger and index them."""
        before = self.times.get(ledger_id, np.empty(0, dtype=np.int64))
        added = np.asarray(times, dtype=np.int64)
        self.times[ledger_id] = np.concatenate((before, added))
        tracker.add(ledger_id, np.arange(len(before), len(before) + len(added), dtype=np.uint32), added)

    def move(self, tracker: DelayedDeliveryTracker, ledger_id: int, entry_id: int, time: int) -> None:
        self.times[ledger_id][entry_id] = time
        tracker.add(ledger_id, np.array([entry_id], dtype=np.uint32), np.array([time], dtype=np.int64))


@pytest.fixture
def ledgers() -> Ledgers:
    return Ledgers()


@pytest.fixture
def build(ledgers: Ledgers) -> Build:
    def build(**settings: int) -> MemoryTracker:
        return MemoryTracker(ledgers.read_times, Frontier(NOW, *ENTRY_AFTER_ALL), **settings)

    return build


def rows(chunk: DueRows | None) -> list[Row]:
    if chunk is None:
        return []
    return list(
        zip(chunk.deliver_at_ms.tolist(), chunk.ledger_ids.tolist(), chunk.entry_ids.tolist(), strict=True)
    )


async def take(tracker: DelayedDeliveryTracker, now_ms: int, limit: int = 1_000_000) -> list[Row]:
    """Load, then take, until nothing is due, as the pump does."""
    taken: list[Row] = []
    while True:
        while tracker.needs_load(now_ms):
            await tracker.load(now_ms)
        chunk = tracker.take_due(now_ms, limit)
        if chunk is None:
            return taken
        assert 0 < len(chunk) <= limit
        taken += rows(chunk)


async def follow(tracker: DelayedDeliveryTracker, limit: int = 1_000_000) -> list[Row]:
    """Take everything, waking only when the tracker says so; checks that nothing is early or late."""
    taken: list[Row] = []
    while (wake_ms := tracker.next_due_ms()) is not None:
        found = await take(tracker, wake_ms, limit)
        assert all(row[0] == wake_ms for row in found)
        taken += found
    return taken


@pytest.mark.slow
async def test_entries_are_yielded_once_in_order_of_time_and_position_tracker_1(
    ledgers: Ledgers, build: Build
) -> None:
    tracker = build()
    random = np.random.default_rng(7)
    expected: list[Row] = []
    for ledger_id in (3, 1, 2):
        times = NOW + 1 + random.integers(0, 30_000, 2_000)
        ledgers.store(tracker, ledger_id, times)
        expected += [(time, ledger_id, entry) for entry, time in enumerate(times.tolist())]
    assert tracker.count() == 6_000
    assert await follow(tracker) == sorted(expected)
    assert tracker.count() == 0
    assert tracker.frontier == Frontier(*max(expected))


@pytest.mark.parametrize("limit", [1, 3, 7])
async def test_a_small_limit_cuts_chunks_anywhere_tracker_1(
    ledgers: Ledgers, build: Build, limit: int
) -> None:
    tracker = build(load_entries_max=4)
    ledgers.store(tracker, 2, [NOW + 5_000] * 5)
    ledgers.store(tracker, 1, [NOW + 5_000] * 5 + [NOW + 4_999])
    expected = [(NOW + 4_999, 1, 5)]
    expected += [(NOW + 5_000, ledger, entry) for ledger in (1, 2) for entry in range(5)]
    assert await follow(tracker, limit) == expected


async def test_late_entry_comes_with_the_next_chunk_tracker_2(ledgers: Ledgers, build: Build) -> None:
    tracker = build()
    ledgers.store(tracker, 1, [NOW + 50, NOW + 60])
    assert rows(tracker.take_due(NOW + 50, 10)) == [(NOW + 50, 1, 0)]
    frontier = tracker.frontier
    ledgers.store(tracker, 1, [NOW - DAY, NOW + 50, NOW])
    assert tracker.next_due_ms() == NOW - DAY
    assert rows(tracker.take_due(NOW + 50, 10)) == [(NOW - DAY, 1, 2), (NOW, 1, 4), (NOW + 50, 1, 3)]
    ledgers.move(tracker, 1, 0, NOW - 1)
    assert rows(tracker.take_due(NOW + 50, 10)) == [(NOW - 1, 1, 0)]
    assert tracker.frontier == Frontier(NOW + 50, 1, 3) > frontier
    assert rows(tracker.take_due(NOW + 60, 10)) == [(NOW + 60, 1, 1)]


async def test_entry_at_the_frontier_of_a_restart_is_late_tracker_2(ledgers: Ledgers, build: Build) -> None:
    tracker = build()
    ledgers.store(tracker, 1, [NOW, NOW + 1])
    assert rows(tracker.take_due(NOW, 10)) == [(NOW, 1, 0)]
    assert tracker.frontier == Frontier(NOW, *ENTRY_AFTER_ALL)


@pytest.mark.parametrize("tick_ms", [1, 10, 1_000, 60_000])
async def test_nothing_is_taken_a_millisecond_early_tracker_3(
    ledgers: Ledgers, build: Build, tick_ms: int
) -> None:
    tracker = build(tick_ms=tick_ms)
    border = (NOW // 60_000 + 2) * 60_000
    times = [border - 1, border, border + 1, border + tick_ms - 1, border + tick_ms, NOW + HOUR]
    ledgers.store(tracker, 1, times)
    taken = []
    for time in sorted(set(times)):
        assert await take(tracker, time - 1) == []
        taken += await take(tracker, time)
    assert taken == sorted((time, 1, entry) for entry, time in enumerate(times))


async def test_take_before_load_yields_nothing_from_beyond_the_unloaded_tick_tracker_1(
    ledgers: Ledgers, build: Build
) -> None:
    tracker = build()
    ledgers.store(tracker, 1, [NOW + 10_500, NOW + 12_000])
    later = NOW + 20_000
    assert tracker.needs_load(later)
    assert tracker.take_due(later, 10) is None
    assert tracker.next_due_ms() == NOW + 10_000
    await tracker.load(later)
    assert rows(tracker.take_due(later, 10)) == [(NOW + 10_500, 1, 0), (NOW + 12_000, 1, 1)]


async def test_next_due_is_never_later_than_the_earliest_entry_tracker_4(
    ledgers: Ledgers, build: Build
) -> None:
    tracker = build()
    random = np.random.default_rng(3)
    for ledger_id in range(20):
        times = NOW + random.integers(1, 20 * DAY >> ledger_id, 3)
        ledgers.store(tracker, ledger_id, times)
        earliest = min(int(column.min()) for column in ledgers.times.values())
        due = tracker.next_due_ms()
        assert due is not None
        assert earliest - 1_000 < due <= earliest


async def test_empty_tracker_has_nothing_to_wake_for(build: Build) -> None:
    tracker = build()
    assert tracker.next_due_ms() is None
    assert not tracker.needs_load(NOW + DAY)
    assert tracker.take_due(NOW + DAY, 10) is None
    assert tracker.count() == 0
    assert tracker.histogram(0, NOW + DAY, DAY).bars == []
    assert not await tracker.contains(1, 1)
    tracker.add(1, np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.int64))
    assert tracker.stats().memory_bytes == 0
    assert tracker.stats().last_due_ms is None


@pytest.mark.slow
async def test_hundred_thousands_of_equal_times_keep_the_order_of_arrival_tracker_1(
    ledgers: Ledgers, build: Build
) -> None:
    tracker = build()
    due = NOW + 10_000
    for ledger_id in (1, 2, 3):
        ledgers.store(tracker, ledger_id, np.full(100_000, due))
    assert await take(tracker, due - 1) == []
    assert max(ledgers.read_lengths) <= 65_536
    ledgers.store(tracker, 4, np.full(1_000, due))  # the tick is loaded by now
    taken = await take(tracker, due, 10_000)
    assert taken == [(due, ledger, entry) for ledger in (1, 2, 3) for entry in range(100_000)] + [
        (due, 4, entry) for entry in range(1_000)
    ]


async def test_tick_larger_than_a_load_is_taken_only_when_all_of_it_was_read_tracker_1(
    ledgers: Ledgers, build: Build
) -> None:
    tracker = build(load_entries_max=10)
    times = NOW + 5_000 + np.arange(25)[::-1]  # the last entry is the first one due
    ledgers.store(tracker, 1, times)
    loads = 0
    later = NOW + 6_000
    while tracker.needs_load(later):
        assert tracker.take_due(later, 100) is None
        await tracker.load(later)
        assert tracker.count() == 25
        loads += 1
    assert loads == 3
    assert [row[2] for row in rows(tracker.take_due(later, 100))] == list(range(24, -1, -1))


async def test_entry_moved_within_a_tick_that_is_half_read_is_read_again(
    ledgers: Ledgers, build: Build
) -> None:
    tracker = build(load_entries_max=2)
    ledgers.store(tracker, 1, [NOW + 5_000, NOW + 5_001, NOW + 5_002])
    await tracker.load(NOW + 5_900)
    ledgers.move(tracker, 1, 0, NOW + 5_700)
    ledgers.store(tracker, 1, [NOW + 5_800])
    taken = await take(tracker, NOW + 5_900)
    assert (NOW + 5_700, 1, 0) in taken
    assert [row for row in taken if row != (NOW + 5_000, 1, 0)] == [
        (NOW + 5_001, 1, 1),
        (NOW + 5_002, 1, 2),
        (NOW + 5_700, 1, 0),
        (NOW + 5_800, 1, 3),
    ]


@pytest.mark.parametrize("discarded", [1, 2], ids=["read", "unread"])
async def test_ledger_discarded_from_a_half_read_tick_can_be_added_again(
    ledgers: Ledgers, build: Build, discarded: int
) -> None:
    tracker = build(load_entries_max=2)
    ledgers.store(tracker, 1, [NOW + 5_001, NOW + 5_000])
    ledgers.store(tracker, 2, [NOW + 5_000])
    await tracker.load(NOW + 5_900)
    tracker.discard_ledger(discarded)
    tracker.add(1, np.arange(2, dtype=np.uint32), ledgers.times[1])
    tracker.discard_ledger(2)
    assert await take(tracker, NOW + 5_900) == [(NOW + 5_000, 1, 1), (NOW + 5_001, 1, 0)]


async def test_tick_whose_unread_rest_is_discarded_still_comes(ledgers: Ledgers, build: Build) -> None:
    tracker = build(load_entries_max=2)
    ledgers.store(tracker, 1, [NOW + 5_001, NOW + 5_000])
    ledgers.store(tracker, 2, [NOW + 5_000])
    await tracker.load(NOW + 5_900)
    tracker.discard_ledger(2)
    assert tracker.needs_load(NOW + 5_900)
    await tracker.load(NOW + 5_900)
    assert not tracker.needs_load(NOW + 5_900)
    assert rows(tracker.take_due(NOW + 5_900, 9)) == [(NOW + 5_000, 1, 1), (NOW + 5_001, 1, 0)]


async def test_half_read_tick_vanishes_with_its_ledger(ledgers: Ledgers, build: Build) -> None:
    tracker = build(load_entries_max=2)
    ledgers.store(tracker, 1, [NOW + 5_000] * 2)
    ledgers.store(tracker, 2, [NOW + 5_000])
    await tracker.load(NOW + 5_900)
    tracker.discard_ledger(1)
    assert await take(tracker, NOW + 5_900) == [(NOW + 5_000, 2, 0)]
    assert tracker.next_due_ms() is None
    assert not tracker.needs_load(NOW + DAY)


async def test_failed_read_loses_nothing(ledgers: Ledgers, build: Build) -> None:
    tracker = build()
    ledgers.store(tracker, 1, [NOW + 5_000, NOW + 5_001])
    ledgers.failing = True
    with pytest.raises(OSError, match="the disk is gone"):
        await tracker.load(NOW + 5_000)
    assert tracker.count() == 2
    ledgers.failing = False
    assert await follow(tracker) == [(NOW + 5_000, 1, 0), (NOW + 5_001, 1, 1)]


async def test_damaged_times_come_with_their_tick_and_hold_up_no_others(
    ledgers: Ledgers, build: Build
) -> None:
    tracker = build(tick_ms=1_000)
    start = (NOW // 1_000 + 5) * 1_000
    ledgers.store(tracker, 1, [start + 7] * (CHECKED_ROWS + 1))
    ledgers.store(tracker, 2, [start + 3])
    ledgers.damaged = {(1, 1)}
    # Nobody knows better than the tick when the damaged one is due; the rows are looked at before anything is sent.
    found = await follow(tracker)
    assert found[:2] == [(start, 1, CHECKED_ROWS), (start + 3, 2, 0)]
    assert found[2:] == [(start + 7, 1, entry_id) for entry_id in range(CHECKED_ROWS)]


async def test_moved_and_cancelled_entries_are_dropped_when_their_tick_loads(
    ledgers: Ledgers, build: Build
) -> None:
    tracker = build()
    ledgers.store(tracker, 1, [NOW + 5_000, NOW + 5_000, NOW + 5_000, NOW + 5_000])
    ledgers.times[1][0] = 0  # cancelled
    ledgers.move(tracker, 1, 1, NOW + 90_000)
    ledgers.move(tracker, 1, 2, NOW + 5_400)  # within its tick
    assert await take(tracker, NOW + 60_000) == [(NOW + 5_000, 1, 3), (NOW + 5_400, 1, 2)]
    assert tracker.count() == 1
    assert await follow(tracker) == [(NOW + 90_000, 1, 1)]


async def test_entry_filed_in_two_ticks_of_one_load_comes_at_its_effective_time(
    ledgers: Ledgers, build: Build
) -> None:
    tracker = build()
    ledgers.store(tracker, 1, [NOW + 5_000, NOW + 5_500])
    ledgers.move(tracker, 1, 0, NOW + 7_000)
    assert await take(tracker, NOW + DAY) == [(NOW + 5_500, 1, 1), (NOW + 7_000, 1, 0)]


async def test_entry_for_a_tick_just_loaded_is_not_read_again(ledgers: Ledgers, build: Build) -> None:
    tracker = build()
    ledgers.store(tracker, 1, [NOW + 3_000])
    assert await take(tracker, NOW + 2_000) == []
    reads = len(ledgers.read_lengths)
    ledgers.store(tracker, 1, [NOW + 3_000, NOW + 2_999, NOW + 3_999])
    assert await take(tracker, NOW + 3_999) == [
        (NOW + 2_999, 1, 2),
        (NOW + 3_000, 1, 0),
        (NOW + 3_000, 1, 1),
        (NOW + 3_999, 1, 3),
    ]
    assert len(ledgers.read_lengths) == reads


async def test_short_delays_never_touch_the_ledgers(ledgers: Ledgers, build: Build) -> None:
    tracker = build()
    for second in range(60):
        now = NOW + 1_000 * second
        assert not tracker.needs_load(now)
        ledgers.store(tracker, 1, [now + 900, now + 1_000])
        tracker.take_due(now + 999, 10)
    assert ledgers.read_lengths == []


async def test_clock_step_back_takes_nothing_early_and_keeps_the_frontier_tracker_3(
    ledgers: Ledgers, build: Build
) -> None:
    tracker = build()
    ledgers.store(tracker, 1, [NOW + 10, NOW + 20, NOW + 30_000])
    assert await take(tracker, NOW + 10) == [(NOW + 10, 1, 0)]
    back = NOW - HOUR
    assert await take(tracker, back) == []
    ledgers.store(tracker, 1, [NOW + 5, back, back + 1])  # all at or before the frontier, two of them not due
    assert await take(tracker, back) == [(back, 1, 4)]
    assert tracker.frontier == Frontier(NOW + 10, 1, 0)
    assert tracker.next_due_ms() == back + 1
    assert await follow(tracker) == [
        (back + 1, 1, 5),
        (NOW + 5, 1, 3),
        (NOW + 20, 1, 1),
        (NOW + 30_000, 1, 2),
    ]


async def test_late_entry_needs_no_load_though_the_clock_stepped_back_tracker_2(
    ledgers: Ledgers, build: Build
) -> None:
    tracker = build()
    ledgers.store(tracker, 1, [NOW + HOUR])
    assert len(await follow(tracker)) == 1
    assert not tracker.needs_load(NOW)
    ledgers.store(tracker, 1, [NOW + HOUR // 2])
    assert rows(tracker.take_due(NOW + HOUR, 10)) == [(NOW + HOUR // 2, 1, 1)]


async def test_entry_added_before_loaded_ones_comes_first_though_the_clock_stepped_back_tracker_1(
    ledgers: Ledgers, build: Build
) -> None:
    tracker = build(lead_ms=60_000)
    ledgers.store(tracker, 1, [NOW + 50_500])
    assert await take(tracker, NOW) == []
    assert not tracker.needs_load(NOW - HOUR)
    ledgers.store(tracker, 1, [NOW + 30_000])
    assert tracker.next_due_ms() == NOW + 30_000
    chunk = tracker.take_due(NOW + 60_000, 10)
    assert rows(chunk) == [(NOW + 30_000, 1, 1), (NOW + 50_500, 1, 0)]


async def test_full_near_part_does_not_hold_up_a_load_while_nothing_is_due(
    ledgers: Ledgers, build: Build
) -> None:
    tracker = build(load_entries_max=2)
    ledgers.store(tracker, 1, [NOW + 5_500] * 3 + [NOW + 7_000])
    assert await take(tracker, NOW + 4_000) == []
    assert tracker.needs_load(NOW + 5_499)
    assert not tracker.needs_load(NOW + 5_500)


@pytest.mark.slow
async def test_clock_step_of_a_day_loads_in_bounded_steps_tracker_1(ledgers: Ledgers, build: Build) -> None:
    tracker = build(load_entries_max=500)
    times = NOW + 1 + np.random.default_rng(5).integers(0, DAY, 20_000)
    ledgers.store(tracker, 1, times)
    tomorrow = NOW + DAY
    taken: list[Row] = []
    while tracker.next_due_ms() is not None:
        while tracker.needs_load(tomorrow):
            await tracker.load(tomorrow)
        assert tracker.stats().loaded_count <= 1_100  # what is due drains before more is loaded
        taken += rows(tracker.take_due(tomorrow, 100))
    assert max(ledgers.read_lengths) <= 500
    assert taken == sorted((time, 1, entry) for entry, time in enumerate(times.tolist()))


async def test_clock_that_leapt_forward_by_mistake_does_not_keep_near_wide(
    ledgers: Ledgers, build: Build
) -> None:
    tracker = build()
    assert await take(tracker, NOW + 30 * DAY) == []
    assert await take(tracker, NOW) == []
    ledgers.store(tracker, 1, np.full(10_000, NOW + HOUR))
    assert tracker.stats().loaded_count == 0
    assert len(await follow(tracker)) == 10_000


@pytest.mark.slow
async def test_tick_of_a_millisecond(ledgers: Ledgers, build: Build) -> None:
    tracker = build(tick_ms=1, lead_ms=0)
    times = NOW + 1 + np.random.default_rng(9).integers(0, 3_000, 5_000)
    ledgers.store(tracker, 1, times)
    assert await follow(tracker, 7) == sorted((time, 1, entry) for entry, time in enumerate(times.tolist()))


@pytest.mark.parametrize("delay_ms", [10, HOUR], ids=["near", "far"])
async def test_entry_added_twice_counts_once_and_comes_once(
    ledgers: Ledgers, build: Build, delay_ms: int
) -> None:
    tracker = build()
    ledgers.store(tracker, 1, [NOW + delay_ms] * 5)
    for _ in range(2):
        tracker.add(1, np.arange(5, dtype=np.uint32), ledgers.times[1])
        assert tracker.count() == 5
    ledgers.store(tracker, 2, [NOW + delay_ms])
    tracker.add(1, np.arange(1, 3, dtype=np.uint32), ledgers.times[1][1:3])
    assert tracker.count() == 6
    assert len(await follow(tracker)) == 6


@pytest.mark.slow
async def test_additions_merge_into_every_loaded_block(ledgers: Ledgers, build: Build) -> None:
    tracker = build()
    random = np.random.default_rng(11)
    for ledger_id in (5, 2, 9):
        ledgers.store(tracker, ledger_id, NOW + 1 + random.integers(0, 900, 3 * BLOCK_ROWS))
        assert tracker.stats().loaded_count == tracker.count()
    tracker.add(2, np.arange(1_000, dtype=np.uint32), ledgers.times[2][:1_000])  # all there
    tracker.add(5, np.array([7], dtype=np.uint32), ledgers.times[5][7:8])
    assert tracker.count() == 9 * BLOCK_ROWS
    expected = sorted(
        (time, ledger_id, entry)
        for ledger_id, times in ledgers.times.items()
        for entry, time in enumerate(times.tolist())
    )
    assert await take(tracker, NOW + 1_000, 10_000) == expected


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3])
async def test_additions_fall_between_entries_of_equal_time_tracker_1(
    ledgers: Ledgers, build: Build, step: int
) -> None:
    tracker = build()
    times = np.full(8 * BLOCK_ROWS, NOW + 1)
    ledgers.times[1] = times
    for first in reversed(range(step)):
        tracker.add(1, np.arange(first, len(times), step, dtype=np.uint32), times[first::step])
        tracker.count()
    assert tracker.count() == len(times)
    taken = [tracker.take_due(NOW + 1, 100_000) for _ in range(6)]
    assert np.array_equal(np.concatenate([c.entry_ids for c in taken if c]), np.arange(len(times)))


@pytest.mark.parametrize("delay_ms", [10, HOUR], ids=["near", "far"])
async def test_discarded_ledger_is_forgotten(ledgers: Ledgers, build: Build, delay_ms: int) -> None:
    tracker = build()
    ledgers.store(tracker, 1, [NOW + delay_ms, NOW + delay_ms + 1])
    ledgers.store(tracker, 2, [NOW + delay_ms, NOW + delay_ms + 5_000])
    assert await tracker.contains(2, 1)
    tracker.discard_ledger(2)
    tracker.discard_ledger(77)
    assert not await tracker.contains(2, 1)
    assert await tracker.contains(1, 1)
    assert tracker.count() == 2
    assert await follow(tracker) == [(NOW + delay_ms, 1, 0), (NOW + delay_ms + 1, 1, 1)]
    assert not await tracker.contains(1, 1)


async def test_clear_keeps_the_frontier(ledgers: Ledgers, build: Build) -> None:
    tracker = build()
    ledgers.store(tracker, 1, [NOW + 1, NOW + 2, NOW + HOUR])
    assert await take(tracker, NOW + 1) == [(NOW + 1, 1, 0)]
    tracker.clear()
    assert tracker.frontier == Frontier(NOW + 1, 1, 0)
    assert (tracker.count(), tracker.next_due_ms()) == (0, None)
    tracker.add(1, np.arange(1, 3, dtype=np.uint32), ledgers.times[1][1:])
    assert await follow(tracker) == [(NOW + 2, 1, 1), (NOW + HOUR, 1, 2)]


async def test_histogram_counts_near_exactly_and_spreads_what_is_far_over_its_tick(
    ledgers: Ledgers, build: Build
) -> None:
    tracker = build()
    ledgers.store(
        tracker, 1, [NOW + 1, NOW + 1, NOW + 499, NOW + 500, NOW + 60_001, NOW + 60_900, NOW + HOUR]
    )
    found = tracker.histogram(NOW, NOW + HOUR, 500)
    assert [(bar.start_ms - NOW, bar.count) for bar in found.bars] == [
        (0, 3),
        (500, 1),
        (60_000, 1),
        (60_500, 1),
    ]
    assert (found.before, found.after, found.is_exact) == (0, 1, False)
    halves = [tracker.histogram(NOW, NOW + 60_500, HOUR), tracker.histogram(NOW + 60_500, NOW + DAY, DAY)]
    assert [bar.count for half in halves for bar in half.bars] == [5, 2]
    assert tracker.histogram(NOW, NOW + HOUR, 1_000).is_exact
    above = tracker.histogram(NOW, NOW + HOUR, 1_000, floor_ms=NOW + 500)
    assert [(bar.start_ms - NOW, bar.count) for bar in above.bars] == [(0, 1), (60_000, 2)]


def test_stats_estimate_memory(ledgers: Ledgers, build: Build) -> None:
    tracker = build()
    ledgers.store(tracker, 1, np.full(500_000, NOW + HOUR))
    ledgers.store(tracker, 1, np.full(1_000, NOW + 1))
    stats = tracker.stats()
    assert (stats.count, stats.loaded_count, stats.bucket_count) == (501_000, 1_000, 1)
    assert stats.next_due_ms == NOW + 1
    assert stats.last_due_ms == NOW + HOUR + 999
    assert 20_000 < stats.memory_bytes < 200_000


async def test_small_chunk_keeps_no_block_alive_and_cannot_be_written(ledgers: Ledgers, build: Build) -> None:
    tracker = build()
    ledgers.store(tracker, 1, [NOW + 1] * 3)
    chunk = tracker.take_due(NOW + 1, 2)
    assert chunk is not None
    for column in (chunk.deliver_at_ms, chunk.ledger_ids, chunk.entry_ids):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1
        assert column.base is None
