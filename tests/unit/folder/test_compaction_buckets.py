"""Buckets that a job merges take the place of their sources, if these still stand."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from pyroaring import BitMap

from broker.errors import Refused
from broker.jobs import rewrite as module
from broker.model import Position
from broker.storage.amendments import NONE
from broker.testing.mem_vfs import CrashPolicy
from broker.topics.schedule_values import Cancel, Move
from tests.harness import DATA_DIR, Node, Outgoing
from tests.unit.folder.compaction_world import LATER_MS, TOPIC, run, work


async def seal_some(node: Node, buckets: int, *, each: int = 4) -> list[Position]:
    """Buckets of a few messages each, all due later, in an order of their own."""
    positions: list[Position] = []
    for bucket in range(buckets):
        delays = [LATER_MS + 1_000 * ((7 * (bucket * each + i)) % (buckets * each)) for i in range(each)]
        positions += await node.produce(
            TOPIC, [Outgoing(b"%d" % delay, deliver_after_ms=delay) for delay in delays]
        )
        await asyncio.sleep(2)
    await node.checkpoint()
    return positions


async def bucket_ids(node: Node) -> list[int]:
    return [each.bucket_id for each in (await node.broker.compactions.candidates(TOPIC)).buckets]


async def merge(node: Node, some: list[int]) -> bool:
    desk = node.broker.compactions
    lease = await desk.begin(TOPIC, [], some)
    committed = await desk.commit(lease.compaction_id, lease.epoch, await work(node, lease))
    return committed.bucket_swapped


@pytest.mark.slow
def test_all_are_delivered_on_time_after_a_merge():
    async def scenario(node: Node) -> Node:
        inbox = await node.subscribe(TOPIC, "billing", lease_ms=10 * LATER_MS)
        positions = await seal_some(node, 6)
        before = await bucket_ids(node)
        assert len(before) == 6
        assert await merge(node, before[1:5])
        assert len(await bucket_ids(node)) == 3
        await node.checkpoint()
        crashed = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
        del inbox
        inbox = await crashed.subscribe(TOPIC, "billing", lease_ms=10 * LATER_MS)
        await asyncio.sleep(LATER_MS / 1000 + 30)
        received = inbox.poll()
        assert sorted(each.position for each in received) == positions
        assert all(0 <= each.sent_ms - each.deliver_at_ms < 10 for each in received)
        names = [path for path in crashed.vfs.snapshot() if path.endswith(".bucket")]
        assert len(names) <= 3
        return crashed

    run(scenario)


@pytest.mark.slow
def test_what_was_delivered_cancelled_and_moved_since_is_not_delivered_again():
    async def scenario(node: Node) -> Node:
        inbox = await node.subscribe(TOPIC, "billing", lease_ms=10 * LATER_MS)
        positions = await seal_some(node, 4)
        desk = node.broker.compactions
        schedule = node.topic(TOPIC).schedule
        await schedule.change([positions[0]], Move(shift_ms=60_000), dry_run=False)
        lease = await desk.begin(TOPIC, [], await bucket_ids(node))
        outputs = await work(node, lease)
        await schedule.change([positions[1]], Cancel(), dry_run=False)
        await schedule.change([positions[2]], Move(shift_ms=60_000), dry_run=False)
        await schedule.change([positions[0]], Move(shift_ms=-60_000), dry_run=False)  # back to where it was
        await asyncio.sleep(LATER_MS / 1000 - 5)
        early = inbox.poll()
        assert early
        committed = await desk.commit(lease.compaction_id, lease.epoch, outputs)
        assert committed.bucket_swapped
        await inbox.ack(each.position for each in early)
        await asyncio.sleep(100)
        late = inbox.poll()
        received = sorted(each.position for each in early + late)
        assert received == sorted(set(positions) - {positions[1]})
        assert node.topic(TOPIC).index.tracker.count() == 0
        return node

    run(scenario, lease_ms=10 * LATER_MS)


@pytest.mark.slow
def test_sources_that_were_merged_meanwhile_are_refused():
    async def scenario(node: Node) -> Node:
        inbox = await node.subscribe(TOPIC, "billing", lease_ms=10 * LATER_MS)
        positions = await seal_some(node, 4)
        desk = node.broker.compactions
        lease = await desk.begin(TOPIC, [], await bucket_ids(node))
        outputs = await work(node, lease)
        tracker = node.topic(TOPIC).index.tracker
        tracker.buckets.policy = tracker.buckets.policy.__class__(max_buckets=2, min_index_count=4)  # type: ignore[attr-defined]
        assert await tracker.buckets.merge()  # type: ignore[attr-defined]
        committed = await desk.commit(lease.compaction_id, lease.epoch, outputs)
        assert not committed.bucket_swapped
        await asyncio.sleep(LATER_MS / 1000 + 30)
        assert sorted(each.position for each in inbox.poll()) == positions
        return node

    run(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("at", [5, 40, 100, -1])
def test_a_bucket_that_is_not_what_its_sources_leave_is_refused(at: int):
    async def scenario(node: Node) -> Node:
        inbox = await node.subscribe(TOPIC, "billing", lease_ms=10 * LATER_MS)
        positions = await seal_some(node, 4)
        desk = node.broker.compactions
        before = await bucket_ids(node)
        lease = await desk.begin(TOPIC, [], before)
        outputs = await work(node, lease)
        (path,) = (p for p in node.vfs.snapshot() if lease.folder in p and p.endswith(".bucket"))
        file = node.vfs.open(path)
        offset = at % file.size()  # in the header, the metadata, a segment; between them lies a hole
        file.pwrite([bytes([file.pread(1, offset)[0] ^ 1])], offset)
        file.close()
        committed = await desk.commit(lease.compaction_id, lease.epoch, outputs)
        assert not committed.bucket_swapped
        assert await bucket_ids(node) == before
        await asyncio.sleep(LATER_MS / 1000 + 30)
        assert sorted(each.position for each in inbox.poll()) == positions
        return node

    run(scenario)


def test_a_bucket_that_lacks_a_row_is_refused():
    """The job drops an entry and writes a bucket that is whole in itself."""

    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "billing")
        positions = await seal_some(node, 4)
        desk = node.broker.compactions
        lease = await desk.begin(TOPIC, [], await bucket_ids(node))
        held = desk._leases.current(lease.compaction_id, lease.epoch)
        assert held.loan is not None

        # What the job is told: that one entry was cancelled. What the broker knows: that it was not.
        def told(vfs: object, folder: str) -> object:
            inputs = read_inputs(vfs, folder)  # type: ignore[arg-type]
            ledger_id, entry_id = positions[3]
            cancelled = NONE.cancel(BitMap([entry_id]))
            assert inputs.buckets is not None
            return replace(inputs, buckets=replace(inputs.buckets, amendments={ledger_id: cancelled}))

        read_inputs = module.read_inputs
        module.read_inputs = told  # type: ignore[assignment]
        try:
            outputs = await work(node, lease)
        finally:
            module.read_inputs = read_inputs
        committed = await desk.commit(lease.compaction_id, lease.epoch, outputs)
        assert not committed.bucket_swapped
        assert f"{DATA_DIR}/{lease.folder}/inputs" not in node.vfs.snapshot()
        return node

    run(scenario)


@pytest.mark.slow
def test_all_spent_buckets_leave_nothing():
    async def scenario(node: Node) -> Node:
        inbox = await node.subscribe(TOPIC, "billing", lease_ms=10 * LATER_MS)
        await seal_some(node, 4)
        desk = node.broker.compactions
        lease = await desk.begin(TOPIC, [], (await bucket_ids(node))[:2])
        schedule = node.topic(TOPIC).schedule
        outputs = await work(node, lease)
        await asyncio.sleep(LATER_MS / 1000 + 30)
        inbox.poll()
        committed = await desk.commit(lease.compaction_id, lease.epoch, outputs)
        assert not committed.bucket_swapped  # dropped as spent meanwhile
        assert schedule is not None
        await node.checkpoint()
        await node.checkpoint()
        return node

    run(scenario)


def test_buckets_that_are_not_neighbours_are_not_lent():
    async def scenario(node: Node) -> Node:
        await node.create_subscription(TOPIC, "billing")
        await seal_some(node, 4)
        ids = await bucket_ids(node)
        desk = node.broker.compactions
        for wrong in ([ids[0], ids[2]], [ids[1], ids[0]], [999]):
            with pytest.raises(Refused):
                await desk.begin(TOPIC, [], wrong)
        return node

    run(scenario)
