"""Facts of a ledger's rows besides faults: how much is live, and when that comes due. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from broker.delayed.check.findings import int64_column
from broker.delayed.check.ledgers import LedgerRows, Mask
from broker.model import Int64Column, ids_of

DAY_MS = 86_400_000
_DAYS_SPREAD_MAX = 100_000


@dataclass(frozen=True, slots=True)
class RowFacts:
    """Of one ledger. *Live* is what a subscription is still owed; *pending*, what of that is not due yet."""

    ledger_id: int
    entries: int
    live: int
    pending: int
    last_due_ms: int  # of what is pending; 0: nothing is
    due_days: dict[int, int] = field(default_factory=dict)
    """Numbers of pending messages by day since the Unix epoch."""


def ledger_facts(rows: LedgerRows, frontier_ms: int) -> RowFacts:
    """Count one ledger: one look at each row."""
    times = int64_column(rows.times)
    row_count = len(times)
    amendments = rows.amendments
    if len(amendments.entry_ids) or amendments.cancelled:
        times = amendments.effective(np.arange(row_count, dtype=np.uint32), times)
    live: Mask = np.ones(row_count, dtype=np.bool_)
    for gone in (rows.settled, amendments.cancelled):
        if gone:
            ids = ids_of(gone)
            live[ids[ids < row_count]] = False
    pending = times[live & (times > frontier_ms)]
    last_due_ms = int(pending.max()) if len(pending) else 0
    live_count = int(np.count_nonzero(live))
    return RowFacts(rows.ledger_id, row_count, live_count, len(pending), last_due_ms, _by_day(pending))


def _by_day(times: Int64Column) -> dict[int, int]:
    if not len(times):
        return {}
    days = times // DAY_MS
    first = int(days.min())
    if int(days.max()) - first > _DAYS_SPREAD_MAX:
        present_days, counts = np.unique(days, return_counts=True)
        return dict(zip(present_days.tolist(), counts.tolist(), strict=True))
    counts = np.bincount(days - first)
    filled = np.flatnonzero(counts)
    return dict(zip((filled + first).tolist(), counts[filled].tolist(), strict=True))
