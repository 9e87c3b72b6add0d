"""AdminService: topics, subscriptions, counts, and what this broker is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, NamedTuple

from google.protobuf.message import Message

from broker.config import check_name
from broker.errors import InvalidRequest, NotFound
from broker.folder.broker import Broker
from broker.observe.cluster_view import ViewCluster
from broker.rpc.access_rules import SHOW_SUBSCRIPTION
from broker.rpc.answer_ownership import answer_without_ownership
from broker.rpc.backups import BackupCalls
from broker.rpc.caller import creating, may_see
from broker.rpc.calls import Handler, unary
from broker.rpc.cluster import describe_alone, describe_cluster
from broker.rpc.control import ControlCalls
from broker.rpc.dead_letters import DeadLetterCalls
from broker.rpc.entries import check_initial_position, check_type
from broker.rpc.hand_over import HandOver
from broker.rpc.paging import page_by_name
from broker.rpc.policies import (
    describe_subscription,
    describe_topic,
    masked_topic_fields,
    subscription_policy_of,
    topic_policy_of,
)
from broker.rpc.request_ids import RequestIds
from broker.rpc.stats import get_stats
from broker.subscriptions.types import SubscriptionType
from postdate_api.v1 import admin_pb2

SERVICE = "postdate.v1.AdminService"

_FINDINGS_MAX = 100
_CREATIONS_AT_ONCE, _CREATIONS_AT_ONCE_IN_CLUSTER = 4, 32
"""Topics and subscriptions that are created at once; further calls wait. Those of one group of the journal are made in
one round of the event loop, and every other call waits for that. A cluster's group takes the time of its store, so
that more of them share one.
"""


class OwnedCluster(NamedTuple):
    """The cluster, as the owner of its shard knows it, and may hand that over."""

    view: ViewCluster
    hand_over: HandOver


class AdminService:
    """See the module's description."""

    def __init__(
        self,
        broker: Broker,
        version: str,
        cluster: OwnedCluster | None = None,
        shard_port: Callable[[], int] = lambda: 0,
    ) -> None:
        """`shard_port` returns the port on which clients reach this shard, or 0."""
        self._broker = broker
        self._cluster = cluster
        self._shard_port = shard_port
        self._version = version
        self._request_ids = RequestIds(broker.clock)
        self._creations = asyncio.Semaphore(
            _CREATIONS_AT_ONCE if cluster is None else _CREATIONS_AT_ONCE_IN_CLUSTER
        )
        self._control = ControlCalls(broker, self._request_ids)
        self._dead_letters = DeadLetterCalls(broker, self._request_ids)
        self._backups = BackupCalls(broker, self._request_ids)

    def handlers(self) -> dict[str, Handler]:
        calls: dict[str, tuple[type[Message], Callable[[Any], Awaitable[Message]]]] = {
            "CreateTopic": (admin_pb2.CreateTopicRequest, self._create_topic),
            "GetTopic": (admin_pb2.GetTopicRequest, self._get_topic),
            "UpdateTopic": (admin_pb2.UpdateTopicRequest, self._update_topic),
            "DeleteTopic": (admin_pb2.DeleteTopicRequest, self._delete_topic),
            "ListTopics": (admin_pb2.ListTopicsRequest, self._list_topics),
            "CreateSubscription": (admin_pb2.CreateSubscriptionRequest, self._create_subscription),
            "GetSubscription": (admin_pb2.GetSubscriptionRequest, self._get_subscription),
            "DeleteSubscription": (admin_pb2.DeleteSubscriptionRequest, self._delete_subscription),
            "ListSubscriptions": (admin_pb2.ListSubscriptionsRequest, self._list_subscriptions),
            "GetStats": (admin_pb2.GetStatsRequest, self._get_stats),
            "VerifyTopic": (admin_pb2.VerifyTopicRequest, self._verify_topic),
            "GetServerInfo": (admin_pb2.GetServerInfoRequest, self._get_server_info),
            "GetCluster": (admin_pb2.GetClusterRequest, self._get_cluster),
            "MoveShard": (admin_pb2.MoveShardRequest, self._move_shard),
            **self._control.calls(),
            **self._dead_letters.calls(),
            **self._backups.calls(),
        }
        return {name: unary(self._broker, kind, call) for name, (kind, call) in calls.items()}

    # -- topics ----------------------------------------------------------------------------------------------

    async def _create_topic(self, request: admin_pb2.CreateTopicRequest) -> Message:
        self._broker.check_serving()
        check_name("topic", request.name, "name")
        policy = topic_policy_of(request.policy)

        async def create() -> Message:
            async with self._creations:
                with creating(self._broker, request.name):
                    topic = await self._broker.registry.create_topic(request.name, policy)
            answer_without_ownership()
            return admin_pb2.CreateTopicResponse(topic=describe_topic(topic))

        return await self._request_ids.once(request.name, request, create)

    async def _get_topic(self, request: admin_pb2.GetTopicRequest) -> Message:
        check_name("topic", request.name, "name")
        return admin_pb2.GetTopicResponse(topic=describe_topic(self._broker.registry.topic(request.name)))

    async def _update_topic(self, request: admin_pb2.UpdateTopicRequest) -> Message:
        self._broker.check_serving()
        check_name("topic", request.name, "name")
        given = topic_policy_of(request.policy)
        named = masked_topic_fields(request.update_mask.paths)

        async def update() -> Message:
            topic = self._broker.registry.topic(request.name)
            await topic.change_policy(
                replace(topic.policies.decided, **{name: getattr(given, name) for name in named})
            )
            answer_without_ownership()
            return admin_pb2.UpdateTopicResponse(topic=describe_topic(topic))

        return await self._request_ids.once(request.name, request, update)

    async def _delete_topic(self, request: admin_pb2.DeleteTopicRequest) -> Message:
        self._broker.check_serving()
        check_name("topic", request.name, "name")

        async def delete() -> Message:
            await self._broker.registry.delete_topic(request.name)
            answer_without_ownership()
            return admin_pb2.DeleteTopicResponse()

        return await self._request_ids.once(request.name, request, delete)

    async def _list_topics(self, request: admin_pb2.ListTopicsRequest) -> Message:
        topics, token = page_by_name(
            [topic for topic in self._broker.registry.topics.values() if may_see(topic.name)],
            request.page_size,
            request.page_token,
        )
        return admin_pb2.ListTopicsResponse(
            topics=[describe_topic(topic) for topic in topics], next_page_token=token
        )

    # -- subscriptions ---------------------------------------------------------------------------------------

    async def _create_subscription(self, request: admin_pb2.CreateSubscriptionRequest) -> Message:
        self._broker.check_serving()
        check_name("topic", request.topic, "topic")
        check_name("subscription", request.name, "name")
        check_type(request.type, "type")
        check_initial_position(request.initial_position, "initial_position")
        policy = subscription_policy_of(request.policy, self._broker.config)

        async def create() -> Message:
            async with self._creations:
                with creating(self._broker, request.topic):
                    topic = await self._broker.registry.topic_or_create(request.topic)
                subscription = await topic.subscriptions.create(
                    request.name, request.type or SubscriptionType.SHARED, request.initial_position, policy
                )
            answer_without_ownership()
            return admin_pb2.CreateSubscriptionResponse(
                subscription=describe_subscription(topic, subscription)
            )

        return await self._request_ids.once(request.topic, request, create)

    async def _get_subscription(self, request: admin_pb2.GetSubscriptionRequest) -> Message:
        check_name("topic", request.topic, "topic")
        check_name("subscription", request.name, "name")
        topic = self._broker.registry.topic(request.topic)
        subscription = topic.subscription(request.name)
        return admin_pb2.GetSubscriptionResponse(subscription=describe_subscription(topic, subscription))

    async def _delete_subscription(self, request: admin_pb2.DeleteSubscriptionRequest) -> Message:
        self._broker.check_serving()
        check_name("topic", request.topic, "topic")
        check_name("subscription", request.name, "name")

        async def delete() -> Message:
            await self._broker.registry.topic(request.topic).subscriptions.delete(request.name)
            answer_without_ownership()
            return admin_pb2.DeleteSubscriptionResponse()

        return await self._request_ids.once(request.topic, request, delete)

    async def _list_subscriptions(self, request: admin_pb2.ListSubscriptionsRequest) -> Message:
        check_name("topic", request.topic, "topic")
        topic = self._broker.registry.topic(request.topic)
        shown, token = page_by_name(
            [
                subscription
                for subscription in topic.subscriptions.values()
                if may_see(topic.name, SHOW_SUBSCRIPTION, subscription.name)
            ],
            request.page_size,
            request.page_token,
        )
        return admin_pb2.ListSubscriptionsResponse(
            subscriptions=[describe_subscription(topic, subscription) for subscription in shown],
            next_page_token=token,
        )

    # -- the broker ------------------------------------------------------------------------------------------

    async def _get_stats(self, request: admin_pb2.GetStatsRequest) -> Message:
        return await get_stats(self._broker, request)

    async def _verify_topic(self, request: admin_pb2.VerifyTopicRequest) -> Message:
        self._broker.check_serving()
        check_name("topic", request.name, "name")
        check = await self._broker.verify_topic(request.name)
        counts = check.counts
        return admin_pb2.VerifyTopicResponse(
            buckets=check.buckets,
            ledgers=check.ledgers,
            entries=counts.entries,
            pending=counts.pending,
            stale=counts.stale,
            settled=counts.settled,
            finding_count=len(check.findings),
            findings=[
                admin_pb2.IndexFinding(kind=finding.kind.value, text=str(finding), count=finding.count)
                for finding in check.findings[:_FINDINGS_MAX]
            ],
        )

    async def _get_server_info(self, _: admin_pb2.GetServerInfoRequest) -> Message:
        answer_without_ownership()
        config = self._broker.config
        return admin_pb2.GetServerInfoResponse(
            version=self._version,
            broker_id=self._broker.broker_id,
            start_time_ms=self._broker.started_ms,
            broker_time_ms=self._broker.clock.now_ms(),
            limits=admin_pb2.ServerLimits(
                payload_bytes_max=config.payload_bytes_max,
                key_bytes_max=config.tuning.key_bytes_max,
                schedule_key_bytes_max=config.tuning.schedule_key_bytes_max,
                properties_count_max=config.tuning.properties_count_max,
                properties_bytes_max=config.tuning.properties_bytes_max,
                batch_messages_max=config.tuning.batch_messages_max,
                ack_entries_max=config.tuning.ack_entries_max,
            ),
        )

    async def _get_cluster(self, _: admin_pb2.GetClusterRequest) -> Message:
        answer_without_ownership()  # whoever asks looks for the owner
        if self._cluster is None:
            return describe_alone(self._broker, self._shard_port())
        return describe_cluster([self._cluster.view()])

    async def _move_shard(self, request: admin_pb2.MoveShardRequest) -> Message:
        if not request.to:
            raise InvalidRequest("Name the node that is to own the shard", field="to", reason="NODE_MISSING")
        if self._cluster is None:
            raise NotFound(
                f"This broker is not in a cluster with a node {request.to!r}", reason="NODE_NOT_FOUND"
            )
        await self._cluster.hand_over.move(request.to, request.shard)
        return admin_pb2.MoveShardResponse()
