"""The three files of a ledger, as the file threads see them: everything here blocks, and nothing awaits.

`topics/<topic_id>/ledgers/<ledger_id>.<generation>.{data,times,rows}`; the bytes are described in `blocks`. A ledger
whose rows were packed has `.packed` in the place of `.rows`.

Invariants:
  FILES-1  Bytes below what was written never change, so a read needs no lock against the writer.
  FILES-2  A row read from disk that this process did not write has had its block's checksum verified once.
  FILES-3  A frame is never returned unless its crc32c is that of its row.
  FILES-4  A file that somebody reads or writes is not closed under them; at most `limit` other ledgers are open.

After a crash the files may be longer than the manifest names, with any bytes there, a footer among them:
`cut_ledger` takes that off. Files shorter than named are damage.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import numpy as np
from pyroaring import BitMap

from broker.errors import Corrupt, MissingFile, NotFound, StorageFailed, Unavailable, WrongSize
from broker.model import ROW, Array, EntryColumns, Int64Column, RowColumn, UInt32Column
from broker.runtime.clock import Clock, SystemClock
from broker.runtime.vfs import Buffer, File, Vfs, WriteFailed
from broker.storage.blocks import (
    HEADER_BYTES,
    KINDS,
    TIME,
    LedgerCapture,
    LedgerName,
    decode_header,
    file_lengths,
)
from broker.storage.ledger_reads import (
    RESTORE,
    CheckedColumn,
    ReadHandles,
    WarmFile,
    column_at,
    frames_within,
    read_frames,
)
from broker.storage.packed_rows import rows_column

OPEN_LEDGERS = 256

FAILED_READS_MAX = 30
FAILING_NS = 120_000_000_000
"""So many reads of a ledger fail, over so long, and each is the caller's to try again; then the failure lasts, like
that of a bad sector, and whoever waited for its end would wait for ever, with all that is behind."""

_FORGOTTEN_NS = 600_000_000_000
"""After so long without a failure they are counted anew."""

_LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of the process, not of the file: it lacks descriptors or memory."""


class LedgerStorage(Protocol):
    """Storage of one ledger's entries; every call blocks. Local files are one implementation."""

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

    def read_messages(
        self, entry_ids: UInt32Column, data_bytes: int, bytes_max: int
    ) -> tuple[RowColumn, list[bytes]]: ...

    def read_nowait(
        self, entry_ids: UInt32Column, data_bytes: int, bytes_max: int
    ) -> EntryColumns | None: ...

    def delete(self, vfs: Vfs, kept: Collection[str] = ()) -> None: ...


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

    def __init__(self, vfs: Vfs, limit: int = OPEN_LEDGERS, clock: Clock | None = None) -> None:
        self.vfs = vfs
        self.clock = clock or SystemClock()
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
                opened.callback(self._remove, name.path(kind))  # the next attempt makes it
                opened.callback(files[-1].close)
                files[-1].pwrite([name.header(kind).encode()], 0)
            opened.pop_all()
        return Handles(*files)

    def _remove(self, path: str) -> None:
        with contextlib.suppress(OSError):
            self.vfs.remove(path)


def open_checked(vfs: Vfs, name: LedgerName, kind: str) -> File:
    """Open one file of a ledger and check that it is the one its name says."""
    path = name.path(kind)
    try:
        file = vfs.open(path)
    except FileNotFoundError as error:
        raise MissingFile("a file of a ledger is missing", path=path, offset=0, advice=RESTORE) from error
    try:
        if decode_header(file.pread(HEADER_BYTES, 0), path) != name.header(kind):
            raise Corrupt("a ledger file belongs to another ledger", path=path, offset=0, advice=RESTORE)
    except BaseException:
        file.close()
        raise
    return file


