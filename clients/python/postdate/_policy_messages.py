"""Policies as messages of the API, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any, TypeVar

from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from postdate._time import duration_ms, span
from postdate.policies import (
    BucketPolicy,
    DelayedDelivery,
    OverdueAction,
    SubscriptionChanges,
    SubscriptionPolicy,
    TopicChanges,
    TopicPolicy,
    Tracker,
)
from postdate_api.v1 import admin_pb2

PolicyT = TypeVar("PolicyT", TopicPolicy, SubscriptionPolicy, BucketPolicy)
_Policy = TopicPolicy | SubscriptionPolicy | BucketPolicy

CHOICES: Mapping[str, type[Enum]] = {
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
        elif field.name in CHOICES:
            if not isinstance(value, CHOICES[field.name]):
                raise TypeError(f"{field.name} must be a {CHOICES[field.name].__name__}, not {value!r}")
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
        elif field.name in CHOICES:
            value = _enum(CHOICES[field.name], value)
        values[field.name] = value
    return kind(**values)


def _enum(kind: type[Enum], value: int) -> Enum | None:
    """None for *unspecified*, and for what only a later version knows."""
    return kind(value) if value in {each.value for each in kind} else None


def _wire_name(proto: Message, name: str) -> str:
    """Durations bear their unit on the wire."""
    return name if name in proto.DESCRIPTOR.fields_by_name else f"{name}_ms"
