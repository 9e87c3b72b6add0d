"""A ledger: what a restart finds, and what damage does to a read."""

from __future__ import annotations

import dataclasses
import random

import pytest

from broker.errors import Corrupt
from broker.model import FLAG_DELAYED, ROW
from broker.storage.blocks import BLOCK_ROWS, HEADER_BYTES, KINDS, LedgerCapture, file_lengths
from broker.storage.ledger_check import verify_ledger
from broker.storage.ledger_files import cut_ledger
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from tests.unit.storage.ledger_book import (
    FOLDER,
    Book,
    batch_of,
    flip_byte,
    ids,
    new_vfs,
    persisted,
)

# What a restart finds.


@pytest.mark.slow
@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("counts", [(1,), (1000, 1000), (BLOCK_ROWS,), (5000, 4000)])
async def test_a_restored_ledger_holds_what_was_captured(counts: tuple[int, ...], sealed: bool) -> None:
    book, capture = await persisted(*counts, sealed=sealed)
    assert bool(capture.times_crcs) is not sealed  # a sealed one carries its own
    book.reopen(capture)
    await book.check(*range(0, len(book.frames), 3))
    await book.check()
    assert book.ledger.capture() == capture


@pytest.mark.slow
async def test_files_2_a_restored_partial_block_is_continued_and_still_verified() -> None:
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_files_3_a_changed_byte_is_found_when_it_is_read(kind: str, sealed: bool) -> None:
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


async def test_files_3_a_damaged_message_is_named_by_its_place() -> None:
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
