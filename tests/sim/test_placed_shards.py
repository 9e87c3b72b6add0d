"""Two shards on three nodes: each begins where placement says, and one is taken over while the other one goes on."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from broker.cluster.creation import encode_first
from broker.cluster.group_head import Shard
from broker.cluster.group_objects import entry_name
from broker.cluster.shard_store import ShardStore
from broker.errors import PostdateError
from broker.node.placement import rank_nodes
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.testing.sim_store import SimBucket
from tests.harness import Node, Outgoing
from tests.sim import shard_brokers
from tests.sim.shard_brokers import LEASE_MS, SHARD, ShardBroker, make_bucket

SHARDS = tuple(Shard(SHARD.cluster, number, 2) for number in range(2))
NODES = "abc"


class PlacedShard:
    """One of two shards: a process on each node, and the owner."""

    def __init__(self, shard: Shard, bucket: SimBucket, loop: SimLoop) -> None:
        self.topic = f"topic{shard.number}"
        self.ranks = rank_nodes(shard, NODES)
        self.members = {name: ShardBroker(bucket, loop, name, MemVfs(), shard=shard) for name in self.ranks}
        self.answered: list[bytes] = []
        self.gap_seconds = 0.0
        self._loop = loop
        self.owner = ""
        self.node: Node

    async def run(self) -> None:
        """Follow on every node, in the order of placement; whoever takes the shard over serves it."""
        taking = {
            await member.follow(rank=rank): name for rank, (name, member) in enumerate(self.members.items())
        }
        while taking:
            done, _ = await asyncio.wait(taking, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                name = taking.pop(task)
                task.result()
                self.node = await self.members[name].own()
                self.owner = name

    async def produce(self) -> None:
        """Send a message after the other, each until it is answered; note the longest time without an answer."""
        since = 0.0
        for number in range(10_000):
            payload = b"%d" % number
            while not await self._send(payload):
                await asyncio.sleep(0.1)
            now = self._loop.time()
            self.gap_seconds = max(self.gap_seconds, now - since if since else 0.0)
            since = now
            self.answered.append(payload)
            await asyncio.sleep(0.2)

    async def _send(self, payload: bytes) -> bool:
        with contextlib.suppress(PostdateError, TimeoutError):
            async with asyncio.timeout(1):
                if self.owner:
                    await self.node.produce(self.topic, [Outgoing(payload)])
                    return True
        return False

    def kill_owner(self) -> None:
        owner, self.owner = self.owner, ""
        self.members[owner].kill()


async def run_two_shards(loop: SimLoop) -> None:
    bucket = make_bucket()
    for shard in SHARDS:
        bucket.objects[entry_name(shard.number, 1)] = encode_first(shard)
    shards = [PlacedShard(shard, bucket, loop) for shard in SHARDS]
    tasks = [asyncio.create_task(work) for shard in shards for work in (shard.run(), shard.produce())]
    await asyncio.sleep(60)
    assert [shard.owner for shard in shards] == [shard.ranks[0] for shard in shards]
    assert len({shard.owner for shard in shards}) == 2, "they lie on two nodes"
    for shard in shards:
        shard.gap_seconds = 0.0
    killed, other = shards
    killed.kill_owner()
    before = len(other.answered)
    await asyncio.sleep(60)
    assert killed.owner == killed.ranks[1], "the next in the order has it"
    assert LEASE_MS / 1e3 <= killed.gap_seconds < 3 * LEASE_MS / 1e3
    assert other.owner == other.ranks[0] and other.gap_seconds < 1, "the other one did not notice"
    assert len(other.answered) > before + 100
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for shard in shards:
        inbox = await shard.node.subscribe(shard.topic, "all")
        came: set[bytes] = set()
        while came < set(shard.answered):
            came |= {message.payload for message in await inbox.wait(1, seconds=60)}
        assert came >= set(shard.answered)
        assert list(shard.node.broker.registry.by_name) == [shard.topic], "nothing of the other shard"
    for shard in shards:
        for name, member in shard.members.items():
            if name != shard.owner and not (shard is killed and name == shard.ranks[0]):
                member.kill()
        await shard.members[shard.owner].stop()


def test_one_shard_is_taken_over_while_the_other_goes_on() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        await run_two_shards(loop)

    run_sim(scenario, seed=5)


@pytest.mark.deep
def test_shards_that_shared_a_log_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault on purpose: the second shard writes where the first one does."""
    make = shard_brokers.ObjectGroupLog

    def mixed(store: ShardStore, shard: Shard, *rest: object, **more: object) -> object:
        return make(store, SHARDS[0], *rest, **more)  # type: ignore[arg-type]

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        await run_two_shards(loop)

    monkeypatch.setattr(shard_brokers, "ObjectGroupLog", mixed)
    with pytest.raises((AssertionError, PostdateError)):
        run_sim(scenario, seed=5)
