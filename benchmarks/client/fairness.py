"""A quiet topic, and what others do on the same broker meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

from benchmarks.client import raw
from benchmarks.client.control import check, percentiles, phase, say
from postdate_api.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    consumer_pb2,
    consumer_pb2_grpc,
    message_pb2,
    producer_pb2,
)

_QUIET = "quiet"
_SUBSCRIPTION = "s"
_DELAY_MS = 500
_PERMITS = 1_000_000
_BUSY_TOPICS = 50


class _Quiet:
    """One producer of single messages and one consumer, both in good order."""

    def __init__(self, channel: Any, rate: float) -> None:
        self.answered_ms: list[float] = []
        self.late_ms: list[float] = []
        self.early = 0
        self._channel = channel
        self._pause = 1 / rate
        self._requests = itertools.count(1)

    async def produce(self) -> None:
        unary = raw.produce_unary(self._channel)
        begin = time.perf_counter()
        for number in itertools.count():
            meant = begin + number * self._pause
            await asyncio.sleep(max(0.0, meant - time.perf_counter()))
            message = message_pb2.Message(payload=b"quiet", deliver_after_ms=_DELAY_MS)
            request = producer_pb2.ProduceRequest(topic=_QUIET, messages=[message])
            await unary(request.SerializeToString())
            self.answered_ms.append((time.perf_counter() - meant) * 1000)

    async def consume(self) -> None:
        call = await _open(self._channel, _QUIET)
        while (frame := await call.read()) is not raw.EOF:
            now_ms = time.time() * 1000
            if frame.WhichOneof("frame") == "batch":
                self.early += sum(delivery.deliver_at_ms > now_ms for delivery in frame.batch.deliveries)
                self.late_ms += [now_ms - delivery.deliver_at_ms for delivery in frame.batch.deliveries]
                await call.write(_ack(next(self._requests), frame.batch.deliveries))


async def quiet(task: dict[str, Any]) -> dict[str, Any]:
    """For each name in `disturbances` a window of `seconds`: lateness, and how long a produce call takes."""
    found: dict[str, Any] = {}
    async with raw.connect(task["address"]) as channel:
        await _create(channel, _QUIET)
        topic = _Quiet(channel, task["rate"])
        tasks = [asyncio.create_task(topic.produce()), asyncio.create_task(topic.consume())]
        await asyncio.sleep(2.0)
        for name in task["disturbances"]:
            await phase(f"begin {name}")
            topic.answered_ms.clear()
            topic.late_ms.clear()
            await asyncio.sleep(task["seconds"])
            found[name] = {"late": percentiles(topic.late_ms), "answered": percentiles(topic.answered_ms)}
            await phase(f"end {name}")
        for each in tasks:
            check(not each.done(), f"the quiet topic's client ended: {each}")
            each.cancel()
    found["early"] = topic.early
    return found


async def disturb(task: dict[str, Any]) -> dict[str, Any]:
    """Do what `kind` says until a line comes on standard input."""
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(raw.connect(task["address"]))
        work = asyncio.create_task(_KINDS[task["kind"]](channel, task["scale"]))
        line = await asyncio.to_thread(sys.stdin.readline)
        check(bool(line), "whoever started this is gone")
        if work.done():
            work.result()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    return {}


async def _herd(channel: Any, scale: float) -> None:
    """Very many messages of one second, with a consumer that takes and acknowledges them."""
    await _create(channel, "herd")
    at_ms = int(time.time() * 1000) + 6_000
    consumer = asyncio.create_task(_consume(channel, "herd", acks=True))
    count, batch = int(300_000 * scale), 1_000
    stream = raw.produce_stream(channel)
    rng = random.Random(1)
    for _ in range(count // batch):
        messages = [
            message_pb2.Message(payload=bytes(100), deliver_at_ms=at_ms + rng.randrange(1000))
            for _ in range(batch)
        ]
        await stream.write(producer_pb2.ProduceRequest(topic="herd", messages=messages).SerializeToString())
        await stream.read()
    _ready()
    await consumer


async def _never_acks(channel: Any, scale: float) -> None:
    """A consumer that takes everything and never acknowledges."""
    await _create(channel, "hoarder")
    consumer = asyncio.create_task(_consume(channel, "hoarder", acks=False))
    _ready()
    await asyncio.gather(consumer, _produce(channel, "hoarder", int(5_000 * scale), 100))


async def _no_read(channel: Any, scale: float) -> None:
    """A consumer that grants permits and does not read."""
    await _create(channel, "deaf")
    await _open(channel, "deaf")
    _ready()
    await _produce(channel, "deaf", int(2_000 * scale), 1_000)


async def _idle_subscriptions(channel: Any, scale: float) -> None:
    """A thousand subscriptions of the quiet topic itself that nobody reads."""
    admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
    for number in range(int(1_000 * scale)):
        request = admin_pb2.CreateSubscriptionRequest(topic=_QUIET, name=f"idle-{number}")
        await admin.CreateSubscription(request)
    _ready()
    await asyncio.Event().wait()


async def _many_topics(channel: Any, scale: float) -> None:
    """Two thousand topics, of which fifty are busy."""
    names = [f"many-{number}" for number in range(int(2_000 * scale))]
    for begin in range(0, len(names), 100):
        await asyncio.gather(*(_create(channel, name) for name in names[begin : begin + 100]))
    _ready()
    busy = names[:_BUSY_TOPICS]
    await asyncio.gather(
        *(_consume(channel, name, acks=True) for name in busy),
        *(_produce(channel, name, 20, 100, delay_ms=200) for name in busy),
    )


_KINDS: dict[str, Callable[[Any, float], Coroutine[Any, Any, None]]] = {
    "herd": _herd,
    "never-acks": _never_acks,
    "no-read": _no_read,
    "idle-subscriptions": _idle_subscriptions,
    "many-topics": _many_topics,
}


async def idle(task: dict[str, Any]) -> dict[str, Any]:
    """Topics that nobody uses, then subscriptions of one of them."""
    async with raw.connect(task["address"]) as channel:
        admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
        await phase("empty")
        for begin in range(0, task["topics"], 100):
            requests = (admin_pb2.CreateTopicRequest(name=f"idle-{begin + i}") for i in range(100))
            await asyncio.gather(*(admin.CreateTopic(request) for request in requests))
        await phase("topics")
        for begin in range(0, task["subscriptions"], 100):
            names = (f"idle-{begin + i}" for i in range(100))
            await asyncio.gather(
                *(
                    admin.CreateSubscription(admin_pb2.CreateSubscriptionRequest(topic="idle-0", name=name))
                    for name in names
                )
            )
        await phase("subscriptions")
    return {}


def _ready() -> None:
    say({"ready": True})


async def _create(channel: Any, topic: str) -> None:
    admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
    await admin.CreateSubscription(
        admin_pb2.CreateSubscriptionRequest(topic=topic, name=_SUBSCRIPTION), wait_for_ready=True
    )


async def _open(channel: Any, topic: str) -> Any:
    call = consumer_pb2_grpc.ConsumerServiceStub(channel).Subscribe()
    opening = consumer_pb2.Open(
        topic=topic, subscription=_SUBSCRIPTION, permits=consumer_pb2.Permits(messages=_PERMITS)
    )
    await call.write(consumer_pb2.SubscribeRequest(open=opening))
    return call


async def _consume(channel: Any, topic: str, *, acks: bool) -> None:
    call = await _open(channel, topic)
    numbers = itertools.count(1)
    while (frame := await call.read()) is not raw.EOF:
        if acks and frame.WhichOneof("frame") == "batch":
            await call.write(_ack(next(numbers), frame.batch.deliveries))


async def _produce(channel: Any, topic: str, rate: int, payload_bytes: int, *, delay_ms: int = 0) -> None:
    """At a given rate, in ten batches a second at most."""
    stream = raw.produce_stream(channel)
    batch = max(1, rate // 10)
    message = message_pb2.Message(payload=bytes(payload_bytes), deliver_after_ms=delay_ms)
    raw_request = producer_pb2.ProduceRequest(topic=topic, messages=[message] * batch).SerializeToString()
    while True:
        await stream.write(raw_request)
        await stream.read()
        await asyncio.sleep(batch / rate)


def _ack(number: int, deliveries: Any) -> consumer_pb2.SubscribeRequest:
    by_ledger: dict[int, list[int]] = {}
    for delivery in deliveries:
        by_ledger.setdefault(delivery.id.ledger_id, []).append(delivery.id.entry_id)
    sets = [message_pb2.EntrySet(ledger_id=i, entry_ids=ids) for i, ids in by_ledger.items()]
    return consumer_pb2.SubscribeRequest(ack=consumer_pb2.Ack(request_id=number, entries=sets))
