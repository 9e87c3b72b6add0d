"""Values of the bucket tracker: policy and image for the manifest."""

from __future__ import annotations

from dataclasses import dataclass

from broker.delayed.due_rows import Key
from broker.delayed.tracker import Frontier
from broker.model import Position


@dataclass(slots=True)
class Marks:
    """Progress of a tracker, who alone moves them."""

    frontier: Frontier
    loaded_end: Key
    """Everything before it was loaded or taken."""


@dataclass(frozen=True, slots=True)
class BucketPolicyValues:
    """A topic's policy for its buckets; may be replaced at any time."""

    min_index_count: int = 50_000  # entries that are sealed together, and the unit of the size classes
    ledgers_per_bucket: int = 50  # a seal at the latest after so many ledgers
    seal_after_ms: int = 60_000  # a seal at the latest when the first entry has waited so long
    max_buckets: int = 64
    segment_time_step_ms: int = 300_000
    max_segment_entries: int = 5_000


@dataclass(frozen=True, slots=True)
class BucketImage:
    """Buckets in a manifest, all of one moment."""

    bucket_ids: tuple[int, ...]  # in the order of the log
    indexed_through: Position
    index_lsn: int
    frontier_ms: int
    next_bucket_id: int
    deleted_ids: tuple[
        int, ...
    ]  # not named any more: files to remove once a manifest with this image is durable
