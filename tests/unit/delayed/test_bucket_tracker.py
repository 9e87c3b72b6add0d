from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from pyroaring import BitMap

from broker.delayed.bucket_tracker import BucketTracker
from broker.delayed.bucket_values import BucketPolicyValues
from broker.delayed.due_rows import DueRows
from broker.delayed.sealed_bucket import BucketState
from broker.delayed.tracker import ENTRY_AFTER_ALL, Frontier
from broker.errors import PostdateError
from broker.model import Position
from broker.runs.merging import MergeRuns
from broker.storage.amendments import GONE, Amendments
from broker.storage.bucket_files import SnapshotReader
from broker.testing.mem_vfs import MemVfs
from tests.run_files import run_ids
from tests.unit.delayed.gated_buckets import FOLDER, IS_BACKGROUND, GatedExecutor, new_storage, spin

NOW = 1_700_000_000_000
HOUR = 3_600_000
DAY = 24 * HOUR
Row = tuple[int, int, int]
SMALL = BucketPolicyValues(
    min_index_count=10, max_buckets=64, segment_time_step_ms=1_000, max_segment_entries=4
)


class World:
    """A tracker over a disk in memory, and everything that was added."""

    def __init__(self, policy: BucketPolicyValues = SMALL, **options) -> None:
        self.vfs = MemVfs()
        self.executor = GatedExecutor()
        self.storage = new_storage(self.vfs, self.executor)
        self.amendments: dict[int, Amendments] = {}
        self.options = {"policy": policy, **options}
        self.rows: list[Row] = []
        self.passed = 0
        self.tracker = self.build(NOW)

    def build(self, frontier_ms: int) -> BucketTracker:
        return BucketTracker(
            self.storage,
            Frontier(frontier_ms, *ENTRY_AFTER_ALL),
            executor=self.executor,
            amendments_of=self.amendments.get,
            **self.options,
        )

    def add(self, ledger_id: int, times, first: int = 0) -> None:
        column = np.asarray(times, dtype=np.int64)
        entry_ids = np.arange(first, first + len(column), dtype=np.uint32)
        self.tracker.add(ledger_id, entry_ids, column)
        self.rows += zip(column.tolist(), [ledger_id] * len(column), entry_ids.tolist(), strict=True)
        self.passed += 1
        self.tracker.buckets.passed(Position(self.passed, 0), self.passed)

    def discard(self, ledger_id: int) -> None:
        self.amendments[ledger_id] = GONE
        self.tracker.discard_ledger(ledger_id)

    async def seal(self) -> None:
        assert await self.tracker.buckets.seal()

    async def start(self, work: Callable[[], Coroutine[None, None, object]]) -> asyncio.Task[object]:
        """Begin a seal or a merge that waits before each of its steps."""
        IS_BACKGROUND.set(True)
        task = asyncio.create_task(work())
        IS_BACKGROUND.set(False)
        await spin()
        return task

    async def go_on(self, steps: int = 1_000) -> None:
        for _ in range(steps):
            if not self.executor.let_go():
                break
            await spin()

    async def restart(self, image, now_ms: int) -> None:
        for bucket_id in run_ids(self.vfs, FOLDER):
            if bucket_id not in image.bucket_ids:
                await self.storage.delete(bucket_id)
        self.tracker = self.build(max(now_ms, image.frontier_ms))
        await self.tracker.buckets.restore(
            [
                await self.storage.read(bucket_id, SnapshotReader.read_metadata)
                for bucket_id in image.bucket_ids
            ],
            indexed_through=image.indexed_through,
            index_lsn=image.index_lsn,
            next_bucket_id=image.next_bucket_id,
        )


@pytest.fixture
def world() -> World:
    return World()


def rows(chunk: DueRows | None) -> list[Row]:
    if chunk is None:
        return []
    columns = chunk.deliver_at_ms.tolist(), chunk.ledger_ids.tolist(), chunk.entry_ids.tolist()
    return list(zip(*columns, strict=True))


async def take(tracker: BucketTracker, now_ms: int, limit: int = 1_000_000) -> list[Row]:
    taken: list[Row] = []
    while True:
        while tracker.needs_load(now_ms):
            await tracker.load(now_ms)
        chunk = tracker.take_due(now_ms, limit)
        if chunk is None:
            return taken
        taken += rows(chunk)


async def follow(tracker: BucketTracker, limit: int = 1_000_000) -> list[Row]:
    taken: list[Row] = []
    while (wake_ms := tracker.next_due_ms()) is not None:
        found = await take(tracker, wake_ms, limit)
        assert all(row[0] == wake_ms for row in found)
        taken += found
    return taken


