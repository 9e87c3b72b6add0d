"""AdminService: topics, subscriptions, counts, and what this broker is."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from broker.config import check_name
from broker.errors import InvalidRequest
from broker.rpc.calls import Handler, unary
from broker.rpc.entries import api_type, check_initial_position, check_type
from broker.storage.policy import (
    RANGES,
    SubscriptionPolicy,
    TopicPolicy,
)
from broker.subscriptions.subscription import SHARED, Subscription
from broker.topics.broker import Broker
from broker.topics.topic import Topic
from postdate.v1 import admin_pb2

SERVICE = "postdate.v1.AdminService"

_PAGE_SIZE = 100
_PAGE_SIZE_MAX = 1_000
_REMEMBERED_MS = 600_000
_REMEMBERED_MAX = 10_000
_REQUEST_ID_MAX = 255
_FINDINGS_MAX = 100

R = TypeVar("R", bound=Message)
Named = TypeVar("Named", Topic, Subscription)


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer to a request with a request_id, perhaps still on its way."""

    until_ms: int  # on the monotonic clock
    request: Message
    response: asyncio.Future[Any]


_BUCKET_FIELDS = frozenset(admin_pb2.BucketPolicy.DESCRIPTOR.fields_by_name)


class AdminService:
    """See the module's description."""

    def __init__(self, broker: Broker, version: str) -> None:
        self._broker = broker
        self._version = version
        self._answers: OrderedDict[tuple[str, str, str], _Answer] = OrderedDict()

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
        }
        return {name: unary(self._broker, kind, call) for name, (kind, call) in calls.items()}

    # -- topics ----------------------------------------------------------------------------------------------

    async def _create_topic(self, request: admin_pb2.CreateTopicRequest) -> Message:
        self._broker.check_serving()
        check_name("topic", request.name, "name")
        policy = _topic_policy(request.policy)

        async def create() -> Message:
            topic = await self._broker.registry.create_topic(request.name, policy)
            return admin_pb2.CreateTopicResponse(topic=_topic(topic))

        return await self._once(request.name, request, create)

    async def _get_topic(self, request: admin_pb2.GetTopicRequest) -> Message:
        check_name("topic", request.name, "name")
        return admin_pb2.GetTopicResponse(topic=_topic(self._broker.registry.topic(request.name)))

    async def _update_topic(self, request: admin_pb2.UpdateTopicRequest) -> Message:
        self._broker.check_serving()
        check_name("topic", request.name, "name")
        given = _topic_policy(request.policy)
        named = _masked_fields(request.update_mask.paths)

        async def update() -> Message:
            topic = self._broker.registry.topic(request.name)
            await topic.change_policy(
                replace(topic.own_policy, **{name: getattr(given, name) for name in named})
            )
            return admin_pb2.UpdateTopicResponse(topic=_topic(topic))

        return await self._once(request.name, request, update)

    async def _delete_topic(self, request: admin_pb2.DeleteTopicRequest) -> Message:
        self._broker.check_serving()
        check_name("topic", request.name, "name")

        async def delete() -> Message:
            await self._broker.registry.delete_topic(request.name)
            return admin_pb2.DeleteTopicResponse()

        return await self._once(request.name, request, delete)

    async def _list_topics(self, request: admin_pb2.ListTopicsRequest) -> Message:
        topics, token = _page(
            list(self._broker.registry.topics.values()), request.page_size, request.page_token
        )
        return admin_pb2.ListTopicsResponse(topics=[_topic(topic) for topic in topics], next_page_token=token)

    # -- subscriptions ---------------------------------------------------------------------------------------

    async def _create_subscription(self, request: admin_pb2.CreateSubscriptionRequest) -> Message:
        self._broker.check_serving()
        check_name("topic", request.topic, "topic")
        check_name("subscription", request.name, "name")
        check_type(request.type, "type")
        check_initial_position(request.initial_position, "initial_position")
        policy = _subscription_policy(request.policy, self._broker.config.lease_ms_max)

        async def create() -> Message:
            topic = await self._broker.registry.topic_or_create(request.topic)
            subscription = await topic.create_subscription(
                request.name, request.type or SHARED, request.initial_position, policy
            )
            return admin_pb2.CreateSubscriptionResponse(subscription=_subscription(topic, subscription))

        return await self._once(request.topic, request, create)

    async def _get_subscription(self, request: admin_pb2.GetSubscriptionRequest) -> Message:
        check_name("topic", request.topic, "topic")
        check_name("subscription", request.name, "name")
        topic = self._broker.registry.topic(request.topic)
        subscription = topic.subscription(request.name)
        return admin_pb2.GetSubscriptionResponse(subscription=_subscription(topic, subscription))

    async def _delete_subscription(self, request: admin_pb2.DeleteSubscriptionRequest) -> Message:
        self._broker.check_serving()
        check_name("topic", request.topic, "topic")
        check_name("subscription", request.name, "name")

        async def delete() -> Message:
            await self._broker.registry.topic(request.topic).delete_subscription(request.name)
            return admin_pb2.DeleteSubscriptionResponse()

        return await self._once(request.topic, request, delete)

    async def _list_subscriptions(self, request: admin_pb2.ListSubscriptionsRequest) -> Message:
        check_name("topic", request.topic, "topic")
        topic = self._broker.registry.topic(request.topic)
        found, token = _page(list(topic.subscriptions.values()), request.page_size, request.page_token)
        return admin_pb2.ListSubscriptionsResponse(
            subscriptions=[_subscription(topic, subscription) for subscription in found],
            next_page_token=token,
        )

    # -- the broker ------------------------------------------------------------------------------------------

    async def _get_stats(self, request: admin_pb2.GetStatsRequest) -> Message:
        registry = self._broker.registry
        if len(request.topics) > _PAGE_SIZE_MAX:
            raise InvalidRequest(
                f"At most {_PAGE_SIZE_MAX} topics at once", field="topics", reason="TOO_MANY_NAMES"
            )
        for index, name in enumerate(request.topics):
            check_name("topic", name, f"topics[{index}]")
        names = sorted(set(request.topics)) or sorted(registry.by_name)[:_PAGE_SIZE_MAX]
        return admin_pb2.GetStatsResponse(topics=[_stats(registry.topic(name)) for name in names])

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
        config = self._broker.config
        return admin_pb2.GetServerInfoResponse(
            version=self._version,
            broker_id=self._broker.broker_id,
            start_time_ms=self._broker.started_ms,
            broker_time_ms=self._broker.clock.now_ms(),
            limits=admin_pb2.ServerLimits(
                payload_bytes_max=config.payload_bytes_max,
                key_bytes_max=config.key_bytes_max,
                schedule_key_bytes_max=config.schedule_key_bytes_max,
                properties_count_max=config.properties_count_max,
                properties_bytes_max=config.properties_bytes_max,
                batch_messages_max=config.batch_messages_max,
                ack_entries_max=config.ack_entries_max,
            ),
        )

    async def _once(self, topic: str, request: Any, call: Callable[[], Awaitable[R]]) -> R:
        """Make a change once for each request_id: a repeat gets the first answer, also while that is on its way."""
        if not request.request_id:
            return await call()
        if len(request.request_id) > _REQUEST_ID_MAX:
            raise InvalidRequest(
                f"request_id is at most {_REQUEST_ID_MAX} characters",
                field="request_id",
                reason="INVALID_REQUEST_ID",
            )
        now_ms = self._broker.clock.monotonic_ns() // 1_000_000
        while self._answers and (
            len(self._answers) >= _REMEMBERED_MAX or next(iter(self._answers.values())).until_ms <= now_ms
        ):
            self._answers.popitem(last=False)
        # Ids are a topic's own: two clients that count from 1 must not get each other's answers.
        key = (type(request).__name__, topic, request.request_id)
        known = self._answers.get(key)
        if known is None:
            known = _Answer(now_ms + _REMEMBERED_MS, request, asyncio.ensure_future(call()))
            self._answers[key] = known
        elif known.request != request:
            raise InvalidRequest(
                "This request_id was used for another request", field="request_id", reason="REQUEST_ID_REUSED"
            )
        try:
            return cast("R", await asyncio.shield(known.response))
        except Exception:
            if self._answers.get(key) is known:
                del self._answers[key]  # what failed may be tried again
            raise


