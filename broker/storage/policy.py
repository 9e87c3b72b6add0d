"""Policies as the journal and manifests store them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from broker.errors import InvalidRequest
from broker.policy import NOTHING_SET, POLICY_SPECS, PolicyKind, SubscriptionPolicy, TopicPolicy, set_values
from broker.storage.v1 import manifest_pb2 as pb


def topic_policy_from_record(record: pb.TopicPolicyRecord) -> TopicPolicy:
    """Raises ValueError for a value out of its range."""
    return TopicPolicy(**_set_fields(record, TopicPolicy))


def topic_policy_to_record(policy: TopicPolicy) -> pb.TopicPolicyRecord:
    return pb.TopicPolicyRecord(**_values(policy))


def subscription_policy_from_record(record: pb.SubscriptionPolicyRecord) -> SubscriptionPolicy:
    """Raises ValueError for a value out of its range."""
    given = _set_fields(record, SubscriptionPolicy)
    return SubscriptionPolicy(**given) if given else NOTHING_SET


def subscription_policy_to_record(policy: SubscriptionPolicy) -> pb.SubscriptionPolicyRecord:
    return pb.SubscriptionPolicyRecord(**_values(policy))


def _set_fields(record: Any, kind: PolicyKind) -> dict[str, Any]:
    values = {f.name: getattr(record, f.name) for f in fields(kind) if record.HasField(f.name)}
    for name, value in values.items():
        if not POLICY_SPECS[name].is_in_range(value):
            raise ValueError(f"{name} is {value}")
    return values


def _values(policy: TopicPolicy | SubscriptionPolicy) -> dict[str, Any]:
    values = set_values(policy)
    for name, value in values.items():
        if not POLICY_SPECS[name].is_in_range(value):
            raise InvalidRequest(
                f"policy.{name} cannot be {value!r}", field=f"policy.{name}", reason="INVALID_POLICY"
            )
    return values
