"""Values of the bucket tracker: policy and image for the manifest."""

from __future__ import annotations

from dataclasses import dataclass

from broker.delayed.due_rows import Key
from broker.delayed.tracker import Frontier
from broker.model import Position
from broker.policy import TopicPolicy
from broker.settings import inherited


@dataclass(slots=True)
class Marks:
    """Progress of a tracker, who alone moves them."""

    frontier: Frontier
    loaded_end: Key
    """Everything before it was loaded or taken."""


@dataclass(frozen=True, slots=True)
class BucketPolicyValues:
    """A topic's policy for its buckets; may be replaced at any time. See `TopicPolicy`."""

    min_index_count: int = inherited(TopicPolicy, "min_index_count")  # also the unit of the size classes
    ledgers_per_bucket: int = inherited(TopicPolicy, "ledgers_per_bucket")
    seal_after_ms: int = inherited(TopicPolicy, "seal_after_ms")
    max_buckets: int = inherited(TopicPolicy, "max_buckets")
    segment_time_step_ms: int = inherited(TopicPolicy, "segment_time_step_ms")
    max_segment_entries: int = inherited(TopicPolicy, "max_segment_entries")


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
