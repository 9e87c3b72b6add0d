"""Schedule keys that are in no run yet: in memory only, in the order in which they came.

A dict leads from a hash to the last row that has it; the few rows whose hash another row had before lead on to that
one. So a batch of new keys costs one look and one update of a dict, and the rows of one hash come newest first.

Invariants:
  V1  `rows` returns every row that was added, also those that were discarded: a seal looks at each itself.
  V2  After a freeze nothing is added, so a seal may work on `rows` in a thread.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator

import numpy as np

from broker.model import Int64Column, Position, UInt32Column, UInt64Column
from broker.storage.key_filter import BoolColumn
from broker.storage.key_run import KeyColumns

_NONE = -1
_NUMBER_BYTES = 32  # of one Python number; hashes are larger ones, rows smaller ones


class RecentKeys:
    """See the module's description; frozen by whoever stops adding to it."""

    def __init__(self) -> None:
        self._hashes, self._ledger_ids, self._entry_ids = array("Q"), array("q"), array("I")
        self._last_row: dict[int, int] = {}
        self._row_before: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, hashes: UInt64Column, ledger_ids: Int64Column, entry_ids: UInt32Column) -> None:
        first = len(self._hashes)
        self._hashes.frombytes(np.ascontiguousarray(hashes, dtype=np.uint64).tobytes())
        self._ledger_ids.frombytes(np.ascontiguousarray(ledger_ids, dtype=np.int64).tobytes())
        self._entry_ids.frombytes(np.ascontiguousarray(entry_ids, dtype=np.uint32).tobytes())
        values = hashes.tolist()
        known, count = self._last_row, len(self._last_row)
        if known.keys().isdisjoint(values):
            known.update(zip(values, range(first, first + len(values)), strict=True))
            if len(known) == count + len(values):
                return
            for value in set(values):  # one is there twice
                del known[value]
        for row, value in enumerate(values, first):
            before = self._last_row.get(value, _NONE)
            if before != _NONE:
                self._row_before[row] = before
            self._last_row[value] = row

    def discard(self, hashes: UInt64Column, ledger_ids: Int64Column, entry_ids: UInt32Column) -> None:
        """Forget some entries, where they are known. A key that replaces its own message again and again would
        otherwise be looked for among all of them."""
        entries = zip(hashes.tolist(), ledger_ids.tolist(), entry_ids.tolist(), strict=True)
        for value, ledger_id, entry_id in entries:
            later = _NONE
            for row in self._rows_of(value):
                if self._ledger_ids[row] == ledger_id and self._entry_ids[row] == entry_id:
                    self._unlink(value, row, later)
                    break
                later = row

    def maybe(self, hashes: UInt64Column) -> BoolColumn:
        """For each hash whether a row has it: exact."""
        values = hashes.tolist()
        found = self._last_row
        if found.keys().isdisjoint(values):
            return np.zeros(len(values), dtype=np.bool_)
        return np.fromiter((value in found for value in values), np.bool_, len(values))

    def positions(self, value: int) -> list[Position]:
        """The entries with a hash, the last one added first."""
        return [Position(self._ledger_ids[row], self._entry_ids[row]) for row in self._rows_of(value)]

    def rows(self) -> KeyColumns:
        """Copies of all rows (V1)."""
        return KeyColumns(
            np.array(self._hashes, dtype=np.uint64),
            np.array(self._ledger_ids, dtype=np.int64),
            np.array(self._entry_ids, dtype=np.uint32),
        )

    def memory_bytes(self) -> int:
        columns = sum(map(sys.getsizeof, (self._hashes, self._ledger_ids, self._entry_ids)))
        numbers = 2 * _NUMBER_BYTES * (len(self._last_row) + len(self._row_before))
        return columns + sys.getsizeof(self._last_row) + sys.getsizeof(self._row_before) + numbers

    def _rows_of(self, value: int) -> Iterator[int]:
        row = self._last_row.get(value, _NONE)
        while row != _NONE:
            yield row
            row = self._row_before.get(row, _NONE)

    def _unlink(self, value: int, row: int, later: int) -> None:
        """Take a row out of those of a hash; `later` is the one that leads to it, if any does."""
        before = self._row_before.pop(row, _NONE)
        if later == _NONE and before == _NONE:
            del self._last_row[value]
        elif later == _NONE:
            self._last_row[value] = before
        elif before == _NONE:
            del self._row_before[later]
        else:
            self._row_before[later] = before