async def merge_all(world: World) -> None:
    while world.tracker.buckets.needs_merge(NOW):
        assert await world.tracker.buckets.merge()


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 7, 1_000])
@pytest.mark.parametrize("load_entries_max", [1, 10, 65_536])
async def test_order_holds_across_memory_and_buckets_tracker_1(limit, load_entries_max):
    world = World(load_entries_max=load_entries_max)
    random = np.random.default_rng(5)
    for ledger_id in (3, 1, 2, 3):
        world.add(
            ledger_id, NOW + 1 + random.integers(0, 40, 30) * 500, first=100 * ledger_id + len(world.rows)
        )
        if ledger_id != 2:
            await world.seal()
    assert world.tracker.count() == 120
    assert await follow(world.tracker, limit) == sorted(world.rows)
    assert world.tracker.count() == 0
    assert world.tracker.buckets.image().bucket_ids == ()


@pytest.mark.slow
async def test_one_millisecond_that_spans_many_segments_of_many_buckets_tracker_1():
    policy = replace(SMALL, max_segment_entries=100)
    world = World(policy, load_entries_max=256)
    due = NOW + HOUR
    for ledger_id in (4, 2, 9, 1):
        world.add(ledger_id, np.full(1_000, due))
        await world.seal()
    assert await take(world.tracker, due - 1) == []
    assert world.tracker.stats().loaded_count <= 512
    taken: list[Row] = []
    most = 0
    while (chunk := world.tracker.take_due(due, 77)) is not None or world.tracker.needs_load(due):
        taken += rows(chunk)
        if world.tracker.needs_load(due):
            await world.tracker.load(due)
        most = max(most, world.tracker.stats().loaded_count)
    assert taken == sorted(world.rows)
    assert most <= 1_024


@pytest.mark.slow
async def test_near_is_all_that_is_in_memory_of_what_is_sealed():
    world = World(BucketPolicyValues(min_index_count=1_000))
    world.add(1, NOW + np.random.default_rng(1).integers(DAY, 30 * DAY, 200_000))
    await world.seal()
    assert await take(world.tracker, NOW + HOUR) == []
    stats = world.tracker.stats()
    assert (stats.count, stats.loaded_count, stats.bucket_count) == (200_000, 0, 1)
    assert stats.memory_bytes < 20_000
    assert 0 < stats.disk_bytes < 5 * 200_000
    assert stats.next_due_ms == min(world.rows)[0]
    assert stats.last_due_ms == max(world.rows)[0]


@pytest.mark.slow
async def test_large_frozen_bucket_is_sealed_in_runs():
    world = World(BucketPolicyValues(min_index_count=1_000))
    random = np.random.default_rng(2)
    for first in range(0, 200_000, 50_000):
        world.add(1, NOW + HOUR + random.integers(0, 1_000, 50_000), first)
    await world.seal()
    metadata = await world.storage.read(1, SnapshotReader.read_metadata)
    assert metadata.count == 200_000
    assert await take(world.tracker, NOW + DAY) == sorted(world.rows)


async def test_added_and_taken_while_a_seal_is_in_flight(world: World):
    world.add(1, NOW + 1_000 * np.arange(1, 40))
    task = await world.start(world.tracker.buckets.seal)
    assert not world.tracker.buckets.needs_seal(NOW + DAY)
    world.add(2, [NOW + 1_500, NOW + 90_000])
    taken = await take(world.tracker, NOW + 20_000)
    world.add(2, [NOW + 2], first=2)
    taken += await take(world.tracker, NOW + 20_000)
    assert sorted(taken) == sorted(row for row in world.rows if row[0] <= NOW + 20_000)
    assert taken[-1] == (NOW + 2, 2, 2)
    count = world.tracker.count()
    await world.go_on()
    await task
    assert world.tracker.count() == count
    assert world.tracker.buckets.image().bucket_ids == (1,)
    assert await follow(world.tracker) == sorted(row for row in world.rows if row not in taken)


async def test_new_bucket_begins_where_loading_is_when_it_comes_into_use_bucket_6():
    world = World(replace(SMALL, max_segment_entries=5))
    world.add(1, NOW + 1_000 * np.arange(1, 40))
    taken = await take(world.tracker, NOW + 2_000)
    task = await world.start(world.tracker.buckets.seal)
    while run_ids(world.vfs, FOLDER) == []:
        await world.go_on(1)
    assert not task.done()  # it reads the segment at which it would have to begin
    taken += await take(world.tracker, NOW + 20_000)
    count = world.tracker.count()
    await world.go_on()
    assert await task
    assert world.tracker.count() == count
    taken += await follow(world.tracker)
    assert taken == world.rows


