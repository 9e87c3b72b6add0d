"""Statistics of a bucket tracker, and its histogram of due times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from broker.delayed.bucket_histogram import histogram_of
from broker.delayed.due_rows import Key
from broker.delayed.loaded_rows import LoadedRows
from broker.delayed.mutable_bucket import NEVER_MS, MutableBucket
from broker.delayed.sealed_bucket import SealedBucket
from broker.delayed.stale import StaleRows
from broker.delayed.tracker import Histogram, TrackerStats


def stats_of(
    loaded: LoadedRows,
    memory: Sequence[MutableBucket],
    buckets: Sequence[SealedBucket],
    stale: StaleRows,
    count: int,
    next_due_ms: int | None,
) -> TrackerStats:
    """A snapshot of a tracker with these parts."""
    last_ms = [loaded.last_due_ms() or 0]
    last_ms += [bucket.last_ms for bucket in memory if bucket.waiting]
    last_ms += [bucket.last_key[0] for bucket in buckets if bucket.waiting]
    memory_bytes = loaded.memory_bytes() + stale.entries.memory_bytes()
    memory_bytes += sum(bucket.memory_bytes() for bucket in memory)
    memory_bytes += sum(bucket.memory_bytes() for bucket in buckets)
    return TrackerStats(
        count=count,
        loaded_count=loaded.count(),
        bucket_count=len(buckets),
        memory_bytes=memory_bytes,
        disk_bytes=sum(bucket.disk_bytes() for bucket in buckets),
        next_due_ms=next_due_ms,
        last_due_ms=None if next_due_ms is None else max(last_ms),
    )


def histogram_over(
    loaded: LoadedRows,
    memory: Sequence[MutableBucket],
    buckets: Sequence[SealedBucket],
    stale: StaleRows,
    loaded_end: Key,
    *,
    start_ms: int,
    end_ms: int,
    width_ms: int,
    floor_ms: int,
) -> Histogram:
    """The entries by due time. Those of a segment that was not read count as spread evenly over its times."""
    exact = [loaded.times_between(floor_ms, NEVER_MS)]
    exact += [bucket.waiting_times(floor_ms, NEVER_MS, loaded_end) for bucket in memory]
    exact += [bucket.window.deliver_at_ms for bucket in buckets]
    exact.append(stale.leaving_times())
    histogram = histogram_of(
        exact,
        [bucket.unread_spread() for bucket in buckets],
        stale.surplus_times(),
        floor_ms=floor_ms,
        start_ms=start_ms,
        end_ms=end_ms,
        width_ms=width_ms,
    )
    # Of a ledger that was discarded, what lies in unread segments still counts (BUCKET-10).
    is_clean = not any(bucket.is_unsure and bucket.first_unread_key for bucket in buckets)
    return replace(histogram, is_exact=histogram.is_exact and is_clean)
