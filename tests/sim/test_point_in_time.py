"""Restores of a shard to points in time: what had been answered by then is there, and nothing that came later."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import pytest

from broker.cluster.base_store import BaseCut, BaseStore
from broker.cluster.group_objects import entry_name
from broker.cluster.lease import OwnerLease
from broker.cluster.object_group_log import ObjectGroupLog
from broker.cluster.shard_store import ShardStore
from broker.errors import NotFound, Refused
from broker.folder.point_in_time import Point, PointInTime
from broker.folder.recovery import decode_group
from broker.jobs.verify import verify_data_dir
from broker.runtime.steps import InThisThread
from broker.storage.layout import Layout, remove_tree
from broker.storage.manifest import decode_broker, decode_topic
from broker.storage.records import Record
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.testing.sim_store import SimBucket, SimStore
from tests.crash.history import LIVES, fold
from tests.crash.test_backup import observe_folder
from tests.depth import at_depth
from tests.harness import DATA_DIR
from tests.sim.shard_brokers import LEASE_MS, SHARD, LeaseSimClock, ShardBroker, make_bucket

TO = "restored"


class Moment(NamedTuple):
    """A time in the life of an owner, and what was in the log then."""

    now_ms: int
    op_count: int  # of its disk
    durable_lsn: int
    next_lsn: int  # records from here on were not yet on their way


class Past:
    """A shard at work: its store, the disk of its owner, and moments of it."""

    def __init__(self, loop: SimLoop) -> None:
        self.bucket: SimBucket = make_bucket()
        self.vfs = MemVfs()
        self.clock = LeaseSimClock(loop)
        self.bases = BaseStore(
            ShardStore(SimStore(self.bucket), 0), self.clock, InThisThread(), chunk_bytes=512
        )
        self.moments: list[Moment] = []
        self.begun_ms = self.clock.now_ms()

    async def play(self, loop: SimLoop, lives: int = len(LIVES)) -> None:
        """Let a broker own the shard, three times, each time after a crash."""
        for life in LIVES[:lives]:
            owner = ShardBroker(self.bucket, loop, "a", self.vfs)
            await (await owner.follow())
            node = await owner.own()
            watching = asyncio.create_task(self._watch(owner))
            await life(node)
            await asyncio.sleep(1.5)
            watching.cancel()
            owner.kill()
            await asyncio.sleep(1)

    async def _watch(self, owner: ShardBroker) -> None:
        while True:
            journal = owner.node.broker.journal
            self.moments.append(
                Moment(self.clock.now_ms(), self.vfs.op_count, journal.durable_lsn, journal.next_lsn)
            )
            await asyncio.sleep(0.037)

    async def make_base(self, moment: Moment) -> int:
        """Make a base of the disk at a moment, which may be in the middle of a checkpoint; returns its lsn."""
        disk = self.vfs.crashed(moment.op_count, CrashPolicy.KEEP_ALL)
        layout = Layout(DATA_DIR)
        root = decode_broker(disk.snapshot()[layout.manifest], layout.manifest)
        for name in set(disk.list_dir(layout.topics)) - {str(topic_id) for topic_id in root.topics}:
            remove_tree(disk, f"{layout.topics}/{name}")
        cut = BaseCut("a", "", "shard", moment.now_ms, root.checkpoint_lsn, len(root.topics))
        await self.bases.upload(disk, layout, cut)
        return root.checkpoint_lsn

    async def restore(self, to_ms: int) -> tuple[Point, MemVfs]:
        group_log = self.open_log()
        target = MemVfs()
        point_in_time = PointInTime(group_log, self.bases, to_ms, executor=InThisThread())
        return await point_in_time.restore(target, TO, "another"), target

    def open_log(self) -> ObjectGroupLog:
        return ObjectGroupLog(SimStore(self.bucket), SHARD, "", OwnerLease(self.clock, LEASE_MS))

    async def records(self, to_lsn: int) -> list[Record]:
        group_log = self.open_log()
        await group_log.open(1, 0)
        entries = [entry async for entry in group_log.entries(1)]
        return [record for entry in entries for lsn, record in decode_group(entry.group) if lsn <= to_lsn]


@pytest.mark.parametrize("seed", range(1, at_depth(fast=2, change=3, deep=20)))
def test_a_shard_is_restored_to_any_moment_with_all_that_was_answered_and_nothing_later(seed: int) -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        past = Past(loop)
        await past.play(loop)
        moments = past.moments
        bases = [await past.make_base(moment) for moment in moments[len(moments) // 4 :: len(moments) // 5]]
        assert len(set(bases)) > 2
        from_bases = set()
        for moment in moments[seed :: at_depth(fast=29, change=11, deep=1)]:
            point, target = await past.restore(moment.now_ms)
            assert moment.durable_lsn <= point.lsn < moment.next_lsn, moment
            from_bases.add(point.base and point.base.lsn)
            records = await past.records(point.lsn)
            assert verify_data_dir(target, TO).problems == []
            assert await observe_folder(target, clock, TO) == fold(records), (moment, point)
            root = decode_broker(target.snapshot()[f"{TO}/broker.manifest"], "x")
            assert (root.broker_id, root.shard, root.epoch) == ("another", "", 0)
            assert root.last_alive_ms >= point.wall_ms, "an absence begins when its last owner was alive"
        assert None in from_bases and len(from_bases) > 2, (
            "without a base the log is replayed from its beginning"
        )

    run_sim(scenario, seed)


def test_where_the_log_was_trimmed_the_earliest_time_is_told() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        past = Past(loop)
        await past.play(loop)
        count = len(past.moments)
        first, second = past.moments[count // 2], past.moments[-1]
        lsn = await past.make_base(first)
        last_lsn = await past.make_base(second)
        assert last_lsn > lsn
        group_log = past.open_log()
        await group_log.open(1, 0)
        await group_log.trim(lsn + 1)
        with pytest.raises(NotFound, match=r"it can be restored to 20.* and later") as caught:
            await past.restore(first.now_ms - 1)
        earliest = f"{caught.value.message.partition('restored to ')[2].split()[0]}"
        assert "+00:00" in earliest
        point, _ = await past.restore(first.now_ms)
        assert point.base is not None and point.base.lsn == lsn
        await group_log.trim(last_lsn + 1)
        with pytest.raises(NotFound, match="no longer contains the state at"):
            await past.restore(first.now_ms + 500)
        last, _ = await past.restore(second.now_ms + 3_600_000)
        assert last.lsn >= second.durable_lsn, "a time to come is the end of the log"

    run_sim(scenario, 1)


def test_a_group_of_the_very_millisecond_belongs_to_it_and_a_base_may_be_all_there_is() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        past = Past(loop)
        await past.play(loop, 1)
        group_log = past.open_log()
        await group_log.open(1, 0)
        entries = [entry async for entry in group_log.entries(1)]
        at_ms = entries[-2].head.wall_ms
        assert at_ms < entries[-1].head.wall_ms
        point, _ = await past.restore(at_ms)
        assert (point.lsn, point.wall_ms) == (entries[-2].next_index - 1, at_ms)
        base_lsn = await past.make_base(past.moments[-1])
        for entry in entries:
            if entry.head.first_lsn > base_lsn:
                del past.bucket.objects[entry_name(0, entry.head.first_lsn)]
        point, target = await past.restore(clock.now_ms())
        assert point.lsn == base_lsn and point.wall_ms == 0
        assert await observe_folder(target, clock, TO) == fold(await past.records(base_lsn))

    run_sim(scenario, 1)


def test_a_base_is_not_taken_for_a_time_at_which_a_part_of_it_was_not_stored() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        past = Past(loop)
        await past.play(loop)
        for op_count in range(past.moments[0].op_count, past.vfs.op_count):
            disk = past.vfs.crashed(op_count, CrashPolicy.KEEP_ALL)
            lsn, applied_lsn = lsns_of(disk)
            if lsn < applied_lsn:  # in the middle of a checkpoint
                break
        else:
            pytest.fail("no checkpoint was met")
        group_log = past.open_log()
        await group_log.open(1, 0)
        entries = [entry async for entry in group_log.entries(lsn)]
        ahead = next(entry.head.wall_ms for entry in entries if entry.next_index > applied_lsn)
        moment = Moment(entries[0].head.wall_ms, op_count, 0, 0)
        assert moment.now_ms < ahead
        await past.make_base(moment)
        for to_ms in (ahead - 1, ahead):
            point, target = await past.restore(to_ms)
            assert (point.base is not None) == (to_ms == ahead)
            assert await observe_folder(target, clock, TO) == fold(await past.records(point.lsn))

    run_sim(scenario, 1)


def lsns_of(disk: MemVfs) -> tuple[int, int]:
    """Return the lsn of the last checkpoint, and the greatest that a topic's manifest holds."""
    layout, files = Layout(DATA_DIR), disk.snapshot()
    if layout.manifest not in files:
        return 0, 0
    root = decode_broker(files[layout.manifest], layout.manifest)
    applied = [
        decode_topic(files[path], path).applied_lsn
        for path in map(layout.topic_manifest, root.topics)
        if path in files
    ]
    return root.checkpoint_lsn, max(applied, default=0)


def test_before_anybody_owned_the_shard_there_was_nothing() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        past = Past(loop)
        await past.play(loop, 1)
        with pytest.raises(NotFound, match="no longer contains"):
            await past.restore(past.begun_ms - 1)

    run_sim(scenario, 1)


def test_a_base_whose_owners_clock_was_behind_is_not_taken_for_an_older_time() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        past = Past(loop)
        await past.play(loop)
        moment, early = past.moments[-1], past.moments[len(past.moments) // 3]
        await past.make_base(moment._replace(now_ms=early.now_ms))
        point, target = await past.restore(early.now_ms)
        assert point.lsn < early.next_lsn
        assert await observe_folder(target, clock, TO) == fold(await past.records(point.lsn))

    run_sim(scenario, 1)


def test_a_folder_that_holds_something_is_left_as_it_is() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        past = Past(loop)
        await past.play(loop, 1)
        target = MemVfs()
        target.make_dir(TO)
        target.open(f"{TO}/mine", create=True).close()
        with pytest.raises(Refused, match="not empty"):
            await PointInTime(past.open_log(), past.bases, clock.now_ms(), executor=InThisThread()).restore(
                target, TO, "another"
            )
        assert target.list_dir(TO) == ["mine"]

    run_sim(scenario, 1)
