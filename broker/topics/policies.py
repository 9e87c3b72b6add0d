"""The settings that topics and subscriptions inherit from the broker's configuration."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from broker.config import BrokerConfig
from broker.delayed.bucket_values import BucketPolicyValues
from broker.errors import InvalidRequest
from broker.policy import POLICY_SPECS, P, SubscriptionPolicy, TopicPolicy, effective, policy_value
from broker.runtime.clock import Clock
from broker.runtime.ownership import Ownership
from broker.storage.records import Record
from broker.subscriptions.giving_up import DeadLetterSink
from broker.subscriptions.services import DeliveryLimits, SubscriptionServices
from broker.subscriptions.types import SubscriptionType


def default_topic_policy(config: BrokerConfig) -> TopicPolicy:
    """The broker's own policy of topics, every field set."""
    return _default(TopicPolicy, config.tuning.topic, config)


def bucket_policy(policy: TopicPolicy) -> BucketPolicyValues:
    """Return the bucket policy of a policy in force."""
    return BucketPolicyValues(**{f.name: getattr(policy, f.name) for f in fields(BucketPolicyValues)})


def default_subscription_policy(config: BrokerConfig) -> SubscriptionPolicy:
    """The broker's own policy of subscriptions; every field set but the dead-letter topic, which has their names."""
    return _default(SubscriptionPolicy, config.tuning.subscription, config)


def _default(kind: type[P], tuned: P, config: BrokerConfig) -> P:
    """Each field from its setting, or, where there is none, as it is declared."""
    values: dict[str, Any] = {
        field_.name: policy_value(
            POLICY_SPECS[field_.name], getattr(config, field_.name, field_.metadata["default"])
        )
        for field_ in fields(kind)
    }
    return effective(tuned, kind(**values))


def check_subscription_policy(type_: int, given: SubscriptionPolicy, in_force: SubscriptionPolicy) -> None:
    """Refuse settings that do not go together, or that a subscription of that type cannot have."""
    SubscriptionType(type_).check_honor_delay(given.honor_delay)
    initial_ms, max_ms = in_force.initial_backoff_ms, in_force.max_backoff_ms
    if initial_ms is not None and max_ms is not None and initial_ms > max_ms:
        raise InvalidRequest(
            f"initial_backoff_ms would be {initial_ms}, and max_backoff_ms {max_ms}",
            field="policy.initial_backoff_ms",
            reason="INVALID_POLICY",
        )


def subscription_services(
    config: BrokerConfig,
    clock: Clock,
    ownership: Ownership,
    rng: random.Random,
    submit: Callable[[Record], asyncio.Future[None]],
    dead_letter_sink: DeadLetterSink,
) -> SubscriptionServices:
    """Return the services that the subscriptions of a topic share."""
    return SubscriptionServices(
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
        topic_shard=config.topic_shard,
    )
