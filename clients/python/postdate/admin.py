"""Topics and subscriptions as things to create, show, change, list and delete; the broker itself."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from typing import Unpack, cast

from postdate._policy_messages import (
    subscription_mask,
    subscription_policy,
    subscription_policy_proto,
    topic_mask,
    topic_policy,
    topic_policy_proto,
)
from postdate._rpc import Rpc
from postdate._time import epoch_ms, moment
from postdate.errors import AlreadyExists, FailedPrecondition
from postdate.model import InitialPosition, MessageId, SubscriptionType, subscription_type
from postdate.owed import OwedMessage, OwedState, owed_message
from postdate.policies import SubscriptionChanges, SubscriptionPolicy, TopicChanges, TopicPolicy
from postdate_api.v1 import admin_pb2, consumer_pb2, message_pb2

_PAGE_SIZE = 1000
_OWED_PAGE_SIZE = 100
_FULL_PAGE_SIZE = 20  # payloads may be large, and a page is one answer
_VERIFY_S = 3_600.0


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
    paused: bool


@dataclass(frozen=True, slots=True)
class IndexFinding:
    """A fault in a topic's index: `text` says where, `count` how many entries it concerns."""

    kind: str
    text: str
    count: int


@dataclass(frozen=True, slots=True)
class TopicCheck:
    """Result of a check of a topic's index: what it looked at and found; `findings` are the first of `finding_count`.

    `expected` scheduled messages are to be among the `entries` of its buckets; what was stored or moved since the last
    one was written is in memory, and not looked at. `stale` and `settled` entries are no faults.
    """

    buckets: int
    ledgers: int
    entries: int
    expected: int
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
    """`client.topics`.

    A change waits, up to `retry_for`, for a broker that is away, and is not repeated where it may have happened:
    then it raises `Disconnected`, and `get` tells.
    """

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc

    async def create(
        self, name: str, policy: TopicPolicy | None = None, *, exist_ok: bool = False
    ) -> TopicDescription:
        """Create a topic; `AlreadyExists` if there is one of that name.

        With `exist_ok` that one is returned, its settings as they are: `update` changes them.
        """
        request = admin_pb2.CreateTopicRequest(name=name, request_id=uuid.uuid4().hex)
        if policy is not None:
            request.policy.CopyFrom(topic_policy_proto(policy))
        try:
            response = await self._rpc.call_once(self._rpc.admin.CreateTopic, request)
        except AlreadyExists:
            if not exist_ok:
                raise
            return await self.get(name)
        return _topic(response.topic)

    async def get(self, name: str) -> TopicDescription:
        response = await self._rpc.call(self._rpc.admin.GetTopic, admin_pb2.GetTopicRequest(name=name))
        return _topic(response.topic)

    async def update(self, name: str, /, **changes: Unpack[TopicChanges]) -> TopicDescription:
        """Change settings with messages pending or not; those that are not passed stay.

        None lets the broker's own hold again, zero means none. `buckets` is replaced whole. Limits count at
        once, another tracker or tick from the broker's next start on.
        """
        policy = TopicPolicy(**changes)
        request = admin_pb2.UpdateTopicRequest(
            name=name,
            policy=topic_policy_proto(policy),
            update_mask=topic_mask(changes),
            request_id=uuid.uuid4().hex,
        )
        response = await self._rpc.call_once(self._rpc.admin.UpdateTopic, request)
        return _topic(response.topic)

    def list(self, *, limit: int | None = None) -> AsyncIterator[TopicDescription]:
        """All topics, by name, page by page as the iteration goes on; at most `limit`."""
        return self._rpc.rows(
            self._rpc.admin.ListTopics,
            admin_pb2.ListTopicsRequest(),
            lambda page: [_topic(each) for each in page.topics],
            page_size=_PAGE_SIZE,
            limit=limit,
        )

    async def verify(self, name: str) -> TopicCheck:
        """Compare the topic's index with its messages. Delivery goes on; with billions of messages it takes minutes."""
        request = admin_pb2.VerifyTopicRequest(name=name)
        response = await self._rpc.call(self._rpc.admin.VerifyTopic, request, wait_s=_VERIFY_S)
        return TopicCheck(
            buckets=response.buckets,
            ledgers=response.ledgers,
            entries=response.entries,
            expected=response.pending,
            stale=response.stale,
            settled=response.settled,
            finding_count=response.finding_count,
            findings=tuple(IndexFinding(each.kind, each.text, each.count) for each in response.findings),
        )

    async def delete(self, name: str) -> None:
        """Delete a topic with its messages and subscriptions."""
        request = admin_pb2.DeleteTopicRequest(name=name, request_id=uuid.uuid4().hex)
        await self._rpc.call_once(self._rpc.admin.DeleteTopic, request)


