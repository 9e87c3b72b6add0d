"""What is told to the tracker with buckets, and what it tells: policy, image for the manifest, counters."""

from __future__ import annotations

from dataclasses import dataclass

from broker.model import Position

_RETRY_MS = (1_000, 60_000)


@dataclass(frozen=True, slots=True)
class BucketPolicyValues:
    """What the policy of a topic says about its buckets; may be replaced at any time."""

    min_index_count: int = 50_000  # entries that are sealed together, and the unit of the size classes
    ledgers_per_bucket: int = 50  # a seal at the latest after so many ledgers
    seal_after_ms: int = 60_000  # a seal at the latest when the first entry has waited so long
    max_buckets: int = 64
    segment_time_step_ms: int = 300_000
    max_segment_entries: int = 5_000


@dataclass(frozen=True, slots=True)
class BucketImage:
    """What a manifest says about the buckets, all of one moment."""

    bucket_ids: tuple[int, ...]  # in the order of the log
    indexed_through: Position
    index_lsn: int
    frontier_ms: int
    next_bucket_id: int
    deleted_ids: tuple[
        int, ...
    ]  # not named any more: files to remove once a manifest with this image is durable


@dataclass(frozen=True, slots=True)
class BucketCounters:
    """What seals and merges did since the start; only ever rises."""

    seals: int = 0
    merges: int = 0
    seal_failures: int = 0
    merge_failures: int = 0
    sealed_entries: int = 0
    merged_entries: int = 0


class Retry:
    """When to try again after failures, by a clock that may step."""

    def __init__(self) -> None:
        self._failures = 0
        self._at_ms: int | None = None

    def failed(self) -> None:
        self._failures += 1
        self._at_ms = None  # counted from the next look: the tracker itself has no clock

    def succeeded(self) -> None:
        self._failures = 0

    def is_ready(self, now_ms: int) -> bool:
        if not self._failures:
            return True
        pause_ms = min(_RETRY_MS[0] << min(self._failures - 1, 10), _RETRY_MS[1])
        if self._at_ms is None or self._at_ms > now_ms + pause_ms:
            self._at_ms = now_ms + pause_ms
        return now_ms >= self._at_ms
