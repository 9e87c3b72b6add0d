"""A standby's folder is made from the newest base that can be used, and not again and again from one that is not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker.cluster.creation import Cluster
from broker.cluster.follower import CutOff
from broker.errors import Corrupt
from broker.node.member import Member
from broker.node.node import Node
from broker.node.seeding import PAUSE_SECONDS, Seeding
from broker.node.shard_bases import ShardBases, needs_seed
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.testing.sim_store import SimBucket
from tests import harness
from tests.configs import broker_config
from tests.crash.history import LIVES
from tests.sim.shard_brokers import SHARD, ShardBroker, make_bucket
from tests.sim.test_shard_bases import bases_of, own_shard

CUT_OFF = CutOff("Index 3 was trimmed")


class SeededNode:
    """A node that has a disk and no folder yet."""

    def __init__(self, bucket: SimBucket, loop: SimLoop) -> None:
        self.vfs = MemVfs()
        self.bases = CountedBases(bases_of(bucket, loop, self.vfs, "b"))
        self.stop = asyncio.Event()
        store = SimpleNamespace(url="sim://bucket")
        member = SimpleNamespace(
            config=SimpleNamespace(data_dir=harness.DATA_DIR),
            vfs=self.vfs,
            bases=self.bases,
            shard=SHARD,
            store=store,
        )
        self.member = cast(Member, member)
        self.seeding = Seeding(self.member)

    async def seed(self) -> bool:
        return await self.seeding.run(self.stop)


class CountedBases:
    """Bases of a shard that count how often they were downloaded."""

    def __init__(self, bases: ShardBases) -> None:
        self._bases = bases
        self.seeds = 0

    async def seed(self, data_dir: str) -> bool:
        self.seeds += 1
        return await self._bases.seed(data_dir)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bases, name)


async def own_shard_with_a_base(
    bucket: SimBucket, loop: SimLoop
) -> tuple[ShardBroker, harness.Node, ShardBases]:
    """An owner that has lived once and made a base, its broker, and its bases."""
    owner, node = await own_shard(bucket, loop)
    bases = bases_of(bucket, loop, owner.vfs, "a")
    await LIVES[0](node)
    await bases.make(node.broker, owner.log)
    return owner, node, bases


def damage(bucket: SimBucket, base: str) -> None:
    """Cut a manifest behind its header, so that the base is listed and cannot be used."""
    name = f"shards/0/bases/{base}"
    bucket.objects[name] = bucket.objects[name][: 2 * len(bucket.objects[name]) // 3]


def test_a_folder_that_is_cut_off_right_after_its_seed_waits_for_another_base(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        owner, node, bases = await own_shard_with_a_base(bucket, loop)
        standby = SeededNode(bucket, loop)
        assert await standby.seed() and not needs_seed(standby.vfs, harness.DATA_DIR)
        assert await standby.seed() and standby.bases.seeds == 1, "a folder that is whole is left alone"
        standby.seeding.note_cut_off(CUT_OFF)
        began = loop.time()
        seeding = asyncio.create_task(standby.seed())
        await asyncio.sleep(10 * PAUSE_SECONDS)
        assert not seeding.done() and standby.bases.seeds == 1, "the same base would come to the same"
        assert caplog.text.count("waiting for a new base") == 1
        await LIVES[1](node)
        await bases.make(node.broker, owner.log)
        made = loop.time()
        assert await seeding and standby.bases.seeds == 2
        assert loop.time() - made <= PAUSE_SECONDS + 1 and loop.time() - began > 10 * PAUSE_SECONDS
        standby.seeding.note_cut_off(CUT_OFF)
        seeding = asyncio.create_task(standby.seed())
        await asyncio.sleep(1)
        standby.stop.set()
        assert not await seeding and standby.bases.seeds == 2
        await owner.stop()

    run_sim(scenario, seed=1)


def test_a_folder_that_was_cut_off_is_made_anew_at_once() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        owner, node, bases = await own_shard_with_a_base(bucket, loop)
        standby = SeededNode(bucket, loop)
        assert await standby.seed()
        await LIVES[1](node)
        await bases.make(node.broker, owner.log)
        standby.seeding.note_cut_off(CUT_OFF)
        began = loop.time()
        assert await standby.seed() and standby.bases.seeds == 2
        assert loop.time() - began < PAUSE_SECONDS, "there is another base than the one it began with"
        await owner.stop()

    run_sim(scenario, seed=1)


def test_a_node_begins_with_the_base_before_one_that_is_damaged() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        owner, node, bases = await own_shard_with_a_base(bucket, loop)
        await LIVES[1](node)
        newest = await bases.make(node.broker, owner.log)
        damage(bucket, newest.name)
        standby = SeededNode(bucket, loop)
        assert await standby.seed()
        follower = ShardBroker(bucket, loop, "b", standby.vfs, bases=bases_of(bucket, loop, standby.vfs, "b"))
        await follower.follow(rank=1)
        assert await follower.agrees_with(node), "the log still has what the older base lacks"
        follower.kill()
        await owner.stop()

    run_sim(scenario, seed=1)


def test_the_base_before_a_damaged_one_is_enough_also_where_a_take_over_lies_between_them() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        first, node, _ = await own_shard_with_a_base(bucket, loop)
        second = SeededNode(bucket, loop)
        assert await second.seed()
        owner = ShardBroker(bucket, loop, "b", second.vfs, bases=second.member.bases)
        following = await owner.follow()
        assert await owner.agrees_with(node)
        first.kill()
        await following
        node = await owner.own()
        await LIVES[1](node)
        newest = await second.member.bases.make(node.broker, owner.log)
        damage(bucket, newest.name)
        standby = SeededNode(bucket, loop)
        assert await standby.seed()
        follower = ShardBroker(bucket, loop, "c", standby.vfs, bases=bases_of(bucket, loop, standby.vfs, "c"))
        following = await follower.follow(rank=1)
        assert await follower.agrees_with(node), "the log behind the older base is whole"
        owner.kill()
        await following
        assert follower.log.epoch == owner.log.epoch + 1
        follower.kill()

    run_sim(scenario, seed=1)


def test_a_node_waits_while_every_base_is_damaged_and_stops_where_there_is_none() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        owner, _, bases = await own_shard_with_a_base(bucket, loop)
        (damaged,) = await bases.names()
        damage(bucket, damaged)
        standby = SeededNode(bucket, loop)
        seeding = asyncio.create_task(standby.seed())
        await asyncio.sleep(10 * PAUSE_SECONDS)
        assert not seeding.done() and standby.bases.seeds == 1
        del bucket.objects[f"shards/0/bases/{damaged}"]
        assert await seeding, "without bases the log is read from its beginning"
        standby.seeding.note_cut_off(CUT_OFF)
        await owner.stop()
        behind = SeededNode(bucket, loop)
        behind.seeding.note_cut_off(CUT_OFF)
        with pytest.raises(Corrupt, match="bases were removed"):
            await behind.seed()

    run_sim(scenario, seed=1)


def test_a_node_whose_folder_is_cut_off_after_its_seed_follows_again_with_another_base(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        owner, node, bases = await own_shard_with_a_base(bucket, loop)
        standby = SeededNode(bucket, loop)
        began: list[float] = []

        class Following:
            """A follower that is cut off in its first life."""

            def __init__(self, member: Member) -> None:
                began.append(loop.time())

            async def run(self, stop: asyncio.Event) -> str:
                if len(began) == 1:
                    raise CUT_OFF
                return "the shard"

        monkeypatch.setattr("broker.node.node.Following", Following)
        config = broker_config(cluster_store="file:///nowhere", cluster_nodes="b=127.0.0.1:1", node="b")
        process = Node(config, Cluster("0" * 32, 1, 4_000), notifier=cast(Any, None))
        face = SimpleNamespace()
        following = asyncio.create_task(process._follow(standby.member, cast(Any, face)))
        await asyncio.sleep(3 * PAUSE_SECONDS)
        assert len(began) == 1 and not following.done()
        assert (face.following, face.state) == (None, "seeding")
        await LIVES[1](node)
        await bases.make(node.broker, owner.log)
        assert str(await following) == "the shard"
        assert standby.bases.seeds == 2 and began[1] - began[0] > 3 * PAUSE_SECONDS
        await owner.stop()

    run_sim(scenario, seed=1)
