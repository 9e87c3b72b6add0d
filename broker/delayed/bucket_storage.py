"""Where snapshots of buckets are kept: a protocol, and local files.

A snapshot is written once and never changed. It is written under its final name, which nobody has been told yet;
when `finish` returns, the file and its name are durable and a manifest may name it.

What a crash leaves: a file that no manifest names, with any bytes. Recovery removes it (`list`, `delete`).
Missing, cut or damaged files that a manifest names raise `Corrupt`; a disk that does not work raises
`Unavailable`, and a writer that raised it is to be aborted. Nothing else keeps what an aborted writer had been
given, so whoever seals or merges keeps the rows until `finish` returned.

Writers and readers block and belong in a file thread; one thread at a time uses one. The storage's own methods
run them there.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from pyroaring import BitMap

from broker.errors import Corrupt, MissingFile, WrongSize
from broker.runtime.vfs import File, Vfs
from broker.storage.bucket_snapshot import (
    HEADER_BYTES,
    BucketMetadata,
    bitmap_places,
    check_segment,
    decode_bitmap,
    decode_header,
    decode_metadata,
    encode_metadata,
)
from broker.storage.disk_errors import disk_errors

WRITE_BYTES = 1 << 20
"""Segments are gathered to about this much before they are written."""

_ALIGNMENT = 4096  # so that what a hole leaves free is whole blocks of the file system
_READ_AHEAD_BYTES = 16 * 1024  # header and metadata of most buckets: one read
_FILE_NAME = re.compile(r"([1-9][0-9]{0,18})\.bucket")
_ADVICE = "The index can be built again from the ledgers"

_T = TypeVar("_T")
_Ids = list[int]  # within the classes `list` is a method


class SnapshotWriter(Protocol):
    """One snapshot being written; every call blocks. Ends with `finish` or `abort`."""

    def append(self, segment: bytes) -> None:
        """Write the segment that follows."""

    def finish(self, metadata: BucketMetadata, bitmaps: dict[int, BitMap]) -> BucketMetadata:
        """Write what the file begins with, and return the metadata as it now is once all of it is durable."""

    def abort(self) -> None:
        """Remove the file, as far as the disk lets; does nothing after `finish` returned, or a second time."""


class SnapshotReader(Protocol):
    """One snapshot open for reading; every call blocks."""

    def read_metadata(self) -> BucketMetadata: ...

    def read_bitmaps(self) -> dict[int, BitMap]:
        """The entries of each ledger."""

    def read_bitmap(self, ledger_id: int) -> BitMap:
        """The entries of one ledger; none if the bucket does not know the ledger."""

    def read_segments(self, metadata: BucketMetadata, first: int, end: int) -> list[bytes]:
        """The segments from `first` up to `end` in one read, each checked against its crc."""

    def close(self) -> None: ...


class BucketSnapshotStorage(Protocol):
    """The snapshots of one topic. A bucket's id is given to one snapshot only."""

    def open_writer(self, bucket_id: int, reserve_bytes: int) -> SnapshotWriter:
        """Blocks. `reserve_bytes` is room for header, metadata and bitmaps (`metadata_bytes_max`)."""

    def open_reader(self, bucket_id: int) -> SnapshotReader:
        """Blocks."""

    async def create(self, bucket_id: int, reserve_bytes: int) -> SnapshotWriter: ...

    async def save_all(
        self,
        bucket_id: int,
        metadata: BucketMetadata,
        bitmaps: dict[int, BitMap],
        segments: Iterable[bytes],
    ) -> BucketMetadata:
        """Write a whole snapshot whose metadata is known; nothing is left of it if that fails."""

    async def read_metadata(self, bucket_id: int) -> BucketMetadata: ...

    async def read_bitmaps(self, bucket_id: int) -> dict[int, BitMap]: ...

    async def read_bitmap(self, bucket_id: int, ledger_id: int) -> BitMap: ...

    async def read_segment(self, metadata: BucketMetadata, index: int) -> bytes: ...

    async def read_segments(self, metadata: BucketMetadata, first: int, end: int) -> list[bytes]: ...

    async def delete(self, bucket_id: int) -> None:
        """Remove a snapshot, if there is one. Durable only later: what comes back after a crash is named by nobody."""

    async def list(self) -> _Ids:
        """The ids of all snapshots there are, whole or not, rising."""


