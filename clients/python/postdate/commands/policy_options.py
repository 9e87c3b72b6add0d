"""Options for policies. Written by `python -m tools.policies`; a test compares the two."""

from __future__ import annotations

from typing import NamedTuple


class PolicyOption(NamedTuple):
    """An option of `topic` and `subscription`: field of the policy, kind of value, least value, help."""

    name: str
    kind: str
    least: float
    help: str


BUCKET_OPTIONS = (
    PolicyOption(
        "max_buckets",
        "count",
        1,
        "Maximum number of sealed buckets; below it too, every eight neighbours of similar size are merged.",
    ),
    PolicyOption(
        "min_index_count",
        "count",
        1,
        "Number of unsealed index entries at which a bucket is written (sealed).",
    ),
    PolicyOption(
        "seal_after",
        "duration",
        1,
        "Age of the oldest unsealed index entry at which a bucket is sealed.",
    ),
    PolicyOption(
        "ledgers_per_bucket",
        "count",
        1,
        "Number of ledgers covered by an unsealed bucket above which it is sealed.",
    ),
    PolicyOption("segment_time_step", "duration", 1, "Range of due times in one bucket segment."),
    PolicyOption("max_segment_entries", "count", 1, "Maximum number of entries in one bucket segment."),
)
TOPIC_OPTIONS = (
    PolicyOption(
        "tracker",
        "choice",
        0,
        "Implementation of the delayed index; memory: for short, uniform delays.",
    ),
    PolicyOption(
        "tick",
        "duration",
        1,
        "Width of the time buckets of the memory tracker; delivery is exact regardless.",
    ),
    PolicyOption(
        "delayed_delivery",
        "choice",
        0,
        "Accept messages with a delivery time; if disabled, pending ones are still delivered on time.",
    ),
    PolicyOption("max_delay", "duration", 0, "Longest delay accepted; 0: no limit."),
    PolicyOption(
        "overdue_action",
        "choice",
        0,
        "Action on messages that became due while the broker was down.",
    ),
    PolicyOption(
        "default_ttl",
        "duration",
        0,
        "Time to live after the due time for messages without a TTL; 0: no expiry.",
    ),
    PolicyOption(
        "retention",
        "duration",
        0,
        "Age up to which settled messages are kept; 0: any age if retention_bytes is set, otherwise none are kept.",
    ),
    PolicyOption(
        "retention_bytes",
        "size",
        0,
        "Bytes of settled messages kept, the youngest; 0: any number if retention_ms is set, otherwise none.",
    ),
    PolicyOption(
        "max_pending_messages",
        "count",
        0,
        "Maximum pending messages of a subscription; above it Produce is refused; 0: no limit.",
    ),
    PolicyOption(
        "max_pending_bytes",
        "size",
        0,
        "Maximum pending bytes of a subscription; above it Produce is refused; 0: no limit.",
    ),
    PolicyOption(
        "max_produce_rate",
        "count",
        0,
        "Maximum number of messages accepted per second and topic; 0: no limit.",
    ),
    PolicyOption(
        "dedup_window",
        "duration",
        0,
        "Time for which sequence ids of producers are remembered; 0: no deduplication.",
    ),
    PolicyOption("dedup_entries", "count", 1, "Maximum number of sequence ids remembered per producer."),
    PolicyOption("ledger_max_age", "duration", 0, "Age at which a ledger is rolled; 0: no limit."),
    PolicyOption("ledger_max_bytes", "size", 1, "Size at which a ledger is rolled."),
    PolicyOption("ledger_max_entries", "count", 1, "Number of entries at which a ledger is rolled."),
)
SUBSCRIPTION_OPTIONS = (
    PolicyOption(
        "lease",
        "duration",
        1,
        "Lease of a delivered message: time to acknowledge it before it is redelivered.",
    ),
    PolicyOption(
        "max_delivery_attempts",
        "count",
        0,
        "Number of deliveries after which a message is dead-lettered; 0: never.",
    ),
    PolicyOption(
        "initial_backoff",
        "duration",
        0,
        "Delay before the first redelivery of a nacked message; jitter shortens it by up to half.",
    ),
    PolicyOption(
        "max_backoff",
        "duration",
        0,
        "Maximum delay before a redelivery; jitter shortens it by up to half.",
    ),
    PolicyOption(
        "backoff_multiplier",
        "factor",
        1,
        "Factor by which the redelivery delay grows with each attempt.",
    ),
    PolicyOption(
        "dead_letter_topic",
        "name",
        0,
        "Topic of dead letters; if not set, TOPIC~NAME~dead-letters.",
    ),
    PolicyOption(
        "honor_delay",
        "switch",
        0,
        "Honour delivery times on an exclusive or failover subscription; otherwise they are ignored.",
    ),
    PolicyOption(
        "max_delivery_rate",
        "factor",
        0,
        "Maximum number of messages delivered per second, to all consumers together; 0: no limit.",
    ),
    PolicyOption(
        "max_delivery_burst",
        "count",
        0,
        "Maximum number of messages delivered at once under a delivery rate; 0: a tenth of a second's worth.",
    ),
    PolicyOption(
        "max_leased_messages",
        "count",
        0,
        "Maximum number of messages leased at once, to all consumers together; 0: no limit.",
    ),
)
