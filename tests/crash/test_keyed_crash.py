"""After a crash at any operation a schedule key is held by what was answered, and by one message at most.

A short history with keys is played on a recording disk: produce, refuse, replace, seals, merges, checkpoints, a roll of
the ledger, a second life. At each operation the power goes, and the next life is asked for every key.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import pytest

from broker.errors import AlreadyExists
from broker.model import CANCELLED_MS, Position
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics.schedule_frames import schedule_key_of
from broker.topics.topic import Topic
from tests.crash.points import same_broker_id
from tests.depth import at_depth, sampled
from tests.harness import Node, Outgoing, small_config

__all__ = ["same_broker_id"]
pytestmark = pytest.mark.usefixtures("same_broker_id")

CONFIG = small_config(ledger_max_entries=8, seal_after_ms=1_000)
STRIDE = at_depth(change=60, deep=1)
POLICIES = (CrashPolicy.KEEP_ALL, CrashPolicy.LOSE_UNSYNCED, CrashPolicy.MIXED)
LATER_MS = 3_600_000


@dataclass(frozen=True)
class Sent:
    """A message with a key; when it was submitted and when it was answered, as counts of the disk's operations."""

    key: str
    payload: bytes
    submitted_at: int
    answers: list[tuple[int, Position]] = field(default_factory=list)


@dataclass
class History:
    vfs: MemVfs
    clock: SimClock
    sent: list[Sent] = field(default_factory=list)

    async def send(self, node: Node, *keys: str, replace: bool = False) -> None:
        batch = [Sent(key, f"{key}/{len(self.sent)}".encode(), self.vfs.op_count) for key in keys]
        messages = [
            Outgoing(each.payload.ljust(200, b"."), deliver_after_ms=LATER_MS, schedule_key=each.key)
            for each in batch
        ]
        try:
            accepted = await node.submit("t", messages, replace=replace)
        except AlreadyExists:
            return
        self.sent += batch
        await accepted.durable
        for index, each in enumerate(batch):
            position = Position(accepted.ids[0].ledger_id, accepted.ids[0].first_entry_id + index)
            each.answers.append((self.vfs.op_count, position))


@cache
def history() -> History:
    async def scenario(_: SimLoop, clock: SimClock) -> History:
        played = History(MemVfs(), clock)
        node = Node(played.vfs, clock, CONFIG).open()
        await life(played, node)
        node.abandon()  # killed: what it had sent to the disk arrives all the same
        await asyncio.sleep(1)
        node.broker._lock.close()  # type: ignore[union-attr]
        node = Node(played.vfs, clock, CONFIG).open()
        await life(played, node)
        await node.stop()
        return played

    return run_sim(scenario, seed=5)


async def life(played: History, node: Node) -> None:
    await played.send(node, "a", "b", "c", replace=True)
    await asyncio.sleep(3)  # sealed
    async with asyncio.TaskGroup() as together:
        together.create_task(node.checkpoint())
        together.create_task(played.send(node, "a", replace=True))
        together.create_task(played.send(node, "d", "a"))
        together.create_task(played.send(node, "a", "e", replace=True))
    await node.checkpoint()
    for number in range(4):
        await played.send(node, "b", f"n{number}", f"o{number}", replace=True)
        await asyncio.sleep(3)
        await node.checkpoint()
    await played.send(node, "a", "b", "c", "d", replace=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_after_a_crash_each_key_has_one_holder(policy: CrashPolicy) -> None:
    played = history()
    last = len(played.vfs.ops)
    assert any(op.path.endswith(".keys") for op in played.vfs.ops if op.path)
    for at in sampled(range(last + 1), STRIDE, POLICIES.index(policy)):
        disk = played.vfs.crashed(at, policy, random.Random(at))
        try:
            run_sim(partial(check, played, at, disk), seed=at)
        except BaseException as error:
            op = played.vfs.ops[at - 1] if at else None
            error.add_note(f"crash at {at} ({policy}), after {op and (op.kind, op.path)}")
            raise


async def check(played: History, at: int, disk: MemVfs, _: SimLoop, clock: SimClock) -> None:
    node = Node(disk, clock, CONFIG).open()
    topic = node.broker.registry.by_name.get("t")
    if topic is None:
        assert not any(answered <= at for each in played.sent for answered, _ in each.answers)
        node.abandon()
        return
    holders = await holders_of(topic)
    assert all(len(positions) == 1 for positions in holders.values()), holders
    answered: dict[str, Position] = {}
    for each in played.sent:
        for when, position in each.answers:
            if when <= at:
                answered[each.key] = max(position, answered.get(each.key, position))
    for key, position in answered.items():  # replaced since, or there
        assert holders[key][0] >= position, key
    keys = sorted(holders)
    assert await topic.keys.find([*keys, "never"]) == [*(holders[key][0] for key in keys), None]
    for key in keys:
        with pytest.raises(AlreadyExists):
            await node.produce("t", [Outgoing(b"x", deliver_after_ms=LATER_MS, schedule_key=key)])
    assert not node.failures
    node.abandon()


async def holders_of(topic: Topic) -> dict[str, list[Position]]:
    """By reading every message: who holds which key."""
    holders: dict[str, list[Position]] = defaultdict(list)
    for ledger in topic.log:
        ledger_id = ledger.name.ledger_id
        for entry_id in range(ledger.entry_count):
            times, _, frames = await topic.log.read(ledger_id, np.array([entry_id], np.uint32), 1 << 20)
            if topic.frontier_ms < int(times[0]) < CANCELLED_MS:
                holders[schedule_key_of(frames[0])].append(Position(ledger_id, entry_id))
    return holders
