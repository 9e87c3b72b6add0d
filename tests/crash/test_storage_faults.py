"""Disks that fail, fill up or rot: writing ends at the first failure, and no wrong byte is ever taken for a right one.

A fault hits once; everything after it would succeed again. That is the trap: a sync that works after a failed one
vouches for bytes that the system has dropped (MEMVFS-6), so nothing may be answered any more. Where no bytes are
in doubt it is the other way round: whatever the broker wanted of names it wants again, and nobody notices.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from typing import Any
from unittest.mock import patch

import google_crc32c
import pytest

from broker.config import BrokerConfig
from broker.errors import Corrupt, Fenced, LimitReached, NotFound, StorageFailed, Unavailable
from broker.model import Position
from broker.runtime.vfs import WriteFailed
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.crash.history import Model, Recorder, crash_config, fold, observe, record_history
from tests.depth import at_depth, sampled
from tests.harness import EARLIEST, Inbox, Node, Outgoing, small_config
from tests.moving import moves

ROOT = "data/broker.manifest"
Step = Callable[[], Awaitable[Any]]

WRITING = ("write", "sync", "sync_dir")
NAMING = ("create", "open", "open_dir", "rename", "make_dir", "remove", "remove_dir", "list_dir")
LENGTHENING = "truncate"
"""Of the journal's files, ahead of their groups: a failure loses nothing, and is not tried again at once."""
STRIDE = at_depth(change=30, deep=1)
"""Of the operations of a kind every so many fail, on each day others; of each kind the first does."""
OF_DAMAGE = at_depth(change=32, deep=1)
"""Of the ways to damage a file every so many are tried, on each day others."""
NAMING_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EIO)


# -- a disk that fails once ----------------------------------------------------------------------------------------


def faulty_config() -> BrokerConfig:
    """Checkpoints by themselves, as in a real broker: their failure must reach the supervisor."""
    return crash_config(checkpoint_interval_ms=400, tail_bytes_max=2_000)


class Run:
    """Work on a disk that may fail; counts what was answered and what was refused."""

    def __init__(self, clock: SimClock, fault: Fault | None) -> None:
        self.vfs = MemVfs()
        self.recorder = Recorder(self.vfs, clock, faulty_config())
        self.fault = fault
        self.answered = 0
        self.refused: list[Exception] = []
        self.clock = clock

    async def work(self, faults: Sequence[Fault] = ()) -> Node:
        """The faults are armed once the broker serves; the data directory is opened without them."""
        node = self.recorder.open()
        for fault in (*([self.fault] if self.fault is not None else ()), *faults):
            self.vfs.faults.add(fault)
        await self.attempt(lambda: node.create_subscription("orders", "billing", position=EARLIEST))
        for number in range(4):
            await self.attempt(lambda n=number: node.produce("orders", _messages(n)))
            await self.attempt(lambda n=number: node.produce(f"other-{n // 2}", _messages(n)))
            await self.attempt(lambda: self._consume(node))
            await asyncio.sleep(0.25)
        await self.attempt(lambda: node.broker.registry.delete_topic("other-0"))
        await asyncio.sleep(1)
        await self.attempt(lambda: node.produce("orders", _messages(9)))
        return node

    async def attempt(self, step: Step) -> None:
        """Nothing may hang, and nothing may fail in any way but these."""
        try:
            async with asyncio.timeout(60):
                await step()
            self.answered += 1
        except (StorageFailed, Unavailable) as error:
            self.refused.append(error)
        except NotFound:
            assert self.refused, "what was never refused is not there"

    async def _consume(self, node: Node) -> None:
        topic = node.topic("orders")
        inbox = Inbox(node, topic, topic.subscription("billing"))
        try:
            await asyncio.sleep(0.1)
            found = inbox.poll()
            await inbox.ack([each.position for each in found[::2]])
            await inbox.nack([each.position for each in found[1::2]], 10)
        finally:
            inbox.detach()


def _messages(number: int) -> list[Outgoing]:
    return [
        Outgoing(f"message {number}.{i} ".encode().ljust(250, b"-"), deliver_after_ms=40 * i)
        for i in range(3)
    ]


@cache
def operation_counts() -> dict[str, int]:
    """Count the operations by kind while the work goes well."""
    counting = [Fault(kind, nth=1 << 30) for kind in (*WRITING, *NAMING, LENGTHENING)]

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        run = Run(clock, None)
        for fault in counting:
            run.vfs.faults.add(fault)
        node = await run.work()
        assert not run.refused
        await node.stop()

    run_sim(scenario, seed=3)
    return {fault.kind: fault.seen_count for fault in counting}


