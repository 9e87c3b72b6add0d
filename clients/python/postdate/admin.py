"""Topics and subscriptions as things to create, show, list and delete; counts; the broker itself."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import cast

from postdate._rpc import Rpc
from postdate._time import duration_ms, moment, moment_or_none, span
from postdate.model import InitialPosition, SubscriptionType
from postdate.v1 import admin_pb2, consumer_pb2

_PAGE_SIZE = 1000
_VERIFY_S = 3_600.0


class Tracker(Enum):
    """Which index a topic keeps of what is due when."""

    BUCKET = 1
    MEMORY = 2


@dataclass(frozen=True, slots=True)
class TopicPolicy:
    """A topic's settings. None inherits the broker's; zero means none."""

    tracker: Tracker | None = None
    tick: timedelta | None = None
    max_delay: timedelta | None = None
    default_ttl: timedelta | None = None
    ledger_max_age: timedelta | None = None
    ledger_max_bytes: int | None = None
    ledger_max_entries: int | None = None


@dataclass(frozen=True, slots=True)
class SubscriptionPolicy:
    """A subscription's settings. None inherits the broker's."""

    lease: timedelta | None = None
    initial_backoff: timedelta | None = None
    max_backoff: timedelta | None = None
    backoff_multiplier: float | None = None
    honor_delay: bool | None = None


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic; `policy` is what was set for it, `effective_policy` what is in force."""

    name: str
    policy: TopicPolicy
    effective_policy: TopicPolicy
    create_time: datetime


@dataclass(frozen=True, slots=True)
class SubscriptionDescription:
    """A subscription; `policy` is what was set for it, `effective_policy` what is in force."""

    topic: str
    name: str
    type: SubscriptionType
    policy: SubscriptionPolicy
    effective_policy: SubscriptionPolicy
    create_time: datetime


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
    """A subscription's counts: ready could be delivered now, leased is held, scheduled has time."""

    name: str
    type: SubscriptionType
    ready_messages: int
    leased_messages: int
    scheduled_messages: int
    dead_letter_messages: int
    oldest_ready_age: timedelta
    consumers: int
    paused: bool


@dataclass(frozen=True, slots=True)
class TopicStats:
    """A topic's counts. `last_due_time` is a lower bound."""

    topic: str
    scheduled_messages: int
    scheduled_bytes: int
    next_due_time: datetime | None
    last_due_time: datetime | None
    ledgers: int
    storage_bytes: int
    index: IndexStats
    subscriptions: tuple[SubscriptionStats, ...]


@dataclass(frozen=True, slots=True)
class IndexFinding:
    """A fault in a topic's index: `text` says where, `count` how many entries it concerns."""

    kind: str
    text: str
    count: int


@dataclass(frozen=True, slots=True)
class TopicCheck:
    """What a check of a topic's index looked at and found; `findings` are the first of `finding_count`.

    `pending` messages are owed by the `entries` in its buckets. `stale` and `settled` entries are no faults.
    """

    buckets: int
    ledgers: int
    entries: int
    pending: int
    stale: int
    settled: int
    finding_count: int
    findings: tuple[IndexFinding, ...]


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The broker's limits in force."""

    payload_bytes_max: int
    key_bytes_max: int
    schedule_key_bytes_max: int
    properties_count_max: int
    properties_bytes_max: int
    batch_messages_max: int
    ack_entries_max: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The broker. `broker_id` names its data directory for life; `broker_time` is its clock."""

    version: str
    broker_id: str
    start_time: datetime
    broker_time: datetime
    limits: ServerLimits


class Topics:
    """`client.topics`."""

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc

    async def create(self, name: str, policy: TopicPolicy | None = None) -> TopicDescription:
        """Create a topic; `AlreadyExists` if there is one of that name."""
        request = admin_pb2.CreateTopicRequest(name=name, request_id=uuid.uuid4().hex)
        if policy is not None:
            request.policy.CopyFrom(_topic_policy_proto(policy))
        response = await self._rpc.call(self._rpc.admin.CreateTopic, request)
        return _topic(response.topic)

    async def get(self, name: str) -> TopicDescription:
        response = await self._rpc.call(self._rpc.admin.GetTopic, admin_pb2.GetTopicRequest(name=name))
        return _topic(response.topic)

    async def list(self) -> tuple[TopicDescription, ...]:
        """All topics, by name."""
        topics: tuple[TopicDescription, ...] = ()
        request = admin_pb2.ListTopicsRequest(page_size=_PAGE_SIZE)
        while True:
            response = await self._rpc.call(self._rpc.admin.ListTopics, request)
            topics += tuple(map(_topic, response.topics))
            if not response.next_page_token:
                return topics
            request.page_token = response.next_page_token

    async def verify(self, name: str) -> TopicCheck:
        """Compare the topic's index with its messages. Delivery goes on; with billions of messages it takes minutes."""
        request = admin_pb2.VerifyTopicRequest(name=name)
        response = await self._rpc.call(self._rpc.admin.VerifyTopic, request, wait_s=_VERIFY_S)
        return TopicCheck(
            buckets=response.buckets,
            ledgers=response.ledgers,
            entries=response.entries,
            pending=response.pending,
            stale=response.stale,
            settled=response.settled,
            finding_count=response.finding_count,
            findings=tuple(IndexFinding(each.kind, each.text, each.count) for each in response.findings),
        )

    async def delete(self, name: str) -> None:
        """Delete a topic with its messages and subscriptions."""
        request = admin_pb2.DeleteTopicRequest(name=name, request_id=uuid.uuid4().hex)
        await self._rpc.call(self._rpc.admin.DeleteTopic, request)


