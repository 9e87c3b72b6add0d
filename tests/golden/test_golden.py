"""Files of every on-disk version: they load forever, and today's encoders still write them."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.model import CANCELLED_MS, Position
from broker.runs.tally import rows_checksum
from broker.storage.amendments import decode_amendments
from broker.storage.blocks import KINDS, LedgerCapture, LedgerName
from broker.storage.bucket_snapshot import (
    LedgerSpan,
    Ordinals,
    check_segment,
    decode_bitmaps,
    decode_entries,
    decode_metadata,
)
from broker.storage.bulk import decode_bulk
from broker.storage.dump import dump_file
from broker.storage.group_log import records_from
from broker.storage.ledger_check import verify_ledger
from broker.storage.ledger_files import LedgerFiles, OpenFiles
from broker.storage.local_group_log import LocalGroupLog
from broker.storage.manifest import decode_broker, decode_cursor, decode_topic
from broker.storage.producers_file import decode_producers
from broker.storage.record_types import RecordType
from broker.storage.records import decode_record
from broker.storage.recurring import decode_recurring
from broker.storage.sparse_files import GONE_FRAME, SparseFiles
from broker.testing.mem_vfs import MemVfs
from broker.topics.bulk import TopicBulkChanges
from broker.topics.producers import Producers
from broker.topics.recurring import TopicRecurring
from tests.golden import make

FOLDER = Path(__file__).parent

# Never edit a line of these; a new version of a format adds lines.
SHA256 = {
    "segment-v1.seg": "92ae2cb458cf9c078e11aca01f565cee717c5d91c8a463d7195c9ff5c8de21a8",
    "later-types-v1.seg": "bce658e481f2d31a648a6be3004663142816eb645d8e71bb0bcced9cb177c297",
    "broker-v1.manifest": "effa4e56ece2cc17a11790b6ec36f0fd3f9c99bf5bea748e7ab5c963138fc33f",
    "topic-v1.manifest": "675157015baebf5ca5a128f4ff9159f78c0360e3d088d80ab749e870782da753",
    "cursor-v1": "7996546fc348bdb8febe54742b1ca6f00880b9f78359f017d36d621f82c59dc9",
    "sealed-v1/11.0.data": "bcbb10b2c8967b5e12df2de77165de20b459076ac917a4a280d1519e3726fcde",
    "sealed-v1/11.0.rows": "8a1a38bd1e517a34110ece2b3783153fe8799c9df656eefd5f06d9a3b9baf9cf",
    "sealed-v1/11.0.times": "91b5f00b926358321912d80cfbd426c491cf13dc9d5489d4801bee6cfe59dd54",
    "unsealed-v1/12.2.data": "69d117977da8956673c820c1cac98fbb03a2e6ebe482070efeaaea96f4a778dc",
    "unsealed-v1/12.2.rows": "ae8974c9aed1c24766bd7ad730fd17102d4b7bf26eb066f62df0eb14dabe2a2b",
    "unsealed-v1/12.2.times": "5afb891fa59ad8a895f360121c5e25f321dc0a5038dd8a918d0209aa28bec6dc",
    "uniform-v1.bucket": "64d20694712c462713eef666f597876a83eeb07d9e3e240873cc63b594eb149d",
    "scattered-v1.bucket": "8ed5c7a0cda26b6859a6af9bad865ff3e1750493222a1702f4a84525fa863cba",
    "ledger-v1.amend": "4f83189590b3f147fbbb87b9d71756f29310bca4162d45caea656a9fc8734448",
    "sparse-v2/11.1.data": "b09e15be59c50ecb098372ccac3e5dd0f0e170e8fcdb03e547f02ca65afade51",
    "sparse-v2/11.1.times": "799b01d482b57ecb9336b716df050721fb700af94ad6c35229c370c334669a54",
    "sparse-v2/11.1.rows": "4a6f5c28ebbbc42c57273609e0dea3691f52d14534090aab8f04c7da49d9d9ca",
    "producers-v1": "fbd2b828211c34575b3a6a5a0c5d601c2acf797553d74b38c498741ed042ad54",
    "bulk-v1": "be558660f26a5a955650351e332288d41dabe6a3d6fc370029366fcad115b011",
    "recurring-v1": "15e5ca4b6d8601ed423bd05fa129859e1a8e708d9e40328be111070558d002cb",
}


def read(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def disk_of(*names: str) -> MemVfs:
    vfs = MemVfs()
    for name in names:
        if "/" in name:
            vfs.make_dir(name.rpartition("/")[0])
        vfs.open(name, create=True).pwrite([read(name)], 0)
    return vfs


@pytest.mark.parametrize("name", SHA256)
def test_the_file_is_the_one_that_was_frozen(name: str) -> None:
    assert hashlib.sha256(read(name)).hexdigest() == SHA256[name]


@pytest.mark.parametrize("name", SHA256)
def test_todays_encoder_writes_these_very_bytes(name: str) -> None:
    assert make.build()[name] == read(name)


def test_every_format_has_a_golden_file() -> None:
    assert sorted(make.build()) == sorted(SHA256)


def test_producers() -> None:
    image = decode_producers(read("producers-v1"), "")
    assert image == make.producers_image()
    again = Producers(image)
    assert again.content(3).image() == image
    assert (again.by_name["orders-7"].floor, again.by_name["übung"].id_count) == (41, 1_003)


def test_recurring() -> None:
    image = decode_recurring(read("recurring-v1"), "")
    assert image == make.recurring_image()
    assert TopicRecurring(image).names() == ["cron", "interval", "übung"]


def test_bulk() -> None:
    image = decode_bulk(read("bulk-v1"), "")
    assert image == make.bulk_image()
    bulk = TopicBulkChanges(image)
    assert (bulk.ids(), bulk.unended_ids(), bulk.last_id) == ([7, 8, 10, 12], [10, 12], 12)
    assert bulk.with_request_id("r-1") == 10


def test_broker_manifest() -> None:
    image = decode_broker(read("broker-v1.manifest"), "")
    assert image == make.broker_image()
    assert (image.checkpoint_lsn, image.topics) == (0x1233, {3: "orders", 7: "übung"})


def test_topic_manifest() -> None:
    image = decode_topic(read("topic-v1.manifest"), "")
    assert image == make.topic_image()
    assert [(each.ledger_id, each.capture.entry_count, each.capture.sealed) for each in image.ledgers] == [
        (11, 4100, True),
        (12, 5, False),
    ]
    assert image.ledgers[1].capture.times_crcs == (0x8DE8EAEF,)
    assert [each.mark for each in image.subscriptions] == [Position(11, 8), Position(12, 5)]
    assert image.subscriptions[0].policy.backoff_multiplier == 1.5


def test_cursor() -> None:
    image = decode_cursor(read("cursor-v1"), "")
    assert image == make.cursor_image()
    assert [(ledger_id, len(bitmap)) for ledger_id, bitmap in image.settled.items()] == [(11, 3901), (12, 2)]
    assert [each.column.tolist() for each in image.waiting.values()] == [
        [0],
        [1_750_000_000_009, 1_750_000_000_000],
    ]


RECORD_TYPES = {
    "segment-v1.seg": [5, 7, 2, 3, 4, 3, 4, 4, 8, 6],
    "later-types-v1.seg": [2, 9, 10, 11, 12, 13, 14, 15, 16, 17, 19, 20, 20],
}
"""Of the records in the golden segments."""


@pytest.mark.parametrize("name", make.SEGMENTS)
def test_segment(name: str) -> None:
    vfs = MemVfs()
    vfs.make_dir("journal")
    path = f"journal/{make.FIRST_LSN:016x}.seg"
    vfs.open(path, create=True).pwrite([read(name)], 0)
    first, types = 0x1234, RECORD_TYPES[name]
    group_log = LocalGroupLog(vfs, "journal")
    group_log.open(first, first + len(types) - 1)
    found = list(records_from(group_log.read(first), first))
    assert [(lsn, record_type) for lsn, record_type, _ in found] == list(enumerate(types, first))
    for (_, record_type, body), expected in zip(found, make.SEGMENTS[name][0](), strict=True):
        record = decode_record(record_type, body)
        assert values_in(record) == values_in(expected)
    assert len(read(name)) - vfs.open(path).size() == 20  # the torn group behind them was cut


def values_in(part: Any) -> Any:
    """A record, or part of one, as values that compare."""
    if isinstance(part, np.ndarray):
        return part.tolist()
    if isinstance(part, memoryview):
        return bytes(part)
    if isinstance(part, tuple):
        return tuple(map(values_in, part))
    if isinstance(part, dict):
        return {key: values_in(value) for key, value in part.items()}
    if dataclasses.is_dataclass(part):
        fields = {field.name: values_in(getattr(part, field.name)) for field in dataclasses.fields(part)}
        return type(part), fields
    return part


def test_every_type_of_record_is_in_a_golden_segment() -> None:
    """But for the journal's own COMMIT, which each group has, and LOG_BLANK, which no file has."""
    assert make.SEGMENTS.keys() == RECORD_TYPES.keys()
    in_segments = {each for types in RECORD_TYPES.values() for each in types}
    assert in_segments == set(RecordType) - {RecordType.COMMIT, RecordType.LOG_BLANK}


