"""The fake broker's AdminService: it does what it is asked for, and records how it was asked."""

from __future__ import annotations

import asyncio
from typing import Any

from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from postdate_api.v1 import admin_pb2, admin_pb2_grpc, consumer_pb2, message_pb2
from tests.unit.client.fake_values import (
    LEDGER,
    FakeSubscription,
    FakeTopic,
    Knobs,
    abort,
    entry_failures,
    now_ms,
    status,
)

_PAGE = 2  # small pages, so that paging is seen to work


class FakeAdmin(admin_pb2_grpc.AdminServiceServicer):
    """Topics, subscriptions, dead letters and counts of the fake broker."""

    knobs: Knobs
    topics: dict[str, FakeTopic]
    streams: set[asyncio.Queue[Any]]
    unary: list[Any]
    backups: dict[str, admin_pb2.Backup]

    async def CreateTopic(self, request: admin_pb2.CreateTopicRequest, context: Any) -> Any:
        await self._hear(request, context)
        if request.name in self.topics:
            await abort(context, status("ALREADY_EXISTS", "TOPIC_EXISTS", "there is one"))
        self.topic(request.name).policy.CopyFrom(request.policy)
        await self._lose_answer(context)
        return admin_pb2.CreateTopicResponse(topic=self._topic(request.name))

    async def GetTopic(self, request: admin_pb2.GetTopicRequest, context: Any) -> Any:
        await self._hear(request, context)
        await self._need(request.name, context)
        return admin_pb2.GetTopicResponse(topic=self._topic(request.name))

    async def UpdateTopic(self, request: admin_pb2.UpdateTopicRequest, context: Any) -> Any:
        await self._hear(request, context)
        await self._need(request.name, context)
        _update(self.topics[request.name].policy, request.policy, request.update_mask)
        await self._lose_answer(context)
        return admin_pb2.UpdateTopicResponse(topic=self._topic(request.name))

    async def DeleteTopic(self, request: admin_pb2.DeleteTopicRequest, context: Any) -> Any:
        await self._need(request.name, context)
        del self.topics[request.name]
        await self._lose_answer(context)
        return admin_pb2.DeleteTopicResponse()

    async def ListTopics(self, request: admin_pb2.ListTopicsRequest, context: Any) -> Any:
        page, more = _page(sorted(self.topics), request.page_token)
        return admin_pb2.ListTopicsResponse(topics=map(self._topic, page), next_page_token=more)

    async def CreateSubscription(self, request: admin_pb2.CreateSubscriptionRequest, context: Any) -> Any:
        await self._hear(request, context)
        subscription = self._subscription(request.topic, request.name)
        subscription.type = request.type
        subscription.policy.CopyFrom(request.policy)
        described = self._described(request.topic, request.name)
        await self._lose_answer(context)
        return admin_pb2.CreateSubscriptionResponse(subscription=described)

    async def GetSubscription(self, request: admin_pb2.GetSubscriptionRequest, context: Any) -> Any:
        await self._need(request.topic, context, request.name)
        described = self._described(request.topic, request.name)
        return admin_pb2.GetSubscriptionResponse(subscription=described)

    async def UpdateSubscription(self, request: admin_pb2.UpdateSubscriptionRequest, context: Any) -> Any:
        subscription = await self._asked(request, request.name, context)
        _update(subscription.policy, request.policy, request.update_mask)
        if "honor_delay" in request.update_mask.paths:
            self._turn_out()
        described = self._described(request.topic, request.name)
        await self._lose_answer(context)
        return admin_pb2.UpdateSubscriptionResponse(subscription=described)

    async def DeleteSubscription(self, request: admin_pb2.DeleteSubscriptionRequest, context: Any) -> Any:
        await self._need(request.topic, context, request.name)
        del self.topics[request.topic].subscriptions[request.name]
        await self._lose_answer(context)
        return admin_pb2.DeleteSubscriptionResponse()

    async def ListSubscriptions(self, request: admin_pb2.ListSubscriptionsRequest, context: Any) -> Any:
        await self._need(request.topic, context)
        page, more = _page(sorted(self.topics[request.topic].subscriptions), request.page_token)
        described = [self._described(request.topic, name) for name in page]
        return admin_pb2.ListSubscriptionsResponse(subscriptions=described, next_page_token=more)

    async def Seek(self, request: admin_pb2.SeekRequest, context: Any) -> Any:
        subscription = await self._asked(request, request.subscription, context)
        deliveries = self.topics[request.topic].deliveries
        start = 0
        if request.WhichOneof("target") == "id":
            start = request.id.entry_id
        elif request.WhichOneof("target") == "publish_time_ms":
            start = sum(each.publish_time_ms < request.publish_time_ms for each in deliveries)
        elif request.initial_position == consumer_pb2.INITIAL_POSITION_LATEST:
            start = len(deliveries)
        self._move(subscription, start)
        await self._lose_answer(context)
        return admin_pb2.SeekResponse(position=message_pb2.MessageId(ledger_id=LEDGER, entry_id=start))

    async def SkipAll(self, request: admin_pb2.SkipAllRequest, context: Any) -> Any:
        subscription = await self._asked(request, request.subscription, context)
        count = len(self.topics[request.topic].deliveries)
        skipped = count - len(subscription.acked)
        self._move(subscription, count)
        await self._lose_answer(context)
        return admin_pb2.SkipAllResponse(skipped_messages=skipped)

    async def Pause(self, request: admin_pb2.PauseRequest, context: Any) -> Any:
        (await self._asked(request, request.subscription, context)).paused = True
        described = self._described(request.topic, request.subscription)
        await self._lose_answer(context)
        return admin_pb2.PauseResponse(subscription=described)

    async def Resume(self, request: admin_pb2.ResumeRequest, context: Any) -> Any:
        (await self._asked(request, request.subscription, context)).paused = False
        self._change()
        described = self._described(request.topic, request.subscription)
        await self._lose_answer(context)
        return admin_pb2.ResumeResponse(subscription=described)

    async def ListDeadLetters(self, request: admin_pb2.ListDeadLettersRequest, context: Any) -> Any:
        subscription = await self._asked(request, request.subscription, context)
        page, more = _page(subscription.dead_letters, request.page_token)
        return admin_pb2.ListDeadLettersResponse(dead_letters=page, next_page_token=more)

    async def RequeueDeadLetters(self, request: admin_pb2.RequeueDeadLettersRequest, context: Any) -> Any:
        subscription = await self._asked(request, request.subscription, context)
        taken, unknown = _take(subscription, request)
        for letter in taken:
            self._store(request.topic, letter.message, request.deliver_after_ms)
        await self._lose_answer(context)
        return admin_pb2.RequeueDeadLettersResponse(requeued_messages=len(taken), failures=unknown)

    async def PurgeDeadLetters(self, request: admin_pb2.PurgeDeadLettersRequest, context: Any) -> Any:
        subscription = await self._asked(request, request.subscription, context)
        taken, unknown = _take(subscription, request)
        await self._lose_answer(context)
        return admin_pb2.PurgeDeadLettersResponse(purged_messages=len(taken), failures=unknown)

    async def CreateBackup(self, request: admin_pb2.CreateBackupRequest, context: Any) -> Any:
        await self._hear(request, context)
        name = f"20261121T20581234{len(self.backups)}Z"
        made = admin_pb2.Backup(
            name=name,
            label=request.label,
            path=f"/b/{name}",
            broker_id="id",
            create_time_ms=1_700_000_000_000,
            lsn=7,
            topics=2,
            files=9,
            bytes=1000,
            copied_bytes=300,
            duration_ms=1500,
        )
        self.backups[name] = made
        await self._lose_answer(context)
        return admin_pb2.CreateBackupResponse(backup=made)

    async def ListBackups(self, request: admin_pb2.ListBackupsRequest, context: Any) -> Any:
        page, more = _page(sorted(self.backups), request.page_token)
        return admin_pb2.ListBackupsResponse(
            backups=[self.backups[name] for name in page], next_page_token=more
        )

    async def DeleteBackup(self, request: admin_pb2.DeleteBackupRequest, context: Any) -> Any:
        await self._hear(request, context)
        if self.backups.pop(request.name, None) is None:
            await abort(context, status("NOT_FOUND", "BACKUP_NOT_FOUND", f"no {request.name}"))
        await self._lose_answer(context)
        return admin_pb2.DeleteBackupResponse()

    async def GetStats(self, request: admin_pb2.GetStatsRequest, context: Any) -> Any:
        names = sorted(set(request.topics) or self.topics)
        for name in names:
            await self._need(name, context)
        page, more = _page(names, request.page_token)
        return admin_pb2.GetStatsResponse(topics=map(self._stats, page), next_page_token=more)

    async def GetServerInfo(self, request: admin_pb2.GetServerInfoRequest, context: Any) -> Any:
        return admin_pb2.GetServerInfoResponse(
            version="fake",
            broker_id="b1",
            start_time_ms=now_ms(),
            broker_time_ms=now_ms(),
            limits=admin_pb2.ServerLimits(payload_bytes_max=1024 * 1024),
        )

    async def MoveShard(self, request: admin_pb2.MoveShardRequest, context: Any) -> Any:
        return admin_pb2.MoveShardResponse()

    async def GetCluster(self, request: admin_pb2.GetClusterRequest, context: Any) -> Any:
        return self.knobs.cluster or admin_pb2.GetClusterResponse(shards=[admin_pb2.ClusterShard()])

    def topic(self, name: str) -> FakeTopic:
        return self.topics.setdefault(name, FakeTopic())

    def _subscription(self, topic: str, name: str) -> FakeSubscription:
        return self.topic(topic).subscriptions.setdefault(name, FakeSubscription())

    def _topic(self, name: str) -> admin_pb2.Topic:
        policy = self.topics[name].policy
        effective = admin_pb2.TopicPolicy(
            tick_ms=1000, tracker=admin_pb2.TRACKER_MEMORY, dedup_window_ms=60_000
        )
        effective.MergeFrom(policy)
        return admin_pb2.Topic(
            name=name, policy=policy, effective_policy=effective, create_time_ms=1_700_000_000_000
        )

    def _described(self, topic: str, name: str) -> admin_pb2.Subscription:
        subscription = self.topics[topic].subscriptions[name]
        effective = admin_pb2.SubscriptionPolicy(lease_ms=30_000)
        effective.MergeFrom(subscription.policy)
        return admin_pb2.Subscription(
            topic=topic,
            name=name,
            type=subscription.type,  # type: ignore[arg-type]
            policy=subscription.policy,
            effective_policy=effective,
            paused=subscription.paused,
        )

    def _stats(self, name: str) -> admin_pb2.TopicStats:
        topic = self.topics[name]
        scheduled = sum(delivery.deliver_at_ms > now_ms() for delivery in topic.deliveries)
        return admin_pb2.TopicStats(
            topic=name,
            scheduled_messages=scheduled,
            next_due_time_ms=self.knobs.due_ms[0],
            last_due_time_ms=self.knobs.due_ms[1],
            subscriptions=[
                admin_pb2.SubscriptionStats(
                    name=each,
                    scheduled_messages=scheduled,
                    leased_messages=len(subscription.held),
                    dead_letter_messages=len(subscription.dead_letters),
                    oldest_ready_age_ms=1500,
                    paused=subscription.paused,
                    paced=True,
                    paced_until_ms=self.knobs.due_ms[0],
                )
                for each, subscription in topic.subscriptions.items()
            ],
        )

    def _move(self, subscription: FakeSubscription, start: int) -> None:
        subscription.acked = set(range(start))
        subscription.held.clear()
        self._turn_out()

    def _turn_out(self) -> None:
        """End every Subscribe stream, as a seek does."""
        for stream in self.streams:
            draining = consumer_pb2.Draining(grace_ms=1000)
            stream.put_nowait(consumer_pb2.SubscribeResponse(draining=draining))
            stream.put_nowait(None)

    async def _asked(self, request: Any, name: str, context: Any) -> FakeSubscription:
        await self._hear(request, context)
        await self._need(request.topic, context, name)
        return self.topics[request.topic].subscriptions[name]

    async def _hear(self, request: Any, context: Any) -> None:
        self.unary.append(request)
        if self.knobs.unary_errors:
            await abort(context, self.knobs.unary_errors.popleft())

    async def _need(self, topic: str, context: Any, subscription: str = "") -> None:
        if topic not in self.topics:
            await abort(context, status("NOT_FOUND", "TOPIC_NOT_FOUND", f"no topic {topic}", topic=topic))
        if subscription and subscription not in self.topics[topic].subscriptions:
            await abort(context, status("NOT_FOUND", "SUBSCRIPTION_NOT_FOUND", f"no {subscription}"))

    def _store(self, topic: str, message: message_pb2.Message, deliver_after_ms: int) -> int:
        """Keep one message; returns its entry id."""
        deliveries = self.topic(topic).deliveries
        publish_ms = now_ms()
        at_ms = message.deliver_at_ms or publish_ms + (message.deliver_after_ms or deliver_after_ms)
        deliveries.append(
            consumer_pb2.Delivery(
                id=message_pb2.MessageId(ledger_id=LEDGER, entry_id=len(deliveries)),
                message=message,
                publish_time_ms=publish_ms,
                deliver_at_ms=max(at_ms, publish_ms),
            )
        )
        self._change()
        return len(deliveries) - 1

    def _change(self) -> None:
        raise NotImplementedError

    async def _lose_answer(self, context: Any) -> None:
        raise NotImplementedError


def _page(rows: list[Any], token: str) -> tuple[list[Any], str]:
    start = int(token or 0)
    return rows[start : start + _PAGE], str(start + _PAGE) if start + _PAGE < len(rows) else ""


def _update(policy: Message, given: Message, mask: FieldMask) -> None:
    for path in mask.paths:
        policy.ClearField(path)
        if given.HasField(path):
            one = type(given)()
            FieldMask(paths=[path]).MergeMessage(given, one)
            policy.MergeFrom(one)


def _take(subscription: FakeSubscription, request: Any) -> tuple[list[admin_pb2.DeadLetter], list[Any]]:
    """Remove the dead letters that a request names; also what of it there is not."""
    named = {(entries.ledger_id, entry_id) for entries in request.entries for entry_id in entries.entry_ids}
    ids = {(letter.id.ledger_id, letter.id.entry_id) for letter in subscription.dead_letters}
    chosen = ids if request.all else ids & named
    taken = [each for each in subscription.dead_letters if (each.id.ledger_id, each.id.entry_id) in chosen]
    subscription.dead_letters = [each for each in subscription.dead_letters if each not in taken]
    return taken, entry_failures(sorted(named - ids), status("NOT_FOUND", "NOT_FOUND", "no dead letter"))
