"""Policies of topics and subscriptions: their fields, ranges and defaults. None inherits the broker's.

What lies outside its range is refused before it is written, so that finding it on disk is damage, and never a broker
that cannot be started again. A choice is a number, as on the wire and on disk; 0 is unspecified and inherits.

An *own* policy is what was set for one topic or subscription: a field that is None inherits. An *effective* policy has
every field set; `effective` makes it of an own one. They are two types, so that neither is taken for the other.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Never, TypeVar, overload

from broker.settings import (
    DURATION_MS_MAX,
    HOUR_MS,
    MIB,
    MINUTE_MS,
    SECOND_MS,
    Spec,
    Value,
    choice,
    count,
    duration,
    factor,
    name,
    policy,
    size,
    switch,
)

TRACKER_UNSPECIFIED = 0
TRACKER_BUCKET = 1
TRACKER_MEMORY = 2

DELAYED_ENABLED = 1
DELAYED_DISABLED = 2

OVERDUE_DELIVER = 1
OVERDUE_EXPIRE = 2
OVERDUE_DEAD_LETTER = 3

_UINT32_MAX = (1 << 32) - 1  # rows hold offsets and entry ids of 32 bits

Unset = TypeVar("Unset")
"""Type of a field that was not set: None in an own policy; an effective one has no such field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TopicFields(Generic[Unset]):
    """Fields of the policies of topics."""

    tracker: int | Unset = policy(
        "bucket",
        choice("Implementation of the delayed index; memory: for short, uniform delays.", "bucket", "memory"),
    )
    tick_ms: int | Unset = policy(
        SECOND_MS,
        duration(
            1, HOUR_MS, "Width of the time buckets of the memory tracker; delivery is exact regardless."
        ),
    )
    delayed_delivery: int | Unset = policy(
        "enabled",
        choice(
            "Accept messages with a delivery time; if disabled, pending ones are still delivered on time.",
            "enabled",
            "disabled",
        ),
    )
    max_delay_ms: int | Unset = policy(
        0, duration(0, DURATION_MS_MAX, "Longest delay accepted; 0: no limit.")
    )
    overdue_action: int | Unset = policy(
        "deliver",
        choice(
            "Action on messages that became due while the broker was down.",
            "deliver",
            "expire",
            "dead_letter",
        ),
    )
    default_ttl_ms: int | Unset = policy(
        0,
        duration(
            0, DURATION_MS_MAX, "Time to live after the due time for messages without a TTL; 0: no expiry."
        ),
    )
    retention_ms: int | Unset = policy(
        0,
        duration(
            0,
            DURATION_MS_MAX,
            "Age up to which settled messages are kept; 0: any age if retention_bytes is set, otherwise none are kept.",
        ),
    )
    retention_bytes: int | Unset = policy(
        0,
        size(
            0,
            1 << 60,
            "Bytes of settled messages kept, the youngest; 0: any number if retention_ms is set, otherwise none.",
        ),
    )
    max_pending_messages: int | Unset = policy(
        0,
        count(
            0,
            1 << 60,
            "Maximum pending messages of a subscription; above it Produce is refused; 0: no limit.",
        ),
    )
    max_pending_bytes: int | Unset = policy(
        0,
        size(
            0, 1 << 60, "Maximum pending bytes of a subscription; above it Produce is refused; 0: no limit."
        ),
    )
    max_produce_rate: int | Unset = policy(
        0, count(0, 1_000_000_000, "Maximum number of messages accepted per second and topic; 0: no limit.")
    )
    dedup_window_ms: int | Unset = policy(
        10 * MINUTE_MS,
        duration(
            0,
            DURATION_MS_MAX,
            "Time for which sequence ids of producers are remembered; 0: no deduplication.",
        ),
    )
    dedup_entries: int | Unset = policy(
        10_000, count(1, 1_000_000, "Maximum number of sequence ids remembered per producer.")
    )
    ledger_max_age_ms: int | Unset = policy(
        0, duration(0, DURATION_MS_MAX, "Age at which a ledger is rolled; 0: no limit.")
    )
    ledger_max_bytes: int | Unset = policy(
        256 * MIB, size(1, _UINT32_MAX, "Size at which a ledger is rolled.")
    )
    ledger_max_entries: int | Unset = policy(
        1_000_000, count(1, _UINT32_MAX, "Number of entries at which a ledger is rolled.")
    )
    max_buckets: int | Unset = policy(
        64,
        count(
            1,
            10_000,
            "Maximum number of sealed buckets; below it too, every eight neighbours of similar size are merged.",
        ),
    )
    min_index_count: int | Unset = policy(
        50_000,
        count(1, 100_000_000, "Number of unsealed index entries at which a bucket is written (sealed)."),
    )
    seal_after_ms: int | Unset = policy(
        60 * SECOND_MS,
        duration(1, DURATION_MS_MAX, "Age of the oldest unsealed index entry at which a bucket is sealed."),
    )
    ledgers_per_bucket: int | Unset = policy(
        50, count(1, _UINT32_MAX, "Number of ledgers covered by an unsealed bucket above which it is sealed.")
    )
    segment_time_step_ms: int | Unset = policy(
        300 * SECOND_MS, duration(1, DURATION_MS_MAX, "Range of due times in one bucket segment.")
    )
    max_segment_entries: int | Unset = policy(
        5_000, count(1, 1_000_000, "Maximum number of entries in one bucket segment.")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SubscriptionFields(Generic[Unset]):
    """Fields of the policies of subscriptions."""

    lease_ms: int | Unset = policy(
        30 * SECOND_MS,
        duration(
            1,
            DURATION_MS_MAX,
            "Lease of a delivered message: time to acknowledge it before it is redelivered.",
        ),
    )
    max_delivery_attempts: int | Unset = policy(
        0, count(0, 1_000_000, "Number of deliveries after which a message is dead-lettered; 0: never.")
    )
    initial_backoff_ms: int | Unset = policy(
        SECOND_MS,
        duration(
            0,
            DURATION_MS_MAX,
            "Delay before the first redelivery of a nacked message; jitter shortens it by up to half.",
        ),
    )
    max_backoff_ms: int | Unset = policy(
        MINUTE_MS,
        duration(0, DURATION_MS_MAX, "Maximum delay before a redelivery; jitter shortens it by up to half."),
    )
    backoff_multiplier: float | Unset = policy(
        2.0, factor(1, 100, "Factor by which the redelivery delay grows with each attempt.")
    )
    dead_letter_topic: str | None = policy(
        None, name("Topic of dead letters; if not set, TOPIC~NAME~dead-letters.")
    )
    honor_delay: bool | Unset = policy(
        False,
        switch("Honour delivery times on an exclusive or failover subscription; otherwise they are ignored."),
    )
    max_delivery_rate: float | Unset = policy(
        0.0,
        factor(
            0,
            1_000_000_000,
            "Maximum number of messages delivered per second, to all consumers together; 0: no limit.",
        ),
    )
    max_delivery_burst: int | Unset = policy(
        0,
        count(
            0,
            1_000_000_000,
            "Maximum number of messages delivered at once under a delivery rate; 0: a tenth of a second's worth.",
        ),
    )
    max_leased_messages: int | Unset = policy(
        0,
        count(
            0,
            1_000_000_000,
            "Maximum number of messages leased at once, to all consumers together; 0: no limit.",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicPolicy(_TopicFields[None]):
    """Own policy of one topic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveTopicPolicy(_TopicFields[Never]):
    """Effective policy of one topic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionPolicy(_SubscriptionFields[None]):
    """Own policy of one subscription."""


NOTHING_SET = SubscriptionPolicy()
"""The own policy of most subscriptions, one for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveSubscriptionPolicy(_SubscriptionFields[Never]):
    """Effective policy of one subscription; its dead-letter topic is named after it where none is set."""


POLICY_SPECS: dict[str, Spec] = {
    field_.name: field_.metadata["spec"]
    for kind in (TopicPolicy, SubscriptionPolicy)
    for field_ in fields(kind)
}
"""Spec of each policy field; no name is in both policies."""

PolicyKind = type[TopicPolicy] | type[SubscriptionPolicy]


@overload
def effective(own: TopicPolicy, defaults: EffectiveTopicPolicy) -> EffectiveTopicPolicy: ...
@overload
def effective(
    own: SubscriptionPolicy, defaults: EffectiveSubscriptionPolicy
) -> EffectiveSubscriptionPolicy: ...
def effective(own: Any, defaults: Any) -> Any:
    """Return an own policy with what it leaves open taken from `defaults`; those themselves if it sets nothing."""
    given = set_values(own)
    return replace(defaults, **given) if given else defaults


def set_values(policy: _TopicFields[Any] | _SubscriptionFields[Any]) -> dict[str, Any]:
    """Return the fields of a policy that are set."""
    return {f.name: value for f in fields(policy) if (value := getattr(policy, f.name)) is not None}


def policy_value(spec: Spec, value: Value | None) -> Value | None:
    """The value of a setting as policies hold it: a choice by its number."""
    return spec.number(value) if spec.choices and isinstance(value, str) else value
