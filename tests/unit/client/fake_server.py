"""A small broker in memory, for tests of the SDK and for measuring it.

It knows just enough of the API to be talked to, has a knob for each way in which a real broker can
disappoint, and records what it was told. It keeps nothing, and is no model of the broker.

As a program it is the other process of a measurement: it answers produce requests without looking
at them, and delivers one prepared batch again and again.

    python tests/unit/client/fake_server.py --port 7699 --batch 1000 --size 100
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from postdate.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    consumer_pb2,
    consumer_pb2_grpc,
    message_pb2,
    producer_pb2,
    producer_pb2_grpc,
)

LEDGER = 7
_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    # As the API promises: clients may ping every 10 s, and are judged from 5 s on.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)
DETAILS_KEY = "grpc-status-details-bin"


def status(
    code: str, reason: str, message: str, *, field: str = "", retry_ms: int = 0, **metadata: str
) -> status_pb2.Status:
    """An error as the broker describes it."""
    result = status_pb2.Status(code=code_pb2.Code.Value(code), message=message)
    details: list[Any] = [
        error_details_pb2.ErrorInfo(reason=reason, domain="postdate.dev", metadata=metadata)
    ]
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if retry_ms:
        delay = duration_pb2.Duration(nanos=retry_ms * 1_000_000)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        result.details.append(packed)
    return result


async def abort(context: Any, error: status_pb2.Status) -> None:
    code = grpc.StatusCode[code_pb2.Code.Name(error.code)]
    await context.abort(code, error.message, ((DETAILS_KEY, error.SerializeToString()),))


def register(add: Any, servicer: Any, server: Any) -> None:
    """The generator writes no types for what it generates."""
    add(servicer, server)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass
class FakeTopic:
    """What was produced, and what each subscription has settled."""

    deliveries: list[consumer_pb2.Delivery] = field(default_factory=list)
    subscriptions: dict[str, FakeSubscription] = field(default_factory=dict)


@dataclass
class FakeSubscription:
    """Who acked what. Messages that are neither acked nor held are given out."""

    acked: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    not_before_ms: dict[int, int] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)


@dataclass
class Knobs:
    """Ways to disappoint. Each deque is used up, one item a request or stream."""

    produce_errors: deque[status_pb2.Status] = field(default_factory=deque)
    poison: bytes = b""  # a batch with this payload is refused
    poison_named: bool = True  # with its index
    break_produce_after: int = -1  # so many requests are read, the last is not answered
    hold_answers: asyncio.Event | None = None
    subscribe_errors: deque[status_pb2.Status] = field(default_factory=deque)
    unary_errors: deque[status_pb2.Status] = field(default_factory=deque)
    hold_confirms: asyncio.Event | None = None
    fail_ids: dict[int, status_pb2.Status] = field(default_factory=dict)
    silent: bool = False  # no heartbeats
    early_ms: int = 0  # delivers so much too early
    drop_every: int = 0  # loses every so-many-th message
    heartbeat_ms: int = 1000
    lease_ms: int = 30_000


class FakeBroker(
    producer_pb2_grpc.ProducerServiceServicer,
    consumer_pb2_grpc.ConsumerServiceServicer,
    admin_pb2_grpc.AdminServiceServicer,
):
    """All services in one object."""

    def __init__(self) -> None:
        self.knobs = Knobs()
        self.topics: dict[str, FakeTopic] = {}
        self.requests: list[int] = []  # messages in each produce request, in order of arrival
        self.frames: list[consumer_pb2.SubscribeRequest] = []  # of all consumers, without the first
        self.opens: list[consumer_pb2.Open] = []
        self.unary: list[Any] = []
        self.streams: set[asyncio.Queue[Any]] = set()
        self.produce_streams = 0
        self.changed = asyncio.Event()
        self._server: Any = None
        self.port = 0

    async def start(self, port: int = 0) -> str:
        self._server = grpc.aio.server(options=_SERVER_OPTIONS)
        register(producer_pb2_grpc.add_ProducerServiceServicer_to_server, self, self._server)
        register(consumer_pb2_grpc.add_ConsumerServiceServicer_to_server, self, self._server)
        register(admin_pb2_grpc.add_AdminServiceServicer_to_server, self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return f"127.0.0.1:{self.port}"

    async def stop(self) -> None:
        await self._server.stop(None)

    def topic(self, name: str) -> FakeTopic:
        return self.topics.setdefault(name, FakeTopic())

    def payloads(self, topic: str) -> list[bytes]:
        return [delivery.message.payload for delivery in self.topic(topic).deliveries]

    def cut(self) -> None:
        """Break every Subscribe stream."""
        for stream in self.streams:
            stream.put_nowait(status("UNAVAILABLE", "", "cut"))

    def drain(self) -> None:
        for stream in self.streams:
            draining = consumer_pb2.Draining(grace_ms=1000)
            stream.put_nowait(consumer_pb2.SubscribeResponse(draining=draining))

    async def wait(self, predicate: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Return once the predicate holds; it is asked whenever something has happened here."""
        async with asyncio.timeout(timeout_s):
            while True:
                changed = self.changed
                if predicate():
                    return
                await changed.wait()

    # ProducerService

    async def Produce(self, request: producer_pb2.ProduceRequest, context: Any) -> Any:
        return self._produce(request)

    async def ProduceStream(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        self.produce_streams += 1
        async for request in requests:
            self.requests.append(len(request.messages))
            self._change()
            if self.knobs.break_produce_after == 0:
                self.knobs.break_produce_after = -1
                self._produce(request)  # stored, and nobody will know
                await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
            if self.knobs.break_produce_after > 0:
                self.knobs.break_produce_after -= 1
            if self.knobs.hold_answers is not None:
                await self.knobs.hold_answers.wait()
            yield self._produce(request)

    def _produce(self, request: producer_pb2.ProduceRequest) -> producer_pb2.ProduceResponse:
        response = producer_pb2.ProduceResponse(request_id=request.request_id)
        knobs = self.knobs
        if knobs.produce_errors:
            response.error.CopyFrom(knobs.produce_errors.popleft())
            return response
        if knobs.poison:
            for index, message in enumerate(request.messages):
                if message.payload == knobs.poison:
                    name = f"messages[{index}].payload" if knobs.poison_named else ""
                    response.error.CopyFrom(status("INVALID_ARGUMENT", "POISON", "bad", field=name))
                    return response
        topic = self.topic(request.topic)
        publish_ms = now_ms()
        first = len(topic.deliveries)
        for index, message in enumerate(request.messages):
            at_ms = message.deliver_at_ms or publish_ms + message.deliver_after_ms
            topic.deliveries.append(
                consumer_pb2.Delivery(
                    id=message_pb2.MessageId(ledger_id=LEDGER, entry_id=first + index),
                    message=message,
                    publish_time_ms=publish_ms,
                    deliver_at_ms=max(at_ms, publish_ms),
                )
            )
        response.ids.add(ledger_id=LEDGER, first_entry_id=first, count=len(request.messages))
        response.publish_time_ms = publish_ms
        self._change()
        return response

    # ConsumerService

    async def Subscribe(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        first = await anext(aiter(requests))
        self.opens.append(first.open)
        self._change()
        if self.knobs.subscribe_errors:
            await abort(context, self.knobs.subscribe_errors.popleft())
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self.streams.add(queue)
        permits = [first.open.permits.messages]
        held: set[int] = set()
        subscription = self._subscription(first.open.topic, first.open.subscription)
        tasks = [
            asyncio.create_task(self._listen(requests, first.open, queue, permits, held)),
            asyncio.create_task(self._deliver(first.open, queue, permits, held)),
        ]
        try:
            opened = consumer_pb2.Opened(
                consumer_id=f"c{len(self.opens)}",
                lease_ms=first.open.lease_ms or self.knobs.lease_ms,
                heartbeat_ms=self.knobs.heartbeat_ms,
                type=first.open.type or consumer_pb2.SUBSCRIPTION_TYPE_SHARED,
            )
            yield consumer_pb2.SubscribeResponse(opened=opened)
            while (item := await queue.get()) is not None:
                if isinstance(item, status_pb2.Status):
                    await abort(context, item)
                yield item
        finally:
            for task in tasks:
                task.cancel()
            self.streams.discard(queue)
            subscription.held -= held
            self._change()

    async def _listen(
        self,
        requests: Any,
        opened: consumer_pb2.Open,
        queue: asyncio.Queue[Any],
        permits: list[int],
        held: set[int],
    ) -> None:
        subscription = self._subscription(opened.topic, opened.subscription)
        async for frame in requests:
            self.frames.append(frame)
            self._change()
            kind = frame.WhichOneof("frame")
            if kind == "permits":
                permits[0] += frame.permits.messages
                self._change()
            elif kind in {"ack", "nack", "extend"}:
                body = getattr(frame, kind)
                if self.knobs.hold_confirms is not None:
                    await self.knobs.hold_confirms.wait()
                confirmed = consumer_pb2.Confirmed(request_id=body.request_id)
                confirmed.failures.extend(self._settle(subscription, kind, body, held))
                queue.put_nowait(consumer_pb2.SubscribeResponse(confirmed=confirmed))
            elif kind == "drain":
                permits[0] = 0
        queue.put_nowait(None)

    async def _deliver(
        self, opened: consumer_pb2.Open, queue: asyncio.Queue[Any], permits: list[int], held: set[int]
    ) -> None:
        subscription = self._subscription(opened.topic, opened.subscription)
        while True:
            changed = self.changed
            batch, next_ms = self._due(opened.topic, subscription, permits[0])
            if batch:
                permits[0] -= len(batch)
                held |= {delivery.id.entry_id for delivery in batch}
                frame = consumer_pb2.SubscribeResponse(batch=consumer_pb2.Batch(deliveries=batch))
                queue.put_nowait(frame)
            wait_s = self.knobs.heartbeat_ms / 1000
            if next_ms:
                wait_s = min(wait_s, max(0.0, (next_ms - time.time() * 1000) / 1000 + 0.0005))
            try:
                async with asyncio.timeout(wait_s):
                    await changed.wait()
            except TimeoutError:
                if not self.knobs.silent:
                    beat = consumer_pb2.Heartbeat(broker_time_ms=now_ms())
                    queue.put_nowait(consumer_pb2.SubscribeResponse(heartbeat=beat))

    def _due(
        self, topic: str, subscription: FakeSubscription, limit: int
    ) -> tuple[list[consumer_pb2.Delivery], int]:
        at_ms = now_ms() + self.knobs.early_ms
        batch: list[consumer_pb2.Delivery] = []
        next_ms = 0
        for delivery in sorted(self.topic(topic).deliveries, key=lambda delivery: delivery.deliver_at_ms):
            entry_id = delivery.id.entry_id
            if entry_id in subscription.acked or entry_id in subscription.held:
                continue
            if self.knobs.drop_every and entry_id % self.knobs.drop_every == self.knobs.drop_every - 1:
                continue
            due_ms = max(delivery.deliver_at_ms, subscription.not_before_ms.get(entry_id, 0))
            if due_ms > at_ms or len(batch) >= limit:
                if due_ms > at_ms:
                    next_ms = min(next_ms or due_ms, due_ms)
                continue
            subscription.held.add(entry_id)
            attempt = subscription.attempts[entry_id] = subscription.attempts.get(entry_id, 0) + 1
            out = consumer_pb2.Delivery()
            out.CopyFrom(delivery)
            out.delivery_attempt = attempt
            batch.append(out)
        return batch, next_ms

    def _settle(self, subscription: FakeSubscription, kind: str, body: Any, held: set[int]) -> list[Any]:
        failures: list[Any] = []
        for entries in body.entries:
            for entry_id in entries.entry_ids:
                if entry_id in self.knobs.fail_ids:
                    failures.append(
                        consumer_pb2.EntryFailure(
                            id=message_pb2.MessageId(ledger_id=entries.ledger_id, entry_id=entry_id),
                            error=self.knobs.fail_ids[entry_id],
                        )
                    )
                elif kind == "ack":
                    subscription.acked.add(entry_id)
                elif kind == "nack":
                    subscription.not_before_ms[entry_id] = now_ms() + body.redeliver_after_ms
                    subscription.held.discard(entry_id)
                    held.discard(entry_id)
        self._change()
        return failures

    async def Receive(self, request: consumer_pb2.ReceiveRequest, context: Any) -> Any:
        self.unary.append(request)
        if self.knobs.unary_errors:
            await abort(context, self.knobs.unary_errors.popleft())
        subscription = self._subscription(request.topic, request.subscription)
        batch, next_ms = self._due(request.topic, subscription, request.max_messages)
        return consumer_pb2.ReceiveResponse(deliveries=batch, consumer_id="pull", next_due_time_ms=next_ms)

    async def Acknowledge(self, request: consumer_pb2.AcknowledgeRequest, context: Any) -> Any:
        self.unary.append(request)
        subscription = self._subscription(request.topic, request.subscription)
        return consumer_pb2.AcknowledgeResponse(failures=self._settle(subscription, "ack", request, set()))

    async def Nack(self, request: consumer_pb2.NackRequest, context: Any) -> Any:
        self.unary.append(request)
        subscription = self._subscription(request.topic, request.subscription)
        return consumer_pb2.NackResponse(failures=self._settle(subscription, "nack", request, set()))

    async def ExtendLease(self, request: consumer_pb2.ExtendLeaseRequest, context: Any) -> Any:
        self.unary.append(request)
        subscription = self._subscription(request.topic, request.subscription)
        return consumer_pb2.ExtendLeaseResponse(failures=self._settle(subscription, "extend", request, set()))

    # AdminService

    async def CreateTopic(self, request: admin_pb2.CreateTopicRequest, context: Any) -> Any:
        self.unary.append(request)
        if self.knobs.unary_errors:
            await abort(context, self.knobs.unary_errors.popleft())
        if request.name in self.topics:
            await abort(context, status("ALREADY_EXISTS", "TOPIC_EXISTS", "there is one"))
        self.topic(request.name)
        return admin_pb2.CreateTopicResponse(topic=self._topic(request.name, request.policy))

    async def GetTopic(self, request: admin_pb2.GetTopicRequest, context: Any) -> Any:
        await self._need(request.name, context)
        return admin_pb2.GetTopicResponse(topic=self._topic(request.name))

    async def DeleteTopic(self, request: admin_pb2.DeleteTopicRequest, context: Any) -> Any:
        await self._need(request.name, context)
        del self.topics[request.name]
        return admin_pb2.DeleteTopicResponse()

    async def ListTopics(self, request: admin_pb2.ListTopicsRequest, context: Any) -> Any:
        names = sorted(self.topics)
        start = int(request.page_token or 0)
        page = names[start : start + 2]  # small pages, so that paging is seen to work
        more = str(start + 2) if start + 2 < len(names) else ""
        return admin_pb2.ListTopicsResponse(topics=map(self._topic, page), next_page_token=more)

    async def CreateSubscription(self, request: admin_pb2.CreateSubscriptionRequest, context: Any) -> Any:
        self.unary.append(request)
        self._subscription(request.topic, request.name)
        described = admin_pb2.Subscription(
            topic=request.topic, name=request.name, type=request.type, policy=request.policy
        )
        return admin_pb2.CreateSubscriptionResponse(subscription=described)

    async def GetSubscription(self, request: admin_pb2.GetSubscriptionRequest, context: Any) -> Any:
        await self._need(request.topic, context, request.name)
        described = admin_pb2.Subscription(topic=request.topic, name=request.name)
        return admin_pb2.GetSubscriptionResponse(subscription=described)

    async def DeleteSubscription(self, request: admin_pb2.DeleteSubscriptionRequest, context: Any) -> Any:
        await self._need(request.topic, context, request.name)
        del self.topics[request.topic].subscriptions[request.name]
        return admin_pb2.DeleteSubscriptionResponse()

    async def ListSubscriptions(self, request: admin_pb2.ListSubscriptionsRequest, context: Any) -> Any:
        await self._need(request.topic, context)
        names = sorted(self.topics[request.topic].subscriptions)
        described = [admin_pb2.Subscription(topic=request.topic, name=name) for name in names]
        return admin_pb2.ListSubscriptionsResponse(subscriptions=described)

    async def GetStats(self, request: admin_pb2.GetStatsRequest, context: Any) -> Any:
        names = list(request.topics) or sorted(self.topics)
        for name in names:
            await self._need(name, context)
        return admin_pb2.GetStatsResponse(topics=map(self._stats, names))

    async def GetServerInfo(self, request: admin_pb2.GetServerInfoRequest, context: Any) -> Any:
        return admin_pb2.GetServerInfoResponse(
            version="fake",
            broker_id="b1",
            start_time_ms=now_ms(),
            broker_time_ms=now_ms(),
            limits=admin_pb2.ServerLimits(payload_bytes_max=1024 * 1024),
        )

    def _topic(self, name: str, policy: admin_pb2.TopicPolicy | None = None) -> admin_pb2.Topic:
        return admin_pb2.Topic(
            name=name,
            policy=policy,
            effective_policy=admin_pb2.TopicPolicy(tick_ms=1000, tracker=admin_pb2.TRACKER_MEMORY),
            create_time_ms=1_700_000_000_000,
        )

    def _stats(self, name: str) -> admin_pb2.TopicStats:
        topic = self.topics[name]
        return admin_pb2.TopicStats(
            topic=name,
            scheduled_messages=sum(delivery.deliver_at_ms > now_ms() for delivery in topic.deliveries),
            subscriptions=[
                admin_pb2.SubscriptionStats(name=each, leased_messages=len(subscription.held))
                for each, subscription in topic.subscriptions.items()
            ],
        )

    async def _need(self, topic: str, context: Any, subscription: str = "") -> None:
        if topic not in self.topics:
            await abort(context, status("NOT_FOUND", "TOPIC_NOT_FOUND", f"no topic {topic}", topic=topic))
        if subscription and subscription not in self.topics[topic].subscriptions:
            await abort(context, status("NOT_FOUND", "SUBSCRIPTION_NOT_FOUND", f"no {subscription}"))

    def _subscription(self, topic: str, name: str) -> FakeSubscription:
        return self.topic(topic).subscriptions.setdefault(name, FakeSubscription())

    def _change(self) -> None:
        # Each waiter holds on to the event it saw; a new one lets it clear its own only.
        self.changed.set()
        self.changed = asyncio.Event()


class Treadmill(
    producer_pb2_grpc.ProducerServiceServicer,
    consumer_pb2_grpc.ConsumerServiceServicer,
):
    """Answers and delivers as fast as gRPC lets it, so that only the client is measured."""

    def __init__(self, batch: int, size: int) -> None:
        self._count = batch
        response = consumer_pb2.SubscribeResponse()
        for index in range(batch):
            response.batch.deliveries.add(
                id=message_pb2.MessageId(ledger_id=LEDGER, entry_id=100_000 + index),
                message=message_pb2.Message(payload=bytes(size), deliver_at_ms=now_ms()),
                publish_time_ms=now_ms(),
                deliver_at_ms=now_ms(),
                delivery_attempt=1,
            )
        self._frame = response

    async def ProduceStream(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        first = 0
        async for request in requests:
            count = len(request.messages)
            response = producer_pb2.ProduceResponse(request_id=request.request_id, publish_time_ms=1)
            response.ids.add(ledger_id=LEDGER, first_entry_id=first, count=count)
            first += count
            yield response

    async def Subscribe(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        frames = aiter(requests)
        permits = (await anext(frames)).open.permits.messages
        opened = consumer_pb2.Opened(consumer_id="c", lease_ms=30_000, heartbeat_ms=5_000)
        yield consumer_pb2.SubscribeResponse(opened=opened)
        while True:
            while permits >= self._count:
                permits -= self._count
                yield self._frame
            try:
                frame = await anext(frames)
            except StopAsyncIteration:
                return
            if frame.HasField("permits"):
                permits += frame.permits.messages
            elif frame.HasField("ack"):
                confirmed = consumer_pb2.Confirmed(request_id=frame.ack.request_id)
                yield consumer_pb2.SubscribeResponse(confirmed=confirmed)
            elif frame.HasField("drain"):
                permits = 0


async def _serve(port: int, batch: int, size: int) -> None:
    server = grpc.aio.server()
    treadmill = Treadmill(batch, size)
    register(producer_pb2_grpc.add_ProducerServiceServicer_to_server, treadmill, server)
    register(consumer_pb2_grpc.add_ConsumerServiceServicer_to_server, treadmill, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=7699)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--size", type=int, default=100)
    options = parser.parse_args()
    asyncio.run(_serve(options.port, options.batch, options.size))
