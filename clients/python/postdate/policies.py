"""Settings of topics and subscriptions.

Three things can be said of each: leave it out of an update, and it stays; None, and the broker's own holds
(again); a value, and that holds, where zero means that there is none: no limit, no expiry, not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import Enum
from typing import Any, TypedDict, TypeVar

from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from postdate._time import duration_ms, span
from postdate_api.v1 import admin_pb2


class Tracker(Enum):
    """The index that a topic keeps of what is due when."""

    BUCKET = 1
    MEMORY = 2


class DelayedDelivery(Enum):
    """Says whether a topic takes messages with a time. DISABLED refuses them; what is pending stays on time."""

    ENABLED = 1
    DISABLED = 2


class OverdueAction(Enum):
    """The fate of messages whose time came while the broker was down."""

    DELIVER = 1
    EXPIRE = 2
    DEAD_LETTER = 3


@dataclass(frozen=True, slots=True)
class BucketPolicy:
    """Settings of the bucket tracker: how it seals, merges and cuts. None inherits the broker's."""

    max_buckets: int | None = None
    min_index_count: int | None = None
    seal_after: timedelta | None = None
    ledgers_per_bucket: int | None = None
    segment_time_step: timedelta | None = None
    max_segment_entries: int | None = None


@dataclass(frozen=True, slots=True)
class TopicPolicy:
    """A topic's settings. None inherits the broker's; zero means none."""

    tracker: Tracker | None = None
    tick: timedelta | None = None
    delayed_delivery: DelayedDelivery | None = None
    max_delay: timedelta | None = None
    overdue_action: OverdueAction | None = None
    default_ttl: timedelta | None = None
    retention: timedelta | None = None
    retention_bytes: int | None = None
    max_pending_messages: int | None = None
    max_pending_bytes: int | None = None
    max_produce_rate: int | None = None
    dedup_window: timedelta | None = None
    dedup_entries: int | None = None
    ledger_max_age: timedelta | None = None
    ledger_max_bytes: int | None = None
    ledger_max_entries: int | None = None
    buckets: BucketPolicy | None = None


@dataclass(frozen=True, slots=True)
class SubscriptionPolicy:
    """A subscription's settings. None inherits the broker's; zero means none.

    Without a `dead_letter_topic` dead letters go to `<topic>~<subscription>~dead-letters`.
    """

    lease: timedelta | None = None
    max_delivery_attempts: int | None = None
    initial_backoff: timedelta | None = None
    max_backoff: timedelta | None = None
    backoff_multiplier: float | None = None
    dead_letter_topic: str | None = None
    honor_delay: bool | None = None


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


PolicyT = TypeVar("PolicyT", TopicPolicy, SubscriptionPolicy, BucketPolicy)
_Policy = TopicPolicy | SubscriptionPolicy | BucketPolicy

_ENUMS: Mapping[str, type[Enum]] = {
    "tracker": Tracker,
    "delayed_delivery": DelayedDelivery,
    "overdue_action": OverdueAction,
}


def topic_policy_proto(policy: TopicPolicy) -> admin_pb2.TopicPolicy:
    proto = admin_pb2.TopicPolicy()
    _fill(proto, policy)
    return proto


def subscription_policy_proto(policy: SubscriptionPolicy) -> admin_pb2.SubscriptionPolicy:
    proto = admin_pb2.SubscriptionPolicy()
    _fill(proto, policy)
    return proto


def topic_policy(proto: admin_pb2.TopicPolicy) -> TopicPolicy:
    return _read(proto, TopicPolicy)


def subscription_policy(proto: admin_pb2.SubscriptionPolicy) -> SubscriptionPolicy:
    return _read(proto, SubscriptionPolicy)


def topic_mask(changes: TopicChanges) -> FieldMask:
    """The fields that an update is about: all that was passed, None included."""
    return _mask(admin_pb2.TopicPolicy(), changes)


def subscription_mask(changes: SubscriptionChanges) -> FieldMask:
    return _mask(admin_pb2.SubscriptionPolicy(), changes)


def _mask(proto: Message, changes: Mapping[str, object]) -> FieldMask:
    if not changes:
        raise ValueError("an update names at least one setting")
    return FieldMask(paths=[_wire_name(proto, name) for name in changes])


def _fill(proto: Message, policy: _Policy) -> None:
    for field in fields(policy):
        value = getattr(policy, field.name)
        if value is None:
            continue
        name = _wire_name(proto, field.name)
        if name != field.name:
            setattr(proto, name, duration_ms(value, field.name))
        elif isinstance(value, BucketPolicy):
            getattr(proto, name).SetInParent()
            _fill(getattr(proto, name), value)
        elif field.name in _ENUMS:
            if not isinstance(value, _ENUMS[field.name]):
                raise TypeError(f"{field.name} must be a {_ENUMS[field.name].__name__}, not {value!r}")
            setattr(proto, name, value.value)
        else:
            setattr(proto, name, value)


def _read(proto: Message, kind: type[PolicyT]) -> PolicyT:
    values: dict[str, Any] = {}
    for field in fields(kind):
        name = _wire_name(proto, field.name)
        if not proto.HasField(name):
            continue
        value = getattr(proto, name)
        if name != field.name:
            value = span(value)
        elif field.name == "buckets":
            value = _read(value, BucketPolicy)
        elif field.name in _ENUMS:
            value = _enum(_ENUMS[field.name], value)
        values[field.name] = value
    return kind(**values)


def _enum(kind: type[Enum], value: int) -> Enum | None:
    """None for *unspecified*, and for what only a later version knows."""
    return kind(value) if value in {each.value for each in kind} else None


def _wire_name(proto: Message, name: str) -> str:
    """Durations bear their unit on the wire."""
    return name if name in proto.DESCRIPTOR.fields_by_name else f"{name}_ms"
