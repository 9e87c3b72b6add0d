"""The SDK goes to shards directly, and shards are killed under load: nothing is lost, and nobody notices."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path

import postdate
from broker.topic_shards import shard_of
from tests.depth import at_depth
from tests.process.conftest import SMALL, Start
from tests.process.test_shards import SHARDS, children

COUNT = at_depth(change=150, deep=600)
KILLS = at_depth(change=2, deep=6)
TOPICS = [
    next(f"t{n}" for n in range(100) if shard_of(f"t{n}", SHARDS) == number) for number in range(SHARDS)
]


class Work:
    """One topic: what was stored of it, and what was taken."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.stored: set[bytes] = set()
        self.taken: Counter[bytes] = Counter()
        self.acked: set[bytes] = set()
        self.back: list[bytes] = []
        self.all_acked = asyncio.Event()

    async def send(self, producer: postdate.Producer) -> None:
        for number in range(COUNT):
            await producer.send(b"%d" % number, deliver_after=timedelta(milliseconds=number % 50))
            self.stored.add(b"%d" % number)

    async def take(self, subscription: postdate.Subscription) -> None:
        async for message in subscription:
            if message.payload in self.acked:
                self.back.append(message.payload)
            self.taken[message.payload] += 1
            await message.ack()
            self.acked.add(message.payload)
            if len(self.acked) == COUNT:
                self.all_acked.set()


async def test_a_shard_is_killed_under_load_and_its_clients_go_on(start: Start, tmp_path: Path) -> None:
    settings = {"data_dir": str(tmp_path / "d"), "shards": str(SHARDS), **SMALL}
    broker = await (await start(**settings)).serving()
    works = [Work(topic) for topic in TOPICS]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(90))
        client = await stack.enter_async_context(postdate.connect(broker.grpc_address))
        sending, taking = [], []
        for work in works:
            await client.topics.create(work.topic, postdate.TopicPolicy(dedup_window=timedelta(hours=1)))
            producer = client.producer(work.topic, producer_name="p", linger=timedelta(0))
            await stack.enter_async_context(producer)
            subscription = client.subscribe(work.topic, "s", lease=timedelta(seconds=5))
            await stack.enter_async_context(subscription)
            sending.append(asyncio.create_task(work.send(producer)))
            taking.append(asyncio.create_task(work.take(subscription)))
        for kill in range(KILLS):
            victim = works[kill % SHARDS]
            count = COUNT * (kill + 1) // (KILLS + 1)
            while len(victim.acked) < count:
                await asyncio.sleep(0.005)
            place = client._rpc.owner(victim.topic).connection.address
            assert place != broker.grpc_address, "it was not reached directly"
            os.kill(children(broker)[kill % SHARDS], signal.SIGKILL)
        await asyncio.gather(*sending)
        for work in works:
            await work.all_acked.wait()
        for task in taking:
            task.cancel()
        await asyncio.gather(*taking, return_exceptions=True)
        stats = await client.stats(*TOPICS)
    for work in works:
        assert len(work.stored) == COUNT == len(work.acked)
        assert not work.back, "what was confirmed came again"
    for each in stats:
        found = each.subscriptions[0]
        assert (found.ready_messages, found.leased_messages, found.scheduled_messages) == (0, 0, 0)