def _page(found: list[Named], page_size: int, page_token: str) -> tuple[list[Named], str]:
    """One page, by name. The token is the last name of the page before, so pages stay right while names come and go."""
    if not 0 <= page_size <= _PAGE_SIZE_MAX:
        raise InvalidRequest(
            f"page_size is between 0 and {_PAGE_SIZE_MAX}", field="page_size", reason="INVALID_PAGE_SIZE"
        )
    try:
        after = base64.b64decode(page_token.encode("ascii"), altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, UnicodeError) as error:
        raise InvalidRequest(
            "page_token is not one of ours", field="page_token", reason="INVALID_PAGE_TOKEN"
        ) from error
    rest = sorted((each for each in found if each.name > after), key=lambda each: each.name)
    page = rest[: page_size or _PAGE_SIZE]
    more = len(rest) > len(page)
    return page, base64.urlsafe_b64encode(page[-1].name.encode()).decode() if more else ""


def _topic_policy(message: admin_pb2.TopicPolicy) -> TopicPolicy:
    given = _set_fields(message, TopicPolicy) | _set_fields(message.buckets, TopicPolicy)
    for name, value in given.items():
        within = "policy.buckets" if name in _BUCKET_FIELDS else "policy"
        _check_range(f"{within}.{name}", value, *RANGES[name])
    return TopicPolicy(**given)


