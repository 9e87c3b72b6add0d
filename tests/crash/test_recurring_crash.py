"""The power goes, or the process, after every operation of a history of recurring schedules.

Whatever is found, each schedule stands where the messages of its occurrences say: none is missing between the first and
the last, none is there twice, and the one ahead waits. The broker goes on from there, and nothing is delivered twice.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from functools import cache

import numpy as np
import pytest

from broker.folder.broker import Broker
from broker.model import CANCELLED_MS
from broker.storage.message_fields import body_at
from broker.storage.recurring_values import Definition, RecurringRule
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import START_MS, SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics.recurrence import next_after, occurrences
from broker.topics.recurring_frames import TIME_MS
from broker.topics.topic import Topic
from postdate_api.v1 import message_pb2
from tests.crash.bucket_history import QUICK, check_verify
from tests.crash.history import Recorder
from tests.crash.points import clock_at, moments_of, states_at, told
from tests.depth import at_depth
from tests.harness import Node, small_config

TOPIC = "orders"
STRIDE = at_depth(change=60, deep=1)
LIVED_ON = at_depth(change=240, deep=7)
MESSAGE = message_pb2.Message(payload=b"x").SerializeToString()
RULES = {
    "fast": RecurringRule(interval_ms=1_000),
    "slow": RecurringRule(interval_ms=7_000),
    "cron": RecurringRule(cron="*/3 * * * * *"),
}
CONFIG = small_config(
    ledger_max_entries=6, journal_group_bytes_max=1024, checkpoint_interval_ms=1_500, clock_recheck_ms=1_000
)


async def play(recorder: Recorder) -> None:
    """Three lives: stopped, killed while occurrences are on their way, stopped."""
    node = recorder.open()
    await node.create_subscription(TOPIC, "all")
    for name, rule in RULES.items():
        await node.broker.recurring.put(node.topic(TOPIC), name, Definition(rule, MESSAGE))
    await asyncio.sleep(5.2)
    await node.stop()
    await asyncio.sleep(2)
    node = recorder.open()
    await asyncio.sleep(3.8)
    recorder.kill(node)
    await asyncio.sleep(4)
    node = recorder.open()
    await asyncio.sleep(4)
    await node.stop()


@cache
def history() -> Recorder:
    async def scenario(_: SimLoop, clock: SimClock) -> Recorder:
        recorder = Recorder(MemVfs(), clock, CONFIG)
        await play(recorder)
        return recorder

    return run_sim(scenario, 3, latency=QUICK)


async def stored(topic: Topic) -> dict[str, list[int]]:
    """The occurrences that are stored and were not cancelled, by schedule, in the order of the log."""
    found: dict[str, list[int]] = {}
    for ledger in topic.log:
        ids = np.arange(ledger.entry_count, dtype=np.uint32)
        times, _, frames = await topic.log.read(ledger.name.ledger_id, ids, 1 << 40)
        for time_ms, frame in zip(times.tolist(), frames, strict=True):
            message = message_pb2.Message.FromString(frame[body_at(frame) :])
            _, name, key_ms = message.schedule_key.split("/")
            assert message.properties[TIME_MS] == key_ms
            if time_ms < CANCELLED_MS:
                found.setdefault(name, []).append(int(key_ms))
    return found


async def check(broker: Broker) -> None:
    """Each schedule is where its messages say."""
    topic = broker.registry.by_name.get(TOPIC)
    if topic is None:
        return
    messages = await stored(topic)
    for name in topic.recurring:
        state = topic.recurring.get(name)
        assert state is not None
        times = messages.pop(name, [])
        if not times:
            assert state.progress.ahead_ms == 0
            continue
        expected = itertools.islice(occurrences(state.definition, times[0] - 1), len(times))
        assert times == list(expected), "an occurrence is missing, or there twice"
        assert state.progress.through_ms == times[-1]
    assert not messages


@pytest.mark.parametrize("policy", CrashPolicy)
def test_a_crash_at_any_operation_neither_skips_nor_doubles_an_occurrence(policy: CrashPolicy) -> None:
    recorder = history()
    moments = moments_of(policy, range(1, recorder.vfs.op_count + 1), STRIDE)

    async def scenario(_: SimLoop, __: SimClock) -> None:
        for at, seed, vfs in states_at(recorder, moments, policy, range(1)):
            with told(recorder, at, policy, seed):
                node = Node(vfs, clock_at(recorder, at), CONFIG).open(start=False)
                await check(node.broker)
                node.abandon()

    run_sim(scenario, 1)


@pytest.mark.parametrize("policy", [CrashPolicy.LOSE_UNSYNCED, CrashPolicy.MIXED])
def test_a_broker_goes_on_from_any_operation(policy: CrashPolicy) -> None:
    """Every occurrence since the first is delivered, once, and not before its time."""
    recorder = history()
    for at, seed, vfs in states_at(
        recorder, moments_of(policy, range(1, recorder.vfs.op_count + 1), LIVED_ON), policy, range(1)
    ):

        async def scenario(_: SimLoop, clock: SimClock) -> None:
            clock.step(recorder.clock_at(at) - clock.now_ms())  # noqa: B023
            node = Node(vfs, clock, CONFIG).open()  # noqa: B023
            topic = node.broker.registry.by_name.get(TOPIC)
            if topic is None or "all" not in {each.name for each in topic.subscriptions.values()}:
                node.abandon()
                return
            inbox = await node.subscribe(TOPIC, "all")
            await asyncio.sleep(8.5)
            await check(node.broker)
            arrived = inbox.poll()
            assert len({each.position for each in arrived}) == len(arrived)
            assert all(each.sent_ms >= each.deliver_at_ms for each in arrived)
            for name, times in (await stored(topic)).items():
                state = topic.recurring.get(name)
                assert state is not None
                now_ms = clock.now_ms()
                assert times[-1] == next_after(state.definition, now_ms), "the next one is stored ahead"
                assert times[0] <= START_MS + 8_000
            due = sum(ms <= clock.now_ms() for times in (await stored(topic)).values() for ms in times)
            assert len(arrived) == due
            check_verify(node.vfs)
            await node.stop()
            assert node.failures == []

        with told(recorder, at, policy, seed):
            run_sim(scenario, random.Random(at).randrange(100), latency=QUICK)
