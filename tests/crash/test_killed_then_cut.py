"""The process is killed after some operation, another one starts on the same machine, and then the power goes.

What the next process finds need not be on the disk: a name, a manifest or a group may be in the system's memory alone.
So whatever it does on the strength of it, removing files that a manifest does not name above all, must come after a
sync of its own. For each moment of the kill the next life recovers, works and takes a checkpoint; and after
each of its operations the power goes.
"""

from __future__ import annotations

import random
from functools import cache

import pytest

from broker.testing.mem_vfs import CrashPolicy
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import run_sim
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
