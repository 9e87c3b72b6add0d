"""Compaction of a shard in a cluster: one record for all nodes, files of each by itself, and the same state everywhere."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from pyroaring import BitMap

from broker.errors import Corrupt
from broker.folder.ledger_rewrites import LedgerRewrites
from broker.jobs.verify import verify_data_dir
from broker.model import Position
from broker.storage.records import Seeked
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics import generations
from broker.topics.generations import Refusal
from broker.topics.schedule_values import Cancel, Move
from tests.crash.history import Model, observe
from tests.crash.points import moments_of
from tests.depth import at_depth
from tests.harness import DATA_DIR, Node, Outgoing
from tests.sim.shard_brokers import ShardBroker, make_bucket
from tests.unit.folder.compaction_world import TOPIC, begin, compact, config, fill, ledger_ids, payload, work

SETTINGS = config(checkpoint_interval_ms=5_000)
SEEDS = range(at_depth(change=1, deep=200))
STEPS = at_depth(change=24, deep=40)


def there(node: Node) -> dict[int, int]:
    """Return how many entries the files of each ledger have."""
    return {
        ledger.name.ledger_id: ledger.entry_count if ledger.sparse is None else ledger.sparse.present_count
        for ledger in node.topic(TOPIC).log
    }


async def agrees(standby: ShardBroker, owner: Node) -> bool:
    """Tell whether a standby has the owner's state; of what was left out one may still have the message."""
    while True:
        lsn = owner.broker.journal.durable_lsn
        await standby.reach(lsn)
        states = await _observe(standby.node), await _observe(owner)
        if standby.node.broker.journal.durable_lsn == owner.broker.journal.durable_lsn == lsn:
            return states[0] == states[1]


async def _observe(node: Node) -> Model:
    state = await observe(node)
    for topic_id, model in state.items():
        amendments = node.broker.registry.topics[topic_id].log.amendments
        for position, message in model.messages.items():
            if (
                position.ledger_id in amendments
                and position.entry_id in amendments[position.ledger_id].cancelled
            ):
                model.messages[position] = replace(message, content=b"", publish_ms=0)
    return state


async def wait_there(node: Node, expected: dict[int, int]) -> None:
    async with asyncio.timeout(600):
        while any(there(node).get(ledger_id) != count for ledger_id, count in expected.items()):
            await asyncio.sleep(1)


def check_clean(vfs: MemVfs) -> None:
    report = verify_data_dir(vfs, DATA_DIR)
    assert report.problems == []


class Shard:
    """An owner and a standby of one shard, each on a disk of its own."""

    def __init__(self, loop: SimLoop, seed: int = 1) -> None:
        self.loop = loop
        self.bucket = make_bucket(seed)
        self.owner = ShardBroker(self.bucket, loop, "a", MemVfs(), SETTINGS)
        self.standby = ShardBroker(self.bucket, loop, "b", MemVfs(), SETTINGS)

    async def start(self) -> Node:
        await (await self.owner.follow())
        node = await self.owner.own()
        self.taking = await self.standby.follow(rank=1)
        return node

    async def restart_standby(self, policy: CrashPolicy) -> None:
        """Crash the standby, and begin with what its disk has."""
        self.taking.cancel()
        disk = self.standby.vfs.crashed(self.standby.vfs.op_count, policy, self.loop.rng("crash"))
        self.standby.kill()
        self.standby = ShardBroker(self.bucket, self.loop, "b", disk, SETTINGS)
        self.taking = await self.standby.follow(rank=1)

    async def take_over(self) -> Node:
        """Kill the owner; the standby serves in its place."""
        self.owner.kill()
        await self.taking
        return await self.standby.own()


