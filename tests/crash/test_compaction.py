"""The power goes, or the process, after every operation of a compaction: begin, write, commit, swap, delete.

Whatever is found: every ledger is whole in its old or its new files, what was acknowledged stays so, what is pending is
there under its id with its time and its payload, nothing is left that nobody names, and the next start says the same.
"""

from __future__ import annotations

import asyncio
import random
from functools import cache

import numpy as np
import pytest

from broker.jobs.verify import verify_data_dir
from broker.model import CANCELLED_MS, Position
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.crash.points import moments_of
from tests.depth import at_depth, sampled
from tests.harness import DATA_DIR, EARLIEST, Node, Outgoing, payload_of
from tests.unit.folder.compaction_world import TOPIC, begin, compact, config, fill, payload, work

SEEDS = range(at_depth(change=1, deep=4))
STRIDE = at_depth(change=4 * len(CrashPolicy), deep=1)


class History:
    """A compaction on a disk that remembers every operation, and what must survive each of them."""

    def __init__(self) -> None:
        self.vfs = MemVfs()
        self.pending: list[Position] = []
        self.done: list[Position] = []
        self.steps: list[tuple[int, str]] = []  # operations done before each
        self.clock: SimClock | None = None

    def step(self, name: str) -> None:
        self.steps.append((self.vfs.op_count, name))

    @property
    def first(self) -> int:
        return self.steps[0][0]

    @property
    def end(self) -> int:
        return self.steps[-1][0]


@cache
def history() -> History:
    made = History()

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(made.vfs, clock, config()).open()
        made.pending, made.done, _inbox = await fill(node, 3, kept=(3, 7))
        made.step("begin")
        lease = await begin(node)
        made.step("work")
        outputs = await work(node, lease)
        made.step("commit")
        committed = await node.broker.compactions.commit(lease.compaction_id, lease.epoch, outputs)
        assert len(committed.ledger_ids) == 3
        made.step("after the commit")
        await node.produce(TOPIC, [Outgoing(b"after")])
        made.step("manifest and deletion")
        await node.checkpoint()
        made.step("next checkpoint")
        await node.produce(TOPIC, [Outgoing(b"more")])
        await node.checkpoint()
        made.step("end")
        made.clock = clock
        node.abandon()

    run_sim(scenario, seed=3)
    return made


async def check(node: Node, made: History, is_committed: bool | None) -> None:
    """Check the state of the next life."""
    topic = node.topic(TOPIC)
    subscription = topic.subscription("billing")
    sparse = {ledger.name.ledger_id for ledger in topic.log if ledger.sparse is not None}
    ledger_ids = {position.ledger_id for position in made.pending}
    assert sparse in (set(), ledger_ids)  # one record: all or none
    if is_committed is not None:
        assert bool(sparse) == is_committed
    for ledger, ledger_id in enumerate(sorted(ledger_ids)):
        ids = [position.entry_id for position in made.pending if position.ledger_id == ledger_id]
        times, _, frames = await topic.log.read(ledger_id, np.array(ids, np.uint32), 1 << 20)
        assert [payload_of(frame) for frame in frames] == [payload(ledger, entry) for entry in ids]
        assert ((times > node.clock.now_ms()) & (times < CANCELLED_MS)).all()
    settled = subscription.cursor
    assert all(settled.is_settled(position) for position in made.done)
    assert not any(settled.is_settled(position) for position in made.pending)
    late_comer = await node.create_subscription(TOPIC, "late-comer", position=EARLIEST)
    gone = len(made.done) if sparse else 0
    assert late_comer.unsettled_count() == topic.log.count_from(Position(0, 0)) - gone


def check_clean(vfs: MemVfs) -> None:
    report = verify_data_dir(vfs, DATA_DIR)
    assert report.problems == []
    assert report.notes == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", list(CrashPolicy))
def test_either_the_old_or_the_new_state_is_there(policy: CrashPolicy, seed: int):
    made = history()
    commit_end = next(at for at, name in made.steps if name == "after the commit")
    commit_begin = next(at for at, name in made.steps if name == "commit")
    for at in moments_of(policy, range(made.first, made.end + 1), STRIDE):
        vfs = made.vfs.crashed(at, policy, random.Random(at * 31 + seed))
        is_committed = True if at >= commit_end else False if at < commit_begin else None

        async def life(
            _: SimLoop,
            clock: SimClock,
            vfs: MemVfs = vfs,
            known: bool | None = is_committed,
            again: bool = at % 3 == 0,
        ) -> None:
            node = Node(vfs, clock, config()).open()
            await check(node, made, known)
            lease_less = [path for path in vfs.snapshot() if "/staging/" in path]
            assert lease_less == []
            if again:
                await asyncio.sleep(1)  # the index has passed the ledgers
                await compact(node)
            await node.stop()
            assert node.failures == []

        try:
            run_sim(life, seed=at)
            check_clean(vfs)
        except BaseException as error:
            error.add_note(f"at operation {at} of {made.steps}, {policy}")
            raise


def test_recovery_of_a_recovery_finds_the_same():
    made = history()
    for at in sampled(range(made.first, made.end), at_depth(change=14, deep=7)):
        vfs = made.vfs.crashed(at, CrashPolicy.KEEP_ALL)
        first = vfs.op_count

        async def open_only(_: SimLoop, clock: SimClock, vfs: MemVfs = vfs) -> set[int]:
            node = Node(vfs, clock, config()).open(start=False)
            sparse = {ledger.name.ledger_id for ledger in node.topic(TOPIC).log if ledger.sparse}
            node.abandon()
            return sparse

        sparse = run_sim(open_only, seed=1)
        for again in range(first, vfs.op_count + 1, 3):
            crashed = vfs.crashed(again, CrashPolicy.LOSE_UNSYNCED)
            found = run_sim(lambda loop, clock, vfs=crashed: open_only(loop, clock, vfs), seed=1)
            assert found == sparse, (at, again)
