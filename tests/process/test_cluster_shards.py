"""Three nodes that hold two shards each: nodes and owners are killed and restarted one after the other under load."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from click.testing import CliRunner

from benchmarks.processes import free_ports
from broker.cli import main
from broker.cluster.creation import create_cluster
from broker.cluster.file_store import FileStore
from broker.topic_shards import shard_of
from postdate_api.v1 import admin_pb2, admin_pb2_grpc, message_pb2, producer_pb2
from tests.depth import at_depth, one_of_three
from tests.process.conftest import SMALL, BrokerProcess, Start
from tests.process.load import SUBSCRIPTIONS, Load
from tests.process.test_crash import StreamCut, settle
from tests.process.test_shards import children, is_running

SHARDS = 2
LEASE_MS = 3_000
SECONDS = 60.0
"""Nine processes start at once, and the machine may be busy."""
ROUNDS = at_depth(change=1, deep=5)
PAUSE_MS = at_depth(change=600, deep=200)
ROLLED = at_depth(change=1, deep=3)
"""Nodes that are restarted one after the other, first the one that owns the first shard."""
TOPICS = [
    next(f"load{i}" for i in itertools.count() if shard_of(f"load{i}", SHARDS) == s) for s in range(SHARDS)
]
"""One on each shard."""


class Nodes:
    """The supervisors of three nodes, by name."""

    def __init__(self, start: Start, folder: Path, **settings: str) -> None:
        self._start = start
        self._folder = folder
        own = {"base_interval_ms": "3s", "drain_grace_ms": "1s"}
        own["lease_ms"] = "10m"  # of what a consumer keeps: a life of a stream may be long
        self._settings = {**SMALL, **own, **settings}
        self._ports = dict(zip("abc", free_ports(3), strict=True))
        self.processes: dict[str, BrokerProcess] = {}
        self.ended: list[BrokerProcess] = []

    async def create(self) -> None:
        (self._folder / "store").mkdir()
        await create_cluster(FileStore(str(self._folder / "store")), SHARDS, LEASE_MS)
        await asyncio.gather(*map(self.start_node, self._ports))

    async def start_node(self, name: str) -> None:
        process = await self._start(
            data_dir=str(self._folder / name),
            grpc_address=self.address(name),
            cluster_store=f"file://{self._folder}/store",
            cluster_nodes=",".join(f"{node}={self.address(node)}" for node in self._ports),
            node=name,
            **self._settings,
        )
        async with asyncio.timeout(SECONDS):
            await process._serving.wait()
        assert process.grpc_address, "\n".join(process.lines)
        self.processes[name] = process

    async def end(self, name: str, number: signal.Signals) -> int:
        """End a node, with its shards."""
        process = self.processes.pop(name)
        self.ended.append(process)
        shards = children(process).values()
        process.process.send_signal(number)
        status = await process.wait(SECONDS)
        async with asyncio.timeout(SECONDS):
            while any(map(is_running, shards)):
                await asyncio.sleep(0.02)
        return status

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self._ports[name]}"

    def lines(self) -> str:
        """Return the logs of all nodes."""
        return "\n".join(
            line for process in (*self.ended, *self.processes.values()) for line in process.lines
        )

    async def shards(self, name: str) -> Sequence[admin_pb2.ClusterShard]:
        """Return what a node tells of all shards."""
        stub: Any = admin_pb2_grpc.AdminServiceStub(self.processes[name].channel)
        answer = await stub.GetCluster(admin_pb2.GetClusterRequest(), timeout=10, wait_for_ready=True)
        shards: Sequence[admin_pb2.ClusterShard] = answer.shards
        return shards

    async def following(self, name: str) -> None:
        """Wait until a node says that all of its shards are ready."""
        process = self.processes[name]
        async with asyncio.timeout(SECONDS), aiohttp.ClientSession() as session:
            while (await session.get(f"http://{process.http_address}/readyz")).status != 200:
                await asyncio.sleep(0.05)

    async def command(self, *words: str, passing: str = "\0") -> str:
        """Run a command of clusters at some node, again while it says what may pass, and return what it prints."""
        address = self.address(next(iter(self.processes)))
        given = ["cluster", *words, "--address", address]
        async with asyncio.timeout(SECONDS):
            while (done := await asyncio.to_thread(CliRunner().invoke, main, given)).exit_code:
                assert passing in done.output, (done.output, self.lines())
                await asyncio.sleep(0.1)
        return done.output

    async def owned(self, name: str, *, not_by: str = "") -> list[str]:
        """Wait until a node knows owners of all shards, none of them a certain one; return them."""
        end = time.monotonic() + SECONDS
        while True:
            shards = await self.shards(name)
            owners = [shard.owner for shard in shards]
            if len(owners) == SHARDS and all(owners) and not_by not in owners:
                assert [shard.owner_address for shard in shards] == [self.address(owner) for owner in owners]
                return owners
            assert time.monotonic() < end, (owners, self.lines())
            await asyncio.sleep(0.05)


class Client:
    """The load of one topic, through whichever node is up, and again after each break."""

    def __init__(self, nodes: Nodes, topic: str, seed: int) -> None:
        self.load = Load(seed=seed, topic=topic, pause_ms=PAUSE_MS)
        self.gap_seconds = 0.0
        self._nodes = nodes
        self._turn = seed
        self._task = asyncio.create_task(self._run())
        self._gaps = asyncio.create_task(self._watch())

    async def _run(self) -> None:
        while True:
            names = sorted(self._nodes.processes)
            self._turn += 1
            broker = self._nodes.processes[names[self._turn % len(names)]]
            self.load.begin_life()
            tasks = [asyncio.create_task(self.load.produce(broker)) for _ in range(2)]
            tasks += [asyncio.create_task(self.load.consume(broker, name)) for name in SUBSCRIPTIONS]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.1)

    async def _watch(self) -> None:
        """Note the longest time without an answer, once there was one."""
        answers, since = 0, time.monotonic()
        while True:
            await asyncio.sleep(0.02)
            if not answers or len(self.load.answered) > answers:
                answers, since = len(self.load.answered), time.monotonic()
            self.gap_seconds = max(self.gap_seconds, time.monotonic() - since)

    async def more(self, answers: int = 200) -> None:
        """Wait until so much more was answered."""
        wanted, end = len(self.load.answered) + answers, time.monotonic() + SECONDS
        while len(self.load.answered) < wanted:
            assert not self._task.done(), self._task.result()
            assert time.monotonic() < end, self._nodes.lines()
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        for task in (self._task, self._gaps):
            task.cancel()
        await asyncio.gather(self._task, self._gaps, return_exceptions=True)

    async def settle(self) -> None:
        """Consume until nothing is missing."""
        end = time.monotonic() + SECONDS
        while True:
            self.load.begin_life()
            try:
                await settle(self.load, next(iter(self._nodes.processes.values())))
                return
            except StreamCut:
                assert time.monotonic() < end, self._nodes.lines()
                await asyncio.sleep(0.1)


@one_of_three(0)
async def test_nothing_is_lost_early_or_back_whatever_becomes_of_nodes_and_of_single_shards(
    start: Start, tmp_path: Path
) -> None:
    nodes = Nodes(start, tmp_path)
    await nodes.create()
    await see_any_node_take_any_call(nodes)
    clients = [Client(nodes, topic, seed) for seed, topic in enumerate(TOPICS)]
    try:
        for _ in range(ROUNDS):
            owners = await nodes.owned("a")
            for name in sorted("abc", key=lambda name: name != owners[0])[:ROLLED]:
                await asyncio.gather(*(client.more() for client in clients))
                assert await nodes.end(name, signal.SIGTERM) == 0, nodes.lines()
                await nodes.owned(next(iter(nodes.processes)), not_by=name)
                await nodes.start_node(name)
            owner = (await nodes.owned("a"))[1]
            to = next(name for name in "abc" if name != owner)
            await asyncio.gather(*(nodes.following(name) for name in "abc"))
            # Those around it may not have heard yet how far it has read.
            await nodes.command("move", "--shard", "1", "--to", to, passing="cannot take the shard over now")
            async with asyncio.timeout(SECONDS):
                while (await nodes.owned("a"))[1] != to:  # others hear of it within a second
                    await asyncio.sleep(0.05)
            rolling = [client.gap_seconds for client in clients]
            await asyncio.gather(*(client.more() for client in clients))
            owners = await nodes.owned("a")
            await nodes.end(owners[0], signal.SIGKILL)
            await asyncio.gather(*(client.more() for client in clients))
            await nodes.start_node(owners[0])
            owners = await nodes.owned("a")
            os.kill(children(nodes.processes[owners[1]])[1], signal.SIGKILL)
            await asyncio.gather(*(client.more() for client in clients))
    finally:
        for client in clients:
            await client.stop()
    for client in clients:
        await client.settle()
        assert not client.load.violations, client.load.violations[:5]
        assert all(client.load.confirmed.values())
        print(
            f"{len(client.load.answered)} answered, longest gap {client.gap_seconds:.1f} s, rolling {rolling}"
        )


async def until_answered(call: Any) -> None:
    """Repeat a call until it is answered."""
    async with asyncio.timeout(SECONDS):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call()
                return
            await asyncio.sleep(0.1)


async def page_of_all_well(process: BrokerProcess) -> None:
    """Wait until the page of a node says so: a node that is busy may not answer another one's look in time."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(SECONDS):
        while True:
            page = await (await session.get(f"http://{process.http_address}/cluster")).text()
            if "All shards have an owner" in page and "does not answer" not in page:
                return
            await asyncio.sleep(0.1)


