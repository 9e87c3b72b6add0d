from __future__ import annotations

import numpy as np
import pytest

from broker.delayed.due_rows import DueRows, concatenate
from broker.delayed.mutable_bucket import BLOCK_ROWS, NEVER_MS, MutableBucket

NOW = 1_700_000_000_000
Row = tuple[int, int, int]
BEGIN = (0, 0, 0)
END = (NEVER_MS, 0, 0)


def add(bucket: MutableBucket, ledger_id: int, first: int, times: list[int], loaded_end=BEGIN) -> None:
    entry_ids = np.arange(first, first + len(times), dtype=np.uint32)
    column = np.array(times, dtype=np.int64)
    waiting = np.array(
        [(time, ledger_id, first + row) >= loaded_end for row, time in enumerate(times)], dtype=np.bool_
    )
    bucket.append(ledger_id, entry_ids, column, None if waiting.all() else waiting)


def rows(columns: DueRows) -> list[Row]:
    return [columns.key(row) for row in range(len(columns))]


def all_rows(bucket: MutableBucket) -> list[Row]:
    return [row for block in bucket.blocks() for row in rows(block)]


def test_new_bucket_holds_nothing():
    bucket = MutableBucket()
    assert (bucket.count, bucket.waiting, bucket.first_waiting_ms) == (0, 0, NEVER_MS)
    assert bucket.blocks() == []
    assert len(bucket.waiting_between(BEGIN, END)) == 0
    assert bucket.memory_bytes() == 0
    bucket.append(1, np.empty(0, np.uint32), np.empty(0, np.int64), None)
    assert bucket.count == 0


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 63, 64, 65, 1_000, 70_000])
def test_rows_stay_in_the_order_of_arrival_in_bounded_blocks(batch):
    bucket = MutableBucket()
    expected = []
    for first in range(0, 3 * batch, batch):
        times = [NOW + (7919 * (first + row)) % 10_007 for row in range(batch)]
        add(bucket, 3, first, times)
        expected += [(time, 3, first + row) for row, time in enumerate(times)]
    assert all_rows(bucket) == expected
    assert all(len(block) <= BLOCK_ROWS for block in bucket.blocks())
    assert bucket.count == bucket.waiting == 3 * batch
    assert bucket.first_waiting_ms == min(expected)[0]
    assert bucket.last_ms == max(expected)[0]


def test_few_rows_take_little_memory():
    bucket = MutableBucket()
    add(bucket, 1, 0, [NOW])
    assert bucket.memory_bytes() < 2_000


def test_rows_before_the_loaded_end_are_kept_and_do_not_wait_mutable_2():
    bucket = MutableBucket()
    end = (NOW + 5, 1, 1)
    add(bucket, 1, 0, [NOW + 5, NOW + 5, NOW + 4, NOW + 9], end)
    assert bucket.count == 4
    assert bucket.waiting == 2
    assert bucket.first_waiting_ms == NOW + 5
    assert rows(bucket.waiting_between(end, END)) == [(NOW + 5, 1, 1), (NOW + 9, 1, 3)]
    add(bucket, 1, 4, [NOW + 1], end)
    assert (bucket.waiting, bucket.first_waiting_ms) == (2, NOW + 5)


def test_loading_within_a_millisecond_mutable_2():
    bucket = MutableBucket()
    for ledger_id in (5, 2):
        add(bucket, ledger_id, 0, [NOW] * 3)
    end = (NOW, 2, 2)
    loaded = bucket.waiting_between(BEGIN, end)
    assert rows(loaded) == [(NOW, 2, 0), (NOW, 2, 1)]
    bucket.loaded(len(loaded), end)
    assert (bucket.waiting, bucket.first_waiting_ms) == (4, NOW)
    rest = bucket.waiting_between(end, END)
    assert len(rest) == 4
    bucket.loaded(4, END)
    assert (bucket.waiting, bucket.first_waiting_ms, bucket.count) == (0, NEVER_MS, 6)


def test_taking_back_a_frozen_bucket_keeps_the_order_bucket_5():
    frozen, bucket = MutableBucket(), MutableBucket()
    add(frozen, 1, 0, [NOW + 9] * 70)
    add(bucket, 1, 70, [NOW + 3, NOW + 4])
    bucket.prepend(frozen)
    add(bucket, 2, 0, [NOW + 1])
    assert [row[1:] for row in all_rows(bucket)] == [(1, entry) for entry in range(72)] + [(2, 0)]
    assert (bucket.count, bucket.waiting, bucket.first_waiting_ms) == (73, 73, NOW + 1)
    assert bucket.last_ms == NOW + 9
    assert bucket.ledger_ids == {1, 2}


@pytest.mark.parametrize("empty", ["frozen", "mutable"])
def test_taking_back_into_or_from_nothing(empty):
    frozen, bucket = MutableBucket(), MutableBucket()
    add(bucket if empty == "frozen" else frozen, 1, 0, [NOW + 2, NOW + 1])
    bucket.prepend(frozen)
    add(bucket, 1, 2, [NOW])
    assert [row[2] for row in all_rows(bucket)] == [0, 1, 2]
    assert bucket.first_waiting_ms == NOW


def test_adding_leaves_the_rows_that_a_seal_reads_alone_mutable_1():
    bucket = MutableBucket()
    add(bucket, 1, 0, [NOW + 1, NOW + 2])
    seen_by_a_seal = bucket.blocks()
    newer = MutableBucket()
    add(newer, 2, 0, [NOW + 3])
    newer.prepend(bucket)
    bucket.loaded(1, (NOW + 2, 0, 0))
    add(newer, 3, 0, [NOW + after for after in range(100)])
    assert rows(concatenate(seen_by_a_seal)) == [(NOW + 1, 1, 0), (NOW + 2, 1, 1)]
    assert all_rows(newer)[:3] == [(NOW + 1, 1, 0), (NOW + 2, 1, 1), (NOW + 3, 2, 0)]


def test_only_ledgers_from_the_last_seal_on_hurry_a_seal():
    bucket = MutableBucket()
    for ledger_id in (1, 2, 8, 9, 9):
        add(bucket, ledger_id, 0, [NOW])
    assert bucket.count_ledgers_from(8) == 2


def test_looking_for_an_entry_and_for_times():
    bucket = MutableBucket()
    end = (NOW + 5, 0, 0)
    add(bucket, 1, 0, [NOW + 4, NOW + 5, NOW + 8], end)
    assert not bucket.holds_waiting(1, 0, end)
    assert bucket.holds_waiting(1, 1, end)
    assert not bucket.holds_waiting(2, 1, end)
    assert sorted(bucket.waiting_times(NOW, NOW + 8, end).tolist()) == [NOW + 5]
