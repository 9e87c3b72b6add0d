"""The bytes of a ledger's files: headers, checksums of blocks of rows, footers; which ranges to read at once.

Pure: no file, no clock. A ledger is three files; `times` and `rows` are columns of fixed-width items.

    data    | header | frame frame ...                     each frame is covered by the crc of its row
    times   | header | int64 ...    | footer when sealed |
    rows    | header | ROW ...      | footer when sealed |

    header  magic 4, version 1, zero 3, topic_id 8, ledger_id 8, generation 4, crc32c 4 of the 28 before it
    footer  crc32c 4 of each block of 4,096 rows, the last one partial; then the trailer:
            magic 4, version 1, zero 3, entry_count 8, block_count 4, crc32c 4 of all footer bytes before it
Integers are little-endian. `row.offset` counts from the first byte after the header.

Of a sealed ledger `rows` may be *packed* (`packed_rows`): then the file ends in `.packed`, and `.rows` goes.

A ledger that compaction rewrote is *sparse*: version 2, the surviving entries only, in the order of their ids; which
ids these are stands behind the footer of `times` (`sparse`).

Invariants:
  BLOCK-1  The checksum of a block covers exactly its rows, however they were cut into batches.
  BLOCK-2  A decoder gives a value or `Corrupt`, whatever the bytes; it allocates nothing it has not checked.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from google_crc32c import extend, value

from broker.errors import Corrupt, MissingFile, WrongSize
from broker.model import ENTRY_ID_MAX, FLAG_DELAYED, ROW, Array, Int64Column, RowColumn, UInt32Column
from broker.storage.message_fields import FRAME_HEAD

BLOCK_ROWS = 4096
HEADER_BYTES = 32
TRAILER_BYTES = 24
FRAME_HEAD_BYTES = 6  # tag and a varint below 2**35
TIME = np.dtype("<i8")
KINDS = ("data", "times", "rows")
PACKED = "packed"
"""Ending of the file that has the rows once they are packed."""
VERSION = 1
SPARSE_VERSION = 2

_GAP_BYTES = 12 * 1024  # so much in vain costs less than a second read, which may wait for the loop
_RUN_BYTES = 128 * 1024  # one read is at most this, plus one item: larger buffers cost a page fault a page
_EQUAL_COUNT = 16

_HEADER = struct.Struct("<4sB3xQQI")
_TRAILER = struct.Struct("<4sB3xQI")
_CRC = struct.Struct("<I")
_FOOTER_MAGIC = b"PDLF"
_ZERO = b"\0\0\0"
MAGICS = {"data": b"PDLD", "times": b"PDLT", "rows": b"PDLR", PACKED: b"PDLK"}
_KINDS = {magic: kind for kind, magic in MAGICS.items()}


@dataclass(frozen=True, slots=True)
class FileHeader:
    """Identity of a file: written first, checked whenever the file is opened."""

    kind: str  # "data", "times", "rows" or "packed"
    topic_id: int
    ledger_id: int
    generation: int
    sparse: bool = False

    def encode(self) -> bytes:
        version = SPARSE_VERSION if self.sparse else VERSION
        head = _HEADER.pack(MAGICS[self.kind], version, self.topic_id, self.ledger_id, self.generation)
        return head + _CRC.pack(value(head))


def decode_header(block: bytes, path: str = "") -> FileHeader:
    """The header in the first bytes of a ledger file."""
    if len(block) < HEADER_BYTES:
        raise Corrupt("a ledger file is shorter than its header", path=path, offset=0)
    head = block[: _HEADER.size]
    magic, version, topic_id, ledger_id, generation = _HEADER.unpack(head)
    if magic not in _KINDS:
        raise Corrupt("this is not a ledger file", path=path, offset=0)
    if _CRC.unpack_from(block, _HEADER.size)[0] != value(head) or head[5:8] != _ZERO:
        raise Corrupt("the header of a ledger file is damaged", path=path, offset=0)
    if version not in (VERSION, SPARSE_VERSION):
        raise Corrupt(f"ledger file version {version} is not supported", path=path, offset=4)
    return FileHeader(_KINDS[magic], topic_id, ledger_id, generation, version == SPARSE_VERSION)


class LedgerName(NamedTuple):
    """Paths of a ledger's files. `folder` is `topics/<topic_id>/ledgers`."""

    folder: str
    topic_id: int
    ledger_id: int
    generation: int
    sparse: bool = False
    packed: bool = False

    def file(self, kind: str) -> str:
        """The name of a file within the folder."""
        return f"{self.ledger_id}.{self.generation}.{self._ending(kind)}"

    def path(self, kind: str) -> str:
        return f"{self.folder}/{self.file(kind)}"

    def paths(self) -> list[str]:
        return [self.path(kind) for kind in KINDS]

    def header(self, kind: str) -> FileHeader:
        return FileHeader(self._ending(kind), self.topic_id, self.ledger_id, self.generation, self.sparse)

    def _ending(self, kind: str) -> str:
        return PACKED if self.packed and kind == "rows" else kind