async def see_any_node_take_any_call(nodes: Nodes) -> None:
    """See each node answer calls about each shard, and about all of them; and each tell of all."""
    for name in "abc":
        await nodes.owned(name)
    async with asyncio.timeout(SECONDS):
        for name in "abc":
            while any(len(shard.progress) != 3 for shard in await nodes.shards(name)):
                await asyncio.sleep(0.1)
    told = await nodes.command("status")
    for number, owner in enumerate(await nodes.owned("a")):
        assert f"shard {number}: owner {owner}, epoch " in told
    for name, process in nodes.processes.items():
        await page_of_all_well(process)
        for topic in TOPICS:
            request = producer_pb2.ProduceRequest(topic=topic, messages=[message_pb2.Message(payload=b"1")])
            await until_answered(lambda p=process, r=request: p.producer.Produce(r, timeout=10))
        stub: Any = admin_pb2_grpc.AdminServiceStub(process.channel)
        answer = await stub.ListTopics(admin_pb2.ListTopicsRequest(), timeout=10)
        assert [topic.name for topic in answer.topics] == sorted(TOPICS), name
        for shard, topic in zip(await nodes.shards(name), TOPICS, strict=True):
            direct = stub.GetTopic(
                admin_pb2.GetTopicRequest(name=topic), timeout=10, metadata=[("postdate-direct", "1")]
            )
            if shard.owner == name:
                assert (await direct).topic.name == topic
                continue
            with pytest.raises(grpc.aio.AioRpcError, match=f"its owner is at {shard.owner_address}"):
                await direct