@pytest.mark.parametrize(
    ("name", "count", "sealed"),
    [(make.SEALED, make.SEALED_COUNT, True), (make.UNSEALED, make.UNSEALED_COUNT, False)],
)
def test_ledger(name: LedgerName, count: int, sealed: bool) -> None:
    vfs = disk_of(*map(name.path, KINDS))
    capture = make.capture(name, count, sealed=sealed)
    if not sealed:
        assert capture == LedgerCapture(3, 12, 2, 5, 40, False, (0x8DE8EAEF,), (0xB6E7BB7A,))
    assert verify_ledger(vfs, name.folder, capture) == []
    files = LedgerFiles(OpenFiles(vfs), name, capture)
    entries = files.read(np.arange(count, dtype=np.uint32), capture.data_bytes, 1 << 40)
    times, rows, frames = make.columns(count)
    assert entries.times.tolist() == times.tolist()
    assert entries.rows.tolist() == rows.tolist()
    assert b"".join(entries.frames) == frames
    assert entries.times[:4].tolist() == [0, 1_750_000_001_000, 1_750_000_002_000, 0]


def test_sparse_ledger() -> None:
    vfs = disk_of(*map(make.SPARSE.path, KINDS))
    _, capture = make.sparse()
    assert verify_ledger(vfs, make.SPARSE.folder, capture) == []
    files = SparseFiles(OpenFiles(vfs), make.SPARSE, capture)
    entries = files.read(np.arange(make.SEALED_COUNT, dtype=np.uint32), capture.data_bytes, 1 << 40)
    times, _, frames = make.columns(make.SEALED_COUNT)
    present = make.SPARSE_IDS.tolist()
    assert present == [1, 7, 8, 9, 70, 4097]
    assert [i for i, frame in enumerate(entries.frames) if frame != GONE_FRAME] == present
    assert [entries.frames[i] for i in present] == [frames[8 * i : 8 * i + 8] for i in present]
    assert [entries.times[i] for i in present] == [times[i] for i in present]
    assert entries.times[0] == CANCELLED_MS