class SparseSizes(NamedTuple):
    """Sizes of a sparse ledger besides its logical length."""

    present_count: int  # entries that are there
    present_bytes: int  # of the section that says which


@dataclass(frozen=True, slots=True)
class LedgerCapture:
    """State of one ledger at one moment, as a manifest names it.

    The checksums are those of an unsealed ledger's blocks. A sealed ledger carries its own, in footers that
    are on disk before any manifest says that it is sealed.
    """

    topic_id: int
    ledger_id: int
    generation: int
    entry_count: int
    data_bytes: int
    sealed: bool
    times_crcs: tuple[int, ...] = ()
    rows_crcs: tuple[int, ...] = ()
    sparse: SparseSizes | None = None  # None: every entry is there
    packed_bytes: int = 0  # of the file of packed rows; 0: they are not packed

    @property
    def row_count(self) -> int:
        """Rows in the files."""
        return self.entry_count if self.sparse is None else self.sparse.present_count

    def name(self, folder: str) -> LedgerName:
        is_packed = self.packed_bytes > 0
        return LedgerName(
            folder, self.topic_id, self.ledger_id, self.generation, self.sparse is not None, is_packed
        )


def file_lengths(capture: LedgerCapture) -> dict[str, int]:
    """Return how long each file of a ledger with entries is, in bytes."""
    footer = footer_bytes(capture.row_count) if capture.sealed else 0
    present = capture.sparse.present_bytes if capture.sparse else 0
    return {
        "data": HEADER_BYTES + capture.data_bytes,
        "times": HEADER_BYTES + capture.row_count * TIME.itemsize + footer + present,
        "rows": capture.packed_bytes or HEADER_BYTES + capture.row_count * ROW.itemsize + footer,
    }


def row_offset(entry_id: int) -> int:
    return HEADER_BYTES + entry_id * ROW.itemsize


