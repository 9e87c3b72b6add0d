"""After a crash at any operation a key still says what was confirmed of its message, and what waits is never hidden.

A short history on a recording disk, in which what is settled leaves the lookup by seals and merges, and its ledgers go;
what is remembered is written, merged and expires. At each operation the power goes, and the next life is asked.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from functools import cache, partial

import pytest

from broker.jobs.rewrite import rewrite
from broker.jobs.verify import verify_data_dir
from broker.model import Position
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics.schedule_values import Cancel, ChangeResult
from tests.crash.points import same_broker_id
from tests.depth import at_depth, sampled
from tests.harness import DATA_DIR, Node, Outgoing, small_config

__all__ = ["same_broker_id"]
pytestmark = pytest.mark.usefixtures("same_broker_id")

KEEP_MS = 8_000
CONFIG = small_config(
    ledger_max_entries=2,
    seal_after_ms=1_000,
    reclaim_interval_ms=200,
    checkpoint_interval_ms=300,
    settled_key_retention_ms=KEEP_MS,
    journal_segment_bytes=1 << 16,
)
COMPACTED = small_config(
    ledger_max_entries=9,
    seal_after_ms=1_000,
    reclaim_interval_ms=86_400_000,
    checkpoint_interval_ms=86_400_000,
    settled_key_retention_ms=86_400_000,
    journal_segment_bytes=1 << 20,
)
STRIDE = at_depth(change=140, deep=1)
OF_COMPACTION = at_depth(change=10, deep=1)
POLICIES = (CrashPolicy.KEEP_ALL, CrashPolicy.LOSE_UNSYNCED, CrashPolicy.MIXED)
HOUR_MS = 3_600_000
DONE, DELIVERED = ChangeResult.DONE, ChangeResult.ALREADY_DELIVERED
MISSING, CANCELLED = ChangeResult.NOT_FOUND, ChangeResult.ALREADY_CANCELLED


@dataclass(frozen=True)
class Confirmed:
    """Answer of a key, after a number of the disk's operations."""

    key: str
    position: Position
    result: ChangeResult
    at: int
    at_ms: int


@dataclass
class History:
    vfs: MemVfs
    clock: SimClock
    confirmed: list[Confirmed] = field(default_factory=list)
    times: list[tuple[int, int]] = field(default_factory=list)  # operations, and the time by then

    def confirm(self, key: str, position: Position, result: ChangeResult) -> None:
        self.confirmed.append(Confirmed(key, position, result, self.vfs.op_count, self.clock.now_ms()))

    async def keep_time(self) -> None:
        while True:
            self.times.append((self.vfs.op_count, self.clock.now_ms()))
            await asyncio.sleep(0.02)


@cache
def history() -> History:
    async def scenario(_: SimLoop, clock: SimClock) -> History:
        played = History(MemVfs(), clock)
        timekeeper = asyncio.create_task(played.keep_time())
        node = Node(played.vfs, clock, CONFIG).open()
        await node.create_subscription("t", "s")
        await life(played, node, 0)
        node.abandon()  # killed: what it had sent to the disk arrives all the same
        await asyncio.sleep(1)
        node.broker._lock.close()  # type: ignore[union-attr]
        node = Node(played.vfs, clock, CONFIG).open()
        await life(played, node, 10)
        await node.stop()
        timekeeper.cancel()
        return played

    return run_sim(scenario, seed=5)


async def life(played: History, node: Node, first: int) -> None:
    inbox = await node.subscribe("t", "s")
    for number in range(first, first + 6):
        delivered, cancelled, waits = f"d{number % 4}", f"c{number % 4}", f"w{number}"
        due, kept = await node.produce(
            "t",
            [
                Outgoing(b"x", deliver_after_ms=900, schedule_key=delivered),
                Outgoing(b"x", deliver_after_ms=HOUR_MS, schedule_key=cancelled),
            ],
        )
        if number % 3 == 0:
            [position] = await node.produce(
                "t", [Outgoing(b"x", deliver_after_ms=HOUR_MS, schedule_key=waits)]
            )
            played.confirm(waits, position, DONE)
        [outcome] = await node.topic("t").schedule.change([cancelled], Cancel(), dry_run=False)
        assert outcome[:3] == (kept, cancelled, DONE)
        played.confirm(cancelled, kept, CANCELLED)
        await inbox.wait(1)
        await inbox.ack([due])
        played.confirm(delivered, due, DELIVERED)
        await asyncio.sleep(1)


