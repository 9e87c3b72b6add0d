"""Faults that delayed delivery had elsewhere, where no other test looks at them; docs/delayed-index.md has the list.

The first tests drive a tracker, the others a whole broker on virtual time and a disk in memory.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.config import BrokerConfig
from broker.delayed.bucket_tracker import BucketTracker
from broker.delayed.due_rows import DueRows
from broker.delayed.sealed_bucket import SealedBucket
from broker.delayed.tracker import Frontier
from broker.model import TIME_MS_MAX
from broker.runs.storage import RunStorage
from broker.storage.bucket_files import BucketStorage, SnapshotReader
from broker.storage.layout import Layout
from broker.subscriptions.types import SubscriptionType
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.depth import at_depth
from tests.harness import DATA_DIR, EARLIEST, Inbox, Node, Outgoing, small_config
from tests.unit.delayed.test_bucket_tracker import HOUR, NOW, World, follow, merge_all, take

FOLDER = Layout(DATA_DIR).buckets(1)
TESTS = Path(__file__).parents[2]


def test_the_list_names_tests_that_are_there():
    document = (TESTS.parent / "docs" / "delayed-index.md").read_text()
    named = set(re.findall(r"`([a-z_/]+)::(test_\w+)`", document))
    assert len(named) > 80
    for path, name in sorted(named):
        assert re.search(rf"def {name}\(", (TESTS / f"{path}.py").read_text()), f"{path}::{name}"


# -- a tracker -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_merge_keeps_what_is_loaded_and_not_taken_over_a_restart():
    """apache/pulsar #26251: merged snapshots lacked the segments that were in memory."""
    world = World()
    for ledger_id in range(1, 9):
        world.add(ledger_id, NOW + 500 * np.arange(1, 20) + ledger_id)
        await world.seal()
    while world.tracker.needs_load(NOW):
        await world.tracker.load(NOW)
    assert world.tracker.stats().loaded_count > 0
    await merge_all(world)
    image = world.tracker.buckets.image()
    assert image.bucket_ids == (9,)
    await world.restart(image, NOW)
    assert world.tracker.count() == len(world.rows)
    assert await follow(world.tracker) == sorted(world.rows)


async def test_added_for_a_range_that_is_sealed_reaches_the_disk_too():
    """PIP-195: late arrivals for a sealed range lived in memory only, and were gone after a restart."""
    world = World()
    world.add(5, NOW + HOUR + 1_000 * np.arange(20))
    await world.seal()
    world.add(5, NOW + HOUR + 1_000 * np.arange(20) + 1, first=20)
    world.add(3, [NOW + HOUR, NOW + HOUR + 19_000])
    await world.seal()
    await world.restart(world.tracker.buckets.image(), NOW)
    assert await follow(world.tracker) == sorted(world.rows)


async def test_added_where_everything_is_loaded_is_sealed_too_bucket_2():
    world = World()
    assert await take(world.tracker, NOW) == []
    world.add(1, [NOW + 1_000, NOW + HOUR])
    assert world.tracker.stats().loaded_count == 1
    await world.seal()
    await world.restart(world.tracker.buckets.image(), NOW)
    assert await follow(world.tracker) == world.rows


@pytest.mark.slow
async def test_load_whose_bucket_is_merged_and_removed_meanwhile_bucket_11(monkeypatch: pytest.MonkeyPatch):
    """apache/pulsar #20086: a load that ended late met a bucket that was not the one it had begun with."""
    world = World()
    for ledger_id in range(1, 9):
        world.add(ledger_id, NOW + HOUR + np.arange(20))
        await world.seal()
    read = SealedBucket.read

    async def read_late(self: SealedBucket, storage: BucketStorage, segment: int) -> DueRows:
        monkeypatch.undo()
        await merge_all(world)
        await world.tracker.buckets.remove_deleted(world.tracker.buckets.image())
        assert world.vfs.list_dir("buckets") == ["9.bucket"]
        return await read(self, storage, segment)

    monkeypatch.setattr(SealedBucket, "read", read_late)
    await world.tracker.load(NOW + HOUR)
    assert world.tracker.count() == len(world.rows)
    assert await follow(world.tracker) == sorted(world.rows)