class BlockChecksums:
    """The crc32c of every block of 4,096 rows of one column; the last block grows as rows are appended."""

    def __init__(self, itemsize: int, row_count: int = 0, crcs: Sequence[int] = ()) -> None:
        if len(crcs) != block_count(row_count):
            raise Corrupt(f"{row_count} rows have {block_count(row_count)} block checksums, not {len(crcs)}")
        self.itemsize = itemsize
        self.row_count = row_count
        self._crcs = list(crcs)

    def extend(self, rows: Array) -> None:
        """Take the rows that follow, C-contiguous."""
        count = len(rows)
        done = 0
        while done < count:
            filled = self.row_count % BLOCK_ROWS
            taken = min(count - done, BLOCK_ROWS - filled)
            chunk = rows if taken == count else rows[done : done + taken]
            if filled:
                self._crcs[-1] = extend(self._crcs[-1], chunk)
            else:
                self._crcs.append(value(chunk))
            self.row_count += taken
            done += taken

    @property
    def block_count(self) -> int:
        return len(self._crcs)

    def crcs(self) -> tuple[int, ...]:
        return tuple(self._crcs)

    def rows_of(self, block_index: int) -> tuple[int, int]:
        """First row of a block, and the row after its last one."""
        first = block_index * BLOCK_ROWS
        return first, min(first + BLOCK_ROWS, self.row_count)

    def verify(self, block_index: int, block: bytes | Array) -> bool:
        """Return whether these are the block's rows: all of them, unchanged."""
        first, end = self.rows_of(block_index)
        size = block.nbytes if isinstance(block, np.ndarray) else len(block)
        return (
            0 <= block_index < len(self._crcs)
            and size == (end - first) * self.itemsize
            and value(block) == self._crcs[block_index]
        )

    def encode_footer(self) -> bytes:
        crcs = np.array(self._crcs, "<u4").tobytes()
        footer = crcs + _TRAILER.pack(_FOOTER_MAGIC, VERSION, self.row_count, len(self._crcs))
        return footer + _CRC.pack(value(footer))