def _subscription_policy(message: admin_pb2.SubscriptionPolicy, lease_ms_max: int) -> SubscriptionPolicy:
    policy = SubscriptionPolicy(**_set_fields(message, SubscriptionPolicy))
    _check_range("policy.lease_ms", policy.lease_ms, 1, lease_ms_max)
    _check_range("policy.initial_backoff_ms", policy.initial_backoff_ms, 0, 1 << 40)
    _check_range("policy.max_backoff_ms", policy.max_backoff_ms, 0, 1 << 40)
    _check_range("policy.backoff_multiplier", policy.backoff_multiplier, 1, 100)
    return policy


def _check_range(field: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidRequest(
            f"{field} is between {low} and {high}, not {value}", field=field, reason="INVALID_POLICY"
        )


def _set_fields(message: Message, kind: type[TopicPolicy] | type[SubscriptionPolicy]) -> dict[str, Any]:
    known = message.DESCRIPTOR.fields_by_name
    return {
        f.name: getattr(message, f.name) for f in fields(kind) if f.name in known and message.HasField(f.name)
    }


def _values(policy: TopicPolicy | SubscriptionPolicy) -> dict[str, Any]:
    return {f.name: value for f in fields(policy) if (value := getattr(policy, f.name)) is not None}


def _masked_fields(paths: Sequence[str]) -> set[str]:
    """The policy fields that an update mask names; a nested message stands for all of its fields."""
    if not paths:
        raise InvalidRequest(
            "update_mask names no field of the policy", field="update_mask", reason="EMPTY_UPDATE_MASK"
        )
    named: set[str] = set()
    for path in paths:
        if path not in admin_pb2.TopicPolicy.DESCRIPTOR.fields_by_name:
            raise InvalidRequest(
                f"update_mask names {path[:80]!r}, which is no field of a policy",
                field="update_mask",
                reason="UNKNOWN_POLICY_FIELD",
            )
        named |= _BUCKET_FIELDS if path == "buckets" else {path}
    return named


def _policy(policy: TopicPolicy) -> admin_pb2.TopicPolicy:
    values = _values(policy)
    buckets = {name: values.pop(name) for name in _BUCKET_FIELDS & values.keys()}
    return admin_pb2.TopicPolicy(**values, buckets=admin_pb2.BucketPolicy(**buckets) if buckets else None)


def _topic(topic: Topic) -> admin_pb2.Topic:
    return admin_pb2.Topic(
        name=topic.name,
        policy=_policy(topic.own_policy),
        effective_policy=_policy(topic.policy),
        create_time_ms=topic.create_time_ms,
    )


def _subscription(topic: Topic, subscription: Subscription) -> admin_pb2.Subscription:
    return admin_pb2.Subscription(
        topic=topic.name,
        name=subscription.name,
        type=api_type(subscription),
        policy=admin_pb2.SubscriptionPolicy(**_values(subscription.image.policy)),
        effective_policy=admin_pb2.SubscriptionPolicy(**_values(subscription.policy)),
        create_time_ms=subscription.image.create_time_ms,
    )


def _stats(topic: Topic) -> admin_pb2.TopicStats:
    index = topic.index.tracker.stats()
    return admin_pb2.TopicStats(
        topic=topic.name,
        scheduled_messages=topic.index.scheduled_count(),
        next_due_time_ms=topic.index.next_due_ms() or 0,
        last_due_time_ms=index.last_due_ms or 0,
        ledgers=topic.log.ledger_count,
        storage_bytes=topic.log.data_bytes + 52 * topic.log.entry_total,
        index=admin_pb2.IndexStats(
            buckets=index.bucket_count,
            loaded_entries=index.loaded_count,
            memory_bytes=index.memory_bytes,
            disk_bytes=index.disk_bytes,
            rebuilds=topic.index.rebuilds,
        ),
        subscriptions=[
            _subscription_stats(topic, subscription)
            for subscription in sorted(topic.subscriptions.values(), key=lambda each: each.name)
        ],
    )


def _subscription_stats(topic: Topic, subscription: Subscription) -> admin_pb2.SubscriptionStats:
    counts = topic.subscription_counts(subscription)
    return admin_pb2.SubscriptionStats(
        name=subscription.name,
        type=api_type(subscription),
        ready_messages=counts.ready,
        leased_messages=counts.leased,
        scheduled_messages=counts.scheduled,
        consumers=len(subscription.consumers),
    )
