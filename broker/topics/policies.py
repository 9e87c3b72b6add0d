"""Policies of topics and subscriptions: what they inherit from the broker's settings, and checks of changed ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from broker.config import BrokerConfig
from broker.delayed.bucket_values import BucketPolicyValues
from broker.errors import InvalidRequest
from broker.policy import (
    DELAYED_ENABLED,
    POLICY_SPECS,
    EffectiveSubscriptionPolicy,
    EffectiveTopicPolicy,
    PolicyKind,
    SubscriptionPolicy,
    TopicPolicy,
    effective,
    policy_value,
)
from broker.runtime.clock import Clock
from broker.runtime.ownership import Ownership
from broker.storage.records import Record
from broker.subscriptions.giving_up import DeadLetterSink
from broker.subscriptions.reasons import ReasonsMemory
from broker.subscriptions.services import DeliveryLimits, SubscriptionServices
from broker.subscriptions.types import SubscriptionType


def default_topic_policy(config: BrokerConfig) -> EffectiveTopicPolicy:
    """The broker's own policy of topics."""
    declared = EffectiveTopicPolicy(**_declared(TopicPolicy, config))
    return effective(config.tuning.topic, declared)


def without_delay_limits(policy: EffectiveTopicPolicy) -> EffectiveTopicPolicy:
    """Return a policy without the limits on times that producers give: what the broker stores itself has none."""
    return replace(policy, max_delay_ms=0, delayed_delivery=DELAYED_ENABLED)


def bucket_policy(policy: EffectiveTopicPolicy) -> BucketPolicyValues:
    """Return the bucket policy of an effective one."""
    return BucketPolicyValues(**{f.name: getattr(policy, f.name) for f in fields(BucketPolicyValues)})


def default_subscription_policy(config: BrokerConfig) -> EffectiveSubscriptionPolicy:
    """The broker's own policy of subscriptions."""
    declared = EffectiveSubscriptionPolicy(**_declared(SubscriptionPolicy, config))
    return effective(config.tuning.subscription, declared)


def _declared(kind: PolicyKind, config: BrokerConfig) -> dict[str, Any]:
    """Return the value of each field from its setting, or, where there is none, as it is declared."""
    return {
        field_.name: policy_value(
            POLICY_SPECS[field_.name], getattr(config, field_.name, field_.metadata["default"])
        )
        for field_ in fields(kind)
    }


def check_subscription_policy(
    type_: int, own: SubscriptionPolicy, effective: EffectiveSubscriptionPolicy
) -> None:
    """Refuse settings that do not go together, or that a subscription of that type cannot have."""
    SubscriptionType(type_).check_honor_delay(own.honor_delay)
    initial_ms, max_ms = effective.initial_backoff_ms, effective.max_backoff_ms
    if initial_ms > max_ms:
        raise InvalidRequest(
            f"initial_backoff_ms ({initial_ms}) must not exceed max_backoff_ms ({max_ms})",
            field="policy.initial_backoff_ms",
            reason="INVALID_POLICY",
        )


def subscription_services(
    topic_name: str,
    config: BrokerConfig,
    clock: Clock,
    ownership: Ownership,
    rng: random.Random,
    submit: Callable[[Record], asyncio.Future[None]],
    dead_letter_sink: DeadLetterSink,
    reasons_memory: ReasonsMemory,
) -> SubscriptionServices:
    """Return the services that the subscriptions of a topic share."""
    return SubscriptionServices(
        topic_name=topic_name,
        defaults=default_subscription_policy(config),
        limits=DeliveryLimits(
            batch_entries=config.tuning.read_batch_entries,
            batch_bytes=config.frame_bytes_max,
            replay_entries_max=config.tuning.replay_entries_max,
            consumers_max=config.consumers_per_subscription_max,
        ),
        clock=clock,
        ownership=ownership,
        rng=rng,
        submit=submit,
        dead_letter_sink=dead_letter_sink,
        reasons_memory=reasons_memory,
        topic_shard=config.topic_shard,
    )