@pytest.mark.slow
async def test_load_that_meets_the_end_of_a_merge_bucket_11(world: World):
    for ledger_id in range(1, 9):
        world.add(ledger_id, NOW + 5_000 * np.arange(1, 20) + ledger_id)
        await world.seal()
    task = await world.start(world.tracker.buckets.merge)
    steps = 0
    while not task.done():
        steps += 1
        world.executor.let_go_beside = 1
        now_ms = NOW + 3_000 * steps
        if world.tracker.needs_load(now_ms):
            await world.tracker.load(now_ms)
        else:
            await world.go_on(1)
    assert world.tracker.buckets.image().bucket_ids == (9,)
    assert world.tracker.count() == len(world.rows)
    assert await follow(world.tracker) == sorted(world.rows)


@pytest.mark.parametrize("policy_entries", [1, 2, 3])
async def test_crash_between_taking_and_sealing_keeps_what_was_not_taken_bucket_3(policy_entries: int):
    world = World(replace(SMALL, max_segment_entries=policy_entries))
    world.add(1, [NOW + 5_000, NOW + 5_000, NOW + 5_000, NOW + 6_000])
    while world.tracker.needs_load(NOW + 5_000):
        await world.tracker.load(NOW + 5_000)
    assert rows(world.tracker.take_due(NOW + 5_000, 2)) == world.rows[:2]
    assert world.tracker.buckets.image().indexed_through == (0, 0)
    await world.seal()  # the third is loaded, and not taken
    image = world.tracker.buckets.image()
    assert (await world.storage.read(1, SnapshotReader.read_metadata)).count == 2
    assert world.tracker.count() == 2
    await world.restart(image, NOW)
    assert await follow(world.tracker) == world.rows[3:]  # the others lie at the frontier: catch-up has them


@pytest.mark.slow
async def test_loaded_and_taken_while_a_merge_is_in_flight(world: World):
    for ledger_id in range(1, 9):
        world.add(ledger_id, NOW + 5_000 * np.arange(1, 20) + ledger_id)
        await world.seal()
    taken = await take(world.tracker, NOW + 10_100)
    task = await world.start(world.tracker.buckets.merge)
    await world.go_on(4)
    taken += await take(world.tracker, NOW + 40_003)
    count = world.tracker.count()
    await world.go_on()
    assert await task
    assert world.tracker.count() == count
    assert world.tracker.buckets.image().bucket_ids == (9,)
    assert (
        await world.storage.read(9, SnapshotReader.read_metadata)
    ).count > count  # it keeps what was taken since its start
    taken += await follow(world.tracker)
    assert taken == sorted(world.rows)


async def test_failed_seal_loses_nothing_and_is_tried_again_later_bucket_5(world: World):
    world.add(1, NOW + HOUR + np.arange(20))
    world.executor.fail_foreground = 1
    assert not await world.tracker.buckets.seal()
    assert world.tracker.buckets.counters.seal_failures == 1
    assert world.tracker.buckets.image().indexed_through == (0, 0)
    assert not world.tracker.buckets.needs_seal(NOW)
    assert not world.tracker.buckets.needs_seal(NOW + 999)
    assert world.tracker.buckets.needs_seal(NOW + 1_000)
    world.add(1, [NOW + HOUR - 1], first=20)
    await world.seal()
    assert world.tracker.buckets.image().indexed_through == (2, 0)
    assert await follow(world.tracker) == sorted(world.rows)


@pytest.mark.parametrize("step", range(8))
async def test_failed_merge_leaves_its_sources_bucket_8(world: World, step: int):
    for ledger_id in range(1, 9):
        world.add(ledger_id, NOW + HOUR + 10 * np.arange(6))
        await world.seal()
    before = world.tracker.buckets.image()
    task = await world.start(world.tracker.buckets.merge)
    await world.go_on(step)
    world.executor.fail_background = 1
    await world.go_on()
    assert not await task
    assert world.tracker.buckets.image().bucket_ids == before.bucket_ids
    assert {bucket.state for bucket in world.tracker.buckets.in_use} == {BucketState.LIVE}
    assert not world.tracker.buckets.needs_merge(NOW)
    assert world.tracker.buckets.needs_merge(NOW + 60_000)
    await world.tracker.buckets.remove_deleted(world.tracker.buckets.image())
    assert run_ids(world.vfs, FOLDER) == list(before.bucket_ids)
    await world.tracker.buckets.merge()
    assert await follow(world.tracker) == sorted(world.rows)


