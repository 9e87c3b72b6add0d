"""The cache of segments that were read for looks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from broker.delayed.bucket_values import BucketPolicyValues
from broker.delayed.due_rows import ROW_BYTES, DueRows
from broker.delayed.scan import scan
from broker.delayed.sealed_bucket import SealedBucket
from broker.delayed.segment_cache import SegmentCache
from tests.unit.delayed.test_bucket_tracker import NOW, World
from tests.unit.delayed.test_scan import LAST, keys_of


def rows_of(count: int) -> DueRows:
    column = np.arange(count, dtype=np.int64)
    return DueRows(column, column, column.astype(np.uint32))


def test_what_was_used_last_stays_and_the_bytes_are_bounded():
    cache = SegmentCache(10 * ROW_BYTES)
    for segment in range(3):
        cache.put((1, 1, segment), rows_of(4))
        assert cache.get((1, 1, 0)) is not None
    assert cache.get((1, 1, 1)) is None
    assert cache.memory_bytes == 8 * ROW_BYTES
    cache.put((1, 1, 0), rows_of(1))
    assert cache.memory_bytes == 5 * ROW_BYTES
    cache.put((2, 1, 0), rows_of(11))  # larger than all of it
    assert cache.get((2, 1, 0)) is None
    assert cache.memory_bytes == 0


@pytest.mark.slow
async def test_page_after_page_reads_each_segment_once_and_lists_no_more_than_a_page_needs(
    monkeypatch: pytest.MonkeyPatch,
):
    world, rng = (
        World(BucketPolicyValues(max_segment_entries=8), looked=SegmentCache(1 << 20)),
        random.Random(3),
    )
    for ledger_id in (1, 2, 3):
        world.add(ledger_id, [NOW + rng.randrange(1, 10**9) for _ in range(200)])
        await world.seal()
    reads: list[tuple[int, int]] = []
    read = SealedBucket.read

    async def counted(self: SealedBucket, storage, segment: int) -> DueRows:
        reads.append((self.bucket_id, segment))
        return await read(self, storage, segment)

    monkeypatch.setattr(SealedBucket, "read", counted)
    found, at = [], (NOW + 1, 0, 0)
    while True:
        windows, unread = world.tracker.parts_between(at, LAST, 7)
        assert sum(len(segments.counts) for segments in unread) <= 3 * 3
        page = await scan(windows, unread, at, LAST, 7)
        found += keys_of(page)
        at = page.end
        if page.is_last:
            break
        assert len(page.entries) == 7
    assert found == sorted(world.rows)
    assert (
        len(reads) == len(set(reads)) == sum(bucket.segment_count for bucket in world.tracker.buckets.in_use)
    )
