"""Bases of a shard: a node begins with the newest one, and what is trimmed is never needed again."""

from __future__ import annotations

import asyncio
import errno

import pytest

from broker.cluster.base_store import BaseStore
from broker.cluster.follower import CutOff
from broker.cluster.group_objects import entry_name
from broker.cluster.object_store import StoreFailed
from broker.cluster.shard_store import ShardStore
from broker.errors import Refused
from broker.folder.bases import restore_base
from broker.jobs.verify import verify_data_dir
from broker.node.shard_bases import ShardBases, needs_seed
from broker.runtime.vfs import Buffer
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.testing.sim_store import SimBucket, SimStore
from tests.crash.history import LIVES
from tests.harness import DATA_DIR, Node, Outgoing
from tests.sim.shard_brokers import SHARD, LeaseSimClock, ShardBroker, make_bucket

INTERVAL_MS = 60_000


def bases_of(bucket: SimBucket, loop: SimLoop, vfs: MemVfs, node: str) -> ShardBases:
    clock = LeaseSimClock(loop)
    store = BaseStore(ShardStore(SimStore(bucket), 0), clock)
    return ShardBases(store, SHARD, vfs, clock, node, interval_ms=INTERVAL_MS)


def log_of(bucket: SimBucket) -> list[int]:
    return sorted(int(name.rpartition("/")[2], 16) for name in bucket.objects if "/log/" in name)


async def own_shard(bucket: SimBucket, loop: SimLoop) -> tuple[ShardBroker, Node]:
    owner = ShardBroker(bucket, loop, "a", MemVfs())
    await (await owner.follow())
    return owner, await owner.own()


def test_a_new_node_begins_with_the_newest_base_after_the_log_was_trimmed() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        owner, node = await own_shard(bucket, loop)
        bases = bases_of(bucket, loop, owner.vfs, "a")
        for play in LIVES[:2]:
            await play(node)
            base = await bases.make(node.broker, owner.log)
            assert base.lsn <= node.broker.journal.durable_lsn
        first, newest = sorted(name for name in bucket.objects if "/bases/" in name)
        kept = log_of(bucket)
        assert kept[:2] == [1, 2], "take-overs stay"
        assert kept[2] >= int(first.rpartition("/")[2].split("-")[0], 16), (
            "the second newest base needs no more"
        )
        assert kept[2] < base.lsn and newest.endswith(base.name)
        await node.produce("orders", [Outgoing(b"after the base")])
        disk = MemVfs()
        assert needs_seed(disk, DATA_DIR)
        assert await bases_of(bucket, loop, disk, "b").seed(DATA_DIR)
        assert not needs_seed(disk, DATA_DIR)
        standby = ShardBroker(bucket, loop, "b", disk)
        await standby.follow(rank=1)
        assert await standby.agrees_with(node)
        standby.kill()
        await owner.stop()

    run_sim(scenario, seed=1)


def test_a_standby_makes_bases_and_one_that_was_away_for_long_begins_anew() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        owner, node = await own_shard(bucket, loop)
        away = ShardBroker(bucket, loop, "b", MemVfs())
        taking = await away.follow(rank=1)
        await LIVES[0](node)
        taking.cancel()
        await away.node.stop()
        maker = ShardBroker(bucket, loop, "c", MemVfs())
        await maker.follow(rank=2)
        bases = bases_of(bucket, loop, maker.vfs, "c")
        keeping = asyncio.create_task(bases.keep(maker.node.broker, maker.log, patience=1.0))
        await LIVES[1](node)
        await asyncio.sleep(5 * INTERVAL_MS / 1e3)
        made = [name for name in bucket.objects if "/bases/" in name]
        assert 4 <= len(made) <= 6, "one an interval"
        assert bases.age_ms <= 2 * INTERVAL_MS
        keeping.cancel()
        again = ShardBroker(bucket, loop, "b", away.vfs)
        with pytest.raises(CutOff):
            await (await again.follow(rank=1))
        await again.node.stop()
        assert await bases_of(bucket, loop, away.vfs, "b").seed(DATA_DIR)
        again = ShardBroker(bucket, loop, "b", away.vfs)
        await again.follow(rank=1)
        assert await again.agrees_with(node)
        for each in (again, maker):
            each.kill()
        await owner.stop()

    run_sim(scenario, seed=1)


