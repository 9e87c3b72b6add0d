"""A ledger: its unwritten tail, its files, how many of them are open, and random histories."""

from __future__ import annotations

import asyncio
import errno
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import Corrupt, NotFound, StorageFailed, Unavailable
from broker.model import ROW, Int64Column, RowColumn
from broker.runtime.vfs import LocalVfs, WriteFailed
from broker.storage import ledger_reads
from broker.storage.blocks import HEADER_BYTES, KINDS
from broker.storage.ledger import Ledger
from broker.storage.ledger_check import dump_ledger
from broker.storage.ledger_files import OpenFiles, ReadAccess
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.depth import at_depth
from tests.unit.storage.held_executor import HeldExecutor
from tests.unit.storage.ledger_book import (
    FOLDER,
    NAME,
    Book,
    batch_of,
    ids,
    new_vfs,
    persisted,
    turns,
)

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


@pytest.mark.slow
async def test_entries_far_apart_in_large_files_are_found() -> None:
    book = Book(new_vfs())
    for _ in range(5):
        book.append(3000)
    await book.ledger.flush()
    await book.check(0, 1, 2, 900, 4095, 4096, 8000, 8001, 14_999)
    await book.check(*sorted(random.Random(1).sample(range(15_000), 500)))
    await book.check(*range(4000, 9000))


@pytest.mark.parametrize("few", [0, 1, 16])
async def test_few_entries_read_one_by_one_are_those_that_are_read_together(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_reads, "FEW_READS", few)
    book = Book(new_vfs())
    book.append(200)
    book.append(200, size=50)
    await book.ledger.flush()
    rng = random.Random(3)
    for count in (1, 2, 3, 8, 16, 17):
        await book.check(*sorted(rng.sample(range(400), count)))
        await book.check(*range(150, 150 + count))
    entry_ids = ids([3, 200, 210])
    found = await book.ledger.read(entry_ids, 60)
    assert found.frames == book.frames[3:4]
    handles = book.open_files.pin(book.name)
    rows = found.rows.copy()
    for name, wrong in (("crc", rows["crc"][1] ^ 1), ("offset", 1 << 30), ("offset", 0)):
        damaged = rows.copy()
        damaged[name][1] = wrong
        with pytest.raises(Corrupt):
            ledger_reads.read_frames(handles.for_reading(), damaged, book.ledger.data_bytes)
    book.open_files.unpin(handles)


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


async def test_ledger_1_nothing_is_lost_when_a_flush_drops_batches_during_a_read() -> None:
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


async def test_ledger_3_at_most_one_write_is_in_flight() -> None:
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


@pytest.mark.parametrize("nth", [1, 2, 3])
async def test_files_that_could_not_be_made_are_made_by_the_next_attempt(nth: int) -> None:
    vfs = new_vfs()
    book = Book(vfs)
    book.append(10)
    vfs.faults.add(Fault("create", nth=nth, error=errno.EMFILE))
    with pytest.raises(OSError, match="Too many open files") as refusal:
        await book.ledger.flush()
    assert not isinstance(refusal.value, WriteFailed)
    assert not book.ledger.stats().failed
    assert vfs.snapshot() == {}, "what was made is in the way of the next attempt"
    await book.check()
    await book.ledger.persist(book.ledger.capture())
    assert book.ledger.stats().synced_count == 10
    await book.check()


@pytest.mark.parametrize("kind", ["write"])
@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5, 6])
async def test_ledger_5_a_failed_write_leaves_the_ledger_as_it_was_and_is_not_retried(
    kind: str, nth: int
) -> None:
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


async def test_ledger_5_a_failed_sync_is_never_retried() -> None:
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


# Open files, deletion, dump.


async def test_files_4_at_most_so_many_ledgers_have_open_files() -> None:
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


async def test_files_4_files_in_use_are_not_closed() -> None:
    book, _ = await persisted(5)
    open_files = OpenFiles(book.vfs, limit=1)
    pinned = open_files.pin(book.name)
    assert open_files.pin(book.name) is pinned
    other = Ledger(NAME._replace(ledger_id=12), open_files, HeldExecutor())
    times, rows, frames = batch_of(random.Random(1), 3, 0)
    other.append(0, times, rows, b"".join(frames))
    await other.flush()
    assert pinned.times.size() == HEADER_BYTES + 40
    open_files.discard(book.name)
    open_files.close()
    open_files.unpin(pinned)
    assert pinned.times.size() == HEADER_BYTES + 40, "the other one still reads"
    open_files.unpin(pinned)
    with pytest.raises((OSError, ValueError)):
        pinned.times.size()
    assert len(open_files) == 0


@pytest.mark.slow
async def test_files_4_threads_that_share_few_open_files_read_what_was_written(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("nth", [2, 3])
async def test_files_4_what_was_opened_before_a_file_that_cannot_be_is_closed(nth: int) -> None:
    book, _ = await persisted(5)
    vfs, opened = book.vfs, list[Any]()
    assert isinstance(vfs, MemVfs)
    open_file = vfs.open

    def open_and_note(path: str, *, create: bool = False) -> Any:
        opened.append(open_file(path, create=create))
        return opened[-1]

    vfs.open = open_and_note  # type: ignore[method-assign]
    vfs.faults.add(Fault("open", nth=nth, error=errno.EMFILE))
    with pytest.raises(OSError, match="Too many open files"):
        OpenFiles(vfs).pin(book.name)
    assert len(opened) == nth - 1
    assert all(file._closed for file in opened)


async def test_files_4_a_read_that_began_before_a_deletion_leaves_no_file_open() -> None:
    book, _ = await persisted(5)
    open_files, remove = OpenFiles(book.vfs), book.vfs.remove

    def read_then_remove(path: str) -> None:
        if path.endswith(".data"):  # the first; a reader had looked before the ledger was called deleted
            open_files.unpin(open_files.pin(book.name))
        remove(path)

    book.vfs.remove = read_then_remove  # type: ignore[method-assign]
    ReadAccess(open_files, book.name).delete(book.vfs)
    assert len(open_files) == 0


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


@pytest.mark.slow
@settings(max_examples=at_depth(fast=10, change=60, deep=600))
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
