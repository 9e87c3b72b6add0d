"""Policies: None inherits, zero means none, and an update names what it changes and nothing else."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from typing import Any, get_type_hints

import pytest

import postdate
from postdate import _policy_messages, policies
from postdate_api.v1 import admin_pb2
from tests.unit.client.fake_server import FakeBroker

FULL_TOPIC = postdate.TopicPolicy(
    tracker=postdate.Tracker.MEMORY,
    tick=timedelta(seconds=1),
    delayed_delivery=postdate.DelayedDelivery.DISABLED,
    max_delay=timedelta(days=30),
    overdue_action=postdate.OverdueAction.DEAD_LETTER,
    default_ttl=timedelta(0),
    retention=timedelta(hours=1),
    retention_bytes=5,
    max_pending_messages=6,
    max_pending_bytes=0,
    max_produce_rate=8,
    dedup_window=timedelta(minutes=9),
    dedup_entries=10,
    ledger_max_age=timedelta(hours=11),
    ledger_max_bytes=12,
    ledger_max_entries=13,
    buckets=postdate.BucketPolicy(
        max_buckets=1,
        min_index_count=2,
        seal_after=timedelta(seconds=3),
        ledgers_per_bucket=4,
        segment_time_step=timedelta(seconds=5),
        max_segment_entries=6,
    ),
)
FULL_SUBSCRIPTION = postdate.SubscriptionPolicy(
    lease=timedelta(seconds=9),
    max_delivery_attempts=0,
    initial_backoff=timedelta(0),
    max_backoff=timedelta(minutes=1),
    backoff_multiplier=1.5,
    dead_letter_topic="lost",
    honor_delay=False,
    max_delivery_rate=1.5,
    max_delivery_burst=16,
    max_leased_messages=17,
)


def test_every_setting_of_the_api_has_its_field() -> None:
    topic = _policy_messages.topic_policy_proto(FULL_TOPIC)
    assert {field.name for field, _ in topic.ListFields()} == set(topic.DESCRIPTOR.fields_by_name)
    assert {field.name for field, _ in topic.buckets.ListFields()} == set(
        topic.buckets.DESCRIPTOR.fields_by_name
    )
    assert _policy_messages.topic_policy(topic) == FULL_TOPIC
    subscription = _policy_messages.subscription_policy_proto(FULL_SUBSCRIPTION)
    assert {field.name for field, _ in subscription.ListFields()} == set(
        subscription.DESCRIPTOR.fields_by_name
    )
    assert _policy_messages.subscription_policy(subscription) == FULL_SUBSCRIPTION


def test_an_update_takes_the_fields_of_the_policy() -> None:
    pairs: list[tuple[Any, Any]] = [
        (policies.TopicChanges, postdate.TopicPolicy),
        (policies.SubscriptionChanges, postdate.SubscriptionPolicy),
    ]
    for changes, policy in pairs:
        hints = get_type_hints(policy)
        assert get_type_hints(changes) == {field.name: hints[field.name] for field in fields(policy)}


def test_none_inherits_and_zero_is_none() -> None:
    proto = _policy_messages.topic_policy_proto(postdate.TopicPolicy(default_ttl=timedelta(0)))
    assert proto == admin_pb2.TopicPolicy(default_ttl_ms=0)
    assert proto.HasField("default_ttl_ms") and not proto.HasField("max_delay_ms")
    assert _policy_messages.topic_policy(proto) == postdate.TopicPolicy(default_ttl=timedelta(0))
    unspecified = admin_pb2.TopicPolicy(tracker=admin_pb2.TRACKER_UNSPECIFIED)
    assert _policy_messages.topic_policy(unspecified) == postdate.TopicPolicy()
    unspecified.tracker = 99  # type: ignore[assignment]  # of a later version
    assert _policy_messages.topic_policy(unspecified).tracker is None


async def test_topic_update_changes_what_is_passed(broker: FakeBroker, client: postdate.Client) -> None:
    await client.topics.create(
        "t", postdate.TopicPolicy(max_delay=timedelta(days=1), max_produce_rate=5, retention_bytes=7)
    )
    updated = await client.topics.update(
        "t", max_delay=timedelta(0), max_produce_rate=None, overdue_action=postdate.OverdueAction.EXPIRE
    )
    assert updated.policy == postdate.TopicPolicy(
        max_delay=timedelta(0), retention_bytes=7, overdue_action=postdate.OverdueAction.EXPIRE
    )
    asked = broker.unary[-1]
    assert list(asked.update_mask.paths) == ["max_delay_ms", "max_produce_rate", "overdue_action"]
    assert asked.request_id
    assert not asked.policy.HasField("max_produce_rate")
    buckets = postdate.BucketPolicy(max_buckets=3)
    assert (await client.topics.update("t", buckets=buckets)).policy.buckets == buckets
    assert list(broker.unary[-1].update_mask.paths) == ["buckets"]
    assert (await client.topics.update("t", buckets=None)).policy.buckets is None


async def test_subscription_update_changes_what_is_passed(
    broker: FakeBroker, client: postdate.Client
) -> None:
    await client.subscriptions.create("t", "s", policy=FULL_SUBSCRIPTION)
    updated = await client.subscriptions.update("t", "s", max_delivery_attempts=3, dead_letter_topic=None)
    assert updated.policy.max_delivery_attempts == 3
    assert updated.policy.dead_letter_topic is None
    assert updated.policy.lease == FULL_SUBSCRIPTION.lease
    assert updated.effective_policy.lease == FULL_SUBSCRIPTION.lease
    assert list(broker.unary[-1].update_mask.paths) == ["max_delivery_attempts", "dead_letter_topic"]


async def test_update_that_makes_no_sense_is_refused_before_it_is_sent(
    broker: FakeBroker, client: postdate.Client
) -> None:
    wrong: dict[str, Any] = {"nonsense": 1}
    with pytest.raises(ValueError, match="at least one setting"):
        await client.topics.update("t")
    with pytest.raises(ValueError, match="at least one setting"):
        await client.subscriptions.update("t", "s")
    with pytest.raises(TypeError, match="nonsense"):
        await client.topics.update("t", **wrong)
    wrong = {"max_delay": 5}
    with pytest.raises(TypeError, match="max_delay must be a timedelta, not int"):
        await client.topics.update("t", **wrong)
    wrong = {"tracker": "bucket"}
    with pytest.raises(TypeError, match="tracker must be a Tracker, not 'bucket'"):
        await client.topics.update("t", **wrong)
    with pytest.raises(ValueError, match="negative"):
        await client.subscriptions.update("t", "s", lease=timedelta(-1))
    assert broker.unary == []
