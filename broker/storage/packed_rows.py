"""Rows of a ledger that takes no more entries, packed: those of each block are as narrow as its values allow.

    header | block block ... | directory | trailer

    block      its rows, 4,096 but of the last one, side by side: of each field what it has beyond the base, in as many
               bytes as the greatest needs; nothing of a field that is the same in all rows
    directory  an item of 64 bytes for each block: base (a row, 44), step 4, crc32c 4 of the block, the bytes of each
               field in its rows 9 (0, 1, 2, 4 or 8 each, no more than in a row), zero 3
    trailer    magic 4 "PDLB", version 1, zero 3, row_count 8, block_count 4, crc32c 4 of all from the directory on

Row `i` of a block has of each field `base + what its row says`, modulo the field's range, and of `offset` besides
`step * i`: messages of one length need no byte of it. Where a row lies follows from its number, so one row is one short
read, as it is of rows that are not packed; nothing is kept of what was read but the directory, 64 bytes a block.

Invariants:
  PACK-1  What is unpacked is bit for bit what was packed, whatever the rows are.
  PACK-2  A decoder gives a value or `Corrupt`, whatever the bytes; it allocates nothing it has not checked.
  PACK-3  No row is returned before the checksum of its block was verified once.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import and_
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google_crc32c import extend, value

from broker.errors import Corrupt
from broker.model import ENTRY_ID_MAX, ROW, Array, RowColumn, UInt32Column, distinct_values, is_among
from broker.storage.blocks import BLOCK_ROWS, HEADER_BYTES, LedgerCapture, block_count
from broker.storage.ledger_reads import (
    FEW_READS,
    RESTORE,
    CheckedColumn,
    Column,
    Readable,
    read_exactly,
    read_items,
)

ITEM_BYTES = 64
PACKED_TRAILER_BYTES = 24

_MAGIC = b"PDLB"
_VERSION = 1
_TRAILER = struct.Struct("<4sB3xQI")
_CRC = struct.Struct("<I")
_FIELDS: tuple[str, ...] = ROW.names or ()
_SIZES = tuple(ROW[field].itemsize for field in _FIELDS)
_BITS = np.dtype([(field, f"<u{size}") for field, size in zip(_FIELDS, _SIZES, strict=True)])
"""A row of numbers that all wrap around."""
_ITEM = np.dtype(
    [
        ("base", _BITS),
        ("step", "<u4"),
        ("crc", "<u4"),
        ("widths", "u1", (len(_FIELDS),)),
        ("zero", "u1", (3,)),
    ]
)
_BASES = np.dtype({"names": ["base"], "formats": [f"V{ROW.itemsize}"], "itemsize": ITEM_BYTES})
_WIDTHS_ITEM = np.dtype(f"V{len(_FIELDS)}")
_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}
_WIDTHS = (0, *_CODES)
_BASE = struct.Struct("<" + "".join(_CODES[size] for size in _SIZES))
_STEP_CRC = struct.Struct("<II")
_BASE_STEP_CRC = struct.Struct(_BASE.format + "II")
_MASKS = tuple((1 << (8 * size)) - 1 for size in _SIZES)
_OFFSET = _FIELDS.index("offset")
_INDEXES = np.arange(BLOCK_ROWS, dtype=np.uint32)

Items = npt.NDArray[Any]


class _Narrow(NamedTuple):
    """A row of a block."""

    dtype: np.dtype[Any]
    size: int
    fields: tuple[str, ...]
    unpack: Callable[[bytes], tuple[int, ...]]  # of one row
    places: tuple[int, ...]  # of the fields in a row


@lru_cache(maxsize=256)
def _narrow(widths: bytes) -> _Narrow:
    places = tuple(place for place, width in enumerate(widths) if width)
    dtype = np.dtype([(_FIELDS[place], f"<u{widths[place]}") for place in places])
    unpack = struct.Struct("<" + "".join(_CODES[widths[place]] for place in places)).unpack
    return _Narrow(dtype, dtype.itemsize, tuple(_FIELDS[place] for place in places), unpack, places)


# -- writing ---------------------------------------------------------------------------------------------------


def pack_block(rows: RowColumn) -> tuple[bytes, bytes]:
    """The item of a block in the directory, and its bytes, of rows, one at least."""
    item = np.zeros(1, _ITEM)
    bits = rows.view(_BITS)
    columns = {field: bits[field] for field in _FIELDS}
    steps = _steps(item, columns["offset"])
    columns["offset"] = columns["offset"] - steps
    widths = []
    for field, column in columns.items():
        base = _least(column) if field == "offset" else column.min()
        item["base"][field] = base
        columns[field] = column - base
        greatest = int(columns[field].max())
        widths.append(next(width for width in _WIDTHS if greatest < 1 << (8 * width)))
    narrow = _narrow(bytes(widths))
    packed = np.empty(len(rows), narrow.dtype)
    for field in narrow.fields:
        packed[field] = columns[field]
    content = packed.tobytes()
    item["widths"] = widths
    item["crc"] = value(content)
    return item.tobytes(), content


def _steps(item: Items, offsets: UInt32Column) -> UInt32Column:
    """By how much offsets rise up to each row, if all messages have the average length, which goes into the item."""
    item["step"] = max(0, int(offsets[-1]) - int(offsets[0])) // max(len(offsets) - 1, 1)
    return _INDEXES[: len(offsets)] * np.uint32(item["step"][0])


def _least(column: UInt32Column) -> np.uint32:
    """The least of numbers that lie on both sides of 0, modulo their range."""
    least = int((column - column[0]).view(np.int32).min())
    return np.uint32((int(column[0]) + least) % (1 << 32))


def encode_end(items: bytes, row_count: int) -> bytes:
    """Encode what follows the blocks."""
    trailer = _TRAILER.pack(_MAGIC, _VERSION, row_count, len(items) // ITEM_BYTES)
    return items + trailer + _CRC.pack(extend(value(items), trailer))


# -- reading ---------------------------------------------------------------------------------------------------


def end_bytes(row_count: int) -> int:
    """Return how many bytes follow the blocks."""
    return block_count(row_count) * ITEM_BYTES + PACKED_TRAILER_BYTES


def peek_packed(tail: bytes) -> int | None:
    """The row count that the last bytes of a file claim, if they look like a trailer. No checksum is verified."""
    if len(tail) < PACKED_TRAILER_BYTES:
        return None
    start = len(tail) - PACKED_TRAILER_BYTES
    magic, version, row_count, blocks = _TRAILER.unpack_from(tail, start)
    known = magic == _MAGIC and version == _VERSION and tail[start + 5 : start + 8] == bytes(3)
    if not known or row_count > ENTRY_ID_MAX + 1 or blocks != block_count(row_count):
        return None
    return int(row_count)


@dataclass(frozen=True, slots=True, eq=False)
class Directory:
    """Places of the blocks of a file, and what the rows of each have in common."""

    row_count: int
    items: bytes
    starts: array[int]  # of each block, in the file, and where the last one ends
    narrow: list[_Narrow]

    def place(self, row: int) -> int:
        """Return where a row lies in the file."""
        block, index = divmod(row, BLOCK_ROWS)
        return self.starts[block] + index * self.narrow[block].size

    def step(self, block: int) -> int:
        """Return by how much offsets rise from a row to the next one, on average."""
        return int(_STEP_CRC.unpack_from(self.items, block * ITEM_BYTES + ROW.itemsize)[0])

    def crc(self, block: int) -> int:
        """Checksum of a block."""
        return int(_STEP_CRC.unpack_from(self.items, block * ITEM_BYTES + ROW.itemsize)[1])

    def bases(self, blocks: Sequence[int], counts: Sequence[int]) -> Array:
        """Rows that have what is the same in all rows of their blocks, so many of each block, to be added to."""
        some = (self._base(block) * count for block, count in zip(blocks, counts, strict=True))
        return np.frombuffer(bytearray().join(some), ROW)

    def unpack_one(self, block: int, index: int, content: bytes) -> bytes:
        """One row, without the NumPy calls that many share."""
        *fields, step, _ = _BASE_STEP_CRC.unpack_from(self.items, block * ITEM_BYTES)
        narrow = self.narrow[block]
        for place, beyond in zip(narrow.places, narrow.unpack(content), strict=False):
            fields[place] += beyond
        fields[_OFFSET] += step * index
        try:
            return _BASE.pack(*fields)
        except struct.error:  # some wrap around
            return _BASE.pack(*map(and_, fields, _MASKS))

    def _base(self, block: int) -> bytes:
        at = block * ITEM_BYTES
        return self.items[at : at + ROW.itemsize]


def unpack_block(item: bytes, content: bytes, count: int) -> RowColumn:
    """The rows of a block, as `pack_block` gave it."""
    (read,) = np.frombuffer(item, _ITEM)
    rows = np.frombuffer(bytearray(item[: ROW.itemsize]) * count, ROW)
    _add_steps(rows, 0, int(read["step"]))
    _add(rows, _narrow(read["widths"].tobytes()), content)
    return rows


def _add(rows: Array, narrow: _Narrow, content: bytes) -> None:
    """Add what rows have beyond their bases."""
    if not narrow.fields:
        return
    bits, packed = rows.view(_BITS), np.frombuffer(content, narrow.dtype)
    for field in narrow.fields:
        column = bits[field]  # of which `bits[field] +=` would make a copy, onto itself
        column += packed[field]


def _add_steps(rows: Array, index: int, step: int) -> None:
    """Add to offsets of rows of one block from `index` on."""
    if step:
        column = rows["offset"]
        column += _INDEXES[index : index + len(rows)] * np.uint32(step)


def decode_directory(end: bytes, row_count: int, path: str, offset: int) -> Directory:
    """The directory of a file, from all that follows its blocks; `offset` is where that lies."""
    there_count = peek_packed(end)
    if there_count is None or end_bytes(there_count) != len(end):
        raise Corrupt("a file of packed rows does not end in its directory", path=path, offset=offset)
    if _CRC.unpack_from(end, len(end) - 4)[0] != value(end[:-4]):
        raise Corrupt("the directory of a file of packed rows is damaged", path=path, offset=offset)
    if there_count != row_count:
        what = "the number of rows in a file of packed rows differs from that in the manifest"
        raise Corrupt(what, path=path, offset=offset)
    count = block_count(row_count)
    items = np.frombuffer(end, _ITEM, count)
    widths = items["widths"]
    is_known = (
        is_among(widths, _WIDTHS).all() and (widths <= np.array(_SIZES)).all() and not items["zero"].any()
    )
    sizes: list[int] = widths.sum(axis=1, dtype=np.int64).tolist()
    starts = array("Q", [HEADER_BYTES])
    for block, size in enumerate(sizes):
        starts.append(starts[-1] + size * min(BLOCK_ROWS, row_count - block * BLOCK_ROWS))
    if not is_known or starts[-1] != offset:
        raise Corrupt("the directory of a file of packed rows contradicts itself", path=path, offset=offset)
    return Directory(
        row_count,
        end[: count * ITEM_BYTES],
        starts,
        [_narrow(each.tobytes()) for each in widths],
    )


class PackedColumn:
    """Reads the rows of a file of packed rows, of a length that a manifest names. A `Column`."""

    def __init__(self, row_count: int, file_bytes: int) -> None:
        self._row_count = row_count
        self._file_bytes = file_bytes
        self._directory: Directory | None = None  # two threads may both read it, and find the same
        self._verified = bytearray(block_count(row_count))  # one byte a block; a thread only ever sets 1

    def read(self, file: Readable, first: int, count: int) -> RowColumn:
        """See `Column`."""
        directory = self._load(file)
        if count == 1:
            return self._read_few(file, directory, [first])
        parts = list(_parts(first, count))
        rows = directory.bases([block for block, _, _ in parts], [taken for _, _, taken in parts])
        low = 0
        for block, index, taken in parts:
            some = rows[low : low + taken]
            _add_steps(some, index, directory.step(block))
            _add(some, directory.narrow[block], self._read(file, directory, block, index, taken))
            low += taken
        rows.flags.writeable = False
        return rows

    def read_at(self, file: Readable, entry_ids: UInt32Column) -> RowColumn:
        """See `Column`."""
        directory = self._load(file)
        if len(entry_ids) <= FEW_READS:
            return self._read_few(file, directory, entry_ids.tolist())
        ids = entry_ids.astype(np.int64)
        blocks, indexes = np.divmod(ids, BLOCK_ROWS)
        if 0 in self._verified:
            for block in distinct_values(blocks).tolist():
                if not self._verified[block]:
                    self._verify(file, directory, block)
        items = np.frombuffer(directory.items, _ITEM)
        rows = np.frombuffer(directory.items, _BASES)["base"][blocks].view(ROW)
        offsets = rows["offset"]
        offsets += (items["step"][blocks] * indexes).astype(np.uint32)
        starts = np.frombuffer(directory.starts, np.int64)[blocks]
        kinds: list[bytes] = items["widths"][blocks].view(_WIDTHS_ITEM).ravel().tolist()
        distinct = list(dict.fromkeys(kinds))  # nearly always one
        for kind in distinct:
            narrow = _narrow(kind)
            at = slice(None) if len(distinct) == 1 else np.flatnonzero([each == kind for each in kinds])
            some = rows[at]  # a copy, if they are not all
            _add(some, narrow, read_items(file, starts[at] + indexes[at] * narrow.size, narrow.size))
            if len(distinct) > 1:
                rows[at] = some
        rows.flags.writeable = False
        return rows

    def place(self, file: Readable, row: int) -> int:
        """See `Column`."""
        return self._load(file).place(row)

    def row_bytes(self, file: Readable) -> list[int]:
        """Bytes of a row of each block."""
        return [narrow.size for narrow in self._load(file).narrow]

    def _load(self, file: Readable) -> Directory:
        if self._directory is None:
            length = end_bytes(self._row_count)
            offset = self._file_bytes - length
            if offset < HEADER_BYTES:
                raise Corrupt("a file of packed rows is too short", path=file.path, offset=0, advice=RESTORE)
            end = read_exactly(file, length, offset)
            self._directory = decode_directory(end, self._row_count, file.path, offset)
        return self._directory

    def _read_few(self, file: Readable, directory: Directory, places: list[int]) -> RowColumn:
        rows = []
        for place in places:
            block, index = divmod(place, BLOCK_ROWS)
            rows.append(directory.unpack_one(block, index, self._read(file, directory, block, index, 1)))
        return np.frombuffer(b"".join(rows), ROW)

    def _read(self, file: Readable, directory: Directory, block: int, index: int, count: int) -> bytes:
        """The bytes of some rows of a block, verified."""
        start, stride = directory.starts[block], directory.narrow[block].size
        if self._verified[block]:
            return read_exactly(file, count * stride, start + index * stride)
        return self._verify(file, directory, block)[index * stride : (index + count) * stride]

    def _verify(self, file: Readable, directory: Directory, block: int) -> bytes:
        """The bytes of a block, which is verified from now on (PACK-3)."""
        start = directory.starts[block]
        content = read_exactly(file, directory.starts[block + 1] - start, start)
        if value(content) != directory.crc(block):
            raise Corrupt("rows of a ledger are damaged", path=file.path, offset=start, advice=RESTORE)
        self._verified[block] = 1
        return content


def _parts(first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Of consecutive rows, the part in each block: the block, the index of the first, and how many."""
    end = first + count
    while first < end:
        block, index = divmod(first, BLOCK_ROWS)
        taken = min(end - first, BLOCK_ROWS - index)
        yield block, index, taken
        first += taken


def rows_column(capture: LedgerCapture) -> Column:
    """Return what reads the rows of a ledger that a manifest names."""
    if capture.packed_bytes:
        return PackedColumn(capture.row_count, capture.packed_bytes)
    return CheckedColumn(ROW, capture.row_count, None if capture.sealed else capture.rows_crcs)
