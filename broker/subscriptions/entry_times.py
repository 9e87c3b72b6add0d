"""A map from entries to times for a million of them and more, as columns. Pure: no file, no clock, no await.

A time is a number of the owner's unit: milliseconds of the wall clock in the redelivery queue, nanoseconds of the
monotonic clock for leases.

What is put gathers in chunks until they fill a block or one of them is due; then they become a run
(`entry_time_runs`). Two runs of about one size are merged into a third, a block or two with each change, so that no
single step is long: a row is moved about as often as the number of rows doubles. While a merge is under way all three
are runs like others.

Invariants:
  TIMES-1  An entry is held by one run at most, or by the chunks that gather: the time there is its time.
  TIMES-2  More than half of a run's rows hold, or the run is small, being merged, or waits for the next change to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from pyroaring import BitMap

from broker.model import (
    Entries,
    Int64Column,
    UInt32Column,
    bitmap_of,
    common_entries,
    count_entries,
    ids_of,
    merge_entries,
    remove_entries,
    without_entries,
)
from broker.storage.manifest import LedgerTimes
from broker.subscriptions.entry_time_runs import (
    BLOCK_ROWS,
    NEVER,
    Block,
    Chunk,
    Run,
    blocks_at,
    blocks_of,
    blocks_of_chunks,
    merged_blocks,
)

_CHUNKS_MAX = 512
_STEPS_MAX = 4
_DEAD_ROWS = BLOCK_ROWS
"""So many rows that hold no more are not worth a merge."""

_NOTHING = BitMap()

Columns = dict[int, list[tuple[UInt32Column, Int64Column]]]


@dataclass(frozen=True, slots=True)
class TimesCapture:
    """Entries and their times at one moment. It shares blocks, which never change, and copies only sets."""

    chunks: tuple[Chunk, ...]
    gathering: Entries
    runs: tuple[tuple[tuple[Block, ...], Entries], ...]

    def by_ledger(self) -> dict[int, LedgerTimes]:
        """All of it by ledger, rising. Takes a while if it is much; for any thread."""
        columns: Columns = {}
        for time, ledger_id, bitmap in self.chunks:
            held = {ledger_id: bitmap & self.gathering.get(ledger_id, BitMap())}
            for block in blocks_at(time, held):
                _collect(columns, block, held)
        for blocks, held in self.runs:
            for block in blocks:
                _collect(columns, block, held)
        return {ledger_id: _ledger_times(parts) for ledger_id, parts in sorted(columns.items())}


@dataclass(slots=True)
class _Gathering:
    """Entries put last; one chunk at most names each."""

    chunks: list[Chunk] = field(default_factory=list)
    named: Entries = field(default_factory=dict)
    held: Entries = field(default_factory=dict)
    first_time: int = NEVER  # of those that wait, when they were put
    row_count: int = 0
    waiting_count: int = 0  # likewise


_NONE_GATHERED = _Gathering()
"""Shared by all maps in which nothing gathers, as of every idle subscription: it is never written to."""


class EntryTimes:
    """See the module's description. Besides its time, of each entry is known whether it waits for it."""

    __slots__ = ("_are_marks_valid", "_gathering", "_runs", "_sources", "_target", "waits")

    def __init__(self, times: dict[int, LedgerTimes] | None = None) -> None:
        self.waits: Entries = {}  # for their time; perhaps also some that have none here
        self._are_marks_valid = True  # no entry that waits has its row before a run's `unsent`
        self._gathering = _NONE_GATHERED
        self._runs: Sequence[Run] = ()
        self._sources: Sequence[Run] = ()  # of the merge that is under way
        self._target: Run | None = None  # likewise
        if times:
            self._load(times)

    def put(self, time: int, entries: Entries) -> None:
        """Note entries under a time, for which they wait unless it is 0; an older time of theirs is forgotten."""
        self.forget(entries)
        if time:
            merge_entries(self.waits, entries)
        count = count_entries(entries)
        if not count:
            return
        if count >= BLOCK_ROWS:
            self._add_run(blocks_at(time, entries), entries)
        else:
            if common_entries(self._gathering.named, entries):
                self._flush()
            self._gather(time, entries, count)
        self._merge(1 + count * 8 // BLOCK_ROWS)

    def forget(self, entries: Entries) -> None:
        """Drop entries and their times."""
        remove_entries(self.waits, entries)
        has_hits = False
        for held in (self._gathering.held, *(run.held for run in self._runs)):
            hits = {i: bitmap for i, bitmap in entries.items() if i in held}
            if hits:
                has_hits = True
                remove_entries(held, hits)
        if has_hits:
            if not self._gathering.held:
                self._gathering = _NONE_GATHERED
            self._merge(1)

    def wait_no_more(self, entries: Entries) -> None:
        """Entries keep their time, but do not wait for it."""
        remove_entries(self.waits, entries)

    def wait_again(self, entries: Entries) -> None:
        """Entries that have a time here wait for it once more."""
        merge_entries(self.waits, entries)
        self._are_marks_valid = False

    def all_wait(self) -> None:
        """Every entry waits for its time, whatever was before."""
        self._flush()
        self.waits = {}
        for run in self._runs:
            merge_entries(self.waits, run.held)
            run.pending = run.unsent = 0

    def find_due(self, now: int, rows_max: int) -> tuple[Entries, bool]:
        """Find due entries; only a part of them (then True) if that is long work."""
        if self._gathering.first_time <= now:
            self._flush()
        due: Entries = {}
        for run in self._runs:
            if run.time_at(run.pending) <= now:
                entries, row_count = run.find_due(now, self.waits, rows_max)
                merge_entries(due, entries)
                rows_max -= row_count
                if rows_max <= 0:
                    return due, True
        return due, False

    def next_time(self) -> int:
        """The earliest time for which an entry waits that was not found to be due; NEVER if there is none."""
        return self._first_time(unsent=False)

    def first_time(self) -> int:
        """The earliest time of an entry that waits, found to be due or not; NEVER if there is none."""
        if not self._are_marks_valid:
            for run in self._runs:
                run.unsent = 0
            self._are_marks_valid = True
        return self._first_time(unsent=True)

    def held_among(self, entries: Entries) -> Entries:
        """Return which of some entries are here, under whatever time."""
        matches: Entries = {}
        for held in (self._gathering.held, *(run.held for run in self._runs)):
            merge_entries(matches, common_entries(entries, held))
        return matches

    def timed_among(self, entries: Entries) -> Entries:
        """Return which of some entries have a time here that is not 0."""
        matches: Entries = {}
        if not entries:
            return matches
        gathered = common_entries(entries, self._gathering.held)
        for time, ledger_id, bitmap in self._gathering.chunks if gathered else ():
            if time:
                merge_entries(matches, common_entries({ledger_id: bitmap}, gathered))
        for run in self._runs:
            if held := common_entries(entries, run.held):
                merge_entries(matches, without_entries(held, run.untimed()))
        return matches

    def times_of(self, ledger_id: int, entry_ids: BitMap) -> dict[int, int]:
        """The times of those of some entries that are here. Costs what the runs that hold them have in rows."""
        times: dict[int, int] = {}
        gathered = entry_ids & self._gathering.held.get(ledger_id, _NOTHING)
        for time, chunk_ledger_id, bitmap in self._gathering.chunks if gathered else ():
            if chunk_ledger_id == ledger_id:
                times |= dict.fromkeys(bitmap & gathered, time)
        for run in self._runs:
            if held := entry_ids & run.held.get(ledger_id, _NOTHING):
                times |= run.times_of(ledger_id, held)
        return times

    def capture(self) -> TimesCapture:
        """All entries and their times; one short step."""
        return TimesCapture(
            tuple(self._gathering.chunks),
            _copy(self._gathering.held),
            tuple((tuple(run.blocks), _copy(run.held)) for run in self._runs),
        )

    def _first_time(self, *, unsent: bool) -> int:
        first = NEVER
        for run in self._runs:
            mark = max(run.unsent, run.first_timed) if unsent else run.pending
            if run.time_at(mark) < first:
                mark = run.first_waiting(mark, self.waits)
                if unsent:
                    run.unsent = mark
                else:
                    run.pending = mark
                first = min(first, run.time_at(mark))
        if self._gathering.first_time < first:
            # Exact times need rows, unless all that was put still waits.
            if (
                count_entries(common_entries(self._gathering.held, self.waits))
                == self._gathering.waiting_count
            ):
                return self._gathering.first_time
            self._flush()
            return self._first_time(unsent=unsent)
        return first

    def _gather(self, time: int, entries: Entries, count: int) -> None:
        if self._gathering is _NONE_GATHERED:
            self._gathering = _Gathering()
        gathering = self._gathering
        gathering.chunks += [(time, ledger_id, bitmap.copy()) for ledger_id, bitmap in entries.items()]
        merge_entries(gathering.named, entries)
        merge_entries(gathering.held, entries)
        gathering.row_count += count
        if time:
            gathering.first_time = min(gathering.first_time, time)
            gathering.waiting_count += count
        if gathering.row_count >= BLOCK_ROWS or len(gathering.chunks) >= _CHUNKS_MAX:
            self._flush()

    def _flush(self) -> None:
        """Make a run of what has gathered."""
        gathering, self._gathering = self._gathering, _NONE_GATHERED
        nothing = BitMap()
        chunks = [
            (time, ledger_id, bitmap & gathering.held.get(ledger_id, nothing))
            for time, ledger_id, bitmap in gathering.chunks
        ]
        chunks = [chunk for chunk in chunks if chunk[2]]
        if chunks:
            self._add_run(blocks_of_chunks(chunks), gathering.held)

    def _add_run(self, blocks: Iterator[Block], entries: Entries) -> None:
        run = Run()
        run.append(blocks, entries)
        self._runs = [*self._runs, run]

    def _merge(self, steps: int) -> None:
        """Go on with merges, in a few steps of a block or two."""
        for _ in range(min(steps, _STEPS_MAX)):
            if not self._sources and not self._begin_merge():
                return
            self._merge_step()

    def _begin_merge(self) -> bool:
        """Choose what to merge: a run that is mostly dead, or two of about one size."""
        runs = sorted((run for run in self._runs if run.held), key=lambda run: run.row_count)
        self._runs = runs
        sources = next(
            ([run] for run in runs if run.row_count > 2 * run.held_count + _DEAD_ROWS),
            None,
        ) or next(
            ([small, large] for small, large in pairwise(runs) if _are_alike(small, large)),
            None,
        )
        if sources is None:
            return False
        target = Run()
        self._sources, self._target = sources, target
        self._runs = [*runs, target]
        return True

    def _merge_step(self) -> None:
        """Move the rows that come next."""
        sources = [run for run in self._sources if run.blocks and run.held]
        if sources:
            time = min(int(run.blocks[0].times[-1]) for run in sources)
            target = self._target
            assert target is not None
            parts: list[Block] = []
            moved: Entries = {}
            for run in sources:
                part, entries = run.pop_through(time)
                if part is not None:
                    parts.append(part)
                    merge_entries(moved, entries)
            is_found = all(run.begin_row <= run.pending for run in sources)
            is_sent = all(run.begin_row <= run.unsent for run in sources)
            if parts:
                at_end = (target.pending == target.end, target.unsent == target.end)
                target.append(merged_blocks(parts), moved)
                if is_found and at_end[0]:
                    target.pending = target.end
                if is_sent and at_end[1]:
                    target.unsent = target.end
        if not any(run.blocks and run.held for run in self._sources):
            assert not any(run.held for run in self._sources)
            self._runs = [run for run in self._runs if run not in self._sources]
            self._sources, self._target = (), None

    def _load(self, times: dict[int, LedgerTimes]) -> None:
        self._add_run(
            blocks_of(
                np.concatenate([ledger_times.column for ledger_times in times.values()]),
                np.repeat(
                    np.array(list(times), np.int64),
                    [len(ledger_times.entries) for ledger_times in times.values()],
                ),
                np.concatenate([ids_of(ledger_times.entries) for ledger_times in times.values()]),
            ),
            {ledger_id: ledger_times.entries for ledger_id, ledger_times in times.items()},
        )
        self.all_wait()


def _are_alike(small: Run, large: Run) -> bool:
    return large.row_count <= 2 * small.row_count + 16


def _copy(entries: Entries) -> Entries:
    return {ledger_id: bitmap.copy() for ledger_id, bitmap in entries.items()}


def _collect(columns: Columns, block: Block, held: Entries) -> None:
    """Add a block's rows that hold to the columns of their ledgers."""
    mask, _ = block.find(held)
    for ledger_id, rows in block.by_ledger():
        some = mask[rows]
        if some.any():
            part = (block.entry_ids[rows][some], block.times[rows][some])
            columns.setdefault(ledger_id, []).append(part)


def _ledger_times(parts: list[tuple[UInt32Column, Int64Column]]) -> LedgerTimes:
    ids = np.concatenate([ids for ids, _ in parts])
    order = np.argsort(ids)
    ids = ids[order]
    times = np.concatenate([times for _, times in parts])[order]
    return LedgerTimes(bitmap_of(ids), times.astype("<i8").tobytes())
