"""A sparse ledger is read as the dense one it was made of, under the same ids; damage is found."""

from __future__ import annotations

import random

import numpy as np
import pytest
from pyroaring import BitMap

from broker.errors import Corrupt
from broker.model import CANCELLED_MS, ids_of
from broker.storage.amendments import NONE
from broker.storage.blocks import BLOCK_ROWS, HEADER_BYTES, KINDS, file_lengths
from broker.storage.dump import dump_file
from broker.storage.ledger import Ledger
from broker.storage.ledger_check import verify_ledger
from broker.storage.ledger_files import OpenFiles
from broker.storage.sparse import (
    absent_of,
    decode_present,
    encode_present,
    find_places,
    peek_present,
    present_between,
)
from broker.storage.sparse_check import examine_generation
from broker.storage.sparse_files import GONE_FRAME
from broker.storage.sparse_writer import (
    GenerationSource,
    live_entries,
    open_source,
    write_generation,
)
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from tests.unit.storage.held_executor import HeldExecutor
from tests.unit.storage.ledger_book import FOLDER, Book, flip_byte, ids
from tests.unit.storage.sparse_book import expected_times, opened, rewrite, sealed_book


async def check_reads(book: Book, ledger: Ledger, live: list[int], rng: random.Random) -> None:
    """Every way to read gives what the dense ledger gives of live entries, and says that the others are gone."""
    count = len(book.frames)
    times = expected_times(book, live)
    kept = set(live)
    assert ledger.entry_count == count
    assert (await ledger.read_times(0, count)).tolist() == times
    for _ in range(20):
        first = rng.randrange(count + 1)
        length = rng.randrange(count - first + 1)
        assert (await ledger.read_times(first, length)).tolist() == times[first : first + length]
        rows = await ledger.read_rows(first, length)
        for index, row in enumerate(rows, first):
            if index in kept:
                expected = book.rows[index]
                assert (row["publish_time_ms"], row["crc"], row["flags"]) == (
                    expected[0],
                    expected[5],
                    expected[7],
                )
            else:
                assert (row["length"], row["crc"], row["flags"], row["expire_at_ms"]) == (0, 0, 0, 0)
        some = sorted(rng.sample(range(count), rng.randrange(count + 1)))
        assert (await ledger.times_of(ids(some))).tolist() == [times[i] for i in some]
        found = await ledger.read(ids(some))
        assert found.times.tolist() == [times[i] for i in some]
        assert found.frames == [book.frames[i] if i in kept else GONE_FRAME for i in some]
        again = await ledger.read(ids(some[:40]))  # perhaps without the thread: the files are open
        assert again.frames == found.frames[:40]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 9, 70, BLOCK_ROWS + 70])
@pytest.mark.parametrize("part", [0.0, 0.02, 0.5, 1.0])
async def test_a_sparse_ledger_reads_as_the_dense_one(count: int, part: float) -> None:
    rng = random.Random(count * 7 + int(part * 100))
    book, capture = await sealed_book(count)
    live = sorted(rng.sample(range(count), int(count * part)))
    generation = rewrite(book, capture, live)
    assert verify_ledger(book.vfs, FOLDER, generation) == []
    assert generation.entry_count == count
    await check_reads(book, opened(book, generation), live, rng)


async def test_a_generation_is_made_of_a_generation() -> None:
    rng = random.Random(3)
    book, capture = await sealed_book(300)
    first = rewrite(book, capture, range(0, 300, 3))
    second = rewrite(book, first, range(0, 300, 30))
    assert second.generation == 2
    assert second.entry_count == 300
    await check_reads(book, opened(book, second), list(range(0, 300, 30)), rng)


async def test_frames_are_read_as_bytes_allow() -> None:
    book, capture = await sealed_book(50)
    generation = rewrite(book, capture, range(0, 50, 2))
    ledger = opened(book, generation)
    found = await ledger.read(ids(range(50)), 400)
    lengths = sum(len(frame) for frame in found.frames if frame != GONE_FRAME)
    assert 0 < len(found.frames) < 50
    assert lengths <= 400
    assert found.frames == [book.frames[i] if i % 2 == 0 else GONE_FRAME for i in range(len(found.frames))]