@pytest.mark.parametrize("kept", [(3, 7), (0, 1, 2, 3, 5, 6, 7, 8, 9)], ids=["few", "most"])
def test_each_node_rewrites_its_own_files_and_serves_what_is_left(kept: tuple[int, ...]) -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        shard = Shard(loop)
        node = await shard.start()
        pending, done, _ = await fill(node, 3, kept=kept)
        full = {position.ledger_id: 10 for position in pending}
        assert there(node).items() >= full.items()
        committed = await compact(node)
        assert sorted(committed.ledger_ids) == sorted(full)
        left = dict.fromkeys(full, len(kept))
        assert there(node).items() >= left.items()
        await shard.standby.reach(node.broker.journal.durable_lsn)
        other = shard.standby.node
        assert there(other).items() >= full.items(), "the old files are read until it has its own"
        assert await agrees(shard.standby, node)
        await wait_there(other, left)
        assert await agrees(shard.standby, node)
        await other.checkpoint()
        old = {f"{DATA_DIR}/topics/1/ledgers/{ledger_id}.0.data" for ledger_id in full}
        assert old.isdisjoint(other.vfs.snapshot()), "the old files go with the next checkpoint"
        after = await shard.take_over()
        inbox = await after.subscribe(TOPIC, "billing")
        await asyncio.sleep(700)
        payloads = {payload(number, entry) for number in range(3) for entry in kept} | {b"last"}
        assert {message.payload for message in inbox.poll()} == payloads
        assert not any(after.topic(TOPIC).subscription("billing").cursor.is_settled(p) for p in pending)
        assert all(after.topic(TOPIC).subscription("billing").cursor.is_settled(p) for p in done)
        await shard.standby.stop()
        check_clean(shard.standby.vfs)

    run_sim(scenario, seed=1)


async def settle(node: Node, positions: list[Position]) -> None:
    """Cancel messages that wait, so that nobody is owed them."""
    await node.topic(TOPIC).schedule.change(positions, Cancel(), dry_run=False)


async def compact_twice_ahead(loop: SimLoop) -> None:
    """Two compactions of the same ledgers, of which the standby has rewritten nothing yet."""
    shard = Shard(loop)
    node = await shard.start()
    pending, _, inbox = await fill(node, 2, kept=(3, 7))
    shard.standby.store.is_cut = True
    assert len((await compact(node)).ledger_ids) == 2
    some = [position for position in pending if position.entry_id == 3]
    await node.topic(TOPIC).schedule.change(some, Move(deliver_after_ms=0), dry_run=False)
    await inbox.ack(message.position for message in await inbox.wait(2))
    await asyncio.sleep(3)
    await node.checkpoint()
    assert len((await compact(node)).ledger_ids) == 2
    shard.standby.store.is_cut = False
    assert await agrees(shard.standby, node)
    await wait_there(shard.standby.node, {position.ledger_id: 1 for position in pending})
    assert await agrees(shard.standby, node)
    shard.taking.cancel()
    await shard.standby.node.stop()
    check_clean(shard.standby.vfs)
    await shard.owner.stop()
    check_clean(shard.owner.vfs)


def test_a_node_that_is_behind_takes_two_compactions_at_once() -> None:
    run_sim(lambda loop, clock: compact_twice_ahead(loop), seed=1)


def test_generations_that_decided_would_part_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generations are of one node's files: a record that asked for them would be refused by who is behind."""
    monkeypatch.setattr(generations, "GUARDS_OF_CLUSTER", generations.GUARDS)
    with pytest.raises(AssertionError):
        run_sim(lambda loop, clock: compact_twice_ahead(loop), seed=1)


def test_an_owner_that_crashes_before_it_has_swapped_writes_its_files_anew() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        shard = Shard(loop)
        node = await shard.start()
        pending, _, _ = await fill(node, 2)
        assert len((await compact(node)).ledger_ids) == 2
        lsn = node.broker.journal.durable_lsn
        disk = shard.owner.vfs.crashed(shard.owner.vfs.op_count, CrashPolicy.LOSE_UNSYNCED, loop.rng("crash"))
        await shard.standby.reach(lsn)
        after = await shard.take_over()
        again = ShardBroker(shard.bucket, loop, "a", disk, SETTINGS)
        taking = await again.follow(rank=1)
        assert await agrees(again, after)
        await wait_there(again.node, {position.ledger_id: 1 for position in pending})
        assert await agrees(again, after)
        taking.cancel()
        await again.node.stop()
        check_clean(disk)
        await shard.standby.stop()

    run_sim(scenario, seed=1)


