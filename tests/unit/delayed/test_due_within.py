"""Counts of what comes due within some durations, of an index in memory."""

from __future__ import annotations

import numpy as np
import pytest

from broker.delayed.due_within import due_within
from broker.delayed.memory_tracker import MemoryTracker
from broker.delayed.tracker import ENTRY_AFTER_ALL, Frontier

NOW = 1_700_000_000_000
MINUTE = 60_000
DURATIONS = (MINUTE, 10 * MINUTE, 60 * MINUTE)


@pytest.mark.parametrize(
    ("delays", "counts"),
    [
        ([], (0, 0, 0)),
        ([90 * MINUTE], (0, 0, 0)),
        ([1_000, 2_000, 3_000], (3, 3, 3)),
        ([5 * MINUTE, 6 * MINUTE], (0, 2, 2)),
        ([1_000, 5 * MINUTE, 30 * MINUTE, 90 * MINUTE], (1, 2, 3)),
        ([10 * MINUTE - 2_000, 10 * MINUTE + 2_000, 90 * MINUTE], (0, 1, 2)),
    ],
)
def test_due_within(delays, counts):
    async def nothing(ledger_id, entry_ids):
        raise AssertionError("nothing is read to count")

    tracker = MemoryTracker(nothing, Frontier(NOW, *ENTRY_AFTER_ALL))
    if delays:
        times = NOW + np.array(delays, dtype=np.int64)
        tracker.add(1, np.arange(len(times), dtype=np.uint32), times)
    assert tuple(due_within(tracker, NOW, DURATIONS)) == counts
