"""The delayed index against the rows it was made from: what an audit proves. Pure: columns in, findings out.

Three parts, which callers may use alone (a Spark task checks buckets here and ledgers there) or through
`IndexCheck`, which carries what buckets hold over to the ledgers:

    BucketCheck    one bucket: its segments against its metadata and bitmaps; splits them by ledger
    check_ledger   one ledger: its rows, amendments and settled entries against what all buckets hold of it
    IndexCheck     one topic: the two put together

Input is never trusted: any columns give findings, none an exception.

What is pending, and therefore owed by the buckets, is every entry that
  - lies before `indexed_through` (what follows is indexed again after a start),
  - has an effective time, after `frontier_ms` (up to it entries may be missing),
  - is not settled by every subscription (what is settled may be absent or present, under any time), and
  - was not moved after `index_lsn` (such moves are indexed again after a start).
"""

from __future__ import annotations

from broker.delayed.check.buckets import BucketCheck
from broker.delayed.check.facts import RowFacts, ledger_facts
from broker.delayed.check.findings import Finding, IndexState, Kind, LedgerCounts, Severity, Suspect
from broker.delayed.check.index import CursorView, IndexCheck, plan_passes, settled_by_all
from broker.delayed.check.ledgers import IndexedEntries, LedgerRows, check_ledger

__all__ = [
    "BucketCheck",
    "CursorView",
    "Finding",
    "IndexedEntries",
    "IndexCheck",
    "IndexState",
    "Kind",
    "LedgerCounts",
    "RowFacts",
    "LedgerRows",
    "Severity",
    "Suspect",
    "check_ledger",
    "ledger_facts",
    "plan_passes",
    "settled_by_all",
]
