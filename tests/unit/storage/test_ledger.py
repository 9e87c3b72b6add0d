"""A ledger: its unwritten tail, its files, what a restart finds, and what damage does to a read."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import Corrupt, NotFound, StorageFailed, Unavailable
from broker.model import FLAG_DELAYED, ROW, EntryColumns, Int64Column, RowColumn, UInt32Column
from broker.runtime.vfs import LocalVfs, Vfs
from broker.storage.blocks import BLOCK_ROWS, HEADER_BYTES, KINDS, LedgerCapture, LedgerName, file_lengths
from broker.storage.ledger import Ledger
from broker.storage.ledger_check import dump_ledger, verify_ledger
from broker.storage.ledger_files import OpenFiles, cut_ledger
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim

FOLDER = "ledgers"
NAME = LedgerName(FOLDER, topic_id=3, ledger_id=11, generation=0)


class HeldExecutor(Executor):
    """A file thread that works when told; unless `hold` is set, at once."""

    def __init__(self, *, hold: bool = False) -> None:
        self.hold = hold
        self._calls: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.append((future, lambda: fn(*args, **kwargs)))
        if not self.hold:
            self.work()
        return future

    def work(self) -> None:
        """Make all calls that wait."""
        calls, self._calls = self._calls, []
        for future, call in calls:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)

    @property
    def waiting_count(self) -> int:
        return len(self._calls)


class Book:
    """A ledger beside the plainest model of one: lists of times, rows and frames."""

    def __init__(
        self,
        vfs: Vfs,
        folder: str = FOLDER,
        *,
        executor: Executor | None = None,
        read_executor: Executor | None = None,
        open_ledgers: int = 256,
    ) -> None:
        self.vfs = vfs
        self.executor = executor or HeldExecutor()
        self.read_executor = read_executor or HeldExecutor()
        self.open_files = OpenFiles(vfs, open_ledgers)
        self.name = NAME._replace(folder=folder)
        self.ledger = Ledger(self.name, self.open_files, self.executor, self.read_executor)
        self.times: list[int] = []
        self.rows: list[tuple[int, ...]] = []
        self.frames: list[bytes] = []
        self._random = random.Random(5)

    def append(self, count: int, *, size: int | None = None) -> None:
        times, rows, frames = batch_of(self._random, count, self.ledger.data_bytes, size)
        self.ledger.append(self.ledger.entry_count, times, rows, b"".join(frames))
        self.times += times.tolist()
        self.rows += rows.tolist()
        self.frames += frames

    def reopen(self, capture: LedgerCapture, vfs: Vfs | None = None) -> None:
        """What a restart does with the ledger that a manifest names."""
        self.vfs = vfs or self.vfs
        self.open_files = OpenFiles(self.vfs)
        cut_ledger(self.vfs, self.name.folder, capture)
        self.ledger = Ledger.restore(
            capture, self.name.folder, self.open_files, self.executor, self.read_executor
        )
        for column in (self.times, self.rows, self.frames):
            del column[capture.entry_count :]

    async def check(self, *entry_ids: int) -> None:
        """Read some entries, by default all, in every way, and compare."""
        wanted = ids(entry_ids or range(len(self.frames)))
        self.compare(await self.ledger.read(wanted), wanted.tolist())
        assert (await self.ledger.times_of(wanted)).tolist() == [self.times[i] for i in wanted.tolist()]
        if len(wanted):
            first, end = int(wanted[0]), int(wanted[-1]) + 1
            assert (await self.ledger.read_times(first, end - first)).tolist() == self.times[first:end]
            assert (await self.ledger.read_rows(first, end - first)).tolist() == self.rows[first:end]

    def compare(self, entries: EntryColumns, wanted: Sequence[int]) -> None:
        assert entries.ledger_id == NAME.ledger_id
        assert entries.entry_ids.tolist() == list(wanted)
        assert entries.times.dtype == np.int64
        assert entries.times.tolist() == [self.times[i] for i in wanted]
        assert entries.rows.dtype == ROW
        assert entries.rows.tolist() == [self.rows[i] for i in wanted]
        assert entries.frames == [self.frames[i] for i in wanted]


def batch_of(
    rng: random.Random, count: int, offset: int, size: int | None = None
) -> tuple[Int64Column, RowColumn, list[bytes]]:
    frames = []
    for _ in range(count):
        length = rng.randrange(100) if size is None else size
        frames.append(b"\x12" + bytes([length]) + rng.randbytes(length))
    times = np.array(
        [rng.choice([0, 1_800_000_000_000 + rng.randrange(1000)]) for _ in range(count)], np.int64
    )
    rows = np.zeros(count, ROW)
    rows["publish_time_ms"] = 1_700_000_000_000 + np.arange(count)
    rows["length"] = list(map(len, frames))
    rows["offset"] = offset + np.cumsum(rows["length"]) - rows["length"]
    rows["crc"] = list(map(google_crc32c.value, frames))
    rows["flags"] = np.where(times > 0, FLAG_DELAYED, 0)
    return times, rows, frames


def ids(entry_ids: Sequence[int]) -> UInt32Column:
    return np.array(entry_ids, np.uint32)


def new_vfs() -> MemVfs:
    vfs = MemVfs()
    vfs.make_dir(FOLDER)
    vfs.sync_dir(".")
    return vfs


def flip_byte(vfs: Vfs, path: str, offset: int) -> None:
    file = vfs.open(path)
    file.pwrite([bytes([file.pread(1, offset)[0] ^ 0x40])], offset)
    file.close()


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def persisted(*counts: int, sealed: bool = False) -> tuple[Book, LedgerCapture]:
    book = Book(new_vfs())
    for count in counts:
        book.append(count)
    if sealed:
        book.ledger.seal()
    capture = book.ledger.capture()
    await book.ledger.persist(capture)
    book.vfs.sync_dir(FOLDER)
    return book, capture


# Appending, flushing, reading.


async def test_entries_are_read_from_the_tail_the_files_and_across_both(tmp_path: Path) -> None:
    book = Book(LocalVfs(), str(tmp_path))
    for count in (700, 1, 50):
        book.append(count)
    await book.check()
    assert book.vfs.list_dir(str(tmp_path)) == []  # nothing was written for it
    await book.ledger.flush()
    await book.check()
    book.append(200)
    book.append(300)
    await book.check()
    for wanted in ([0], [750, 751], [749, 751, 760], [951, 1250], [3, 5, 1000], list(range(600, 1000))):
        await book.check(*wanted)
    await book.ledger.flush()
    await book.check()
    assert book.ledger.unwritten_bytes == 0
    book.open_files.close()


async def test_nothing_is_read_for_no_ids() -> None:
    book = Book(new_vfs())
    for _ in range(2):
        await book.check()
        assert (await book.ledger.read_times(len(book.times), 0)).tolist() == []
        book.append(3)
        await book.ledger.flush()
        entries = await book.ledger.read(ids([]))
        assert (entries.frames, len(entries.rows), len(entries.times)) == ([], 0, 0)


async def test_frames_of_one_length_are_cut_right() -> None:
    book = Book(new_vfs())
    book.append(100, size=50)
    book.append(100, size=50)
    book.append(100, size=51)
    await book.check()
    await book.ledger.flush()
    await book.check()
    await book.check(*range(0, 300, 2))
    await book.check(*range(20, 60))


async def test_entries_far_apart_in_large_files_are_found() -> None:
    book = Book(new_vfs())
    for _ in range(5):
        book.append(3000)
    await book.ledger.flush()
    await book.check(0, 1, 2, 900, 4095, 4096, 8000, 8001, 14_999)
    await book.check(*sorted(random.Random(1).sample(range(15_000), 500)))
    await book.check(*range(4000, 9000))


async def test_times_nowait_answers_only_from_memory() -> None:
    book = Book(new_vfs())
    book.append(10)
    times = book.ledger.times_nowait(2, 5)
    assert times is not None
    assert times.tolist() == book.times[2:7]
    await book.ledger.flush()
    book.append(4)
    assert book.ledger.times_nowait(9, 2) is None
    assert book.ledger.times_nowait(10, 0) is not None
    times = book.ledger.times_nowait(10, 4)
    assert times is not None
    assert times.tolist() == book.times[10:]


async def test_sizes_are_told() -> None:
    book = Book(new_vfs())
    book.append(10)
    data_bytes = len(b"".join(book.frames))
    assert book.ledger.data_bytes == data_bytes
    assert book.ledger.unwritten_bytes == data_bytes + 10 * (8 + ROW.itemsize)
    assert book.ledger.memory_bytes >= book.ledger.unwritten_bytes
    await book.ledger.flush()
    stats = book.ledger.stats()
    assert (stats.entry_count, stats.written_count, stats.synced_count) == (10, 10, 0)
    assert stats.unwritten_bytes == 0
    await book.ledger.persist(book.ledger.capture())
    assert book.ledger.stats().synced_count == 10


def test_a_batch_that_does_not_follow_is_our_own_mistake() -> None:
    book = Book(new_vfs())
    book.append(5)
    times, rows, frames = batch_of(random.Random(1), 2, book.ledger.data_bytes)
    data = b"".join(frames)
    _, shifted, _ = batch_of(random.Random(1), 2, book.ledger.data_bytes + 1)
    bad: list[tuple[int, Int64Column, RowColumn, bytes]] = [
        (4, times, rows, data),
        (5, times[:1], rows, data),
        (5, times[:0], rows[:0], b""),
        (5, times, shifted, data),
        (5, times, rows, data + b"x"),
        (5, times.astype(np.int32), rows, data),
    ]
    for batch in bad:
        with pytest.raises(AssertionError):
            book.ledger.append(*batch)
    book.ledger.seal()
    with pytest.raises(AssertionError):
        book.ledger.append(5, times, rows, data)
    assert book.ledger.entry_count == 5


def test_columns_cannot_be_changed_once_appended() -> None:
    ledger = Book(new_vfs()).ledger
    times, rows, frames = batch_of(random.Random(1), 2, 0)
    ledger.append(0, times, rows, b"".join(frames))
    for column in (times, rows):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = column[1]


async def test_l1_nothing_is_lost_when_a_flush_drops_batches_during_a_read() -> None:
    file_thread, read_thread = HeldExecutor(hold=True), HeldExecutor(hold=True)
    book = Book(new_vfs(), executor=file_thread, read_executor=read_thread)
    book.append(10)
    flush = asyncio.create_task(book.ledger.flush())
    await turns()
    file_thread.work()
    await flush
    book.append(10)
    book.append(10)
    flush = asyncio.create_task(book.ledger.flush())
    reads = [
        asyncio.create_task(book.ledger.read(ids(wanted))) for wanted in (range(30), [3, 12, 29], [11, 25])
    ]
    await turns()
    assert book.ledger.stats().written_count == 10  # the reads were decided before the write returned
    file_thread.work()
    await flush
    assert book.ledger.stats().unwritten_bytes == 0
    read_thread.work()
    for read, wanted in zip(reads, (range(30), [3, 12, 29], [11, 25]), strict=True):
        book.compare(await read, list(wanted))


async def test_l3_at_most_one_write_is_in_flight() -> None:
    file_thread = HeldExecutor(hold=True)
    book = Book(new_vfs(), executor=file_thread)
    book.append(10)
    first = asyncio.create_task(book.ledger.flush())
    await turns()
    book.append(10)
    second, third = asyncio.create_task(book.ledger.flush()), asyncio.create_task(book.ledger.flush())
    await turns()
    assert file_thread.waiting_count == 1
    file_thread.work()
    await first
    assert not second.done()
    await turns()
    assert file_thread.waiting_count == 1
    file_thread.work()
    await asyncio.gather(second, third)
    assert file_thread.waiting_count == 0
    await book.check()


async def test_a_flush_that_begins_between_the_end_of_a_write_and_its_callback_comes_to_an_end() -> None:
    # It once span for ever: awaiting a future that is done does not suspend, so the callback never ran. Its family
    # is found by running a second caller at every turn of the loop that a first one takes.
    for turn in range(8):
        book = Book(new_vfs())
        book.append(3)
        first = asyncio.create_task(book.ledger.flush())
        await turns(turn)
        book.append(2)
        async with asyncio.timeout(5):
            await book.ledger.flush()
            await first
        assert book.ledger.unwritten_bytes == 0


async def test_a_cancelled_flush_takes_nothing_back() -> None:
    file_thread = HeldExecutor(hold=True)
    book = Book(new_vfs(), executor=file_thread)
    book.append(10)
    flush = asyncio.create_task(book.ledger.flush())
    await turns()
    flush.cancel()
    await turns()
    assert flush.cancelled()
    again = asyncio.create_task(book.ledger.flush())
    await turns()
    assert file_thread.waiting_count == 1  # it waits for the first write, and starts none beside it
    file_thread.work()
    await again
    await book.check()


@pytest.mark.parametrize("kind", ["create", "write"])
@pytest.mark.parametrize("nth", [1, 2, 3])
async def test_l5_a_failed_write_leaves_the_ledger_as_it_was_and_is_not_retried(kind: str, nth: int) -> None:
    vfs = new_vfs()
    book = Book(vfs)
    book.append(10)
    fault = vfs.faults.add(Fault(kind, nth=nth))
    with pytest.raises(StorageFailed):
        await book.ledger.flush()
    assert fault.hit_count == 1
    assert book.ledger.stats().failed
    assert book.ledger.stats().written_count == 0
    op_count = vfs.op_count
    with pytest.raises(StorageFailed):
        await book.ledger.flush()
    with pytest.raises(StorageFailed):
        await book.ledger.persist(book.ledger.capture())
    assert vfs.op_count == op_count
    book.append(5)
    await book.check()


async def test_l5_a_failed_sync_is_never_retried() -> None:
    vfs = new_vfs()
    book = Book(vfs)
    book.append(10)
    vfs.faults.add(Fault("sync", nth=2))
    for _ in range(2):
        with pytest.raises(StorageFailed):
            await book.ledger.persist(book.ledger.capture())
    assert book.ledger.stats().synced_count == 0
    await book.check()


async def test_a_read_that_the_disk_refuses_can_be_tried_again() -> None:
    book, _ = await persisted(10)
    assert isinstance(book.vfs, MemVfs)
    book.vfs.faults.add(Fault("read"))
    with pytest.raises(Unavailable):
        await book.check()
    await book.check()


# What a restart finds.


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("counts", [(1,), (1000, 1000), (BLOCK_ROWS,), (5000, 4000)])
async def test_a_restored_ledger_holds_what_was_captured(counts: tuple[int, ...], sealed: bool) -> None:
    book, capture = await persisted(*counts, sealed=sealed)
    assert bool(capture.times_crcs) is not sealed  # a sealed one carries its own
    book.reopen(capture)
    await book.check(*range(0, len(book.frames), 3))
    await book.check()
    assert book.ledger.capture() == capture


async def test_f2_a_restored_partial_block_is_continued_and_still_verified() -> None:
    book, capture = await persisted(3000)
    book.reopen(capture)
    book.append(3000)
    await book.ledger.flush()
    await book.check()
    book.ledger.seal()
    capture = book.ledger.capture()
    await book.ledger.persist(capture)
    book.reopen(capture)
    await book.check()
    assert verify_ledger(book.vfs, FOLDER, capture) == []


async def test_what_was_written_after_the_capture_is_cut_off() -> None:
    book, capture = await persisted(3000)
    book.append(2000)
    book.ledger.seal()
    await book.ledger.persist(book.ledger.capture())  # a footer too, but no manifest names it
    book.reopen(capture)
    sizes = {kind: book.vfs.open(book.name.path(kind)).size() for kind in KINDS}
    assert sizes == file_lengths(capture)
    await book.check()
    book.append(100)
    await book.ledger.flush()
    await book.check()


async def test_a_capture_before_the_seal_writes_no_footer() -> None:
    book = Book(new_vfs())
    book.append(10)
    capture = book.ledger.capture()
    book.ledger.seal()
    await book.ledger.persist(capture)
    file = book.vfs.open(book.name.path("times"))
    assert file.size() == HEADER_BYTES + 80
    await book.ledger.persist(book.ledger.capture())
    assert file.size() == HEADER_BYTES + 80 + 4 + 24
    assert isinstance(book.vfs, MemVfs)
    op_count = book.vfs.op_count
    await book.ledger.persist(book.ledger.capture())
    assert book.vfs.op_count == op_count  # all of it is on disk already


@pytest.mark.parametrize("sealed", [False, True])
async def test_an_empty_ledger_has_no_files(sealed: bool) -> None:
    book, capture = await persisted(sealed=sealed)
    assert book.vfs.list_dir(FOLDER) == []
    book.reopen(capture)
    await book.check()
    assert book.ledger.capture() == capture


async def test_files_of_a_ledger_named_empty_are_made_anew() -> None:
    book = Book(new_vfs())
    capture = book.ledger.capture()
    book.append(10)
    await book.ledger.flush()
    book.reopen(capture)
    assert book.vfs.list_dir(FOLDER) == []
    book.append(3)
    await book.ledger.flush()
    await book.check()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_missing_or_short_file_is_damage(kind: str) -> None:
    book, capture = await persisted(10)
    path = book.name.path(kind)
    file = book.vfs.open(path)
    file.truncate(file.size() - 1)
    with pytest.raises(Corrupt) as short:
        cut_ledger(book.vfs, FOLDER, capture)
    assert (short.value.path, short.value.offset) == (path, file.size())
    assert short.value.advice
    book.vfs.remove(path)
    with pytest.raises(Corrupt) as missing:
        cut_ledger(book.vfs, FOLDER, capture)
    assert missing.value.path == path
    assert missing.value.advice


async def test_a_persisted_capture_survives_every_crash_after_it() -> None:
    book = Book(new_vfs())
    vfs = book.vfs
    assert isinstance(vfs, MemVfs)
    captures = []
    for count in (20, 5, 0):
        if count:
            book.append(count)
        else:
            book.ledger.seal()
        capture = book.ledger.capture()
        await book.ledger.persist(capture)
        vfs.sync_dir(FOLDER)
        captures.append((vfs.op_count, capture))
        if count:
            book.append(7)
            await book.ledger.flush()
    for owed_from, capture in captures:
        for state in vfs.crash_states(first=owed_from, policies=tuple(CrashPolicy), seeds=(0, 1)):
            after = Book(state.vfs)
            after.times, after.rows, after.frames = list(book.times), list(book.rows), list(book.frames)
            after.reopen(capture)
            await after.check()
            assert verify_ledger(state.vfs, FOLDER, capture) == []


# Damage.


def offset_in(kind: str, capture: LedgerCapture) -> int:
    """A place in the middle of a file's content."""
    return (
        HEADER_BYTES + {"data": capture.data_bytes // 2, "times": 8 * 4500 + 3, "rows": 44 * 4500 + 7}[kind]
    )


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_f3_a_changed_byte_is_found_when_it_is_read(kind: str, sealed: bool) -> None:
    book, capture = await persisted(5000, sealed=sealed)
    book.reopen(capture)
    flip_byte(book.vfs, book.name.path(kind), offset_in(kind, capture))
    for wanted in (range(5000), range(0, 5000, 7)):
        if kind == "data" and wanted.step != 1:
            continue  # the damaged message may not be among them
        with pytest.raises(Corrupt) as damage:
            await book.ledger.read(ids(wanted))
        assert damage.value.path == book.name.path(kind)
        assert damage.value.offset >= HEADER_BYTES
    assert [problem.path for problem in verify_ledger(book.vfs, FOLDER, capture)] == [book.name.path(kind)]


async def test_f3_a_damaged_message_is_named_by_its_place() -> None:
    book, _ = await persisted(100)
    offset = HEADER_BYTES + book.rows[42][3]
    flip_byte(book.vfs, book.name.path("data"), offset + 1)
    for wanted in ([42], [1, 42, 99], range(100)):
        with pytest.raises(Corrupt) as damage:
            await book.ledger.read(ids(wanted))
        assert (damage.value.path, damage.value.offset) == (book.name.path("data"), offset)
    await book.check(*range(42))
    await book.check(41, 43)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_changed_header_is_found_when_the_file_is_opened(kind: str) -> None:
    book, capture = await persisted(10)
    book.reopen(capture)
    flip_byte(book.vfs, book.name.path(kind), 17)
    with pytest.raises(Corrupt) as damage:
        await book.ledger.read_times(0, 1)
    assert (damage.value.path, damage.value.offset) == (book.name.path(kind), 0)


@pytest.mark.parametrize("kind", ["times", "rows"])
async def test_a_changed_footer_is_found_when_it_is_needed(kind: str) -> None:
    book, capture = await persisted(10, sealed=True)
    book.reopen(capture)
    path = book.name.path(kind)
    flip_byte(book.vfs, path, book.vfs.open(path).size() - 20)
    with pytest.raises(Corrupt) as damage:
        await book.ledger.read(ids(range(10)))
    assert damage.value.path == path
    assert [problem.path for problem in verify_ledger(book.vfs, FOLDER, capture)] == [path]


async def test_a_file_of_another_ledger_is_refused() -> None:
    book, capture = await persisted(10)
    other = book.name._replace(ledger_id=12)
    for kind in KINDS:
        book.vfs.rename(book.name.path(kind), other.path(kind))
    with pytest.raises(Corrupt):
        cut_ledger(book.vfs, FOLDER, dataclasses.replace(capture, ledger_id=12))


async def test_rows_that_point_outside_the_data_are_refused_before_anything_is_allocated() -> None:
    book, _ = await persisted(10)
    # The last row of a file that this process wrote: no block checksum is looked at again.
    file = book.vfs.open(book.name.path("rows"))
    file.pwrite([b"\xff\xff\xff\x7f"], HEADER_BYTES + 9 * ROW.itemsize + 28)
    with pytest.raises(Corrupt) as damage:
        await book.ledger.read(ids([9]))
    assert damage.value.path == book.name.path("rows")


async def test_a_file_that_lost_its_end_is_found() -> None:
    book, capture = await persisted(10)
    book.vfs.open(book.name.path("data")).truncate(HEADER_BYTES + capture.data_bytes - 1)
    await book.check(*range(9))
    with pytest.raises(Corrupt):
        await book.ledger.read(ids([9]))


async def test_verify_finds_what_no_checksum_covers() -> None:
    book = Book(new_vfs())
    times, rows, frames = batch_of(random.Random(2), 10, 0)
    rows["flags"][3] ^= FLAG_DELAYED
    rows["offset"][5] += 1
    book.ledger.append(0, times, rows, b"".join(frames))
    capture = book.ledger.capture()
    await book.ledger.persist(capture)
    found = verify_ledger(book.vfs, FOLDER, capture)
    assert [(problem.offset - HEADER_BYTES) // ROW.itemsize for problem in found] == [3, 5, 6]
    assert len(verify_ledger(book.vfs, FOLDER, capture, problems_max=2)) == 2


async def test_verify_goes_on_after_a_damaged_block() -> None:
    book, capture = await persisted(9000)
    flip_byte(book.vfs, book.name.path("rows"), HEADER_BYTES + 5)
    flip_byte(book.vfs, book.name.path("data"), HEADER_BYTES + book.rows[8999][3])
    flip_byte(book.vfs, book.name.path("times"), HEADER_BYTES + 8 * 8500)
    paths = sorted(problem.path for problem in verify_ledger(book.vfs, FOLDER, capture))
    assert paths == sorted(map(book.name.path, KINDS))
    book.vfs.remove(book.name.path("rows"))
    assert book.name.path("rows") in [each.path for each in verify_ledger(book.vfs, FOLDER, capture)]


# Open files, deletion, dump.


async def test_f4_at_most_so_many_ledgers_have_open_files() -> None:
    vfs = new_vfs()
    open_files = OpenFiles(vfs, limit=2)
    thread = HeldExecutor()
    ledgers = [Ledger(NAME._replace(ledger_id=number), open_files, thread) for number in range(1, 6)]
    for ledger in ledgers:
        times, rows, frames = batch_of(random.Random(1), 3, 0)
        ledger.append(0, times, rows, b"".join(frames))
        await ledger.flush()
        assert len(open_files) <= 2
    for ledger in [*ledgers, *ledgers]:
        assert (await ledger.read(ids([0, 1, 2]))).frames == frames
        assert len(open_files) == 2


async def test_f4_files_in_use_are_not_closed() -> None:
    book, _ = await persisted(5)
    open_files = OpenFiles(book.vfs, limit=1)
    pinned = open_files.pin(book.name)
    other = Ledger(NAME._replace(ledger_id=12), open_files, HeldExecutor())
    times, rows, frames = batch_of(random.Random(1), 3, 0)
    other.append(0, times, rows, b"".join(frames))
    await other.flush()
    assert pinned.times.size() == HEADER_BYTES + 40
    open_files.discard(book.name)
    open_files.close()
    assert pinned.times.size() == HEADER_BYTES + 40
    open_files.unpin(pinned)
    with pytest.raises((OSError, ValueError)):
        pinned.times.size()
    assert len(open_files) == 0


async def test_f4_threads_that_share_few_open_files_read_what_was_written(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as file_thread, ThreadPoolExecutor(3) as read_threads:
        open_files = OpenFiles(LocalVfs(), limit=1)
        books = []
        for number in range(4):
            book = Book(LocalVfs(), str(tmp_path))
            name = book.name._replace(ledger_id=number)
            book.ledger = Ledger(name, open_files, file_thread, read_threads)
            books.append(book)

        async def work(book: Book) -> None:
            for _ in range(10):
                book.append(50)
                flush = asyncio.create_task(book.ledger.flush())
                entries = await book.ledger.read(ids(range(0, len(book.frames), 3)))
                assert entries.frames == book.frames[::3]
                await flush

        await asyncio.gather(*(work(book) for book in books))
        assert len(open_files) == 1
        open_files.close()


async def test_a_deleted_ledger_is_gone() -> None:
    book, _ = await persisted(5)
    book.ledger.delete(book.vfs)
    assert book.vfs.list_dir(FOLDER) == []
    with pytest.raises(NotFound):
        await book.ledger.read(ids([1]))
    book.ledger.delete(book.vfs)  # a second time does no harm


@pytest.mark.parametrize("sealed", [False, True])
async def test_dump_prints_every_row_frame_and_footer(sealed: bool) -> None:
    book, capture = await persisted(20, sealed=sealed)
    lines = {kind: list(dump_ledger(book.vfs, book.name.path(kind))) for kind in KINDS}
    json.dumps(lines)
    assert all(lines[kind][0]["ledger_id"] == 11 for kind in KINDS)
    frames = lines["data"][1:]
    assert [line["crc"] for line in frames] == [row[5] for row in book.rows]
    assert [line["offset"] for line in frames] == [row[3] for row in book.rows]
    assert [line["deliver_at_ms"] for line in lines["times"][1:21]] == book.times
    assert [line["crc"] for line in lines["rows"][1:21]] == [row[5] for row in book.rows]
    assert [line["line"] for line in lines["rows"][21:]] == (["footer"] if sealed else [])
    file = book.vfs.open(book.name.path("data"))
    file.truncate(file.size() - 1)
    assert list(dump_ledger(book.vfs, book.name.path("data")))[-1]["line"] == "rest"
    assert capture.entry_count == 20


# Random histories.


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.data())
def test_any_order_of_appends_flushes_reads_and_restarts_reads_what_was_appended(
    seed: int, data: st.DataObject
) -> None:
    steps = data.draw(
        st.lists(
            st.sampled_from(["append", "append", "flush", "read", "scatter", "persist", "restart"]),
            max_size=40,
        )
    )

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        rng = random.Random(seed)
        book = Book(new_vfs(), executor=HeldExecutor(), read_executor=HeldExecutor(), open_ledgers=1)
        tasks: list[asyncio.Task[None]] = []
        captured = book.ledger.capture()

        async def persist() -> None:
            nonlocal captured
            capture = book.ledger.capture()
            await book.ledger.persist(capture)
            if capture.entry_count >= captured.entry_count:
                captured = capture

        for step in steps:
            count = len(book.frames)
            if step == "append":
                book.append(rng.choice([1, 2, 30, 1500]), size=rng.choice([None, 60]))
            elif step == "flush":
                tasks.append(loop.create_task(book.ledger.flush()))
            elif step == "persist":
                tasks.append(loop.create_task(persist()))
            elif step == "restart":
                await asyncio.gather(*tasks)
                tasks.clear()
                book.reopen(captured)
            elif count and step == "read":
                first = rng.randrange(count)
                end = rng.randint(first + 1, count)
                tasks.append(loop.create_task(book.check(*range(first, end))))
            elif count:
                wanted = sorted(rng.sample(range(count), rng.randint(1, min(count, 200))))
                tasks.append(loop.create_task(book.check(*wanted)))
            await asyncio.sleep(rng.choice([0, 0, 0.001, 0.01]))
        await asyncio.gather(*tasks)
        await book.check()

    run_sim(scenario, seed)
