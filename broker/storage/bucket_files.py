"""Snapshots of buckets as runs, files of `topics/<topic_id>/buckets`: how one is written, and what is read of it."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import replace

from pyroaring import BitMap

from broker.runs.storage import RunFile, RunKind, RunStorage, RunWriter
from broker.runtime.vfs import Vfs
from broker.storage.bucket_snapshot import (
    ADVICE,
    HEADER_BYTES,
    BucketMetadata,
    bitmap_places,
    check_segment,
    decode_bitmap,
    decode_header,
    decode_metadata,
    encode_metadata,
)

_ALIGNMENT = 4096  # so that what a hole leaves free is whole blocks of the file system
_READ_AHEAD_BYTES = 16 * 1024  # header and metadata of most buckets: one read


class SnapshotFileWriter:
    """A snapshot being written, whose metadata is not known yet. Every call blocks; ends with `finish` or `abort`."""

    def __init__(self, file: RunWriter) -> None:
        self._segments_at = file.end
        self._file = file
        self.append = file.append
        self.abort = file.abort

    def finish(self, metadata: BucketMetadata, bitmaps: dict[int, BitMap]) -> BucketMetadata:
        """Write what the file begins with, and return the metadata as it now is once all of it is durable."""
        self._file.flush()
        finished = replace(metadata, segments_at=self._segments_at)
        assert finished.file_bytes == self._file.end, "the segments are not those that the metadata names"
        self._file.finish(encode_metadata(finished, bitmaps))
        return finished


class SnapshotReader:
    """A snapshot open for reading; every call blocks. Raises Corrupt, Unavailable."""

    def __init__(self, file: RunFile) -> None:
        self._file = file
        self.close = file.close

    def read_metadata(self) -> BucketMetadata:
        metadata = decode_metadata(self._read_beginning(), self._file.path)
        self._file.check(metadata.topic_id, metadata.bucket_id, metadata.file_bytes, HEADER_BYTES)
        return metadata

    def read_bitmaps(self) -> dict[int, BitMap]:
        """The entries of each ledger."""
        bitmaps: dict[int, BitMap] = {}
        for ledger_id, place in bitmap_places(self._read_beginning(), self._file.path).items():
            content = self._file.pread(place.length, place.offset)
            bitmaps[ledger_id] = decode_bitmap(content, place, self._file.path)
        return bitmaps

    def read_bitmap(self, ledger_id: int) -> BitMap:
        """The entries of one ledger; none if the bucket does not know the ledger."""
        place = bitmap_places(self._read_beginning(), self._file.path).get(ledger_id)
        if place is None:
            return BitMap()
        return decode_bitmap(self._file.pread(place.length, place.offset), place, self._file.path)

    def read_segments(self, metadata: BucketMetadata, first: int, end: int) -> list[bytes]:
        """The segments from `first` up to `end` in one read, each checked against its crc."""
        if first >= end:
            return []
        offsets = metadata.segments.offsets[first:end].tolist()
        lengths = metadata.segments.lengths[first:end].tolist()
        block = self._file.pread(offsets[-1] + lengths[-1] - offsets[0], metadata.segments_at + offsets[0])
        segments: list[bytes] = []
        for index, offset, length in zip(range(first, end), offsets, lengths, strict=True):
            segment = block[offset - offsets[0] : offset - offsets[0] + length]
            check_segment(metadata, index, segment, self._file.path)
            segments.append(segment)
        return segments

    def _read_beginning(self) -> bytes:
        """Header and metadata, perhaps more."""
        data = self._file.pread(_READ_AHEAD_BYTES, 0)
        missing = HEADER_BYTES + decode_header(data, self._file.path).metadata_bytes - len(data)
        return data + self._file.pread(missing, len(data)) if missing > 0 else data


BUCKETS: RunKind[SnapshotReader] = RunKind("snapshot", "bucket", ADVICE, SnapshotReader)

BucketStorage = RunStorage[SnapshotReader]


def bucket_storage(vfs: Vfs, folder: str, topic_id: int, executor: Executor | None = None) -> BucketStorage:
    return RunStorage(vfs, folder, topic_id, BUCKETS, executor)


def create_bucket(storage: BucketStorage, bucket_id: int, reserve_bytes: int) -> SnapshotFileWriter:
    """Blocks. `reserve_bytes` is room for header, metadata and bitmaps (`metadata_bytes_max`)."""
    return SnapshotFileWriter(storage.create(bucket_id, -(-reserve_bytes // _ALIGNMENT) * _ALIGNMENT))


def save_bucket(
    storage: BucketStorage,
    bucket_id: int,
    metadata: BucketMetadata,
    bitmaps: dict[int, BitMap],
    segments: Iterable[bytes],
) -> BucketMetadata:
    """Write a whole snapshot whose metadata is known; nothing is left of it if that fails. Blocks."""
    beginning = encode_metadata(replace(metadata, segments_at=0), bitmaps)
    writer = SnapshotFileWriter(storage.create(bucket_id, len(beginning)))
    try:
        for segment in segments:
            writer.append(segment)
        return writer.finish(metadata, bitmaps)
    except BaseException:
        writer.abort()
        raise