@pytest.mark.parametrize(
    ("name", "counts", "segments_at", "checksum"),
    [
        ("uniform-v1.bucket", [400, 400, 200], 226, 0xBAF9423F490F0BA1),
        ("scattered-v1.bucket", [110, 122, 121, 120, 118, 119, 123, 120, 47], 1024, 0x216388CE09B54219),
    ],
)
def test_bucket(name: str, counts: list[int], segments_at: int, checksum: int) -> None:
    data = read(name)
    metadata = decode_metadata(data)
    assert (metadata.topic_id, metadata.bucket_id, metadata.count) == (3, 6, 1000)
    assert (metadata.start, metadata.end) == (Position(11, 4000), Position((1 << 48) - 1, 1 << 32))
    assert metadata.spans == (LedgerSpan(11, 4000, 4100), LedgerSpan((1 << 48) - 1, (1 << 32) - 900, 1 << 32))
    assert (metadata.segments_at, metadata.checksum) == (segments_at, checksum)
    assert metadata.segments.counts.tolist() == counts
    assert len(data) == metadata.file_bytes
    bitmaps = decode_bitmaps(data)
    assert [(ledger_id, len(bitmap)) for ledger_id, bitmap in bitmaps.items()] == [
        (11, 100),
        ((1 << 48) - 1, 900),
    ]
    ordinals = Ordinals(metadata.spans)
    times, positions = make.bucket_rows(name.startswith("scattered"))
    row = sum_of_entries = 0
    for index, count in enumerate(counts):
        offset = metadata.segments_at + int(metadata.segments.offsets[index])
        segment = data[offset : offset + int(metadata.segments.lengths[index])]
        check_segment(metadata, index, segment)
        entries = decode_entries(metadata, ordinals, index, segment)
        assert entries[0].tolist() == times[row : row + count].tolist()
        assert ordinals.to_ordinals(*entries[1:]).tolist() == positions[row : row + count].tolist()
        sum_of_entries += rows_checksum(*entries)
        row += count
    assert (row, sum_of_entries % (1 << 64)) == (1000, checksum)


def test_amendments() -> None:
    image = decode_amendments(read("ledger-v1.amend"))
    amendments = image.amendments
    assert (image.topic_id, image.ledger_id, len(amendments.cancelled)) == (3, (1 << 48) - 1, 3901)
    assert amendments.entry_ids.tolist() == [5, 9, (1 << 32) - 1]
    assert amendments.deliver_at_ms.tolist() == [1_750_000_000_007, 1_750_000_000_000, (1 << 53) - 1]
    assert amendments.revisions.tolist() == [1, 2, (1 << 32) - 1]
    assert amendments.lsns.tolist() == [0x1235, 0x1236, (1 << 63) - 1]
    ids = np.array([4, 5, 9, 100], np.uint32)
    assert amendments.effective(ids, np.array([1, 2, 3, 4])).tolist() == [1, 1_750_000_000_007, 0, 0]


@pytest.mark.parametrize("name", SHA256)
def test_dump_reads_every_golden_file(name: str) -> None:
    lines = list(dump_file(disk_of(name), name))
    assert len(lines) > 2
    assert "error" not in {line["line"] for line in lines}