class Subscriptions:
    """`client.subscriptions`."""

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc

    async def create(
        self,
        topic: str,
        name: str,
        *,
        type: SubscriptionType | None = None,
        initial_position: InitialPosition | None = None,
        policy: SubscriptionPolicy | None = None,
    ) -> SubscriptionDescription:
        """Create a subscription, SHARED and from LATEST unless said; `AlreadyExists` if there is one."""
        request = admin_pb2.CreateSubscriptionRequest(topic=topic, name=name, request_id=uuid.uuid4().hex)
        if type is not None:
            request.type = cast(consumer_pb2.SubscriptionType, type.value)
        if initial_position is not None:
            request.initial_position = cast(consumer_pb2.InitialPosition, initial_position.value)
        if policy is not None:
            request.policy.CopyFrom(_subscription_policy_proto(policy))
        response = await self._rpc.call(self._rpc.admin.CreateSubscription, request)
        return _subscription(response.subscription)

    async def get(self, topic: str, name: str) -> SubscriptionDescription:
        request = admin_pb2.GetSubscriptionRequest(topic=topic, name=name)
        response = await self._rpc.call(self._rpc.admin.GetSubscription, request)
        return _subscription(response.subscription)

    async def list(self, topic: str) -> tuple[SubscriptionDescription, ...]:
        """All subscriptions of a topic, by name."""
        subscriptions: tuple[SubscriptionDescription, ...] = ()
        request = admin_pb2.ListSubscriptionsRequest(topic=topic, page_size=_PAGE_SIZE)
        while True:
            response = await self._rpc.call(self._rpc.admin.ListSubscriptions, request)
            subscriptions += tuple(map(_subscription, response.subscriptions))
            if not response.next_page_token:
                return subscriptions
            request.page_token = response.next_page_token

    async def delete(self, topic: str, name: str) -> None:
        """Delete a subscription; its consumers are disconnected."""
        request = admin_pb2.DeleteSubscriptionRequest(topic=topic, name=name, request_id=uuid.uuid4().hex)
        await self._rpc.call(self._rpc.admin.DeleteSubscription, request)


async def get_stats(rpc: Rpc, topics: tuple[str, ...]) -> tuple[TopicStats, ...]:
    response = await rpc.call(rpc.admin.GetStats, admin_pb2.GetStatsRequest(topics=topics))
    return tuple(map(_topic_stats, response.topics))


async def get_server_info(rpc: Rpc) -> ServerInfo:
    response = await rpc.call(rpc.admin.GetServerInfo, admin_pb2.GetServerInfoRequest())
    limits = response.limits
    return ServerInfo(
        version=response.version,
        broker_id=response.broker_id,
        start_time=moment(response.start_time_ms),
        broker_time=moment(response.broker_time_ms),
        limits=ServerLimits(
            payload_bytes_max=limits.payload_bytes_max,
            key_bytes_max=limits.key_bytes_max,
            schedule_key_bytes_max=limits.schedule_key_bytes_max,
            properties_count_max=limits.properties_count_max,
            properties_bytes_max=limits.properties_bytes_max,
            batch_messages_max=limits.batch_messages_max,
            ack_entries_max=limits.ack_entries_max,
        ),
    )