def some_of(count: int) -> list[int]:
    """Return the numbers of the operations of a kind that fail."""
    return sorted({1, *sampled(range(1, count + 1), STRIDE)})


@pytest.mark.parametrize("kind", WRITING)
def test_the_first_failure_ends_writing_and_nobody_is_answered_wrongly(kind):
    count = operation_counts()[kind]
    assert count > 2
    for nth in some_of(count):
        error = errno.EIO if kind.startswith("sync") else errno.ENOSPC
        fault = Fault(kind, nth=nth, error=error, after_bytes=nth % 40)
        try:
            run_sim(lambda _, clock, fault=fault: meet_fault(clock, fault), seed=3)
        except BaseException as failure:
            failure.add_note(f"{kind} number {nth} of {count} failed")
            raise


async def meet_fault(clock: SimClock, fault: Fault) -> None:
    run = Run(clock, fault)
    node = await run.work()
    if not fault.hit_count:  # it would have been met by the stop
        fault.nth -= fault.seen_count
        fault.seen_count = 0
    else:
        assert node.broker.journal.failed is not None, "writing goes on after a failed write"
        assert run.refused, "a produce after the failure was answered"
        assert any(isinstance(error, StorageFailed) for error in run.refused)
        assert node.failures, "on_failure was not told"
    failed_at = run.vfs.op_count
    was_failed = bool(fault.hit_count)
    await node.stop()
    if was_failed:
        later = [op.path for op in run.vfs.ops[failed_at:] if op.kind in ("rename", "write", "remove")]
        assert not later, "the stop wrote to a disk that had failed"
    await check_every_restart(run)


@pytest.mark.parametrize("kind", [*NAMING, LENGTHENING])
def test_what_failed_before_a_byte_was_written_is_done_again_and_nobody_is_refused(kind):
    count = operation_counts()[kind]
    assert count > 0
    for nth in some_of(count):
        # From then on two more of the kind fail, so that what comes after a failure fails as well.
        for error in (NAMING_ERRORS[nth % len(NAMING_ERRORS)], errno.EMFILE):
            faults = [Fault(kind, nth=nth + more, error=error) for more in (0, 1, 2)]
            try:
                run_sim(lambda _, clock, faults=faults: outlive_faults(clock, faults), seed=3)
            except BaseException as failure:
                failure.add_note(f"{kind} number {nth} of {count} failed with {errno.errorcode[error]}")
                raise


async def outlive_faults(clock: SimClock, faults: list[Fault]) -> None:
    run = Run(clock, None)
    node = await run.work(faults)
    assert not run.refused
    assert node.failures == []
    assert node.broker.journal.failed is None
    await node.stop()
    assert node.failures == []
    await check_every_restart(run)


def test_a_start_after_a_failed_sync_relies_on_nothing_that_the_disk_may_not_have():
    """The machine lives on, so all of what was written is still shown; the power goes later."""
    count = operation_counts()["sync"]
    for nth in some_of(count):
        fault = Fault("sync", nth=nth)
        try:
            run_sim(lambda _, clock, fault=fault: live_again(clock, fault), seed=3)
        except BaseException as failure:
            failure.add_note(f"sync number {nth} of {count} failed")
            raise


async def live_again(clock: SimClock, fault: Fault) -> None:
    run = Run(clock, fault)
    node = await run.work()
    await node.stop()
    assert fault.hit_count or fault.seen_count < fault.nth
    run.vfs.faults.clear()
    node = run.recorder.open()
    await node.produce("orders", _messages(10))
    await check_every_restart(run)
    await node.checkpoint()
    await node.produce("orders", _messages(11))
    await check_every_restart(run)
    await node.stop()


async def check_every_restart(run: Run) -> None:
    """Whatever the disk kept, everything answered is there; a process that starts again finds the same."""
    at = run.vfs.op_count
    answered, possible = run.recorder.bounds(at)
    records = [each.record for each in run.recorder.lives[-1].submitted]
    for policy in CrashPolicy:
        node = Node(run.vfs.crashed(at, policy, random.Random(at)), run.clock, faulty_config())
        node.open(start=False)
        kept = node.broker.journal.durable_lsn
        assert answered <= kept <= possible, f"{answered} answered, {kept} kept ({policy})"
        assert await observe(node) == fold(records[:kept])


