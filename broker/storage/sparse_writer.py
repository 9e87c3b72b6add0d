"""Writes a sparse generation of a ledger: the entries that are live, under their old ids. Blocks; memory is bounded.

    live_entries -> write_generation -> check_generation

Nothing here touches the ledger that is read, nor any name that a manifest knows: whoever commits the generation moves
its files to where they belong.

Invariants:
  Z1  Frames are copied byte for byte, so that what the producer's checksum covered is still covered by it.
  Z2  Times are the effective ones under the amendments given, and times to live count from them. Cancelled entries are
      not live, whoever has not settled them.
  Z3  When `write_generation` returns, files and folder are on disk; when `check_generation` returns, they were read
      back and hold what was written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from pyroaring import BitMap

from broker.errors import Corrupt
from broker.model import CANCELLED_MS, ROW, Int64Column, RowColumn, UInt32Column, bitmap_of, ids_of
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
from broker.storage.disk_errors import disk_errors
from broker.storage.ledger_check import verify_ledger
from broker.storage.ledger_files import (
    LedgerFiles,
    LedgerStorage,
    OpenFiles,
)
from broker.storage.ledger_reads import (
    read_footer,
)
from broker.storage.log import with_expiry_moved
from broker.storage.sparse import as_bitmap, encode_present
from broker.storage.sparse_files import SparseFiles, read_present

_SCAN_ROWS = 65_536
_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class LedgerSource:
    """A sealed ledger that is read: its files, and what was cancelled or moved of it."""

    capture: LedgerCapture
    storage: LedgerStorage
    amendments: Amendments


@dataclass(frozen=True, slots=True)
class Generation:
    """A rewritten ledger, and what the broker has to remember of it."""

    capture: LedgerCapture
    present: BitMap
    times_crcs: tuple[int, ...]
    rows_crcs: tuple[int, ...]
    last_expire_ms: int  # 0: at least one never expires, or there is none


@contextlib.contextmanager
def open_source(
    vfs: Vfs, folder: str, capture: LedgerCapture, amendments: Amendments
) -> Iterator[LedgerSource]:
    """A sealed ledger in files, dense or sparse."""
    open_files = OpenFiles(vfs, 1)
    name = capture.name(folder)
    storage: LedgerStorage = (
        LedgerFiles(open_files, name, capture)
        if capture.sparse is None
        else SparseFiles(open_files, name, capture)
    )
    try:
        yield LedgerSource(capture, storage, amendments)
    finally:
        open_files.close()


def live_entries(source: LedgerSource, settled: BitMap, now_ms: int) -> BitMap:
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


def write_generation(vfs: Vfs, source: LedgerSource, live: BitMap, target: LedgerName) -> Generation:
    """Write the live entries of a ledger to three files; raises Corrupt, Unavailable, and OSError for the source."""
    entry_ids = ids_of(live)
    with disk_errors("a generation", "written", target.path("*")):
        writer = _Writer(vfs, target)
        try:
            for first in range(0, len(entry_ids), BLOCK_ROWS):
                for times, rows, frames in _read(source, entry_ids[first : first + BLOCK_ROWS]):
                    writer.append(times, rows, frames)
            return writer.finish(source.capture, as_bitmap(entry_ids))
        finally:
            writer.close()


def check_generation(vfs: Vfs, folder: str, generation: Generation) -> None:
    """Read a generation back; raises Corrupt if anything is not as it was written (Z3)."""
    capture = generation.capture
    name = capture.name(folder)
    for problem in verify_ledger(vfs, folder, capture, 1):
        raise Corrupt(problem.what, path=problem.path, offset=problem.offset)
    with contextlib.closing(vfs.open(name.path("times"))) as file:
        times_crcs = read_footer(file, TIME.itemsize, capture.row_count).crcs()
        present = read_present(file, capture)
    with contextlib.closing(vfs.open(name.path("rows"))) as file:
        rows_crcs = read_footer(file, ROW.itemsize, capture.row_count).crcs()
    if (present, times_crcs, rows_crcs) != (
        generation.present,
        generation.times_crcs,
        generation.rows_crcs,
    ):
        raise Corrupt("a generation does not hold what was written", path=name.path("times"))


def remove_generation(vfs: Vfs, name: LedgerName) -> None:
    """Remove what there is of a generation that nobody will name."""
    for kind in KINDS:
        with contextlib.suppress(FileNotFoundError):
            vfs.remove(name.path(kind))


def _read(
    source: LedgerSource, ids: UInt32Column
) -> Iterator[tuple[Int64Column, RowColumn, Sequence[bytes]]]:
    """Entries with their frames, so many at a time as memory allows."""
    wanted = len(ids)
    while len(ids):
        columns = source.storage.read(ids[:wanted], source.capture.data_bytes, _READ_BYTES)
        count = len(columns.frames)
        found = columns.times[:count]
        times = source.amendments.effective(ids[:count], found)
        yield times, with_expiry_moved(columns.rows[:count], found, times), columns.frames
        # What did not fit was read in vain but for its frames: ask for about as much as fits.
        wanted = max(16, 2 * count)
        ids = ids[count:]


class _Writer:
    """The three files of one generation."""

    def __init__(self, vfs: Vfs, name: LedgerName) -> None:
        assert name.sparse
        self._vfs = vfs
        self._name = name
        self._files: dict[str, File] = {}
        self._data_bytes = 0
        self._times = BlockChecksums(TIME.itemsize)
        self._rows = BlockChecksums(ROW.itemsize)
        self._last_expire_ms = 0
        self._keeps = False  # an entry never expires
        try:
            for kind in KINDS:
                self._files[kind] = vfs.open(name.path(kind), create=True)
                self._files[kind].pwrite([name.header(kind).encode()], 0)
        except BaseException:
            self.close()
            raise

    def append(self, times: Int64Column, found: RowColumn, frames: Sequence[bytes]) -> None:
        rows = found.copy()
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
        self._last_expire_ms = max(self._last_expire_ms, int(rows["expire_at_ms"].max()))
        self._keeps = self._keeps or not rows["expire_at_ms"].all()

    def finish(self, source: LedgerCapture, present: BitMap) -> Generation:
        count = self._rows.row_count
        assert count == len(present), f"{count} rows of {len(present)} entries"
        section = encode_present(present, source.entry_count)
        footer = self._times.encode_footer()
        self._files["times"].pwrite([footer, section], HEADER_BYTES + count * TIME.itemsize)
        self._files["rows"].pwrite([self._rows.encode_footer()], HEADER_BYTES + count * ROW.itemsize)
        for file in self._files.values():
            file.sync()
        self._vfs.sync_dir(self._name.folder)
        capture = replace(
            source,
            generation=self._name.generation,
            data_bytes=self._data_bytes,
            sparse=SparseSizes(count, len(section)),
        )
        return Generation(
            capture,
            present,
            self._times.crcs(),
            self._rows.crcs(),
            0 if self._keeps else self._last_expire_ms,
        )

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}
