"""Settings of topics and subscriptions as they are stored. None inherits the broker's own."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from broker.storage.v1 import manifest_pb2 as pb

TRACKER_UNSPECIFIED = 0
TRACKER_BUCKET = 1
TRACKER_MEMORY = 2

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


@dataclass(frozen=True, slots=True)
class SubscriptionPolicy:
    """Settings of one subscription, or (all fields set) those in force."""

    lease_ms: int | None = None
    initial_backoff_ms: int | None = None
    max_backoff_ms: int | None = None
    backoff_multiplier: float | None = None
    honor_delay: bool | None = None


def effective(policy: P, defaults: P) -> P:
    """`policy` with what it leaves open taken from `defaults`."""
    unset = {f.name: getattr(defaults, f.name) for f in fields(policy) if getattr(policy, f.name) is None}
    return replace(policy, **unset)


def topic_policy_from_record(record: Any) -> TopicPolicy:
    return TopicPolicy(**_set_fields(record, TopicPolicy))


def topic_policy_to_record(policy: TopicPolicy) -> pb.TopicPolicyRecord:
    return pb.TopicPolicyRecord(**_values(policy))


def subscription_policy_from_record(record: Any) -> SubscriptionPolicy:
    return SubscriptionPolicy(**_set_fields(record, SubscriptionPolicy))


def subscription_policy_to_record(policy: SubscriptionPolicy) -> pb.SubscriptionPolicyRecord:
    return pb.SubscriptionPolicyRecord(**_values(policy))


def _set_fields(record: Any, kind: type[TopicPolicy] | type[SubscriptionPolicy]) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in fields(kind) if record.HasField(f.name)}


def _values(policy: TopicPolicy | SubscriptionPolicy) -> dict[str, Any]:
    return {f.name: value for f in fields(policy) if (value := getattr(policy, f.name)) is not None}