def block_count(row_count: int) -> int:
    return -(-row_count // BLOCK_ROWS)


def footer_bytes(row_count: int) -> int:
    return 4 * block_count(row_count) + TRAILER_BYTES


def decode_footer(footer: bytes, itemsize: int, path: str = "", offset: int = 0) -> BlockChecksums:
    """The checksums in a whole footer; `offset` is where it lies, for the error."""
    row_count = peek_row_count(footer)
    if row_count is None or len(footer) != footer_bytes(row_count):
        raise Corrupt("a sealed ledger file does not end in its footer", path=path, offset=offset)
    size = len(footer) - 4
    if _CRC.unpack_from(footer, size)[0] != value(footer[:size]):
        raise Corrupt("the footer of a ledger file is damaged", path=path, offset=offset)
    crcs: list[int] = np.frombuffer(footer, "<u4", block_count(row_count)).tolist()
    return BlockChecksums(itemsize, row_count, crcs)


def peek_row_count(tail: bytes) -> int | None:
    """The row count that the last bytes of a file claim, if they look like a trailer. Not checked by crc."""
    if len(tail) < TRAILER_BYTES:
        return None
    start = len(tail) - TRAILER_BYTES
    magic, version, row_count, blocks = _TRAILER.unpack_from(tail, start)
    known = magic == _FOOTER_MAGIC and version == VERSION and tail[start + 5 : start + 8] == _ZERO
    if not known or row_count > ENTRY_ID_MAX + 1 or blocks != block_count(row_count):
        return None
    return int(row_count)


def is_contiguous(entry_ids: UInt32Column) -> bool:
    """Return whether rising ids are consecutive."""
    return len(entry_ids) > 0 and int(entry_ids[-1]) - int(entry_ids[0]) + 1 == len(entry_ids)


def split_runs(starts: Int64Column, ends: Int64Column) -> npt.NDArray[np.int64]:
    """Index of the first of each run of byte ranges that one read should fetch; the ranges rise."""
    breaks = starts[1:] - ends[:-1] > _GAP_BYTES
    breaks |= starts[1:] // _RUN_BYTES != starts[:-1] // _RUN_BYTES  # bounds a read, whatever was asked
    return np.concatenate((np.zeros(1, np.int64), np.flatnonzero(breaks) + 1))


def slice_frames(
    parts: Iterable[bytes],
    part_offsets: Int64Column,
    firsts: npt.NDArray[np.int64],
    starts: Int64Column,
    ends: Int64Column,
) -> list[bytes]:
    """Cut frames, which rise, out of the pieces of `data` that hold them.

    The frames from index `firsts[i]` on lie in piece i, which begins at `part_offsets[i]` of `data`. Pieces
    are taken one at a time, so a generator that reads them keeps one in memory.
    """
    lasts = np.append(firsts[1:], len(starts))
    lengths: list[int] = (ends - starts).tolist()
    lows: list[int] = []
    highs: list[int] = []
    frames: list[bytes] = []
    runs = zip(parts, part_offsets.tolist(), firsts.tolist(), lasts.tolist(), strict=True)
    for part, part_offset, first, last in runs:
        if last - first == 1 and len(part) == lengths[first]:  # as of frames that lie scattered
            frames.append(part)
            continue
        if last - first >= _EQUAL_COUNT and (size := _equal_length(starts[first:last], ends[first:last])):
            offset = int(starts[first]) - part_offset
            frames += np.frombuffer(part, f"V{size}", last - first, offset).tolist()
            continue
        if not lows:  # for all pieces at once: they may hold one frame each
            bases = np.repeat(part_offsets, lasts - firsts)
            lows, highs = (starts - bases).tolist(), (ends - bases).tolist()
        frames += [part[low:high] for low, high in zip(lows[first:last], highs[first:last], strict=True)]
    return frames


def _equal_length(starts: Int64Column, ends: Int64Column) -> int:
    """The length of frames of one length, side by side, which NumPy cuts five times as fast; else 0."""
    lengths = ends - starts
    length = int(lengths[0])
    side_by_side = int(ends[-1] - starts[0]) == length * len(lengths)
    return length if side_by_side and (lengths == length).all() else 0


def frame_length(head: bytes) -> int | None:
    """Length of the frame that begins with these bytes; None if it is none."""
    if head[:1] != FRAME_HEAD:
        return None
    length = 0
    for place, byte in enumerate(head[1:]):
        length |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return 2 + place + length
    return None


class FileFault(enum.StrEnum):
    """Kind of problem of a file."""

    MISSING = "missing_file"
    SIZE = "size_mismatch"
    CHECKSUM = "bad_checksum"  # bytes that are not what was written
    ROWS = "bad_rows"  # whole, and in contradiction to each other


@dataclass(frozen=True, slots=True)
class LedgerProblem:
    """One thing in a ledger's files that is not as the manifest or the format says."""

    path: str
    offset: int  # in the file
    what: str
    fault: FileFault = FileFault.ROWS

    @classmethod
    def of(cls, error: Corrupt) -> LedgerProblem:
        """Return the problem behind an error of reading."""
        fault = FileFault.MISSING if isinstance(error, MissingFile) else FileFault.CHECKSUM
        if isinstance(error, WrongSize):
            fault = FileFault.SIZE
        return cls(error.path, error.offset, error.message, fault)


EntryName = Callable[[int], str]
"""Function that names the entry of a row, for texts."""


def name_entry(row: int) -> str:
    """Return where every entry has a row."""
    return f"entry {row}"


Place = Callable[[int], int]
"""Function that says where a row lies in its file, for texts."""


def find_bad_times(
    path: str,
    first: int,
    rows: RowColumn,
    times: Int64Column,
    name: EntryName = name_entry,
    place: Place = row_offset,
) -> Iterator[LedgerProblem]:
    delayed = (rows["flags"] & FLAG_DELAYED) != 0
    for index in np.flatnonzero(((times != 0) != delayed) | (times < 0)).tolist():
        what = f"{name(first + index)}: flag DELAYED and deliver_at_ms {times[index]} disagree"
        yield LedgerProblem(path, place(first + index), what)


def find_bad_offsets(
    path: str,
    first: int,
    rows: RowColumn,
    data_end: int | None,
    name: EntryName = name_entry,
    place: Place = row_offset,
) -> Iterator[LedgerProblem]:
    starts = rows["offset"].astype(np.int64)
    expected = np.roll(starts + rows["length"], 1)
    expected[0] = starts[0] if data_end is None else data_end
    for index in np.flatnonzero(starts != expected).tolist():
        what = f"{name(first + index)}: offset {starts[index]} does not continue {expected[index]}"
        yield LedgerProblem(path, place(first + index), what)