async def test_merged_bucket_that_is_not_what_was_kept_is_refused_writer_3(world: World, monkeypatch):
    for ledger_id in range(1, 9):
        world.add(ledger_id, NOW + HOUR + 10 * np.arange(6))
        await world.seal()
    step = MergeRuns.step

    def losing(self):
        first, *others = step(self)
        return [first.part(slice(1, None)), *others]

    monkeypatch.setattr(MergeRuns, "step", losing)
    assert not await world.tracker.buckets.merge()
    assert world.tracker.buckets.image().bucket_ids == tuple(range(1, 9))


async def test_failed_read_reaches_the_caller_of_load_and_changes_nothing_bucket_11(world: World):
    world.add(1, NOW + HOUR + np.arange(20))
    await world.seal()
    world.executor.fail_foreground = 1
    with pytest.raises((OSError, PostdateError)):
        await world.tracker.load(NOW + HOUR)
    assert world.tracker.count() == 20
    assert await follow(world.tracker) == world.rows


async def test_clear_during_a_seal_and_a_merge_bucket_7(world: World):
    for ledger_id in range(1, 9):
        world.add(ledger_id, NOW + HOUR + np.arange(6))
        await world.seal()
    world.add(20, NOW + HOUR + np.arange(20))
    merging = await world.start(world.tracker.buckets.merge)
    sealing = await world.start(world.tracker.buckets.seal)
    await world.go_on(3)
    world.tracker.clear()
    assert (world.tracker.count(), world.tracker.next_due_ms()) == (0, None)
    world.add(30, [NOW + HOUR])
    await world.go_on()
    await asyncio.gather(merging, sealing)
    assert world.tracker.buckets.image().bucket_ids == ()
    assert world.tracker.buckets.image().indexed_through == (0, 0)
    await world.tracker.buckets.remove_deleted(world.tracker.buckets.image())
    assert run_ids(world.vfs, FOLDER) == []
    assert await follow(world.tracker) == [(NOW + HOUR, 30, 0)]


async def test_ledger_discarded_during_a_seal_and_a_merge_bucket_7(world: World):
    for ledger_id in range(1, 9):
        world.add(ledger_id, NOW + HOUR + np.arange(6))
        await world.seal()
    world.add(20, NOW + HOUR + np.arange(20))
    world.add(21, NOW + HOUR + np.arange(2))
    merging = await world.start(world.tracker.buckets.merge)
    sealing = await world.start(world.tracker.buckets.seal)
    await world.go_on(6)
    for ledger_id in (3, 20):
        world.discard(ledger_id)
    await world.go_on()
    await asyncio.gather(merging, sealing)
    assert not await world.tracker.contains(20, 0)
    assert not await world.tracker.contains(3, 5)
    assert await world.tracker.contains(21, 1)
    assert await take(world.tracker, NOW + DAY) == sorted(row for row in world.rows if row[1] not in (3, 20))
    assert world.tracker.count() == 0


async def test_bucket_whose_ledgers_are_all_gone_goes_with_the_next_merge(world: World):
    world.add(1, NOW + HOUR + np.arange(6))
    world.add(2, NOW + HOUR + np.arange(6))
    await world.seal()
    world.discard(1)
    world.discard(2)
    world.tracker.buckets.policy = replace(SMALL, max_buckets=1)
    world.add(3, NOW + HOUR + np.arange(6))
    await world.seal()
    assert await world.tracker.buckets.merge()
    assert (world.tracker.count(), world.tracker.buckets.image().bucket_ids) == (6, (3,))
    assert await take(world.tracker, NOW + DAY) == [(NOW + HOUR + entry, 3, entry) for entry in range(6)]


async def test_files_are_removed_only_after_the_image_without_them_bucket_9(world: World):
    world.add(1, [NOW + 1_000, NOW + 2_000])
    await world.seal()
    before = world.tracker.buckets.image()
    assert len(await take(world.tracker, NOW + 3_000)) == 2
    await world.tracker.buckets.remove_deleted(before)
    assert run_ids(world.vfs, FOLDER) == [1]
    after = world.tracker.buckets.image()
    assert (before.bucket_ids, after.bucket_ids, after.deleted_ids) == ((1,), (), (1,))
    world.executor.fail_foreground = 1
    await world.tracker.buckets.remove_deleted(after)
    assert world.tracker.buckets.image().deleted_ids == (1,)
    await world.tracker.buckets.remove_deleted(world.tracker.buckets.image())
    assert world.tracker.buckets.image().deleted_ids == ()
    assert run_ids(world.vfs, FOLDER) == []


