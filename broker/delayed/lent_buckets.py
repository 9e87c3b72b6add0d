"""Buckets that somebody outside the broker merges: the loan, the merge, and the check of what came of it.

A loan holds nothing up: the tracker seals, takes and merges as ever, and what is handed in is taken only if its sources
are still there, side by side, and nobody works on them. It is then put in their place in one step, as a merge of the
tracker's own (BUCKET-6 to BUCKET-8), from the frontier of that moment on. A job imports this: no tracker, no clock.

Whoever merged is not trusted: what was handed in must hold exactly the rows that have to be kept of its sources. The
check does not merge again. A pass over the sources counts the rows that have to be kept, with their order-free
checksum and a bitmap of each ledger; a pass over what was handed in does the same, and looks at its order. A row is
current under one time only, so equal sums and bitmaps are equal rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np
from pyroaring import BitMap

from broker.delayed.bucket_writer import (
    BucketWriter,
    NewBucket,
    NotNeeded,
    SegmentLimits,
    entries_by_ledger,
    kept_rows,
)
from broker.delayed.due_rows import DueRows, Key, key_after, rises
from broker.delayed.sealed_bucket import SealedBucket
from broker.errors import Corrupt
from broker.model import bitmap_of, ids_of, is_among
from broker.runs.tally import Tally
from broker.storage.amendments import GONE
from broker.storage.bucket_files import BucketStorage, SnapshotReader
from broker.storage.bucket_snapshot import BucketMetadata
from broker.storage.compaction_inputs import InputBuckets

_SEGMENTS_FED = 8
"""Of each source at once: 160 KB of memory each."""


@dataclass(frozen=True, slots=True)
class Loan:
    """Adjacent buckets as they were when they were lent."""

    buckets: InputBuckets
    frontier: Key
    sources: tuple[SealedBucket, ...]
    generation: int  # of the tracker: `clear` begins another


def loan_of(
    sources: tuple[SealedBucket, ...],
    new_bucket_id: int,
    not_needed: NotNeeded,
    limits: SegmentLimits,
    generation: int,
) -> Loan:
    amendments = not_needed.amendments
    buckets = InputBuckets(
        bucket_ids=tuple(bucket.bucket_id for bucket in sources),
        new_bucket_id=new_bucket_id,
        segment_time_step_ms=limits.time_step_ms,
        max_segment_entries=limits.entries_max,
        amendments={key: amended for key, amended in amendments.items() if amended is not GONE},
        gone_ledger_ids=frozenset(key for key, amended in amendments.items() if amended is GONE),
    )
    return Loan(buckets, not_needed.frontier, sources, generation)


async def merge_lent(
    storage: BucketStorage,
    into: BucketStorage,
    buckets: InputBuckets,
    frontier: Key,
    executor: Executor,
) -> BucketMetadata | None:
    """Merge lent buckets into the one that they become, in another folder; None if nothing of them is needed."""
    metadatas = [
        await storage.read(bucket_id, SnapshotReader.read_metadata) for bucket_id in buckets.bucket_ids
    ]
    writer = BucketWriter(storage, executor, into=into, segments_fed=_SEGMENTS_FED)
    return await writer.merge(
        NewBucket(buckets.new_bucket_id, metadatas[0].start, metadatas[-1].end),
        [SealedBucket(metadata) for metadata in metadatas],
        not_needed_of(buckets, frontier),
        SegmentLimits(buckets.segment_time_step_ms, buckets.max_segment_entries),
    )


def not_needed_of(buckets: InputBuckets, frontier: Key) -> NotNeeded:
    """The same for whoever merges and whoever looks at the result."""
    return NotNeeded(frontier, {**buckets.amendments, **dict.fromkeys(buckets.gone_ledger_ids, GONE)})


def check_steps(
    storage: BucketStorage, sources: Sequence[SealedBucket], buckets: InputBuckets, not_needed: NotNeeded
) -> Generator[None, None, BucketMetadata | None]:
    """Check what a merge of the sources came to, a segment a step; blocks. Gives its metadata, or None for nothing.

    Gathers in `not_needed` what a merge does. Raises Corrupt, Unavailable.
    """
    kept, merged_rows = _RowSet(), _RowSet()
    for source in sources:
        with contextlib.closing(storage.open_reader(source.bucket_id)) as reader:
            for segment in range(
                source.first_segment_from(key_after(not_needed.frontier)), source.segment_count
            ):
                kept.add(kept_rows(_decoded(reader, source, segment), not_needed), not_needed.doubles)
                yield
    if not kept.tally.count:
        return None
    with contextlib.closing(storage.open_reader(buckets.new_bucket_id)) as reader:
        metadata = reader.read_metadata()
        merged = SealedBucket(metadata)
        last: Key | None = None
        for segment in range(merged.segment_count):
            columns = _decoded(reader, merged, segment)
            first, before, last = columns.key(0), last, columns.key(-1)
            times = columns.deliver_at_ms
            _check(before is None or before < first, metadata)
            _check((first, last) == (merged.first_key_of(segment), merged.last_key_of(segment)), metadata)
            _check(bool((times[1:] >= times[:-1]).all() and rises(columns).all()), metadata)
            _check(len(columns) <= buckets.max_segment_entries, metadata)
            merged_rows.add(columns, [])
            yield
        named = {ledger_id: bitmap for ledger_id, bitmap in reader.read_bitmaps().items() if bitmap}
    _check(merged_rows == kept and named == kept.bitmaps, metadata)
    _check(kept.tally == Tally(metadata.count, metadata.checksum), metadata)
    covered = sources[0].metadata.start, sources[-1].metadata.end
    _check((metadata.start, metadata.end) == covered, metadata)
    return metadata


@dataclass(slots=True)
class _RowSet:
    """Rows, whatever their order: how many, their checksum, and which of each ledger."""

    tally: Tally = field(default_factory=Tally)
    bitmaps: dict[int, BitMap] = field(default_factory=dict)

    def add(self, columns: DueRows, doubles: list[DueRows]) -> None:
        """Count rows; those that were counted go to `doubles`."""
        if not len(columns):
            return
        is_double = np.zeros(len(columns), dtype=np.bool_)
        for ledger_id, entry_ids in entries_by_ledger(columns.ledger_ids, columns.entry_ids):
            known, here = self.bitmaps.setdefault(ledger_id, BitMap()), bitmap_of(entry_ids)
            if again := known & here:
                is_double |= (columns.ledger_ids == ledger_id) & is_among(columns.entry_ids, ids_of(again))
            known |= here
        if is_double.any():
            doubles.append(columns.part(is_double))
            columns = columns.part(~is_double)
        self.tally.add(*columns.columns)


def _decoded(reader: SnapshotReader, bucket: SealedBucket, segment: int) -> DueRows:
    (data,) = reader.read_segments(bucket.metadata, segment, segment + 1)
    return bucket.decode(segment, data)


def _check(holds: bool, metadata: BucketMetadata) -> None:
    if not holds:
        raise Corrupt("A bucket does not hold what its sources leave", path=str(metadata.bucket_id))
