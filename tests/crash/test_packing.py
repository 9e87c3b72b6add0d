"""The power goes, or the process, after every operation of packing: write, sync, swap, manifest, removal.

Whatever is found: every ledger has its rows, packed or not, all messages are there, nothing is left that nobody names,
and a start after that packs what is not packed.
"""

from __future__ import annotations

import asyncio
import random
from functools import cache

import numpy as np
import pytest

from broker.errors import Corrupt
from broker.folder import ledger_packing
from broker.jobs.verify import verify_data_dir
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.crash.points import moments_of
from tests.depth import at_depth, sampled
from tests.harness import DATA_DIR, Node, Outgoing, payload_of
from tests.unit.folder.compaction_world import LATER_MS, TOPIC, config

SEEDS = range(at_depth(change=1, deep=4))
STRIDE = at_depth(change=2 * len(CrashPolicy), deep=1)
LOOK = ledger_packing._LOOK_SECONDS + 1
SETTINGS = config(packed_rows_min=1)


class History:
    """Ledgers that are packed, on a disk that remembers every operation."""

    def __init__(self) -> None:
        self.vfs = MemVfs()
        self.payloads: list[tuple[int, int, bytes]] = []
        self.first = self.end = 0


async def produce(node: Node, made: History, count: int) -> None:
    number = len(made.payloads)
    messages = [
        Outgoing(
            b"%d" % (number + each),
            deliver_after_ms=LATER_MS + each * 7 if each % 3 else 0,
            key=f"key-{each}" if each % 2 else "",
            schedule_key=f"schedule-{number + each}" if each % 3 else "",
        )
        for each in range(count)
    ]
    for position, message in zip(await node.produce(TOPIC, messages), messages, strict=True):
        made.payloads.append((*position, message.payload))


@cache
def history() -> History:
    made = History()

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(made.vfs, clock, SETTINGS).open()
        await node.create_subscription(TOPIC, "billing")
        for _ in range(3):
            await produce(node, made, 10)
        await produce(node, made, 4)
        await node.checkpoint()
        made.first = made.vfs.op_count
        await asyncio.sleep(LOOK)
        assert len([ledger for ledger in node.topic(TOPIC).log if ledger.packed_bytes]) == 3
        await node.checkpoint()
        made.end = made.vfs.op_count
        node.abandon()

    run_sim(scenario, seed=3)
    return made


async def check(node: Node, made: History) -> None:
    for ledger_id, entry_id, payload in made.payloads:
        _, _, frames = await node.topic(TOPIC).log.read(ledger_id, np.array([entry_id], np.uint32), 1 << 20)
        assert payload_of(frames[0]) == payload


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", list(CrashPolicy))
def test_ledgerpack_1_every_ledger_has_its_rows_wherever_packing_is_cut(policy: CrashPolicy, seed: int):
    made = history()
    for at in moments_of(policy, range(made.first, made.end + 1), STRIDE):
        vfs = made.vfs.crashed(at, policy, random.Random(at * 31 + seed))

        async def life(_: SimLoop, clock: SimClock, vfs: MemVfs = vfs) -> None:
            node = Node(vfs, clock, SETTINGS).open()
            await check(node, made)
            await asyncio.sleep(LOOK)
            assert len([ledger for ledger in node.topic(TOPIC).log if ledger.packed_bytes]) == 3
            await check(node, made)
            assert (await node.broker.verify_topic(TOPIC)).findings == []
            await node.stop()
            assert node.failures == []

        try:
            run_sim(life, seed=at)
            report = verify_data_dir(vfs, DATA_DIR)
            assert (report.problems, report.notes) == ([], [])
            assert not any(f"/{ledger}.0.rows" in path for path in vfs.snapshot() for ledger in (1, 2, 3))
        except BaseException as error:
            error.add_note(f"at operation {at}, {policy}")
            raise


def test_recovery_of_a_recovery_finds_the_same():
    made = history()
    for at in sampled(range(made.first, made.end), at_depth(change=14, deep=3)):
        vfs = made.vfs.crashed(at, CrashPolicy.KEEP_ALL)
        first = vfs.op_count

        async def open_only(_: SimLoop, clock: SimClock, vfs: MemVfs = vfs) -> list[int]:
            node = Node(vfs, clock, SETTINGS).open(start=False)
            await check(node, made)
            node.abandon()
            return [ledger.packed_bytes for ledger in node.topic(TOPIC).log]

        packed = run_sim(open_only, seed=1)
        for again in range(first, vfs.op_count + 1, 3):
            crashed = vfs.crashed(again, CrashPolicy.LOSE_UNSYNCED)
            assert run_sim(lambda loop, clock, vfs=crashed: open_only(loop, clock, vfs), seed=1) == packed


@pytest.mark.parametrize("damage", ["short", "missing"])
def test_a_packed_file_that_is_missing_or_short_is_refused(damage: str):
    made = history()
    vfs = made.vfs.crashed(made.end, CrashPolicy.KEEP_ALL)
    (path, *_) = sorted(path for path in vfs.snapshot() if path.endswith(".packed"))
    if damage == "short":
        file = vfs.open(path)
        file.truncate(file.size() - 1)
    else:
        vfs.remove(path)
    assert [problem for problem in verify_data_dir(vfs, DATA_DIR).problems if path in problem]

    async def refused(_: SimLoop, clock: SimClock) -> None:
        with pytest.raises(Corrupt) as found:
            Node(vfs, clock, SETTINGS).open()
        assert found.value.path == path

    run_sim(refused, seed=1)
