"""The settings that topics and subscriptions inherit from the broker's configuration."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import fields

from broker.config import BrokerConfig
from broker.delayed.bucket_values import BucketPolicyValues
from broker.errors import InvalidRequest, Refused
from broker.runtime.clock import Clock
from broker.storage.policy import (
    DELAYED_DISABLED,
    DELAYED_ENABLED,
    OVERDUE_DEAD_LETTER,
    OVERDUE_DELIVER,
    OVERDUE_EXPIRE,
    TRACKER_BUCKET,
    TRACKER_MEMORY,
    SubscriptionPolicy,
    TopicPolicy,
)
from broker.storage.records import Record
from broker.subscriptions.giving_up import DeadLetterSink
from broker.subscriptions.services import DeliveryLimits, SubscriptionServices
from broker.subscriptions.subscription import KEY_SHARED, SHARED, TYPE_NAMES

_OVERDUE_ACTIONS = {
    "deliver": OVERDUE_DELIVER,
    "expire": OVERDUE_EXPIRE,
    "dead_letter": OVERDUE_DEAD_LETTER,
}


def default_topic_policy(config: BrokerConfig) -> TopicPolicy:
    """The broker's own settings for topics, every field set."""
    return TopicPolicy(
        tracker=TRACKER_MEMORY if config.tracker == "memory" else TRACKER_BUCKET,
        tick_ms=config.tick_ms,
        max_delay_ms=config.max_delay_ms,
        default_ttl_ms=config.default_ttl_ms,
        ledger_max_age_ms=config.ledger_max_age_ms,
        ledger_max_bytes=config.ledger_bytes_max,
        ledger_max_entries=config.ledger_entries_max,
        min_index_count=config.min_index_count,
        ledgers_per_bucket=config.ledgers_per_bucket,
        seal_after_ms=config.seal_after_ms,
        max_buckets=config.max_buckets,
        segment_time_step_ms=config.segment_time_step_ms,
        max_segment_entries=config.max_segment_entries,
        delayed_delivery=DELAYED_ENABLED if config.delayed_delivery == "enabled" else DELAYED_DISABLED,
        retention_ms=config.retention_ms,
        retention_bytes=config.retention_bytes,
        max_pending_messages=config.max_pending_messages,
        max_pending_bytes=config.max_pending_bytes,
        max_produce_rate=config.max_produce_rate,
        overdue_action=_OVERDUE_ACTIONS[config.overdue_action],
        dedup_window_ms=config.dedup_window_ms,
        dedup_entries=config.dedup_entries,
    )


def bucket_policy(policy: TopicPolicy) -> BucketPolicyValues:
    """What a policy in force says of the buckets."""
    return BucketPolicyValues(**{f.name: getattr(policy, f.name) for f in fields(BucketPolicyValues)})


def default_subscription_policy(config: BrokerConfig) -> SubscriptionPolicy:
    """The broker's own settings for subscriptions; every field set but the dead-letter topic, which has their names."""
    return SubscriptionPolicy(
        lease_ms=config.lease_ms,
        initial_backoff_ms=config.initial_backoff_ms,
        max_backoff_ms=config.max_backoff_ms,
        backoff_multiplier=config.backoff_multiplier,
        honor_delay=False,
        max_delivery_attempts=config.max_delivery_attempts,
    )


def check_subscription_policy(type_: int, given: SubscriptionPolicy, in_force: SubscriptionPolicy) -> None:
    """Refuse settings that do not go together, or that a subscription of that type cannot have."""
    if given.honor_delay is False and type_ in (SHARED, KEY_SHARED):
        raise Refused(
            f"A {TYPE_NAMES[type_]} subscription honours delivery times", reason="HONOR_DELAY_MISMATCH"
        )
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
    rng: random.Random,
    submit: Callable[[Record], asyncio.Future[None]],
    dead_letter_sink: DeadLetterSink,
) -> SubscriptionServices:
    """What the subscriptions of a topic share."""
    return SubscriptionServices(
        defaults=default_subscription_policy(config),
        limits=DeliveryLimits(
            batch_entries=config.read_batch_entries,
            batch_bytes=config.frame_bytes_max,
            replay_entries_max=config.replay_entries_max,
            consumers_max=config.consumers_per_subscription_max,
        ),
        clock=clock,
        rng=rng,
        submit=submit,
        dead_letter_sink=dead_letter_sink,
    )
