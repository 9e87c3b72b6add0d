"""Reads what a topic's manifest names, buckets and schedules, and hands it to the check of the delayed index.

Blocks. Damage in one file does not keep the others from being looked at: it is a finding of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from pyroaring import BitMap

from broker.delayed.check import (
    CursorView,
    Finding,
    IndexCheck,
    IndexState,
    Kind,
    LedgerCounts,
    LedgerRows,
    plan_passes,
    settled_by_all,
)
from broker.errors import Corrupt
from broker.model import CANCELLED_MS, LEDGER_ID_MAX, Int64Column, ids_of
from broker.runtime.vfs import Vfs
from broker.storage.amendments import NONE, Amendments
from broker.storage.blocks import TIME, LedgerCapture
from broker.storage.bucket_files import SnapshotReader
from broker.storage.bucket_snapshot import BucketMetadata, Ordinals, decode_entries
from broker.storage.ledger_files import (
    open_checked,
)
from broker.storage.ledger_reads import (
    CheckedColumn,
)
from broker.storage.sparse_files import read_present


@dataclass(frozen=True, slots=True)
class LedgerSource:
    """A ledger that the topic has. `read_times` gives all its rows' times, or raises Corrupt.

    Without its amendments (None: they cannot be read) a ledger is not compared.
    """

    ledger_id: int
    entry_count: int
    read_times: Callable[[], Int64Column]
    amendments: Amendments | None = NONE


def file_source(
    vfs: Vfs, folder: str, capture: LedgerCapture, amendments: Amendments | None = NONE
) -> LedgerSource:
    """A ledger in files, as a manifest names it."""

    def read_times() -> Int64Column:
        if not capture.entry_count:
            return np.empty(0, dtype=np.int64)  # it has no files
        crcs = None if capture.sealed else capture.times_crcs
        column = CheckedColumn(TIME, capture.row_count, crcs)
        with contextlib.closing(open_checked(vfs, capture.name(folder), "times")) as file:
            times = column.read(file, 0, capture.row_count)
            if capture.sparse is None:
                return times
            every = np.full(capture.entry_count, CANCELLED_MS, dtype=np.int64)
            every[ids_of(read_present(file, capture))] = times
            return every

    return LedgerSource(capture.ledger_id, capture.entry_count, read_times, amendments)


@dataclass(frozen=True, slots=True)
class Scope:
    """Part of a topic that one call checks; several calls share a topic.

    Ranges of ledgers that together cover every id make of every bucket and ledger one look: the structure of a
    bucket is checked with the range that its first ledger lies in. What cannot be read of a bucket's beginning
    belongs to the range that begins with 0.
    """

    first_ledger_id: int = 0
    last_ledger_id: int = LEDGER_ID_MAX
    bitmaps_only: bool = False
    """Leave out segments: their bitmaps alone say what buckets hold."""
    look: Callable[[LedgerRows], None] | None = None
    """Is shown the rows of each ledger that could be read."""

    def meets(self, metadata: BucketMetadata) -> bool:
        return any(self.first_ledger_id <= span.ledger_id <= self.last_ledger_id for span in metadata.spans)


CheckResult = tuple[list[Finding], LedgerCounts]
CheckSteps = Generator[int | None, None, CheckResult]

_STEP_SEGMENTS = 16


class IndexFilesCheck:
    """Compares the buckets that a manifest names with its ledgers (rising ids) and cursors.

    Every subscription needs a cursor, or what it is owed counts as settled. A ledger whose times or amendments
    cannot be read is not compared, and it is no finding here: whoever checks ledgers says so.
    """

    def __init__(
        self,
        open_reader: Callable[[int], SnapshotReader],
        state: IndexState,
        ledgers: Sequence[LedgerSource],
        cursors: Collection[CursorView],
        scope: Scope | None = None,
    ) -> None:
        self._scope = scope or Scope()
        self._open_reader = open_reader
        self._state = state
        self._ledgers = ledgers
        self._cursors = cursors
        self._findings: list[Finding] = []

    def run(self, bucket_ids: Sequence[int], entries_max: int) -> CheckResult:
        """Check these buckets in one go. Blocks. Raises Unavailable and OSError for a disk that does not work.

        About `entries_max` index entries are in memory at once, 12 bytes each; so a large topic takes several passes.
        """
        steps = self.steps(bucket_ids, entries_max)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: CheckResult = end.value
                return result

    def steps(self, bucket_ids: Sequence[int], entries_max: int) -> CheckSteps:
        """`run` in steps for a thread: a few segments each, or one ledger.

        Gives the id of a ledger before the step that calls its `read_times`, and None between all others.
        """
        buckets: list[BucketMetadata] = []
        for bucket_id in bucket_ids:
            metadata = self._read_metadata(bucket_id)
            if metadata is not None and self._scope.meets(metadata):
                buckets.append(metadata)
            yield None
        counts = LedgerCounts()
        for first, last in self._passes(buckets, entries_max):
            check = IndexCheck(self._state, first_ledger_id=first, last_ledger_id=last)
            here = Scope(first, last)
            for metadata in buckets:
                if here.meets(metadata):
                    is_first = first <= metadata.spans[0].ledger_id <= last
                    yield from self._check_bucket(check, metadata, is_first=is_first)
            for source in self._ledgers:
                if first <= source.ledger_id <= last:
                    yield source.ledger_id
                    self._check_ledger(check, source)
            self._findings += check.finish()
            counts += check.counts
        return self._findings, counts

    def _passes(self, buckets: Sequence[BucketMetadata], entries_max: int) -> Iterator[tuple[int, int]]:
        """The ranges of ledgers that are looked at together, cut to the scope."""
        for first, last in plan_passes(estimate_entries(buckets), entries_max):
            low, high = max(first, self._scope.first_ledger_id), min(last, self._scope.last_ledger_id)
            if low <= high:
                yield low, high

    def _read_metadata(self, bucket_id: int) -> BucketMetadata | None:
        try:
            with contextlib.closing(self._open_reader(bucket_id)) as reader:
                return reader.read_metadata()
        except Corrupt as error:
            if self._scope.first_ledger_id == 0:
                self._findings.append(Finding(Kind.of(error), error.message, bucket_id=bucket_id))
            return None

    def _check_bucket(
        self, check: IndexCheck, metadata: BucketMetadata, *, is_first: bool
    ) -> Generator[None, None, None]:
        bucket = check.begin_bucket(metadata, structure=is_first)
        ordinals = Ordinals(metadata.spans)
        with contextlib.closing(self._open_reader(metadata.bucket_id)) as reader:
            if self._scope.bitmaps_only:
                bitmaps = self._read_bitmaps(reader, metadata.bucket_id, is_first=is_first)
                self._findings += check.hold_bitmaps(metadata, bitmaps or {})
                return
            for segment in range(len(metadata.segments)):
                try:
                    (data,) = reader.read_segments(metadata, segment, segment + 1)
                    columns = decode_entries(metadata, ordinals, segment, data)
                except Corrupt as error:
                    self._findings += bucket.skip_segment(error.message)
                else:
                    self._findings += bucket.add_segment(*columns)
                if segment % _STEP_SEGMENTS == _STEP_SEGMENTS - 1:
                    yield None
            bitmaps = self._read_bitmaps(reader, metadata.bucket_id, is_first=is_first)
        self._findings += check.end_bucket(bucket, bitmaps)

    def _read_bitmaps(
        self, reader: SnapshotReader, bucket_id: int, *, is_first: bool
    ) -> dict[int, BitMap] | None:
        try:
            return reader.read_bitmaps()
        except Corrupt as error:
            if is_first:
                self._findings.append(Finding(Kind.of(error), error.message, bucket_id=bucket_id))
            return None

    def _check_ledger(self, check: IndexCheck, source: LedgerSource) -> None:
        try:
            times = source.read_times() if source.amendments is not None else None
        except Corrupt:
            times = None
        if times is None or source.amendments is None:
            check.discard_ledger(source.ledger_id)
            return
        settled = settled_by_all(self._cursors, source.ledger_id, source.entry_count)
        rows = LedgerRows(source.ledger_id, times, source.amendments, settled)
        if self._scope.look is not None:
            self._scope.look(rows)
        self._findings += check.check_ledger(rows)


def estimate_entries(buckets: Sequence[BucketMetadata]) -> list[tuple[int, int]]:
    """Index entries of each ledger, about: a bucket's are taken to be spread evenly over its spans."""
    estimates: dict[int, int] = {}
    for metadata in buckets:
        spanned = sum(span.end - span.first for span in metadata.spans)
        for ledger_id, first, end in metadata.spans:
            share = metadata.count * (end - first) // max(spanned, 1)
            estimates[ledger_id] = estimates.get(ledger_id, 0) + share
    return sorted(estimates.items())
