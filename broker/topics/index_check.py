"""Reads what a topic's manifest names, buckets and schedules, and hands it to the check of the delayed index.

Blocks. Damage in one file does not keep the others from being looked at: it is a finding of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass

import numpy as np

from broker.delayed.bucket_storage import SnapshotReader
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
from broker.model import Int64Column
from broker.runtime.vfs import Vfs
from broker.storage.amendments import NONE, Amendments
from broker.storage.blocks import TIME, LedgerCapture, LedgerName
from broker.storage.bucket_snapshot import BucketMetadata, Ordinals, decode_entries
from broker.storage.ledger_files import CheckedColumn, open_checked

ENTRIES_MAX = 16_000_000
"""Index entries that one pass over the buckets keeps in memory, about: 12 bytes each."""


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
        name = LedgerName(folder, capture.topic_id, capture.ledger_id, capture.generation)
        crcs = None if capture.sealed else capture.times_crcs
        column = CheckedColumn(TIME, capture.entry_count, crcs)
        with contextlib.closing(open_checked(vfs, name, "times")) as file:
            return column.read(file, 0, capture.entry_count)

    return LedgerSource(capture.ledger_id, capture.entry_count, read_times, amendments)


def check_index(
    open_reader: Callable[[int], SnapshotReader],
    bucket_ids: Sequence[int],
    state: IndexState,
    ledgers: Sequence[LedgerSource],
    cursors: Collection[CursorView],
    *,
    entries_max: int = ENTRIES_MAX,
) -> tuple[list[Finding], LedgerCounts]:
    """Compare the buckets that a manifest names with its ledgers (rising ids) and cursors. Blocks.

    Every subscription needs a cursor, or what it is owed counts as settled. A ledger whose times or amendments
    cannot be read is not compared, and it is no finding here: whoever checks ledgers says so. Raises Unavailable
    and OSError for a disk that does not work.
    """
    steps = check_steps(open_reader, bucket_ids, state, ledgers, cursors, entries_max=entries_max)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: CheckResult = end.value
            return result


def check_steps(
    open_reader: Callable[[int], SnapshotReader],
    bucket_ids: Sequence[int],
    state: IndexState,
    ledgers: Sequence[LedgerSource],
    cursors: Collection[CursorView],
    *,
    entries_max: int = ENTRIES_MAX,
) -> CheckSteps:
    """`check_index` in steps for a thread: a few segments each, or one ledger.

    Gives the id of a ledger before the step that calls its `read_times`, and None between all others.
    """
    return _Check(open_reader, state, ledgers, cursors).run(bucket_ids, entries_max)


CheckResult = tuple[list[Finding], LedgerCounts]
CheckSteps = Generator[int | None, None, CheckResult]

_STEP_SEGMENTS = 16


class _Check:
    def __init__(
        self,
        open_reader: Callable[[int], SnapshotReader],
        state: IndexState,
        ledgers: Sequence[LedgerSource],
        cursors: Collection[CursorView],
    ) -> None:
        self._open_reader = open_reader
        self._state = state
        self._ledgers = ledgers
        self._cursors = cursors
        self._findings: list[Finding] = []

    def run(self, bucket_ids: Sequence[int], entries_max: int) -> CheckSteps:
        buckets: list[BucketMetadata] = []
        for bucket_id in bucket_ids:
            if metadata := self._read_metadata(bucket_id):
                buckets.append(metadata)
            yield None
        counts = LedgerCounts()
        for number, (first, last) in enumerate(plan_passes(_estimate_entries(buckets), entries_max)):
            check = IndexCheck(self._state, first_ledger_id=first, last_ledger_id=last, structure=number == 0)
            for metadata in buckets:
                if number == 0 or any(first <= span.ledger_id <= last for span in metadata.spans):
                    yield from self._check_bucket(check, metadata, is_first=number == 0)
            for source in self._ledgers:
                if first <= source.ledger_id <= last:
                    yield source.ledger_id
                    self._check_ledger(check, source)
            self._findings += check.finish()
            counts += check.counts
        return self._findings, counts

    def _read_metadata(self, bucket_id: int) -> BucketMetadata | None:
        try:
            with contextlib.closing(self._open_reader(bucket_id)) as reader:
                return reader.read_metadata()
        except Corrupt as error:
            self._findings.append(Finding(Kind.UNREADABLE, error.message, bucket_id=bucket_id))
            return None

    def _check_bucket(
        self, check: IndexCheck, metadata: BucketMetadata, *, is_first: bool
    ) -> Generator[None, None, None]:
        bucket = check.begin_bucket(metadata)
        ordinals = Ordinals(metadata.spans)
        with contextlib.closing(self._open_reader(metadata.bucket_id)) as reader:
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
            try:
                bitmaps = reader.read_bitmaps()
            except Corrupt as error:
                bitmaps = None
                if is_first:
                    bucket_id = metadata.bucket_id
                    self._findings.append(Finding(Kind.UNREADABLE, error.message, bucket_id=bucket_id))
        self._findings += check.end_bucket(bucket, bitmaps)

    def _check_ledger(self, check: IndexCheck, source: LedgerSource) -> None:
        try:
            times = source.read_times() if source.amendments is not None else None
        except Corrupt:
            times = None
        if times is None or source.amendments is None:
            check.discard_ledger(source.ledger_id)
            return
        settled = settled_by_all(self._cursors, source.ledger_id, source.entry_count)
        self._findings += check.check_ledger(LedgerRows(source.ledger_id, times, source.amendments, settled))


def _estimate_entries(buckets: Sequence[BucketMetadata]) -> list[tuple[int, int]]:
    """Index entries of each ledger, about: a bucket's are taken to be spread evenly over its spans."""
    estimates: dict[int, int] = {}
    for metadata in buckets:
        spanned = sum(span.end - span.first for span in metadata.spans)
        for ledger_id, first, end in metadata.spans:
            share = metadata.count * (end - first) // max(spanned, 1)
            estimates[ledger_id] = estimates.get(ledger_id, 0) + share
    return sorted(estimates.items())
