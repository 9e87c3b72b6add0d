"""The three files of a ledger, as the file threads see them: everything here blocks, and nothing awaits.

`topics/<topic_id>/ledgers/<ledger_id>.<generation>.{data,times,rows}`; the bytes are described in `blocks`.

Invariants:
  F1  Bytes below what was written never change, so a read needs no lock against the writer.
  F2  A row read from disk that this process did not write has had its block's checksum verified once.
  F3  A frame is never returned unless its crc32c is that of its row.
  F4  A file that somebody reads or writes is not closed under them; at most `limit` other ledgers are open.

After a crash the files may be longer than the manifest names, with any bytes there, a footer among them:
`cut_ledger` takes that off. Files shorter than named are damage.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from google_crc32c import value
from pyroaring import BitMap

from broker.errors import Corrupt, MissingFile, NotFound, StorageFailed, Unavailable, WrongSize
from broker.model import ROW, Array, EntryColumns, Int64Column, RowColumn, UInt32Column
from broker.runtime.vfs import Buffer, File, Vfs
from broker.storage.blocks import (
    BLOCK_ROWS,
    HEADER_BYTES,
    KINDS,
    TIME,
    BlockChecksums,
    LedgerCapture,
    LedgerName,
    block_count,
    decode_footer,
    decode_header,
    file_lengths,
    footer_bytes,
    is_contiguous,
    slice_frames,
    split_runs,
)

OPEN_LEDGERS = 256

_RESTORE = "Restore this topic from a backup, or run `postdate-broker verify` to see what is left"


class LedgerStorage(Protocol):
    """Where the entries of one ledger are kept; every call blocks. Local files are one such home."""

    def write(
        self,
        first_entry_id: int,
        data_offset: int,
        times: Sequence[Int64Column],
        rows: Sequence[RowColumn],
        frames: Sequence[bytes],
    ) -> None: ...

    def sync(self, footers: tuple[bytes, bytes] | None, entry_count: int) -> None: ...

    def read_times(self, first: int, count: int) -> Int64Column: ...

    def read_rows(self, first: int, count: int) -> RowColumn: ...

    def times_of(self, entry_ids: UInt32Column) -> Int64Column: ...

    def read(self, entry_ids: UInt32Column, data_bytes: int, bytes_max: int) -> EntryColumns: ...

    def read_nowait(
        self, entry_ids: UInt32Column, data_bytes: int, bytes_max: int
    ) -> EntryColumns | None: ...

    def delete(self, vfs: Vfs) -> None: ...


class Readable(Protocol):
    """A file as far as reading goes."""

    @property
    def path(self) -> str: ...

    def size(self) -> int: ...

    def pread(self, length: int, offset: int) -> bytes: ...


class WarmFile:
    """A file of which only what is in memory can be read; raises BlockingIOError for the rest."""

    __slots__ = ("_file",)

    def __init__(self, file: File) -> None:
        self._file = file

    @property
    def path(self) -> str:
        return self._file.path

    def pread(self, length: int, offset: int) -> bytes:
        block = self._file.pread_nowait(length, offset)
        if block is None:
            raise BlockingIOError
        return block

    def size(self) -> int:
        return self._file.size()


class ReadHandles(NamedTuple):
    """The files of one ledger as far as reading goes."""

    data: Readable
    times: Readable
    rows: Readable


class Handles:
    """The open files of one ledger."""

    __slots__ = ("data", "doomed", "pins", "present", "rows", "times")

    def __init__(self, data: File, times: File, rows: File) -> None:
        self.data = data
        self.times = times
        self.rows = rows
        self.pins = 0
        self.doomed = False  # to be closed by whoever unpins last
        self.present: BitMap | None = None  # of a sparse ledger: its entries, once they were read

    def for_reading(self) -> ReadHandles:
        return ReadHandles(self.data, self.times, self.rows)

    def warm(self) -> ReadHandles:
        """For the event loop: what is not in memory raises BlockingIOError."""
        return ReadHandles(*map(WarmFile, (self.data, self.times, self.rows)))

    def close(self) -> None:
        self.data.close()
        self.times.close()
        self.rows.close()


class OpenFiles:
    """The ledgers that have open files, least recently used first.

    Thread-safe. Opening happens under the lock, so it belongs in a file thread; `stats` alone may be read
    from the loop. While more than `limit` ledgers are in use at once, more than `limit` are open.
    """

    def __init__(self, vfs: Vfs, limit: int = OPEN_LEDGERS) -> None:
        self.vfs = vfs
        self._limit = limit
        self._lock = threading.Lock()
        self._handles: OrderedDict[LedgerName, Handles] = OrderedDict()

    def __len__(self) -> int:
        return len(self._handles)

    def pin(self, name: LedgerName, *, create: bool = False) -> Handles:
        """The ledger's files, which stay open until `unpin`; with `create` they are made first."""
        with self._lock:
            handles = self._handles.get(name)
            if handles is None:
                handles = self._create(name) if create else self._open(name)
                self._handles[name] = handles
            else:
                self._handles.move_to_end(name)
            handles.pins += 1
            if len(self._handles) > self._limit:
                self._close_idle()
            return handles

    def pin_nowait(self, name: LedgerName) -> Handles | None:
        """As `pin`, if the files are open and nobody holds the lock, which a file thread may for long."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            handles = self._handles.get(name)
            if handles is not None:
                self._handles.move_to_end(name)
                handles.pins += 1
            return handles
        finally:
            self._lock.release()

    def unpin(self, handles: Handles) -> None:
        with self._lock:
            handles.pins -= 1
            if handles.doomed and not handles.pins:
                handles.close()
            elif len(self._handles) > self._limit:
                self._close_idle()

    def discard(self, name: LedgerName) -> None:
        """Close the ledger's files, once nobody uses them any more."""
        with self._lock:
            handles = self._handles.pop(name, None)
            if handles is None:
                return
            handles.doomed = True
            if not handles.pins:
                handles.close()

    def discard_topic(self, topic_id: int) -> None:
        """Close the files of all ledgers of a topic, once nobody uses them any more."""
        with self._lock:
            names = [name for name in self._handles if name.topic_id == topic_id]
        for name in names:
            self.discard(name)

    def close(self) -> None:
        with self._lock:
            for handles in self._handles.values():
                handles.doomed = True
                if not handles.pins:
                    handles.close()
            self._handles.clear()

    def _close_idle(self) -> None:
        surplus = len(self._handles) - self._limit
        for name, handles in list(self._handles.items()):
            if surplus <= 0:
                return
            if not handles.pins:
                del self._handles[name]
                handles.close()
                surplus -= 1

    def _open(self, name: LedgerName) -> Handles:
        with contextlib.ExitStack() as opened:
            files = []
            for kind in KINDS:
                files.append(open_checked(self.vfs, name, kind))
                opened.callback(files[-1].close)
            opened.pop_all()
        return Handles(*files)

    def _create(self, name: LedgerName) -> Handles:
        with contextlib.ExitStack() as opened:
            files = []
            for kind in KINDS:
                files.append(self.vfs.open(name.path(kind), create=True))
                opened.callback(files[-1].close)
                files[-1].pwrite([name.header(kind).encode()], 0)
            opened.pop_all()
        return Handles(*files)


