"""Packed rows: they are unpacked as they were, in every way to read them, and what is damaged is found."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import Corrupt
from broker.model import FLAG_DELAYED, ROW, RowColumn
from broker.storage.blocks import BLOCK_ROWS, HEADER_BYTES, KINDS, LedgerCapture, file_lengths
from broker.storage.dump import dump_file
from broker.storage.ledger_check import verify_ledger
from broker.storage.packed_rows import (
    PackedColumn,
    encode_end,
    end_bytes,
    pack_block,
    peek_packed,
    unpack_block,
)
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from tests.depth import at_depth, sampled
from tests.unit.storage.ledger_book import FOLDER, Book, flip_byte, ids, persisted
from tests.unit.storage.packed_book import pack
from tests.unit.storage.sparse_book import opened, rewrite
from tests.unit.storage.test_sparse import check_reads

FIELDS = ROW.names or ()
NUMBERS = {name: st.integers(0, (1 << (8 * ROW[name].itemsize)) - 1) for name in FIELDS}


def rows_of(count: int, **fields: object) -> RowColumn:
    """Rows of messages of one length that came in batches."""
    rows = np.zeros(count, ROW)
    rng = np.random.default_rng(count)
    rows["publish_time_ms"] = 1_790_000_000_000 + np.arange(count) // 100
    rows["crc"] = rng.integers(0, 1 << 32, count, np.uint64)
    rows["flags"] = FLAG_DELAYED
    rows["length"] = 110
    for name, value in fields.items():
        rows[name] = value
    rows["offset"] = np.cumsum(rows["length"], dtype=np.int64) - rows["length"]
    return rows


class Bytes:
    """A file in memory."""

    path = "ledgers/1.0.packed"

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.reads: list[int] = []

    def size(self) -> int:
        return len(self.content)

    def pread(self, length: int, offset: int) -> bytes:
        self.reads.append(length)
        return self.content[offset : offset + length]

    def pread_nowait(self, length: int, offset: int) -> bytes | None:
        return self.pread(length, offset)

    def read_ahead(self, begins: Sequence[int], ends: Sequence[int]) -> None:
        raise AssertionError("all of it is in memory")


def packed(rows: RowColumn) -> Bytes:
    blocks = [pack_block(rows[at : at + BLOCK_ROWS]) for at in range(0, len(rows), BLOCK_ROWS)]
    directory = b"".join(item for item, _ in blocks)
    return Bytes(
        bytes(HEADER_BYTES) + b"".join(content for _, content in blocks) + encode_end(directory, len(rows))
    )


KINDS_OF_ROWS: dict[str, tuple[float, Callable[[int], RowColumn]]] = {
    "one length": (5, rows_of),
    "some lengths": (
        8,
        lambda count: rows_of(count, length=np.random.default_rng(1).integers(100, 160, count)),
    ),
    "keys": (9, lambda count: rows_of(count, key_hash=np.random.default_rng(2).integers(0, 1 << 32, count))),
    "schedule keys": (
        13,
        lambda count: rows_of(count, schedule_hash=np.random.default_rng(3).integers(0, 1 << 63, count)),
    ),
    "keys in every other block": (
        9,
        lambda count: rows_of(
            count,
            key_hash=np.random.default_rng(2).integers(0, 1 << 32, count)
            * (np.arange(count) // BLOCK_ROWS % 2),
        ),
    ),
    "times to live": (
        9,
        lambda count: rows_of(
            count, expire_at_ms=1_790_000_000_000 + np.random.default_rng(4).integers(0, 1 << 31, count)
        ),
    ),
    "one of all": (
        44,
        lambda count: np.frombuffer(np.random.default_rng(5).bytes(count * ROW.itemsize), ROW),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 70, BLOCK_ROWS, BLOCK_ROWS + 1, 3 * BLOCK_ROWS + 70])
@pytest.mark.parametrize("kind", KINDS_OF_ROWS)
def test_pack_1_every_row_is_read_as_it_was_in_every_way(kind: str, count: int):
    width, make = KINDS_OF_ROWS[kind]
    rows = make(count)
    file = packed(rows)
    if count >= BLOCK_ROWS:
        assert len(file.content) / count < width + 0.1
    column = PackedColumn(count, len(file.content))
    rng = random.Random(count)
    for _ in range(12):
        first = rng.randrange(count)
        length = rng.randint(1, count - first)
        assert column.read(file, first, length).tobytes() == rows[first : first + length].tobytes()
        some = ids(sorted(rng.sample(range(count), rng.randint(1, count))))
        assert column.read_at(file, some).tobytes() == rows[some].tobytes()
        few = some[: rng.randint(1, 20)]
        read = column.read_at(file, few)
        assert read.tobytes() == rows[few].tobytes()
        assert read.dtype == ROW
        assert not read.flags.writeable
    assert len(column.read(file, 0, 0)) == 0
    assert not column.read(file, 0, count).flags.writeable


def test_rows_that_lie_scattered_are_read_one_by_one_and_neighbours_together():
    rows = rows_of(BLOCK_ROWS * 20)
    file = packed(rows)
    column = PackedColumn(len(rows), len(file.content))
    column.read(file, 0, len(rows))
    file.reads.clear()
    some = ids([5 + BLOCK_ROWS * block for block in range(20)] + [BLOCK_ROWS * 19 + 7])
    assert column.read_at(file, some).tobytes() == rows[some].tobytes()
    assert file.reads == [5] * 19 + [15]


@pytest.mark.slow
@given(st.lists(st.tuples(*NUMBERS.values()), min_size=1, max_size=40))
def test_pack_1_whatever_the_rows_are(values: list[tuple[int, ...]]):
    rows = np.array(values, [(name, f"<u{ROW[name].itemsize}") for name in FIELDS]).view(ROW)
    item, content = pack_block(rows)
    assert unpack_block(item, content, len(rows)).tobytes() == rows.tobytes()


def test_one_row_is_one_short_read():
    rows = rows_of(BLOCK_ROWS * 3)
    file = packed(rows)
    column = PackedColumn(len(rows), len(file.content))
    column.read(file, 0, len(rows))
    file.reads.clear()
    assert (
        column.read(file, BLOCK_ROWS + 17, 1).tobytes() == rows[BLOCK_ROWS + 17 : BLOCK_ROWS + 18].tobytes()
    )
    assert file.reads == [5]
    assert column.place(file, BLOCK_ROWS + 17) == HEADER_BYTES + 5 * (BLOCK_ROWS + 17)


@pytest.mark.slow
def test_pack_2_every_byte_behind_the_header_counts():
    rows = rows_of(300, key_hash=np.arange(300))
    whole = packed(rows).content
    for at in sampled(range(HEADER_BYTES, len(whole)), at_depth(change=5, deep=1)):
        for bit in (1, 0x80):
            content = bytearray(whole)
            content[at] ^= bit
            with pytest.raises(Corrupt) as damage:
                PackedColumn(len(rows), len(whole)).read(Bytes(bytes(content)), 0, len(rows))
            assert damage.value.path == Bytes.path


def test_pack_2_a_file_of_another_length_is_refused():
    rows = rows_of(300)
    whole = packed(rows).content
    for length in sampled(range(len(whole)), at_depth(change=9, deep=1)):
        for named in (length, len(whole)):
            with pytest.raises(Corrupt):
                PackedColumn(len(rows), named).read(Bytes(whole[:length]), 0, 1)
    for count in (299, 301, 300 + BLOCK_ROWS):
        with pytest.raises(Corrupt):
            PackedColumn(count, len(whole)).read(Bytes(whole), 0, 1)
    assert peek_packed(whole) == 300
    assert peek_packed(whole[:-1]) is None
    assert end_bytes(300) == 64 + 24


@given(st.binary(max_size=200), st.integers(0, 9_000))
def test_pack_2_any_bytes_give_rows_or_damage(content: bytes, count: int):
    file = Bytes(bytes(HEADER_BYTES) + content)
    with pytest.raises(Corrupt):
        PackedColumn(max(count, 1), file.size()).read(file, 0, 1)


@pytest.mark.parametrize(
    "change", [("widths", 3), ("widths", 8), ("zero", 1)], ids=["width", "wider than a row's", "zero"]
)
def test_pack_2_a_directory_that_contradicts_itself_is_refused(change: tuple[str, int]):
    # A directory whose checksum is right: of a broker with other rules.
    item, content = pack_block(rows_of(10))
    at = {"widths": 44 + 8 + 8, "zero": 61}[change[0]]
    other = bytearray(item)
    other[at] = change[1]
    whole = bytes(HEADER_BYTES) + content + encode_end(bytes(other), 10)
    with pytest.raises(Corrupt, match="contradicts itself"):
        PackedColumn(10, len(whole)).read(Bytes(whole), 0, 1)


# A ledger.


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(1,), (1000, 1000), (BLOCK_ROWS,), (5000, 4000)])
async def test_a_packed_ledger_reads_as_it_did(counts: tuple[int, ...]) -> None:
    book, capture = await persisted(*counts, sealed=True)
    named = pack(book.vfs, FOLDER, capture)
    assert verify_ledger(book.vfs, FOLDER, named) == []
    name = named.name(FOLDER)
    assert file_lengths(named) == {kind: book.vfs.open(name.path(kind)).size() for kind in KINDS}
    book.vfs.remove(capture.name(FOLDER).path("rows"))
    book.ledger = opened(book, named)
    await book.check(*range(0, len(book.frames), 3))
    await book.check()
    assert book.ledger.capture() == named
    lines = list(dump_file(book.vfs, name.path("rows")))
    assert [tuple(line[field] for field in FIELDS) for line in lines[1:-1]] == book.rows
    assert (lines[0]["kind"], lines[-1]["line"]) == ("packed", "directory")


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.02, 0.5, 1.0])
async def test_a_packed_sparse_ledger_reads_as_the_dense_one(part: float) -> None:
    rng = random.Random(int(part * 100))
    count = BLOCK_ROWS + 70
    book, capture = await persisted(count, sealed=True)
    live = sorted(rng.sample(range(count), int(count * part)))
    named = pack(book.vfs, FOLDER, rewrite(book, capture, live))
    assert verify_ledger(book.vfs, FOLDER, named) == []
    await check_reads(book, opened(book, named), live, rng)
    # And is rewritten, into rows that are not packed.
    again = rewrite(book, named, live[::2])
    assert not again.packed_bytes
    await check_reads(book, opened(book, again), live[::2], rng)


async def packed_book(*counts: int) -> tuple[Book, LedgerCapture]:
    book, capture = await persisted(*counts, sealed=True)
    return book, pack(book.vfs, FOLDER, capture)


@pytest.mark.slow
async def test_every_changed_byte_of_the_file_is_found() -> None:
    book, named = await packed_book(300)
    path = named.name(FOLDER).path("rows")
    for at in sampled(range(named.packed_bytes), at_depth(change=7, deep=1)):
        flip_byte(book.vfs, path, at)
        (problem, *_) = verify_ledger(book.vfs, FOLDER, named)
        assert problem.path == path
        with pytest.raises(Corrupt):
            await opened(book, named).read_rows(0, 300)
        flip_byte(book.vfs, path, at)
    assert verify_ledger(book.vfs, FOLDER, named) == []


async def test_pack_3_damage_of_one_block_is_found_by_whoever_reads_it_and_leaves_the_others() -> None:
    book, named = await packed_book(2 * BLOCK_ROWS)
    path = named.name(FOLDER).path("rows")
    place = PackedColumn(named.row_count, named.packed_bytes).place(book.vfs.open(path), BLOCK_ROWS + 9)
    flip_byte(book.vfs, path, place)
    ledger = opened(book, named)
    assert (await ledger.read_rows(0, BLOCK_ROWS)).tolist() == book.rows[:BLOCK_ROWS]
    few, many = ids([3, BLOCK_ROWS + 1]), ids(range(0, 2 * BLOCK_ROWS, 100))
    for read in (ledger.read_rows(BLOCK_ROWS, 1), ledger.read(few), ledger.read(many)):
        with pytest.raises(Corrupt):
            await read
    (problem,) = verify_ledger(book.vfs, FOLDER, named)
    assert problem.path == path


async def test_packing_1_rows_that_are_damaged_are_not_packed() -> None:
    book, capture = await persisted(BLOCK_ROWS + 9, sealed=True)
    flip_byte(book.vfs, capture.name(FOLDER).path("rows"), HEADER_BYTES + 44 * BLOCK_ROWS)
    with pytest.raises(Corrupt):
        pack(book.vfs, FOLDER, capture)


async def test_packing_2_the_file_is_on_disk_when_the_last_step_returns_but_for_its_name() -> None:
    book, named = await packed_book(300)
    assert isinstance(book.vfs, MemVfs)
    book.vfs.sync_dir(FOLDER)  # as the checkpoint does whose manifest names it
    for policy in CrashPolicy:
        crashed = book.vfs.crashed(book.vfs.op_count, policy, random.Random(1))
        assert verify_ledger(crashed, FOLDER, named) == []


async def test_an_attempt_that_was_cut_short_is_no_obstacle() -> None:
    book, capture = await persisted(300, sealed=True)
    path = capture.name(FOLDER)._replace(packed=True).path("rows")
    book.vfs.open(path, create=True).pwrite([b"anything"], 0)
    assert verify_ledger(book.vfs, FOLDER, pack(book.vfs, FOLDER, capture)) == []
