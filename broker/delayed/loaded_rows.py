"""Entries due soon, with their exact times: sorted columns in blocks.

A block is three columns sorted by (deliver_at_ms, ledger_id, entry_id); blocks follow one another in that
order. What is added waits unsorted, and the next look sorts all of it at once and merges it into the blocks
it falls into. One sorted array would be simpler, but an entry that arrives while a million are due would
copy the million.

Invariants:
  LOADED-1  Blocks are never empty; the last row of each lies before the first row of the next.
  LOADED-2  No (deliver_at_ms, position) is held twice once `_settle` ran, and every public look runs it first.
  LOADED-3  The arrays of a block are never written: a chunk handed out may be a part of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from broker.delayed.due_rows import (
    NO_DUE_ROWS,
    ROW_BYTES,
    DueRows,
    Key,
    concatenate,
    count_before,
    doubles_in,
    sort_unique,
)
from broker.model import Int64Column, is_among

BLOCK_ROWS = 65_536


class LoadedRows:
    """Entries that a tracker can hand out without reading anything."""

    def __init__(self) -> None:
        self._blocks: list[DueRows] = []
        self._added: list[DueRows] = []
        self._count = 0  # of the blocks' rows
        self._doubles: list[DueRows] = []  # dropped since they were last asked for

    def add(self, columns: DueRows) -> None:
        """Keep entries in any order of time; the arrays become ours."""
        if len(columns):
            self._added.append(columns)

    def take(self, now_ms: int, limit: int) -> DueRows | None:
        """Remove at most `limit` entries with deliver_at_ms <= now_ms, the first in order."""
        self._settle()
        parts: list[DueRows] = []
        wanted, spent = limit, 0
        for block in self._blocks:
            due = min(wanted, int(np.searchsorted(block.deliver_at_ms, now_ms, side="right")))
            if due:
                parts.append(block.part(slice(0, due)))
                wanted -= due
            if due < len(block):
                break
            spent += 1
        if not parts:
            return None
        if len(parts) > spent:  # the last part leaves a rest behind
            self._blocks[spent] = self._blocks[spent].part(slice(len(parts[-1]), None))
            # A copy, or a small chunk in a slow replay queue would keep the whole block alive.
            parts[-1] = parts[-1].copy()
        del self._blocks[:spent]
        self._count -= limit - wanted
        return _shared(concatenate(parts))

    def first_due_ms(self) -> int | None:
        self._settle()
        return int(self._blocks[0].deliver_at_ms[0]) if self._blocks else None

    def last_due_ms(self) -> int | None:
        self._settle()
        return int(self._blocks[-1].deliver_at_ms[-1]) if self._blocks else None

    def last_key(self) -> Key | None:
        self._settle()
        return self._blocks[-1].key(-1) if self._blocks else None

    def count(self) -> int:
        self._settle()
        return self._count

    def contains(self, ledger_id: int, entry_id: int) -> bool:
        self._settle()
        return any(
            bool(np.any((block.ledger_ids == ledger_id) & (block.entry_ids == entry_id)))
            for block in self._blocks
        )

    def times_between(self, start_ms: int, end_ms: int) -> Int64Column:
        """The due times in [start_ms, end_ms), rising."""
        self._settle()
        parts = [np.empty(0, dtype=np.int64)]
        for block in self._blocks:
            first, end = np.searchsorted(block.deliver_at_ms, (start_ms, end_ms))
            parts.append(block.deliver_at_ms[first:end])
        return np.concatenate(parts)

    def rows_between(self, start: Key, end: Key) -> DueRows:
        """The entries with start <= key < end, in order."""
        return concatenate([NO_DUE_ROWS, *self.blocks_between(start, end)])

    def blocks_between(self, start: Key, end: Key) -> list[DueRows]:
        """As `rows_between`, in parts that are not copied."""
        self._settle()
        parts = []
        for block in self._blocks:
            first, last = count_before(block, start), count_before(block, end)
            if last > first:
                parts.append(block.part(slice(first, last)))
        return parts

    def blocks(self) -> list[DueRows]:
        """All entries, in order."""
        self._settle()
        return list(self._blocks)

    def discard_ledger(self, ledger_id: int) -> None:
        self._settle()
        kept = [block.part(block.ledger_ids != ledger_id) for block in self._blocks]
        self._blocks = [block for block in kept if len(block)]
        self._count = sum(len(block) for block in self._blocks)

    def remove(self, rows: DueRows) -> None:
        """Forget entries under just these times, as far as they are there."""
        self._settle()
        if not len(rows):
            return
        first_ms, last_ms = int(rows.deliver_at_ms.min()), int(rows.deliver_at_ms.max())
        keys = {rows.key(row) for row in range(len(rows))}
        for index, block in enumerate(self._blocks):
            if block.key(-1)[0] >= first_ms and block.key(0)[0] <= last_ms:
                is_like = is_among(block.entry_ids, rows.entry_ids)
                is_like &= is_among(block.deliver_at_ms, rows.deliver_at_ms)
                gone = [row for row in np.flatnonzero(is_like).tolist() if block.key(row) in keys]
                self._blocks[index] = block.part(np.delete(np.arange(len(block)), gone))
        self._blocks = [block for block in self._blocks if len(block)]
        self._count = sum(map(len, self._blocks))

    def clear(self) -> None:
        self._blocks, self._added, self._count = [], [], 0

    def memory_bytes(self) -> int:
        return ROW_BYTES * (self._count + sum(len(columns) for columns in self._added))

    def _settle(self) -> None:
        """Sort what was added and merge it into the blocks it falls into."""
        if not self._added:
            return
        everything = [*self._blocks, *self._added]
        added = sort_unique(concatenate(self._added))
        self._added = []
        blocks: list[DueRows] = []
        start = 0
        for index, block in enumerate(self._blocks):
            is_last = index + 1 == len(self._blocks)
            end = len(added) if is_last else count_before(added, self._blocks[index + 1].key(0))
            blocks.extend(_merge(block, added.part(slice(start, end))) if end > start else (block,))
            start = end
        if not self._blocks:
            blocks.extend(_split(added))
        self._blocks = blocks
        self._count = sum(len(block) for block in blocks)
        if self._count < sum(map(len, everything)):
            self._doubles.append(doubles_in(concatenate(everything)))

    def take_doubles(self) -> list[DueRows]:
        """The rows that were dropped since the last call because they were there."""
        doubles, self._doubles = self._doubles, []
        return doubles


def _merge(block: DueRows, added: DueRows) -> Iterable[DueRows]:
    return _split(sort_unique(concatenate((block, added))))


def _split(columns: DueRows) -> Iterable[DueRows]:
    if len(columns) <= 2 * BLOCK_ROWS:
        return (columns,)
    # Copies, so that each block's memory goes when the block does.
    return (columns.part(slice(row, row + BLOCK_ROWS)).copy() for row in range(0, len(columns), BLOCK_ROWS))


def _shared(rows: DueRows) -> DueRows:
    """Rows that every subscription of the topic refers to."""
    for column in (rows.deliver_at_ms, rows.ledger_ids, rows.entry_ids):
        column.flags.writeable = False
    return rows