async def test_amendments_are_folded_in() -> None:
    book, capture = await sealed_book(40)
    delayed = [i for i, time in enumerate(book.times) if time]
    moved, cancelled, moved_cancelled = delayed[:2], delayed[2], delayed[3]
    ids_moved = ids([*moved, moved_cancelled])
    amendments = NONE.move(ids_moved, np.array([111, 1 << 52, 7]), 9).cancel(
        BitMap([cancelled, moved_cancelled])
    )
    with open_source(book.vfs, FOLDER, capture, amendments) as source:
        live = live_entries(source, BitMap(range(40)), 1_000)
    assert moved[1] in live  # due long after now
    assert moved[0] not in live  # moved to a time that has come, and settled
    assert cancelled not in live
    assert moved_cancelled not in live
    generation = rewrite(book, capture, [*moved, delayed[4]], amendments)
    ledger = opened(book, generation)
    times = await ledger.times_of(ids([*moved, cancelled, delayed[4]]))
    assert times.tolist() == [111, 1 << 52, CANCELLED_MS, book.times[delayed[4]]]


async def test_live_is_what_is_owed_or_not_due() -> None:
    book, capture = await sealed_book(200)
    now_ms = 1_800_000_000_500
    settled = BitMap(range(0, 200, 2))
    with open_source(book.vfs, FOLDER, capture, NONE) as source:
        live = live_entries(source, settled, now_ms)
    assert set(live) == {i for i in range(200) if i % 2 or book.times[i] > now_ms}


async def test_publish_times_rise_over_gaps() -> None:
    book, capture = await sealed_book(30)
    ledger = opened(book, rewrite(book, capture, [4, 10, 11, 20]))
    published = [row[0] for row in book.rows]
    expected = [published[max((k for k in (4, 10, 11, 20) if k <= i), default=4)] for i in range(30)]
    for first in range(30):
        rows = await ledger.read_rows(first, 30 - first)
        assert rows["publish_time_ms"].tolist() == expected[first:]


async def test_facts_of_what_survived() -> None:
    book, capture = await sealed_book(30)
    undelayed = [i for i, time in enumerate(book.times) if not time][:3]
    generation = rewrite(book, capture, undelayed)
    with open_source(book.vfs, FOLDER, capture, NONE) as source:
        examined = examine_generation(
            book.vfs, FOLDER, generation, source, BitMap(range(30)), max(book.times)
        )
    assert (set(examined.present), examined.last_expire_ms) == (set(undelayed), 0)
    assert rewrite(book, generation, []).sparse == (0, 40)


@pytest.mark.slow
async def test_a_flipped_byte_anywhere_is_found() -> None:
    book, capture = await sealed_book(6)
    generation = rewrite(book, capture, [1, 2, 5])
    name = generation.name(FOLDER)
    for kind in KINDS:
        for offset in range(file_lengths(generation)[kind]):
            flip_byte(book.vfs, name.path(kind), offset)
            assert verify_ledger(book.vfs, FOLDER, generation), (kind, offset)
            ledger = opened(book, generation)
            try:
                found = await ledger.read(ids(range(6)))
            except Corrupt:
                pass
            else:  # a footer is not looked at for what was not asked for; what is read is right
                assert found.frames == [book.frames[i] if i in (1, 2, 5) else GONE_FRAME for i in range(6)], (
                    kind,
                    offset,
                )
            flip_byte(book.vfs, name.path(kind), offset)
    assert verify_ledger(book.vfs, FOLDER, generation) == []


