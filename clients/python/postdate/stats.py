"""Counts of topics and subscriptions."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from postdate._rpc import Rpc
from postdate._time import moment_or_none, span
from postdate.model import SubscriptionType, subscription_type
from postdate_api.v1 import admin_pb2

_PAGE_SIZE = 1000


@dataclass(frozen=True, slots=True)
class IndexStats:
    """The index of what is due when."""

    buckets: int
    loaded_entries: int
    memory_bytes: int
    disk_bytes: int
    rebuilds: int


@dataclass(frozen=True, slots=True)
class SubscriptionStats:
    """A subscription's counts, exact also without consumers.

    Ready could be delivered now, leased is held by a consumer, scheduled waits for its time or for its
    redelivery, and dead letters are those that were given up here and are neither requeued nor purged.
    `oldest_ready_age` counts from when the oldest ready message was due or produced; zero if none is ready.
    While `paced`, ready messages wait for `max_delivery_rate`, until `paced_until`, or for `max_leased_messages`.
    """

    name: str
    type: SubscriptionType
    ready_messages: int
    leased_messages: int
    scheduled_messages: int
    dead_letter_messages: int
    oldest_ready_age: timedelta
    consumers: int
    paused: bool
    paced: bool
    paced_until: datetime | None


@dataclass(frozen=True, slots=True)
class TopicStats:
    """A topic's counts. `last_due_time` is a lower bound, `scheduled_bytes` an estimate."""

    topic: str
    scheduled_messages: int
    scheduled_bytes: int
    next_due_time: datetime | None
    last_due_time: datetime | None
    ledgers: int
    storage_bytes: int
    index: IndexStats
    subscriptions: tuple[SubscriptionStats, ...]


async def get_stats(rpc: Rpc, topics: tuple[str, ...]) -> tuple[TopicStats, ...]:
    found = rpc.rows(
        rpc.admin.GetStats,
        admin_pb2.GetStatsRequest(topics=topics),
        lambda page: [_topic_stats(each) for each in page.topics],
        page_size=_PAGE_SIZE,
    )
    return tuple([each async for each in found])


def _topic_stats(stats: admin_pb2.TopicStats) -> TopicStats:
    index = stats.index
    return TopicStats(
        topic=stats.topic,
        scheduled_messages=stats.scheduled_messages,
        scheduled_bytes=stats.scheduled_bytes,
        next_due_time=moment_or_none(stats.next_due_time_ms),
        last_due_time=moment_or_none(stats.last_due_time_ms),
        ledgers=stats.ledgers,
        storage_bytes=stats.storage_bytes,
        index=IndexStats(
            index.buckets, index.loaded_entries, index.memory_bytes, index.disk_bytes, index.rebuilds
        ),
        subscriptions=tuple(map(_subscription_stats, stats.subscriptions)),
    )


def _subscription_stats(stats: admin_pb2.SubscriptionStats) -> SubscriptionStats:
    return SubscriptionStats(
        name=stats.name,
        type=subscription_type(stats.type),
        ready_messages=stats.ready_messages,
        leased_messages=stats.leased_messages,
        scheduled_messages=stats.scheduled_messages,
        dead_letter_messages=stats.dead_letter_messages,
        oldest_ready_age=span(stats.oldest_ready_age_ms),
        consumers=stats.consumers,
        paused=stats.paused,
        paced=stats.paced,
        paced_until=moment_or_none(stats.paced_until_ms),
    )
