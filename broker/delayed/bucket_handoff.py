"""Buckets that somebody outside the broker merges: lent with what makes their rows stale, taken back as one bucket.

A loan holds nothing up: the tracker seals, takes and merges as ever, and what is handed in is taken only if its sources
are still there, side by side, and nobody works on them. It is then put in their place in one step, as a merge of the
tracker's own (B6 to B8), from the frontier of that moment on.

Whoever merged is not trusted: the sources are merged again without writing anything, and what was handed in must hold
exactly the rows that this leaves. That costs a pass over both, in the index thread, in steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pyroaring import BitMap

from broker.delayed.bucket_storage import BucketSnapshotStorage, SnapshotReader, SnapshotWriter
from broker.delayed.bucket_tracker import BucketTracker
from broker.delayed.bucket_writer import BucketWriter, NotNeeded
from broker.delayed.lent_buckets import SEGMENTS_FED, merge_sources
from broker.delayed.sealed_bucket import BucketState, SealedBucket
from broker.errors import Corrupt, PostdateError
from broker.observe.logs import get_logger
from broker.storage.amendments import GONE
from broker.storage.bucket_snapshot import BucketMetadata, encode_metadata
from broker.storage.compaction_inputs import InputBuckets

log = get_logger(__name__)

_REST = 4.0
"""How long the check of a bucket that was handed in rests, by how long it works."""


@dataclass(frozen=True, slots=True)
class Loan:
    """Adjacent buckets as they were when they were lent."""

    buckets: InputBuckets
    frontier: tuple[int, int, int]
    sources: tuple[SealedBucket, ...]
    generation: int  # of the tracker: `clear` begins another


def lend(tracker: BucketTracker, bucket_ids: Sequence[int]) -> Loan:
    """Lend buckets that are there, side by side."""
    # These functions belong to the tracker and are kept apart for its length: they may look into it.
    by_id = {bucket.bucket_id: bucket for bucket in tracker._buckets}
    sources = tuple(by_id[bucket_id] for bucket_id in bucket_ids)
    ledger_ids = {span.ledger_id for bucket in sources for span in bucket.metadata.spans}
    not_needed = tracker._not_needed(ledger_ids)
    limits = tracker._segment_limits()
    return Loan(
        InputBuckets(
            bucket_ids=tuple(bucket_ids),
            new_bucket_id=tracker._take_bucket_id(),
            segment_time_step_ms=limits.time_step_ms,
            max_segment_entries=limits.entries_max,
            amendments={key: each for key, each in not_needed.amendments.items() if each is not GONE},
            gone_ledger_ids=frozenset(key for key, each in not_needed.amendments.items() if each is GONE),
        ),
        not_needed.frontier,
        sources,
        tracker._generation,
    )


async def adopt(tracker: BucketTracker, loan: Loan, *, is_alone: bool) -> bool:
    """Put a bucket that was written to its final name in the place of its sources; whether that was done.

    If it was not, its file goes with the next manifest, and the sources stay. `is_alone`: nobody is served meanwhile.
    """
    bucket_id, sources = loan.buckets.new_bucket_id, list(loan.sources)
    if not _is_current(tracker, loan):
        tracker._deleted_ids.append(bucket_id)
        return False
    for bucket in sources:
        bucket.state = BucketState.MERGING
    tracker._is_merging = True
    merged: SealedBucket | None = None
    try:
        metadata, left_out = await _check(tracker, loan, is_alone)
        if metadata is not None:
            merged = await tracker._open(metadata, loan.generation)
        if loan.generation != tracker._generation:  # no await from here on (B6, B7)
            return False
        tracker._merged(sources, merged, left_out)
        return True
    except (OSError, PostdateError) as error:
        log.error("A bucket that was handed in cannot be used", bucket_id=bucket_id, error=str(error))
        return False
    finally:
        tracker._is_merging = False
        for bucket in sources:
            if bucket.state is BucketState.MERGING:
                bucket.state = BucketState.LIVE
        if merged is None or merged.state is BucketState.CREATING:
            tracker._deleted_ids.append(bucket_id)
        tracker._drop_spent()


def _is_current(tracker: BucketTracker, loan: Loan) -> bool:
    """Return whether the sources are there as they were lent, and nobody merges."""
    if tracker._is_merging or loan.generation != tracker._generation:
        return False
    if any(bucket.state is not BucketState.LIVE for bucket in loan.sources):
        return False
    at = tracker._buckets.index(loan.sources[0])
    return tuple(tracker._buckets[at : at + len(loan.sources)]) == loan.sources


async def _check(
    tracker: BucketTracker, loan: Loan, is_alone: bool
) -> tuple[BucketMetadata | None, NotNeeded]:
    """The metadata of what was handed in, which holds what its sources leave; raises Corrupt, Unavailable."""
    storage = _ReadOnly(tracker._storage, loan.buckets.new_bucket_id)
    # Whoever serves producers and consumers takes small steps, with rests.
    writer = BucketWriter(
        storage,
        tracker._writer._executor,
        segments_fed=SEGMENTS_FED if is_alone else 1,
        reads_back=False,
        rest=0.0 if is_alone else _REST,
    )
    return await merge_sources(writer, tracker._topic_id, loan.buckets, loan.frontier, loan.sources)


class _ReadOnly:
    """A storage into which a merge writes nothing: it then reads back what somebody else has written (W3)."""

    def __init__(self, storage: BucketSnapshotStorage, bucket_id: int) -> None:
        self._storage = storage
        self._bucket_id = bucket_id
        self.open_reader: Callable[[int], SnapshotReader] = storage.open_reader
        self.create = storage.create
        self.save_all = storage.save_all
        self.read_metadata = storage.read_metadata
        self.read_bitmaps = storage.read_bitmaps
        self.read_bitmap = storage.read_bitmap
        self.read_segment = storage.read_segment
        self.read_segments = storage.read_segments
        self.delete = storage.delete
        self.list = storage.list

    def open_writer(self, bucket_id: int, reserve_bytes: int) -> SnapshotWriter:
        return _Comparison(self._storage, self._bucket_id)


class _Comparison:
    """Takes what a merge would write, and compares it with what is there: to the byte, for a merge leaves no choice."""

    def __init__(self, storage: BucketSnapshotStorage, bucket_id: int) -> None:
        self._storage = storage
        self._bucket_id = bucket_id
        self._found: tuple[SnapshotReader, BucketMetadata] | None = None
        self._count = 0

    def append(self, segment: bytes) -> None:
        reader, metadata = self._open()
        is_there = self._count < len(metadata.segments)
        if not is_there or reader.read_segments(metadata, self._count, self._count + 1) != [segment]:
            raise Corrupt("A bucket does not hold what its sources leave", path=str(self._bucket_id))
        self._count += 1

    def finish(self, metadata: BucketMetadata, bitmaps: dict[int, BitMap]) -> BucketMetadata:
        reader, found = self._open()
        same = encode_metadata(replace(found, segments_at=0), bitmaps) == encode_metadata(metadata, bitmaps)
        if not same or reader.read_bitmaps() != bitmaps:
            raise Corrupt("A bucket says another thing than its sources", path=str(self._bucket_id))
        return found

    def abort(self) -> None:
        if self._found is not None:
            self._found[0].close()
            self._found = None

    def _open(self) -> tuple[SnapshotReader, BucketMetadata]:
        if self._found is None:
            reader = self._storage.open_reader(self._bucket_id)
            try:
                self._found = reader, reader.read_metadata()
            except BaseException:
                reader.close()
                raise
        return self._found