async def test_what_is_wrong_is_told_of_the_entry_and_not_of_the_row() -> None:
    book, capture = await sealed_book(30)
    generation = rewrite(book, capture, [4, 11, 20])
    name = generation.name(FOLDER)
    flip_byte(book.vfs, name.path("data"), file_lengths(generation)["data"] - 1)
    (problem,) = verify_ledger(book.vfs, FOLDER, generation)
    assert problem.what == "entry 20: the stored message is damaged"
    compared = verify_ledger(
        book.vfs, FOLDER, generation, compare=lambda first, *_: [(0, "odd")] if first == 0 else []
    )
    assert [each.what for each in compared] == [problem.what]  # frames of a damaged run are not compared
    flip_byte(book.vfs, name.path("data"), file_lengths(generation)["data"] - 1)
    (problem,) = verify_ledger(book.vfs, FOLDER, generation, compare=lambda *_: [(1, "odd")])
    assert problem.what == "entry 11: odd"
    flip_byte(book.vfs, name.path("times"), file_lengths(generation)["times"] - 1)
    found = verify_ledger(book.vfs, FOLDER, generation, compare=lambda *_: [(1, "odd")])
    assert "row 1: odd" in [each.what for each in found]  # which entries are there is not known


@pytest.mark.slow
async def test_a_cut_file_is_found() -> None:
    book, capture = await sealed_book(6)
    generation = rewrite(book, capture, [1, 2, 5])
    name = generation.name(FOLDER)
    for kind in KINDS:
        whole = file_lengths(generation)[kind]
        file = book.vfs.open(name.path(kind))
        content = file.pread(whole, 0)
        for length in range(whole):
            file.truncate(length)
            assert verify_ledger(book.vfs, FOLDER, generation), (kind, length)
            file.pwrite([content], 0)
        file.close()


async def test_generation_3_files_are_on_disk_and_their_names_once_the_folder_is_synced() -> None:
    book, capture = await sealed_book(20)
    assert isinstance(book.vfs, MemVfs)
    begun = len(book.vfs.ops)
    generation = rewrite(book, capture, [3, 9])
    assert not any(op.kind == "sync_dir" for op in book.vfs.ops[begun:]), "it has names of others too"
    book.vfs.sync_dir(FOLDER)
    crashed = book.vfs.crashed(book.vfs.op_count, CrashPolicy.LOSE_UNSYNCED)
    assert verify_ledger(crashed, FOLDER, generation) == []


async def test_a_generation_that_differs_from_its_source_is_refused() -> None:
    book, capture = await sealed_book(20)
    generation = rewrite(book, capture, [3, 9])
    done, end_ms = BitMap(range(20)), max(book.times)
    moved = NONE.move(np.array([9], np.uint32), np.array([end_ms + 1], np.int64), 1)
    for amendments, settled, now_ms in (
        (moved, done, end_ms + 1),  # a row has another time
        (NONE.cancel(BitMap([9])), done, end_ms),  # one is there that is gone
        (NONE, done - BitMap([4]), end_ms),  # one is not there that is owed
    ):
        with open_source(book.vfs, FOLDER, capture, amendments) as source, pytest.raises(Corrupt):
            examine_generation(book.vfs, FOLDER, generation, source, settled, now_ms)
    for kind in KINDS:
        flip_byte(book.vfs, generation.name(FOLDER).path(kind), HEADER_BYTES + 1)
        with open_source(book.vfs, FOLDER, capture, NONE) as source, pytest.raises(Corrupt):
            examine_generation(book.vfs, FOLDER, generation, source, done, end_ms)
        flip_byte(book.vfs, generation.name(FOLDER).path(kind), HEADER_BYTES + 1)


async def test_a_damaged_source_is_not_copied() -> None:
    book, capture = await sealed_book(20)
    flip_byte(book.vfs, capture.name(FOLDER).path("data"), HEADER_BYTES + book.rows[9][3] + 1)
    target = capture.name(FOLDER)._replace(generation=1, sparse=True)
    with open_source(book.vfs, FOLDER, capture, NONE) as source, pytest.raises(Corrupt):
        write_generation(book.vfs, source, BitMap([3, 9]), target)