@pytest.mark.parametrize("policy", POLICIES)
def test_after_a_crash_a_key_says_what_was_confirmed_of_its_message(policy: CrashPolicy) -> None:
    played = history()
    last = len(played.vfs.ops)
    written = [op.path for op in played.vfs.ops if op.path and ".keys" in op.path]
    assert len(set(written)) > 20
    for at in sampled(range(last + 1), STRIDE, POLICIES.index(policy)):
        disk = played.vfs.crashed(at, policy, random.Random(at))
        now_ms = max((time_ms for count, time_ms in played.times if count <= at), default=0)
        try:
            run_sim(partial(check, played, at, disk), seed=at, start_ms=now_ms or played.times[0][1])
        except BaseException as error:
            op = played.vfs.ops[at - 1] if at else None
            error.add_note(f"crash at {at} ({policy}), after {op and (op.kind, op.path)}")
            raise


async def check(played: History, at: int, disk: MemVfs, _: SimLoop, clock: SimClock) -> None:
    node = Node(disk, clock, CONFIG).open()
    wanted = {each.key: each for each in played.confirmed if each.at <= at}
    for key, each in wanted.items():
        [found] = await node.topic("t").schedule.change([key], Cancel(), dry_run=True)
        if found.position is not None and found.position > each.position:
            continue  # a message of which nothing was confirmed yet
        if found.result is MISSING and each.result is not DONE:
            assert clock.now_ms() - each.at_ms >= KEEP_MS, f"{key} was forgotten: {each}"
            continue
        assert (found.position, found.result) == (each.position, each.result), key
    assert not node.failures
    node.abandon()


@cache
def compaction() -> tuple[History, int]:
    """One ledger of which little is left is compacted, with no checkpoint of the broker's own; when that began."""

    async def scenario(_: SimLoop, clock: SimClock) -> tuple[History, int]:
        played = History(MemVfs(), clock)
        node = Node(played.vfs, clock, COMPACTED).open()
        inbox = await node.subscribe("t", "s")
        names = {"d": 100, "c": HOUR_MS, "w": HOUR_MS}
        ids = await node.produce(
            "t",
            [
                Outgoing(b"x", deliver_after_ms=after_ms, schedule_key=f"{name}{number}")
                for name, after_ms in names.items()
                for number in range(3)
            ],
        )
        await node.produce("t", [Outgoing(b"x", deliver_after_ms=HOUR_MS)] * 9)  # another ledger
        await node.topic("t").schedule.change(ids[3:6], Cancel(), dry_run=False)
        await inbox.wait(3)
        await inbox.ack(ids[:3])
        await asyncio.sleep(3)  # indexed
        await node.checkpoint()
        for number in range(3):
            played.confirm(f"d{number}", ids[number], DELIVERED)
            played.confirm(f"c{number}", ids[3 + number], CANCELLED)
            played.confirm(f"w{number}", ids[6 + number], DONE)
        began = played.vfs.op_count
        lease = await node.broker.compactions.begin("t", [ids[0].ledger_id], ())
        outputs = await rewrite(node.vfs, DATA_DIR, f"{DATA_DIR}/{lease.folder}")
        committed = await node.broker.compactions.commit(lease.compaction_id, lease.epoch, outputs)
        assert committed.ledger_ids == (ids[0].ledger_id,)
        node.abandon()
        played.times.append((0, clock.now_ms()))
        return played, began

    return run_sim(scenario, seed=5)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_compaction_leaves_out_only_what_is_remembered(policy: CrashPolicy) -> None:
    played, began = compaction()
    assert any(".keys" in op.path for op in played.vfs.ops[began:] if op.path)
    moments = range(began, len(played.vfs.ops) + 1)
    for at in sampled(moments, OF_COMPACTION, POLICIES.index(policy)):
        disk = played.vfs.crashed(at, policy, random.Random(at))
        try:
            run_sim(partial(check, played, at, disk), seed=at, start_ms=played.times[0][1])
        except BaseException as error:
            op = played.vfs.ops[at - 1]
            error.add_note(f"crash at {at} ({policy}), after {(op.kind, op.path)}")
            raise


def test_the_history_writes_merges_and_expires_what_is_remembered() -> None:
    played = history()
    assert verify_data_dir(played.vfs, DATA_DIR).problems == []
    removed = [
        op.path for op in played.vfs.ops if op.kind == "remove" and op.path and op.path.endswith(".keys")
    ]
    dropped = [
        op.path for op in played.vfs.ops if op.kind == "remove" and op.path and op.path.endswith(".data")
    ]
    assert len(removed) > 10
    assert len(dropped) > 5
