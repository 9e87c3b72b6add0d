"""Merges buckets that were lent; see `bucket_handoff`. What a job imports of the index: no tracker, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

from broker.delayed.bucket_storage import BucketSnapshotStorage
from broker.delayed.bucket_writer import BucketWriter, NewBucket, NotNeeded, SegmentLimits
from broker.delayed.sealed_bucket import SealedBucket
from broker.storage.amendments import GONE
from broker.storage.bucket_snapshot import BucketMetadata
from broker.storage.compaction_inputs import InputBuckets

SEGMENTS_FED = 8
"""Of each source at once: 160 KB of memory each."""


async def merge_lent(
    storage: BucketSnapshotStorage,
    topic_id: int,
    buckets: InputBuckets,
    frontier: tuple[int, int, int],
    executor: Executor,
) -> BucketMetadata | None:
    """Merge lent buckets into the one that they become, and read it back; None if nothing of them is needed."""
    sources = [SealedBucket(await storage.read_metadata(bucket_id)) for bucket_id in buckets.bucket_ids]
    metadata, _ = await merge_sources(
        BucketWriter(storage, executor, segments_fed=SEGMENTS_FED), topic_id, buckets, frontier, sources
    )
    return metadata


async def merge_sources(
    writer: BucketWriter,
    topic_id: int,
    buckets: InputBuckets,
    frontier: tuple[int, int, int],
    sources: Sequence[SealedBucket],
) -> tuple[BucketMetadata | None, NotNeeded]:
    new = NewBucket(topic_id, buckets.new_bucket_id, sources[0].metadata.start, sources[-1].metadata.end)
    # The same for whoever merges and whoever looks at the result.
    gone = dict.fromkeys(buckets.gone_ledger_ids, GONE)
    not_needed = NotNeeded(frontier, {**buckets.amendments, **gone})
    metadata = await writer.merge(
        new,
        sources,
        not_needed,
        SegmentLimits(buckets.segment_time_step_ms, buckets.max_segment_entries),
    )
    return metadata, not_needed