class Subscriptions:
    """`client.subscriptions`. Changes of which the answer is lost are not repeated: see `Topics`."""

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
        exist_ok: bool = False,
    ) -> SubscriptionDescription:
        """Create a subscription, SHARED and from LATEST unless said; `AlreadyExists` if there is one.

        With `exist_ok` that one is returned, its place and settings as they are. Another type than the one
        that is asked for is `FailedPrecondition`, as no type can be changed.
        """
        request = admin_pb2.CreateSubscriptionRequest(topic=topic, name=name, request_id=uuid.uuid4().hex)
        if type is not None:
            request.type = cast(consumer_pb2.SubscriptionType, type.value)
        if initial_position is not None:
            request.initial_position = cast(consumer_pb2.InitialPosition, initial_position.value)
        if policy is not None:
            request.policy.CopyFrom(subscription_policy_proto(policy))
        try:
            response = await self._rpc.call_once(self._rpc.admin.CreateSubscription, request)
        except AlreadyExists:
            if not exist_ok:
                raise
            found = await self.get(topic, name)
            if type is not None and found.type is not type:
                raise FailedPrecondition(
                    f"subscription {name!r} of topic {topic!r} exists, and is {found.type.name}, not {type.name}",
                    code="FAILED_PRECONDITION",
                    reason="SUBSCRIPTION_TYPE_MISMATCH",
                    metadata={"type": found.type.name},
                ) from None
            return found
        return _subscription(response.subscription)

    async def get(self, topic: str, name: str) -> SubscriptionDescription:
        request = admin_pb2.GetSubscriptionRequest(topic=topic, name=name)
        response = await self._rpc.call(self._rpc.admin.GetSubscription, request)
        return _subscription(response.subscription)

    async def update(
        self, topic: str, name: str, /, **changes: Unpack[SubscriptionChanges]
    ) -> SubscriptionDescription:
        """Change settings with messages out or not; those that are not passed stay.

        None lets the broker's own hold again, zero means none. Changes count from the next delivery or nack on.
        """
        policy = SubscriptionPolicy(**changes)
        request = admin_pb2.UpdateSubscriptionRequest(
            topic=topic,
            name=name,
            policy=subscription_policy_proto(policy),
            update_mask=subscription_mask(changes),
            request_id=uuid.uuid4().hex,
        )
        response = await self._rpc.call_once(self._rpc.admin.UpdateSubscription, request)
        return _subscription(response.subscription)

    async def seek(self, topic: str, name: str, to: MessageId | datetime | InitialPosition) -> MessageId:
        """Move it: everything from there on is owed again, settled or not, and nothing before it is.

        To a message, to the first one produced at or after a time that has passed, or to either end of the log.
        Its consumers are disconnected and come back by themselves; what they hold is theirs no more, and an ack
        that is confirmed after the seek counts after it. Returns the first position that is owed.
        """
        request = admin_pb2.SeekRequest(topic=topic, subscription=name, request_id=uuid.uuid4().hex)
        if isinstance(to, InitialPosition):
            request.initial_position = cast(consumer_pb2.InitialPosition, to.value)
        elif isinstance(to, MessageId):
            request.id.CopyFrom(message_pb2.MessageId(ledger_id=to.ledger_id, entry_id=to.entry_id))
        else:
            request.publish_time_ms = epoch_ms(to, "to")
        response = await self._rpc.call_once(self._rpc.admin.Seek, request)
        return MessageId(response.position.ledger_id, response.position.entry_id)

    async def skip_all(self, topic: str, name: str) -> int:
        """Settle all that it is owed now, scheduled messages too; returns how many that were."""
        request = admin_pb2.SkipAllRequest(topic=topic, subscription=name, request_id=uuid.uuid4().hex)
        response = await self._rpc.call_once(self._rpc.admin.SkipAll, request)
        return int(response.skipped_messages)

    async def pause(self, topic: str, name: str) -> SubscriptionDescription:
        """Deliver nothing until `resume`, across restarts too. Consumers stay, and what they hold can be acked."""
        request = admin_pb2.PauseRequest(topic=topic, subscription=name, request_id=uuid.uuid4().hex)
        response = await self._rpc.call_once(self._rpc.admin.Pause, request)
        return _subscription(response.subscription)

    async def resume(self, topic: str, name: str) -> SubscriptionDescription:
        """Deliver again."""
        request = admin_pb2.ResumeRequest(topic=topic, subscription=name, request_id=uuid.uuid4().hex)
        response = await self._rpc.call_once(self._rpc.admin.Resume, request)
        return _subscription(response.subscription)

    def list(self, topic: str, *, limit: int | None = None) -> AsyncIterator[SubscriptionDescription]:
        """All subscriptions of a topic, by name, page by page as the iteration goes on; at most `limit`."""
        return self._rpc.rows(
            self._rpc.admin.ListSubscriptions,
            admin_pb2.ListSubscriptionsRequest(topic=topic),
            lambda page: [_subscription(each) for each in page.subscriptions],
            page_size=_PAGE_SIZE,
            limit=limit,
        )

    def owed(
        self,
        topic: str,
        name: str,
        *states: OwedState,
        limit: int | None = None,
        payloads: bool = False,
    ) -> AsyncIterator[OwedMessage]:
        """Messages that it is owed and that are due, by id, page by page as the iteration goes on; at most `limit`.

        Those in one of the states, or in any: ready, with a consumer, or waiting for their next attempt. It looks,
        and takes nothing. Where few of millions are in a state, a page may take a while.
        """
        view = message_pb2.MESSAGE_VIEW_FULL if payloads else message_pb2.MESSAGE_VIEW_BASIC
        return self._rpc.rows(
            self._rpc.consumer.ListOwed,
            consumer_pb2.ListOwedRequest(
                topic=topic,
                subscription=name,
                states=[cast(consumer_pb2.OwedState, state.value) for state in states],
                view=view,
            ),
            lambda page: [owed_message(each, payloads) for each in page.owed],
            page_size=_FULL_PAGE_SIZE if payloads else _OWED_PAGE_SIZE,
            limit=limit,
        )

    async def delete(self, topic: str, name: str) -> None:
        """Delete a subscription; its consumers are disconnected."""
        request = admin_pb2.DeleteSubscriptionRequest(topic=topic, name=name, request_id=uuid.uuid4().hex)
        await self._rpc.call_once(self._rpc.admin.DeleteSubscription, request)


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
        policy=topic_policy(topic.policy),
        effective_policy=topic_policy(topic.effective_policy),
        create_time=moment(topic.create_time_ms),
    )


def _subscription(subscription: admin_pb2.Subscription) -> SubscriptionDescription:
    return SubscriptionDescription(
        topic=subscription.topic,
        name=subscription.name,
        type=subscription_type(subscription.type),
        policy=subscription_policy(subscription.policy),
        effective_policy=subscription_policy(subscription.effective_policy),
        create_time=moment(subscription.create_time_ms),
        paused=subscription.paused,
    )
