"""Reading the files of a ledger: rows and frames, checked (FILES-2 and FILES-3 of `ledger_files`).

Everything blocks, but for what a `WarmFile` is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from google_crc32c import value

from broker.errors import Corrupt, DamagedMessage
from broker.model import Array, Int64Column, RowColumn, UInt32Column, distinct_values
from broker.runtime.vfs import File
from broker.storage.blocks import (
    BLOCK_ROWS,
    HEADER_BYTES,
    BlockChecksums,
    block_count,
    decode_footer,
    footer_bytes,
    is_contiguous,
    slice_frames,
    split_runs,
)

RESTORE = "Restore this topic from a backup, or run `postdate-broker verify` to see what is left"

FEW_READS = 16
"""Up to so many entries, reading one by one costs less than the NumPy calls that many share."""

_SAMPLED = 16
"""Of so many places one is looked at for whether it is in memory, which costs a fifth more than to read it."""


class Readable(Protocol):
    """A file as far as reading goes."""

    @property
    def path(self) -> str: ...

    def size(self) -> int: ...

    def pread(self, length: int, offset: int) -> bytes: ...

    def pread_nowait(self, length: int, offset: int) -> bytes | None: ...

    def read_ahead(self, begins: Sequence[int], ends: Sequence[int]) -> None: ...


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

    def pread_nowait(self, length: int, offset: int) -> bytes:
        return self.pread(length, offset)

    def read_ahead(self, begins: Sequence[int], ends: Sequence[int]) -> None:
        raise AssertionError("what is not in memory is not read")

    def size(self) -> int:
        return self._file.size()


class ReadHandles(NamedTuple):
    """The files of one ledger as far as reading goes."""

    data: Readable
    times: Readable
    rows: Readable


class Column(Protocol):
    """A column of a ledger, in a file of its own."""

    def read(self, file: Readable, first: int, count: int) -> Array:
        """`count` consecutive rows, read only."""

    def read_at(self, file: Readable, entry_ids: UInt32Column) -> Array:
        """The rows of rising ids."""

    def place(self, file: Readable, row: int) -> int:
        """Return where a row lies in the file."""


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
            for block in distinct_values(entry_ids[entry_ids < self._restored_count] // BLOCK_ROWS).tolist():
                if not self._verified[block]:
                    self._verify(file, block, None)
        itemsize = self._dtype.itemsize
        if len(entry_ids) <= FEW_READS:
            offsets = [HEADER_BYTES + entry_id * itemsize for entry_id in entry_ids.tolist()]
            return np.frombuffer(b"".join([read_exactly(file, itemsize, at) for at in offsets]), self._dtype)
        places = HEADER_BYTES + entry_ids.astype(np.int64) * itemsize
        return np.frombuffer(read_items(file, places, itemsize), self._dtype)

    def place(self, file: Readable, row: int) -> int:
        """See `Column`."""
        return HEADER_BYTES + row * self._dtype.itemsize

    def _block_end(self, block: int) -> int:
        return min((block + 1) * BLOCK_ROWS, self._restored_count)

    def _verify(self, file: Readable, block: int, rows: Array | None) -> None:
        checksums = self._checksums or self._load_footer(file)
        itemsize = self._dtype.itemsize
        first, end = block * BLOCK_ROWS, self._block_end(block)
        offset = HEADER_BYTES + first * itemsize
        content = read_exactly(file, (end - first) * itemsize, offset) if rows is None else rows
        if not checksums.verify(block, content):
            raise Corrupt("rows of a ledger are damaged", path=file.path, offset=offset, advice=RESTORE)
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
        raise Corrupt(
            "the row count of a footer differs from that of the manifest", path=file.path, offset=offset
        )
    return checksums


def column_at(column: Column, file: Readable, places: UInt32Column) -> Array:
    """The rows at rising places, one at least."""
    if is_contiguous(places):
        return column.read(file, int(places[0]), len(places))
    return column.read_at(file, places)


def read_frames(handles: ReadHandles, rows: RowColumn, data_bytes: int) -> list[bytes]:
    """The frames of rows, one at least, that follow each other in the files; checked (FILES-3)."""
    if len(rows) <= FEW_READS:
        return _read_few(handles, rows, data_bytes)
    starts = rows["offset"].astype(np.int64)
    ends = starts + rows["length"]
    if int(ends[-1]) > data_bytes or (starts[1:] < ends[:-1]).any():
        raise _damaged_offsets(handles)
    firsts = split_runs(starts, ends)
    run_starts = starts[firsts]
    run_ends = ends[np.append(firsts[1:], len(ends)) - 1]
    file = handles.data
    parts = _read_ranges(file, (HEADER_BYTES + run_starts).tolist(), (HEADER_BYTES + run_ends).tolist())
    frames = slice_frames(parts, run_starts, firsts, starts, ends)
    wrong = wrong_frames(frames, rows)
    if len(wrong):
        raise _damaged_frame(file, int(starts[wrong[0]]))
    return frames


def _read_few(handles: ReadHandles, rows: RowColumn, data_bytes: int) -> list[bytes]:
    file, frames, end = handles.data, [], 0
    facts = zip(rows["offset"].tolist(), rows["length"].tolist(), rows["crc"].tolist(), strict=True)
    for start, length, crc in facts:
        if start < end or (end := start + length) > data_bytes:
            raise _damaged_offsets(handles)
        frame = read_exactly(file, length, HEADER_BYTES + start)
        if value(frame) != crc:
            raise _damaged_frame(file, start)
        frames.append(frame)
    return frames


def _damaged_offsets(handles: ReadHandles) -> Corrupt:
    # The rows passed their checksum once, but may have been read again from a failing disk since.
    what = "offsets of a ledger's rows are damaged"
    return Corrupt(what, path=handles.rows.path, offset=HEADER_BYTES)


def _damaged_frame(file: Readable, start: int) -> DamagedMessage:
    what = "a stored message is damaged"
    return DamagedMessage(what, path=file.path, offset=HEADER_BYTES + start, advice=RESTORE)


def frames_within(rows: RowColumn, bytes_max: int) -> int:
    """Return how many of the first frames `bytes_max` allows; one at least."""
    return max(1, int(rows["length"].cumsum(dtype=np.int64).searchsorted(bytes_max, "right")))


def wrong_frames(frames: list[bytes], rows: RowColumn) -> npt.NDArray[np.int64]:
    """Return which frames are not those their rows were made for."""
    return np.flatnonzero(np.fromiter(map(value, frames), np.uint32, len(frames)) != rows["crc"])


def read_items(file: Readable, places: Int64Column, size: int) -> bytes:
    """Items of one size at rising places, side by side: neighbours with one read, so that a few bytes in vain save a
    call."""
    if not size:
        return b""
    firsts = split_runs(places, places + size)
    bounds = [*firsts.tolist(), len(places)]
    begins: list[int] = places[firsts].tolist()
    ends: list[int] = (places[[*(firsts[1:] - 1), -1]] + size).tolist()
    parts = []
    for run, part in enumerate(_read_ranges(file, begins, ends)):
        low, high = bounds[run], bounds[run + 1]
        if len(part) > (high - low) * size:
            # Items from every byte on, of which some are taken.
            items = np.ndarray((len(part) - size + 1,), f"V{size}", part, strides=(1,))
            parts.append(items[places[low:high] - begins[run]].tobytes())
        else:
            parts.append(part)
    return b"".join(parts)


def _read_ranges(file: Readable, begins: list[int], ends: list[int]) -> Iterator[bytes]:
    """The bytes of rising ranges. Once one of them is found not to be in memory, the system reads all that follow at
    once, where each would be waited for by itself."""
    is_asked = False
    for at, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        if not is_asked and at % _SAMPLED == 0:
            if (part := file.pread_nowait(end - begin, begin)) is not None:
                yield part
                continue
            file.read_ahead(begins[at:], ends[at:])
            is_asked = True
        yield read_exactly(file, end - begin, begin)


def read_exactly(file: Readable, length: int, offset: int) -> bytes:
    block = file.pread(length, offset)
    if len(block) != length:
        raise Corrupt(
            "a ledger file is shorter than it should be", path=file.path, offset=offset, advice=RESTORE
        )
    return block
