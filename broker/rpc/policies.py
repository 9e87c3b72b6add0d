"""Topics, subscriptions and their settings, from and to the API's messages."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from google.protobuf.message import Message

from broker.config import BrokerConfig, check_name
from broker.errors import InvalidRequest, Refused
from broker.policy import (
    NOTHING_SET,
    POLICY_SPECS,
    EffectiveTopicPolicy,
    PolicyKind,
    SubscriptionPolicy,
    TopicPolicy,
    set_values,
)
from broker.rpc.entries import api_type, one_of
from broker.rpc.lease_lengths import check_lease_ms
from broker.settings import SettingKind, Spec
from broker.subscriptions.subscription import Subscription
from broker.topics.dead_letter_frames import dead_letter_topic_name
from broker.topics.topic import Topic
from postdate_api.v1 import admin_pb2

_BUCKET_FIELDS = frozenset(admin_pb2.BucketPolicy.DESCRIPTOR.fields_by_name)


def topic_policy_of(message: admin_pb2.TopicPolicy) -> TopicPolicy:
    given = _set_fields(message, TopicPolicy) | _set_fields(message.buckets, TopicPolicy)
    for name, value in given.items():
        if POLICY_SPECS[name].choices:
            _check_enum(name, value)
            continue
        within = "policy.buckets" if name in _BUCKET_FIELDS else "policy"
        _check_range(f"{within}.{name}", value, POLICY_SPECS[name])
    # The zero of an enum is *unspecified*: it inherits.
    return TopicPolicy(
        **{name: value for name, value in given.items() if value or not POLICY_SPECS[name].choices}
    )


def subscription_policy_of(message: admin_pb2.SubscriptionPolicy, config: BrokerConfig) -> SubscriptionPolicy:
    given = _set_fields(message, SubscriptionPolicy)
    for name, value in given.items():
        spec = POLICY_SPECS[name]
        if spec.kind is SettingKind.NAME:
            check_name("topic", value, f"policy.{name}")
        elif name == "lease_ms":
            check_lease_ms(value, f"policy.{name}", config, is_policy=True)
        elif spec.kind is not SettingKind.SWITCH:
            _check_range(f"policy.{name}", value, spec)
    return SubscriptionPolicy(**given) if given else NOTHING_SET


def _check_enum(name: str, value: int) -> None:
    kind = admin_pb2.TopicPolicy.DESCRIPTOR.fields_by_name[name].enum_type
    assert kind is not None
    if value not in kind.values_by_number:
        field, names = f"policy.{name}", [value.name for value in kind.values]
        raise InvalidRequest(
            f"{field} must be {one_of(names)}, not {value}", field=field, reason="INVALID_POLICY"
        )


def _check_range(field: str, value: float, spec: Spec) -> None:
    if not spec.is_in_range(value):
        raise InvalidRequest(
            f"{field} must be between {spec.low} and {spec.high}, not {value}",
            field=field,
            reason="INVALID_POLICY",
        )


def _set_fields(message: Message, kind: PolicyKind) -> dict[str, Any]:
    known = message.DESCRIPTOR.fields_by_name
    return {
        f.name: getattr(message, f.name) for f in fields(kind) if f.name in known and message.HasField(f.name)
    }


def masked_topic_fields(paths: Sequence[str]) -> set[str]:
    """The policy fields that an update mask names; a nested message stands for all of its fields."""
    named = _masked_fields(paths, admin_pb2.TopicPolicy)
    return named - {"buckets"} | _BUCKET_FIELDS if "buckets" in named else named


def masked_subscription_fields(paths: Sequence[str]) -> set[str]:
    """The policy fields that an update mask names."""
    return _masked_fields(paths, admin_pb2.SubscriptionPolicy)


def _masked_fields(paths: Sequence[str], kind: type[Message]) -> set[str]:
    if not paths:
        raise InvalidRequest(
            "update_mask names no field of the policy", field="update_mask", reason="EMPTY_UPDATE_MASK"
        )
    for path in paths:
        if path not in kind.DESCRIPTOR.fields_by_name:
            raise InvalidRequest(
                f"update_mask names {path[:80]!r}, which {_why_not(path, kind)}",
                field="update_mask",
                reason="UNKNOWN_POLICY_FIELD",
            )
    return set(paths)


def _why_not(path: str, kind: type[Message]) -> str:
    """Return what is wrong with a path that is no field of a policy."""
    nested = "buckets"
    if kind is admin_pb2.TopicPolicy and path.removeprefix(f"{nested}.") in _BUCKET_FIELDS:
        return f"lies in a nested message: that is replaced whole, and named by {nested!r}"
    return "is no field of a policy"


def topic_policy_message(policy: TopicPolicy | EffectiveTopicPolicy) -> admin_pb2.TopicPolicy:
    values = set_values(policy)
    buckets = {name: values.pop(name) for name in _BUCKET_FIELDS & values.keys()}
    return admin_pb2.TopicPolicy(**values, buckets=admin_pb2.BucketPolicy(**buckets) if buckets else None)


def describe_topic(topic: Topic) -> admin_pb2.Topic:
    return admin_pb2.Topic(
        name=topic.name,
        policy=topic_policy_message(topic.policies.own),
        effective_policy=topic_policy_message(topic.policy),
        create_time_ms=topic.create_time_ms,
    )


def describe_subscription(topic: Topic, subscription: Subscription) -> admin_pb2.Subscription:
    policy = replace(subscription.policy, honor_delay=subscription.honors_delay)
    with contextlib.suppress(Refused):  # the names are too long for one of their own
        place = dead_letter_topic_name(topic.name, subscription.name, policy)
        policy = replace(policy, dead_letter_topic=place)
    return admin_pb2.Subscription(
        topic=topic.name,
        name=subscription.name,
        type=api_type(subscription),
        policy=admin_pb2.SubscriptionPolicy(**set_values(subscription.image.policy)),
        effective_policy=admin_pb2.SubscriptionPolicy(**set_values(policy)),
        create_time_ms=subscription.image.create_time_ms,
        paused=subscription.paused,
    )
