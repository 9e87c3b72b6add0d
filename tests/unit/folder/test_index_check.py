"""The check of the delayed index on files: what a manifest names, whole, damaged and missing."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest
from pyroaring import BitMap

from broker.delayed.check import CursorView, Finding, IndexState, Kind, LedgerCounts
from broker.errors import Corrupt
from broker.folder.index_check import IndexFilesCheck, LedgerSource, file_source
from broker.model import START, Array, Int64Column, Position
from broker.storage.amendments import Amendments, AmendmentsImage, encode_amendments
from broker.storage.blocks import TIME, BlockChecksums, FileHeader, LedgerCapture
from broker.storage.bucket_builder import SnapshotBuilder
from broker.storage.bucket_files import bucket_storage, save_bucket
from broker.storage.bucket_snapshot import BucketMetadata, LedgerSpan
from broker.storage.manifest import decode_topic, encode_topic
from broker.testing.mem_vfs import MemVfs
from tests.harness import DATA_DIR
from tests.jobs.test_verify import START_MS, files_at_rest, verify

FOLDER = "buckets"
LEDGERS = "ledgers"
TOPIC_ID = 7
ROWS = 5_000
NOW = 1_750_000_000_000
LEDGER_IDS = (2, 4, 9)
BUCKET_IDS = (1, 2, 3)
STATE = IndexState(Position(LEDGER_IDS[-1], ROWS), 10, NOW)
OWED_TO_ALL = [CursorView(START, {})]


def times_of(ledger_id: int) -> Int64Column:
    """Due times over a month; every fourth row is not delayed."""
    times = NOW + np.random.default_rng(ledger_id).integers(1, 30 * 86_400_000, ROWS)
    times[::4] = 0
    return times


class Disk:
    """Three ledgers, and three buckets of 3,750 entries, each of which spans two or three of them."""

    def __init__(self) -> None:
        self.vfs = MemVfs()
        self.vfs.make_dir(FOLDER)
        self.vfs.make_dir(LEDGERS)
        self.storage = bucket_storage(self.vfs, FOLDER, TOPIC_ID)
        columns = [
            (times, np.full(ROWS, ledger_id), np.arange(ROWS, dtype=np.uint32))
            for ledger_id, times in ((ledger_id, times_of(ledger_id)) for ledger_id in LEDGER_IDS)
        ]
        times, ledgers, entries = (np.concatenate(column) for column in zip(*columns, strict=True))
        delayed = np.flatnonzero(times)
        for number, bucket_id in enumerate(BUCKET_IDS):
            rows = delayed[number::3] if number else delayed[::3]
            self.save(bucket_id, times[rows], ledgers[rows], entries[rows])

    def save(self, bucket_id: int, times: Int64Column, ledgers: Int64Column, entries: Array) -> None:
        spans = [LedgerSpan(ledger_id, 0, ROWS) for ledger_id in sorted(set(ledgers.tolist()))]
        builder = SnapshotBuilder(spans, time_step_ms=300_000, max_entries=500, min_entries=100)
        ordinals = builder.ordinals.to_ordinals(ledgers, entries.astype(np.uint32))
        order = np.lexsort((ordinals, times))
        segments = [*builder.add(times[order], ordinals[order]), *builder.end()]
        metadata = builder.metadata(TOPIC_ID, bucket_id, START, STATE.indexed_through)
        save_bucket(self.storage, bucket_id, metadata, builder.bitmaps, segments)

    def check(
        self,
        bucket_ids: Sequence[int] = BUCKET_IDS,
        cursors: Collection[CursorView] = OWED_TO_ALL,
        state: IndexState = STATE,
        *,
        entries_max: int = 1_000_000,
        unreadable: int = 0,
    ) -> tuple[list[Finding], LedgerCounts]:
        def source(ledger_id: int) -> LedgerSource:
            def read_times() -> Int64Column:
                if ledger_id == unreadable:
                    raise Corrupt("rows of a ledger are damaged")
                return times_of(ledger_id)

            return LedgerSource(ledger_id, ROWS, read_times)

        ledgers = [source(ledger_id) for ledger_id in LEDGER_IDS]
        check = IndexFilesCheck(self.storage.open_reader, state, ledgers, cursors)
        return check.run(bucket_ids, entries_max)

    def read_metadata(self, bucket_id: int) -> BucketMetadata:
        with contextlib.closing(self.storage.open_reader(bucket_id)) as reader:
            return reader.read_metadata()

    def flip(self, bucket_id: int, offset: int) -> None:
        file = self.vfs.open(self.storage.path(bucket_id))
        (byte,) = file.pread(1, offset)
        file.pwrite([bytes([byte ^ 1])], offset)


@pytest.fixture
def disk() -> Disk:
    return Disk()


def summary(findings: Collection[Finding]) -> list[tuple[Kind, int | None, int | None, int]]:
    return [(each.kind, each.bucket_id, each.ledger_id, each.count) for each in findings]


@pytest.mark.slow
@pytest.mark.parametrize("entries_max", [1_000_000, 5_000, 1])
def test_whole_files_are_clean_in_any_number_of_passes(disk: Disk, entries_max: int) -> None:
    findings, counts = disk.check(entries_max=entries_max)
    assert findings == []
    assert counts == LedgerCounts(entries=11_250, pending=11_250)


@pytest.mark.slow
@pytest.mark.parametrize("entries_max", [1_000_000, 1])
def test_a_missing_bucket_is_named_and_its_entries_are_lost(disk: Disk, entries_max: int) -> None:
    disk.vfs.remove(disk.storage.path(2))
    findings, _ = disk.check(entries_max=entries_max)
    assert summary(findings) == [
        (Kind.MISSING_FILE, 2, None, 1),
        *((Kind.LOST, None, ledger_id, 1_250) for ledger_id in LEDGER_IDS),
    ]
    assert "buckets/2.bucket" in str(findings[0])
    assert sum(each.count for each in disk.check((1, 3))[0]) == 3_750  # and if the manifest forgot it


@pytest.mark.slow
@pytest.mark.parametrize("entries_max", [1_000_000, 1])
def test_a_damaged_segment_is_named_once_and_its_entries_are_lost(disk: Disk, entries_max: int) -> None:
    metadata = disk.read_metadata(3)
    disk.flip(3, metadata.segments_at + int(metadata.segments.offsets[4]) + 3)
    findings, _ = disk.check(entries_max=entries_max)
    (unreadable,) = (each for each in findings if each.kind == Kind.CHECKSUM)
    assert (unreadable.bucket_id, unreadable.segment) == (3, 4)
    lost = sum(each.count for each in findings if each.kind == Kind.LOST)
    assert lost == metadata.segments.counts[4]
    assert {each.kind for each in findings} == {Kind.CHECKSUM, Kind.LOST}


@pytest.mark.slow
@pytest.mark.parametrize("entries_max", [1_000_000, 1])
def test_a_damaged_bitmap_is_named_once_and_loses_nothing(disk: Disk, entries_max: int) -> None:
    disk.flip(1, disk.read_metadata(1).segments_at - 1)
    findings, _ = disk.check(entries_max=entries_max)
    assert summary(findings) == [(Kind.CHECKSUM, 1, None, 1)]


@pytest.mark.parametrize("offset", [0, 8, 40])
def test_a_damaged_beginning_makes_a_bucket_unreadable(disk: Disk, offset: int) -> None:
    disk.flip(1, offset)
    findings, _ = disk.check()
    assert (findings[0].kind, findings[0].bucket_id) == (Kind.CHECKSUM, 1)


def test_a_bucket_in_the_place_of_another_is_unreadable(disk: Disk) -> None:
    disk.vfs.rename(disk.storage.path(1), disk.storage.path(2))
    findings, _ = disk.check((2, 3))
    assert "lies in the place of" in str(findings[0])


def test_a_bucket_that_a_merge_replaced_and_left_named_holds_duplicates(disk: Disk) -> None:
    rows = np.flatnonzero(times_of(2))[:5]
    disk.save(4, times_of(2)[rows], np.full(5, 2), rows)
    findings, _ = disk.check((*BUCKET_IDS, 4))
    assert summary(findings) == [(Kind.DUPLICATE, None, 2, 5)]


def test_settled_entries_need_not_be_held(disk: Disk) -> None:
    findings, counts = disk.check((), [CursorView(Position(9, 0), {}), CursorView(Position(9, ROWS), {})])
    assert summary(findings) == [(Kind.LOST, None, 9, 3_750)]
    assert counts.pending == 3_750


def test_entries_of_a_ledger_that_cannot_be_read_are_left_alone(disk: Disk) -> None:
    findings, counts = disk.check(unreadable=4)
    assert findings == []
    assert counts.entries == 11_250


def test_a_ledger_that_is_not_there_is_missed(disk: Disk) -> None:
    disk.save(4, np.array([NOW + 1]), np.array([3]), np.array([17]))
    findings, _ = disk.check((*BUCKET_IDS, 4))
    assert summary(findings) == [(Kind.MISSING_LEDGER, None, 3, 1)]


@pytest.mark.parametrize("sealed", [False, True])
def test_times_are_read_from_files_and_checked(disk: Disk, sealed: bool) -> None:
    times = times_of(2)
    checksums = BlockChecksums(TIME.itemsize)
    checksums.extend(times)
    crcs = () if sealed else checksums.crcs()
    capture = LedgerCapture(TOPIC_ID, 2, 0, ROWS, 1, sealed, crcs, crcs)
    source = file_source(disk.vfs, LEDGERS, capture)
    with pytest.raises(Corrupt, match="missing"):
        source.read_times()
    file = disk.vfs.open(f"{LEDGERS}/2.0.times", create=True)
    footer = checksums.encode_footer() if sealed else b"torn"
    file.pwrite([FileHeader("times", TOPIC_ID, 2, 0).encode(), times.tobytes(), footer], 0)
    assert source.read_times().tolist() == times.tolist()
    file.pwrite([b"\1"], 40)
    with pytest.raises(Corrupt, match="damaged"):
        source.read_times()


def test_an_empty_ledger_has_no_file(disk: Disk) -> None:
    capture = LedgerCapture(TOPIC_ID, 2, 0, 0, 0, sealed=False)
    assert len(file_source(disk.vfs, LEDGERS, capture).read_times()) == 0


def test_a_ledger_without_its_amendments_is_left_alone(disk: Disk) -> None:
    source = LedgerSource(2, ROWS, lambda: times_of(2), amendments=None)
    findings, counts = IndexFilesCheck(disk.storage.open_reader, STATE, [source], OWED_TO_ALL).run((), 1)
    assert (findings, counts) == ([], LedgerCounts())


# -- within verify -------------------------------------------------------------------------------------------

TOPIC = f"{DATA_DIR}/topics/1"


class Verified:
    """Files of a broker, with another manifest of its topic."""

    def __init__(self) -> None:
        self.files = files_at_rest()
        self.image = decode_topic(self.files[f"{TOPIC}/manifest"], "")
        last = self.image.ledgers[-1]
        self.end = Position(last.ledger_id, last.capture.entry_count)

    def problems(self, **changed: Any) -> list[str]:
        """All problems, after notes were looked at: there is none."""
        self.files[f"{TOPIC}/manifest"] = encode_topic(dataclasses.replace(self.image, **changed))
        report = verify(self.files)
        assert report.notes == []
        return report.problems

    def amend(self, cancelled: BitMap, ledger_id: int = 0, lsn: int = 1, moved: Sequence[int] = ()) -> Any:
        """The ledgers of a manifest in which the first one has amendments."""
        first = self.image.ledgers[0]
        amendments = Amendments(
            cancelled,
            np.array(moved, np.uint32),
            np.full(len(moved), START_MS, np.int64),
            np.ones(len(moved), np.uint32),
            np.full(len(moved), lsn, np.uint64),
        )
        name = f"{first.ledger_id}.1f.amend"
        content = encode_amendments(AmendmentsImage(1, ledger_id or first.ledger_id, amendments))
        self.files[f"{TOPIC}/ledgers/{name}"] = content
        return (dataclasses.replace(first, amendments_file=name), *self.image.ledgers[1:])


@pytest.fixture
def verified() -> Verified:
    return Verified()


def test_verify_compares_the_ledgers_with_the_buckets(verified: Verified) -> None:
    problems = verified.problems(indexed_through=verified.end, frontier_ms=1)
    assert problems
    assert all(problem.startswith("lost: ledger ") for problem in problems)
    assert all(problem.endswith("(topic orders)") for problem in problems)
    problems = verified.problems(indexed_through=verified.end, frontier_ms=1 << 50)
    assert problems == []


def test_verify_reads_the_buckets_that_the_manifest_names(verified: Verified) -> None:
    (problem,) = verified.problems(bucket_ids=(6,), next_bucket_id=7)
    assert problem.startswith("missing_file: bucket 6: A snapshot is missing")


def test_verify_says_what_does_not_fit_an_index(verified: Verified) -> None:
    after = Position(verified.end.ledger_id, verified.end.entry_id + 1)
    (problem,) = verified.problems(indexed_through=after, frontier_ms=1 << 50)
    assert "beyond the log" in problem
    (problem,) = verified.problems(index_lsn=verified.image.applied_lsn + 1)
    assert "Moves are indexed up to lsn" in problem


def test_verify_reads_amendments(verified: Verified) -> None:
    first = verified.image.ledgers[0]
    everything = BitMap(range(first.capture.entry_count))
    indexed = {"indexed_through": Position(first.ledger_id, first.capture.entry_count), "frontier_ms": 1}
    assert verified.problems(**indexed)
    assert verified.problems(**indexed, ledgers=verified.amend(everything)) == []
    (problem,) = verified.problems(
        **indexed, ledgers=verified.amend(BitMap([first.capture.entry_count]) | everything)
    )
    assert f"Entry {first.capture.entry_count} is cancelled" in problem
    (problem,) = verified.problems(ledgers=verified.amend(BitMap(), moved=[first.capture.entry_count]))
    assert f"Entry {first.capture.entry_count} is moved" in problem
    (problem,) = verified.problems(ledgers=verified.amend(BitMap(), moved=[0], lsn=1 << 40))
    assert "A move has lsn" in problem
    (problem,) = verified.problems(**indexed, ledgers=verified.amend(everything, ledger_id=99))
    assert "amendments belong to another ledger" in problem
    ledgers = verified.amend(everything)
    path = f"{TOPIC}/ledgers/{first.ledger_id}.1f.amend"
    verified.files[path] = verified.files[path][:-1]
    (problem,) = verified.problems(**indexed, ledgers=ledgers)
    assert path in problem
