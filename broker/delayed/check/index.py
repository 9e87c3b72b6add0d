"""A topic's whole index: buckets first, segment by segment, then the ledgers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap

from broker.delayed.check.buckets import BucketCheck
from broker.delayed.check.findings import NAMED_MAX, Finding, IndexState, Kind, LedgerCounts
from broker.delayed.check.ledgers import IndexedEntries, LedgerRows, check_ledger, name_suspects
from broker.model import LEDGER_ID_MAX, Position, ids_of
from broker.storage.bucket_snapshot import BucketMetadata

_NO_TIMES = np.empty(0, dtype=np.int64)


class IndexCheck:
    """Compares all buckets of a topic with its ledgers, or with those of a range.

        for every bucket:  bucket = begin_bucket(metadata); bucket.add_segment(...) ...; end_bucket(bucket, bitmaps)
        for every ledger:  check_ledger(rows)
        finally:           finish()

    Each call gives the findings it led to. Between buckets and ledgers 12 bytes are kept for each entry of a
    ledger in the range; a caller with more than its memory allows makes several passes (`plan_passes`), each with a
    range of ledgers, all but the first without `structure`.
    """

    def __init__(
        self,
        state: IndexState,
        *,
        first_ledger_id: int = 0,
        last_ledger_id: int = LEDGER_ID_MAX,
        structure: bool = True,
        named_max: int = NAMED_MAX,
    ) -> None:
        self.counts = LedgerCounts()
        """Of the ledgers checked so far."""
        self._state = state
        self._range = (first_ledger_id, last_ledger_id)
        self._structure = structure
        self._named_max = named_max
        self._held: dict[int, list[IndexedEntries]] = {}

    def begin_bucket(self, metadata: BucketMetadata, *, structure: bool | None = None) -> BucketCheck:
        """`structure` of this bucket, if it is not that of the whole check."""
        first, last = self._range
        return BucketCheck(
            metadata,
            first_ledger_id=first,
            last_ledger_id=last,
            structure=self._structure if structure is None else structure,
            named_max=self._named_max,
        )

    def end_bucket(self, bucket: BucketCheck, bitmaps: Mapping[int, BitMap] | None) -> list[Finding]:
        """All segments of the bucket were fed; `bitmaps` is None if they cannot be read."""
        findings = bucket.end(bitmaps)
        for ledger_id, pieces in bucket.take_held().items():
            self._held.setdefault(ledger_id, []).extend(pieces)
        return findings

    def hold_bitmaps(self, metadata: BucketMetadata, bitmaps: Mapping[int, BitMap]) -> list[Finding]:
        """Instead of a bucket's segments: what its bitmaps say that it holds; times are taken to be right.

        Half of what segments prove, for a hundredth of the reading. Once for each bucket.
        """
        first, last = self._range
        for ledger_id, bitmap in bitmaps.items():
            if bitmap and first <= ledger_id <= last:
                held = IndexedEntries(metadata.bucket_id, ids_of(bitmap), None)
                self._held.setdefault(ledger_id, []).append(held)
        named = sum(map(len, bitmaps.values()))
        if named <= metadata.count:
            return []
        what = f"its bitmaps name {named} entries, the metadata says {metadata.count}"
        return [Finding(Kind.BITMAP, what, named - metadata.count, bucket_id=metadata.bucket_id)]

    def check_ledger(self, rows: LedgerRows) -> list[Finding]:
        """Compare one ledger with all buckets, and forget what they hold of it."""
        held = self._held.pop(rows.ledger_id, [])
        findings, counts = check_ledger(rows, held, self._state, self._named_max)
        self.counts += counts
        return findings

    def discard_ledger(self, ledger_id: int) -> None:
        """The ledger was deleted, or cannot be read: what buckets hold of it is stale and no fault."""
        count = sum(map(len, self._held.pop(ledger_id, [])))
        self.counts += LedgerCounts(entries=count, stale=count)

    def finish(self) -> list[Finding]:
        """Report rows of ledgers that were neither checked nor discarded.

        A ledger is dropped once all of it came due, and is no fault then; snapshots still hold what they held of it.
        """
        findings = []
        for ledger_id, held in sorted(self._held.items()):
            entries = sum(map(len, held))
            timed = [(piece, piece.times) for piece in held if piece.times is not None]
            frontier_ms = self._state.frontier_ms
            pieces = [late for piece, times in timed if len(late := piece.part(times > frontier_ms))]
            if ledger_id in self._state.gone_ledger_ids:
                pieces = []
            self.counts += LedgerCounts(entries=entries, stale=entries - sum(map(len, pieces)))
            if not pieces:
                continue
            suspects, count = name_suspects(pieces, _NO_TIMES, self._named_max)
            what = "held, but the topic has no such ledger"
            findings.append(
                Finding(Kind.MISSING_LEDGER, what, count, ledger_id=ledger_id, suspects=tuple(suspects))
            )
        self._held = {}
        return findings


class CursorView(NamedTuple):
    """Settled entries of one subscription: everything before the mark, and these."""

    mark: Position
    settled: Mapping[int, BitMap]


def settled_by_all(cursors: Iterable[CursorView], ledger_id: int, entry_count: int) -> BitMap:
    """The entries of a ledger that no subscription is owed any more.

    Without a subscription that is nothing: messages wait for the first one.
    """
    settled_in_all: BitMap | None = None
    for cursor in cursors:
        settled = cursor.settled.get(ledger_id, BitMap())
        if cursor.mark >= (ledger_id, 0):
            before = entry_count if cursor.mark.ledger_id > ledger_id else cursor.mark.entry_id
            settled = settled | BitMap(range(min(before, entry_count)))
        settled_in_all = settled if settled_in_all is None else settled_in_all & settled
    return settled_in_all if settled_in_all is not None else BitMap()


def plan_passes(entry_counts: Sequence[tuple[int, int]], entries_max: int) -> list[tuple[int, int]]:
    """Cut ledgers, given as (ledger_id, index entries) with rising ids, into ranges of ids for one pass each.

    The ranges cover every id, so that entries of ledgers that are not there are met too. Each holds at most
    `entries_max` index entries, or one ledger.
    """
    cuts = []
    gathered = 0
    for ledger_id, count in entry_counts:
        if count and gathered and gathered + count > entries_max:
            cuts.append(ledger_id)
            gathered = 0
        gathered += count
    return list(zip([0, *cuts], [*(cut - 1 for cut in cuts), LEDGER_ID_MAX], strict=True))
