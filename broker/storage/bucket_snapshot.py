"""A bucket's snapshot: one immutable file, `topics/<topic_id>/buckets/<bucket_id>.bucket`. Pure.

    | header | metadata | bitmaps | hole | bucket segment ... |
    header    magic 4 "PDB1", version 1, zero 3, metadata_bytes 4, crc32c 4 of the metadata, segments_at 8, zero 4,
              crc32c 4 of the 28 bytes before
    metadata  protobuf BucketMetadata (bucket_snapshot.proto)
    bitmaps   of each ledger of the metadata, in its order: the entries the bucket holds, roaring, portable format
    hole      zeros up to `segments_at`: a merge writes segments before it knows its metadata; perhaps none
    segments  see bucket_segment, in (deliver_at_ms, ledger_id, entry_id) order; with the last one the file ends

Integers are little-endian. An entry's *ordinal* is its entry id, counted from the first id of its ledger's span,
plus the lengths of the spans of all ledgers before it: ordinals order as positions do, and are dense enough to
be packed.

Invariants:
  SNAPSHOT-1  Keys (time, ordinal) rise strictly within a segment and from segment to segment, so the columns of the
      metadata can be searched.
  SNAPSHOT-2  `count` and `checksum` are those of the entries in the segments, each counted once a segment entry.
  SNAPSHOT-3  A decoder gives a value or `Corrupt`, whatever the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from google_crc32c import value
from pyroaring import BitMap

from broker.errors import Corrupt
from broker.model import ENTRY_ID_MAX, LEDGER_ID_MAX, TIME_MS_MAX, Int64Column, Position, UInt32Column
from broker.storage.bucket_segment import (
    ORDINAL_END,
    SEGMENT_COUNT_LIMIT,
    SEGMENT_ENTRIES_MAX,
    SEGMENT_ENTRIES_MIN,
    cut_segments,
    decode_segment,
    encode_segment,
)
from broker.storage.manifest import bitmap_from_bytes, check, check_id, check_ledger_id
from broker.storage.v1 import bucket_snapshot_pb2 as pb

__all__ = [  # with what is defined in bucket_segment: together they are the format
    "SEGMENT_COUNT_LIMIT",
    "SEGMENT_ENTRIES_MAX",
    "SEGMENT_ENTRIES_MIN",
    "SEGMENT_COLUMNS",
    "SEGMENT_MEMORY_BYTES",
    "BitmapPlace",
    "BucketHeader",
    "BucketMetadata",
    "LedgerSpan",
    "Ordinals",
    "SegmentColumn",
    "SegmentColumns",
    "bitmap_places",
    "check_segment",
    "cut_segments",
    "decode_bitmap",
    "decode_bitmaps",
    "decode_entries",
    "decode_header",
    "decode_metadata",
    "decode_segment",
    "encode_metadata",
    "encode_segment",
    "merge_spans",
    "metadata_bytes_max",
]

MAGIC = b"PDB1"
VERSION = 1
HEADER_BYTES = 32
METADATA_BYTES_MAX = 1 << 30
FILE_BYTES_MAX = 1 << 62

_HEADER = struct.Struct("<4sB3sIIQI")
_CRC = struct.Struct("<I")
ADVICE = "The index can be built again from the ledgers"

_BITS_PER_VARINT_BYTE = 7
_FIXED32_BYTES = 4
# Bound of what is written for one ledger: its id, first, end, and the length and checksum of its bitmap.
_LEDGER_COLUMN_BYTES = 7 + 5 + 5 + 5 + _FIXED32_BYTES
_METADATA_FIXED_BYTES = 256
_CONTAINER_IDS = 1 << 16
_CONTAINER_BYTES = (
    8192 + 16
)  # a bitset and its place in the directory; nothing else is written that is larger
_BITMAP_FIXED_BYTES = 16


class LedgerSpan(NamedTuple):
    """The entry ids of one ledger that a bucket may hold, the end excluded; ordinals are counted in it."""

    ledger_id: int
    first: int
    end: int


class SegmentColumn(NamedTuple):
    """A column of the metadata with one item a bucket segment: all that is said of it, in one place."""

    name: str  # attribute of SegmentColumns, and what SnapshotBuilder notes of a segment
    field: str  # of BucketMetadata in bucket_snapshot.proto
    least: int
    greatest: int
    is_fixed: bool = False
    """Written as fixed32; else as a varint."""

    @property
    def dtype(self) -> np.dtype[np.uint32] | np.dtype[np.int64]:
        return np.dtype(np.uint32) if self.is_fixed else np.dtype(np.int64)

    @property
    def bytes_max(self) -> int:
        """Bytes written for one item, at most."""
        return _FIXED32_BYTES if self.is_fixed else -(-self.greatest.bit_length() // _BITS_PER_VARINT_BYTE)


SEGMENT_COLUMNS = (
    SegmentColumn("first_ms", "segment_first_ms", 0, TIME_MS_MAX),
    SegmentColumn("last_ms", "segment_last_ms", 0, TIME_MS_MAX),
    SegmentColumn("first_ordinals", "segment_first_ordinal", 0, ORDINAL_END - 1),
    SegmentColumn("last_ordinals", "segment_last_ordinal", 0, ORDINAL_END - 1),
    SegmentColumn("counts", "segment_count", 1, SEGMENT_COUNT_LIMIT),
    SegmentColumn("lengths", "segment_bytes", 1, (1 << 32) - 1),
    SegmentColumn("crcs", "segment_crc", 0, (1 << 32) - 1, is_fixed=True),
)
"""Another statistic of a segment is another format, as files that exist have no such column: a version 2, whose reader
reads version 1 without it, with a golden file, in docs/formats.md and bucket_dump.py. It is a row here, an attribute of
`SegmentColumns`, a field of the proto (`make protos`) and a fact that `SnapshotBuilder` notes; writing, room and ranges
follow, and `_check_segments` relates columns."""

SEGMENT_MEMORY_BYTES = sum(column.dtype.itemsize for column in SEGMENT_COLUMNS) + 8  # for `offsets`
_SEGMENT_BYTES_MAX = sum(column.bytes_max for column in SEGMENT_COLUMNS)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentColumns:
    """Facts of each bucket segment, as aligned columns: `SEGMENT_MEMORY_BYTES` a segment."""

    first_ms: Int64Column
    last_ms: Int64Column
    first_ordinals: Int64Column
    last_ordinals: Int64Column
    counts: Int64Column
    offsets: Int64Column  # from the file's first segment on
    lengths: Int64Column  # bytes
    crcs: UInt32Column

    def __len__(self) -> int:
        return len(self.counts)

    @classmethod
    def of(cls, values: Mapping[str, Iterable[int]]) -> SegmentColumns:
        """Make columns of values by name; raises OverflowError for numbers that fit none."""
        columns: dict[str, Any] = {
            column.name: np.fromiter(values[column.name], column.dtype) for column in SEGMENT_COLUMNS
        }
        return cls(offsets=np.cumsum(columns["lengths"]) - columns["lengths"], **columns)


@dataclass(frozen=True, slots=True, eq=False)
class BucketMetadata:
    """The part of a sealed bucket that stays in memory. Bitmaps are read on demand.

    `start` and `end` are the range of the log it was built from, the end excluded. Spans may lie outside of it
    (a move adds an entry of an older ledger), and a span may hold no entry at all.
    """

    topic_id: int
    bucket_id: int
    start: Position
    end: Position
    count: int
    checksum: int  # of all entries, as a `Tally` has it
    spans: tuple[LedgerSpan, ...]
    segments: SegmentColumns
    segments_at: int = 0  # where segments begin in the file, bytes; 0: not written yet

    @property
    def file_bytes(self) -> int:
        return self.segments_at + int(self.segments.lengths.sum())


class BucketHeader(NamedTuple):
    """The first bytes of a snapshot."""

    metadata_bytes: int
    metadata_crc: int
    segments_at: int


class Ordinals:
    """Positions as numbers that order alike; see the module's description. Spans rise by ledger id."""

    def __init__(self, spans: Sequence[LedgerSpan]) -> None:
        assert spans and all(left.ledger_id < right.ledger_id for left, right in pairwise(spans))
        lengths = np.array([span.end - span.first for span in spans], dtype=np.int64)
        self._ledger_ids = np.array([span.ledger_id for span in spans], dtype=np.int64)
        self._bases = np.cumsum(lengths) - lengths
        self._shifts = self._bases - np.array([span.first for span in spans], dtype=np.int64)
        self.end = int(lengths.sum())
        """One more than the greatest ordinal."""

    def to_ordinals(self, ledger_ids: Int64Column, entry_ids: UInt32Column) -> Int64Column:
        """The ordinals of positions in the spans; those of other positions have no meaning."""
        if len(self._shifts) == 1:
            ordinals = entry_ids.astype(np.int64)
            ordinals += self._shifts[0]
            return ordinals
        ordinals = self._shifts[np.searchsorted(self._ledger_ids, ledger_ids)]
        ordinals += entry_ids
        return ordinals

    def to_positions(self, ordinals: Int64Column) -> tuple[Int64Column, UInt32Column]:
        """The ledger ids and entry ids of ordinals below `end`."""
        if len(self._shifts) == 1:
            ledger_ids = np.full(len(ordinals), self._ledger_ids[0], dtype=np.int64)
            return ledger_ids, (ordinals - self._shifts[0]).astype(np.uint32)
        # Of spans with one base all but the last are empty, and `right` finds that one.
        places = np.searchsorted(self._bases, ordinals, side="right") - 1
        return self._ledger_ids[places], (ordinals - self._shifts[places]).astype(np.uint32)

    def split(self, ordinals: Int64Column) -> Iterable[tuple[int, UInt32Column]]:
        """Rising ordinals by ledger: its id and rising entry ids; ledgers without any are left out."""
        bounds = [*np.searchsorted(ordinals, self._bases).tolist(), len(ordinals)]
        ledgers = zip(self._ledger_ids.tolist(), self._shifts.tolist(), pairwise(bounds), strict=True)
        for ledger_id, shift, (low, high) in ledgers:
            if high > low:
                yield ledger_id, (ordinals[low:high] - shift).astype(np.uint32)


