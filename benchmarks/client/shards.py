"""A broker with two shards through its front and directly, and one without shards, in turns."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.client import raw
from benchmarks.client.control import check
from benchmarks.client.produce import Pipeline
from postdate_api.v1 import admin_pb2, admin_pb2_grpc, message_pb2, producer_pb2

_BATCH = 1_000
_DISTINCT = 16
_WINDOW = 8
_CALLS = 100
_TICKS = os.sysconf("SC_CLK_TCK")
_TOPICS_TRIED = 100


class _Way:
    """A way to one topic, and what came of it."""

    def __init__(self, channel: Any, topic: str, pids: list[int]) -> None:
        self.channel = channel
        self.pids = pids  # of the processes that work for it
        self.single_us: list[float] = []
        self.rates: list[float] = []
        self.cpu_s: list[float] = []  # of a turn
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
            for ways in [[one], direct] * task["turns"]:
                await _quiet([*one.pids, *direct[0].pids])
                begin = _cpu_seconds(ways[0].pids)
                await asyncio.gather(*(way.stream(task["batches"] // len(ways)) for way in ways))
                await _quiet(ways[0].pids)  # what is written and sealed later counts, too
                ways[0].cpu_s.append(_cpu_seconds(ways[0].pids) - begin)
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
    }


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


async def _topic_on(front: Any, address: str) -> str:
    """Create a topic that lies on the shard at an address; return its name."""
    admin: Any = admin_pb2_grpc.AdminServiceStub(front)
    async with raw.connect(address) as channel:
        own: Any = admin_pb2_grpc.AdminServiceStub(channel)
        for number in range(_TOPICS_TRIED):
            name = f"bench{address.rpartition(':')[2]}-{number}"
            await admin.CreateTopic(admin_pb2.CreateTopicRequest(name=name))
            if any(
                topic.name == name for topic in (await own.ListTopics(admin_pb2.ListTopicsRequest())).topics
            ):
                return name
    raise AssertionError("no topic fell onto a shard")


def _requests(topic: str, count: int, batch: int) -> list[bytes]:
    return [
        producer_pb2.ProduceRequest(
            topic=topic,
            messages=[
                message_pb2.Message(payload=os.urandom(100), deliver_after_ms=3_600_000) for _ in range(batch)
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
