"""The process is killed after some operation, another one starts on the same machine, and then the power goes.

What the next process finds need not be on the disk: a name, a manifest or a group may be in the system's memory alone.
So whatever it does on the strength of it, removing files that a manifest does not name above all, must come after a
sync of its own. For each moment of the kill the next life recovers, works and takes a checkpoint; and after
each of its operations the power goes.
"""

from __future__ import annotations

import asyncio
import random
from functools import cache

import pytest

from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.crash.history import Life, Recorder, Submitted, crash_config, fold, observe, record_history
from tests.crash.points import same_broker_id
from tests.depth import at_depth, sampled
from tests.harness import Node, Outgoing

__all__ = ["same_broker_id"]
pytestmark = pytest.mark.usefixtures("same_broker_id")

KILLS = at_depth(change=113, deep=7)
AFTER_RENAMES = at_depth(change=8, deep=1)
"""The process is killed after every so many operations, and more often before a name that it gave is durable."""
CUTS = at_depth(change=7, deep=2)
"""Of the operations of the next life, the power goes after every so many."""
POLICIES = (CrashPolicy.LOSE_UNSYNCED, CrashPolicy.NAMES_LOST_DATA_KEPT, CrashPolicy.MIXED)


@cache
def history() -> Recorder:
    return record_history()


def test_a_start_after_a_kill_relies_on_nothing_that_a_power_cut_takes_back():
    ops = history().vfs.ops
    renamed = [at for at, op in enumerate(ops, 1) if op.kind == "rename" and "/topics/" in op.path]
    for killed_at in sorted({*sampled(range(1, len(ops)), KILLS), *sampled(renamed, AFTER_RENAMES)}):
        start_ms = history().clock_at(killed_at)
        try:
            run_sim(lambda _, clock, at=killed_at: live_on(clock, at), seed=killed_at, start_ms=start_ms)
        except BaseException as failure:
            failure.add_note(f"killed after operation {killed_at}")
            raise


def test_the_journal_goes_after_the_manifest_that_a_killed_checkpoint_left_is_durable():
    """The next checkpoint has nothing of that topic to write, and says that the journal before it is not needed."""

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = await checkpoint_twice(clock)
        node = Node(node.vfs.killed(renamed_at(node, "topics/1/manifest")), clock, node.config).open()
        await node.produce("orders", [Outgoing(b"of the next life")])
        await node.checkpoint()
        await check_cut(node, {"audit": 2, "orders": 2})

    run_sim(scenario, 1)


def test_the_journal_at_rest_shrinks_after_the_root_that_a_killed_checkpoint_left_is_durable():
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = await checkpoint_twice(clock)
        config = crash_config(checkpoint_interval_ms=5_000)
        node = Node(node.vfs.killed(renamed_at(node, "broker.manifest")), clock, config).open()
        appended = node.vfs.op_count
        await asyncio.sleep(2.5 * config.checkpoint_interval_ms / 1_000)
        removed = [op.path for op in node.vfs.ops[appended:] if op.kind == "remove"]
        assert any("/journal/" in path for path in removed)
        await check_cut(node, {"audit": 2, "orders": 1})

    run_sim(scenario, 1)


async def checkpoint_twice(clock: SimClock) -> Node:
    """A life whose second checkpoint writes the manifest of one of its two topics."""
    node = Node(MemVfs(), clock, crash_config()).open()
    await node.produce("audit", [Outgoing(b"first")])
    await node.produce("orders", [Outgoing(b"of another topic")])
    await node.checkpoint()
    await node.produce("audit", [Outgoing(b"second")])
    await node.checkpoint()
    node.abandon()
    return node


def renamed_at(node: Node, path: str) -> int:
    """The last operation that gave a file this name."""
    ops = enumerate(node.vfs.ops, 1)
    return max(at for at, op in ops if op.kind == "rename" and op.path.endswith(f"{path}.new"))


async def check_cut(node: Node, counts: dict[str, int]) -> None:
    """The power goes: the next life finds so many messages of each topic, whatever was lost that was not synced."""
    now = node.vfs.op_count
    node.abandon()
    for state in node.vfs.crash_states(first=now, last=now, seeds=range(40)):
        found = await observe(Node(state.vfs, node.clock, node.config).open(start=False))
        assert {topic.name: len(topic.messages) for topic in found.values()} == counts, state


async def live_on(clock: SimClock, killed_at: int) -> None:
    recorder = Recorder(history().vfs.killed(killed_at), clock, crash_config())
    recorder.lives = [Life(0, as_found(killed_at))]
    node = recorder.open()
    await node.produce("orders", [Outgoing(b"of the next life")])
    await node.checkpoint()
    await node.produce("audit", [Outgoing(b"after its checkpoint")])
    await node.stop()
    for at in sampled(range(recorder.vfs.op_count + 1), CUTS, shift=killed_at):
        for policy in POLICIES:
            await check_restart(recorder, at, policy, f"the power went after {at} more ({policy.value})")


def as_found(killed_at: int) -> list[Submitted]:
    """The records of the life that was killed: owed from the beginning if they were answered by then."""
    submitted = history().lives[history().life_at(killed_at)].submitted
    return [
        Submitted(
            each.record, 0, 0 if each.answered_at is not None and each.answered_at <= killed_at else None
        )
        for each in submitted
        if each.submitted_at <= killed_at
    ]


async def check_restart(recorder: Recorder, at: int, policy: CrashPolicy, when: str) -> None:
    answered, possible = recorder.bounds(at)
    records = [each.record for each in recorder.lives[recorder.life_at(at)].submitted]
    try:
        node = Node(recorder.vfs.crashed(at, policy, random.Random(at)), recorder.clock, crash_config())
        node.open(start=False)
        kept = node.broker.journal.durable_lsn
        assert answered <= kept <= possible
        assert await observe(node) == fold(records[:kept])
    except Exception as failure:
        failure.add_note(when)
        raise