def test_a_failed_sync_of_the_journal_answers_nobody_of_its_group_and_nobody_after():
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock).open()
        await node.produce("orders", [Outgoing(b"before")])
        node.vfs.faults.add(Fault("sync", "*/journal/*"))
        group = [await node.submit("orders", [Outgoing(b"in the group")]) for _ in range(5)]
        for accepted in group:
            with pytest.raises(StorageFailed):
                await accepted.durable
        with pytest.raises(StorageFailed):
            await node.produce("orders", [Outgoing(b"after")])
        assert len(node.failures) == 1
        assert node.broker.not_ready_because is not None
        syncs = [op.kind for op in node.vfs.ops if op.kind.startswith("sync")]
        await asyncio.sleep(100)
        assert [op.kind for op in node.vfs.ops if op.kind.startswith("sync")] == syncs, "a sync was retried"
        lost = node.crash(CrashPolicy.KEEP_ALL).open()
        inbox = await lost.subscribe("orders", "first")
        assert b"before" in {each.payload for each in await inbox.wait(1)}

    run_sim(scenario, seed=5)


def test_producers_that_wait_for_room_are_told_when_the_ledgers_cannot_be_written():
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, small_config(tail_bytes_max=100, ledger_max_entries=1000)).open()
        await node.produce("orders", [Outgoing(bytes(50))])
        node.vfs.faults.add(Fault("write", "*.data", error=errno.ENOSPC))
        async with asyncio.timeout(60):
            with pytest.raises(StorageFailed):
                await produce_until_refused(node, [])

    run_sim(scenario, seed=5)


# -- a read that fails ---------------------------------------------------------------------------------------------


def test_a_read_that_fails_ends_the_streams_that_need_it_and_nothing_else():
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, small_config()).open()
        stored = await node.produce("orders", _messages(0)[:1])
        await node.create_subscription("orders", "billing", position=EARLIEST)
        await node.checkpoint()  # the entry is in the files, not in memory
        broken = node.vfs.faults.add(Fault("read", "*/ledgers/*", onward=True))
        inbox = await node.subscribe("orders", "billing")
        await asyncio.sleep(1)
        assert isinstance(inbox.consumer.closed_because, Unavailable)
        assert not node.failures
        assert broken.hit_count
        await node.produce("others", _messages(1))
        inbox.detach()
        node.vfs.faults.clear()
        again = await node.subscribe("orders", "billing")
        assert [each.position for each in await again.wait(1)] == stored
        await node.stop()

    run_sim(scenario, seed=4)


# -- a full disk ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_several_topics_that_finds_the_disk_full_fails_once():
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        vfs = MemVfs(capacity_bytes=1_000_000)
        node = Node(vfs, clock, small_config()).open()
        for topic in ("orders", "bills", "offers"):
            await node.produce(topic, _messages(0))
        await node.checkpoint()
        for topic in ("orders", "bills", "offers"):
            await node.create_subscription(topic, "billing", position=EARLIEST)
        vfs.capacity_bytes -= vfs.free_bytes("")
        with pytest.raises(WriteFailed):
            await node.checkpoint()
        await asyncio.sleep(5)  # the other topics' writes fail too
        gc.collect()  # then `run_sim` knows of failures that nobody asked for
        await node.stop()

    run_sim(scenario, seed=1)


def test_below_the_reserve_produce_is_refused_while_acks_and_deliveries_go_on_until_space_returns():
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        vfs = MemVfs(capacity_bytes=60_000)
        node = Node(vfs, clock, small_config(disk_reserve_bytes=30_000, checkpoint_interval_ms=5_000)).open()
        inbox = await node.subscribe("orders", "billing", lease_ms=600_000)
        stored: list[Position] = []
        for _ in range(3):  # a checkpoint and a rest free journal, and there is a little room again
            with pytest.raises(LimitReached) as refusal:
                await produce_until_refused(node, stored)
            assert refusal.value.reason == "DISK_RESERVE_REACHED"
            assert refusal.value.retry_after_ms > 0
            await asyncio.sleep(20)
        got = inbox.poll()
        assert {each.position for each in got} == set(stored), (
            "what was accepted is delivered from a full disk"
        )
        more: list[Position] = []
        with pytest.raises(LimitReached):
            await produce_until_refused(node, more)
        await inbox.ack([each.position for each in got[:-1]])
        await inbox.nack([got[-1].position], 10)
        await asyncio.sleep(1)
        assert got[-1].position in {each.position for each in inbox.poll()}
        with pytest.raises(LimitReached):
            await node.produce("orders", [Outgoing(b"still full")])
        vfs.capacity_bytes += 60_000
        await asyncio.sleep(2)
        await node.produce("orders", [Outgoing(b"room again")])
        assert node.failures == []
        vfs.capacity_bytes -= 60_000
        await asyncio.sleep(2)
        await node.stop()  # a last checkpoint fits into the reserve
        assert node.failures == []
        vfs.capacity_bytes -= vfs.free_bytes("") - 20_000
        again = Node(vfs, clock, node.config).open()
        assert again.topic("orders").subscription("billing").unsettled_count() == 2 + len(more)
        with pytest.raises(LimitReached):
            await again.produce("orders", [Outgoing(b"full from the start")])

    run_sim(scenario, seed=5)


