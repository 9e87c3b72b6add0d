"""Stale rows by name: against a set of tuples; and what a tracker makes of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from broker.delayed import stale, stale_entries
from broker.delayed.due_rows import DueRows, Key
from broker.delayed.loaded_rows import LoadedRows
from broker.delayed.stale import LeftOut, StaleRows
from broker.delayed.stale_entries import RepeatedRows, StaleEntries
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


def leave_out(
    stale: StaleRows,
    some: list[DueRows],
    doubles: list[DueRows],
    frontier: Key,
    loaded_end: Key,
    *,
    by_merge: bool,
) -> None:
    """Leave rows out, and forget them to the last slice."""
    stale.left_out(LeftOut(some, doubles, frontier, loaded_end), frontier, loaded_end, by_merge=by_merge)
    asyncio.run(stale.forget_left_out(lambda: frontier))


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
        gone, missing = stale.remove(each, *columns_of([*left, (7, 7)]))
        assert (keys_of(gone), keys_of(missing)) == ({(each, *row) for row in left}, {(each, 7, 7)})
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
    doubles, expected = RepeatedRows(), Counter[tuple[int, int, int]]()
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
    current = chunk_of((10, 1, 4), (13, 3, 5))
    assert stale.without(current) is current
    for _ in range(2):  # as the amendments say, known as stale or not
        left = stale.without(taken)
        assert list(zip(left.ledger_ids.tolist(), left.entry_ids.tolist(), strict=True)) == [(1, 4), (3, 5)]
        assert stale.surplus == 0
        stale.note(DueRows(np.array([11, 12]), np.array([1, 2]), np.array([5, 9], np.uint32)), (0, 0, 0))
        assert stale.surplus == 2


def test_what_was_taken_before_does_not_become_stale():
    stale = StaleRows(lambda ledger_id: None)
    stale.note(DueRows(np.array([11, 12]), np.array([1, 1]), np.array([5, 6], np.uint32)), (11, 1, 5))
    assert stale.entries.times().tolist() == [12]


@pytest.mark.parametrize("loaded_end", [(0, 0, 0), (12, 0, 0)])
def test_what_a_seal_left_out_counts_on_where_it_was_loaded(loaded_end):
    """Near holds the row as well, until it is taken; also if it was loaded a moment before the seal's end."""
    stale = StaleRows(lambda ledger_id: NONE.cancel(BitMap([5, 6])))
    some = DueRows(np.array([11, 12]), np.array([1, 1]), np.array([5, 6], np.uint32))
    stale.note(some, (0, 0, 0))
    stale.left_out(LeftOut([some], [], START, loaded_end), START, (12, 0, 0), by_merge=False)
    assert stale.surplus == 1
    asyncio.run(stale.forget_left_out(lambda: START))
    assert stale.entries.times().tolist() == [11]


def test_a_row_that_is_added_again_is_not_stale_and_may_be_there_twice():
    stale = StaleRows(lambda ledger_id: None)
    ids, times = columns_of([(5, 1), (6, 2)])
    stale.note(DueRows(times, np.array([1, 1]), ids), (0, 0, 0))
    stale.revived(1, ids[:1], times[:1])
    assert (stale.entries.count, stale.doubles.count, stale.surplus) == (1, 1, 2)
    assert sorted(stale.surplus_times().tolist()) == sorted(times.tolist())
    leave_out(stale, [], [DueRows(times[:1], np.array([1]), ids[:1])], (0, 0, 0), (0, 0, 0), by_merge=True)
    assert (stale.entries.count, stale.doubles.count, stale.surplus) == (1, 0, 1)


def test_of_rows_that_a_merge_left_out_those_that_were_there_twice_are_known_by_their_number():
    stale = StaleRows(lambda ledger_id: None)
    ids, times = columns_of([(5, 1)])
    row = DueRows(times, np.array([1]), ids)
    stale.note(row, (0, 0, 0))
    stale.revived(1, ids, times)
    stale.note(row, (0, 0, 0))  # moved away again: two rows of it count for nothing
    assert stale.surplus == 2
    leave_out(stale, [row, row], [], (0, 0, 0), (0, 0, 0), by_merge=True)
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
    leave_out(
        stale, [row_of((11, 1, 5))], [], START, START, by_merge=False
    )  # by a seal: nothing was looked through
    assert (stale.outweigh(1), stale.outweigh(2)) == (True, False)
    leave_out(stale, [], [], START, START, by_merge=True)
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
    leave_out(stale, [some], [], (10, 1, 5), (13, 0, 0), by_merge=False)
    assert sorted(stale.entries.times().tolist()) == [11]


