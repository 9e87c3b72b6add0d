"""Ledgers that are dropped while a bucket tracker holds rows of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pyroaring import BitMap

from broker.storage.amendments import NONE
from tests.unit.delayed.test_bucket_tracker import HOUR, NOW, SMALL, World, merge_all, take


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("is_sealed", [False, True])
async def test_nothing_of_a_ledger_that_is_gone_is_yielded(is_sealed: bool, is_loaded: bool):
    """One that was known to hold a stale row had its live rows yielded once that row was taken."""
    world = World()
    world.add(1, NOW + 1_000 * np.arange(1, 9))
    world.add(2, [NOW + 20_000])
    if is_sealed:
        await world.seal()
    if is_loaded:
        await world.tracker.load(NOW)
    world.add(1, [NOW - 5, NOW - 5], first=8)  # late: they lie before the frontier
    world.amendments[1] = NONE.cancel(BitMap([0]))
    world.tracker.remove(1, np.array([0], dtype=np.uint32), np.array([NOW + 1_000]))
    assert world.tracker.count() == 10
    world.discard(1)
    assert is_sealed or world.tracker.count() == 1
    for step in range(1, 10):
        assert await take(world.tracker, NOW + 1_000 * step) == []
    assert world.tracker.count() == 1
    assert await take(world.tracker, NOW + 20_000) == [(NOW + 20_000, 2, 0)]
    assert world.tracker.buckets.image().bucket_ids == ()


async def test_a_row_that_was_added_twice_is_stale_twice_once_its_ledger_is_gone():
    """One is in the window of a bucket, and one waits in memory: a seal has left out the one, and the other was yielded."""
    world = World(replace(SMALL, segment_time_step_ms=2 * HOUR, max_segment_entries=100))
    world.add(1, [NOW + 1])
    world.add(2, [NOW + 2, NOW + HOUR])
    await world.seal()
    await world.tracker.load(NOW)
    world.add(2, [NOW + HOUR], first=1)
    world.discard(2)
    assert world.tracker.count() == 1
    await world.seal()
    assert await take(world.tracker, NOW + 1) == [(NOW + 1, 1, 0)]
    assert await take(world.tracker, NOW + HOUR) == []
    assert world.tracker.count() == 0


@pytest.mark.parametrize("is_gone", [True, False], ids=["of a deleted ledger", "cancelled and moved back"])
async def test_rows_that_meet_when_they_are_loaded_count_once(is_gone: bool):
    """Both lay in memory: the second one was forgotten, and went on to be taken from the count."""
    world = World()
    world.add(1, [NOW + HOUR, NOW + HOUR])
    if not is_gone:
        world.amendments[1] = NONE.cancel(BitMap([0]))
        world.tracker.remove(1, np.array([0], dtype=np.uint32), np.array([NOW + HOUR]))
        world.amendments[1] = NONE
    world.add(1, [NOW + HOUR])
    if is_gone:
        world.discard(1)
    world.add(2, [NOW + HOUR])
    pending = 1 if is_gone else 3
    assert world.tracker.count() == pending
    await world.tracker.load(NOW + HOUR)
    assert world.tracker.count() == pending
    assert len(await take(world.tracker, NOW + HOUR)) == pending
    assert world.tracker.count() == 0


async def test_what_a_merge_left_out_beside_a_load_is_not_left_out_of_the_count_once_more():
    """The load has the old bucket's rows in hand when the merge has already forgotten those of the ledger that is gone."""
    world = World(replace(SMALL, max_buckets=1))
    for number in range(2):
        world.add(1, [NOW + HOUR], first=number)
        world.add(2, [NOW + HOUR + 1], first=number)
        await world.seal()
    world.discard(1)
    loading = await world.start(lambda: world.tracker.load(NOW + HOUR))
    assert world.executor.stopped
    await merge_all(world)
    assert len(world.tracker.buckets.image().bucket_ids) == 1
    await world.go_on()
    await loading
    assert world.tracker.count() == 2
    assert await take(world.tracker, NOW + HOUR + 1) == [(NOW + HOUR + 1, 2, 0), (NOW + HOUR + 1, 2, 1)]


async def test_what_a_merge_reads_after_the_index_began_anew_counts_for_nothing():
    world = World(replace(SMALL, max_buckets=1, segment_time_step_ms=2 * HOUR, max_segment_entries=100))
    for number in (0, 2):
        world.add(1, [NOW + 1, NOW + HOUR], first=number)
        world.add(2, [NOW + HOUR + 1], first=number)
        await world.seal()
    await world.tracker.load(NOW)  # so that a part of the merged segment was loaded, and it is read
    merging = await world.start(world.tracker.buckets.merge)
    world.discard(2)  # after the merge has asked what it may leave out
    world.tracker.clear()
    world.add(1, [NOW + HOUR])
    await world.go_on()
    assert await merging
    assert world.tracker.count() == 1