async def produce_until_refused(node: Node, stored: list[Position]) -> None:
    for _ in range(1000):
        messages = [Outgoing(bytes(800)), Outgoing(bytes(9), deliver_after_ms=9_000)]
        stored += await node.produce("orders", messages)
        await asyncio.sleep(0.5)


def test_the_last_figure_of_the_free_space_stands_while_it_cannot_be_looked_up():
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        vfs = MemVfs(capacity_bytes=60_000)
        node = Node(vfs, clock, small_config(disk_reserve_bytes=30_000)).open()
        known = node.broker.disk_free_bytes
        with (
            moves(node.broker, "postdate_file_retries"),
            patch.object(vfs, "free_bytes", side_effect=OSError(errno.EIO, "Input/output error")),
        ):
            await asyncio.sleep(3)
            await node.produce("orders", [Outgoing(b"goes on")])
        assert node.broker.disk_free_bytes == known > 0
        assert node.broker.counters.file_retries >= 3
        assert node.failures == []
        await asyncio.sleep(2)
        assert node.broker.disk_free_bytes < known
        await node.stop()

    run_sim(scenario, seed=5)


def test_a_broker_whose_files_cannot_be_opened_for_long_is_not_ready_and_then_is_again():
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, small_config()).open()
        await node.produce("orders", [Outgoing(b"before")])
        with patch.object(node.vfs, "make_dir", side_effect=OSError(errno.EMFILE, "Too many open files")):
            made = asyncio.create_task(node.produce("another", [Outgoing(b"waits")]))
            await asyncio.sleep(1)
            assert node.broker.not_ready_because is None
            await asyncio.sleep(6)
            assert "waiting for the disk" in (node.broker.not_ready_because or "")
            await node.produce("orders", [Outgoing(b"needs no file")])
        await made
        await asyncio.sleep(1)  # the longest pause of others that were tried again
        assert node.broker.not_ready_because is None
        await node.stop()

    run_sim(scenario, seed=5)


# -- two brokers, one directory ------------------------------------------------------------------------------------


def test_a_second_broker_on_a_directory_is_refused_until_the_first_lets_go():
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        vfs = MemVfs()
        node = Node(vfs, clock).open()
        await node.produce("orders", [Outgoing(b"mine")])
        before = vfs.snapshot()
        with pytest.raises(Fenced) as refusal:
            Node(vfs, clock).open()
        assert refusal.value.reason == "DATA_DIR_LOCKED"
        assert vfs.snapshot() == before, "the refused broker changed something"
        await node.produce("orders", [Outgoing(b"still mine")])
        await node.stop()
        Node(vfs, clock).open()

    run_sim(scenario, seed=5)


# -- rot -----------------------------------------------------------------------------------------------------------


@cache
def clean_disk() -> tuple[MemVfs, int, Model]:
    """A disk after a clean stop, the time then, and what is on it."""
    recorder = record_history()
    records = [each.record for each in recorder.lives[-1].submitted]
    return recorder.vfs, recorder.clock_at(recorder.vfs.op_count), fold(records)


def copy_of(vfs: MemVfs) -> MemVfs:
    return vfs.crashed(vfs.op_count, CrashPolicy.KEEP_ALL)