def merge_spans(several: Iterable[Sequence[LedgerSpan]]) -> tuple[LedgerSpan, ...]:
    """The least spans that hold all of these."""
    merged: dict[int, LedgerSpan] = {}
    for span in (span for spans in several for span in spans):
        held = merged.get(span.ledger_id, span)
        merged[span.ledger_id] = LedgerSpan(
            span.ledger_id, min(held.first, span.first), max(held.end, span.end)
        )
    return tuple(merged[ledger_id] for ledger_id in sorted(merged))


def metadata_bytes_max(spans: Sequence[LedgerSpan], segment_count: int) -> int:
    """No header, metadata and bitmaps of these spans and so many segments take more bytes."""
    containers = sum((span.end - 1) // _CONTAINER_IDS - span.first // _CONTAINER_IDS + 1 for span in spans)
    columns = segment_count * _SEGMENT_BYTES_MAX + len(spans) * (_LEDGER_COLUMN_BYTES + _BITMAP_FIXED_BYTES)
    return HEADER_BYTES + _METADATA_FIXED_BYTES + columns + containers * _CONTAINER_BYTES


def encode_metadata(metadata: BucketMetadata, bitmaps: dict[int, BitMap]) -> bytes:
    """Header, metadata and bitmaps: the file's first bytes. Segments begin behind them unless `segments_at` is set.

    A ledger without a bitmap gets an empty one.
    """
    assert bitmaps.keys() <= {span.ledger_id for span in metadata.spans}
    contents = [bitmaps.get(span.ledger_id, BitMap()).serialize() for span in metadata.spans]
    message = _to_message(metadata, contents).SerializeToString(deterministic=True)
    length = HEADER_BYTES + len(message) + sum(map(len, contents))
    segments_at = metadata.segments_at or length
    assert length <= segments_at and len(message) <= METADATA_BYTES_MAX
    head = _HEADER.pack(MAGIC, VERSION, b"", len(message), value(message), segments_at, 0)
    return b"".join((head, _CRC.pack(value(head)), message, *contents))


def _to_message(metadata: BucketMetadata, bitmaps: Sequence[bytes]) -> pb.BucketMetadata:
    spans = metadata.spans
    message = pb.BucketMetadata(
        topic_id=metadata.topic_id,
        bucket_id=metadata.bucket_id,
        start_ledger_id=metadata.start.ledger_id,
        start_entry_id=metadata.start.entry_id,
        end_ledger_id=metadata.end.ledger_id,
        end_entry_id=metadata.end.entry_id,
        count=metadata.count,
        checksum=metadata.checksum,
        ledger_id=[span.ledger_id for span in spans],
        ledger_first=[span.first for span in spans],
        ledger_end=[span.end for span in spans],
        bitmap_bytes=[len(bitmap) for bitmap in bitmaps],
        bitmap_crc=[value(bitmap) for bitmap in bitmaps],
    )
    for column in SEGMENT_COLUMNS:
        getattr(message, column.field).extend(getattr(metadata.segments, column.name).tolist())
    return message


def decode_header(data: bytes, path: str = "") -> BucketHeader:
    """The header in the first bytes of a snapshot."""
    if len(data) < HEADER_BYTES:
        raise Corrupt("A snapshot is shorter than its header", path=path, offset=0, advice=ADVICE)
    head = data[: _HEADER.size]
    magic, version, zeros, metadata_bytes, metadata_crc, segments_at, zero = _HEADER.unpack(head)
    if magic != MAGIC:
        raise Corrupt("This is not a snapshot of a bucket", path=path, offset=0, advice=ADVICE)
    if _CRC.unpack_from(data, _HEADER.size)[0] != value(head) or any(zeros) or zero:
        raise Corrupt("The header of a snapshot is damaged", path=path, offset=0, advice=ADVICE)
    if version != VERSION:
        raise Corrupt(f"Snapshot version {version} is not supported", path=path, offset=4)
    if (
        metadata_bytes > METADATA_BYTES_MAX
        or not HEADER_BYTES + metadata_bytes <= segments_at <= FILE_BYTES_MAX
    ):
        raise Corrupt("The header of a snapshot has impossible values", path=path, offset=8, advice=ADVICE)
    return BucketHeader(metadata_bytes, metadata_crc, segments_at)


def decode_metadata(data: bytes, path: str = "") -> BucketMetadata:
    """From the first bytes of a file, header and metadata at least."""
    header, message = _decode_message(data, path)
    try:
        return _from_message(message, header)
    except (ValueError, OverflowError) as error:
        raise _impossible(error, path) from error


class BitmapPlace(NamedTuple):
    """Place, length and checksum of a ledger's bitmap in the file."""

    span: LedgerSpan
    offset: int
    length: int
    crc: int


def bitmap_places(data: bytes, path: str = "") -> dict[int, BitmapPlace]:
    """Of each ledger, rising; from the first bytes of a file, header and metadata at least."""
    header, message = _decode_message(data, path)
    try:
        metadata = _from_message(message, header)
    except (ValueError, OverflowError) as error:
        raise _impossible(error, path) from error
    offset = HEADER_BYTES + header.metadata_bytes
    places: dict[int, BitmapPlace] = {}
    for span, length, crc in zip(metadata.spans, message.bitmap_bytes, message.bitmap_crc, strict=True):
        places[span.ledger_id] = BitmapPlace(span, offset, length, crc)
        offset += length
    return places


def decode_bitmap(content: bytes, place: BitmapPlace, path: str = "") -> BitMap:
    """The entries of one ledger, from the bytes at its place."""
    if len(content) != place.length or value(content) != place.crc:
        raise Corrupt("A snapshot's bitmap is damaged", path=path, offset=place.offset, advice=ADVICE)
    try:
        bitmap = bitmap_from_bytes(content)
        is_within = not bitmap or (place.span.first <= bitmap.min() and bitmap.max() < place.span.end)
        check(is_within, "a bitmap has an entry outside its ledger's span")
    except ValueError as error:
        raise _impossible(error, path, place.offset) from error
    return bitmap


def decode_bitmaps(data: bytes, path: str = "") -> dict[int, BitMap]:
    """The entries of each ledger, from the first bytes of a file: header, metadata and bitmaps at least."""
    bitmaps: dict[int, BitMap] = {}
    for ledger_id, place in bitmap_places(data, path).items():
        content = data[place.offset : place.offset + place.length]
        bitmaps[ledger_id] = decode_bitmap(content, place, path)
    return bitmaps


def decode_entries(
    metadata: BucketMetadata, ordinals: Ordinals, index: int, data: bytes, path: str = ""
) -> tuple[Int64Column, Int64Column, UInt32Column]:
    """The times, ledger ids and entry ids of one bucket segment, checked against all that the metadata says of it."""
    segments = metadata.segments
    offset = metadata.segments_at + int(segments.offsets[index])
    check_segment(metadata, index, data, path)
    times, places = decode_segment(
        data,
        int(segments.counts[index]),
        int(segments.first_ms[index]),
        int(segments.first_ordinals[index]),
        path,
        offset,
    )
    last = (int(times[-1]), int(places[-1]))
    if last != (segments.last_ms[index], segments.last_ordinals[index]) or int(places.max()) >= ordinals.end:
        raise Corrupt("A bucket segment does not match its metadata", path=path, offset=offset, advice=ADVICE)
    return times, *ordinals.to_positions(places)


def check_segment(metadata: BucketMetadata, index: int, data: bytes, path: str = "") -> None:
    """Raises Corrupt unless these are the bytes of the segment."""
    segments = metadata.segments
    if len(data) != segments.lengths[index] or value(data) != segments.crcs[index]:
        offset = metadata.segments_at + int(segments.offsets[index])
        raise Corrupt("A bucket segment's checksum does not match", path=path, offset=offset, advice=ADVICE)


def _decode_message(data: bytes, path: str) -> tuple[BucketHeader, pb.BucketMetadata]:
    header = decode_header(data, path)
    content = data[HEADER_BYTES : HEADER_BYTES + header.metadata_bytes]
    if len(content) != header.metadata_bytes or value(content) != header.metadata_crc:
        raise Corrupt("A snapshot's metadata is damaged", path=path, offset=HEADER_BYTES, advice=ADVICE)
    message = pb.BucketMetadata()
    try:
        message.ParseFromString(content)
    except DecodeError as error:
        raise _impossible(error, path) from error
    return header, message


def _impossible(error: Exception, path: str, offset: int = HEADER_BYTES) -> Corrupt:
    return Corrupt(
        f"A snapshot's metadata has impossible values: {error}", path=path, offset=offset, advice=ADVICE
    )


def _from_message(message: pb.BucketMetadata, header: BucketHeader) -> BucketMetadata:
    """Raises ValueError or OverflowError for what no snapshot can have."""
    check_id(message.topic_id, "topic_id")
    check_id(message.bucket_id, "bucket_id")
    spans = _spans(message)
    segments = _segments(message)
    bitmaps_end = HEADER_BYTES + header.metadata_bytes + sum(message.bitmap_bytes)
    check(bitmaps_end <= header.segments_at, "bitmaps reach into segments")
    _check_segments(segments, sum(span.end - span.first for span in spans))
    check(message.count == int(segments.counts.sum()), "the counts of segments do not add up")
    start = _position(message.start_ledger_id, message.start_entry_id)
    end = _position(message.end_ledger_id, message.end_entry_id)
    check(start <= end, "a range of the log ends before it starts")
    return BucketMetadata(
        topic_id=message.topic_id,
        bucket_id=message.bucket_id,
        start=start,
        end=end,
        count=message.count,
        checksum=message.checksum,
        spans=spans,
        segments=segments,
        segments_at=header.segments_at,
    )


def _spans(message: pb.BucketMetadata) -> tuple[LedgerSpan, ...]:
    columns = (message.ledger_id, message.ledger_first, message.ledger_end)
    lengths = {len(column) for column in (*columns, message.bitmap_bytes, message.bitmap_crc)}
    check(len(lengths) == 1 and 0 not in lengths, "the columns of ledgers differ in length, or are empty")
    spans = tuple(map(LedgerSpan, *columns))
    for span in spans:
        check_ledger_id(span.ledger_id)
        check(span.first <= span.end <= ENTRY_ID_MAX + 1, f"a span from {span.first} to {span.end}")
    rises = all(left.ledger_id < right.ledger_id for left, right in pairwise(spans))
    check(rises, "ledgers are out of order")
    check(sum(span.end - span.first for span in spans) <= ORDINAL_END, "the spans are too long")
    return spans


def _segments(message: pb.BucketMetadata) -> SegmentColumns:
    values = {column.name: getattr(message, column.field) for column in SEGMENT_COLUMNS}
    lengths = {len(column) for column in values.values()}
    check(len(lengths) == 1 and 0 not in lengths, "the columns of segments differ in length, or are empty")
    return SegmentColumns.of(values)


def _check_segments(segments: SegmentColumns, ordinals_end: int) -> None:
    """SNAPSHOT-1 as far as the metadata tells."""
    for column in SEGMENT_COLUMNS:
        values = getattr(segments, column.name)
        is_in_range = column.least <= int(values.min()) and int(values.max()) <= column.greatest
        check(is_in_range, f"{column.field} is out of range")
    first_ms, last_ms = segments.first_ms, segments.last_ms
    first, last = segments.first_ordinals, segments.last_ordinals
    check(max(int(first.max()), int(last.max())) < ordinals_end, "a segment's ordinal is beyond the spans")
    is_one = segments.counts == 1
    check(
        bool((((first_ms == last_ms) & (first == last)) == is_one).all()),
        "a segment's bounds and count disagree",
    )
    check(
        bool((_is_before(first_ms, first, last_ms, last) | is_one).all()), "a segment ends before it begins"
    )
    in_order = _is_before(last_ms[:-1], last[:-1], first_ms[1:], first[1:])
    check(bool(in_order.all()), "segments are out of order")


def _is_before(
    times: Int64Column, ordinals: Int64Column, other_times: Int64Column, other_ordinals: Int64Column
) -> npt.NDArray[np.bool_]:
    before: npt.NDArray[np.bool_] = (times < other_times) | (
        (times == other_times) & (ordinals < other_ordinals)
    )
    return before


def _position(ledger_id: int, entry_id: int) -> Position:
    check(ledger_id <= LEDGER_ID_MAX, f"ledger_id {ledger_id}")
    check(entry_id <= ENTRY_ID_MAX + 1, f"entry_id {entry_id}")
    return Position(ledger_id, entry_id)