async def test_first_and_last_times_there_are():
    world = World()
    ends = [1, 2, NOW, NOW + 1, TIME_MS_MAX - 1, TIME_MS_MAX, TIME_MS_MAX]
    for ledger_id in (1, 2):
        world.add(ledger_id, ends)
        await world.seal()
    late = [row for row in world.rows if row[0] <= NOW]
    rest = sorted(row for row in world.rows if row[0] > NOW)
    assert await take(world.tracker, NOW) == sorted(late)
    world.tracker.buckets.policy = world.tracker.buckets.policy.__class__(max_buckets=1)
    await merge_all(world)
    await world.restart(world.tracker.buckets.image(), NOW)
    assert world.tracker.next_due_ms() == NOW + 1
    assert world.tracker.stats().last_due_ms == TIME_MS_MAX
    assert await take(world.tracker, TIME_MS_MAX - 1) == [row for row in rest if row[0] < TIME_MS_MAX]
    assert world.tracker.next_due_ms() == TIME_MS_MAX
    assert await take(world.tracker, TIME_MS_MAX) == [row for row in rest if row[0] == TIME_MS_MAX]


# -- a broker --------------------------------------------------------------------------------------------------------


def config(**changes: object) -> BrokerConfig:
    """Leases so long that nothing comes a second time."""
    return small_config(**{"lease_ms": 24 * HOUR, "lease_ms_max": 24 * HOUR, **changes})


async def fill(node: Node, count: int, *, first_ms: int = 20_000, apart_ms: int = 700) -> list[Outgoing]:
    """Delayed messages in several buckets, all sealed, and named by a manifest."""
    sent = [Outgoing(b"%d" % n, deliver_after_ms=first_ms + n % 7 * apart_ms) for n in range(count)]
    for first in range(0, count, 4):
        await node.produce("orders", sent[first : first + 4])
    await asyncio.sleep(8)
    await node.checkpoint()
    assert node.vfs.list_dir(FOLDER)
    return sent


def payloads(inbox: Inbox) -> list[bytes]:
    inbox.poll()
    return sorted(each.payload for each in inbox.received)


@pytest.mark.slow
def test_immediate_messages_flow_while_the_index_is_taken_up(monkeypatch: pytest.MonkeyPatch):
    """apache/pulsar #26103: recovery blocked dispatch. And a checkpoint meanwhile must not forget the buckets."""
    read = RunStorage.read
    slow: list[asyncio.Event] = []

    async def read_slowly(self: BucketStorage, bucket_id: int, call: Any):
        if call is SnapshotReader.read_metadata:
            for event in slow:
                await event.wait()
        return await read(self, bucket_id, call)

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, config()).open()
        await node.create_subscription("orders", "a")
        sent = await fill(node, 40)
        node = node.crash(CrashPolicy.LOSE_UNSYNCED)
        event = asyncio.Event()
        slow.append(event)
        node.open()
        inbox = await node.subscribe("orders", "a")
        await node.produce("orders", [Outgoing(b"now")])
        assert [each.payload for each in await inbox.wait(1, seconds=1)] == [b"now"]
        named = set(node.vfs.list_dir(FOLDER))
        await node.checkpoint()
        assert set(node.vfs.list_dir(FOLDER)) == named
        node = node.crash(CrashPolicy.LOSE_UNSYNCED)
        slow.clear()
        node.open()
        inbox = await node.subscribe("orders", "a")
        await asyncio.sleep(60)
        assert set(payloads(inbox)) >= {each.payload for each in sent}
        assert node.topic("orders").index.rebuilds == 0

    monkeypatch.setattr(RunStorage, "read", read_slowly)
    run_sim(scenario, seed=3)


def test_watchdog_builds_an_index_again_that_does_not_yield_what_is_overdue(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, config()).open()
        inbox = await node.subscribe("orders", "a")
        await node.produce("orders", [Outgoing(b"stuck", deliver_after_ms=HOUR)])
        await asyncio.sleep(60)
        clear = BucketTracker.clear
        with monkeypatch.context() as broken:
            broken.setattr(BucketTracker, "take_due", lambda *_: None)

            def clear_and_mend(self: BucketTracker, frontier: Frontier | None) -> None:
                broken.undo()
                clear(self, frontier)

            broken.setattr(BucketTracker, "clear", clear_and_mend)
            clock.step(HOUR)
            [found] = await inbox.wait(1, seconds=5)
        assert found.payload == b"stuck"
        assert node.topic("orders").index.rebuilds == 1
        await asyncio.sleep(60)
        assert node.topic("orders").index.rebuilds == 1
        assert inbox.poll() == []

    with caplog.at_level(logging.ERROR):
        run_sim(scenario, seed=4)
    assert "returned no entries although some are overdue" in caplog.text