@pytest.mark.parametrize("policy", list(CrashPolicy))
def test_a_crash_anywhere_in_a_rewrite_leaves_the_old_files_or_the_new_ones(policy: CrashPolicy) -> None:
    disks: list[tuple[MemVfs, int, int]] = []

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        shard = Shard(loop)
        node = await shard.start()
        pending, _, _ = await fill(node, 2)
        left = {position.ledger_id: 1 for position in pending}
        await compact(node)
        disk = shard.standby.vfs
        first = disk.op_count
        await shard.standby.reach(node.broker.journal.durable_lsn)
        await wait_there(shard.standby.node, left)
        await shard.standby.node.checkpoint()
        disks.append((disk, first, disk.op_count))
        shard.taking.cancel()
        shard.standby.kill()
        for at in moments_of(policy, range(first, disk.op_count), at_depth(change=48, deep=1)):
            crashed = disk.crashed(at, policy, random.Random(at))
            again = ShardBroker(shard.bucket, loop, "b", crashed, SETTINGS)
            taking = await again.follow(rank=1)
            assert await agrees(again, node), at
            await wait_there(again.node, left)
            assert await agrees(again, node), at
            taking.cancel()
            await again.node.stop()
            check_clean(crashed)
        await shard.owner.stop()

    run_sim(scenario, seed=1)
    (_, first, end) = disks[0]
    assert end - first > 20, "a rewrite and a checkpoint"


