"""Snapshots of buckets: whatever is built comes back, part by part, and nothing else is taken for one."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google_crc32c import value
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from broker.errors import Corrupt
from broker.model import ENTRY_ID_MAX, LEDGER_ID_MAX, TIME_MS_MAX, Int64Column, Position
from broker.runs.tally import rows_checksum
from broker.storage.bucket_builder import SnapshotBuilder
from broker.storage.bucket_snapshot import (
    HEADER_BYTES,
    SEGMENT_COLUMNS,
    BucketMetadata,
    LedgerSpan,
    Ordinals,
    SegmentColumns,
    bitmap_places,
    decode_bitmaps,
    decode_entries,
    decode_header,
    decode_metadata,
    encode_metadata,
    merge_spans,
    metadata_bytes_max,
)
from broker.storage.v1 import bucket_snapshot_pb2 as pb

Key = tuple[int, int, int]
Parts = tuple[bytes, list[bytes]]

NOW_MS = 1_750_000_000_000


def build(keys: list[Key], spans: tuple[LedgerSpan, ...] = (), part_rows: int = 7, **limits: int) -> Parts:
    """The beginning and the segments of a snapshot of (deliver_at_ms, ledger_id, entry_id)."""
    keys = sorted(set(keys))
    spans = spans or merge_spans([LedgerSpan(ledger, entry, entry + 1)] for _, ledger, entry in keys)
    builder = SnapshotBuilder(
        spans, **{"time_step_ms": 300_000, "min_entries": 2, "max_entries": 5, **limits}
    )
    times, ledger_ids, entry_ids = columns(keys)
    ordinals = builder.ordinals.to_ordinals(ledger_ids, entry_ids)
    segments: list[bytes] = []
    for row in range(0, len(keys), part_rows):
        segments += builder.add(times[row : row + part_rows], ordinals[row : row + part_rows])
    segments += builder.end()
    metadata = builder.metadata(3, 8, Position(spans[0].ledger_id, 0), Position(spans[-1].ledger_id, 1 << 32))
    beginning = encode_metadata(metadata, builder.bitmaps)
    assert len(beginning) <= builder.reserve_bytes(len(keys))
    assert len(beginning) <= metadata_bytes_max(spans, len(segments))
    return beginning, segments


def columns(keys: list[Key]) -> tuple[Int64Column, Int64Column, Any]:
    times, ledger_ids, entry_ids = zip(*keys, strict=True)
    return np.array(times, np.int64), np.array(ledger_ids, np.int64), np.array(entry_ids, np.uint32)


def read(beginning: bytes, segments: list[bytes]) -> tuple[BucketMetadata, list[Key]]:
    """Everything in a snapshot, checked against everything else."""
    metadata = decode_metadata(beginning, "x")
    ordinals = Ordinals(metadata.spans)
    assert len(segments) == len(metadata.segments)
    keys: list[Key] = []
    checksum = 0
    for index, segment in enumerate(segments):
        entries = decode_entries(metadata, ordinals, index, segment, "x")
        checksum += rows_checksum(*entries)
        keys += zip(*(column.tolist() for column in entries), strict=True)
    assert keys == sorted(set(keys)) and len(keys) == metadata.count
    assert checksum % (1 << 64) == metadata.checksum
    bitmaps = decode_bitmaps(beginning, "x")
    assert bitmaps == {
        span.ledger_id: BitMap([entry for _, ledger, entry in keys if ledger == span.ledger_id])
        for span in metadata.spans
    }
    assert metadata.segments_at == len(beginning)
    assert metadata.file_bytes == len(beginning) + sum(map(len, segments))
    return metadata, keys


CASES: dict[str, list[Key]] = {
    "one entry": [(NOW_MS, 4, 17)],
    "the greatest of all": [(TIME_MS_MAX, LEDGER_ID_MAX, ENTRY_ID_MAX)],
    "least and greatest": [(0, 1, 0), (TIME_MS_MAX, LEDGER_ID_MAX, ENTRY_ID_MAX)],
    "whole ledger ids": [(5, 1, 0), (4, 1, ENTRY_ID_MAX), (3, 2, 0), (3, 2, ENTRY_ID_MAX), (6, 9, 1)],
    "more of one time than a segment holds": [(NOW_MS, 4 + i // 10, i) for i in range(33)],
    "uniform": [(NOW_MS + i // 100, 4, i) for i in range(500)],
    "one entry at two times": [(NOW_MS, 4, 1), (NOW_MS + 1, 4, 1)],
    "many ledgers": [(NOW_MS + i * 7919 % 101, 1 + i, i * 31 % 17) for i in range(100)],
}


@pytest.mark.parametrize("name", CASES)
def test_entries_come_back(name: str) -> None:
    assert read(*build(CASES[name]))[1] == sorted(CASES[name])


KEYS = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 1_000_000), st.integers(0, TIME_MS_MAX)),
        st.one_of(st.integers(1, 4), st.integers(1, LEDGER_ID_MAX)),
        st.one_of(st.integers(0, 200_000), st.integers(0, ENTRY_ID_MAX)),
    ),
    min_size=1,
    max_size=50,
)


@pytest.mark.slow
@given(KEYS, st.integers(1, 20), st.integers(1, 9), st.integers(1, 9))
def test_any_entries_come_back(keys: list[Key], part_rows: int, max_entries: int, min_entries: int) -> None:
    parts = build(keys, part_rows=part_rows, max_entries=max_entries, min_entries=min_entries)
    assert read(*parts)[1] == sorted(set(keys))
    assert parts == build(keys, part_rows=len(keys), max_entries=max_entries, min_entries=min_entries)


def test_spans_may_be_wider_than_their_entries_or_empty() -> None:
    spans = (
        LedgerSpan(2, 0, 0),
        LedgerSpan(3, 5, 1 << 32),
        LedgerSpan(4, 9, 9),
        LedgerSpan(5, 0, 100),
        LedgerSpan(6, 0, 0),
    )
    keys = [(10, 3, 5), (11, 3, ENTRY_ID_MAX), (12, 5, 0), (13, 5, 99)]
    beginning, segments = build(keys, spans)
    metadata, found = read(beginning, segments)
    assert (metadata.spans, found) == (spans, keys)
    assert [len(bitmap) for bitmap in decode_bitmaps(beginning).values()] == [0, 2, 0, 2, 0]


def test_the_table_of_columns_names_each_statistic_of_a_segment_once() -> None:
    names = {column.name for column in SEGMENT_COLUMNS}
    assert names == {field.name for field in dataclasses.fields(SegmentColumns)} - {"offsets"}
    is_fixed = {
        field.name: field.type == FieldDescriptor.TYPE_FIXED32
        for field in pb.BucketMetadata.DESCRIPTOR.fields
        if field.name.startswith("segment_")
    }
    assert is_fixed == {column.field: column.is_fixed for column in SEGMENT_COLUMNS}
    assert len(SEGMENT_COLUMNS) == len(names) == len(is_fixed)


def test_no_column_takes_more_bytes_than_its_bound() -> None:
    for column in SEGMENT_COLUMNS:
        sizes = []
        for count in (1, 2):
            message = pb.BucketMetadata()
            getattr(message, column.field).extend([column.greatest] * count)
            sizes.append(message.ByteSize())
        assert sizes[1] - sizes[0] == column.bytes_max, column.field


def test_the_metadata_says_what_is_in_the_segments() -> None:
    keys = [(NOW_MS + i, 4 + i % 2, i) for i in range(12)]
    metadata, _ = read(*build(keys, min_entries=5))
    segments = metadata.segments
    assert (metadata.topic_id, metadata.bucket_id) == (3, 8)
    assert (metadata.start, metadata.end) == (Position(4, 0), Position(5, 1 << 32))
    assert metadata.spans == (LedgerSpan(4, 0, 11), LedgerSpan(5, 1, 12))
    assert segments.counts.tolist() == [5, 5, 2]
    assert segments.first_ms.tolist() == [NOW_MS, NOW_MS + 5, NOW_MS + 10]
    assert segments.last_ms.tolist() == [NOW_MS + 4, NOW_MS + 9, NOW_MS + 11]
    assert segments.first_ordinals.tolist() == [0, 15, 10]
    assert segments.last_ordinals.tolist() == [4, 19, 21]
    assert segments.offsets.tolist() == [0, *np.cumsum(segments.lengths)[:-1].tolist()]


def test_a_large_bucket_takes_less_than_5_bytes_an_entry() -> None:
    rng = np.random.default_rng(7)
    count = 60_000
    ids = np.flatnonzero(
        rng.integers(0, 2, 2 * count)
    )  # every second entry is delayed: bitmaps are at their worst
    times = NOW_MS + rng.integers(0, 30 * 86_400_000, len(ids))
    order = np.argsort(times, kind="stable")
    spans = (LedgerSpan(7, 0, 50_000), LedgerSpan(8, 0, 2 * count - 50_000))
    builder = SnapshotBuilder(spans, time_step_ms=300_000)
    segments = builder.add(times[order], ids[order]) + builder.end()
    beginning = encode_metadata(builder.metadata(1, 1, Position(7, 0), Position(8, 9)), builder.bitmaps)
    assert (len(beginning) + sum(map(len, segments))) / len(ids) < 5
    assert len(beginning) / len(ids) < 0.4
    assert len(beginning) <= builder.reserve_bytes(len(ids))


# Ordinals and checksums


@given(KEYS)
def test_ordinals_order_as_positions_do_and_come_back(keys: list[Key]) -> None:
    positions = sorted({(ledger, entry) for _, ledger, entry in keys})
    spans = merge_spans([LedgerSpan(ledger, entry, entry + 1)] for ledger, entry in positions)
    ordinals = Ordinals(spans)
    ledger_ids = np.array([ledger for ledger, _ in positions], np.int64)
    entry_ids = np.array([entry for _, entry in positions], np.uint32)
    numbers = ordinals.to_ordinals(ledger_ids, entry_ids)
    assert numbers.tolist() == sorted(set(numbers.tolist()))
    assert 0 == numbers[0] <= numbers[-1] == ordinals.end - 1
    back = ordinals.to_positions(numbers)
    assert (back[0].tolist(), back[1].tolist()) == (ledger_ids.tolist(), entry_ids.tolist())
    assert back[0].dtype == np.int64 and back[1].dtype == np.uint32
    split = [(ledger, entry) for ledger, ids in ordinals.split(numbers) for entry in ids.tolist()]
    assert split == positions


def test_a_checksum_is_the_documented_one() -> None:
    def mix(time: int, ledger: int, entry: int) -> int:
        mixed = time * 0x9E3779B97F4A7C15 + ledger * 0xD1B54A32D192ED03 + entry * 0x8CB92BA72F3D8DD7
        mixed %= 1 << 64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % (1 << 64)
        return mixed ^ mixed >> 31

    keys = CASES["least and greatest"] + CASES["many ledgers"]
    assert rows_checksum(*columns(keys)) == sum(mix(*key) for key in keys) % (1 << 64)
    assert rows_checksum(*columns(keys)) == rows_checksum(*columns(keys[::-1]))


@given(KEYS, st.data())
def test_a_checksum_tells_changed_entries(keys: list[Key], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(keys) - 1))
    column = data.draw(st.integers(0, 2))
    changed = columns(keys)
    changed[column][index] ^= 1 << data.draw(st.integers(0, 31))
    assert rows_checksum(*changed) != rows_checksum(*columns(keys))


# Damage


def expect_corrupt(beginning: bytes, segments: list[bytes]) -> None:
    with pytest.raises(Corrupt) as caught:
        read(beginning, segments)
    assert caught.value.path == "x" and caught.value.offset >= 0


SMALL: Parts = build([*CASES["more of one time than a segment holds"][:11], *CASES["one entry"]])


@pytest.mark.slow
def test_every_changed_bit_is_found() -> None:
    beginning, segments = SMALL
    for bit in range(len(beginning) * 8):
        expect_corrupt(flip(beginning, bit), segments)
    for index, segment in enumerate(segments):
        for bit in range(len(segment) * 8):
            expect_corrupt(beginning, [*segments[:index], flip(segment, bit), *segments[index + 1 :]])


def flip(block: bytes, bit: int) -> bytes:
    changed = bytearray(block)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.slow
def test_every_truncation_is_found() -> None:
    beginning, segments = SMALL
    for length in range(len(beginning)):
        expect_corrupt(beginning[:length], segments)
    for index, segment in enumerate(segments):
        for length in range(len(segment)):
            expect_corrupt(beginning, [*segments[:index], segment[:length], *segments[index + 1 :]])


def test_segments_that_changed_places_are_found() -> None:
    beginning, (first, *rest, last) = build(CASES["many ledgers"])
    expect_corrupt(beginning, [last, *rest, first])


def with_message(change: Callable[[pb.BucketMetadata], object], beginning: bytes = SMALL[0]) -> bytes:
    """A snapshot's beginning with other metadata, and right checksums."""
    header = decode_header(beginning)
    end = HEADER_BYTES + header.metadata_bytes
    message = pb.BucketMetadata.FromString(beginning[HEADER_BYTES:end])
    change(message)
    content = message.SerializeToString()
    segments_at = header.segments_at + len(content) - header.metadata_bytes
    head = struct.pack("<4sB3xIIQI", b"PDB1", 1, len(content), value(content), segments_at, 0)
    return head + struct.pack("<I", value(head)) + content + beginning[end:]


