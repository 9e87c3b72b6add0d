"""Writes a sparse generation of a ledger: the entries that are live, under their old ids. Blocks; memory is bounded.

    live_entries -> write_generation

Nothing here touches the ledger that is read, nor any name that a manifest knows: whoever commits the generation moves
its files to where they belong.

Invariants:
  GENERATION-1  Frames are copied byte for byte, so that what the producer's checksum covered is still covered by it.
  GENERATION-2  Times are the effective ones under the amendments given, and times to live count from them. Cancelled
      entries are not live, whoever has not settled them.
  GENERATION-3  When `write_generation` returns, the files are on disk. Their names are once whoever takes them has
      synced the folder. Who takes those of a job reads them back (`sparse_check`), and nobody else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from pyroaring import BitMap

from broker.model import CANCELLED_MS, ROW, Int64Column, RowColumn, UInt32Column, bitmap_of, ids_of
from broker.runtime.disk_errors import disk_errors
from broker.runtime.vfs import File, Vfs
from broker.storage.amendments import Amendments
from broker.storage.blocks import (
    BLOCK_ROWS,
    HEADER_BYTES,
    KINDS,
    TIME,
    BlockChecksums,
    LedgerCapture,
    LedgerName,
    SparseSizes,
)
from broker.storage.ledger_files import (
    LedgerFiles,
    LedgerStorage,
    OpenFiles,
)
from broker.storage.log import with_expiry_moved
from broker.storage.sparse import as_bitmap, encode_present
from broker.storage.sparse_files import SparseFiles

_SCAN_ROWS = 65_536
_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class GenerationSource:
    """A sealed ledger that is read: its files, and what was cancelled or moved of it."""

    capture: LedgerCapture
    storage: LedgerStorage
    amendments: Amendments


@contextlib.contextmanager
def open_source(
    vfs: Vfs, folder: str, capture: LedgerCapture, amendments: Amendments
) -> Iterator[GenerationSource]:
    """A sealed ledger in files, dense or sparse."""
    open_files = OpenFiles(vfs, 1)
    name = capture.name(folder)
    storage: LedgerStorage = (
        LedgerFiles(open_files, name, capture)
        if capture.sparse is None
        else SparseFiles(open_files, name, capture)
    )
    try:
        yield GenerationSource(capture, storage, amendments)
    finally:
        open_files.close()


def live_entries(source: GenerationSource, settled: BitMap, now_ms: int) -> BitMap:
    """The entries that somebody is owed, or whose time has not come; `settled` is so for every subscription."""
    live = BitMap()
    count = source.capture.entry_count
    for first in range(0, count, _SCAN_ROWS):
        size = min(_SCAN_ROWS, count - first)
        times = source.storage.read_times(first, size)
        ids = np.arange(first, first + size, dtype=np.uint32)
        effective = source.amendments.effective(ids, times)
        gone = (times == CANCELLED_MS) | ((times != 0) & (effective == 0))
        owed = np.ones(size, dtype=np.bool_)
        done = ids_of(settled & BitMap(range(first, first + size)))
        owed[done.astype(np.int64) - first] = False
        live |= bitmap_of(ids[~gone & (owed | (effective > now_ms))])
    return live


def write_generation(vfs: Vfs, source: GenerationSource, live: BitMap, target: LedgerName) -> LedgerCapture:
    """Write the live entries of a ledger to three files; raises Corrupt, Unavailable, and OSError for the source."""
    entry_ids = ids_of(live)
    with disk_errors("a generation", "written", target.path("*")):
        writer = _GenerationWriter(vfs, target)
        try:
            for first in range(0, len(entry_ids), BLOCK_ROWS):
                for times, rows, frames in _read(source, entry_ids[first : first + BLOCK_ROWS]):
                    writer.append(times, rows, frames)
            return writer.finish(source.capture, as_bitmap(entry_ids))
        finally:
            writer.close()


def remove_generation(vfs: Vfs, name: LedgerName) -> None:
    """Remove what there is of a generation that nobody will name."""
    for kind in KINDS:
        with contextlib.suppress(FileNotFoundError):
            vfs.remove(name.path(kind))


def _read(
    source: GenerationSource, ids: UInt32Column
) -> Iterator[tuple[Int64Column, RowColumn, Sequence[bytes]]]:
    """Entries with their frames, so many at a time as memory allows."""
    wanted = len(ids)
    while len(ids):
        columns = source.storage.read(ids[:wanted], source.capture.data_bytes, _READ_BYTES)
        count = len(columns.frames)
        stored_times = columns.times[:count]
        times = source.amendments.effective(ids[:count], stored_times)
        yield times, with_expiry_moved(columns.rows[:count], stored_times, times), columns.frames
        # What did not fit was read in vain but for its frames: ask for about as much as fits.
        wanted = max(16, 2 * count)
        ids = ids[count:]


class _GenerationWriter:
    """The three files of one generation."""

    def __init__(self, vfs: Vfs, name: LedgerName) -> None:
        assert name.sparse and not name.packed
        self._name = name
        self._files: dict[str, File] = {}
        self._data_bytes = 0
        self._times = BlockChecksums(TIME.itemsize)
        self._rows = BlockChecksums(ROW.itemsize)
        try:
            for kind in KINDS:
                self._files[kind] = vfs.open(name.path(kind), create=True)
                self._files[kind].pwrite([name.header(kind).encode()], 0)
        except BaseException:
            self.close()
            raise

    def append(self, times: Int64Column, stored_rows: RowColumn, frames: Sequence[bytes]) -> None:
        rows = stored_rows.copy()
        ends = np.cumsum(rows["length"], dtype=np.int64)
        rows["offset"] = self._data_bytes + ends - rows["length"]
        place = self._rows.row_count
        times = np.ascontiguousarray(times, TIME)
        self._files["data"].pwrite(frames, HEADER_BYTES + self._data_bytes)
        self._files["times"].pwrite([times.view(np.uint8).data], HEADER_BYTES + place * TIME.itemsize)
        self._files["rows"].pwrite([rows.view(np.uint8).data], HEADER_BYTES + place * ROW.itemsize)
        self._times.extend(times)
        self._rows.extend(rows)
        self._data_bytes += int(ends[-1])

    def finish(self, source: LedgerCapture, present: BitMap) -> LedgerCapture:
        count = self._rows.row_count
        assert count == len(present), f"{count} rows of {len(present)} entries"
        section = encode_present(present, source.entry_count)
        footer = self._times.encode_footer()
        self._files["times"].pwrite([footer, section], HEADER_BYTES + count * TIME.itemsize)
        self._files["rows"].pwrite([self._rows.encode_footer()], HEADER_BYTES + count * ROW.itemsize)
        for file in self._files.values():
            file.sync()
        return replace(
            source,
            generation=self._name.generation,
            data_bytes=self._data_bytes,
            sparse=SparseSizes(count, len(section)),
            packed_bytes=0,
        )

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}
