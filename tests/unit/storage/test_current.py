"""Times of the index that may still be those of the entries, over several ledgers at once."""

from __future__ import annotations

import numpy as np
from pyroaring import BitMap

from broker.storage.amendments import NONE
from tests.unit.storage.test_log import append, make_log


def test_cancelled_moved_and_gone_entries_are_not_current():
    log = make_log()
    for ledger_id in (1, 2, 3, 4):
        append(log, ledger_id, 4, due_ms=50)
    amendments = NONE.cancel(BitMap([1])).move(
        np.array([2, 3], dtype=np.uint32), np.array([60, 50], dtype=np.int64), 9
    )
    log.amendments.put(2, amendments)
    log.drop(3)
    entries = [(4, 0, 50), (2, 3, 50), (3, 0, 50), (2, 1, 50), (1, 3, 50), (2, 2, 50), (2, 2, 60), (2, 0, 50)]
    ledger_ids, entry_ids, times = np.array(entries, dtype=np.int64).T
    current = log.is_current(ledger_ids, entry_ids.astype(np.uint32), times)
    assert current.tolist() == [True, True, False, False, True, False, True, True]
    nothing = np.empty(0, dtype=np.int64)
    assert log.is_current(nothing, nothing.astype(np.uint32), nothing).tolist() == []


def test_the_record_of_the_last_move_is_told():
    moved = NONE.move(np.array([2, 5], dtype=np.uint32), np.array([7, 7], dtype=np.int64), 11)
    moved = moved.move(np.array([5], dtype=np.uint32), np.array([8], dtype=np.int64), 12)
    assert moved.lsns_of(np.array([5, 3, 2], dtype=np.uint32)).tolist() == [12, 0, 11]
    assert NONE.lsns_of(np.array([5], dtype=np.uint32)).tolist() == [0]
