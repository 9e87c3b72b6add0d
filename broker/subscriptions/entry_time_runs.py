"""Runs of entries in the order of their times, as columns. Pure: no file, no clock, no await.

A row is a time and a position, 14 bytes at most. Rows lie in blocks, which never change, so that a checkpoint takes
them by reference; a run is a list of blocks. Its rows outlive what they say: an entry that was settled, or has
another time by now, leaves the set `held` of its run at once, and its row when the run is merged into another.

Invariant:
  TIMERUN-1  An entry that is held has exactly one row in the blocks of that run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
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
)

BLOCK_ROWS = 4096
NEVER = (1 << 63) - 1

Mask = npt.NDArray[np.bool_]
UInt16Column = npt.NDArray[np.uint16]
Chunk = tuple[int, int, BitMap]
"""Entries of one ledger under one time: (time, ledger_id, entries)."""

_NOTHING = BitMap()
_FIRST = np.zeros(BLOCK_ROWS, np.uint16)  # the slots of every block that is of one ledger


@dataclass(frozen=True, slots=True)
class Block:
    """Rows in the order of their times; column `slots` says which of `ledger_ids` each is of."""

    times: Int64Column
    ledger_ids: Int64Column  # rising
    slots: UInt16Column
    entry_ids: UInt32Column

    def __len__(self) -> int:
        return len(self.times)

    def part(self, rows: slice) -> Block:
        return Block(self.times[rows], self.ledger_ids, self.slots[rows], self.entry_ids[rows])

    def by_ledger(self) -> Iterator[tuple[int, npt.NDArray[np.intp] | slice]]:
        """The rows of each ledger."""
        if len(self.ledger_ids) == 1:
            yield int(self.ledger_ids[0]), slice(None)
            return
        order = np.argsort(self.slots, kind="stable")
        ends = np.searchsorted(self.slots[order], np.arange(len(self.ledger_ids)), side="right").tolist()
        start = 0
        for ledger_id, end in zip(self.ledger_ids.tolist(), ends, strict=True):
            if end > start:
                yield ledger_id, order[start:end]
            start = end

    def entries(self) -> Entries:
        """Return the entries without their times."""
        return {i: bitmap_of(np.sort(self.entry_ids[rows])) for i, rows in self.by_ledger()}

    def find(self, entries: Entries) -> tuple[Mask, Entries]:
        """For each row, whether its entry is in the set; and the entries that are."""
        mask, hits = np.zeros(len(self), np.bool_), dict[int, BitMap]()
        for ledger_id, rows in self.by_ledger():
            ids = self.entry_ids[rows]
            # Rows of one ledger come in the order of their times, so their ids do not rise: sorted, they make a
            # bitmap several times faster.
            hit = bitmap_of(np.sort(ids)) & entries.get(ledger_id, _NOTHING)
            if not hit:
                continue
            hits[ledger_id] = hit
            if len(hit) == len(ids):
                mask[rows] = True  # all of them, the usual case
            else:
                hit_ids = ids_of(hit)
                mask[rows] = hit_ids[np.minimum(np.searchsorted(hit_ids, ids), len(hit_ids) - 1)] == ids
        return mask, hits


def blocks_at(time: int, entries: Entries) -> Iterator[Block]:
    """Blocks of entries that have one time."""
    for ledger_id, bitmap in entries.items():
        ids = ids_of(bitmap)
        for start in range(0, len(ids), BLOCK_ROWS):
            some = ids[start : start + BLOCK_ROWS].copy()  # or a block would keep all of the column in memory
            times = np.broadcast_to(np.int64(time), len(some))
            yield Block(times, np.array([ledger_id], np.int64), _FIRST[: len(some)], some)


def blocks_of(times: Int64Column, ledger_ids: Int64Column, entry_ids: UInt32Column) -> Iterator[Block]:
    """Blocks of rows in any order."""
    order = np.argsort(times, kind="stable")
    for start in range(0, len(order), BLOCK_ROWS):
        rows = order[start : start + BLOCK_ROWS]
        table, slots = np.unique(ledger_ids[rows], return_inverse=True)
        one = len(table) == 1
        column = _FIRST[: len(rows)] if one else slots.astype(np.uint16)
        yield Block(times[rows], table, column, entry_ids[rows])


def blocks_of_chunks(chunks: Sequence[Chunk]) -> Iterator[Block]:
    """Blocks of a few chunks, none of them empty."""
    counts = [len(bitmap) for _, _, bitmap in chunks]
    yield from blocks_of(
        np.repeat(np.array([time for time, _, _ in chunks], np.int64), counts),
        np.repeat(np.array([ledger_id for _, ledger_id, _ in chunks], np.int64), counts),
        np.concatenate([ids_of(bitmap) for _, _, bitmap in chunks]),
    )


def merged_blocks(parts: Sequence[Block]) -> Iterator[Block]:
    """Blocks of the rows of a few blocks."""
    if len(parts) == 1 and len(parts[0]) <= BLOCK_ROWS:
        yield parts[0]
        return
    yield from blocks_of(
        np.concatenate([part.times for part in parts]),
        np.concatenate([part.ledger_ids[part.slots] for part in parts]),
        np.concatenate([part.entry_ids for part in parts]),
    )


class Run:
    """Rows in the order of their times, and which of them still hold.

    Rows have numbers, which stay when the first ones leave. Two marks move forward only: no entry that waits has
    its row before `unsent`, and none that was not found to be due has it before `pending`.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.held: Entries = {}
        self.end = 0  # the number of the row after the last
        self.pending = 0
        self.unsent = 0
        self._starts: list[int] = []  # the number of each block's first row

    @property
    def row_count(self) -> int:
        return self.end - self._starts[0] if self._starts else 0

    @property
    def held_count(self) -> int:
        return count_entries(self.held)

    @property
    def last_time(self) -> int:
        return int(self.blocks[-1].times[-1]) if self.blocks else -1

    def append(self, blocks: Iterator[Block], entries: Entries) -> None:
        """Add rows that come after all others, and hold their entries."""
        for block in blocks:
            last = self.blocks[-1] if self.blocks else None
            if last is not None and len(last) + len(block) <= BLOCK_ROWS:
                (self.blocks[-1],) = merged_blocks([last, block])
            else:
                self.blocks.append(block)
                self._starts.append(self.end)
            self.end += len(block)
        merge_entries(self.held, entries)

    def pop_through(self, time: int) -> tuple[Block | None, Entries]:
        """Take away the first rows, of one block at most, up to a time: those that hold, and their entries."""
        block, start = self.blocks[0], self._starts[0]
        count = int(np.searchsorted(block.times, time, side="right"))
        if count == len(block):
            del self.blocks[0], self._starts[0]
        else:
            self.blocks[0] = block.part(slice(count, None))
            self._starts[0] = start + count
        part = block.part(slice(0, count))
        mask, entries = part.find(self.held)
        if not entries:
            return None, {}
        if not mask.all():
            part = Block(part.times[mask], part.ledger_ids, part.slots[mask], part.entry_ids[mask])
        remove_entries(self.held, entries)
        return part, entries

    @property
    def begin_row(self) -> int:
        """The number of the first row."""
        return self._starts[0] if self._starts else self.end

    def time_at(self, row: int) -> int:
        """The time of a row, or of the first one if that row is gone."""
        row = max(row, self.begin_row)
        if row >= self.end:
            return NEVER
        at = bisect_right(self._starts, row) - 1
        return int(self.blocks[at].times[row - self._starts[at]])

    @property
    def first_timed(self) -> int:
        """The number of the first row with a time that is not 0."""
        for start, block in zip(self._starts, self.blocks, strict=True):
            if block.times[-1]:
                return start + int(np.searchsorted(block.times, 0, side="right"))
        return self.end

    def untimed(self) -> Entries:
        """Return the entries held under a time of 0."""
        entries: Entries = {}
        for block in self.blocks:
            count = int(np.searchsorted(block.times, 0, side="right"))
            merge_entries(entries, common_entries(block.part(slice(0, count)).entries(), self.held))
            if count < len(block):
                break
        return entries

    def times_of(self, ledger_id: int, held: BitMap) -> dict[int, int]:
        """The times of entries of one ledger, all of them held. Looks through blocks, which are in order of time."""
        ids, times = ids_of(held), dict[int, int]()
        for block in self.blocks:
            slot = int(np.searchsorted(block.ledger_ids, ledger_id))
            if slot == len(block.ledger_ids) or block.ledger_ids[slot] != ledger_id:
                continue
            rows = np.flatnonzero((block.entry_ids >= ids[0]) & (block.entry_ids <= ids[-1]))
            rows = rows[block.slots[rows] == slot]
            rows = rows[ids[np.searchsorted(ids, block.entry_ids[rows])] == block.entry_ids[rows]]
            times.update(zip(block.entry_ids[rows].tolist(), block.times[rows].tolist(), strict=True))
            if len(times) == len(ids):  # TIMERUN-1
                break
        return times

    def first_waiting(self, row: int, waits: Entries) -> int:
        """The number of the first row, from `row` on, whose entry is held and waits."""
        row = max(row, self.begin_row)
        while row < self.end:
            at = bisect_right(self._starts, row) - 1
            block, offset = self.blocks[at], row - self._starts[at]
            if self._is_waiting(block, offset, waits):
                return row
            rest = block.part(slice(offset, None))
            mask, hits = rest.find(common_entries(self.held, waits))
            if hits:
                return row + int(mask.argmax())
            row += len(rest)
        return self.end

    def find_due(self, now: int, waits: Entries, rows_max: int) -> tuple[Entries, int]:
        """Find due entries among the next `rows_max` rows or a few more; returns them and the number of rows read."""
        first = max(self.pending, self.begin_row)
        if self.last_time <= now:
            self.pending = self.end  # no row needs to be looked at
            return common_entries(self.held, waits), 0
        due: Entries = {}
        row = first
        while row - first < rows_max and self.time_at(row) <= now:
            at = bisect_right(self._starts, row) - 1
            rest = self.blocks[at].part(slice(row - self._starts[at], None))
            part = rest.part(slice(0, int(np.searchsorted(rest.times, now, side="right"))))
            merge_entries(due, common_entries(common_entries(part.entries(), self.held), waits))
            row += len(part)
        self.pending = row
        return due, row - first

    def _is_waiting(self, block: Block, offset: int, waits: Entries) -> bool:
        ledger_id = int(block.ledger_ids[block.slots[offset]])
        entry_id = int(block.entry_ids[offset])
        return entry_id in self.held.get(ledger_id, ()) and entry_id in waits.get(ledger_id, ())