async def test_bucket_stays_named_until_its_last_entry_is_taken_bucket_3(world: World):
    world.add(1, [NOW + 1_000, NOW + 1_500])
    await world.seal()
    assert await take(world.tracker, NOW + 1_000) == [(NOW + 1_000, 1, 0)]
    assert world.tracker.stats().loaded_count == 1
    image = world.tracker.buckets.image()
    assert image.bucket_ids == (1,)
    await world.restart(image, NOW + 1_000)
    assert world.tracker.count() == 1
    assert await follow(world.tracker) == [(NOW + 1_500, 1, 1)]


async def test_indexed_through_follows_seals_and_what_was_taken_bucket_4(world: World):
    world.add(1, [NOW + HOUR])
    assert world.tracker.buckets.image().indexed_through == (0, 0)
    task = await world.start(world.tracker.buckets.seal)
    world.add(1, [NOW + 2 * HOUR], first=1)
    assert world.tracker.buckets.image().indexed_through == (0, 0)
    await world.go_on()
    await task
    image = world.tracker.buckets.image()
    assert (image.indexed_through, image.index_lsn, image.next_bucket_id) == ((1, 0), 1, 2)
    await follow(world.tracker)
    image = world.tracker.buckets.image()
    assert (image.indexed_through, image.frontier_ms, image.bucket_ids) == ((2, 0), NOW + 2 * HOUR, ())


async def test_nothing_is_written_for_what_was_taken(world: World):
    world.add(1, [NOW + 1, NOW + 2])
    assert len(await take(world.tracker, NOW + 5)) == 2
    assert not world.tracker.buckets.needs_seal(NOW + DAY)
    await world.seal()
    assert run_ids(world.vfs, FOLDER) == []
    assert world.tracker.buckets.image().indexed_through == (1, 0)


async def test_restart_begins_after_the_frontier(world: World):
    world.add(1, NOW + 1_000 * np.arange(1, 30))
    await world.seal()
    image = world.tracker.buckets.image()
    for back_ms in (0, 5_500, 12_000, 40_000):
        await world.restart(image, NOW + back_ms)
        rest = [row for row in world.rows if row[0] > NOW + back_ms]
        assert world.tracker.count() == len(rest)
        assert await follow(world.tracker) == rest


async def test_what_amendments_make_stale_is_left_out(world: World):
    for ledger_id in range(1, 9):
        world.add(ledger_id, NOW + HOUR + np.arange(6))
        if ledger_id == 2:
            world.amendments[2] = moved_and_cancelled(moved={1: NOW + DAY}, cancelled=[0])
        await world.seal()
    world.amendments[5] = moved_and_cancelled(moved={}, cancelled=[3])
    assert world.tracker.count() == 46
    await merge_all(world)
    assert world.tracker.count() == 45
    gone = {(2, 0), (2, 1), (5, 3)}
    assert await follow(world.tracker) == sorted(row for row in world.rows if row[1:] not in gone)


def moved_and_cancelled(moved: dict[int, int], cancelled: list[int]) -> Amendments:
    ones = np.ones(len(moved))
    return Amendments(
        BitMap(cancelled),
        np.array(list(moved), dtype=np.uint32),
        np.array(list(moved.values()), dtype=np.int64),
        ones.astype(np.uint32),
        ones.astype(np.uint64),
    )


def test_seals_by_count_age_and_ledgers():
    world = World(BucketPolicyValues(min_index_count=3, ledgers_per_bucket=2, seal_after_ms=1_000))
    tracker = world.tracker
    assert not tracker.buckets.needs_seal(NOW)
    world.add(1, [NOW + DAY])
    assert not tracker.buckets.needs_seal(NOW)
    assert not tracker.buckets.needs_seal(NOW + 999)
    assert tracker.buckets.needs_seal(NOW + 1_000)
    assert not tracker.buckets.needs_seal(NOW - DAY)  # the clock stepped back: the wait begins again
    assert tracker.buckets.needs_seal(NOW - DAY + 1_000)
    world.add(2, [NOW + DAY])
    assert not tracker.buckets.needs_seal(NOW - DAY)
    tracker.buckets.policy = replace(tracker.buckets.policy, min_index_count=2)
    assert tracker.buckets.needs_seal(NOW - DAY)
    tracker.buckets.policy = replace(tracker.buckets.policy, min_index_count=100)
    world.add(3, [NOW + DAY])
    assert tracker.buckets.needs_seal(NOW - DAY)


