"""Rows indexed since the last seal: columns in blocks, unsorted, in memory only.

The tracker tells each row's side of `loaded_end`: rows before it are *loaded* (they are in the loaded part, or
were taken), the others *wait* here. Rows stay here until they are sealed, whichever side they are on, because
a snapshot must hold everything after the frontier.

Invariants:
  MUTABLE-1  Rows below the fill of a block are never written again, so a seal reads them without a lock.
  MUTABLE-2  `waiting` is the number of rows that are not loaded; `first_waiting_ms` is the least of their times.
  MUTABLE-3  After a freeze nothing is appended; loads change which rows wait, never an array.
"""

from __future__ import annotations

import numpy as np

from broker.delayed.due_rows import ROW_BYTES, DueRows, Key, concatenate, rows_before
from broker.model import Array, Int64Column, UInt32Column

BLOCK_ROWS = 8_192
"""A block's rows at most. The first ones are smaller: most topics hold few entries, and there may be many topics."""

_FIRST_BLOCK_ROWS = 64

NEVER_MS = 1 << 62
"""Later than every time."""


class MutableBucket:
    """See the module's description; frozen by whoever stops adding to it."""

    def __init__(self) -> None:
        self.count = 0
        self.waiting = 0
        self.first_waiting_ms = NEVER_MS
        self.last_ms = -1  # the greatest time of all rows
        self.ledger_ids: set[int] = set()
        self._blocks: list[DueRows] = []
        self._fill = 0  # rows used in the last block

    def __len__(self) -> int:
        return self.count

    def append(
        self, ledger_id: int, entry_ids: UInt32Column, times: Int64Column, waiting: Array | None
    ) -> None:
        """Copy rows of one ledger; `waiting` says which of them are not loaded, None that none is."""
        count = len(times)
        if not count:
            return
        if waiting is None:
            self.waiting += count
            self.first_waiting_ms = min(self.first_waiting_ms, int(times.min()))
        else:
            waiting_times = times[waiting]
            self.waiting += len(waiting_times)
            if len(waiting_times):
                self.first_waiting_ms = min(self.first_waiting_ms, int(waiting_times.min()))
        self.last_ms = max(self.last_ms, int(times.max()))
        self.ledger_ids.add(ledger_id)
        self.count += count
        row = 0
        while row < count:
            block = self._open_block()
            rows = min(count - row, len(block) - self._fill)
            into = slice(self._fill, self._fill + rows)
            block.deliver_at_ms[into] = times[row : row + rows]
            block.ledger_ids[into] = ledger_id
            block.entry_ids[into] = entry_ids[row : row + rows]
            self._fill += rows
            row += rows

    def blocks(self) -> list[DueRows]:
        """All rows in the order of arrival, in parts of at most BLOCK_ROWS. They share memory with the bucket."""
        if not self._blocks:
            return []
        return [*self._blocks[:-1], self._blocks[-1].part(slice(0, self._fill))]

    def waiting_between(self, start: Key, end: Key) -> DueRows:
        """Copies of the rows with start <= key < end, in the order of arrival."""
        return concatenate([_no_rows(), *self.blocks_between(start, end)])

    def blocks_between(self, start: Key, end: Key) -> list[DueRows]:
        """As `waiting_between`, in the parts of `blocks`; none is empty, and one that is there whole is not copied."""
        parts = []
        if self.waiting and self.first_waiting_ms <= end[0]:
            for block in self.blocks():
                is_between = rows_before(block, end) & ~rows_before(block, start)
                if is_between.all():
                    parts.append(block)
                elif is_between.any():
                    parts.append(block.part(np.flatnonzero(is_between)))
        return parts

    def loaded(self, count: int, end: Key) -> None:
        """Of the waiting rows, `count` lie before `end` and are loaded now."""
        if not count:
            return
        self.waiting -= count
        self.first_waiting_ms = NEVER_MS
        if self.waiting:
            for block in self.blocks():
                times = block.deliver_at_ms[~rows_before(block, end)]
                if len(times):
                    self.first_waiting_ms = min(self.first_waiting_ms, int(times.min()))

    def prepend(self, older: MutableBucket) -> None:
        """Take back the rows of a bucket that was frozen and could not be sealed; its arrays become ours."""
        if self._blocks:
            self._blocks = [*older.blocks(), *self._blocks]
        else:
            self._blocks, self._fill = older.blocks(), len(older.blocks()[-1]) if older.count else 0
        self.count += older.count
        self.waiting += older.waiting
        self.first_waiting_ms = min(self.first_waiting_ms, older.first_waiting_ms)
        self.last_ms = max(self.last_ms, older.last_ms)
        self.ledger_ids |= older.ledger_ids

    def holds_waiting(self, ledger_id: int, entry_id: int, loaded_end: Key) -> bool:
        return ledger_id in self.ledger_ids and any(
            bool(np.any(_rows_of(block, ledger_id, entry_id) & ~rows_before(block, loaded_end)))
            for block in self.blocks()
        )

    def waiting_times(self, start_ms: int, end_ms: int, loaded_end: Key) -> Int64Column:
        """The times in [start_ms, end_ms) of the rows that are not loaded, in any order."""
        parts = [np.empty(0, dtype=np.int64)]
        for block in self.blocks():
            times = block.deliver_at_ms
            parts.append(times[(times >= start_ms) & (times < end_ms) & ~rows_before(block, loaded_end)])
        return np.concatenate(parts)

    def count_ledgers_from(self, first: int) -> int:
        """Return how many ledgers are `first` or later: a move adds to an older ledger, and must not hurry a seal."""
        return sum(ledger_id >= first for ledger_id in self.ledger_ids)

    def memory_bytes(self) -> int:
        return ROW_BYTES * sum(len(block) for block in self._blocks)

    def _open_block(self) -> DueRows:
        """The block that has room for a row."""
        if not self._blocks or self._fill == len(self._blocks[-1]):
            rows = _FIRST_BLOCK_ROWS if not self._blocks else min(4 * len(self._blocks[-1]), BLOCK_ROWS)
            self._blocks.append(
                DueRows(
                    np.empty(rows, dtype=np.int64),
                    np.empty(rows, dtype=np.int64),
                    np.empty(rows, dtype=np.uint32),
                )
            )
            self._fill = 0
        return self._blocks[-1]


def _rows_of(columns: DueRows, ledger_id: int, entry_id: int) -> Array:
    is_entry: Array = (columns.ledger_ids == ledger_id) & (columns.entry_ids == entry_id)
    return is_entry


def _no_rows() -> DueRows:
    return DueRows(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint32))
