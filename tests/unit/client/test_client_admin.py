"""Topics, subscriptions, stats and server info as plain values; unary calls that retry."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

import postdate
from tests.unit.client.fake_server import FakeBroker
from tests.unit.client.fake_values import status


async def test_topic_is_created_shown_listed_and_deleted(broker: FakeBroker, client: postdate.Client) -> None:
    policy = postdate.TopicPolicy(
        tracker=postdate.Tracker.BUCKET,
        tick=timedelta(seconds=2),
        max_delay=timedelta(0),
        ledger_max_entries=5,
    )
    created = await client.topics.create("a", policy)
    assert created.policy == policy
    assert created.effective_policy == replace(policy, dedup_window=timedelta(minutes=1))
    assert created.create_time.year == 2023
    assert (await client.topics.get("a")) == created
    for name in "bcde":
        await client.topics.create(name)
    assert [topic.name async for topic in client.topics.list()] == list("abcde")
    await client.topics.delete("c")
    with pytest.raises(postdate.NotFound) as caught:
        await client.topics.get("c")
    assert caught.value.reason == "TOPIC_NOT_FOUND"
    assert caught.value.metadata == {"topic": "c"}
    with pytest.raises(postdate.AlreadyExists):
        await client.topics.create("a")


async def test_subscription_is_created_shown_listed_and_deleted(
    broker: FakeBroker, client: postdate.Client
) -> None:
    policy = postdate.SubscriptionPolicy(
        lease=timedelta(seconds=9), backoff_multiplier=2.0, honor_delay=False
    )
    created = await client.subscriptions.create(
        "t",
        "s",
        type=postdate.SubscriptionType.FAILOVER,
        initial_position=postdate.InitialPosition.EARLIEST,
        policy=policy,
    )
    assert created.type is postdate.SubscriptionType.FAILOVER
    assert created.policy == policy
    assert broker.unary[0].initial_position == 2
    assert not broker.unary[0].policy.HasField("initial_backoff_ms")
    assert await client.subscriptions.get("t", "s") == created
    await client.subscriptions.create("t", "other")
    assert (await client.subscriptions.get("t", "other")).type is postdate.SubscriptionType.SHARED
    await client.subscriptions.delete("t", "other")
    assert [each.name async for each in client.subscriptions.list("t")] == ["s"]
    await client.subscriptions.delete("t", "s")
    assert [each async for each in client.subscriptions.list("t")] == []


async def test_stats_and_server_info(broker: FakeBroker, client: postdate.Client) -> None:
    async with client.producer("t") as producer:
        await producer.send(b"x", deliver_after=timedelta(hours=1))
    await client.subscriptions.create("t", "s")
    (stats,) = await client.stats("t")
    assert (stats.topic, stats.scheduled_messages, stats.next_due_time) == ("t", 1, None)
    assert stats.subscriptions[0].type is postdate.SubscriptionType.SHARED
    assert (stats.subscriptions[0].oldest_ready_age, stats.subscriptions[0].paused) == (
        timedelta(milliseconds=1500),
        False,
    )
    assert (stats.subscriptions[0].paced, stats.subscriptions[0].paced_until) == (True, None)
    broker.knobs.due_ms = (1_000, 2_000)
    (stats,) = await client.stats("t")
    assert stats.subscriptions[0].paced_until == datetime.fromtimestamp(1, UTC)
    broker.knobs.due_ms = (0, 0)
    for name in "abcd":
        await client.topics.create(name)
    assert [each.topic for each in await client.stats()] == ["a", "b", "c", "d", "t"]
    assert [each.topic for each in await client.stats("d", "t", "a")] == ["a", "d", "t"]
    info = await client.server_info()
    assert (info.version, info.limits.payload_bytes_max) == ("fake", 1024 * 1024)


async def test_unavailable_broker_is_asked_again(broker: FakeBroker, client: postdate.Client) -> None:
    broker.knobs.unary_errors.extend([status("UNAVAILABLE", "RECOVERING", "soon", retry_ms=5)] * 2)
    await client.topics.create("t")
    assert len(broker.unary) == 3
    assert len({request.request_id for request in broker.unary}) == 1


async def test_patience_has_an_end(broker: FakeBroker) -> None:
    broker.knobs.unary_errors.append(status("UNAVAILABLE", "RECOVERING", "later", retry_ms=900))
    async with postdate.connect(f"127.0.0.1:{broker.port}", retry_for=timedelta(0)) as client:
        with pytest.raises(postdate.Unavailable) as caught:
            await client.topics.create("t")
    assert caught.value.retry_after == timedelta(milliseconds=900)
    with pytest.raises(postdate.Closed):
        await client.stats()
