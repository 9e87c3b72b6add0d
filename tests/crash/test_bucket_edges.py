"""Edge cases of the bucket index in a whole broker: sealed ranges, equal times, clocks, limits and trackers that change."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence

import pytest

from broker.config import BrokerConfig
from broker.delayed.bucket_tracker import BucketTracker
from broker.delayed.due_rows import DueRows
from broker.model import Position
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.crash.bucket_history import (
    QUICK,
    bucket_config,
    check_arrived,
    check_verify,
    upkeep_of,
)
from tests.depth import at_depth, deep_but
from tests.harness import EARLIEST, Inbox, Node, Outgoing

PERMITS = 100_000
STEP_MS = 500
"""The segment time step of the tests' configuration."""
HOURS_MS = at_depth(change=900_000, deep=7_200_000)


async def open_node(
    clock: SimClock, config: BrokerConfig | None = None, subscriptions: int = 1
) -> tuple[Node, list[Inbox]]:
    """A broker with a topic, and subscriptions with a consumer each."""
    node = Node(MemVfs(), clock, config or bucket_config()).open()
    for number in range(subscriptions):
        await node.create_subscription("orders", f"subscription {number}", position=EARLIEST)
    return node, attach(node)


def attach(node: Node) -> list[Inbox]:
    topic = node.topic("orders")
    return [
        node.attach(topic, subscription, lease_ms=10 * 3_600_000, permits=PERMITS)
        for subscription in topic.subscriptions.values()
    ]


async def produce_at(node: Node, times: Sequence[int]) -> dict[Position, int]:
    """A message for each time, in batches of at most eight; when each is due."""
    due_ms: dict[Position, int] = {}
    for first in range(0, len(times), 8):
        part = times[first : first + 8]
        positions = await node.produce("orders", [Outgoing(b".", deliver_at_ms=at) for at in part])
        due_ms.update(zip(positions, part, strict=True))
    return due_ms


def tracker_of(node: Node) -> BucketTracker:
    tracker = node.topic("orders").index.tracker
    assert isinstance(tracker, BucketTracker)
    return tracker


async def check_all(
    node: Node, inboxes: Sequence[Inbox], due_ms: dict[Position, int], opened_ms: int = 0
) -> None:
    """Wait until the last one is due: all came once and on time, in due order as far as one broker's life goes."""
    await asyncio.sleep(max(0, max(due_ms.values()) - node.clock.now_ms()) / 1000 + 1)
    for inbox in inboxes:
        check_arrived(inbox, due_ms, opened_ms)
    assert node.topic("orders").index.rebuilds == 0
    assert node.failures == []
    assert tracker_of(node).count() == 0


def in_order(inbox: Inbox, due_ms: dict[Position, int]) -> bool:
    keys = [(due_ms[each.position], each.position) for each in inbox.received]
    return keys == sorted(keys)


def test_what_is_produced_for_a_range_that_is_sealed_comes_between():
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node, inboxes = await open_node(clock, bucket_config(clock_recheck_ms=100))
        now_ms = clock.now_ms()
        due_ms = await produce_at(node, [now_ms + 6_000 + 100 * i for i in range(24)])
        await asyncio.sleep(1)
        assert tracker_of(node).stats().bucket_count >= 1
        assert not tracker_of(node)._memory.recent.count
        # Between the sealed ones, on them, before and after them; sealed again, and again on top of that.
        for _ in range(3):
            due_ms |= await produce_at(node, [now_ms + 5_950 + 50 * i for i in range(50)])
            await asyncio.sleep(0.7)
        await check_all(node, inboxes, due_ms)
        assert in_order(inboxes[0], due_ms)

    run_sim(scenario, 1, latency=QUICK)


@pytest.mark.parametrize("due_batch", [3, 10_000])
def test_more_messages_of_one_millisecond_than_segments_and_buckets_hold(due_batch):
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node, inboxes = await open_node(clock, bucket_config(due_batch_entries=due_batch, max_buckets=3))
        at = clock.now_ms() + 6_000
        due_ms: dict[Position, int] = {}
        for _ in range(12):
            due_ms |= await produce_at(node, [at] * 24)
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        largest = max(bucket.metadata.count for bucket in tracker_of(node).buckets.in_use)
        assert largest > 24
        await check_all(node, inboxes, due_ms)
        assert in_order(inboxes[0], due_ms)

    run_sim(scenario, 1, latency=QUICK)


