"""A crash while overdue messages are looked for: the next life looks again, and delivers none of them."""

from __future__ import annotations

import asyncio
import random

import pytest

from broker.policy import OVERDUE_DEAD_LETTER, OVERDUE_EXPIRE, TopicPolicy
from broker.storage.alive import read_alive
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.depth import at_depth, sampled
from tests.harness import Node, Outgoing, small_config
from tests.unit.topics.letters import letters, owed

ALIVE = "data/alive"


def later(payload: bytes, after_ms: int) -> Outgoing:
    return Outgoing(payload, deliver_after_ms=after_ms)


def overdue_history() -> tuple[MemVfs, int]:
    """A disk with messages of several ledgers that came due while nobody was there; and the clock then."""

    async def play(_: SimLoop, clock: SimClock) -> tuple[MemVfs, int]:
        node = Node(MemVfs(), clock, small_config()).open()
        create_topic = node.broker.registry.create_topic
        await create_topic("orders", TopicPolicy(overdue_action=OVERDUE_DEAD_LETTER))
        await create_topic("gone", TopicPolicy(overdue_action=OVERDUE_EXPIRE))
        for topic, name in (("orders", "a"), ("orders", "b"), ("gone", "s")):
            await node.create_subscription(topic, name)
        for index in range(12):
            await node.produce("orders", [later(b"%02d" % index, 30_000 if index % 2 else 3_000)])
            await node.produce("gone", [later(b"%02d" % index, 30_000 if index % 2 else 3_000)])
        await asyncio.sleep(10)
        node.abandon()
        await asyncio.sleep(60)
        return node.vfs, clock.now_ms()

    return run_sim(play, seed=1)


@pytest.mark.parametrize(
    "policy",
    [CrashPolicy.KEEP_ALL, CrashPolicy.LOSE_UNSYNCED, CrashPolicy.MIXED],
    ids=lambda policy: policy.value,
)
def test_a_crash_in_the_middle_begins_again_and_nothing_overdue_is_delivered(policy):
    found, at_ms = overdue_history()
    due = [b"%02d" % index for index in range(0, 12, 2)]
    overdue = [b"%02d" % index for index in range(1, 12, 2)]

    async def sweep(_: SimLoop, clock: SimClock) -> tuple[MemVfs, int]:
        node = Node(found.crashed(found.op_count, CrashPolicy.KEEP_ALL), clock, small_config())
        first_op = node.vfs.op_count
        node.open()
        # What is produced now must not hide the absence from the life after a crash.
        await node.produce("orders", [later(b"new", 1_000)])
        await asyncio.sleep(1.5)  # until the file says that no absence is left
        assert sorted(await letters(node, name="a")) == overdue
        assert read_alive(node.vfs, ALIVE).absences == ()  # type: ignore[union-attr]
        node.abandon()
        return node.vfs, first_op

    vfs, first_op = run_sim(sweep, seed=2, start_ms=at_ms)

    async def again(_: SimLoop, clock: SimClock, at: int) -> None:
        node = Node(vfs.crashed(at, policy, random.Random(at)), clock, small_config()).open()
        inboxes = [await node.subscribe("orders", name) for name in ("a", "b")]
        inboxes.append(await node.subscribe("gone", "s"))
        await asyncio.sleep(3)
        for inbox in inboxes:
            got = {each.payload for each in inbox.poll()} - {b"new"}
            assert sorted(got) == due, "overdue messages were delivered, or others were not"
        for name in ("a", "b"):
            assert sorted({*await letters(node, name=name)} - {b"new"}) == overdue
        assert set(await owed(node, "gone", "s")) == set(due)
        assert node.failures == []
        node.abandon()

    seen: set[frozenset[tuple[str, bytes]]] = set()
    for at in sampled(range(first_op, vfs.op_count + 1), at_depth(change=10, deep=1)):
        tree = frozenset(vfs.crashed(at, policy, random.Random(at)).snapshot().items())
        if tree in seen:
            continue
        seen.add(tree)
        try:
            run_sim(lambda loop, clock, at=at: again(loop, clock, at), seed=at, start_ms=at_ms + 20_000)
        except BaseException as error:
            op = vfs.ops[at - 1] if at else None
            error.add_note(f"crash at {at} ({policy}), after {op and (op.kind, op.path)}")
            raise
