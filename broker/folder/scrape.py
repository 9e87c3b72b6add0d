"""A broker as a scrape of its metrics shows it."""

from __future__ import annotations

from collections.abc import Iterator

from broker.delayed.due_within import due_within
from broker.folder.broker import Broker
from broker.model import count_entries
from broker.observe.horizons import HORIZONS
from broker.observe.metrics import BrokerSnapshot, ClusterSnapshot, SubscriptionSnapshot, TopicSnapshot
from broker.topics.topic import Topic


def take_snapshot(broker: Broker, cluster: ClusterSnapshot | None = None) -> BrokerSnapshot:
    """Return what a scrape shows. Topics and subscriptions are read as they are rendered, in slices."""
    topics = list(broker.registry.topics.values())
    counters = broker.counters
    journal = broker.journal.stats()
    counters.journal_records, counters.journal_bytes = journal.records, journal.bytes
    return BrokerSnapshot(
        counters=counters,
        topics=map(_topic_snapshot, topics),
        subscriptions=_subscription_snapshots(broker),
        topics_count=len(topics),
        subscriptions_count=sum(len(topic.subscriptions) for topic in topics),
        journal_pending_bytes=broker.journal.pending_bytes,
        ready=broker.not_ready_because is None,
        disk_free_bytes=broker.disk_free_bytes,
        disk_reserve_bytes=broker.config.disk_reserve_bytes,
        dedup_memory_bytes=broker.dedup_memory.used_bytes,
        due_within=_due_within(broker, topics),
        cluster=cluster,
    )


def _topic_snapshot(topic: Topic) -> TopicSnapshot:
    index, keys = topic.index.tracker.stats(), topic.keys.stats()
    return TopicSnapshot(
        topic=topic.name,
        counters=topic.counters,
        scheduled=topic.index.scheduled_count(),
        next_due_ms=topic.index.next_due_ms(),
        storage_bytes=topic.log.data_bytes,
        index_bytes=index.memory_bytes,
        index_buckets=index.bucket_count,
        index_loaded=index.loaded_count,
        snapshot_bytes=index.disk_bytes,
        key_runs=keys.runs,
        key_bytes=keys.disk_bytes,
        settled_keys=keys.settled,
    )


def _due_within(broker: Broker, topics: list[Topic]) -> Iterator[tuple[str, int]]:
    names, durations_ms = zip(*HORIZONS, strict=True)
    for topic in topics:
        counts = due_within(topic.index.tracker, broker.clock.now_ms(), durations_ms)
        yield from zip(names, counts, strict=True)


def _subscription_snapshots(broker: Broker) -> Iterator[SubscriptionSnapshot]:
    for topic in list(broker.registry.topics.values()):
        for subscription in list(topic.subscriptions.values()):
            counts = topic.subscription_counts(subscription)
            yield SubscriptionSnapshot(
                topic=topic.name,
                subscription=subscription.name,
                counters=subscription.counters,
                scheduled=counts.scheduled,
                ready=counts.ready,
                leased=counts.leased,
                consumers=len(subscription.consumers),
                dead_letters=count_entries(broker.dead_letters.still_held(subscription)),
                oldest_ready_age_ms=topic.counts.known_oldest_age_ms(subscription, counts),
                paused=subscription.paused,
                paced=bool(counts.ready) and subscription.pacing.holds(broker.clock.now_ms()),
            )
