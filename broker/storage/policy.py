"""Settings of topics and subscriptions as they are stored. None inherits the broker's own.

Each has a range. What lies outside is refused before it is written, so that finding it on disk is damage, and
never a broker that cannot be started again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from broker.config import is_name
from broker.errors import InvalidRequest
from broker.storage.v1 import manifest_pb2 as pb

TRACKER_UNSPECIFIED = 0
TRACKER_BUCKET = 1
TRACKER_MEMORY = 2

DELAYED_ENABLED = 1
DELAYED_DISABLED = 2

OVERDUE_DELIVER = 1
OVERDUE_EXPIRE = 2
OVERDUE_DEAD_LETTER = 3

_MS_MAX = 1 << 53
_UINT32_MAX = (1 << 32) - 1  # rows hold offsets and entry ids of 32 bits

RANGES: dict[str, tuple[float, float]] = {
    "tracker": (TRACKER_UNSPECIFIED, TRACKER_MEMORY),
    "tick_ms": (1, 3_600_000),
    "max_delay_ms": (0, _MS_MAX),
    "default_ttl_ms": (0, _MS_MAX),
    "ledger_max_age_ms": (0, _MS_MAX),
    "ledger_max_bytes": (1, _UINT32_MAX),
    "ledger_max_entries": (1, _UINT32_MAX),
    "min_index_count": (1, 100_000_000),
    "ledgers_per_bucket": (1, _UINT32_MAX),
    "seal_after_ms": (1, _MS_MAX),
    "max_buckets": (1, 10_000),
    "segment_time_step_ms": (1, _MS_MAX),
    "max_segment_entries": (1, 1_000_000),
    "delayed_delivery": (0, DELAYED_DISABLED),
    "retention_ms": (0, _MS_MAX),
    "retention_bytes": (0, 1 << 60),
    "max_pending_messages": (0, 1 << 60),
    "max_pending_bytes": (0, 1 << 60),
    "max_produce_rate": (0, 1_000_000_000),
    "overdue_action": (0, OVERDUE_DEAD_LETTER),
    "dedup_window_ms": (0, _MS_MAX),
    "dedup_entries": (1, 1_000_000),
    "lease_ms": (1, _MS_MAX),
    "initial_backoff_ms": (0, _MS_MAX),
    "max_backoff_ms": (0, _MS_MAX),
    "backoff_multiplier": (1, 100),
    "max_delivery_attempts": (0, 1_000_000),
}

P = TypeVar("P", "TopicPolicy", "SubscriptionPolicy")


@dataclass(frozen=True, slots=True)
class TopicPolicy:
    """Settings of one topic, or (all fields set) those in force."""

    tracker: int | None = None
    tick_ms: int | None = None
    max_delay_ms: int | None = None
    default_ttl_ms: int | None = None
    ledger_max_age_ms: int | None = None
    ledger_max_bytes: int | None = None
    ledger_max_entries: int | None = None
    min_index_count: int | None = None
    ledgers_per_bucket: int | None = None
    seal_after_ms: int | None = None
    max_buckets: int | None = None
    segment_time_step_ms: int | None = None
    max_segment_entries: int | None = None
    delayed_delivery: int | None = None
    retention_ms: int | None = None
    retention_bytes: int | None = None
    max_pending_messages: int | None = None
    max_pending_bytes: int | None = None
    max_produce_rate: int | None = None
    overdue_action: int | None = None
    dedup_window_ms: int | None = None
    dedup_entries: int | None = None


@dataclass(frozen=True, slots=True)
class SubscriptionPolicy:
    """Settings of one subscription, or (all fields set) those in force."""

    lease_ms: int | None = None
    initial_backoff_ms: int | None = None
    max_backoff_ms: int | None = None
    backoff_multiplier: float | None = None
    honor_delay: bool | None = None
    max_delivery_attempts: int | None = None
    dead_letter_topic: str | None = None


def effective(policy: P, defaults: P) -> P:
    """`policy` with what it leaves open taken from `defaults`."""
    unset = {f.name: getattr(defaults, f.name) for f in fields(policy) if getattr(policy, f.name) is None}
    return replace(policy, **unset)


def topic_policy_from_record(record: pb.TopicPolicyRecord) -> TopicPolicy:
    """Raises ValueError for a value out of its range."""
    return TopicPolicy(**_set_fields(record, TopicPolicy))


def topic_policy_to_record(policy: TopicPolicy) -> pb.TopicPolicyRecord:
    return pb.TopicPolicyRecord(**_values(policy))


def subscription_policy_from_record(record: pb.SubscriptionPolicyRecord) -> SubscriptionPolicy:
    """Raises ValueError for a value out of its range."""
    return SubscriptionPolicy(**_set_fields(record, SubscriptionPolicy))


def subscription_policy_to_record(policy: SubscriptionPolicy) -> pb.SubscriptionPolicyRecord:
    return pb.SubscriptionPolicyRecord(**_values(policy))


def _set_fields(record: Any, kind: type[TopicPolicy] | type[SubscriptionPolicy]) -> dict[str, Any]:
    found = {f.name: getattr(record, f.name) for f in fields(kind) if record.HasField(f.name)}
    for name, value in found.items():
        if not _is_in_range(name, value):
            raise ValueError(f"{name} is {value}")
    return found


def _values(policy: TopicPolicy | SubscriptionPolicy) -> dict[str, Any]:
    values = {f.name: value for f in fields(policy) if (value := getattr(policy, f.name)) is not None}
    for name, value in values.items():
        if not _is_in_range(name, value):
            raise InvalidRequest(
                f"policy.{name} cannot be {value!r}", field=f"policy.{name}", reason="INVALID_POLICY"
            )
    return values


def _is_in_range(name: str, value: float | str) -> bool:
    if isinstance(value, str):
        return is_name(value)  # of a topic
    low, high = RANGES.get(name, (0, 1))  # honor_delay is a bool
    return low <= value <= high  # false for NaN