def test_due_times_exactly_on_the_edges_of_segments_and_of_the_window_that_is_loaded():
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node, inboxes = await open_node(clock, bucket_config(seal_after_ms=1))
        base = (clock.now_ms() // STEP_MS + 12) * STEP_MS
        times = [base + STEP_MS * step + shift for step in range(8) for shift in (-1, 0, 0, 1)]
        times += [clock.now_ms() + ahead + shift for ahead in (2_000, 4_000) for shift in (-1, 0, 1, 2)]
        random.Random(1).shuffle(times)
        due_ms = await produce_at(node, times)
        await asyncio.sleep(0.2)
        # Once more, with the same times, when segments begin and end exactly there.
        due_ms |= await produce_at(node, [at for at in times if at > clock.now_ms() + 2_000])
        await check_all(node, inboxes, due_ms)
        assert in_order(inboxes[0], due_ms)

    run_sim(scenario, 1, latency=QUICK)


@pytest.mark.parametrize("max_buckets", [1, 2, 3])
def test_few_buckets_are_enough_for_everything(max_buckets):
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        rng = loop.rng("times")
        node, inboxes = await open_node(clock, bucket_config(max_buckets=max_buckets), subscriptions=2)
        due_ms: dict[Position, int] = {}
        for _ in range(25):
            now_ms = clock.now_ms()
            due_ms |= await produce_at(
                node, [now_ms + rng.choice((1, 300, 5_000 + rng.randrange(9_000))) for _ in range(8)]
            )
            await asyncio.sleep(0.15)
        await asyncio.sleep(1)
        assert 1 <= tracker_of(node).stats().bucket_count <= max_buckets
        await check_all(node, inboxes, due_ms)
        assert tracker_of(node).buckets.counters.merges > 3

    run_sim(scenario, 1, latency=QUICK)


@pytest.mark.parametrize(
    ("jump_ms", "set_backs"),
    [(-HOURS_MS, 1), (-3_000, 0), (2_000, 0), (HOURS_MS, 2)],
    ids=["far back", "back by seconds", "ahead by seconds", "far ahead"],
)
def test_clock_jumps_bring_nothing_early_and_lose_nothing(jump_ms, set_backs):
    """While in near, in windows, in memory and on disk; messages are produced before and after the jump.

    The index begins anew at each step far back behind what it has taken: the second of the first case comes too
    soon after the clock was put right for anything to have been taken.
    """

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node, inboxes = await open_node(
            clock, bucket_config(clock_recheck_ms=800, checkpoint_interval_ms=1_000)
        )
        now_ms = clock.now_ms()
        due_ms = await produce_at(node, [now_ms + 200 * i for i in range(1, 60)])
        await asyncio.sleep(3)
        clock.step(jump_ms)
        now_ms = clock.now_ms()
        due_ms |= await produce_at(node, [now_ms + 100 + 150 * i for i in range(60)])
        await asyncio.sleep(1)
        clock.step(-jump_ms)
        now_ms = clock.now_ms()
        due_ms |= await produce_at(node, [now_ms + 100 + 150 * i for i in range(60)])
        await node.checkpoint()
        clock.step(jump_ms)
        await asyncio.sleep(1)
        clock.step(-jump_ms)
        await asyncio.sleep(max(0, max(due_ms.values()) - clock.now_ms()) / 1000 + 2)
        for inbox in inboxes:
            inbox.poll()
            positions = [each.position for each in inbox.received]
            assert len(positions) == len(set(positions)) == len(due_ms)
            assert all(each.sent_ms >= due_ms[each.position] for each in inbox.received)
        index = node.topic("orders").index
        assert (index.rebuilds, index.set_backs) == (set_backs, set_backs)
        assert node.failures == []

    run_sim(scenario, 1, latency=QUICK)


OTHER_LIMITS: dict[str, dict[str, int]] = {
    "shrunk": {"min_index_count": 1, "max_segment_entries": 1, "segment_time_step_ms": 1, "max_buckets": 1},
    "grown": {
        "min_index_count": 50,
        "max_segment_entries": 5_000,
        "segment_time_step_ms": 300_000,
        "max_buckets": 64,
    },
    "tick": {"tick_ms": 1_000},
    "ledgers": {"ledgers_per_bucket": 1, "ledger_max_entries": 2, "max_buckets": 3},
}


@pytest.mark.parametrize(
    ("limits", "stop"),
    deep_but(
        zip(OTHER_LIMITS, itertools.cycle([True, False]), strict=False),
        itertools.product(OTHER_LIMITS, [True, False]),
    ),
)
def test_other_limits_after_a_restart_with_messages_pending(limits, stop):
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node, _inboxes = await open_node(clock)
        due_ms = await pend(node, clock)
        node = await next_life(node, bucket_config(**OTHER_LIMITS[limits]), stop=stop)
        opened_ms = clock.now_ms()
        inboxes = attach(node)
        more = await pend(node, clock)
        await check_all(node, inboxes, due_ms | more, opened_ms)
        await node.checkpoint()
        check_verify(node.vfs)

    run_sim(scenario, 1, latency=QUICK)


async def pend(node: Node, clock: SimClock) -> dict[Position, int]:
    """Messages that are due in five to ten seconds, mostly sealed by the time this returns."""
    rng = random.Random(clock.now_ms())
    due_ms: dict[Position, int] = {}
    for _ in range(10):
        now_ms = clock.now_ms()
        due_ms |= await produce_at(node, [now_ms + 5_000 + rng.randrange(5_000) for _ in range(5)])
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    return due_ms


async def next_life(node: Node, config: BrokerConfig, *, stop: bool) -> Node:
    if stop:
        await node.stop()
    vfs = node.vfs.crashed(node.vfs.op_count, CrashPolicy.LOSE_UNSYNCED)
    if not stop:
        node.abandon()
    check_verify(vfs)
    return Node(vfs, node.clock, config).open()


@pytest.mark.parametrize("stop", [True, False], ids=["stopped", "killed"])
def test_the_other_tracker_and_back_with_messages_pending(stop):
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node, _inboxes = await open_node(clock)
        due_ms = await pend(node, clock)
        assert tracker_of(node).stats().bucket_count
        node = await next_life(node, bucket_config(tracker="memory"), stop=stop)
        assert not isinstance(node.topic("orders").index.tracker, BucketTracker)
        due_ms |= await pend(node, clock)
        await node.checkpoint()
        check_verify(node.vfs)
        node = await next_life(node, bucket_config(), stop=stop)
        assert not node.vfs.list_dir("data/topics/1/buckets"), "files of buckets that no manifest names stay"
        opened_ms = clock.now_ms()
        inboxes = attach(node)
        due_ms |= await pend(node, clock)
        assert upkeep_of(node).image().bucket_ids
        await check_all(node, inboxes, due_ms, opened_ms)
        await node.checkpoint()
        check_verify(node.vfs)

    run_sim(scenario, 1, latency=QUICK)


def test_a_hundred_subscriptions_share_the_chunks_of_one_index(monkeypatch):
    """Waiting entries are indexed once; due ones are one chunk, whose arrays, not copies, lie in every queue."""
    count, subscriptions = at_depth(change=20_000, deep=100_000), 100

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        config = bucket_config(
            ledger_max_entries=count // 4,
            min_index_count=count // 5,
            max_segment_entries=count // 20,
            batch_messages_max=count // 20,
            checkpoint_interval_ms=3_600_000,
            journal_group_bytes_max=1 << 20,
            journal_segment_bytes=1 << 26,
        )
        node = Node(MemVfs(), clock, config).open()
        for number in range(subscriptions):
            await node.create_subscription("orders", f"subscription {number}", position=EARLIEST)
        topic = node.topic("orders")
        inboxes = [node.attach(topic, each, permits=1) for each in topic.subscriptions.values()]
        at = clock.now_ms() + 8_000
        for number in range(20):  # a quarter is due first, and taken to be read
            due_ms = at if number < 5 else at + 300
            await node.produce("orders", [Outgoing(b".", deliver_at_ms=due_ms)] * (count // 20))
        await asyncio.sleep(3)
        tracker = tracker_of(node)
        assert tracker.count() == count
        own_bytes = tracker.stats().memory_bytes
        assert own_bytes < 30 * count
        await asyncio.sleep((at - clock.now_ms()) / 1000 + 1)
        queues = [each.replay._chunks for each in topic.subscriptions.values()]
        assert sum(map(len, queues[0])) > count // 2
        arrays = {
            base_of(column): column.nbytes for queue in queues for chunk in queue for column in columns(chunk)
        }
        bytes_of_one = sum(column.nbytes for chunk in queues[0] for column in columns(chunk))
        assert sum(arrays.values()) < 1.1 * bytes_of_one
        assert all(len(each.poll()) >= 1 for each in inboxes)

    run_sim(scenario, 1, latency=QUICK)


def columns(chunk: DueRows) -> tuple:
    return chunk.deliver_at_ms, chunk.ledger_ids, chunk.entry_ids


def base_of(column) -> int:
    """Return the identity of an array's memory."""
    return column.__array_interface__["data"][0]