def offsets_in(length: int) -> list[int]:
    """The header's bytes, the last ones, and some between."""
    some = range(0, length, max(1, length // 25))
    return sorted({*range(min(length, 28)), *some, *range(max(0, length - 8), length)})


def damaged_disks() -> Iterator[tuple[str, str, MemVfs]]:
    """(what was done, to which file, the disk)"""
    vfs, _, _ = clean_disk()
    files = {path: content for path, content in vfs.snapshot().items() if not path.endswith("/lock")}
    for path, content in files.items():
        for offset in offsets_in(len(content)):
            yield (
                f"bit {offset % 8} of byte {offset} flipped",
                path,
                with_bytes(vfs, path, offset, bytes([content[offset] ^ 1 << offset % 8])),
            )
        for length in {0, len(content) // 2, len(content) - 1}:
            yield f"cut to {length} bytes", path, with_length(vfs, path, length)
        yield "longer by zeros", path, with_length(vfs, path, len(content) + 64)
        yield "zeroed", path, with_bytes(vfs, path, 0, bytes(len(content)))
        removed = copy_of(vfs)
        removed.remove(path)
        yield "removed", path, removed
        for other in files:
            if other > path and other.rpartition(".")[2] == path.rpartition(".")[2]:
                yield f"exchanged with {other}", path, exchanged(vfs, path, other)


def with_bytes(vfs: MemVfs, path: str, offset: int, content: bytes) -> MemVfs:
    vfs = copy_of(vfs)
    vfs.open(path).pwrite([content], offset)
    return vfs


def with_length(vfs: MemVfs, path: str, length: int) -> MemVfs:
    vfs = copy_of(vfs)
    vfs.open(path).truncate(length)
    return vfs


def exchanged(vfs: MemVfs, path: str, other: str) -> MemVfs:
    vfs = copy_of(vfs)
    vfs.rename(path, "aside")
    vfs.rename(other, path)
    vfs.rename("aside", other)
    return vfs


def test_damage_is_named_or_harmless_and_never_gives_wrong_bytes():
    """Reopening gives the very same state, or Corrupt at once or at the first read."""
    _, now_ms, model = clean_disk()
    outcomes: Counter[str] = Counter()
    for what, path, vfs in sampled(damaged_disks(), OF_DAMAGE):
        try:
            outcome = run_sim(lambda _, clock, vfs=vfs: open_damaged(vfs, clock, model), 1, start_ms=now_ms)
            kind, _, named = outcome.partition(": ")
            # Where a segment of the journal is missing, there is only the folder to name.
            concerned = (path, *what.split(), path.rpartition("/")[0])
            assert kind == "harmless" or named in concerned, f"another file is named: {named}"
        except BaseException as failure:
            failure.add_note(f"{path}: {what}")
            raise
        outcomes[kind] += 1
    assert outcomes["refused"] > 300 // OF_DAMAGE
    assert outcomes["met at a read"] > 100 // OF_DAMAGE


async def open_damaged(vfs: MemVfs, clock: SimClock, model: Model) -> str:
    node = Node(vfs, clock, crash_config())
    try:
        node.open(start=False)
    except Corrupt as error:
        return f"refused: {error.path}"
    try:
        found = await observe(node)
    except Corrupt as error:
        return f"met at a read: {error.path}"
    assert found == model
    return "harmless"


@pytest.mark.parametrize(
    "ending", ["broker.manifest", "/manifest", "cursors/1.*", ".data", ".times", ".rows", ".seg"]
)
def test_a_file_of_a_future_version_is_refused_by_that_name(ending):
    """A newer broker's file is not damage; the message says what to do."""
    vfs, now_ms, _ = clean_disk()
    paths = [path for path in vfs.snapshot() if fnmatch(path, f"*{ending}") and "spare" not in path]
    assert paths
    header = bytearray(vfs.snapshot()[paths[-1]][:32])
    header[4] = 9
    if "/ledgers/" in paths[-1]:  # whose checksum says whether the version is to be believed
        header[28:32] = google_crc32c.value(bytes(header[:28])).to_bytes(4, "little")
    newer = with_bytes(vfs, paths[-1], 0, header)

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        node = Node(newer, clock, crash_config())
        with pytest.raises(Corrupt, match=r"version") as refusal:
            await observe(node.open(start=False))
        assert refusal.value.path == paths[-1]

    run_sim(scenario, 1, start_ms=now_ms)


def test_a_directory_that_is_refused_stays_as_it_was():
    """An operator who put back a wrong root can put back the right one: nothing was deleted meanwhile."""
    vfs, now_ms, model = clean_disk()
    refused = 0
    for root in roots_of(vfs)[:-1]:
        mixed = with_length(vfs, ROOT, 0)
        mixed.open(ROOT).pwrite([root], 0)
        before = mixed.snapshot()
        outcome = run_sim(lambda _, clock, disk=mixed: open_damaged(disk, clock, model), 1, start_ms=now_ms)
        if outcome != "harmless":
            assert outcome.startswith("refused")
            assert mixed.snapshot() == before, outcome
            refused += 1
    assert refused >= 4


def roots_of(vfs: MemVfs) -> list[bytes]:
    """Every broker.manifest of the history, oldest first."""
    moments = [at for at, op in enumerate(vfs.ops, 1) if op.kind == "rename" and op.path == f"{ROOT}.new"]
    return [vfs.crashed(at, CrashPolicy.KEEP_ALL).snapshot()[ROOT] for at in moments]