def test_a_ledger_that_cannot_be_read_stays_as_it_is_and_others_are_rewritten(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = LedgerRewrites._write
    refused: list[int] = []

    async def fail_first(self: LedgerRewrites, topic: object, capture: object, *rest: object) -> object:
        if not refused or refused[0] == capture.ledger_id:
            refused.append(capture.ledger_id)
            raise Corrupt("it is damaged", path="x")
        return await write(self, topic, capture, *rest)

    monkeypatch.setattr(LedgerRewrites, "_write", fail_first)

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        shard = Shard(loop)
        node = await shard.start()
        pending, _, _ = await fill(node, 3)
        await compact(node)
        await shard.standby.reach(node.broker.journal.durable_lsn)
        other = shard.standby.node
        whole = sorted({position.ledger_id for position in pending})
        await wait_there(other, dict.fromkeys(whole[1:], 1))
        assert there(other)[whole[0]] == 10
        await asyncio.sleep(35)
        assert len(refused) == 1, "not before a minute"
        await asyncio.sleep(45)
        assert len(refused) == 2
        assert await agrees(shard.standby, node)
        shard.taking.cancel()
        await other.stop()
        assert other.failures == []
        await shard.owner.stop()

    run_sim(scenario, seed=1)
    assert "A ledger could not be rewritten" in caplog.text


def test_a_seek_in_the_last_moment_keeps_the_files_of_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Submitted just before the record and not applied yet: only apply can know, and the owner follows it."""

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        shard = Shard(loop)
        node = await shard.start()
        _, done, inbox = await fill(node, 2)
        lease = await begin(node)
        outputs = await work(node, lease)
        topic, desk = node.topic(TOPIC), node.broker.compactions
        seeked = Seeked(topic.topic_id, inbox.subscription.subscription_id, Position(0, 0))
        submit = topic.submit_record

        def submit_after_a_seek(record: Any, apply: Any = None) -> Any:
            submit(seeked)
            return submit(record, apply)

        with monkeypatch.context() as patched:
            patched.setattr(topic, "submit_record", submit_after_a_seek)
            committed = await desk.commit(lease.compaction_id, lease.epoch, outputs)
        assert set(committed.refused.values()) == {Refusal.OWED}
        whole = dict.fromkeys(lease.ledger_ids, 10)
        assert there(node).items() >= whole.items()
        assert await agrees(shard.standby, node)
        after = await shard.take_over()
        again = await after.subscribe(TOPIC, "billing")
        assert {each.position for each in await again.wait(len(done))} == set(done)
        assert there(after).items() >= whole.items()
        await shard.standby.stop()

    run_sim(scenario, seed=1)


def test_a_topic_that_goes_while_a_ledger_is_rewritten_leaves_no_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = LedgerRewrites._write

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        shard = Shard(loop)
        node = await shard.start()
        await fill(node, 1)
        written: asyncio.Future[Any] = loop.create_future()

        async def write_while_it_goes(self: LedgerRewrites, *work: Any) -> Any:
            capture = await write(self, *work)
            await node.broker.registry.delete_topic(TOPIC)
            await shard.standby.reach(node.broker.journal.durable_lsn)
            written.set_result(capture)
            return capture

        monkeypatch.setattr(LedgerRewrites, "_write", write_while_it_goes)
        await compact(node)
        await shard.standby.reach(node.broker.journal.durable_lsn)
        other = shard.standby.node
        capture = await asyncio.wait_for(written, 60)
        await asyncio.sleep(0.1)  # less than until the next checkpoint
        generation = f"/{capture.ledger_id}.{capture.generation}."
        assert not [path for path in other.vfs.snapshot() if generation in path]
        shard.taking.cancel()
        await other.stop()
        assert other.failures == []
        check_clean(shard.standby.vfs)
        await shard.owner.stop()

    run_sim(scenario, seed=1)


def test_a_rewrite_waits_while_a_commit_moves_files() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        shard = Shard(loop)
        node = await shard.start()
        pending, _, _ = await fill(node, 1)
        await compact(node)
        await shard.standby.reach(node.broker.journal.durable_lsn)
        other, left = shard.standby.node, {pending[0].ledger_id: 1}
        async with other.broker.compactions.moving:
            await asyncio.sleep(60)
            assert there(other)[pending[0].ledger_id] == 10
        await wait_there(other, left)
        shard.taking.cancel()
        await other.stop()
        await shard.owner.stop()

    run_sim(scenario, seed=1)


def test_a_rewrite_waits_while_the_disk_is_nearly_full(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        shard = Shard(loop)
        shard.standby = ShardBroker(
            shard.bucket, loop, "b", MemVfs(), replace(SETTINGS, disk_reserve_bytes=2_000_000)
        )
        node = await shard.start()
        pending, _, _ = await fill(node, 3)
        await compact(node)
        await shard.standby.reach(node.broker.journal.durable_lsn)
        other, disk = shard.standby.node, shard.standby.vfs
        monkey = pytest.MonkeyPatch()
        monkey.setattr(disk, "free_bytes", lambda path: 1_000_000)
        full = {position.ledger_id: 10 for position in pending}
        await asyncio.sleep(120)
        assert there(other).items() >= full.items(), "half of the reserve is for acknowledgements"
        assert "A ledger could not be rewritten" in caplog.text
        monkey.setattr(disk, "free_bytes", lambda path: 1_100_000)
        await wait_there(other, dict.fromkeys(full, 1))
        monkey.undo()
        assert await agrees(shard.standby, node)
        shard.taking.cancel()
        await other.stop()
        await shard.owner.stop()

    run_sim(scenario, seed=1)


def test_a_folder_that_cannot_be_synced_ends_the_node_and_nothing_is_lost() -> None:
    """A sync of it that failed, and was passed over, would leave names in doubt that a later manifest relies on."""

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        shard = Shard(loop)
        node = await shard.start()
        pending, _, _ = await fill(node, 3)
        await compact(node)
        await shard.standby.reach(node.broker.journal.durable_lsn)
        other, disk = shard.standby.node, shard.standby.vfs
        await other.checkpoint()  # what was left out is on the disk
        fault = disk.faults.add(Fault("sync_dir", "*/ledgers"))
        await asyncio.sleep(60)
        assert fault.hit_count == 1 and other.failures
        await shard.restart_standby(CrashPolicy.LOSE_UNSYNCED)
        await wait_there(shard.standby.node, {position.ledger_id: 1 for position in pending})
        assert await agrees(shard.standby, node)
        shard.taking.cancel()
        await shard.standby.node.stop()
        await shard.owner.stop()

    run_sim(scenario, seed=1)


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_in_between_all_nodes_agree_and_nothing_is_lost(seed: int) -> None:
    run_sim(partial(_walk, seed), seed=seed)


async def _walk(seed: int, loop: SimLoop, clock: SimClock) -> None:
    rng = random.Random(seed)
    shard = Shard(loop, seed + 1)
    node = await shard.start()
    inbox = await node.subscribe(TOPIC, "billing")
    waiting: dict[bytes, Position] = {}
    delivered: set[bytes] = set()
    number = 0
    for _ in range(STEPS):
        match rng.choice(
            ("produce", "produce", "compact", "cancel", "move", "crash", "cut", "sleep", "checkpoint")
        ):
            case "produce":
                batch = [
                    Outgoing(
                        b"%d" % (number + n),
                        deliver_after_ms=rng.choice((0, 0, 0, 2_000, 1_500_000)),
                        schedule_key=f"key-{number + n}" if rng.random() < 0.3 else "",
                    )
                    for n in range(10)
                ]
                number += 10
                positions = await node.produce(TOPIC, batch)
                waiting |= {
                    m.payload: p for m, p in zip(batch, positions, strict=True) if m.deliver_after_ms > 5_000
                }
                delivered |= {m.payload for m in batch if m.deliver_after_ms <= 5_000}
            case "compact":
                await node.checkpoint()
                if not await ledger_ids(node):
                    continue
                lease = await begin(node)
                outputs = await work(node, lease)
                if rng.random() < 0.5 and waiting:  # what a commit has to look at again
                    moved = rng.choice(sorted(waiting))
                    change = Move(deliver_after_ms=2_000_000)
                    await node.topic(TOPIC).schedule.change([waiting[moved]], change, dry_run=False)
                await node.broker.compactions.commit(lease.compaction_id, lease.epoch, outputs)
            case "cancel" if waiting:
                gone = rng.choice(sorted(waiting))
                await settle(node, [waiting.pop(gone)])
            case "move" if waiting:
                moved = rng.choice(sorted(waiting))
                change = Move(deliver_after_ms=rng.choice((1_750_000, 2_200_000)))
                await node.topic(TOPIC).schedule.change([waiting[moved]], change, dry_run=False)
            case "crash":
                shard.standby.store.is_cut = False
                await shard.restart_standby(rng.choice(list(CrashPolicy)))
            case "cut":
                shard.standby.store.is_cut = not shard.standby.store.is_cut
            case "checkpoint":
                await (node if rng.random() < 0.5 else shard.standby.node).checkpoint()
            case _:
                await asyncio.sleep(rng.choice((1, 8, 30)))
        await asyncio.sleep(0.5)
        await inbox.ack(message.position for message in inbox.poll())
    await _finish(shard, node, waiting, delivered)


async def _finish(shard: Shard, node: Node, waiting: dict[bytes, Position], delivered: set[bytes]) -> None:
    shard.standby.store.is_cut = False
    assert await agrees(shard.standby, node)
    await asyncio.sleep(90)
    for each in (node, shard.standby.node):
        for ledger in each.topic(TOPIC).log:
            amendments = each.topic(TOPIC).log.amendments.get(ledger.name.ledger_id)
            gone = amendments.left_out if amendments is not None else BitMap()
            count = ledger.entry_count if ledger.sparse is None else ledger.sparse.present_count
            assert count <= ledger.entry_count - len(gone), "a node has not rewritten a ledger"
    assert await agrees(shard.standby, node)
    after = await shard.take_over()
    inbox = await after.subscribe(TOPIC, "billing")
    came: set[bytes] = set()
    for _ in range(40):
        await asyncio.sleep(60)
        came |= {message.payload for message in inbox.poll()}
    assert came >= set(waiting), "what waited is lost"
    assert came <= set(waiting) | delivered
    await shard.standby.stop()
    assert after.failures == []
    check_clean(shard.standby.vfs)