def test_header_layout_is_the_documented_one() -> None:
    assert with_message(lambda message: None) == SMALL[0]


Change = Callable[[pb.BucketMetadata], None]


def assign(name: str, number: int) -> Change:
    return lambda message: setattr(message, name, number)


def put(column: str, index: int, number: int) -> Change:
    return lambda message: getattr(message, column).__setitem__(index, number)


def append(column: str, number: int) -> Change:
    return lambda message: getattr(message, column).append(number)


def clear(prefixes: tuple[str, ...]) -> Change:
    def change(message: pb.BucketMetadata) -> None:
        for field in message.DESCRIPTOR.fields:
            if field.name.startswith(prefixes):
                message.ClearField(field.name)

    return change


IMPOSSIBLE: dict[str, Change] = {
    "no topic": assign("topic_id", 0),
    "no bucket": assign("bucket_id", 0),
    "another count": assign("count", 9),
    "a range that ends before it starts": assign("start_ledger_id", 99),
    "a range beyond all ledgers": assign("end_ledger_id", 1 << 48),
    "an end beyond all entries": assign("end_entry_id", (1 << 32) + 1),
    "no segments": clear(("segment_",)),
    "no ledgers": clear(("ledger_", "bitmap_")),
    "columns of segments that differ in length": append("segment_count", 1),
    "columns of ledgers that differ in length": append("ledger_id", 9),
    "ledger 0": put("ledger_id", 0, 0),
    "a ledger beyond all": put("ledger_id", -1, 1 << 48),
    "ledgers out of order": put("ledger_id", 0, 9),
    "a ledger twice": put("ledger_id", 0, 5),
    "a span that ends before it begins": put("ledger_first", 0, 1 << 31),
    "a span beyond all entries": put("ledger_end", 0, (1 << 32) + 1),
    "bitmaps that reach into segments": put("bitmap_bytes", 0, 1 << 20),
    "a time beyond all": put("segment_last_ms", -1, TIME_MS_MAX + 1),
    "a time beyond int64": put("segment_first_ms", 0, 1 << 63),
    "a segment that ends before it begins": put("segment_last_ms", 0, NOW_MS - 1),
    "segments out of order": put("segment_first_ms", 1, NOW_MS - 1),
    "an ordinal beyond the spans": put("segment_last_ordinal", -1, 1 << 40),
    "an ordinal beyond int64": put("segment_first_ordinal", 0, (1 << 64) - 1),
    "a segment without entries": put("segment_count", 0, 0),
    "a segment of one entry with two bounds": put("segment_count", 0, 1),
    "a segment of more entries than any": put("segment_count", 0, (1 << 20) + 1),
    "a segment without bytes": put("segment_bytes", 0, 0),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_metadata_that_no_snapshot_has_is_refused_in_spite_of_its_checksum(name: str) -> None:
    beginning = with_message(IMPOSSIBLE[name])
    with pytest.raises(Corrupt, match="impossible values"):
        decode_metadata(beginning)


def test_a_later_version_and_another_file_are_refused() -> None:
    for offset, byte, match in ((4, 2, "version 2"), (3, ord("2"), "not a snapshot"), (5, 1, "damaged")):
        head = bytearray(SMALL[0][: HEADER_BYTES - 4])
        head[offset] = byte
        with pytest.raises(Corrupt, match=match):
            decode_header(bytes(head) + struct.pack("<I", value(bytes(head))))


def test_segments_that_disagree_with_the_metadata_are_refused_in_spite_of_their_checksum() -> None:
    beginning, segments = SMALL
    metadata = decode_metadata(beginning)
    ordinals = Ordinals(metadata.spans)
    of = metadata.segments
    for column, change in (("last_ms", 1), ("last_ordinals", -1), ("first_ms", -1), ("counts", 1)):
        wrong = replace(metadata, segments=replace(of, **{column: getattr(of, column) + change}))
        with pytest.raises(Corrupt):
            decode_entries(wrong, ordinals, 0, segments[0])
    short = replace(metadata, spans=(LedgerSpan(4, 0, 3),))
    with pytest.raises(Corrupt):
        decode_entries(short, Ordinals(short.spans), 0, segments[0])


def test_bitmaps_with_entries_outside_of_their_span_are_refused() -> None:
    def move_span(message: pb.BucketMetadata) -> None:
        message.ledger_first[0] += 1
        message.ledger_end[0] += 1

    with pytest.raises(Corrupt, match="outside its ledger's span"):
        decode_bitmaps(with_message(move_span))


# Any bytes


def decode_all(data: bytes) -> None:
    for decode in (decode_header, decode_metadata, decode_bitmaps, bitmap_places):
        with suppress(Corrupt):
            decode(data, "x")


@given(st.binary(max_size=120))
def test_any_bytes_are_a_snapshot_or_corrupt(data: bytes) -> None:
    decode_all(data)
    decode_all(b"PDB1\1\0\0\0" + data)


@given(st.binary(max_size=80), st.binary(max_size=40), st.integers(0, (1 << 64) - 1))
def test_any_metadata_is_a_value_or_corrupt(content: bytes, rest: bytes, segments_at: int) -> None:
    for at in (segments_at, HEADER_BYTES + len(content) + len(rest)):
        head = struct.pack("<4sB3xIIQI", b"PDB1", 1, len(content), value(content), at, 0)
        decode_all(head + struct.pack("<I", value(head)) + content + rest)


NUMBER = st.one_of(
    st.integers(0, 40), st.sampled_from([1 << 31, 1 << 32, 1 << 48, 1 << 53, 1 << 62, 1 << 63])
)


@pytest.mark.slow
@given(st.data())
def test_any_change_of_the_metadata_is_a_value_or_corrupt(data: st.DataObject) -> None:
    def change(message: pb.BucketMetadata) -> None:
        names = [field.name for field in message.DESCRIPTOR.fields]
        for _ in range(data.draw(st.integers(1, 3))):
            name = data.draw(st.sampled_from(names))
            number = data.draw(NUMBER)
            if name in ("segment_count", "segment_bytes", "segment_crc", "bitmap_bytes", "bitmap_crc"):
                number %= 1 << 32
            column = getattr(message, name)
            if isinstance(column, int):
                setattr(message, name, number)
            elif data.draw(st.booleans()) and column:
                column[data.draw(st.integers(0, len(column) - 1))] = number
            else:
                column.append(number)

    beginning = with_message(change)
    decode_all(beginning)
    with suppress(Corrupt):
        metadata = decode_metadata(beginning)
        ordinals = Ordinals(metadata.spans)
        for index in range(min(len(metadata.segments), len(SMALL[1]))):
            decode_entries(metadata, ordinals, index, SMALL[1][index])