def test_a_row_that_was_loaded_is_still_there_as_often_as_it_was_when_a_seal_has_left_it_out():
    stale = StaleRows(lambda ledger_id: NONE.cancel(BitMap([5])))
    row = row_of((10, 1, 5))
    stale.note(row, START)
    stale.revived(1, row.entry_ids, row.deliver_at_ms)
    stale.note(row, START)  # moved back, and away again: twice in the index, and stale
    leave_out(stale, [row], [], START, (11, 0, 0), by_merge=False)
    assert (stale.entries.count, stale.doubles.count) == (1, 1)


def test_rows_that_were_there_once_more_count_until_they_are_left_out_or_behind_the_frontier():
    stale = StaleRows(lambda ledger_id: None)
    rows = row_of((10, 1, 5), (11, 1, 6), (12, 1, 7), (13, 1, 8))
    stale.note(rows, START)
    stale.revived(1, rows.entry_ids, rows.deliver_at_ms)
    assert (stale.entries.count, stale.doubles.count) == (0, 4)
    # A seal has met two of them: one of these was loaded, so that the loaded rows hold it twice until it is taken.
    leave_out(stale, [], [row_of((11, 1, 6), (13, 1, 8))], (11, 0, 0), (12, 0, 0), by_merge=False)
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


class Slices:
    """Rows that pass through the sets of stale rows, by step of the event loop; those of a thread do not count."""

    def __init__(self, monkeypatch) -> None:
        self.rows = [0]
        self._ends = False
        self._in_thread = False
        by_part, make = stale_entries._by_part, LeftOut.__init__

        def counted(entry_ids, times):
            if not self._in_thread:
                self.rows[-1] += len(entry_ids)
            return by_part(entry_ids, times)

        def made(*arguments):
            self._in_thread = True
            make(*arguments)
            self._in_thread = False

        monkeypatch.setattr(stale_entries, "_by_part", counted)
        monkeypatch.setattr(LeftOut, "__init__", made)

    async def count(self, look: Callable[[], None]) -> None:
        while not self._ends:
            look()
            self.rows.append(0)
            await asyncio.sleep(0)

    def end(self) -> None:
        self._ends = True


@pytest.mark.parametrize("rows", [40, 400])
async def test_a_step_of_the_loop_forgets_as_many_rows_however_many_a_merge_left_out_stale_2(
    monkeypatch, rows
):
    monkeypatch.setattr(stale, "SLICE_ROWS", 8)
    world = World(replace(SMALL, max_buckets=1))
    for first in (0, rows):
        for ledger_id in (2, 1):
            world.add(ledger_id, NOW + HOUR + 2 * rows - np.arange(first, first + rows), first)
        await world.seal()
    for ledger_id in (1, 2):
        gone = np.arange(1, 2 * rows, 2, dtype=np.uint32)
        times = np.array([row[0] for row in world.rows if row[1] == ledger_id])[gone]
        world.amendments[ledger_id] = NONE.cancel(BitMap(gone))
        world.tracker.remove(ledger_id, gone, times)
    slices, counts = Slices(monkeypatch), set()
    looking = asyncio.create_task(slices.count(lambda: counts.add(world.tracker.count())))
    assert await world.tracker.buckets.merge()
    slices.end()
    await looking
    assert world.tracker._stale.surplus == 0
    assert counts == {2 * rows}, "what waits, and no other number in any step (STALE-1)"
    assert max(slices.rows) == 8
    assert sum(slices.rows) == 2 * rows


def test_what_was_there_once_more_is_forgotten_in_slices_too_stale_2(monkeypatch):
    """Half a million messages that were moved, and moved back, between two seals."""
    monkeypatch.setattr(stale, "SLICE_ROWS", 8)
    held = StaleRows(lambda ledger_id: NONE)
    rows = row_of(*((10 + entry_id, 1, entry_id) for entry_id in range(40)))
    held.note(rows, START)
    held.revived(1, rows.entry_ids, rows.deliver_at_ms)
    loaded_end = (12, 0, 0)  # of two rows, which are there twice until they meet among the loaded ones
    held.left_out(LeftOut([], [rows], START, START), START, loaded_end, by_merge=True)
    known = [held.doubles.count]
    while held._left_out:
        assert held.surplus == 2
        held._forget_slice(START)
        known.append(held.doubles.count)
    assert known == [40, 32, 24, 16, 8, 2]
    assert (held.surplus, sorted(held.doubles.times().tolist())) == (2, [10, 11])


def test_a_slice_forgets_rows_of_several_ledgers_but_not_of_all_stale_2():
    """A merge of ten thousand ledgers with a row each left out would go on for minutes, or hold the loop up."""
    held = StaleRows(lambda ledger_id: GONE)
    rows = row_of(*((ledger_id % 7, ledger_id, 5) for ledger_id in range(1, 101)))
    held.note(rows, START)
    held.left_out(LeftOut([rows], [], START, START), START, START, by_merge=True)
    known = [held.entries.count]
    while held._left_out:
        held._forget_slice(START)
        known.append(held.entries.count)
    assert known == [100, 84, 68, 52, 36, 20, 4, 0]


