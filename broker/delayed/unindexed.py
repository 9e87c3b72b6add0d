"""Pending entries that the delayed index does not have yet: rows that were appended, entries that were moved. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from broker.model import DueSpan, Int64Column, UInt32Column, is_among
from broker.storage.changes import Changed
from broker.storage.key_filter import BoolColumn

NEVER_MS = 1 << 62


class AppendedRows:
    """Delayed rows that were appended since the start and that the feed has not passed: a count, and a range of
    times in which they lie."""

    def __init__(self) -> None:
        self.count = 0
        self._earliest_ms = NEVER_MS
        self._latest_ms = 0

    def add(self, due: DueSpan) -> None:
        """Rows were appended."""
        self.count += due.row_count
        self.may_lie_at(due)

    def may_lie_at(self, due: DueSpan) -> None:
        """Rows that are counted have other times by now."""
        if due.row_count:
            self._earliest_ms = min(self._earliest_ms, due.first_ms)
            self._latest_ms = max(self._latest_ms, due.last_ms)

    def all_passed(self) -> None:
        """The feed has come to the end of the log."""
        self._earliest_ms, self._latest_ms = NEVER_MS, 0

    def is_due_by(self, time_ms: int) -> bool:
        """Return whether one of them may be due before a time."""
        return self._earliest_ms < time_ms

    @property
    def first_due_ms(self) -> int | None:
        return self._earliest_ms if self.count else None

    @property
    def last_due_ms(self) -> int | None:
        return self._latest_ms if self.count else None


class LedgerMove(NamedTuple):
    """Entries of a ledger under their new times, as a record has moved them."""

    ledger_id: int
    changed: Changed
    lsn: int


class MovedEntries:
    """Entries that were moved and wait to be added under their new times, in the order of the records."""

    def __init__(self) -> None:
        self.count = 0
        self.added_lsn = 0
        """Moves of records up to it were added."""
        self._moves: deque[LedgerMove] = deque()

    @property
    def last_lsn(self) -> int:
        """Return the lsn of the last record that waits; 0 if none does."""
        return self._moves[-1].lsn if self._moves else 0

    def append(self, move: LedgerMove) -> None:
        """Also if it names no entry: of its record nothing is missing once it is taken."""
        self._moves.append(move)
        self.count += len(move.changed.entry_ids)

    def take(self, rows_max: int) -> Iterator[LedgerMove]:
        """Take about so many entries; a record as a whole, as `added_lsn` says that all of it was added."""
        rows = 0
        while self._moves and (rows < rows_max or self._moves[0].lsn == self.added_lsn):
            move = self._moves.popleft()
            self.added_lsn = max(self.added_lsn, move.lsn)
            rows += len(move.changed.entry_ids)
            self.count -= len(move.changed.entry_ids)
            yield move

    def take_back(self, ledger_id: int, entry_ids: UInt32Column) -> BoolColumn:
        """Entries were moved, and are changed again before they were added: they wait no more to be added.

        For each of them whether it did.
        """
        waited = np.zeros(len(entry_ids), dtype=np.bool_)
        for index, (of, moved, lsn) in enumerate(self._moves if self.count else ()):
            if of != ledger_id:
                continue
            taken = is_among(moved.entry_ids, entry_ids)
            if taken.any():
                assert moved.new_ms is not None
                kept = ~taken
                rest = Changed(moved.entry_ids[kept], moved.old_ms[kept], moved.new_ms[kept])
                self._moves[index] = LedgerMove(of, rest, lsn)
                self.count -= int(taken.sum())
                waited |= is_among(entry_ids, moved.entry_ids[taken])
        return waited

    def clear(self) -> None:
        """Nothing of this needs to be added any more: the feed will meet it."""
        self.added_lsn = max(self.added_lsn, self.last_lsn)
        self._moves.clear()
        self.count = 0

    @property
    def first_due_ms(self) -> int | None:
        return min((int(times.min()) for times in self._times()), default=None)

    @property
    def last_due_ms(self) -> int | None:
        return max((int(times.max()) for times in self._times()), default=None)

    def _times(self) -> Iterator[Int64Column]:
        for _, moved, _ in self._moves:
            if len(moved.entry_ids):
                assert moved.new_ms is not None
                yield moved.new_ms
