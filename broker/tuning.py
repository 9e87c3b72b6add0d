"""Sizes, limits and intervals of the broker's parts that no operator sets. Tests make them small."""

from __future__ import annotations

from dataclasses import dataclass, field

from broker.policy import SubscriptionPolicy, TopicPolicy
from broker.settings import DAY_MS, HOUR_MS, KIB, MIB, MINUTE_MS, SECOND_MS

SHARED_BYTES_MAX = 4 * KIB
"""Bytes of a list's request that a front copies for every shard: numbers, and a page token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Constants of the parts of a broker, handed to them with its settings."""

    # Requests
    key_bytes_max: int = KIB
    schedule_key_bytes_max: int = 512
    properties_count_max: int = 64
    properties_bytes_max: int = 16 * KIB
    batch_messages_max: int = 5_000
    ack_entries_max: int = 10_000
    schedule_names_max: int = 5_000
    recurring_max: int = 100_000  # over all topics
    recurring_per_topic_max: int = 10_000
    recurring_bytes_max: int = 256 * MIB  # over all topics
    recurring_bytes_per_topic_max: int = 32 * MIB  # as is what a checkpoint writes of them in one step
    recurring_message_bytes_max: int = 64 * KIB  # definitions are in memory
    bulk_step_messages: int = 5_000
    bulk_unended_max: int = 16  # of a topic
    bulk_ended_kept: int = 100  # the same
    request_bytes_max: int = 0  # 0: `BrokerConfig` derives it, as the next one
    frame_bytes_max: int = 0
    http_connections_max: int = 256
    first_message_ms: int = 30 * SECOND_MS
    heartbeat_ms: int = 10 * SECOND_MS
    jwt_leeway_ms: int = 30 * SECOND_MS
    security_recheck_ms: int = 5 * SECOND_MS

    # Storage
    journal_segment_bytes: int = 64 * MIB
    journal_spare_segments_max: int = 4
    journal_group_bytes_max: int = 8 * MIB
    journal_pending_bytes_max: int = 32 * MIB
    checkpoint_bytes: int = 64 * MIB
    tail_bytes_max: int = 8 * MIB
    packed_rows_min: int = 256  # fewer take one or two blocks of a file system in any case
    open_ledgers_max: int = 256
    reclaim_interval_ms: int = MINUTE_MS
    compaction_cleanup_ms: int = HOUR_MS
    producers_per_topic_max: int = 1_000

    # Cluster
    journal_group_gap_ms: int = 50  # with a store that takes money for each group
    base_interval_ms: int = 10 * MINUTE_MS
    follow_ahead_groups: int = 32
    follow_ahead_bytes: int = (
        8 * MIB
    )  # no more: all that is read at once must come within the time of one attempt

    # Index and delivery
    clock_recheck_ms: int = SECOND_MS
    due_batch_entries: int = 32_768
    read_batch_entries: int = 2_000
    replay_entries_max: int = 1_000_000
    schedule_key_cache_bytes: int = 64 * MIB
    looked_segment_bytes: int = 8 * MIB  # of the index, for the next page
    settled_key_retention_ms: int = DAY_MS
    settled_keys_per_topic_max: int = 5_000_000

    # Defaults of policies in place of those that are declared, where no setting gives one
    topic: TopicPolicy = field(default_factory=TopicPolicy)
    subscription: SubscriptionPolicy = field(default_factory=SubscriptionPolicy)
