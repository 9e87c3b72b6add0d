"""Settled keys: found until their time is over, in a bounded number of runs and rows, whatever the disk does."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from broker.delayed import settled_keys
from broker.delayed.key_cache import KeyCache
from broker.delayed.key_runs import KeyRuns
from broker.delayed.settled_keys import SLOTS, SettledKeys
from broker.errors import Unavailable
from broker.model import Position
from broker.runs.storage import RunStorage, RunWriter
from broker.runs.upkeep import RunFiles
from broker.storage.key_run import KeyRunHeader, KeyRunKind
from broker.storage.key_run_files import KEY_RUNS, KeyRunReader
from tests.depth import at_depth
from tests.unit.delayed.key_world import column
from tests.unit.storage.key_entries import FOLDER, TOPIC_ID, columns, disk

KEEP_MS = 4_000
DELIVERED, CANCELLED = KeyRunKind.DELIVERED, KeyRunKind.CANCELLED


class Disk(RunStorage[KeyRunReader]):
    """Refuses to write while it is told to."""

    is_full = False

    def create(self, run_id: int, begins_at: int) -> RunWriter:
        if self.is_full:
            raise Unavailable("no space left")
        return super().create(run_id, begins_at)


class World:
    """Settled keys of one topic, and the clock."""

    def __init__(self, *, rows_max: int = 1_000_000, keep_ms: int = KEEP_MS) -> None:
        self.now_ms = 1_000_000
        self.disk = Disk(disk(), FOLDER, TOPIC_ID, KEY_RUNS)
        self.rows_max, self.keep_ms = rows_max, keep_ms
        self.open([])

    def open(self, headers: Iterable[KeyRunHeader]) -> None:
        self.files = RunFiles(self.disk, 100)
        lookup = KeyRuns(self.files, KeyCache(1 << 20))
        self.settled = SettledKeys(
            lookup, None, lambda: self.now_ms, keep_ms=self.keep_ms, rows_max=self.rows_max
        )
        self.settled.restore(list(headers))

    async def note(self, *entries: int, kind: KeyRunKind = DELIVERED, value: int = 0) -> None:
        """Entries of ledger 1, whose hashes are their numbers, unless one is given."""
        await self.settled.note(kind, columns([(value or each, 1, each) for each in entries]))

    async def found(self, *values: int) -> dict[int, dict[int, bool]]:
        """By hash: entry ids, and whether each was cancelled."""
        found = await self.settled.find(column(values))
        return {value: {at.entry_id: end for at, end in ends.items()} for value, ends in found.items()}

    async def write(self, *entries: int, kind: KeyRunKind = DELIVERED) -> None:
        await self.note(*entries, kind=kind)
        assert await self.settled.flush()

    async def merge_all(self) -> None:
        while self.settled.needs_merge():
            assert await self.settled.merge()

    @property
    def headers(self) -> list[KeyRunHeader]:
        return [run.header for run in self.settled.runs]


async def test_rows_are_found_in_memory_in_runs_and_in_the_next_life() -> None:
    world = World()
    await world.note(5, 6)
    await world.note(7, kind=CANCELLED)
    expected = {5: {5: False}, 7: {7: True}}
    assert await world.found(5, 7, 8) == expected
    assert await world.settled.flush()
    assert await world.found(5, 7, 8) == expected
    assert [(each.kind, each.settled_ms) for each in world.headers] == [(1, 1_000_000), (2, 1_000_000)]
    world.open(world.headers)
    assert await world.found(5, 7, 8) == expected
    assert await world.settled.find(column([6])) == {6: {Position(1, 6): False}}


@pytest.mark.parametrize("first", [DELIVERED, CANCELLED])
async def test_of_one_entry_the_cancel_is_the_last_word(first: KeyRunKind) -> None:
    world = World()
    second = CANCELLED if first is DELIVERED else DELIVERED
    await world.write(5, kind=first)
    await world.write(5, kind=second)
    assert await world.found(5) == {5: {5: True}}


async def test_a_merge_keeps_the_last_entry_of_each_hash_and_both_kinds_apart() -> None:
    world = World()
    for entry in range(1, 10):
        await world.note(entry, value=77)
        await world.write(100 + entry)
        await world.write(200 + entry, kind=CANCELLED)
    assert len(world.headers) == 18
    await world.merge_all()
    assert len(world.headers) <= 4
    found = await world.found(77, 101, 109, 201, 209)
    assert max(found[77]) == 9
    assert found[101] == {101: False} and found[209] == {209: True}
    assert len(world.files.deleted_ids) >= 16
    world.open(world.headers)
    assert await world.found(101, 209) == {101: {101: False}, 209: {209: True}}


@pytest.mark.slow
async def test_each_row_is_found_for_its_time_and_at_most_a_fourth_longer() -> None:
    world = World()
    written: dict[int, int] = {}
    for entry in range(1, 300):
        await world.write(entry)
        written[entry] = world.now_ms
        await world.merge_all()
        world.now_ms += 37
        found = await world.found(*written)
        for each, at_ms in written.items():
            age_ms = world.now_ms - at_ms
            assert each in found or age_ms >= KEEP_MS, f"{each} is forgotten after {age_ms}"
            assert each not in found or age_ms <= KEEP_MS * (SLOTS + 1) // SLOTS, (
                f"{each} is kept for {age_ms}"
            )
        assert len(world.headers) < 40
    assert world.settled.next_expiry_ms() is not None
    world.now_ms += 2 * KEEP_MS
    assert world.settled.expire()
    assert (world.headers, world.settled.count, world.settled.next_expiry_ms()) == ([], 0, None)


@pytest.mark.slow
@pytest.mark.parametrize("rows_max", [1, 10, 100])
async def test_rows_are_bounded_and_the_oldest_go_first(rows_max: int) -> None:
    world = World(rows_max=rows_max)
    for entry in range(1, at_depth(change=150, deep=400)):
        await world.write(entry)
        await world.merge_all()
        assert world.settled.count <= rows_max
        found = sorted(await world.found(*range(1, entry + 1)))
        assert found == list(range(entry + 1 - len(found), entry + 1))
        assert len(found) >= min(entry, rows_max // 2)
        if entry > 120:
            world.now_ms += 1


async def test_what_a_clock_wrote_that_was_far_ahead_is_not_remembered_for_ever() -> None:
    world = World()
    world.now_ms += 10 * KEEP_MS
    await world.write(5)
    world.now_ms -= 10 * KEEP_MS
    assert await world.found(5) == {}
    world.now_ms += KEEP_MS // 2
    await world.write(6)
    world.now_ms -= KEEP_MS // 2  # a small step back forgets nothing
    assert await world.found(6) == {6: {6: False}}


async def test_a_disk_that_does_not_write_costs_what_there_is_no_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settled_keys, "_FLUSH_ROWS", 10)
    world = World()
    world.disk.is_full = True
    for entry in range(1, 100):
        await world.note(entry)
        assert world.settled.count <= 20
    found = await world.found(*range(1, 100))
    assert {95, 96, 97, 98, 99} <= found.keys()
    assert not await world.settled.flush()
    world.disk.is_full = False
    world.now_ms += 3_600_000
    assert await world.settled.flush()
    assert world.headers and 99 in await world.found(99)


async def test_a_merge_that_fails_leaves_everything_as_it_was() -> None:
    world = World()
    for entry in range(1, 10):
        await world.write(entry)
    before = world.headers
    assert world.settled.needs_merge()
    world.disk.is_full = True
    assert not await world.settled.merge()
    assert world.headers == before and not world.settled.needs_merge()  # not at once
    world.disk.is_full = False
    world.now_ms += 3_000
    await world.merge_all()
    assert len(world.headers) < 9
    assert (await world.found(*range(1, 10))).keys() == set(range(1, 10))


async def test_where_nothing_is_to_be_remembered_nothing_is() -> None:
    world = World(keep_ms=0)
    await world.note(5)
    assert await world.settled.flush()
    assert (await world.found(5), world.settled.count, world.headers) == ({}, 0, [])
