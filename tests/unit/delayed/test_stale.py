"""Stale rows by name: against a set of tuples; and what a tracker makes of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from broker.delayed.bucket_writer import NotNeeded
from broker.delayed.due_rows import DueRows
from broker.delayed.loaded_rows import LoadedRows
from broker.delayed.stale import Doubles, StaleEntries, StaleRows
from broker.storage.amendments import GONE, NONE, Amendments
from tests.unit.delayed.test_bucket_tracker import HOUR, NOW, SMALL, World

AFTER_ALL = (1 << 62, 0, 0)

# Also such as lie in other parts of a ledger's, and at borders of them.
entry_ids = st.integers(0, 40) | st.sampled_from([(1 << 18) - 1, 1 << 18, (1 << 18) + 1, (1 << 32) - 1])
rows = st.lists(st.tuples(entry_ids, st.integers(1, 5) | st.sampled_from([64, 8191])), max_size=12)
steps = st.lists(st.tuples(st.booleans(), st.integers(1, 3), rows), max_size=20)


def columns_of(some: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array([entry_id for entry_id, _ in some], dtype=np.uint32)
    return ids, np.array([time << 40 for _, time in some], dtype=np.int64)


def rows_of(ledger_id: int, some: list[tuple[int, int]]) -> DueRows:
    ids, times = columns_of(some)
    return DueRows(times, np.full(len(ids), ledger_id), ids)


def keys_of(rows: DueRows) -> set[tuple[int, int, int]]:
    ids, times = rows.entry_ids.tolist(), (rows.deliver_at_ms >> 40).tolist()
    found = list(zip(rows.ledger_ids.tolist(), ids, times, strict=True))
    assert len(set(found)) == len(found), "each once"
    return set(found)


def test_rows_in_the_order_of_a_merge_are_forgotten_without_being_sorted(monkeypatch):
    """On the event loop, where half a million of them took a quarter of a second."""
    borders = [1, 2, (1 << 18) - 1, 1 << 18, (1 << 18) + 1]
    some = [(entry_id, time) for entry_id in borders for time in (1, 2, 5)]
    stale, merged = StaleEntries(), NotNeeded((0, 0, 0), {})
    for ledger_id in (1, 2, 3):
        stale.add_rows(rows_of(ledger_id, some))
        merged.left_out.extend((rows_of(ledger_id, some[::2][::-1]), rows_of(ledger_id, some[1::2])))
    merged.left_out.reverse()
    merged.order_left_out()
    (left_out,) = merged.left_out
    stale.known_among(left_out)  # each part is one block now
    monkeypatch.setattr(np, "sort", None)
    monkeypatch.setattr(np, "unique", None)
    stale.remove_rows(left_out)
    assert stale.count == 0


@given(steps)
def test_rows_are_kept_each_once(steps):
    stale, expected = StaleEntries(), set()
    for adds, ledger_id, some in steps:
        named = {(ledger_id, *row) for row in some}
        if adds:
            stale.add(ledger_id, *columns_of(some))
            expected |= named
        else:
            stale.remove(ledger_id, *columns_of(some))
            expected -= named
        assert stale.count == len(expected)
        assert sorted(stale.times().tolist()) == sorted(time << 40 for *_, time in expected)
        for each in (1, 2, 3):
            assert stale.has_any_of(each) == any(ledger_id == each for ledger_id, *_ in expected)
            known = stale.known_among(rows_of(each, some))
            assert keys_of(known) == {(each, *row) for row in some if (each, *row) in expected}, (
                "of these, what is here"
            )
    for each in (1, 2, 3):
        left = [(entry_id, time) for ledger_id, entry_id, time in expected if ledger_id == each]
        assert keys_of(stale.remove(each, *columns_of(left))) == {(each, *row) for row in left}
    assert stale.count == 0


def test_a_row_is_kept_once_that_comes_again_before_its_part_has_one_block():
    stale, some = StaleEntries(), [(part << 18, 1) for part in range(4)]
    for _ in range(6):
        stale.add(1, *columns_of(some))
        assert (stale.count, len(stale.times())) == (4, 4)


def test_what_many_steps_add_to_a_ledger_stays_in_few_blocks_of_eight_bytes_a_row():
    stale, count = StaleEntries(), 400_000
    ids = np.random.default_rng(1).permutation(2 * count)[:count].astype(np.uint32)
    for first in range(0, count, 1_000):
        some = np.sort(ids[first : first + 1_000])
        stale.add(1, some, NOW + some.astype(np.int64))
        assert sum(part.block_count() for part in stale._parts[1].values()) <= 40
    assert stale.count == count
    assert stale.memory_bytes() == 8 * count
    assert sorted(stale.times().tolist()) == sorted((NOW + ids.astype(np.int64)).tolist())


@given(steps)
def test_doubles_are_kept_as_often_as_they_were_added(steps):
    doubles, expected = Doubles(), Counter[tuple[int, int, int]]()
    for adds, ledger_id, some in steps:
        ids, times = columns_of(some)
        rows = DueRows(times, np.full(len(ids), ledger_id), ids)
        named = Counter((ledger_id, *row) for row in some)
        if adds:
            doubles.add_rows(rows)
            expected.update(named)
        else:
            rest = doubles.take_rows(rows)
            assert len(rest) == sum((named - expected).values())
            expected -= named
        assert doubles.count == expected.total()
        assert sorted(doubles.times().tolist()) == sorted(time << 40 for *_, time in expected.elements())
    doubles.drop_before(3 << 40)
    assert doubles.count == sum(count for (*_, time), count in expected.items() if time >= 3)


def chunk_of(*keys: tuple[int, int, int]) -> DueRows:
    times, ledger_ids, entry_ids = zip(*keys, strict=True)
    return DueRows(np.array(times), np.array(ledger_ids), np.array(entry_ids, dtype=np.uint32))


def test_what_is_taken_is_left_without_stale_rows_which_are_forgotten():
    amendments: dict[int, Amendments] = {1: NONE.cancel(BitMap([5])), 2: GONE}
    stale = StaleRows(amendments.get)
    taken = chunk_of((10, 1, 4), (11, 1, 5), (12, 2, 9), (13, 3, 5))
    assert stale.without(taken) is taken, "nothing is stale as far as is known: nobody looks"
    stale.note(DueRows(np.array([11, 12]), np.array([1, 2]), np.array([5, 9], np.uint32)), (0, 0, 0))
    left = stale.without(taken)
    assert list(zip(left.ledger_ids.tolist(), left.entry_ids.tolist(), strict=True)) == [(1, 4), (3, 5)]
    assert stale.surplus == 0


def test_what_was_taken_before_does_not_become_stale():
    stale = StaleRows(lambda ledger_id: None)
    stale.note(DueRows(np.array([11, 12]), np.array([1, 1]), np.array([5, 6], np.uint32)), (11, 1, 5))
    assert stale.entries.times().tolist() == [12]


def test_what_a_seal_left_out_counts_on_where_it_was_loaded():
    """Near holds the row as well, until it is taken."""
    stale = StaleRows(lambda ledger_id: NONE.cancel(BitMap([5, 6])))
    some = DueRows(np.array([11, 12]), np.array([1, 1]), np.array([5, 6], np.uint32))
    stale.note(some, (0, 0, 0))
    stale.left_out([some], [], (0, 0, 0), (12, 0, 0), by_merge=False)
    assert stale.entries.times().tolist() == [11]


def test_a_row_that_is_added_again_is_not_stale_and_may_be_there_twice():
    stale = StaleRows(lambda ledger_id: None)
    ids, times = columns_of([(5, 1), (6, 2)])
    stale.note(DueRows(times, np.array([1, 1]), ids), (0, 0, 0))
    stale.revived(1, ids[:1], times[:1])
    assert (stale.entries.count, stale.doubles.count, stale.surplus) == (1, 1, 2)
    assert sorted(stale.surplus_times().tolist()) == sorted(times.tolist())
    stale.left_out([], [DueRows(times[:1], np.array([1]), ids[:1])], (0, 0, 0), (0, 0, 0), by_merge=True)
    assert (stale.entries.count, stale.doubles.count, stale.surplus) == (1, 0, 1)


def test_of_rows_that_a_merge_left_out_those_that_were_there_twice_are_known_by_their_number():
    stale = StaleRows(lambda ledger_id: None)
    ids, times = columns_of([(5, 1)])
    row = DueRows(times, np.array([1]), ids)
    stale.note(row, (0, 0, 0))
    stale.revived(1, ids, times)
    stale.note(row, (0, 0, 0))  # moved away again: two rows of it count for nothing
    assert stale.surplus == 2
    stale.left_out([row, row], [], (0, 0, 0), (0, 0, 0), by_merge=True)
    assert stale.surplus == 0


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 2), st.integers(0, 9)), unique=True, min_size=1))
def test_near_forgets_entries_under_just_these_times(keys):
    loaded = LoadedRows()
    chunk = chunk_of(*keys)
    loaded.add(DueRows(chunk.deliver_at_ms, chunk.ledger_ids, chunk.entry_ids))
    gone = chunk_of(*keys[::2], (99, 1, 1))
    loaded.remove(DueRows(gone.deliver_at_ms, gone.ledger_ids, gone.entry_ids))
    left = loaded.rows_between((0, 0, 0), AFTER_ALL)
    assert [left.key(row) for row in range(len(left))] == sorted(keys[1::2])
    assert loaded.count() == len(keys[1::2])


def row_of(*keys: tuple[int, int, int]) -> DueRows:
    chunk = chunk_of(*keys)
    return DueRows(chunk.deliver_at_ms, chunk.ledger_ids, chunk.entry_ids)


START = (0, 0, 0)


def test_stale_rows_outweigh_by_those_that_became_so_since_the_last_merge():
    stale = StaleRows(lambda ledger_id: GONE)
    stale.note(row_of((11, 1, 5), (12, 1, 6), (13, 1, 7)), START)
    assert stale.outweigh(2)
    assert not stale.outweigh(3)
    stale.left_out(
        [row_of((11, 1, 5))], [], START, START, by_merge=False
    )  # by a seal: nothing was looked through
    assert (stale.outweigh(1), stale.outweigh(2)) == (True, False)
    stale.left_out([], [], START, START, by_merge=True)
    assert not stale.outweigh(0)
    stale.note(row_of((14, 1, 8)), START)
    assert (stale.outweigh(0), stale.outweigh(1)) == (True, False)
    stale.clear()
    stale.note(row_of((14, 1, 8)), START)
    assert stale.outweigh(0)


def test_of_what_was_left_out_of_near_each_row_counts_that_is_stale_by_now_and_was_not_taken():
    amendments = NONE.cancel(BitMap([5, 6, 7]))
    stale = StaleRows(lambda ledger_id: amendments)
    some = row_of((10, 1, 5), (11, 1, 6), (12, 1, 8), (13, 1, 7))  # 8 was moved back to where it was
    stale.note(row_of((13, 1, 7)), START)
    stale.left_out([some], [], (10, 1, 5), (13, 0, 0), by_merge=False)
    assert sorted(stale.entries.times().tolist()) == [11]


def test_a_row_that_was_loaded_is_still_there_as_often_as_it_was_when_a_seal_has_left_it_out():
    stale = StaleRows(lambda ledger_id: NONE.cancel(BitMap([5])))
    row = row_of((10, 1, 5))
    stale.note(row, START)
    stale.revived(1, row.entry_ids, row.deliver_at_ms)
    stale.note(row, START)  # moved back, and away again: twice in the index, and stale
    stale.left_out([row], [], START, (11, 0, 0), by_merge=False)
    assert (stale.entries.count, stale.doubles.count) == (1, 1)


def test_rows_that_were_there_once_more_count_until_they_are_left_out_or_behind_the_frontier():
    stale = StaleRows(lambda ledger_id: None)
    rows = row_of((10, 1, 5), (11, 1, 6), (12, 1, 7), (13, 1, 8))
    stale.note(rows, START)
    stale.revived(1, rows.entry_ids, rows.deliver_at_ms)
    assert (stale.entries.count, stale.doubles.count) == (0, 4)
    # A seal has met two of them: one of these was loaded, so that the loaded rows hold it twice until it is taken.
    stale.left_out([], [row_of((11, 1, 6), (13, 1, 8))], (11, 0, 0), (12, 0, 0), by_merge=False)
    assert sorted(stale.doubles.times().tolist()) == [11, 12]


def test_counts_are_unsure_up_to_where_moves_again_may_lie():
    stale = StaleRows(lambda ledger_id: None)
    assert stale.is_exact_at(0)
    stale._unsure_through_ms = 7
    assert (stale.is_exact_at(6), stale.is_exact_at(7)) == (False, True)
    stale.is_sought = True
    assert (stale.is_exact_at(7), stale.may_hold(3)) == (False, True)
    stale.is_sought = False
    stale.clear()
    assert stale.is_exact_at(0)


async def test_stale_rows_of_buckets_count_for_nothing_however_often_they_are_sought():
    world = World()
    world.add(1, [NOW + HOUR, NOW + HOUR + 1])
    await world.seal()
    world.add(1, [NOW + HOUR])
    await world.seal()
    world.amendments[1] = NONE.cancel(BitMap([0]))
    await world.restart(world.tracker.buckets.image(), NOW)
    for _ in range(2):
        await world.tracker.seek_stale()
        assert world.tracker.count() == 1


async def test_what_a_merge_left_out_comes_in_the_order_in_which_it_is_forgotten(monkeypatch):
    world = World()
    world.tracker.buckets.policy = replace(SMALL, max_buckets=1)
    for first in (0, 6):
        for ledger_id in (2, 1):
            world.add(ledger_id, NOW + HOUR + 20 - np.arange(first, first + 6), first)
        await world.seal()
    for ledger_id in (1, 2):
        world.amendments[ledger_id] = NONE.cancel(BitMap(range(1, 12, 2)))
    came: list[DueRows] = []
    monkeypatch.setattr(StaleRows, "left_out", lambda stale, rows, *_, **__: came.extend(rows))
    assert await world.tracker.buckets.merge()
    (left_out,) = came
    places = list(zip(left_out.ledger_ids.tolist(), left_out.entry_ids.tolist(), strict=True))
    assert places == [(ledger_id, entry_id) for ledger_id in (1, 2) for entry_id in range(1, 12, 2)]