def _topic(topic: admin_pb2.Topic) -> TopicDescription:
    return TopicDescription(
        name=topic.name,
        policy=_topic_policy(topic.policy),
        effective_policy=_topic_policy(topic.effective_policy),
        create_time=moment(topic.create_time_ms),
    )


def _subscription(subscription: admin_pb2.Subscription) -> SubscriptionDescription:
    return SubscriptionDescription(
        topic=subscription.topic,
        name=subscription.name,
        type=_type(subscription.type),
        policy=_subscription_policy(subscription.policy),
        effective_policy=_subscription_policy(subscription.effective_policy),
        create_time=moment(subscription.create_time_ms),
    )


def _topic_policy_proto(policy: TopicPolicy) -> admin_pb2.TopicPolicy:
    proto = admin_pb2.TopicPolicy(
        tick_ms=_ms(policy.tick, "tick"),
        max_delay_ms=_ms(policy.max_delay, "max_delay"),
        default_ttl_ms=_ms(policy.default_ttl, "default_ttl"),
        ledger_max_age_ms=_ms(policy.ledger_max_age, "ledger_max_age"),
        ledger_max_bytes=policy.ledger_max_bytes,
        ledger_max_entries=policy.ledger_max_entries,
    )
    if policy.tracker is not None:
        proto.tracker = cast(admin_pb2.Tracker, policy.tracker.value)
    return proto


def _topic_policy(proto: admin_pb2.TopicPolicy) -> TopicPolicy:
    return TopicPolicy(
        tracker=Tracker(proto.tracker) if proto.tracker else None,
        tick=span(proto.tick_ms) if proto.HasField("tick_ms") else None,
        max_delay=span(proto.max_delay_ms) if proto.HasField("max_delay_ms") else None,
        default_ttl=span(proto.default_ttl_ms) if proto.HasField("default_ttl_ms") else None,
        ledger_max_age=span(proto.ledger_max_age_ms) if proto.HasField("ledger_max_age_ms") else None,
        ledger_max_bytes=proto.ledger_max_bytes if proto.HasField("ledger_max_bytes") else None,
        ledger_max_entries=proto.ledger_max_entries if proto.HasField("ledger_max_entries") else None,
    )


def _subscription_policy_proto(policy: SubscriptionPolicy) -> admin_pb2.SubscriptionPolicy:
    return admin_pb2.SubscriptionPolicy(
        lease_ms=_ms(policy.lease, "lease"),
        initial_backoff_ms=_ms(policy.initial_backoff, "initial_backoff"),
        max_backoff_ms=_ms(policy.max_backoff, "max_backoff"),
        backoff_multiplier=policy.backoff_multiplier,
        honor_delay=cast(bool, policy.honor_delay),  # None is unset, which the stub does not know
    )


def _subscription_policy(proto: admin_pb2.SubscriptionPolicy) -> SubscriptionPolicy:
    return SubscriptionPolicy(
        lease=span(proto.lease_ms) if proto.HasField("lease_ms") else None,
        initial_backoff=span(proto.initial_backoff_ms) if proto.HasField("initial_backoff_ms") else None,
        max_backoff=span(proto.max_backoff_ms) if proto.HasField("max_backoff_ms") else None,
        backoff_multiplier=proto.backoff_multiplier if proto.HasField("backoff_multiplier") else None,
        honor_delay=proto.honor_delay if proto.HasField("honor_delay") else None,
    )


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
        type=_type(stats.type),
        ready_messages=stats.ready_messages,
        leased_messages=stats.leased_messages,
        scheduled_messages=stats.scheduled_messages,
        dead_letter_messages=stats.dead_letter_messages,
        oldest_ready_age=span(stats.oldest_ready_age_ms),
        consumers=stats.consumers,
        paused=stats.paused,
    )


def _type(value: int) -> SubscriptionType:
    return SubscriptionType(value) if value else SubscriptionType.SHARED


def _ms(duration: timedelta | None, field: str) -> int | None:
    return None if duration is None else duration_ms(duration, field)