async def test_policy_that_shrinks_merges_what_there_is(world: World):
    for ledger_id in range(1, 7):
        world.add(ledger_id, NOW + HOUR + np.arange(6))
        await world.seal()
    assert not world.tracker.buckets.needs_merge(NOW)
    for limit in (4, 3, 1):
        world.tracker.buckets.policy = replace(SMALL, max_buckets=limit, max_segment_entries=limit)
        await merge_all(world)
        assert len(world.tracker.buckets.image().bucket_ids) == limit
    assert await follow(world.tracker) == sorted(world.rows)


async def test_clock_steps_back_tracker_2_tracker_3(world: World):
    world.add(1, [NOW + 10, NOW + HOUR])
    await world.seal()
    assert await take(world.tracker, NOW + 10) == [(NOW + 10, 1, 0)]
    back = NOW - HOUR
    world.add(1, [NOW + 5, back, back + 1], first=2)
    assert await take(world.tracker, back) == [(back, 1, 3)]
    assert world.tracker.frontier == Frontier(NOW + 10, 1, 0)
    await world.seal()
    assert await follow(world.tracker) == [(back + 1, 1, 4), (NOW + 5, 1, 2), (NOW + HOUR, 1, 1)]


async def test_entry_added_twice_comes_once_and_counts_once_in_the_end_bucket_10(world: World):
    for _ in range(3):
        world.add(1, [NOW + HOUR, NOW + HOUR + 1])
        await world.seal()
    assert world.tracker.count() == 6
    world.tracker.buckets.policy = replace(SMALL, max_buckets=2)
    await merge_all(world)
    assert world.tracker.count() == 4
    assert await follow(world.tracker) == sorted(set(world.rows))
    assert world.tracker.count() == 0


async def test_histogram_is_exact_in_memory_and_adds_up_on_disk(world: World):
    world.add(1, NOW + HOUR + 1_000 * np.arange(100))
    await world.seal()
    world.add(2, [NOW + HOUR, NOW + 2 * DAY])
    bars = world.tracker.histogram(NOW, NOW + 10 * DAY, 10_000).bars
    assert sum(bar.count for bar in bars) == 102
    assert [bar.count for bar in bars if bar.start_ms < NOW + 2 * HOUR] == [11] + [10] * 9
    halves = [
        sum(bar.count for bar in world.tracker.histogram(start, end, 7_000).bars)
        for start, end in ((NOW, NOW + HOUR + 50_000), (NOW + HOUR + 50_000, NOW + 10 * DAY))
    ]
    assert sum(halves) == 102
    assert world.tracker.histogram(0, NOW, DAY).bars == []


@pytest.mark.slow
async def test_real_threads_and_a_seal_beside_a_merge():
    vfs = MemVfs()
    vfs.make_dir(FOLDER)
    with ThreadPoolExecutor(2) as executor:
        world = World(BucketPolicyValues(min_index_count=500, max_segment_entries=100))
        world.storage = new_storage(vfs, executor)
        world.tracker = world.build(NOW)
        random = np.random.default_rng(4)
        tasks: list[asyncio.Task[bool]] = []
        for first in range(0, 20_000, 100):
            world.add(1, NOW + random.integers(DAY, 30 * DAY, 100), first)
            tasks = [task for task in tasks if not task.done()]
            if world.tracker.buckets.needs_seal(NOW):
                tasks.append(asyncio.create_task(world.tracker.buckets.seal()))
            if world.tracker.buckets.needs_merge(NOW):
                tasks.append(asyncio.create_task(world.tracker.buckets.merge()))
            await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)
        assert world.tracker.buckets.counters.merges > 0
        assert world.tracker.count() == 20_000
        assert await take(world.tracker, NOW + 31 * DAY) == sorted(world.rows)


async def test_cancelled_seal_keeps_its_rows(world: World):
    world.add(1, NOW + HOUR + np.arange(20))
    task = await world.start(world.tracker.buckets.seal)
    task.cancel()
    await world.go_on()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.tracker.count() == 20
    await world.seal()
    assert await follow(world.tracker) == world.rows
