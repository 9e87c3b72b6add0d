"""Rows of ledgers that take no more entries are packed, once; what cannot be packed stays as it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from types import SimpleNamespace

import numpy as np
import pytest

from broker.cluster.seals import read_seals
from broker.errors import Refused
from broker.folder import ledger_packing
from broker.folder.compaction_values import Lease
from broker.jobs.verify import verify_data_dir
from broker.model import Position, RowColumn
from broker.runtime.steps import run_step
from broker.runtime.vfs import WriteFailed
from broker.storage import packed_writer
from broker.storage.layout import Layout
from broker.storage.packed_rows import end_bytes, unpack_block
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.harness import DATA_DIR, Node, Outgoing, payload_of
from tests.unit.folder.compaction_world import (
    TOPIC,
    begin,
    compact,
    config,
    fill,
    ledger_ids,
    payload,
    run,
    work,
)

LOOK = ledger_packing._LOOK_SECONDS + 1


def packed(node: Node) -> set[int]:
    """Return the ledgers whose rows are packed."""
    return {ledger.name.ledger_id for ledger in node.topic(TOPIC).log if ledger.packed_bytes}


def endings(node: Node, ledger_id: int) -> set[str]:
    folder = f"{DATA_DIR}/topics/{node.topic(TOPIC).topic_id}/ledgers"
    return {
        name.partition(".")[2] for name in node.vfs.list_dir(folder) if name.startswith(f"{ledger_id}.")
    } - {""}


async def pack_all(node: Node) -> None:
    """Pack what is whole, as if it had been begun before files were kept."""
    for ledger in list(node.topic(TOPIC).log):
        if ledger.is_whole:
            await node.broker._packing._pack(node.topic(TOPIC), ledger)


async def all_are_there(node: Node, pending: list[Position]) -> None:
    for number, position in enumerate(pending):
        _, _, frames = await node.topic(TOPIC).log.read(
            position.ledger_id, np.array([position.entry_id], np.uint32), 1 << 20
        )
        assert payload_of(frames[0]) == payload(number, position.entry_id)


def test_what_is_whole_is_packed_and_its_rows_go_with_the_next_checkpoint():
    async def scenario(node: Node) -> Node:
        pending, _, _ = await fill(node, 3)
        ledger_ids = {position.ledger_id for position in pending}
        assert packed(node) == set()
        await asyncio.sleep(LOOK)
        assert packed(node) == ledger_ids, "the last one takes entries"
        assert all(endings(node, each) >= {"0.rows", "0.packed"} for each in ledger_ids)
        await all_are_there(node, pending)
        await node.checkpoint()
        assert all(endings(node, each) >= {"0.data", "0.times", "0.packed"} for each in ledger_ids)
        assert not any("0.rows" in endings(node, each) for each in ledger_ids)
        await all_are_there(node, pending)
        assert node.broker.counters.compacted_ledgers == 0
        await node.stop()
        node = Node(node.vfs, node.clock, node.config).open()
        assert packed(node) == ledger_ids
        await all_are_there(node, pending)
        assert (await node.broker.verify_topic(TOPIC)).findings == []
        return node

    run(scenario, packed_rows_min=1)


def test_a_packed_file_that_an_upload_has_stored_is_not_read_again():
    async def scenario(node: Node) -> Node:
        pending, _, _ = await fill(node, 2)
        await asyncio.sleep(LOOK)
        await node.checkpoint()
        layout = Layout(DATA_DIR)
        seals = read_seals(node.vfs, layout, 1)
        for position in pending:
            paths = [
                f"{layout.ledgers(1)}/{position.ledger_id}.0.{kind}" for kind in ("data", "times", "packed")
            ]
            assert len({seals[path] for path in paths}) == 1
        path = paths[-1]
        at = node.vfs.open(path).size() - end_bytes(10)
        byte = node.vfs.open(path).pread(1, at)
        node.vfs.open(path).pwrite([bytes([byte[0] ^ 1])], at)
        assert read_seals(node.vfs, layout, 1)[path] != seals[path]
        node.vfs.open(path).pwrite([byte], at)
        return node

    run(scenario, packed_rows_min=1)


def test_few_rows_are_not_packed():
    async def scenario(node: Node) -> Node:
        await fill(node, 3)
        await asyncio.sleep(LOOK)
        assert packed(node) == set()
        return node

    run(scenario, packed_rows_min=11)


def test_a_packed_ledger_is_compacted_and_what_comes_of_it_is_packed():
    async def scenario(node: Node) -> Node:
        pending, _, _ = await fill(node, 3)
        await asyncio.sleep(LOOK)
        await node.checkpoint()
        assert len((await compact(node)).ledger_ids) == 3
        assert packed(node) == set()
        await all_are_there(node, pending)
        await asyncio.sleep(LOOK)
        await node.checkpoint()
        assert packed(node) == {position.ledger_id for position in pending}
        assert all(endings(node, each) >= {"1.data", "1.times", "1.packed"} for each in packed(node))
        await all_are_there(node, pending)
        assert node.broker.counters.compacted_ledgers == 3
        await node.stop()
        node = Node(node.vfs, node.clock, node.config).open()
        await all_are_there(node, pending)
        return node

    run(scenario, packed_rows_min=1)


async def _commit_all(node: Node, lease: Lease, pending: list[Position]) -> None:
    """Let the job of a lease rewrite three ledgers whose rows are packed, in files that the lease keeps."""
    assert packed(node) == {position.ledger_id for position in pending}
    assert all("0.rows" in endings(node, each) for each in packed(node)), "the lease keeps them"
    outputs = await work(node, lease)
    committed = await node.broker.compactions.commit(lease.compaction_id, lease.epoch, outputs)
    assert len(committed.ledger_ids) == 3
    await node.checkpoint()
    assert all(endings(node, each) >= {"1.data", "1.times", "1.rows"} for each in committed.ledger_ids)
    assert not any(name.startswith("0.") for each in committed.ledger_ids for name in endings(node, each))
    await all_are_there(node, pending)


def test_a_job_reads_what_its_lease_names_although_it_was_packed_since():
    async def scenario(node: Node) -> Node:
        pending, _, _ = await fill(node, 3)
        lease = await begin(node)
        await pack_all(node)
        await node.checkpoint()
        await _commit_all(node, lease, pending)
        return node

    run(scenario, packed_rows_min=1)


def test_compaction_3_what_is_packed_while_a_lease_is_noted_down_stays_for_its_job(
    monkeypatch: pytest.MonkeyPatch,
):
    """Of many ledgers the broker notes some, lets others work, and goes on."""

    async def scenario(node: Node) -> Node:
        pending, _, _ = await fill(node, 3)
        candidates = await ledger_ids(node)

        async def spent() -> None:
            if not packed(node):
                await pack_all(node)
                await node.checkpoint()

        with monkeypatch.context() as patched:
            patched.setattr(node.broker.compactions, "_budget", SimpleNamespace(spent=spent))
            lease = await begin(node, ledgers=candidates)
        await _commit_all(node, lease, pending)
        return node

    run(scenario, packed_rows_min=1)


def test_files_are_not_kept_for_a_lease_that_is_refused(monkeypatch: pytest.MonkeyPatch):
    async def scenario(node: Node) -> Node:
        pending, _, _ = await fill(node, 3)
        candidates = await ledger_ids(node)
        log, free = node.topic(TOPIC).log, iter([False, True])

        def check_free(*_: object) -> None:
            if next(free):
                assert log.keeps_files
                raise Refused("Another one was faster", reason="COMPACTION_RUNNING")

        with monkeypatch.context() as patched:
            patched.setattr(node.broker.compactions._leases, "check_free", check_free)
            with pytest.raises(Refused):
                await begin(node, ledgers=candidates)
        assert not log.keeps_files
        await asyncio.sleep(LOOK)
        assert packed(node) == {position.ledger_id for position in pending}
        return node

    run(scenario, packed_rows_min=1)


def test_ledgerpack_3_nothing_is_packed_while_files_are_kept():
    """The rows would stay beside what they were packed into."""

    async def scenario(node: Node) -> Node:
        pending, _, _ = await fill(node, 3)
        with node.topic(TOPIC).log.keep_files():
            await asyncio.sleep(LOOK)
            assert packed(node) == set()
        await asyncio.sleep(LOOK)
        assert packed(node) == {position.ledger_id for position in pending}
        return node

    run(scenario, packed_rows_min=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["create", "write", "sync"])
def test_a_disk_that_fails_leaves_the_rows_as_they_are(kind: str):
    async def whole(loop: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, config(packed_rows_min=1)).open()
        pending, _, _ = await fill(node, 2)
        node.vfs.faults.add(Fault(kind, "*.packed"))
        await asyncio.sleep(LOOK)
        assert packed(node) == {pending[1].ledger_id}
        assert "0.packed" not in endings(node, pending[0].ledger_id)
        await all_are_there(node, pending)
        await asyncio.sleep(ledger_packing._RETRY_SECONDS + LOOK)
        assert packed(node) == {position.ledger_id for position in pending}
        await node.checkpoint()
        await all_are_there(node, pending)
        await node.stop()
        assert node.failures == []
        assert verify_data_dir(node.vfs, DATA_DIR).problems == []

    run_sim(whole, seed=1)


def test_packing_2_a_folder_that_cannot_be_synced_ends_writing_and_nothing_is_lost():
    """A sync of it that failed, and was passed over, would leave names in doubt that a later manifest relies on."""

    async def whole(loop: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, config(packed_rows_min=1, checkpoint_interval_ms=3_600_000)).open()
        pending, _, _ = await fill(node, 2)
        fault = node.vfs.faults.add(Fault("sync_dir", "*/ledgers"))
        await asyncio.sleep(LOOK)
        is_packed = {position.ledger_id for position in pending}
        pending += (await node.produce(TOPIC, [Outgoing(payload(2, entry)) for entry in range(10)]))[3:4]
        with pytest.raises(WriteFailed):
            await node.checkpoint()
        assert fault.hit_count == 1
        node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
        await all_are_there(node, pending)
        await asyncio.sleep(LOOK)
        await node.checkpoint()
        node = node.crash(CrashPolicy.LOSE_UNSYNCED).open()
        assert packed(node) == is_packed
        await all_are_there(node, pending)
        await node.stop()

    run_sim(whole, seed=1)


@pytest.mark.slow
def test_packing_1_rows_that_are_others_once_packed_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def unpacked_wrong(item: bytes, content: bytes, count: int) -> RowColumn:
        rows = unpack_block(item, content, count)
        rows["crc"][-1] ^= 1
        return rows

    async def scenario(node: Node) -> Node:
        pending, _, _ = await fill(node, 1)
        with monkeypatch.context() as patched:
            patched.setattr(packed_writer, "unpack_block", unpacked_wrong)
            await asyncio.sleep(LOOK)
        assert packed(node) == set()
        assert node.failures == []
        assert caplog.text.count("could not be packed") == 1
        assert "0.packed" not in endings(node, pending[0].ledger_id)
        await all_are_there(node, pending)
        await asyncio.sleep(ledger_packing._RETRY_SECONDS + LOOK)
        assert packed(node) == {pending[0].ledger_id}
        return node

    run(scenario, packed_rows_min=1)


@pytest.mark.parametrize("what", ["the topic is deleted", "the broker stops", "the ledger is compacted"])
def test_ledgerpack_2_what_goes_while_it_is_packed_leaves_no_file(monkeypatch: pytest.MonkeyPatch, what: str):
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def whole(loop: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, config(packed_rows_min=1)).open()
        pending, _, _ = await fill(node, 1)

        async def held_step(executor: Executor | None, work: Callable[[], object]) -> object:
            done = await run_step(executor, work)
            begun.set()
            await go_on.wait()
            return done

        monkeypatch.setattr(ledger_packing, "run_step", held_step)
        await begun.wait()
        assert "0.packed" in endings(node, pending[0].ledger_id)
        if what == "the topic is deleted":
            await node.broker.registry.delete_topic(TOPIC)
            go_on.set()
            await asyncio.sleep(1)
            await node.checkpoint()
            assert not node.vfs.exists(f"{DATA_DIR}/topics/1")
        if what == "the ledger is compacted":
            committing = asyncio.ensure_future(compact(node))
            await asyncio.sleep(1)
            assert not committing.done(), "it waits, as both make files of the ledger"
            go_on.set()
            assert len((await committing).ledger_ids) == 1
            await node.checkpoint()
            await all_are_there(node, pending)
        monkeypatch.undo()
        await node.stop()
        assert node.failures == []
        report = verify_data_dir(node.vfs, DATA_DIR)
        assert report.problems == []
        assert report.notes == []

    run_sim(whole, seed=1)


@pytest.mark.slow
def test_ledgerpack_3_nothing_is_packed_while_the_disk_is_nearly_full(caplog: pytest.LogCaptureFixture):
    reserve_bytes = 1 << 20

    async def whole(loop: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, config(packed_rows_min=1, disk_reserve_bytes=reserve_bytes)).open()
        await fill(node, 3)
        free_bytes = node.vfs.free_bytes
        node.vfs.free_bytes = lambda path: reserve_bytes + 1  # type: ignore[method-assign]
        await asyncio.sleep(2 * LOOK)
        assert packed(node) == set()
        assert caplog.text.count("too little of the disk is free") == 1, "of all ledgers"
        node.vfs.free_bytes = free_bytes  # type: ignore[method-assign]
        await asyncio.sleep(ledger_packing._RETRY_SECONDS + LOOK)
        assert len(packed(node)) == 3
        await node.stop()
        assert node.failures == []

    run_sim(whole, seed=1)
