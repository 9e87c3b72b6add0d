"""AdminService, what operators do to a subscription: seek, skip, pause, resume, other settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import Message

from broker.config import check_name
from broker.errors import InvalidRequest
from broker.folder.broker import Broker
from broker.model import ENTRY_ID_MAX, LEDGER_ID_MAX, START, TIME_MS_MAX, Position
from broker.rpc.answer_ownership import answer_without_ownership
from broker.rpc.entries import check_initial_position
from broker.rpc.policies import describe_subscription, masked_subscription_fields, subscription_policy_of
from broker.rpc.request_ids import RequestIds
from broker.subscriptions.subscription import Subscription
from broker.topics import control
from broker.topics.topic import Topic
from broker.topics.topic_subscriptions import EARLIEST
from postdate_api.v1 import admin_pb2, message_pb2

Call = tuple[type[Message], Callable[[Any], Awaitable[Message]]]


class ControlCalls:
    """See the module's description. Part of the AdminService, whose answers to repeats it shares."""

    def __init__(self, broker: Broker, request_ids: RequestIds) -> None:
        self._broker = broker
        self._request_ids = request_ids

    def calls(self) -> dict[str, Call]:
        return {
            "UpdateSubscription": (admin_pb2.UpdateSubscriptionRequest, self._update),
            "Seek": (admin_pb2.SeekRequest, self._seek),
            "SkipAll": (admin_pb2.SkipAllRequest, self._skip_all),
            "Pause": (admin_pb2.PauseRequest, self._pause),
            "Resume": (admin_pb2.ResumeRequest, self._resume),
        }

    async def _update(self, request: admin_pb2.UpdateSubscriptionRequest) -> Message:
        self._check(request.topic, request.name, "name")
        given = subscription_policy_of(request.policy, self._broker.config)
        named = masked_subscription_fields(request.update_mask.paths)

        async def update() -> Message:
            topic, subscription = self._find(request.topic, request.name)
            await control.update_policy(topic, subscription, given, named)
            answer_without_ownership()
            return admin_pb2.UpdateSubscriptionResponse(
                subscription=describe_subscription(topic, subscription)
            )

        return await self._request_ids.once(request.topic, request, update)

    async def _seek(self, request: admin_pb2.SeekRequest) -> Message:
        self._check(request.topic, request.subscription)
        _check_target(request)

        async def seek() -> Message:
            topic, subscription = self._find(request.topic, request.subscription)
            start = await _start_of(topic, request, self._broker.clock.now_ms())
            await control.seek(topic, subscription, start)
            answer_without_ownership()
            begins = control.first_at_or_after(topic, start)
            return admin_pb2.SeekResponse(
                position=message_pb2.MessageId(ledger_id=begins.ledger_id, entry_id=begins.entry_id)
            )

        return await self._request_ids.once(request.topic, request, seek)

    async def _skip_all(self, request: admin_pb2.SkipAllRequest) -> Message:
        self._check(request.topic, request.subscription)

        async def skip() -> Message:
            skipped = await control.skip_all(*self._find(request.topic, request.subscription))
            answer_without_ownership()
            return admin_pb2.SkipAllResponse(skipped_messages=skipped)

        return await self._request_ids.once(request.topic, request, skip)

    async def _pause(self, request: admin_pb2.PauseRequest) -> Message:
        self._check(request.topic, request.subscription)

        async def pause() -> Message:
            topic, subscription = self._find(request.topic, request.subscription)
            await control.pause(topic, subscription, paused=True)
            answer_without_ownership()
            return admin_pb2.PauseResponse(subscription=describe_subscription(topic, subscription))

        return await self._request_ids.once(request.topic, request, pause)

    async def _resume(self, request: admin_pb2.ResumeRequest) -> Message:
        self._check(request.topic, request.subscription)

        async def resume() -> Message:
            topic, subscription = self._find(request.topic, request.subscription)
            await control.pause(topic, subscription, paused=False)
            answer_without_ownership()
            return admin_pb2.ResumeResponse(subscription=describe_subscription(topic, subscription))

        return await self._request_ids.once(request.topic, request, resume)

    def _check(self, topic: str, subscription: str, field: str = "subscription") -> None:
        self._broker.check_serving()
        check_name("topic", topic, "topic")
        check_name("subscription", subscription, field)

    def _find(self, topic_name: str, name: str) -> tuple[Topic, Subscription]:
        topic = self._broker.registry.topic(topic_name)
        return topic, topic.subscription(name)


def _check_target(request: admin_pb2.SeekRequest) -> None:
    match request.WhichOneof("target"):
        case "id":
            if not 0 < request.id.ledger_id <= LEDGER_ID_MAX or request.id.entry_id > ENTRY_ID_MAX:
                raise InvalidRequest("No message can have this id", field="id", reason="INVALID_SEEK_TARGET")
        case "publish_time_ms":
            if not 0 <= request.publish_time_ms <= TIME_MS_MAX:
                raise InvalidRequest(
                    f"publish_time_ms is between 0 and {TIME_MS_MAX}",
                    field="publish_time_ms",
                    reason="INVALID_SEEK_TARGET",
                )
        case "initial_position":
            check_initial_position(request.initial_position, "initial_position")
            if (
                not request.initial_position
            ):  # elsewhere it means LATEST; here that would settle everything unasked
                raise InvalidRequest(
                    "initial_position must be EARLIEST or LATEST",
                    field="initial_position",
                    reason="INVALID_SEEK_TARGET",
                )
        case _:
            raise InvalidRequest(
                "A seek needs an id, a publish_time_ms or an initial_position",
                field="target",
                reason="INVALID_SEEK_TARGET",
            )


async def _start_of(topic: Topic, request: admin_pb2.SeekRequest, now_ms: int) -> Position:
    match request.WhichOneof("target"):
        case "id":
            return control.position_of_id(topic, Position(request.id.ledger_id, request.id.entry_id))
        case "publish_time_ms":
            if request.publish_time_ms > now_ms:
                raise InvalidRequest(
                    "publish_time_ms lies in the future: use LATEST to settle everything",
                    field="publish_time_ms",
                    reason="INVALID_SEEK_TARGET",
                )
            return await control.position_of_time(topic, request.publish_time_ms)
        case _:
            return START if request.initial_position == EARLIEST else topic.latest_position()
