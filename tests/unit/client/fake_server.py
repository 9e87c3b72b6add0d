"""A small broker in memory, for tests of the SDK and for measuring it.

It knows just enough of the API to be talked to, has a knob for each way in which a real broker can
disappoint, and records what it was told. It keeps nothing, and is no model of the broker.

As a program it is the other process of a measurement: it answers produce requests without looking
at them, and delivers one prepared batch again and again.

    python -m tests.unit.client.fake_server --port 7699 --batch 1000 --size 100
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.rpc import status_pb2

from postdate_api.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    consumer_pb2,
    consumer_pb2_grpc,
    message_pb2,
    producer_pb2,
    producer_pb2_grpc,
    schedule_pb2_grpc,
)
from tests.unit.client.fake_admin import FakeAdmin
from tests.unit.client.fake_schedule import FakeSchedule
from tests.unit.client.fake_values import (
    LEDGER,
    FakeSubscription,
    FakeTopic,
    Knobs,
    abort,
    now_ms,
    status,
)

DEAD_LETTERS = "t~s~dead-letters"
_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    # As the API promises: clients may ping every 10 s, and are judged from 5 s on.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


class _Listener(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Notes what calls show."""

    def __init__(self, broker: FakeBroker) -> None:
        self._broker = broker

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        self._broker.authorizations.append(dict(details.invocation_metadata or ()).get("authorization", ""))
        return await continuation(details)


def add_id(response: producer_pb2.ProduceResponse, entry_id: int) -> None:
    """One more id; it joins the range before, as the broker's do."""
    last = response.ids[-1] if response.ids else None
    if last is not None and not last.duplicate and last.first_entry_id + last.count == entry_id:
        last.count += 1
    else:
        response.ids.add(ledger_id=LEDGER, first_entry_id=entry_id, count=1)


def register(add: Any, servicer: Any, server: Any) -> None:
    """The generator writes no types for what it generates."""
    add(servicer, server)