class LocalBucketStorage:
    """Snapshots as files of one folder, `topics/<topic_id>/buckets`."""

    def __init__(
        self,
        vfs: Vfs,
        folder: str,
        topic_id: int,
        executor: Executor | None = None,
        write_executor: Executor | None = None,
    ) -> None:
        """`write_executor`: where snapshots are written and synced, so that no read waits for that."""
        self._vfs = vfs
        self._folder = folder
        self._topic_id = topic_id
        self._executor = executor
        self._write_executor = write_executor or executor

    def path(self, bucket_id: int) -> str:
        return f"{self._folder}/{bucket_id}.bucket"

    def open_writer(self, bucket_id: int, reserve_bytes: int) -> LocalSnapshotWriter:
        return LocalSnapshotWriter(
            self._vfs, self.path(bucket_id), -(-reserve_bytes // _ALIGNMENT) * _ALIGNMENT
        )

    def open_reader(self, bucket_id: int) -> LocalSnapshotReader:
        return LocalSnapshotReader(self._vfs, self.path(bucket_id), self._topic_id, bucket_id)

    async def create(self, bucket_id: int, reserve_bytes: int) -> LocalSnapshotWriter:
        return await self._run(lambda: self.open_writer(bucket_id, reserve_bytes))

    async def save_all(
        self,
        bucket_id: int,
        metadata: BucketMetadata,
        bitmaps: dict[int, BitMap],
        segments: Iterable[bytes],
    ) -> BucketMetadata:
        call = partial(self._save_all, bucket_id, metadata, bitmaps, segments)
        return await asyncio.get_running_loop().run_in_executor(self._write_executor, call)

    async def read_metadata(self, bucket_id: int) -> BucketMetadata:
        return await self._read(bucket_id, LocalSnapshotReader.read_metadata)

    async def read_bitmaps(self, bucket_id: int) -> dict[int, BitMap]:
        return await self._read(bucket_id, LocalSnapshotReader.read_bitmaps)

    async def read_bitmap(self, bucket_id: int, ledger_id: int) -> BitMap:
        return await self._read(bucket_id, lambda reader: reader.read_bitmap(ledger_id))

    async def read_segment(self, metadata: BucketMetadata, index: int) -> bytes:
        return (await self.read_segments(metadata, index, index + 1))[0]

    async def read_segments(self, metadata: BucketMetadata, first: int, end: int) -> list[bytes]:
        return await self._read(metadata.bucket_id, lambda reader: reader.read_segments(metadata, first, end))

    async def delete(self, bucket_id: int) -> None:
        await self._run(lambda: self._delete(bucket_id))

    async def list(self) -> _Ids:
        return await self._run(self._list)

    def _save_all(
        self,
        bucket_id: int,
        metadata: BucketMetadata,
        bitmaps: dict[int, BitMap],
        segments: Iterable[bytes],
    ) -> BucketMetadata:
        beginning = encode_metadata(replace(metadata, segments_at=0), bitmaps)
        writer = LocalSnapshotWriter(self._vfs, self.path(bucket_id), len(beginning))
        try:
            for segment in segments:
                writer.append(segment)
            return writer.finish(metadata, bitmaps)
        except BaseException:
            writer.abort()
            raise

    def _delete(self, bucket_id: int) -> None:
        path = self.path(bucket_id)
        with _disk_errors("removed", path), contextlib.suppress(FileNotFoundError):
            self._vfs.remove(path)

    def _list(self) -> _Ids:
        with _disk_errors("listed", self._folder):
            names = self._vfs.list_dir(self._folder)
        return sorted(int(match[1]) for match in map(_FILE_NAME.fullmatch, names) if match)

    async def _read(self, bucket_id: int, read: Callable[[LocalSnapshotReader], _T]) -> _T:
        def run() -> _T:
            with contextlib.closing(self.open_reader(bucket_id)) as reader:
                return read(reader)

        return await self._run(run)

    async def _run(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)


class LocalSnapshotWriter:
    """See `SnapshotWriter`. Raises Unavailable; FileExistsError for an id that was given before."""

    def __init__(self, vfs: Vfs, path: str, segments_at: int) -> None:
        self._vfs = vfs
        self._path = path
        self._segments_at = segments_at
        self._end = segments_at
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._file: File | None = None
        with _disk_errors("created", path):
            self._file = vfs.open(path, create=True)

    def append(self, segment: bytes) -> None:
        self._gathered.append(segment)
        self._gathered_bytes += len(segment)
        if self._gathered_bytes >= WRITE_BYTES:
            self._write_gathered()

    def finish(self, metadata: BucketMetadata, bitmaps: dict[int, BitMap]) -> BucketMetadata:
        assert self._file is not None
        self._write_gathered()
        finished = replace(metadata, segments_at=self._segments_at)
        assert finished.file_bytes == self._end, "the segments are not those that the metadata names"
        beginning = encode_metadata(finished, bitmaps)
        with _disk_errors("written", self._path):
            self._file.pwrite([beginning], 0)
            self._file.sync()
            # The manifest must never name a file that a crash can take back.
            self._vfs.sync_dir(self._path.rpartition("/")[0])
            self._file.close()
        self._file = None
        return finished

    def abort(self) -> None:
        file, self._file = self._file, None
        self._gathered = []
        if file is not None:
            # What cannot be removed now is removed by recovery: no manifest names it.
            with contextlib.suppress(OSError):
                file.close()
            with contextlib.suppress(OSError):
                self._vfs.remove(self._path)

    def _write_gathered(self) -> None:
        assert self._file is not None
        with _disk_errors("written", self._path):
            self._file.pwrite(self._gathered, self._end)
        self._end += self._gathered_bytes
        self._gathered, self._gathered_bytes = [], 0


class LocalSnapshotReader:
    """See `SnapshotReader`. Raises Corrupt, Unavailable."""

    def __init__(self, vfs: Vfs, path: str, topic_id: int, bucket_id: int) -> None:
        self._path = path
        self._topic_id = topic_id
        self._bucket_id = bucket_id
        try:
            with _disk_errors("opened", path):
                self._file = vfs.open(path)
        except FileNotFoundError as error:
            raise MissingFile("A snapshot is missing", path=path, advice=_ADVICE) from error

    def read_metadata(self) -> BucketMetadata:
        metadata = decode_metadata(self._read_beginning(), self._path)
        named, found = (self._topic_id, self._bucket_id), (metadata.topic_id, metadata.bucket_id)
        if found != named:
            what = f"A snapshot of topic and bucket {found} lies in the place of {named}"
            raise Corrupt(what, path=self._path, offset=HEADER_BYTES, advice=_ADVICE)
        with _disk_errors("read", self._path):
            size = self._file.size()
        if size != metadata.file_bytes:
            what = f"A snapshot has {size} bytes where there are {metadata.file_bytes}"
            raise WrongSize(what, path=self._path, offset=min(size, metadata.file_bytes), advice=_ADVICE)
        return metadata

    def read_bitmaps(self) -> dict[int, BitMap]:
        bitmaps: dict[int, BitMap] = {}
        for ledger_id, place in bitmap_places(self._read_beginning(), self._path).items():
            content = self._pread(place.length, place.offset)
            bitmaps[ledger_id] = decode_bitmap(content, place, self._path)
        return bitmaps

    def read_bitmap(self, ledger_id: int) -> BitMap:
        place = bitmap_places(self._read_beginning(), self._path).get(ledger_id)
        if place is None:
            return BitMap()
        return decode_bitmap(self._pread(place.length, place.offset), place, self._path)

    def read_segments(self, metadata: BucketMetadata, first: int, end: int) -> list[bytes]:
        if first >= end:
            return []
        offsets = metadata.segments.offsets[first:end].tolist()
        lengths = metadata.segments.lengths[first:end].tolist()
        block = self._pread(offsets[-1] + lengths[-1] - offsets[0], metadata.segments_at + offsets[0])
        segments: list[bytes] = []
        for index, offset, length in zip(range(first, end), offsets, lengths, strict=True):
            segment = block[offset - offsets[0] : offset - offsets[0] + length]
            check_segment(metadata, index, segment, self._path)
            segments.append(segment)
        return segments

    def close(self) -> None:
        self._file.close()

    def _read_beginning(self) -> bytes:
        """Header and metadata, perhaps more."""
        data = self._pread(_READ_AHEAD_BYTES, 0)
        missing = HEADER_BYTES + decode_header(data, self._path).metadata_bytes - len(data)
        return data + self._pread(missing, len(data)) if missing > 0 else data

    def _pread(self, length: int, offset: int) -> bytes:
        with _disk_errors("read", self._path):
            return self._file.pread(length, offset)


_disk_errors = partial(disk_errors, "a snapshot")
