"""The power goes, or the process, after every operation of a history of bulk changes.

Whatever is found, each bulk change stands where its messages say: as many are changed as its counts tell, each once. The
broker goes on from there, and in the end each message that matches was changed exactly once.
"""

from __future__ import annotations

import asyncio
import random
from functools import cache

import numpy as np
import pytest

from broker.folder.broker import Broker
from broker.storage.bulk import BulkDefinition, BulkEnd, BulkKind
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import START_MS, SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics.topic import Topic
from tests.crash.bucket_history import QUICK, check_verify
from tests.crash.history import Recorder
from tests.crash.points import clock_at, moments_of, states_at, told
from tests.depth import at_depth
from tests.harness import Node, Outgoing, small_config

TOPIC = "orders"
STRIDE = at_depth(change=40, deep=1)
LIVED_ON = at_depth(change=160, deep=7)
COUNT = 24
HOUR_MS = 3_600_000
SHIFT_MS = 5 * 60_000
SHIFT = BulkDefinition(BulkKind.SHIFT, SHIFT_MS, key_prefix="a", begin_ms=START_MS)
CANCEL = BulkDefinition(BulkKind.CANCEL, key_prefix="b", begin_ms=START_MS)
CONFIG = small_config(
    ledger_max_entries=6, journal_group_bytes_max=1024, checkpoint_interval_ms=200, bulk_step_messages=2
)


async def play(recorder: Recorder) -> None:
    """Three lives: stopped in the middle of a move, killed in it, and killed in a cancel."""
    node = recorder.open()
    await node.create_subscription(TOPIC, "all")
    for prefix in "ab":
        batch = [
            Outgoing(b"x", deliver_at_ms=START_MS + HOUR_MS + 60_000 * at, schedule_key=f"{prefix}{at}")
            for at in range(COUNT)
        ]
        await node.produce(TOPIC, batch)
    await node.broker.bulk_changes.begin(node.topic(TOPIC), SHIFT)
    await node.broker.bulk_changes.begin(node.topic(TOPIC), CANCEL)
    await reached(node, 1, 6)
    await node.stop()
    node = recorder.open()
    await reached(node, 1, 14)
    recorder.kill(node)
    node = recorder.open()
    await reached(node, 2, 10)
    recorder.kill(node)
    node = recorder.open()
    await reached(node, 2, COUNT)
    await node.stop()


async def reached(node: Node, bulk_id: int, done: int) -> None:
    async with asyncio.timeout(60):
        while node.broker.bulk_changes.standing(node.topic(TOPIC), bulk_id).progress.done < done:
            await asyncio.sleep(0.002)


@cache
def history() -> Recorder:
    async def scenario(_: SimLoop, clock: SimClock) -> Recorder:
        recorder = Recorder(MemVfs(), clock, CONFIG)
        await play(recorder)
        return recorder

    return run_sim(scenario, 3, latency=QUICK)


def changed(topic: Topic) -> tuple[int, int]:
    """Return how many messages were moved, and how many were cancelled; none is moved twice."""
    moved = cancelled = 0
    for ledger in topic.log:
        amendments = topic.log.amendments.get(ledger.name.ledger_id)
        if amendments is None:
            continue
        ids = np.arange(ledger.entry_count, dtype=np.uint32)
        revisions = amendments.revisions_of(ids)
        assert int(revisions.max(initial=0)) <= 1, "a message was moved twice"
        moved += int(revisions.sum())
        cancelled += len(amendments.cancelled)
    return moved, cancelled


def check(broker: Broker) -> None:
    """Each bulk change is where its messages say."""
    topic = broker.registry.by_name.get(TOPIC)
    if topic is None:
        return
    standings = [topic.bulk.get(bulk_id) for bulk_id in (1, 2)]
    assert changed(topic) == tuple(0 if each is None else each.progress.done for each in standings)
    for standing in standings:
        assert standing is None or standing.end in (BulkEnd.NONE, BulkEnd.DONE)
        assert standing is None or not standing.end or standing.progress.done == COUNT


@pytest.mark.parametrize("policy", CrashPolicy)
def test_a_crash_at_any_operation_neither_skips_nor_doubles_a_step(policy: CrashPolicy) -> None:
    recorder = history()
    moments = moments_of(policy, range(1, recorder.vfs.op_count + 1), STRIDE)

    async def scenario(_: SimLoop, __: SimClock) -> None:
        for at, seed, vfs in states_at(recorder, moments, policy, range(1)):
            with told(recorder, at, policy, seed):
                node = Node(vfs, clock_at(recorder, at), CONFIG).open(start=False)
                check(node.broker)
                node.abandon()

    run_sim(scenario, 1)


@pytest.mark.parametrize("policy", [CrashPolicy.LOSE_UNSYNCED, CrashPolicy.MIXED])
def test_a_broker_goes_on_from_any_operation(policy: CrashPolicy) -> None:
    recorder = history()
    for at, seed, vfs in states_at(
        recorder, moments_of(policy, range(1, recorder.vfs.op_count + 1), LIVED_ON), policy, range(1)
    ):

        async def scenario(_: SimLoop, clock: SimClock) -> None:
            clock.step(recorder.clock_at(at) - clock.now_ms())  # noqa: B023
            node = Node(vfs, clock, CONFIG).open()  # noqa: B023
            topic = node.broker.registry.by_name.get(TOPIC)
            if topic is None:
                node.abandon()
                return
            begun = topic.bulk.ids()
            for bulk_id in begun:
                await reached(node, bulk_id, COUNT)
            check(node.broker)
            assert changed(topic) == (COUNT * (1 in begun), COUNT * (2 in begun))
            check_verify(node.vfs)
            await node.stop()
            assert node.failures == []

        with told(recorder, at, policy, seed):
            run_sim(scenario, random.Random(at).randrange(100), latency=QUICK)