class FakeBroker(
    producer_pb2_grpc.ProducerServiceServicer,
    consumer_pb2_grpc.ConsumerServiceServicer,
    FakeAdmin,
    FakeSchedule,
):
    """All services in one object."""

    def __init__(self) -> None:
        self.knobs = Knobs()
        self.topics: dict[str, FakeTopic] = {}
        self.authorizations: list[str] = []  # of all calls, in order of arrival
        self.requests: list[int] = []  # messages in each produce request, in order of arrival
        self.frames: list[consumer_pb2.SubscribeRequest] = []  # of all consumers, without the first
        self.opens: list[consumer_pb2.Open] = []
        self.unary: list[Any] = []
        self.owed: list[consumer_pb2.OwedMessage] = []
        self.backups: dict[str, admin_pb2.Backup] = {}
        self.streams: set[asyncio.Queue[Any]] = set()
        self.produce_streams = 0
        self.changed = asyncio.Event()
        self.rebirth: asyncio.Task[None]
        self._server: Any = None
        self.port = 0

    async def start(self, port: int = 0) -> str:
        self._server = grpc.aio.server(options=_SERVER_OPTIONS, interceptors=(_Listener(self),))
        register(producer_pb2_grpc.add_ProducerServiceServicer_to_server, self, self._server)
        register(consumer_pb2_grpc.add_ConsumerServiceServicer_to_server, self, self._server)
        register(admin_pb2_grpc.add_AdminServiceServicer_to_server, self, self._server)
        register(schedule_pb2_grpc.add_ScheduleServiceServicer_to_server, self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return f"127.0.0.1:{self.port}"

    async def stop(self) -> None:
        await self._server.stop(None)

    async def restart(self) -> None:
        """Cut all calls and begin anew, with what is kept."""
        await self.stop()
        await self.start(self.port)

    async def _lose_answer(self, context: Any) -> None:
        """Break the connection after a change was made, if a knob says so."""
        code, self.knobs.change_status = self.knobs.change_status, None
        if code is not None:
            await context.abort(code, "broken")
        if self.knobs.die_in_change:
            self.knobs.die_in_change = False
            self.rebirth = asyncio.create_task(self.restart())
            await asyncio.Event().wait()  # until this call is cut

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

    def give_back(self, topic: str, subscription: str, entry_ids: set[int]) -> None:
        """End the leases of these."""
        self._subscription(topic, subscription).held -= entry_ids
        self._change()

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
        joined = producer_pb2.ProduceResponse()
        async for request in requests:
            self.requests.append(len(request.messages))
            self._change()
            if self.knobs.break_produce_after == 0:
                self.knobs.break_produce_after = -1
                if self.knobs.break_produce_stored:
                    self._produce(request)  # and nobody will know
                await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
            if self.knobs.break_produce_after > 0:
                self.knobs.break_produce_after -= 1
            if self.knobs.hold_answers is not None:
                await self.knobs.hold_answers.wait()
            if not (self.knobs.joined and request.join_answers):
                yield self._produce(request)
                continue
            joined.answers.append(self._produce(request))
            if len(joined.answers) == self.knobs.joined:
                yield joined
                del joined.answers[:]

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
        response.publish_time_ms = now_ms()
        forgetful = topic.policy.HasField("dedup_window_ms") and not topic.policy.dedup_window_ms
        known: dict[int, int] = {}
        if request.producer_name and not forgetful:
            known = topic.sequences.setdefault(request.producer_name, {})
        for message in request.messages:
            if message.sequence_id in known:
                first = known[message.sequence_id]
                response.ids.add(ledger_id=LEDGER, first_entry_id=first, count=1, duplicate=True)
            else:
                entry_id = self._store(request.topic, message, 0)
                if message.sequence_id:
                    known[message.sequence_id] = entry_id
                add_id(response, entry_id)
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
            if self.knobs.hold_opened is not None:
                await self.knobs.hold_opened.wait()
            yield consumer_pb2.SubscribeResponse(opened=opened)
            while (item := await queue.get()) is not None:
                if isinstance(item, status_pb2.Status):
                    await abort(context, item)
                yield item
            if self.knobs.hold_end is not None:
                await self.knobs.hold_end.wait()
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
        if subscription.paused:
            return [], 0
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
                elif kind == "nack" and body.dead_letter:
                    subscription.acked.add(entry_id)
                    subscription.dead_letters.append(self._dead_letter(body, entry_id))
                elif kind == "nack":
                    subscription.not_before_ms[entry_id] = now_ms() + body.redeliver_after_ms
                    subscription.held.discard(entry_id)
                    held.discard(entry_id)
        self._change()
        return failures

    def _dead_letter(self, nack: Any, entry_id: int) -> admin_pb2.DeadLetter:
        message = message_pb2.Message(payload=b"given up", key="k", properties={"a": "b"})
        return admin_pb2.DeadLetter(
            id=message_pb2.MessageId(ledger_id=LEDGER + 1, entry_id=self._store(DEAD_LETTERS, message, 0)),
            dead_letter_topic=DEAD_LETTERS,
            original_id=message_pb2.MessageId(ledger_id=LEDGER, entry_id=entry_id),
            delivery_attempts=3,
            reason=nack.reason or "nack",
            dead_letter_time_ms=now_ms(),
            payload_bytes=len(message.payload),
            message=message,
        )

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

    async def ListOwed(self, request: consumer_pb2.ListOwedRequest, context: Any) -> Any:
        self.unary.append(request)
        owed = self.owed[int(request.page_token or 0) :]
        return consumer_pb2.ListOwedResponse(
            owed=owed[:2], next_page_token=str(len(self.owed) - len(owed) + 2) if len(owed) > 2 else ""
        )

    async def ExtendLease(self, request: consumer_pb2.ExtendLeaseRequest, context: Any) -> Any:
        self.unary.append(request)
        subscription = self._subscription(request.topic, request.subscription)
        return consumer_pb2.ExtendLeaseResponse(failures=self._settle(subscription, "extend", request, set()))

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