def test_rows_of_many_ledgers_are_parted_in_one_pass(monkeypatch):
    """To look for each of ten thousand ledgers took ten thousand passes over the rows."""
    looks: list[int] = []
    flatnonzero = np.flatnonzero

    def counted(column: np.ndarray) -> np.ndarray:
        looks.append(len(column))
        return flatnonzero(column)

    monkeypatch.setattr(np, "flatnonzero", counted)
    rows = row_of(*((time, ledger_id, 5) for time in (1, 2) for ledger_id in range(100, 0, -1)))
    parted = list(stale_entries._by_ledger(rows))
    assert looks == [200]
    assert [(key, some.deliver_at_ms.tolist()) for key, some in parted] == [
        (ledger_id, [1, 2]) for ledger_id in range(1, 101)
    ]


def test_what_is_leaving_twice_counts_on_although_the_frontier_has_passed_it_stale_1():
    stale = StaleRows(lambda ledger_id: GONE)
    row = row_of((10, 1, 5))
    stale.note(row, START)
    stale.revived(1, row.entry_ids, row.deliver_at_ms)
    stale.note(row, START)
    stale.left_out(LeftOut([row, row], [], START, START), START, START, by_merge=True)
    frontier = (11, 0, 0)
    stale.left_out(LeftOut([], [], frontier, frontier), frontier, frontier, by_merge=False)
    assert stale.surplus == 0
    asyncio.run(stale.forget_left_out(lambda: frontier))
    assert (stale.surplus, stale.entries.count, stale.doubles.count) == (0, 0, 0)


async def test_what_is_found_in_a_bucket_is_not_forgotten_with_what_is_leaving_stale_1():
    world = World()
    world.add(1, [NOW + HOUR])
    await world.seal()
    world.amendments[1] = NONE.cancel(BitMap([0]))
    await world.restart(world.tracker.buckets.image(), NOW)
    stale, row = world.tracker._stale, row_of((NOW + HOUR, 1, 0))
    stale.note(row, START)
    stale.left_out(LeftOut([row], [], START, START), START, START, by_merge=False)  # there once more
    await world.tracker.seek_stale()
    await stale.forget_left_out(lambda: START)
    assert world.tracker.count() == 0


class Held:
    """Rows that an index holds, each as often as it does, and the times that count."""

    def __init__(self) -> None:
        self.rows = Counter[tuple[int, int]]()  # (entry, time)
        self.times: dict[int, int] = {}
        self.stale = StaleRows(self.amendments_of)

    def amendments_of(self, ledger_id: int) -> Amendments:
        moved = sorted(self.times)
        return Amendments(
            BitMap(entry_id for entry_id, _ in self.rows if entry_id not in self.times),
            np.array(moved, dtype=np.uint32),
            np.array([self.times[entry_id] for entry_id in moved], dtype=np.int64),
            np.ones(len(moved), dtype=np.uint32),
            np.ones(len(moved), dtype=np.uint64),
        )

    def move(self, entry_id: int, time: int | None) -> None:
        before = self.times.pop(entry_id, None)
        if time is not None:
            self.times[entry_id] = time
        if before is not None:
            self.stale.note(row_of((before, 1, entry_id)), START)
        if time is not None:
            self.stale.revived(1, np.array([entry_id], np.uint32), np.array([time]))
            self.rows[entry_id, time] += 1

    def merge(self) -> None:
        """Left out: what is stale, and each row but once."""
        gone: list[DueRows] = []
        doubles: list[DueRows] = []
        for (entry_id, time), count in self.rows.items():
            is_current = self.times.get(entry_id) == time
            row = row_of((time, 1, entry_id))
            (doubles if is_current else gone).extend([row] * (count - is_current))
            self.rows[entry_id, time] = int(is_current)
        self.stale.left_out(LeftOut(gone, doubles, START, START), START, START, by_merge=True)

    def slice(self) -> None:
        if self.stale._left_out:
            self.stale._forget_slice(START)

    def check(self) -> None:
        assert self.rows.total() - self.stale.surplus == len(self.times)
        held = Counter(time for _, time in self.rows.elements())
        held.update(self.stale.leaving_times().tolist())
        held.subtract(self.stale.surplus_times().tolist())
        assert held == Counter(self.times.values()), "by time, as bars of a histogram count"


moves = st.tuples(st.integers(0, 2), st.none() | st.integers(1, 2))


@given(st.lists(st.one_of(moves, st.just("merge"), st.just("slice")), max_size=40))
def test_what_counts_for_nothing_is_known_between_slices_whatever_is_moved_meanwhile_stale_1(steps):
    held = Held()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stale, "SLICE_ROWS", 1)
        for step in steps:
            match step:
                case "merge":
                    held.merge()
                case "slice":
                    held.slice()
                case (entry_id, time) if time is None or held.times.get(entry_id) != time:
                    held.move(entry_id, time)
            held.check()
    while held.stale._left_out:
        held.slice()
    held.check()
