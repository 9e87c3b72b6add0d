"""Schedule keys that are in no run yet: in memory only, in the order in which they came.

Looking for many keys that are not there is what has to be fast (`SeenHashes`). Which rows have a hash is found by
looking at all of them.

Invariants:
  RECENT-1  `rows` returns every row that was added, also those that were discarded: a seal looks at each itself.
  RECENT-2  After a freeze nothing is added, so a seal may work on `rows` in a thread.
"""

from __future__ import annotations

import sys
from array import array

import numpy as np

from broker.delayed.seen_hashes import SeenHashes
from broker.model import Int64Column, UInt32Column, UInt64Column
from broker.storage.key_filter import BoolColumn
from broker.storage.key_run import NO_KEYS, KeyColumns

_FEW_HASHES = 16
"""Up to so many hashes are looked for one by one."""


class RecentKeys:
    """See the module's description; frozen by whoever stops adding to it."""

    def __init__(self) -> None:
        self._hashes, self._ledger_ids, self._entry_ids = array("Q"), array("q"), array("I")
        self._is_discarded = bytearray()
        self._seen = SeenHashes()

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, hashes: UInt64Column, ledger_ids: Int64Column, entry_ids: UInt32Column) -> None:
        if not len(hashes):
            return
        self._hashes.frombytes(np.ascontiguousarray(hashes, dtype=np.uint64).tobytes())
        self._ledger_ids.frombytes(np.ascontiguousarray(ledger_ids, dtype=np.int64).tobytes())
        self._entry_ids.frombytes(np.ascontiguousarray(entry_ids, dtype=np.uint32).tobytes())
        self._is_discarded += bytes(len(hashes))
        self._seen.add(hashes)

    def prepend(self, older: RecentKeys) -> None:
        """Take back the rows of an older part that could not be sealed; rows have no order here."""
        rows = older.rows()
        self.add(rows.hashes, rows.ledger_ids, rows.entry_ids)

    def discard(self, hashes: UInt64Column, ledger_ids: Int64Column, entry_ids: UInt32Column) -> None:
        """Forget some entries, where they are known. A key that replaces its own message again and again would
        otherwise be looked for among all of them."""
        rows = self._rows_of(hashes)
        if not len(rows):
            return
        columns = self.rows().part(rows)
        for ledger_id in np.unique(ledger_ids).tolist():
            of_ledger = entry_ids[ledger_ids == ledger_id]
            is_gone = (columns.ledger_ids == ledger_id) & np.isin(columns.entry_ids, of_ledger)
            np.frombuffer(self._is_discarded, dtype=np.bool_)[rows[is_gone]] = True

    def maybe(self, hashes: UInt64Column) -> BoolColumn:
        """For each hash whether a row has it, discarded or not."""
        return self._seen.has(hashes)

    def find(self, hashes: UInt64Column) -> KeyColumns:
        """The rows with one of some distinct hashes that were not discarded."""
        rows = self._rows_of(hashes)
        return self.rows().part(rows) if len(rows) else NO_KEYS

    def rows(self) -> KeyColumns:
        """Copies of all rows (RECENT-1)."""
        return KeyColumns(
            np.array(self._hashes, dtype=np.uint64),
            np.array(self._ledger_ids, dtype=np.int64),
            np.array(self._entry_ids, dtype=np.uint32),
        )

    def memory_bytes(self) -> int:
        columns = (self._hashes, self._ledger_ids, self._entry_ids, self._is_discarded)
        return sum(map(sys.getsizeof, columns)) + self._seen.memory_bytes()

    def _rows_of(self, hashes: UInt64Column) -> Int64Column:
        asked = np.sort(hashes[self.maybe(hashes)])
        if not len(asked):  # nearly always so
            return np.empty(0, dtype=np.int64)
        column = np.array(self._hashes, dtype=np.uint64)
        if len(asked) <= _FEW_HASHES:
            has_hash = np.zeros(len(column), dtype=np.bool_)
            for value in asked:
                has_hash |= column == value
        else:
            has_hash = asked[np.minimum(np.searchsorted(asked, column), len(asked) - 1)] == column
        return np.flatnonzero(has_hash & ~np.frombuffer(bytes(self._is_discarded), dtype=np.bool_))
