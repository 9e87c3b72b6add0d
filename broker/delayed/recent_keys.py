"""Schedule keys that are in no run yet: in memory only, in the order in which they came.

Looking for many keys that are not there is what has to be fast: a filter tells. Which rows have a hash is found by
looking at all of them. The hashes of a batch in flight are in the filter from its submission on; its rows come later.

Invariants:
  RECENT-1  `rows` returns every row that was added, also those that were discarded: a seal looks at each itself.
  RECENT-2  After a freeze nothing is added, so a seal may work on `rows` in a thread.
  RECENT-3  `maybe` is True for every row's hash, and for every hash in flight.
"""

from __future__ import annotations

import sys
from array import array

import numpy as np

from broker.delayed.keys_in_flight import KeysInFlight
from broker.model import Int64Column, UInt32Column, UInt64Column, distinct_values, is_among
from broker.storage.key_filter import BoolColumn, OpenFilter, Probe
from broker.storage.key_run import NO_KEYS, KeyColumns

_CAPACITY_MIN, _CAPACITY_GROWTH = 4, 4  # of the filter
_ADDED_AT_ONCE = 2_048  # to it


class RecentKeys:
    """See the module's description; frozen by whoever stops adding to it."""

    def __init__(self, in_flight: KeysInFlight) -> None:
        self._in_flight = in_flight
        self._hashes, self._ledger_ids, self._entry_ids = array("Q"), array("q"), array("I")
        self._is_discarded = bytearray()
        self._filter_anew(0)

    def __len__(self) -> int:
        return len(self._hashes)

    def expect(self, wanted: Probe) -> None:
        """The hashes of a batch that is submitted now. It may have fewer rows than hashes: those of rows that never
        came are forgotten once they are the greater part."""
        count = len(wanted.hashes)
        is_mostly_gone = self._noted > 2 * (len(self) + len(self._in_flight))
        if is_mostly_gone or self._noted + count > self._filter.capacity:
            self._filter_anew(count)
        self._noted += count
        self._filter.add(wanted)

    def add(
        self,
        hashes: UInt64Column,
        ledger_ids: Int64Column,
        entry_ids: UInt32Column,
        *,
        is_expected: bool = False,
    ) -> None:
        """`is_expected`: they are of a batch in flight."""
        if not len(hashes):
            return
        self._hashes.frombytes(np.ascontiguousarray(hashes, dtype=np.uint64).tobytes())
        self._ledger_ids.frombytes(np.ascontiguousarray(ledger_ids, dtype=np.int64).tobytes())
        self._entry_ids.frombytes(np.ascontiguousarray(entry_ids, dtype=np.uint32).tobytes())
        self._is_discarded += bytes(len(hashes))
        if is_expected:  # they have been noted (RECENT-3)
            return
        if self._noted + len(hashes) > self._filter.capacity:
            self._filter_anew(0)
        else:
            self._note(hashes)

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
        columns = self._columns().part(rows)
        for ledger_id in distinct_values(ledger_ids).tolist():
            of_ledger = entry_ids[ledger_ids == ledger_id]
            is_gone = (columns.ledger_ids == ledger_id) & is_among(columns.entry_ids, of_ledger)
            np.frombuffer(self._is_discarded, dtype=np.bool_)[rows[is_gone]] = True

    def maybe(self, wanted: Probe) -> BoolColumn:
        """For each hash whether a row may have it, discarded or not, or a batch in flight (RECENT-3)."""
        return self._filter.maybe(wanted)

    def find(self, hashes: UInt64Column) -> KeyColumns:
        """The rows with one of some distinct hashes that were not discarded."""
        rows = self._rows_of(hashes)
        return self._columns().part(rows) if len(rows) else NO_KEYS

    def rows(self) -> KeyColumns:
        """Copies of all rows (RECENT-1)."""
        return KeyColumns(
            np.array(self._hashes, dtype=np.uint64),
            np.array(self._ledger_ids, dtype=np.int64),
            np.array(self._entry_ids, dtype=np.uint32),
        )

    def _columns(self) -> KeyColumns:
        """All rows as they lie in memory: nothing can be added while a view of them is kept."""
        return KeyColumns(
            np.frombuffer(self._hashes, dtype=np.uint64),
            np.frombuffer(self._ledger_ids, dtype=np.int64),
            np.frombuffer(self._entry_ids, dtype=np.uint32),
        )

    def memory_bytes(self) -> int:
        columns = (self._hashes, self._ledger_ids, self._entry_ids, self._is_discarded)
        return sum(map(sys.getsizeof, columns)) + self._filter.memory_bytes

    def _note(self, hashes: UInt64Column) -> None:
        self._noted += len(hashes)
        for at in range(0, len(hashes), _ADDED_AT_ONCE):
            self._filter.add(Probe(hashes[at : at + _ADDED_AT_ONCE]))

    def _filter_anew(self, room: int) -> None:
        """Make the filter of what there is, with room for more."""
        known = np.concatenate((self._in_flight.hashes(), np.array(self._hashes, dtype=np.uint64)))
        capacity = _CAPACITY_MIN
        while capacity < len(known) + room:
            capacity *= _CAPACITY_GROWTH
        self._filter, self._noted = OpenFilter(capacity), 0
        self._note(known)

    def _rows_of(self, hashes: UInt64Column) -> Int64Column:
        asked = hashes[self.maybe(Probe(hashes))]
        if not len(asked) or not len(self):  # nearly always so
            return np.empty(0, dtype=np.int64)
        rows = np.flatnonzero(is_among(self._columns().hashes, asked))
        return rows[~np.frombuffer(self._is_discarded, dtype=np.bool_)[rows]]
