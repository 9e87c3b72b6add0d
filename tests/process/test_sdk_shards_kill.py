"""The SDK goes to shards directly, of one broker and of a cluster, and what serves them is killed or frozen under load.

Nothing is lost, nothing comes back whose acknowledgement was confirmed, and nobody notices.
"""

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
from tests.depth import at_depth, one_of_three
from tests.process.conftest import SMALL, Start
from tests.process.test_cluster_shards import SECONDS, Nodes
from tests.process.test_shards import SHARDS, children

COUNT = at_depth(change=150, deep=600)
KILLS = at_depth(change=2, deep=6)
TOPICS = [
    next(f"t{n}" for n in range(100) if shard_of(f"t{n}", SHARDS) == number) for number in range(SHARDS)
]


class Work:
    """One topic: what was stored of it, and what was taken."""

    def __init__(self, topic: str, name: str = "", wanted: int = COUNT) -> None:
        """`name`: that of the producer, in each message. `wanted`: messages that come, of all producers."""
        self.topic = topic
        self.name = name
        self.wanted = wanted
        self.stored: set[bytes] = set()
        self.taken: Counter[bytes] = Counter()
        self.acked: set[bytes] = set()
        self.back: list[bytes] = []
        self.all_acked = asyncio.Event()

    async def send(self, producer: postdate.Producer) -> None:
        for number in range(COUNT):
            payload = f"{self.name}{number}".encode()
            await producer.send(payload, deliver_after=timedelta(milliseconds=number % 50))
            self.stored.add(payload)

    async def take(self, subscription: postdate.Subscription) -> None:
        async for message in subscription:
            if message.payload in self.acked:
                self.back.append(message.payload)
            self.taken[message.payload] += 1
            await message.ack()
            self.acked.add(message.payload)
            if len(self.acked) == self.wanted:
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


@one_of_three(2)
async def test_a_node_of_a_cluster_is_killed_and_an_owner_frozen_and_clients_go_on(
    start: Start, tmp_path: Path
) -> None:
    """One client knows all nodes, and one a single node, which stays."""
    nodes = Nodes(start, tmp_path)
    await nodes.create()
    victim, other = await nodes.owned("a")
    front = next(name for name in "abc" if name not in (victim, other))
    addresses = {"three": ",".join(map(nodes.address, "abc")), "one": nodes.address(front)}
    works = [Work(topic, name, COUNT * len(addresses)) for name in addresses for topic in TOPICS]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(3 * SECONDS))
        clients = {
            name: await stack.enter_async_context(postdate.connect(address))
            for name, address in addresses.items()
        }
        for topic in TOPICS:
            await clients["three"].topics.create(topic, postdate.TopicPolicy(dedup_window=timedelta(hours=1)))
            for name in addresses:  # before anything is sent
                await clients["three"].subscriptions.create(topic, name)
        sending, taking = [], []
        for work in works:
            client = clients[work.name]
            producer = client.producer(work.topic, producer_name=work.name, linger=timedelta(0))
            await stack.enter_async_context(producer)
            subscription = client.subscribe(work.topic, work.name, lease=timedelta(seconds=5))
            await stack.enter_async_context(subscription)
            sending.append(asyncio.create_task(work.send(producer)))
            taking.append(asyncio.create_task(work.take(subscription)))
        await taken(works, COUNT // 3, [*sending, *taking])
        await nodes.end(victim, signal.SIGKILL)
        await taken(works, COUNT, [*sending, *taking])
        await nodes.start_node(victim)
        owner = (await nodes.owned(front))[1]
        frozen = children(nodes.processes[owner])[1]
        os.kill(frozen, signal.SIGSTOP)
        await taken(works, COUNT * len(addresses), [*sending, *taking])
        await asyncio.gather(*sending)
        for task in taking:
            task.cancel()
        await asyncio.gather(*taking, return_exceptions=True)
        while children(nodes.processes[owner]).get(1, frozen) == frozen:  # its node ends it
            await asyncio.sleep(0.05)
    for work in works:
        assert len(work.stored) == COUNT
        assert len(work.acked) == work.wanted, "something else came"
        assert not work.back, "what was confirmed came again"


async def taken(works: list[Work], count: int, tasks: list[asyncio.Task[None]]) -> None:
    """Wait until every subscription has confirmed so many; raise what a task has raised."""
    while any(len(work.acked) < count for work in works):
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(0.01)
