"""The check of a bucket that was handed in takes what a merge leaves, and nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from pyroaring import BitMap

from broker.delayed.bucket_writer import BucketWriter, NewBucket, NotNeeded, SegmentLimits
from broker.delayed.due_rows import DueRows, Key
from broker.delayed.lent_buckets import check_steps, merge_lent, not_needed_of
from broker.delayed.sealed_bucket import SealedBucket
from broker.errors import Corrupt
from broker.model import Position
from broker.runtime.steps import InThisThread
from broker.storage.amendments import NONE
from broker.storage.bucket_files import BucketStorage, bucket_storage
from broker.storage.bucket_snapshot import BucketMetadata
from broker.storage.compaction_inputs import InputBuckets
from broker.testing.mem_vfs import MemVfs
from tests.unit.delayed.gated_buckets import TOPIC_ID

ROWS = 400
FRONTIER = (100, 0, 0)
MOVED = np.array([5, 6], np.uint32)
BUCKETS = InputBuckets(
    (1, 2, 3),
    9,
    1_000,
    64,
    {2: NONE.cancel(BitMap([1, 2])).move(MOVED, np.array([900, 901], np.int64), 7)},
    frozenset({3}),
)
"""Of three buckets: some rows are due, some cancelled or moved, some of a ledger that is gone, some there twice."""


class World:
    """Sources and a folder for what a job writes."""

    def __init__(self) -> None:
        self.vfs = MemVfs()
        for name in ("live", "staging"):
            self.vfs.make_dir(name)
        self.storage = self._folder("live")
        self.staged = self._folder("staging")
        self.sources = [SealedBucket(asyncio.run(self._seal(number))) for number in BUCKETS.bucket_ids]

    def _folder(self, name: str) -> BucketStorage:
        return bucket_storage(self.vfs, name, TOPIC_ID, InThisThread())

    async def _seal(self, number: int) -> BucketMetadata:
        rng = np.random.default_rng(number)
        rows = DueRows(
            rng.integers(1, 1_000, ROWS), np.full(ROWS, number, np.int64), np.arange(ROWS, dtype=np.uint32)
        )
        again = DueRows(np.array([900, 901], np.int64), np.full(2, 2, np.int64), MOVED)  # its new time
        new = NewBucket(number, Position(number, 0), Position(number, ROWS))
        blocks = [rows, again] if number > 1 else [rows]
        limits = SegmentLimits(1_000, 64)
        metadata = await BucketWriter(self.storage, InThisThread()).seal(
            new, blocks, NotNeeded((0, 0, 0), {}), limits
        )
        assert metadata is not None
        return metadata

    def merge(self, buckets: InputBuckets, frontier: Key = FRONTIER) -> BucketMetadata | None:
        return asyncio.run(merge_lent(self.storage, self.staged, buckets, frontier, InThisThread()))

    def check(self, not_needed: NotNeeded, buckets: InputBuckets = BUCKETS) -> BucketMetadata | None:
        path = f"staging/{buckets.new_bucket_id}.bucket"
        if self.vfs.exists(path):
            self.vfs.rename(path, f"live/{buckets.new_bucket_id}.bucket")
        writer = BucketWriter(self.storage, InThisThread())
        return asyncio.run(writer.check(check_steps(self.storage, self.sources, buckets, not_needed), 0))


@pytest.fixture
def world() -> World:
    return World()


def rows_of(parts: list[DueRows]) -> list[Key]:
    return sorted(columns.key(row) for columns in parts for row in range(len(columns)))


def test_what_a_merge_leaves_is_taken_and_what_it_left_out_is_known(world: World) -> None:
    told, known = not_needed_of(BUCKETS, FRONTIER), not_needed_of(BUCKETS, FRONTIER)
    writer = BucketWriter(world.storage, InThisThread(), into=world.staged)
    new = NewBucket(9, Position(1, 0), Position(3, ROWS))
    merged = asyncio.run(writer.merge(new, world.sources, told, SegmentLimits(1_000, 64)))
    checked = world.check(known)
    assert merged is not None and checked is not None
    assert (merged.count, merged.checksum) == (checked.count, checked.checksum)
    assert rows_of(known.doubles) == rows_of(told.doubles) == [(900, 2, 5), (901, 2, 6)]
    assert rows_of(known.left_out) == rows_of(told.left_out)
    assert {ledger_id for _, ledger_id, _ in rows_of(known.left_out)} == {2, 3}


def test_nothing_is_taken_for_nothing_alone(world: World) -> None:
    late = (1_000, 0, 0)
    assert world.merge(BUCKETS, late) is None
    assert world.check(not_needed_of(BUCKETS, late)) is None
    with pytest.raises(Corrupt):
        world.check(not_needed_of(BUCKETS, FRONTIER))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("told", "frontier"),
    [
        pytest.param(BUCKETS, (200, 0, 0), id="rows-lost"),
        pytest.param(BUCKETS, (50, 0, 0), id="rows-that-are-due"),
        pytest.param(replace(BUCKETS, amendments={}), FRONTIER, id="rows-that-are-stale"),
        pytest.param(replace(BUCKETS, gone_ledger_ids=frozenset()), FRONTIER, id="rows-of-a-ledger-gone"),
        pytest.param(replace(BUCKETS, bucket_ids=(1, 2)), FRONTIER, id="a-source-left-out"),
        pytest.param(replace(BUCKETS, bucket_ids=(1, 2, 2)), FRONTIER, id="another-range"),
        pytest.param(replace(BUCKETS, max_segment_entries=128), FRONTIER, id="segments-too-long"),
        pytest.param(
            replace(BUCKETS, amendments={2: NONE.cancel(BitMap([1, 2, 9]))}), FRONTIER, id="other-amendments"
        ),
    ],
)
def test_what_a_merge_does_not_leave_is_refused(world: World, told: InputBuckets, frontier: Key) -> None:
    """A job that works by other inputs than the broker has: what it writes is whole in itself."""
    assert world.merge(told, frontier) is not None
    with pytest.raises(Corrupt, match="does not hold what its sources leave"):
        world.check(not_needed_of(BUCKETS, FRONTIER))


@pytest.mark.slow
def test_a_row_under_another_time_is_refused(world: World) -> None:
    bad = World()
    source = bad.sources[0].metadata
    (path,) = (each for each in bad.vfs.snapshot() if each.endswith("/1.bucket"))
    bad.vfs.remove(path)
    rng = np.random.default_rng(1)
    times = rng.integers(1, 1_000, ROWS)
    times[np.flatnonzero(times > 500)[0]] += 1  # count and bitmaps stay as they are
    rows = DueRows(times, np.full(ROWS, 1, np.int64), np.arange(ROWS, dtype=np.uint32))
    new, limits = NewBucket(1, source.start, source.end), SegmentLimits(1_000, 64)
    writer = BucketWriter(bad.storage, InThisThread())
    assert asyncio.run(writer.seal(new, [rows], NotNeeded((0, 0, 0), {}), limits)) is not None
    assert bad.merge(BUCKETS) is not None
    content = bad.vfs.snapshot()["staging/9.bucket"]
    world.vfs.open("staging/9.bucket", create=True).pwrite([content], 0)
    with pytest.raises(Corrupt, match="does not hold what its sources leave"):
        world.check(not_needed_of(BUCKETS, FRONTIER))
