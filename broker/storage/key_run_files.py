"""Where runs of schedule keys are kept: a protocol, and local files.

A run is written once and never changed: aside first, synced, renamed, its folder synced. When `finish` returns, file
and name are durable and a manifest may name it. Before that it was read back whole: what it holds is what it was
given.

What a crash leaves: a file that no manifest names, or one that is still aside, with any bytes. Recovery removes both
(`list`, `delete`). A missing, cut or damaged file that a manifest names raises `Corrupt`; a disk that does not work
raises `Unavailable`, and a writer that raised it is to be aborted. Nothing else keeps what an aborted writer had
been given.

Writers and readers block and belong in a file thread; one thread at a time uses one. The storage's own methods run
them there.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from google_crc32c import extend, value

from broker.errors import Corrupt, MissingFile
from broker.model import LEDGER_ID_MAX, UInt64Column
from broker.runtime.vfs import File, Vfs
from broker.storage.disk_errors import disk_errors
from broker.storage.key_filter import KeyFilter, KeyFilterBuilder
from broker.storage.key_run import (
    ADVICE,
    BLOCK_ENTRIES,
    HEADER_BYTES,
    NO_KEYS,
    Fences,
    KeyColumns,
    KeyRunHeader,
    Stamp,
    decode_block,
    decode_fences,
    decode_filter,
    decode_header,
    encode_block,
    encode_fences,
    encode_header,
    join_keys,
)

WRITE_BYTES = 1 << 20
"""Key blocks are gathered to about this much before they are written."""

_CHECKED_BLOCKS = 16  # read back in one step: about a millisecond
_FILTER_READ_BYTES = 1 << 20
_FILE_NAME = re.compile(r"([1-9][0-9]{0,18})\.keys(\.new)?")
_ASIDE = ".new"
_CHECKSUM_END = 1 << 64
_OF_HOLDERS = Stamp()

_T = TypeVar("_T")
_Ids = list[int]  # within the classes `list` is a method


class KeyRunWriter(Protocol):
    """One run being written; every call blocks. Ends with `finish` or `abort`."""

    def append(self, keys: KeyColumns) -> None:
        """Write the entries that follow, in order, each once."""

    def check(self) -> bool:
        """After the last entry: read back a part of what was written; False once that was all of it."""

    def finish(self) -> KeyRunHeader:
        """After the last `check`: returns once file and name are durable. Raises Corrupt for a run that was not
        what had been written."""

    def abort(self) -> None:
        """Remove the file, as far as the disk lets; does nothing after `finish` returned, or a second time."""


class KeyRunReader(Protocol):
    """One run open for reading; every call blocks."""

    def read_header(self) -> KeyRunHeader: ...

    def read_fences(self, header: KeyRunHeader) -> Fences: ...

    def read_filter(self, header: KeyRunHeader) -> KeyFilter: ...

    def read_blocks(self, header: KeyRunHeader, fences: Fences, first: int, end: int) -> KeyColumns:
        """The entries of the blocks from `first` up to `end`, in one read."""

    def find(
        self, header: KeyRunHeader, fences: Fences, blocks: Sequence[int], hashes: UInt64Column
    ) -> KeyColumns:
        """The entries with one of some rising hashes in some blocks."""

    def close(self) -> None: ...


class KeyRunStorage(Protocol):
    """The runs of one topic. An id is given to one run only."""

    def open_writer(self, run_id: int, stamp: Stamp = _OF_HOLDERS) -> KeyRunWriter:
        """Blocks."""

    def open_reader(self, run_id: int) -> KeyRunReader:
        """Blocks."""

    async def read_header(self, run_id: int) -> KeyRunHeader: ...

    async def read_fences(self, header: KeyRunHeader) -> Fences: ...

    async def read_filter(self, header: KeyRunHeader) -> KeyFilter: ...

    async def find(
        self, header: KeyRunHeader, fences: Fences, blocks: Sequence[int], hashes: UInt64Column
    ) -> KeyColumns: ...

    async def delete(self, run_id: int) -> None:
        """Remove a run, if there is one, and what is aside of it. Durable only later: what comes back after a
        crash is named by nobody."""

    async def list(self) -> _Ids:
        """The ids of all runs there are, whole or not, rising."""


class LocalKeyRuns:
    """Runs as files of one folder, `topics/<topic_id>/keys`."""

    def __init__(self, vfs: Vfs, folder: str, topic_id: int, executor: Executor | None = None) -> None:
        """`executor`: where runs are read and removed; who writes one has a thread of its own."""
        self._vfs = vfs
        self._folder = folder
        self._topic_id = topic_id
        self._executor = executor

    def path(self, run_id: int) -> str:
        return f"{self._folder}/{run_id}.keys"

    def open_writer(self, run_id: int, stamp: Stamp = _OF_HOLDERS) -> LocalKeyRunWriter:
        return LocalKeyRunWriter(self._vfs, self.path(run_id), self._topic_id, run_id, stamp)

    def open_reader(self, run_id: int) -> LocalKeyRunReader:
        return LocalKeyRunReader(self._vfs, self.path(run_id), self._topic_id, run_id)

    async def read_header(self, run_id: int) -> KeyRunHeader:
        return await self._read(run_id, LocalKeyRunReader.read_header)

    async def read_fences(self, header: KeyRunHeader) -> Fences:
        return await self._read(header.run_id, lambda reader: reader.read_fences(header))

    async def read_filter(self, header: KeyRunHeader) -> KeyFilter:
        return await self._read(header.run_id, lambda reader: reader.read_filter(header))

    async def find(
        self, header: KeyRunHeader, fences: Fences, blocks: Sequence[int], hashes: UInt64Column
    ) -> KeyColumns:
        return await self._read(header.run_id, lambda reader: reader.find(header, fences, blocks, hashes))

    async def delete(self, run_id: int) -> None:
        await self._run(lambda: self._delete(run_id))

    async def list(self) -> _Ids:
        return await self._run(self._list)

    def _delete(self, run_id: int) -> None:
        for path in (self.path(run_id), self.path(run_id) + _ASIDE):
            with _disk_errors("removed", path), contextlib.suppress(FileNotFoundError):
                self._vfs.remove(path)

    def _list(self) -> _Ids:
        with _disk_errors("listed", self._folder):
            names = self._vfs.list_dir(self._folder)
        return sorted({int(match[1]) for match in map(_FILE_NAME.fullmatch, names) if match})

    async def _read(self, run_id: int, read: Callable[[LocalKeyRunReader], _T]) -> _T:
        def run() -> _T:
            with contextlib.closing(self.open_reader(run_id)) as reader:
                return read(reader)

        return await self._run(run)

    async def _run(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)


@dataclass(slots=True)
class _Tally:
    """Count and order-free checksum of entries."""

    count: int = 0
    checksum: int = 0

    def add(self, keys: KeyColumns) -> None:
        self.count += len(keys)
        self.checksum = (self.checksum + keys.checksum()) % _CHECKSUM_END


class LocalKeyRunWriter:
    """See `KeyRunWriter`. Raises Unavailable; FileExistsError for an id that was given before."""

    def __init__(self, vfs: Vfs, path: str, topic_id: int, run_id: int, stamp: Stamp = _OF_HOLDERS) -> None:
        self._vfs = vfs
        self._path = path
        self._topic_id = topic_id
        self._run_id = run_id
        self._stamp = stamp
        self._given, self._found = _Tally(), _Tally()
        self._first_ledger_id, self._last_ledger_id = LEDGER_ID_MAX, 0
        self._uncut = NO_KEYS  # less than a block
        self._first_hashes, self._lengths, self._crcs = array("Q"), array("I"), array("I")
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._end = HEADER_BYTES
        self._checked = 0  # blocks that were read back
        self._filter_crc = 0
        self._reading: _Reading | None = None
        self._file: File | None = None
        if vfs.exists(path):
            raise FileExistsError(path)
        with _disk_errors("created", path):
            self._file = vfs.open(path + _ASIDE, create=True)

    def append(self, keys: KeyColumns) -> None:
        if not len(keys):
            return
        self._given.add(keys)
        self._first_ledger_id = min(self._first_ledger_id, int(keys.ledger_ids.min()))
        self._last_ledger_id = max(self._last_ledger_id, int(keys.ledger_ids.max()))
        keys = join_keys([self._uncut, keys])
        end = len(keys) - len(keys) % BLOCK_ENTRIES
        for start in range(0, end, BLOCK_ENTRIES):
            self._add_block(keys.part(slice(start, start + BLOCK_ENTRIES)))
        # A copy: a view would keep the whole part alive.
        self._uncut = join_keys([NO_KEYS, keys.part(slice(end, None))])

    def check(self) -> bool:
        reading = self._reading
        if reading is None:
            reading = self._reading = self._end_blocks()
        first, end = self._checked, min(self._checked + _CHECKED_BLOCKS, len(reading.fences))
        keys = reading.read(first, end)
        self._found.add(keys)
        self._add_filter(reading.builder.add(keys.hashes))
        self._checked = end
        return end < len(reading.fences)

    def finish(self) -> KeyRunHeader:
        reading, file = self._reading, self._file
        assert reading is not None and file is not None and self._checked == len(reading.fences)
        if self._found != self._given:
            raise Corrupt("A key run does not hold the entries it was given", path=self._path)
        self._add_filter(reading.builder.end())
        self._gather(reading.encoded_fences)
        self._write_gathered()
        header = self._header(reading.header.filter_at, value(reading.encoded_fences))
        assert header.file_bytes == self._end
        with _disk_errors("written", self._path):
            file.pwrite([encode_header(header)], 0)
            file.sync()
            file.close()
            # The manifest must never name a file that a crash can take back.
            self._vfs.rename(self._path + _ASIDE, self._path)
            self._vfs.sync_dir(self._path.rpartition("/")[0])
        self._file = None
        return header

    def abort(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        with contextlib.suppress(OSError):
            file.close()
        for path in (self._path + _ASIDE, self._path):  # it may have been renamed already
            # What cannot be removed now is removed by recovery: no manifest names it.
            with contextlib.suppress(OSError):
                self._vfs.remove(path)

    def _add_block(self, keys: KeyColumns) -> None:
        block = encode_block(keys)
        self._first_hashes.append(int(keys.hashes[0]))
        self._lengths.append(len(block))
        self._crcs.append(value(block))
        self._gather(block)

    def _end_blocks(self) -> _Reading:
        """Write the last block; what was written can be read back then."""
        assert self._given.count and self._file is not None
        if len(self._uncut):
            self._add_block(self._uncut)
            self._uncut = NO_KEYS
        self._write_gathered()
        encoded = encode_fences(
            np.frombuffer(self._first_hashes, np.uint64),
            np.frombuffer(self._lengths, np.uint32),
            np.frombuffer(self._crcs, np.uint32),
        )
        header = self._header(self._end, value(encoded))
        fences = decode_fences(encoded, header, self._path)
        return _Reading(self._file, header, fences, encoded, KeyFilterBuilder(header.count))

    def _header(self, filter_at: int, fences_crc: int) -> KeyRunHeader:
        return KeyRunHeader(
            topic_id=self._topic_id,
            run_id=self._run_id,
            count=self._given.count,
            checksum=self._given.checksum,
            first_ledger_id=self._first_ledger_id,
            last_ledger_id=self._last_ledger_id,
            filter_at=filter_at,
            block_count=len(self._first_hashes),
            filter_blocks=KeyFilterBuilder(self._given.count).block_count,
            filter_crc=self._filter_crc,
            fences_crc=fences_crc,
            kind=self._stamp.kind,
            settled_ms=self._stamp.settled_ms,
        )

    def _add_filter(self, part: bytes) -> None:
        self._filter_crc = extend(self._filter_crc, part)
        self._gather(part)

    def _gather(self, part: bytes) -> None:
        self._gathered.append(part)
        self._gathered_bytes += len(part)
        if self._gathered_bytes >= WRITE_BYTES:
            self._write_gathered()

    def _write_gathered(self) -> None:
        assert self._file is not None
        with _disk_errors("written", self._path):
            self._file.pwrite(self._gathered, self._end)
        self._end += self._gathered_bytes
        self._gathered, self._gathered_bytes = [], 0


@dataclass(frozen=True, slots=True)
class _Reading:
    """The blocks of a run that is being read back, and the filter that is made of them."""

    file: File
    header: KeyRunHeader  # as far as it is known
    fences: Fences
    encoded_fences: bytes
    builder: KeyFilterBuilder

    def read(self, first: int, end: int) -> KeyColumns:
        return _read_blocks(self.file, self.header, self.fences, first, end)


class LocalKeyRunReader:
    """See `KeyRunReader`. Raises Corrupt, Unavailable."""

    def __init__(self, vfs: Vfs, path: str, topic_id: int, run_id: int) -> None:
        self._path = path
        self._topic_id = topic_id
        self._run_id = run_id
        try:
            with _disk_errors("opened", path):
                self._file = vfs.open(path)
        except FileNotFoundError as error:
            raise MissingFile("A key run is missing", path=path, advice=ADVICE) from error

    def read_header(self) -> KeyRunHeader:
        header = decode_header(_pread(self._file, HEADER_BYTES, 0), self._path)
        named, found = (self._topic_id, self._run_id), (header.topic_id, header.run_id)
        if found != named:
            what = f"A key run of topic and run {found} lies in the place of {named}"
            raise Corrupt(what, path=self._path, offset=8, advice=ADVICE)
        with _disk_errors("read", self._path):
            size = self._file.size()
        if size != header.file_bytes:
            what = f"A key run has {size} bytes where there are {header.file_bytes}"
            raise Corrupt(what, path=self._path, offset=min(size, header.file_bytes), advice=ADVICE)
        return header

    def read_fences(self, header: KeyRunHeader) -> Fences:
        data = _pread(self._file, header.fences_bytes, header.fences_at)
        return decode_fences(data, header, self._path)

    def read_filter(self, header: KeyRunHeader) -> KeyFilter:
        data = bytearray()
        crc = 0
        for start in range(0, header.filter_bytes, _FILTER_READ_BYTES):
            length = min(_FILTER_READ_BYTES, header.filter_bytes - start)
            part = _pread(self._file, length, header.filter_at + start)
            crc = extend(crc, part)
            data += part
        return decode_filter(data, crc, header, self._path)

    def read_blocks(self, header: KeyRunHeader, fences: Fences, first: int, end: int) -> KeyColumns:
        return _read_blocks(self._file, header, fences, first, end)

    def find(
        self, header: KeyRunHeader, fences: Fences, blocks: Sequence[int], hashes: UInt64Column
    ) -> KeyColumns:
        found = [NO_KEYS]
        for block in blocks:
            keys = _read_blocks(self._file, header, fences, block, block + 1)
            low, high = (
                np.searchsorted(hashes, keys.hashes[0]),
                np.searchsorted(hashes, keys.hashes[-1], "right"),
            )
            here = hashes[low:high]
            starts = np.searchsorted(keys.hashes, here, side="left").tolist()
            ends = np.searchsorted(keys.hashes, here, side="right").tolist()
            bounds = zip(starts, ends, strict=True)
            found += [keys.part(slice(start, end)) for start, end in bounds if start < end]
        return join_keys(found)

    def close(self) -> None:
        self._file.close()


def _read_blocks(file: File, header: KeyRunHeader, fences: Fences, first: int, end: int) -> KeyColumns:
    offsets, lengths = fences.offsets[first:end].tolist(), fences.lengths[first:end].tolist()
    data = _pread(file, offsets[-1] + lengths[-1] - offsets[0], offsets[0])
    keys = []
    for index, offset, length in zip(range(first, end), offsets, lengths, strict=True):
        block = data[offset - offsets[0] : offset - offsets[0] + length]
        keys.append(decode_block(block, header, fences, index, file.path))
    return join_keys(keys)


def _pread(file: File, length: int, offset: int) -> bytes:
    with _disk_errors("read", file.path):
        return file.pread(length, offset)


_disk_errors = partial(disk_errors, "a key run")
