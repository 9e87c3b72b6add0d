"""A sparse ledger on the local disk, as the file threads see it: the bytes are described in `sparse` and `blocks`.

It is read through the same interface as a dense one, under the same ids. An entry that is not there has the time
CANCELLED_MS (it is never due), a row of zeros and a frame that nobody is sent: compaction leaves out only what every
subscription has settled, so that the last look refuses it, and whoever subscribes or seeks later has it settled from
the start. In `read_rows` it has the publish time of the surviving entry before it (or of the first one), so that
publish times still rise with the ids.

Nothing is ever written here; `sparse_writer` made the files.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from pyroaring import BitMap

from broker.model import CANCELLED_MS, ROW, EntryColumns, Int64Column, RowColumn, UInt32Column
from broker.runtime.vfs import Vfs
from broker.storage.blocks import HEADER_BYTES, TIME, LedgerCapture, LedgerName, footer_bytes
from broker.storage.ledger_files import (
    Handles,
    OpenFiles,
    ReadAccess,
)
from broker.storage.ledger_reads import (
    CheckedColumn,
    Readable,
    ReadHandles,
    column_at,
    frames_within,
    read_exactly,
    read_frames,
)
from broker.storage.message_fields import FRAME_TAG
from broker.storage.packed_rows import rows_column
from broker.storage.sparse import decode_present, find_places, present_between

GONE_FRAME = bytes((FRAME_TAG, 0))
"""Stands for the frame of an entry that is not there. It is known by `is`: an empty message has the same bytes."""


def read_present(file: Readable, capture: LedgerCapture) -> BitMap:
    """Return which entries of a sparse ledger are there, from its `times`; raises Corrupt."""
    assert capture.sparse is not None
    count, section_bytes = capture.sparse
    offset = HEADER_BYTES + count * TIME.itemsize + footer_bytes(count)
    section = read_exactly(file, section_bytes, offset)
    return decode_present(section, capture.entry_count, count, file.path, offset)


class SparseFiles:
    """See the module's description; a `LedgerStorage`."""

    def __init__(self, open_files: OpenFiles, name: LedgerName, capture: LedgerCapture) -> None:
        assert capture.sparse is not None and capture.sealed
        self.name = name
        self._capture = capture
        self._open_files = open_files
        self._access = ReadAccess(open_files, name)
        self._times = CheckedColumn(TIME, capture.row_count)
        self._rows = rows_column(capture)

    def write(
        self,
        first_entry_id: int,
        data_offset: int,
        times: Sequence[Int64Column],
        rows: Sequence[RowColumn],
        frames: Sequence[bytes],
    ) -> None:
        raise AssertionError("a sparse ledger takes no entries")

    def sync(self, footers: tuple[bytes, bytes] | None, entry_count: int) -> None:
        """Does nothing: the files were on disk before anybody was told of them."""

    def read_times(self, first: int, count: int) -> Int64Column:
        with self._access.reading() as handles:
            ids, place = present_between(self._present(handles), first, count)
            times = np.full(count, CANCELLED_MS, TIME)
            if len(ids):
                times[ids.astype(np.int64) - first] = self._times.read(handles.times, place, len(ids))
            return times

    def read_rows(self, first: int, count: int) -> RowColumn:
        with self._access.reading() as handles:
            present = self._present(handles)
            rows = np.zeros(count, ROW)
            if not count or not present:
                return rows
            ids, place = present_between(present, first, count)
            before = max(place - 1, 0)  # its publish time stands for those before the first one here
            column = self._rows.read(handles.rows, before, place + len(ids) - before or 1)
            offsets = np.arange(first, first + count)
            nearest = np.searchsorted(ids, offsets, "right") + (place - 1) - before
            rows["publish_time_ms"] = column["publish_time_ms"][np.maximum(nearest, 0)]
            rows[ids.astype(np.int64) - first] = column[place - before :][: len(ids)]
            return rows

    def times_of(self, entry_ids: UInt32Column) -> Int64Column:
        with self._access.reading() as handles:
            return self._times_at(handles.times, *find_places(self._present(handles), entry_ids))

    def read(self, entry_ids: UInt32Column, data_bytes: int, bytes_max: int) -> EntryColumns:
        with self._access.reading() as handles:
            return self._read(handles.for_reading(), self._present(handles), entry_ids, data_bytes, bytes_max)

    def read_messages(
        self, entry_ids: UInt32Column, data_bytes: int, bytes_max: int
    ) -> tuple[RowColumn, list[bytes]]:
        columns = self.read(entry_ids, data_bytes, bytes_max)
        return columns.rows, columns.frames

    def read_nowait(self, entry_ids: UInt32Column, data_bytes: int, bytes_max: int) -> EntryColumns | None:
        if (handles := self._access.pin_nowait()) is None:
            return None
        try:
            if handles.present is None:
                return None
            return self._read(handles.warm(), handles.present, entry_ids, data_bytes, bytes_max)
        except BlockingIOError:
            return None
        finally:
            self._open_files.unpin(handles)

    def present(self) -> BitMap:
        """The entries that are there."""
        with self._access.reading() as handles:
            return self._present(handles)

    def delete(self, vfs: Vfs, kept: Collection[str] = ()) -> None:
        self._access.delete(vfs, kept)

    def _read(
        self,
        handles: ReadHandles,
        present: BitMap,
        entry_ids: UInt32Column,
        data_bytes: int,
        bytes_max: int,
    ) -> EntryColumns:
        places, there = find_places(present, entry_ids)
        times = self._times_at(handles.times, places, there)
        rows = np.zeros(len(entry_ids), ROW)
        frames: list[bytes] = []
        if there.any():
            columns = column_at(self._rows, handles.rows, places[there].astype(np.uint32))
            rows[there] = columns
            frames = read_frames(handles, columns[: frames_within(columns, bytes_max)], data_bytes)
        rows.flags.writeable = False
        if not there.all():
            frames = _with_gaps(frames, there)
        return EntryColumns(self.name.ledger_id, entry_ids, times, rows, frames)

    def _times_at(self, file: Readable, places: Int64Column, there: np.ndarray) -> Int64Column:
        times = np.full(len(places), CANCELLED_MS, TIME)
        if there.any():
            times[there] = column_at(self._times, file, places[there].astype(np.uint32))
        return times

    def _present(self, handles: Handles) -> BitMap:
        # It lives as long as the files are open, so that memory is bounded by how many are. Two threads may both
        # read it, and find the same.
        if handles.present is None:
            handles.present = read_present(handles.times, self._capture)
        return handles.present


def _with_gaps(frames: list[bytes], there: np.ndarray) -> list[bytes]:
    """The frames of the first entries, as far as those that are there were read."""
    present_frames = iter(frames)
    filled: list[bytes] = []
    for is_there in there.tolist():
        frame = next(present_frames, None) if is_there else GONE_FRAME
        if frame is None:
            break
        filled.append(frame)
    return filled