def open_checked(vfs: Vfs, name: LedgerName, kind: str) -> File:
    """Open one file of a ledger and check that it is the one its name says."""
    path = name.path(kind)
    try:
        file = vfs.open(path)
    except FileNotFoundError as error:
        raise MissingFile("a file of a ledger is missing", path=path, offset=0, advice=_RESTORE) from error
    try:
        if decode_header(file.pread(HEADER_BYTES, 0), path) != name.header(kind):
            raise Corrupt("a ledger file belongs to another ledger", path=path, offset=0, advice=_RESTORE)
    except BaseException:
        file.close()
        raise
    return file


class CheckedColumn:
    """Reads one column file; of the rows found at start it verifies each block when it is first read.

    What this process wrote itself needs no second look: it lies in the page cache as it was written.
    """

    def __init__(
        self, dtype: npt.DTypeLike, restored_count: int = 0, crcs: Sequence[int] | None = None
    ) -> None:
        self._dtype = np.dtype(dtype)
        self._restored_count = restored_count
        # None: in the footer, read when first needed. Two threads may both read it, and find the same.
        self._checksums = None if crcs is None else BlockChecksums(self._dtype.itemsize, restored_count, crcs)
        self._verified = bytearray(block_count(restored_count))  # one byte a block; a thread only ever sets 1

    def read(self, file: Readable, first: int, count: int) -> Array:
        """`count` consecutive rows, read only."""
        itemsize = self._dtype.itemsize
        column = np.frombuffer(
            read_exactly(file, count * itemsize, HEADER_BYTES + first * itemsize), self._dtype
        )
        if first < self._restored_count:
            end_block = block_count(min(first + count, self._restored_count))
            block = self._verified.find(0, first // BLOCK_ROWS, end_block)
            while block >= 0:
                low, high = block * BLOCK_ROWS - first, self._block_end(block) - first
                self._verify(file, block, column[low:high] if low >= 0 and high <= count else None)
                block = self._verified.find(0, block + 1, end_block)
        return column

    def read_at(self, file: Readable, entry_ids: UInt32Column) -> Array:
        """The rows of rising ids: neighbours with one read, so that a row in vain saves a call."""
        if 0 in self._verified:
            for block in np.unique(entry_ids[entry_ids < self._restored_count] // BLOCK_ROWS).tolist():
                if not self._verified[block]:
                    self._verify(file, block, None)
        itemsize = self._dtype.itemsize
        ids = entry_ids.astype(np.int64)
        firsts = split_runs(ids * itemsize, (ids + 1) * itemsize)
        ends = np.append(firsts[1:], len(ids))
        run_ids, run_ends = ids[firsts], ids[ends - 1] + 1
        places = ids - np.repeat(run_ids, ends - firsts)
        found: Array = np.empty(len(ids), self._dtype)
        runs = zip(firsts.tolist(), ends.tolist(), run_ids.tolist(), run_ends.tolist(), strict=True)
        for low, high, run_id, run_end in runs:
            block = read_exactly(file, (run_end - run_id) * itemsize, HEADER_BYTES + run_id * itemsize)
            # "clip" only because it writes to `out` without a copy; no place is out of bounds.
            np.frombuffer(block, self._dtype).take(places[low:high], out=found[low:high], mode="clip")
        found.flags.writeable = False
        return found

    def _block_end(self, block: int) -> int:
        return min((block + 1) * BLOCK_ROWS, self._restored_count)

    def _verify(self, file: Readable, block: int, rows: Array | None) -> None:
        checksums = self._checksums or self._load_footer(file)
        itemsize = self._dtype.itemsize
        first, end = block * BLOCK_ROWS, self._block_end(block)
        offset = HEADER_BYTES + first * itemsize
        found = read_exactly(file, (end - first) * itemsize, offset) if rows is None else rows
        if not checksums.verify(block, found):
            raise Corrupt("rows of a ledger are damaged", path=file.path, offset=offset, advice=_RESTORE)
        self._verified[block] = 1

    def _load_footer(self, file: Readable) -> BlockChecksums:
        self._checksums = read_footer(file, self._dtype.itemsize, self._restored_count)
        return self._checksums


def read_footer(file: Readable, itemsize: int, entry_count: int) -> BlockChecksums:
    """The footer of a column that the manifest names as sealed with `entry_count` entries."""
    offset = HEADER_BYTES + entry_count * itemsize
    checksums = decode_footer(
        read_exactly(file, footer_bytes(entry_count), offset), itemsize, file.path, offset
    )
    if checksums.row_count != entry_count:
        raise Corrupt("a footer counts other rows than the manifest", path=file.path, offset=offset)
    return checksums


class ReadAccess:
    """Reading the files of one ledger until they are deleted."""

    def __init__(self, open_files: OpenFiles, name: LedgerName) -> None:
        self.deleted = False
        self._open_files = open_files
        self._name = name

    def pin_nowait(self) -> Handles | None:
        return None if self.deleted else self._open_files.pin_nowait(self._name)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Handles]:
        if self.deleted:
            raise NotFound(f"ledger {self._name.ledger_id} was deleted")
        try:
            handles = self._open_files.pin(self._name)
            try:
                yield handles
            finally:
                self._open_files.unpin(handles)
        except Corrupt:
            if self.deleted:  # after we had looked
                raise NotFound(f"ledger {self._name.ledger_id} was deleted") from None
            raise
        except OSError as error:
            path = self._name.path("*")
            raise Unavailable(f"a ledger could not be read ({path}): {error}", path=path) from error

    def delete(self, vfs: Vfs) -> None:
        """Remove the files. Reads that have begun finish; the caller syncs the folder."""
        self.deleted = True
        self._open_files.discard(self._name)
        for kind in KINDS:
            with contextlib.suppress(FileNotFoundError):
                vfs.remove(self._name.path(kind))
        self._open_files.discard(self._name)  # a read that had begun may have opened them again


class LedgerFiles:
    """A ledger on the local disk. One thread writes at a time; any number read what was written."""

    def __init__(self, open_files: OpenFiles, name: LedgerName, found: LedgerCapture | None = None) -> None:
        self.name = name
        self._open_files = open_files
        self._access = ReadAccess(open_files, name)
        entry_count = found.entry_count if found else 0
        crcs = found is not None and not found.sealed
        self._made = entry_count > 0  # an empty ledger has no files
        self._times = CheckedColumn(TIME, entry_count, found.times_crcs if crcs and found else None)
        self._rows = CheckedColumn(ROW, entry_count, found.rows_crcs if crcs and found else None)

    def write(
        self,
        first_entry_id: int,
        data_offset: int,
        times: Sequence[Int64Column],
        rows: Sequence[RowColumn],
        frames: Sequence[bytes],
    ) -> None:
        """Write batches that follow what was written; make the files if these are the first."""
        if self._access.deleted:
            return  # what was appended last need not be written any more
        with self._writing(create=not self._made) as handles:
            self._made = True
            handles.data.pwrite(frames, HEADER_BYTES + data_offset)
            handles.times.pwrite(_buffers(times), HEADER_BYTES + first_entry_id * TIME.itemsize)
            handles.rows.pwrite(_buffers(rows), HEADER_BYTES + first_entry_id * ROW.itemsize)

    def sync(self, footers: tuple[bytes, bytes] | None, entry_count: int) -> None:
        """Return once all that was written is on disk, with the footers of a sealed ledger after its rows."""
        if not self._made or self._access.deleted:
            return
        with self._writing() as handles:
            if footers is not None:
                handles.times.pwrite([footers[0]], HEADER_BYTES + entry_count * TIME.itemsize)
                handles.rows.pwrite([footers[1]], HEADER_BYTES + entry_count * ROW.itemsize)
            handles.data.sync()
            handles.times.sync()
            handles.rows.sync()

    def read_times(self, first: int, count: int) -> Int64Column:
        with self._access.reading() as handles:
            return self._times.read(handles.times, first, count)

    def read_rows(self, first: int, count: int) -> RowColumn:
        with self._access.reading() as handles:
            return self._rows.read(handles.rows, first, count)

    def times_of(self, entry_ids: UInt32Column) -> Int64Column:
        with self._access.reading() as handles:
            return column_at(self._times, handles.times, entry_ids)

    def read(self, entry_ids: UInt32Column, data_bytes: int, bytes_max: int) -> EntryColumns:
        """Entries with rising ids, all of them written; `data_bytes` is the length of the data written.

        Frames are read of the first entries only, as many as `bytes_max` allows, and of one at least.
        """
        with self._access.reading() as handles:
            return self._read(handles.for_reading(), entry_ids, data_bytes, bytes_max)

    def read_nowait(self, entry_ids: UInt32Column, data_bytes: int, bytes_max: int) -> EntryColumns | None:
        """As `read`, for the event loop: None unless the files are open and what is read of them is in memory."""
        if (handles := self._access.pin_nowait()) is None:
            return None
        try:
            return self._read(handles.warm(), entry_ids, data_bytes, bytes_max)
        except BlockingIOError:
            return None
        finally:
            self._open_files.unpin(handles)

    def _read(
        self, handles: ReadHandles, entry_ids: UInt32Column, data_bytes: int, bytes_max: int
    ) -> EntryColumns:
        times = column_at(self._times, handles.times, entry_ids)
        rows = column_at(self._rows, handles.rows, entry_ids)
        frames = read_frames(handles, rows[: frames_within(rows, bytes_max)], data_bytes)
        return EntryColumns(self.name.ledger_id, entry_ids, times, rows, frames)

    def delete(self, vfs: Vfs) -> None:
        """Remove the files. Reads that have begun finish; the caller syncs the folder."""
        self._access.delete(vfs)

    @contextlib.contextmanager
    def _writing(self, *, create: bool = False) -> Iterator[Handles]:
        try:
            handles = self._open_files.pin(self.name, create=create)
            try:
                yield handles
            finally:
                self._open_files.unpin(handles)
        except OSError as error:
            path = self.name.path("*")
            raise StorageFailed(f"a ledger could not be written ({path}): {error}", path=path) from error


def column_at(column: CheckedColumn, file: Readable, places: UInt32Column) -> Array:
    """The rows at rising places, one at least."""
    if is_contiguous(places):
        return column.read(file, int(places[0]), len(places))
    return column.read_at(file, places)


def read_frames(handles: ReadHandles, rows: RowColumn, data_bytes: int) -> list[bytes]:
    """The frames of rows, one at least, that follow each other in the files; checked (F3)."""
    starts = rows["offset"].astype(np.int64)
    ends = starts + rows["length"]
    # The rows passed their checksum once, but may have been read again from a failing disk since.
    if int(ends[-1]) > data_bytes or (starts[1:] < ends[:-1]).any():
        raise Corrupt("offsets of a ledger's rows are damaged", path=handles.rows.path, offset=HEADER_BYTES)
    firsts = split_runs(starts, ends)
    run_starts = starts[firsts]
    run_ends = ends[np.append(firsts[1:], len(ends)) - 1]
    file = handles.data
    runs = zip(run_starts.tolist(), run_ends.tolist(), strict=True)
    parts = (read_exactly(file, end - start, HEADER_BYTES + start) for start, end in runs)
    frames = slice_frames(parts, run_starts, firsts, starts, ends)
    wrong = wrong_frames(frames, rows)
    if len(wrong):
        offset = HEADER_BYTES + int(starts[wrong[0]])
        raise Corrupt("a stored message is damaged", path=file.path, offset=offset, advice=_RESTORE)
    return frames


def frames_within(rows: RowColumn, bytes_max: int) -> int:
    """How many of the first frames `bytes_max` allows; one at least."""
    return max(1, int(rows["length"].cumsum(dtype=np.int64).searchsorted(bytes_max, "right")))


def wrong_frames(frames: list[bytes], rows: RowColumn) -> npt.NDArray[np.int64]:
    """Which frames are not those their rows were made for."""
    return np.flatnonzero(np.fromiter(map(value, frames), np.uint32, len(frames)) != rows["crc"])


def read_exactly(file: Readable, length: int, offset: int) -> bytes:
    block = file.pread(length, offset)
    if len(block) != length:
        raise Corrupt(
            "a ledger file is shorter than it should be", path=file.path, offset=offset, advice=_RESTORE
        )
    return block


def _buffers(columns: Sequence[Array]) -> list[Buffer]:
    return [column.view(np.uint8).data for column in columns]


def cut_ledger(vfs: Vfs, folder: str, capture: LedgerCapture) -> None:
    """Recovery: take off the files what was written after the manifest's capture, a footer included.

    Needed for unsealed ledgers only: a sealed one was whole on disk before a manifest called it sealed.
    """
    name = capture.name(folder)
    for kind, length in file_lengths(capture).items():
        path = name.path(kind)
        if capture.entry_count == 0:  # the files may be missing, or made and torn; the first write makes them
            with contextlib.suppress(FileNotFoundError):
                vfs.remove(path)
            continue
        file = open_checked(vfs, name, kind)
        try:
            check_length(file, length, exact=False)
            if file.size() > length:
                file.truncate(length)
        finally:
            file.close()


def check_length(file: File, length: int, exact: bool) -> None:
    size = file.size()
    if size < length or (exact and size > length):
        what = f"a ledger file holds {size} bytes where the manifest names {length}"
        raise WrongSize(what, path=file.path, offset=size, advice=_RESTORE)