def test_while_no_base_can_be_stored_the_log_grows_and_is_trimmed_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The store takes groups and refuses chunks: as without the right to write there, or without room for them."""

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        owner, node = await own_shard(bucket, loop)
        bases = bases_of(bucket, loop, owner.vfs, "a")
        keeping = asyncio.create_task(bases.keep(node.broker, owner.log, patience=1.0))
        await asyncio.sleep(INTERVAL_MS / 1e3)
        made, create = bases.newest, ShardStore.create
        assert made is not None

        async def refuse_chunks(store: ShardStore, name: str, body: Buffer) -> None:
            if name.startswith(("chunks/", "bases/")):
                raise StoreFailed("no room")
            await create(store, name, body)

        with monkeypatch.context() as patch:
            patch.setattr(ShardStore, "create", refuse_chunks)
            before = set(log_of(bucket))
            await node.produce("orders", [Outgoing(b"1")])
            await asyncio.sleep(5 * INTERVAL_MS / 1e3)
            assert "A base could not be made" in caplog.text
            assert bases.newest == made and bases.age_ms >= 5 * INTERVAL_MS, "what the alert looks at"
            assert before < set(log_of(bucket)), "nothing is trimmed"
            assert node.failures == []
        await asyncio.sleep(3 * INTERVAL_MS / 1e3)
        assert bases.age_ms <= 2 * INTERVAL_MS
        assert not before - {1, 2} <= set(log_of(bucket))
        keeping.cancel()
        await owner.stop()

    run_sim(scenario, seed=1)


def test_a_seed_that_was_cut_begins_anew() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        owner, node = await own_shard(bucket, loop)
        await LIVES[0](node)
        await bases_of(bucket, loop, owner.vfs, "a").make(node.broker, owner.log)
        disk = MemVfs()
        seeding = asyncio.create_task(bases_of(bucket, loop, disk, "b").seed(DATA_DIR))
        while not disk.exists(f"{DATA_DIR}/unfinished"):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.03)
        seeding.cancel()
        await asyncio.wait([seeding])
        assert needs_seed(disk, DATA_DIR)
        assert await bases_of(bucket, loop, disk, "b").seed(DATA_DIR)
        standby = ShardBroker(bucket, loop, "b", disk)
        await standby.follow(rank=1)
        assert await standby.agrees_with(node)
        standby.kill()
        await owner.stop()

    run_sim(scenario, seed=1)


class CutRemoval(MemVfs):
    """A disk that lists folders backwards, as it may, and takes so many removals."""

    removals_left = 1_000

    def list_dir(self, path: str) -> list[str]:
        return sorted(super().list_dir(path), reverse=True)

    def remove(self, path: str) -> None:
        if not self.removals_left:
            raise OSError(errno.EIO, "the process is killed here", path)
        super().remove(path)
        self.removals_left -= 1


def test_a_folder_whose_removal_was_cut_is_seeded_by_the_next_life() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket, disk = make_bucket(), CutRemoval()
        owner = ShardBroker(bucket, loop, "a", disk)
        await (await owner.follow())
        node = await owner.own()
        await LIVES[0](node)
        bases = bases_of(bucket, loop, disk, "a")
        await bases.make(node.broker, owner.log)
        await owner.stop()
        assert not needs_seed(disk, DATA_DIR)
        for _ in range(4):
            disk.removals_left = 1
            with pytest.raises(OSError, match="killed here"):
                await bases.seed(DATA_DIR)
            assert needs_seed(disk, DATA_DIR)
        disk.removals_left = 1_000
        assert await bases.seed(DATA_DIR)
        assert not needs_seed(disk, DATA_DIR)

    run_sim(scenario, seed=1)


def test_a_base_of_a_shard_is_restored_by_its_nodes_only_and_its_folder_can_be_verified() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        owner, node = await own_shard(bucket, loop)
        await LIVES[0](node)
        base = await bases_of(bucket, loop, owner.vfs, "a").make(node.broker, owner.log)
        store = BaseStore(ShardStore(SimStore(bucket), 0), owner.clock)
        with pytest.raises(Refused) as caught:
            await restore_base(store, base, MemVfs(), "elsewhere", "another broker")
        assert caught.value.reason == "BASE_OF_A_SHARD"
        await owner.stop()
        report = verify_data_dir(owner.vfs, DATA_DIR)
        assert report.problems == []
        assert any("lies in the log of shard 0 of 1" in note for note in report.notes)

    run_sim(scenario, seed=1)


def test_a_base_that_cannot_be_read_still_says_how_far_the_log_may_have_been_trimmed() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        owner, node = await own_shard(bucket, loop)
        bases = bases_of(bucket, loop, owner.vfs, "a")
        made = []
        for play in LIVES[:3]:
            await play(node)
            made.append(await bases.make(node.broker, owner.log))
        name = f"shards/0/bases/{made[1].name}"
        body = bucket.objects[name]
        bucket.objects[name] = body.replace(b'"version":1', b'"version":2', 1)
        assert bucket.objects[name] != body
        reader = bases_of(bucket, loop, MemVfs(), "b")
        assert await reader.trimmed_below() == made[1].lsn + 1
        await owner.stop()

    run_sim(scenario, seed=1)


def test_without_a_base_there_is_nothing_to_begin_with() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        bucket = make_bucket()
        bases = bases_of(bucket, loop, MemVfs(), "a")
        assert not await bases.seed(DATA_DIR)
        assert (bases.age_ms, await bases.trimmed_below()) == (0, 0)
        assert entry_name(0, 1) in bucket.objects

    run_sim(scenario, seed=1)