class ReadAccess:
    """Reading the files of one ledger until they are deleted."""

    def __init__(self, open_files: OpenFiles, name: LedgerName) -> None:
        self.deleted = False
        self._open_files = open_files
        self._name = name
        self._failures = 0
        self._failing_since_ns = self._failed_ns = 0
        self._fails_for_good = False

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
            if self._is_lasting(error):
                what = f"a part of a ledger has not been readable for long: {error}"
                raise Corrupt(what, path=path, advice=RESTORE) from error
            raise Unavailable(f"a ledger could not be read ({path}): {error}", path=path) from error

    def _is_lasting(self, error: OSError) -> bool:
        """Note that a read failed; whether no wait will end that.

        Then it is damage, as far as readers go: they read around it and come back to it now and then. Reads that
        succeed in between prove nothing, as a bad sector fails those alone that touch it.
        """
        if error.errno in _LACKS:
            return False
        now_ns = self._open_files.clock.monotonic_ns()
        if not self._failures or now_ns - self._failed_ns > _FORGOTTEN_NS:
            self._failures, self._failing_since_ns = 0, now_ns
        # Threads that fail at once may lose a count: then it is one failure more until it lasts.
        self._failures += 1
        self._failed_ns = now_ns
        if self._failures > FAILED_READS_MAX and now_ns - self._failing_since_ns >= FAILING_NS:
            self._fails_for_good = True
        return self._fails_for_good

    def delete(self, vfs: Vfs, kept: Collection[str] = ()) -> None:
        """Remove the files but those `kept`. Reads that have begun finish; the caller syncs the folder."""
        self.deleted = True
        self._open_files.discard(self._name)
        for path in self._name.paths():
            if path not in kept:
                with contextlib.suppress(FileNotFoundError):
                    vfs.remove(path)
        self._open_files.discard(self._name)  # a read that had begun may have opened them again


class LedgerFiles:
    """A ledger on the local disk. One thread writes at a time; any number read what was written."""

    def __init__(self, open_files: OpenFiles, name: LedgerName, capture: LedgerCapture | None = None) -> None:
        self.name = name
        self._open_files = open_files
        self._access = ReadAccess(open_files, name)
        entry_count = capture.entry_count if capture else 0
        crcs = capture is not None and not capture.sealed
        self._made = entry_count > 0  # an empty ledger has no files
        self._times = CheckedColumn(TIME, entry_count, capture.times_crcs if crcs and capture else None)
        self._rows = rows_column(capture) if capture else CheckedColumn(ROW)

    def write(
        self,
        first_entry_id: int,
        data_offset: int,
        times: Sequence[Int64Column],
        rows: Sequence[RowColumn],
        frames: Sequence[bytes],
    ) -> None:
        """Write batches that follow what was written; make the files if these are the first.

        Raises StorageFailed once bytes are in doubt, OSError if nothing was written.
        """
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

    def read_messages(
        self, entry_ids: UInt32Column, data_bytes: int, bytes_max: int
    ) -> tuple[RowColumn, list[bytes]]:
        """As `read`, without the times."""
        with self._access.reading() as handles:
            return self._read_messages(handles.for_reading(), entry_ids, data_bytes, bytes_max)

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
        rows, frames = self._read_messages(handles, entry_ids, data_bytes, bytes_max)
        return EntryColumns(self.name.ledger_id, entry_ids, times, rows, frames)

    def _read_messages(
        self, handles: ReadHandles, entry_ids: UInt32Column, data_bytes: int, bytes_max: int
    ) -> tuple[RowColumn, list[bytes]]:
        rows = column_at(self._rows, handles.rows, entry_ids)
        return rows, read_frames(handles, rows[: frames_within(rows, bytes_max)], data_bytes)

    def delete(self, vfs: Vfs, kept: Collection[str] = ()) -> None:
        """Remove the files but those `kept`. Reads that have begun finish; the caller syncs the folder."""
        self._access.delete(vfs, kept)

    @contextlib.contextmanager
    def _writing(self, *, create: bool = False) -> Iterator[Handles]:
        try:
            handles = self._open_files.pin(self.name, create=create)
            try:
                yield handles
            finally:
                self._open_files.unpin(handles)
        except WriteFailed as error:
            path = self.name.path("*")
            raise StorageFailed(f"a ledger could not be written ({path}): {error}", path=path) from error


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
        raise WrongSize(what, path=file.path, offset=size, advice=RESTORE)