def test_index_outlives_every_consumer_and_every_subscription():
    """apache/pulsar #19801: the tracker was wiped when the last consumer left."""

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, config()).open()
        inbox = await node.subscribe("orders", "a")
        sent = await fill(node, 20)
        index = node.topic("orders").index
        buckets = node.vfs.list_dir(FOLDER)
        inbox.detach()
        await node.topic("orders").subscriptions.delete("a")
        await node.checkpoint()
        assert (index.tracker.count(), node.vfs.list_dir(FOLDER)) == (20, buckets)
        await node.create_subscription("orders", "b", position=EARLIEST)
        inbox = await node.subscribe("orders", "b")
        await asyncio.sleep(60)
        assert payloads(inbox) == sorted(each.payload for each in sent)
        assert index.rebuilds == 0

    run_sim(scenario, seed=5)


@pytest.mark.parametrize(
    "type_", [SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER, SubscriptionType.SHARED]
)
@pytest.mark.parametrize("count", [0, 12])
def test_topic_is_deleted_whatever_its_index_holds_or_does(type_: int, count: int):
    """apache/pulsar #21595: deleting hung on an empty cursor. Here also while a seal or a merge is under way."""

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, config()).open()
        for step in range(12):
            await node.create_subscription("orders", "a", type_=type_)
            for first in range(0, count, 4):
                sent = [Outgoing(b"%d" % (first + n), deliver_after_ms=60_000) for n in range(4)]
                await node.produce("orders", sent)
            await asyncio.sleep(step * 0.001)
            await node.broker.registry.delete_topic("orders")
            await node.checkpoint()
            await asyncio.sleep(1)
            assert node.vfs.list_dir(f"{DATA_DIR}/topics") == []
        assert node.failures == []

    run_sim(scenario, seed=6)


@pytest.mark.slow
def test_thousands_of_delayed_messages_are_all_delivered_once_beside_seals_and_merges():
    a_batch = at_depth(change=20, deep=200)
    count = 50 * a_batch

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        limits = {
            "min_index_count": 2 * a_batch,
            "seal_after_ms": 700,
            "max_buckets": 3,
            "max_segment_entries": a_batch // 2,
        }
        limits |= {
            "ledger_max_entries": 9 * a_batch // 2,
            "journal_segment_bytes": 1 << 20,
            "journal_group_bytes_max": 1 << 20,
        }
        node = Node(MemVfs(), clock, config(**limits)).open()
        rng = random.Random(8)
        steady, moody = [await node.subscribe("orders", name) for name in ("steady", "comes and goes")]
        got: dict[str, list[bytes]] = {"steady": [], "comes and goes": []}

        async def settle() -> None:
            for inbox in (steady, moody):
                found = inbox.poll()
                got[inbox.subscription.name] += [each.payload for each in found]
                assert await inbox.ack([each.position for each in found]) == []

        for first in range(0, count, a_batch):
            delays = [rng.randrange(1, 9_000) for _ in range(a_batch)]
            await node.produce(
                "orders", [Outgoing(b"%d" % (first + n), deliver_after_ms=ms) for n, ms in enumerate(delays)]
            )
            await asyncio.sleep(0.1)
            if first <= 25 * a_batch or first >= 40 * a_batch:
                await settle()
            if first == 25 * a_batch:
                moody.detach()
            if first == 39 * a_batch:
                moody = await node.subscribe("orders", "comes and goes")
        for _half_second in range(30):
            await asyncio.sleep(0.5)
            await settle()
        everything = sorted(b"%d" % n for n in range(count))
        assert [sorted(payloads) for payloads in got.values()] == [everything, everything]
        counters = node.topic("orders").index.tracker.buckets.counters  # type: ignore[attr-defined]
        assert counters.seals > 10
        assert counters.merges > 3
        assert node.topic("orders").index.rebuilds == 0
        assert node.failures == []

    run_sim(scenario, seed=7)