async def test_large_frames_are_copied_in_parts() -> None:
    book, capture = await sealed_book(1)
    book = Book(book.vfs, "ledgers")
    book.vfs.make_dir("large")
    book = Book(book.vfs, "large")
    book.append(60, size=120)
    book.ledger.seal()
    capture = book.ledger.capture()
    await book.ledger.persist(capture)
    target = capture.name("large")._replace(generation=1, sparse=True)
    with open_source(book.vfs, "large", capture, NONE) as source:
        bounded = GenerationSource(capture, _FewBytes(source), NONE)  # type: ignore[arg-type]
        generation = write_generation(book.vfs, bounded, BitMap(range(5, 60)), target)
    assert verify_ledger(book.vfs, "large", generation) == []
    executor = HeldExecutor()
    ledger = Ledger.restore(generation, "large", OpenFiles(book.vfs), executor, executor)
    assert (await ledger.read(ids(range(5, 60)))).frames == book.frames[5:]


class _FewBytes:
    """A storage that gives three frames at a time."""

    def __init__(self, source: GenerationSource) -> None:
        self._storage = source.storage

    def read(self, entry_ids: np.ndarray, data_bytes: int, bytes_max: int) -> object:
        return self._storage.read(entry_ids, data_bytes, 400)


async def test_a_sparse_file_can_be_dumped() -> None:
    book, capture = await sealed_book(6)
    generation = rewrite(book, capture, [1, 2, 5])
    name = generation.name(FOLDER)
    lines = list(dump_file(book.vfs, name.path("times")))
    assert lines[0]["sparse"] is True
    assert [line["entry_id"] for line in lines if line["line"] == "row"] == [1, 2, 5]
    assert {"line": "present", "entry_count": 6, "present_count": 3} in lines
    assert [line["place"] for line in dump_file(book.vfs, name.path("rows")) if line["line"] == "row"] == [
        0,
        1,
        2,
    ]
    assert [line["line"] for line in dump_file(book.vfs, name.path("data"))] == ["header"] + ["frame"] * 3


# -- which entries are there ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_places_are_ranks(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.choice([1, 30, 5_000])
    present = sorted(rng.sample(range(count), rng.randrange(count + 1)))
    bitmap = BitMap(present)
    asked = sorted(rng.sample(range(count), rng.randrange(count + 1)))
    places, there = find_places(bitmap, ids(asked))
    for entry_id, place, is_there in zip(asked, places.tolist(), there.tolist(), strict=True):
        assert is_there == (entry_id in present)
        if is_there:
            assert present[place] == entry_id
    first = rng.randrange(count)
    length = rng.randrange(count - first + 1)
    found, place = present_between(bitmap, first, length)
    assert found.tolist() == [i for i in present if first <= i < first + length]
    if len(found):
        assert present[place] == found[0]
    assert set(absent_of(bitmap, count)) == set(range(count)) - set(present)
    section = encode_present(bitmap, count)
    assert decode_present(section, count, len(present), "", 0) == bitmap


def test_any_bytes_give_a_set_or_corrupt() -> None:
    rng = random.Random(1)
    section = encode_present(BitMap([3, 70_000, 70_001]), 80_000)
    for _ in range(3_000):
        damaged = bytearray(section)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        damaged = damaged[: rng.choice([len(damaged), rng.randrange(len(damaged) + 1)])]
        if bytes(damaged) == section:
            continue
        peek_present(bytes(damaged))
        with pytest.raises(Corrupt):
            decode_present(bytes(damaged), 80_000, 3, "", 0)


def test_a_section_that_cannot_be_is_refused_whatever_its_checksum() -> None:
    with pytest.raises(Corrupt):
        decode_present(encode_present(BitMap([9]), 9), 9, 1, "", 0)
    with pytest.raises(Corrupt):
        decode_present(encode_present(BitMap([1, 2]), 9), 9, 1, "", 0)
    assert ids_of(decode_present(encode_present(BitMap(), 0), 0, 0, "", 0)).tolist() == []
