"""Settings of topics and subscriptions. Written by `python -m tools.policies`; a test compares the two.

Three things can be said of each: leave it out of an update, and it stays; None, and the broker's own holds
(again); a value, and that holds, where zero means that there is none: no limit, no expiry, not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import TypedDict


class Tracker(Enum):
    """Implementation of the delayed index; memory: for short, uniform delays."""

    BUCKET = 1
    MEMORY = 2


class DelayedDelivery(Enum):
    """Accept messages with a delivery time; if disabled, pending ones are still delivered on time."""

    ENABLED = 1
    DISABLED = 2


class OverdueAction(Enum):
    """Action on messages that became due while the broker was down."""

    DELIVER = 1
    EXPIRE = 2
    DEAD_LETTER = 3


@dataclass(frozen=True, slots=True)
class BucketPolicy:
    """Settings of the bucket tracker: how it seals, merges and cuts. None inherits the broker's."""

    max_buckets: int | None = None
    """Maximum number of sealed buckets; below it too, every eight neighbours of similar size are merged."""
    min_index_count: int | None = None
    """Number of unsealed index entries at which a bucket is written (sealed)."""
    seal_after: timedelta | None = None
    """Age of the oldest unsealed index entry at which a bucket is sealed."""
    ledgers_per_bucket: int | None = None
    """Number of ledgers covered by an unsealed bucket above which it is sealed."""
    segment_time_step: timedelta | None = None
    """Range of due times in one bucket segment."""
    max_segment_entries: int | None = None
    """Maximum number of entries in one bucket segment."""


@dataclass(frozen=True, slots=True)
class TopicPolicy:
    """A topic's settings. None inherits the broker's; zero means none."""

    tracker: Tracker | None = None
    """Implementation of the delayed index; memory: for short, uniform delays."""
    tick: timedelta | None = None
    """Width of the time buckets of the memory tracker; delivery is exact regardless."""
    delayed_delivery: DelayedDelivery | None = None
    """Accept messages with a delivery time; if disabled, pending ones are still delivered on time."""
    max_delay: timedelta | None = None
    """Longest delay accepted; 0: no limit."""
    overdue_action: OverdueAction | None = None
    """Action on messages that became due while the broker was down."""
    default_ttl: timedelta | None = None
    """Time to live after the due time for messages without a TTL; 0: no expiry."""
    retention: timedelta | None = None
    """Age up to which settled messages are kept; 0: any age if retention_bytes is set, otherwise none are
    kept."""
    retention_bytes: int | None = None
    """Bytes of settled messages kept, the youngest; 0: any number if retention_ms is set, otherwise
    none."""
    max_pending_messages: int | None = None
    """Maximum pending messages of a subscription; above it Produce is refused; 0: no limit."""
    max_pending_bytes: int | None = None
    """Maximum pending bytes of a subscription; above it Produce is refused; 0: no limit."""
    max_produce_rate: int | None = None
    """Maximum number of messages accepted per second and topic; 0: no limit."""
    dedup_window: timedelta | None = None
    """Time for which sequence ids of producers are remembered; 0: no deduplication."""
    dedup_entries: int | None = None
    """Maximum number of sequence ids remembered per producer."""
    ledger_max_age: timedelta | None = None
    """Age at which a ledger is rolled; 0: no limit."""
    ledger_max_bytes: int | None = None
    """Size at which a ledger is rolled."""
    ledger_max_entries: int | None = None
    """Number of entries at which a ledger is rolled."""
    buckets: BucketPolicy | None = None
    """Settings of the bucket tracker."""


@dataclass(frozen=True, slots=True)
class SubscriptionPolicy:
    """A subscription's settings. None inherits the broker's; zero means none."""

    lease: timedelta | None = None
    """Lease of a delivered message: time to acknowledge it before it is redelivered."""
    max_delivery_attempts: int | None = None
    """Number of deliveries after which a message is dead-lettered; 0: never."""
    initial_backoff: timedelta | None = None
    """Delay before the first redelivery of a nacked message; jitter shortens it by up to half."""
    max_backoff: timedelta | None = None
    """Maximum delay before a redelivery; jitter shortens it by up to half."""
    backoff_multiplier: float | None = None
    """Factor by which the redelivery delay grows with each attempt."""
    dead_letter_topic: str | None = None
    """Topic of dead letters; if not set, TOPIC~NAME~dead-letters."""
    honor_delay: bool | None = None
    """Honour delivery times on an exclusive or failover subscription; otherwise they are ignored."""
    max_delivery_rate: float | None = None
    """Maximum number of messages delivered per second, to all consumers together; 0: no limit."""
    max_delivery_burst: int | None = None
    """Maximum number of messages delivered at once under a delivery rate; 0: a tenth of a second's
    worth."""
    max_leased_messages: int | None = None
    """Maximum number of messages leased at once, to all consumers together; 0: no limit."""


class TopicChanges(TypedDict, total=False):
    """Arguments of `Topics.update`: the fields of `TopicPolicy`."""

    tracker: Tracker | None
    tick: timedelta | None
    delayed_delivery: DelayedDelivery | None
    max_delay: timedelta | None
    overdue_action: OverdueAction | None
    default_ttl: timedelta | None
    retention: timedelta | None
    retention_bytes: int | None
    max_pending_messages: int | None
    max_pending_bytes: int | None
    max_produce_rate: int | None
    dedup_window: timedelta | None
    dedup_entries: int | None
    ledger_max_age: timedelta | None
    ledger_max_bytes: int | None
    ledger_max_entries: int | None
    buckets: BucketPolicy | None


class SubscriptionChanges(TypedDict, total=False):
    """Arguments of `Subscriptions.update`: the fields of `SubscriptionPolicy`."""

    lease: timedelta | None
    max_delivery_attempts: int | None
    initial_backoff: timedelta | None
    max_backoff: timedelta | None
    backoff_multiplier: float | None
    dead_letter_topic: str | None
    honor_delay: bool | None
    max_delivery_rate: float | None
    max_delivery_burst: int | None
    max_leased_messages: int | None
