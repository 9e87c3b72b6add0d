"""Two shards through their front and directly, and a broker without shards, in turns; all shards after a start."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from benchmarks.client import raw
from benchmarks.client.consumer import Consumer
from benchmarks.client.control import check, phase
from benchmarks.client.produce import Pipeline
from benchmarks.client.wire import Columns, read_frame
from broker.topic_shards import shard_of
from postdate_api.v1 import admin_pb2, admin_pb2_grpc, consumer_pb2, message_pb2, producer_pb2

_BATCH = 1_000
_DISTINCT = 16
_WINDOW = 8
_CALLS = 100
_TICKS = os.sysconf("SC_CLK_TCK")
_TOPICS_TRIED = 100
_MARK = b"due just after the start"
_DAY_MS = 86_400_000
_SOON_MS = (1, 1_000)


class _Way:
    """A way to one topic, and what came of it."""

    def __init__(self, channel: Any, topic: str, pids: list[int]) -> None:
        self.channel = channel
        self.pids = pids  # of the processes that work for it
        self.single_us: list[float] = []
        self.rates: list[float] = []
        self.cpu_s: list[float] = []  # of a turn
        self.cpu_apart_s: list[float] = []  # likewise, one shard after the other
        self._single = _requests(topic, 1, 1)[0]
        self._batches = _requests(topic, _DISTINCT, _BATCH)

    async def call(self) -> None:
        """Produce single messages, one after the other."""
        produce = raw.produce_unary(self.channel)
        for _ in range(_CALLS):
            begin = time.perf_counter_ns()
            await produce(self._single)
            self.single_us.append((time.perf_counter_ns() - begin) / 1000)

    async def stream(self, batches: int) -> None:
        """Produce batches on a stream."""
        pipeline = Pipeline(raw.produce_stream(self.channel), self._batches, _BATCH, _WINDOW, from_zero=False)
        begin = time.perf_counter()
        await pipeline.run(batches)
        self.rates.append(batches * _BATCH / (time.perf_counter() - begin))


class _Deliveries:
    """Messages of one topic that are due, taken and acknowledged."""

    def __init__(self, channel: Any, topic: str, pids: list[int]) -> None:
        self.pids = pids  # of the processes that work for it
        self.cpu_s: list[float] = []  # of a turn
        self.cpu_apart_s: list[float] = []  # likewise, one shard after the other
        self._channel = channel
        self._topic = topic
        self._batches = _requests(topic, _DISTINCT, _BATCH, delay_ms=_SOON_MS)

    async def load(self, batches: int) -> None:
        """Produce batches of what is due within a second."""
        stream = raw.produce_stream(self._channel)
        await Pipeline(stream, self._batches, _BATCH, _WINDOW, from_zero=False).run(batches)

    async def take(self, batches: int) -> None:
        """Take and acknowledge as many."""
        await Consumer(self._channel, "all", topic=self._topic).run(batches * _BATCH)


async def shards(task: dict[str, Any]) -> dict[str, Any]:
    """Medians of what each way took, and CPU time of the brokers for a million messages."""
    async with raw.connect(task["address"]) as alone, raw.connect(task["front"]) as front:
        addresses = await _addresses(front)
        topics = [await _topic_on(front, address) for address in addresses]
        async with raw.connect(addresses[0]) as first, raw.connect(addresses[1]) as second:
            through = _Way(front, topics[0], [])
            direct = [_Way(first, topics[0], task["shard_pids"]), _Way(second, topics[1], [])]
            one = _Way(alone, "alone", [task["pid"]])
            for way in (through, *direct, one):  # warm
                await way.stream(task["batches"])
                way.rates.clear()
            for ways, is_apart in [([one], False), (direct, False), (direct, True)] * task["turns"]:
                await _quiet([*one.pids, *direct[0].pids])
                spent = ways[0].cpu_apart_s if is_apart else ways[0].cpu_s
                works = [partial(way.stream, task["batches"] // len(ways)) for way in ways]
                spent.append(await _spent(ways[0].pids, works, is_apart=is_apart))
            due = await _due_topics(alone, front, addresses, [first, second], task)
            await _deliver(due, task["turns"], task["batches"])
            direct[0].rates.clear()
            for _ in range(task["turns"]):
                for way in (through, direct[0]):
                    await way.call()
                for way in (through, direct[0]):
                    await way.stream(task["batches"])
    millions = task["batches"] * _BATCH / 1e6
    return {
        "front_us": statistics.median(through.single_us),
        "direct_us": statistics.median(direct[0].single_us),
        "front_rate": statistics.median(through.rates),
        "direct_rate": statistics.median(direct[0].rates),
        "one_cpu_s": statistics.median(one.cpu_s) / millions,
        "two_cpu_s": statistics.median(direct[0].cpu_s) / millions,
        "two_apart_cpu_s": statistics.median(direct[0].cpu_apart_s) / millions,
        "one_deliver_cpu_s": statistics.median(due[0][0].cpu_s) / millions,
        "two_deliver_cpu_s": statistics.median(due[1][0].cpu_s) / millions,
        "two_apart_deliver_cpu_s": statistics.median(due[1][0].cpu_apart_s) / millions,
    }


async def _due_topics(
    alone: Any, front: Any, addresses: list[str], channels: list[Any], task: dict[str, Any]
) -> list[list[_Deliveries]]:
    """Return the topic of the broker without shards, and those of two shards, each with a subscription."""
    admin: Any = admin_pb2_grpc.AdminServiceStub(alone)
    await admin.CreateTopic(admin_pb2.CreateTopicRequest(name="due"))
    topics = [await _topic_on(front, address, "due") for address in addresses]
    for channel, topic in zip([alone, *channels], ["due", *topics], strict=True):
        await _subscription(channel, topic)
    pids = [task["shard_pids"], []]
    several = [_Deliveries(*each) for each in zip(channels, topics, pids, strict=True)]
    return [[_Deliveries(alone, "due", [task["pid"]])], several]


async def _deliver(sides: list[list[_Deliveries]], turns: int, batches: int) -> None:
    """Let each side deliver as many messages, in turns after a first one that warms; all of them are due before."""
    pids = [pid for side in sides for pid in side[0].pids]
    one, several = sides
    for number, (side, is_apart) in enumerate(
        [(one, False), (several, False), (several, True)] * (turns + 1)
    ):
        share = batches // len(side)
        await asyncio.gather(*(part.load(share) for part in side))
        await asyncio.sleep(_SOON_MS[1] / 1000 + 0.2)
        await _quiet(pids)
        spent = side[0].cpu_apart_s if is_apart else side[0].cpu_s
        seconds = await _spent(side[0].pids, [partial(part.take, share) for part in side], is_apart=is_apart)
        if number >= 3:
            spent.append(seconds)


async def shards_start(task: dict[str, Any]) -> dict[str, Any]:
    """Load each shard, have the broker killed and started, and wait until each has delivered through the front."""
    async with raw.connect(task["address"]) as front:
        topics = []
        for address in await _addresses(front):
            topics.append(topic := await _topic_on(front, address))
            async with raw.connect(address) as channel:
                await _subscription(channel, topic)
                requests = _requests(topic, _DISTINCT, _BATCH, delay_ms=(_DAY_MS, 30 * _DAY_MS))
                stream = raw.produce_stream(channel)
                await Pipeline(stream, requests, _BATCH, 2 * _WINDOW, from_zero=False).run(
                    task["count"] // _BATCH
                )
        await phase("loaded")  # what is written and sealed later is done meanwhile
        for topic in topics:
            soon = [message_pb2.Message(payload=_MARK, deliver_after_ms=task["due_ms"])]
            request = producer_pb2.ProduceRequest(topic=topic, messages=soon)
            await raw.produce_unary(front)(request.SerializeToString())
    await phase("stored")  # killed and started now
    async with raw.connect(task["address"]) as front:
        first_at = await asyncio.gather(*(_again(_first_delivery, front, topic) for topic in topics))
    return {"first_at": first_at, "pending": task["count"] * len(topics)}


async def shards_served(task: dict[str, Any]) -> dict[str, Any]:
    """Wait until each shard of a cluster has answered a message through one node."""
    async with raw.connect(task["address"]) as front:
        admin: Any = admin_pb2_grpc.AdminServiceStub(front)
        answer = await admin.GetCluster(admin_pb2.GetClusterRequest(), wait_for_ready=True)
        names = _names_on(len(answer.shards))
        return {"first_at": await asyncio.gather(*(_again(_answered, front, name) for name in names))}


async def _again(work: Any, channel: Any, topic: str) -> float:
    """Return the time of what is waited for; a call that finds nobody is made again."""
    while True:
        try:
            return float(await work(channel, topic))
        except grpc.aio.AioRpcError as error:
            waits = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            check(error.code() in waits, f"{error.code()}: {error.details()}")
        await asyncio.sleep(0.02)


async def _answered(channel: Any, topic: str) -> float:
    message = message_pb2.Message(payload=b"x", deliver_after_ms=_DAY_MS)
    request = producer_pb2.ProduceRequest(topic=topic, messages=[message])
    await raw.produce_unary(channel)(request.SerializeToString(), timeout=2)
    return time.monotonic()


async def _first_delivery(channel: Any, topic: str) -> float:
    call = raw.subscribe_stream(channel)
    opening = consumer_pb2.Open(topic=topic, subscription="all", permits=consumer_pb2.Permits(messages=10))
    await call.write(consumer_pb2.SubscribeRequest(open=opening).SerializeToString())
    while True:
        response = await call.read()
        if response is raw.EOF:
            check(await call.code() == grpc.StatusCode.UNAVAILABLE, "the broker ended the stream")
            await asyncio.sleep(0.02)
            return await _first_delivery(channel, topic)
        frame = read_frame(response)
        if isinstance(frame, Columns):
            check(all(_MARK in part for part in frame.parts), "a message that is not due was delivered")
            call.cancel()
            return time.monotonic()


async def _subscription(channel: Any, topic: str) -> None:
    admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
    await admin.CreateSubscription(
        admin_pb2.CreateSubscriptionRequest(
            topic=topic,
            name="all",
            type=consumer_pb2.SUBSCRIPTION_TYPE_SHARED,
            initial_position=consumer_pb2.INITIAL_POSITION_EARLIEST,
        )
    )


def _names_on(shards: int) -> list[str]:
    """Return a name of a topic for each shard."""
    names = [f"bench-{number}" for number in range(100 * shards)]
    return [next(name for name in names if shard_of(name, shards) == number) for number in range(shards)]


async def _spent(pids: list[int], works: Sequence[Callable[[], Awaitable[None]]], *, is_apart: bool) -> float:
    """Return the CPU time of some work, at the same time or one after the other: apart, no caches are shared."""
    begin = _cpu_seconds(pids)
    if is_apart:
        for work in works:
            await work()
    else:
        await asyncio.gather(*(work() for work in works))
    await _quiet(pids)  # what is written and sealed later counts, too
    return _cpu_seconds(pids) - begin


async def _quiet(pids: list[int]) -> None:
    """Wait until processes have next to nothing to do."""
    while True:
        before = _cpu_seconds(pids)
        await asyncio.sleep(0.5)
        if _cpu_seconds(pids) - before <= 0.02 * len(pids):
            return


async def _addresses(front: Any) -> list[str]:
    admin: Any = admin_pb2_grpc.AdminServiceStub(front)
    answer = await admin.GetCluster(admin_pb2.GetClusterRequest())
    check(all(shard.owner_address for shard in answer.shards), "a shard has no port: others have taken it")
    return [f"127.0.0.1{shard.owner_address}" for shard in answer.shards]


async def _topic_on(front: Any, address: str, prefix: str = "bench") -> str:
    """Create a topic that lies on the shard at an address; return its name."""
    admin: Any = admin_pb2_grpc.AdminServiceStub(front)
    async with raw.connect(address) as channel:
        own: Any = admin_pb2_grpc.AdminServiceStub(channel)
        for number in range(_TOPICS_TRIED):
            name = f"{prefix}{address.rpartition(':')[2]}-{number}"
            await admin.CreateTopic(admin_pb2.CreateTopicRequest(name=name))
            if any(
                topic.name == name for topic in (await own.ListTopics(admin_pb2.ListTopicsRequest())).topics
            ):
                return name
    raise AssertionError("no topic fell onto a shard")


def _requests(
    topic: str, count: int, batch: int, *, delay_ms: tuple[int, int] = (3_600_000, 3_600_000)
) -> list[bytes]:
    return [
        producer_pb2.ProduceRequest(
            topic=topic,
            messages=[
                message_pb2.Message(payload=os.urandom(100), deliver_after_ms=random.randint(*delay_ms))
                for _ in range(batch)
            ],
            request_id=place,
        ).SerializeToString()
        for place in range(count)
    ]


def _cpu_seconds(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS
