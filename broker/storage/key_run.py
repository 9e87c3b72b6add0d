"""A run of schedule keys: one immutable file, `topics/<topic_id>/keys/<run_id>.keys`. Pure.

It says which entries were stored with a schedule key of a hash: (hash, ledger_id, entry_id) of each, in that order.
They may hold their keys (kind 0), or are settled, and their keys are remembered for a while: as those of what was
delivered, or waits for nobody any more (1), or of what was cancelled (2).

    | header | key block ... | filter | fences |
    header    magic 4 "PDK1", version 2, kind 1, zero 2, topic_id 8, run_id 8, count 8, checksum 8, first_ledger_id 8,
              last_ledger_id 8, filter_at 8, block_count 4, filter_blocks 4, filter_crc 4, fences_crc 4, settled_ms 8,
              crc32c 4 of the 88 bytes before, zero 4
    block     first_ledger_id 8, count 4, ledger_bytes 1 (0, 1, 2, 4 or 8), zero 3, then three columns of `count`
              items: hash 8, ledger_id - first_ledger_id in `ledger_bytes`, entry_id 4. 1,024 entries; the last block
              has the rest
    filter    `filter_blocks` blocks of 32 bytes at `filter_at`, where the last key block ends; see key_filter
    fences    three columns of `block_count` items: first hash 8, bytes 4, crc32c 4 of each key block; with them the
              file ends

Integers are little-endian. `first_ledger_id` and `last_ledger_id` of the header bound those of all entries.
`settled_ms` is when the youngest of settled entries were written first, milliseconds since the Unix epoch; 0 of kind 0.
`checksum` is that of a `Tally` of the entries, each with the hash of its key as its number.

Invariants:
  KEYRUN-1  Entries (hash, ledger_id, entry_id) rise strictly within a block and from block to block, so fences and
      blocks can be searched.
  KEYRUN-2  `count` and `checksum` are those of the entries in the blocks.
  KEYRUN-3  A decoder gives a value or `Corrupt`, whatever the bytes; it allocates nothing beyond what it was given.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from google_crc32c import value

from broker.errors import Corrupt
from broker.model import LEDGER_ID_MAX, TIME_MS_MAX, Array, Int64Column, UInt32Column, UInt64Column
from broker.storage.key_filter import (
    FILTER_BLOCK_BYTES,
    FILTER_BLOCKS_MAX,
    BoolColumn,
    KeyFilter,
)

MAGIC = b"PDK1"
VERSION = 2
HEADER_BYTES = 96
BLOCK_ENTRIES = 1_024
FENCE_BYTES = 16
COUNT_MAX = 1 << 40
ADVICE = "The lookup of schedule keys can be built again from the ledgers"

_HEADER = struct.Struct("<4sBB2sQQQQQQQIIIIQ")
_HEADER_CRC = struct.Struct("<II")
_BLOCK = struct.Struct("<QIB3s")
_ENTRY_BYTES_MAX = 8 + 8 + 4
_LEDGER_TYPES = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}
BLOCK_BYTES_MAX = _BLOCK.size + BLOCK_ENTRIES * _ENTRY_BYTES_MAX


class KeyRunKind(IntEnum):
    """State of a run's entries when it was written. Numbers as on disk."""

    HOLDERS = 0  # they held their keys
    DELIVERED = 1  # their time had come: delivered, expired, or waiting for nobody any more
    CANCELLED = 2


class Stamp(NamedTuple):
    """Facts in the header of a run besides its entries."""

    kind: KeyRunKind = KeyRunKind.HOLDERS
    settled_ms: int = 0  # 0: they are not settled


@dataclass(frozen=True, slots=True, eq=False)
class KeyColumns:
    """Entries and the hashes of their schedule keys, aligned."""

    hashes: UInt64Column
    ledger_ids: Int64Column
    entry_ids: UInt32Column

    def __len__(self) -> int:
        return len(self.hashes)

    def part(self, rows: slice | Array) -> KeyColumns:
        return KeyColumns(self.hashes[rows], self.ledger_ids[rows], self.entry_ids[rows])

    def key(self, row: int) -> tuple[int, int, int]:
        return int(self.hashes[row]), int(self.ledger_ids[row]), int(self.entry_ids[row])

    def count_through(self, key: tuple[int, int, int]) -> int:
        """Return how many of the sorted entries lie at or before a key."""
        value, ledger_id, entry_id = key
        low = int(np.searchsorted(self.hashes, np.uint64(value), side="left"))
        high = int(np.searchsorted(self.hashes, np.uint64(value), side="right"))
        ledger_ids = self.ledger_ids[low:high]
        first = low + int(np.searchsorted(ledger_ids, ledger_id, side="left"))
        last = low + int(np.searchsorted(ledger_ids, ledger_id, side="right"))
        return first + int(np.searchsorted(self.entry_ids[first:last], np.uint32(entry_id), side="right"))

    @property
    def columns(self) -> tuple[UInt64Column, Int64Column, UInt32Column]:
        return self.hashes, self.ledger_ids, self.entry_ids


NO_KEYS = KeyColumns(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.uint32))


def join_keys(parts: Sequence[KeyColumns]) -> KeyColumns:
    if len(parts) == 1:
        return parts[0]
    return KeyColumns(
        np.concatenate([NO_KEYS.hashes, *(part.hashes for part in parts)]),
        np.concatenate([NO_KEYS.ledger_ids, *(part.ledger_ids for part in parts)]),
        np.concatenate([NO_KEYS.entry_ids, *(part.entry_ids for part in parts)]),
    )


def sort_keys(keys: KeyColumns) -> KeyColumns:
    """In order, each entry once."""
    if len(keys) < 2:
        return keys
    ordered = keys.part(np.argsort(keys.hashes))
    if not (ordered.hashes[1:] == ordered.hashes[:-1]).any():
        return ordered  # as nearly always: a third of the work
    ordered = keys.part(np.lexsort((keys.entry_ids, keys.ledger_ids, keys.hashes)))
    is_new = np.ones(len(ordered), dtype=np.bool_)
    is_new[1:] = _rises(ordered)
    return ordered if is_new.all() else ordered.part(is_new)


def newest_of_each(keys: KeyColumns) -> KeyColumns:
    """Of sorted entries the last one of each hash."""
    is_last = np.ones(len(keys), dtype=np.bool_)
    is_last[:-1] = keys.hashes[1:] != keys.hashes[:-1]
    return keys if is_last.all() else keys.part(is_last)


@dataclass(frozen=True, slots=True)
class KeyRunHeader:
    """Header of the file."""

    topic_id: int
    run_id: int
    count: int
    checksum: int
    first_ledger_id: int
    last_ledger_id: int
    filter_at: int
    block_count: int
    filter_blocks: int
    filter_crc: int
    fences_crc: int
    kind: int = KeyRunKind.HOLDERS
    settled_ms: int = 0

    @property
    def stamp(self) -> Stamp:
        return Stamp(KeyRunKind(self.kind), self.settled_ms)

    @property
    def filter_bytes(self) -> int:
        return self.filter_blocks * FILTER_BLOCK_BYTES

    @property
    def fences_at(self) -> int:
        return self.filter_at + self.filter_bytes

    @property
    def fences_bytes(self) -> int:
        return self.block_count * FENCE_BYTES

    @property
    def file_bytes(self) -> int:
        return self.fences_at + self.fences_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Fences:
    """Offset and first key of each key block, as aligned columns."""

    first_hashes: UInt64Column
    offsets: Int64Column  # in the file
    lengths: Int64Column  # bytes
    crcs: UInt32Column

    def __len__(self) -> int:
        return len(self.first_hashes)

    @property
    def memory_bytes(self) -> int:
        columns = (self.first_hashes, self.offsets, self.lengths, self.crcs)
        return sum(column.nbytes for column in columns)

    def blocks_of(self, hashes: UInt64Column) -> list[int]:
        """The blocks in which some hashes may be, rising. One hash may fill several."""
        # The block before the first one that begins with the hash may end with it.
        first = np.maximum(np.searchsorted(self.first_hashes, hashes, side="left") - 1, 0)
        last = (
            np.searchsorted(self.first_hashes, hashes, side="right") - 1
        )  # -1: it would lie before all blocks
        blocks = set(last[last == first].tolist())
        for low, high in zip(first[last > first].tolist(), last[last > first].tolist(), strict=True):
            blocks.update(range(low, high + 1))
        return sorted(blocks)


def encode_header(header: KeyRunHeader) -> bytes:
    head = _HEADER.pack(
        MAGIC,
        VERSION,
        header.kind,
        b"",
        header.topic_id,
        header.run_id,
        header.count,
        header.checksum,
        header.first_ledger_id,
        header.last_ledger_id,
        header.filter_at,
        header.block_count,
        header.filter_blocks,
        header.filter_crc,
        header.fences_crc,
        header.settled_ms,
    )
    return head + _HEADER_CRC.pack(value(head), 0)


def decode_header(data: bytes, path: str = "") -> KeyRunHeader:
    """The header in the first bytes of a run."""
    if len(data) < HEADER_BYTES:
        raise Corrupt("A key run is shorter than its header", path=path, offset=0, advice=ADVICE)
    head = data[: _HEADER.size]
    magic, version, kind, zeros, *fields, settled_ms = _HEADER.unpack(head)
    if magic != MAGIC:
        raise Corrupt("This is not a run of schedule keys", path=path, offset=0, advice=ADVICE)
    crc, end = _HEADER_CRC.unpack_from(data, _HEADER.size)
    if crc != value(head) or any(zeros) or end:
        raise Corrupt("The header of a key run is damaged", path=path, offset=0, advice=ADVICE)
    if version != VERSION:
        raise Corrupt(f"Key run version {version} is not supported", path=path, offset=4)
    header = KeyRunHeader(*(*fields, kind, settled_ms))
    if not _is_possible(header):
        raise Corrupt("The header of a key run has impossible values", path=path, offset=8, advice=ADVICE)
    return header


def _is_possible(header: KeyRunHeader) -> bool:
    most_bytes = header.block_count * _BLOCK.size + header.count * _ENTRY_BYTES_MAX
    return (
        header.topic_id > 0
        and header.run_id > 0
        and 0 < header.count <= COUNT_MAX
        and header.block_count == -(-header.count // BLOCK_ENTRIES)
        and 0 < header.filter_blocks <= min(header.count, FILTER_BLOCKS_MAX)
        and header.first_ledger_id <= header.last_ledger_id <= LEDGER_ID_MAX
        and HEADER_BYTES < header.filter_at <= HEADER_BYTES + most_bytes
        and header.kind <= max(KeyRunKind)
        and (header.kind == KeyRunKind.HOLDERS) == (header.settled_ms == 0)
        and header.settled_ms <= TIME_MS_MAX
    )


def encode_block(keys: KeyColumns) -> bytes:
    """At most BLOCK_ENTRIES entries in order."""
    assert 0 < len(keys) <= BLOCK_ENTRIES
    first = int(keys.ledger_ids.min())
    span = int(keys.ledger_ids.max()) - first
    width = next(width for width in (0, 1, 2, 4, 8) if span < 1 << 8 * width)
    head = _BLOCK.pack(first, len(keys), width, b"")
    ledgers = (keys.ledger_ids - first).astype(_LEDGER_TYPES[width]).tobytes() if width else b""
    return b"".join(
        (head, keys.hashes.astype("<u8").tobytes(), ledgers, keys.entry_ids.astype("<u4").tobytes())
    )


def decode_block(data: bytes, header: KeyRunHeader, fences: Fences, index: int, path: str = "") -> KeyColumns:
    """The entries of one block, checked against what header and fences say of it."""
    offset = int(fences.offsets[index])
    if len(data) != fences.lengths[index] or value(data) != fences.crcs[index]:
        what = "The checksum of a block of schedule keys does not match"
        raise Corrupt(what, path=path, offset=offset, advice=ADVICE)
    keys = _unpack_block(data, _block_count(header, index))
    if keys is None or not _is_in_place(keys, header, fences, index):
        what = "A block of schedule keys has impossible values"
        raise Corrupt(what, path=path, offset=offset, advice=ADVICE)
    return keys


def _block_count(header: KeyRunHeader, index: int) -> int:
    """Return the number of entries in a block."""
    return min(BLOCK_ENTRIES, header.count - index * BLOCK_ENTRIES)


def _unpack_block(data: bytes, count: int) -> KeyColumns | None:
    if len(data) < _BLOCK.size:
        return None
    first, row_count, width, zeros = _BLOCK.unpack_from(data)
    if row_count != count or any(zeros) or not (width == 0 or width in _LEDGER_TYPES):
        return None
    ledgers_at = _BLOCK.size + 8 * count
    entries_at = ledgers_at + width * count
    if len(data) != entries_at + 4 * count or first > LEDGER_ID_MAX:
        return None
    hashes = np.frombuffer(data, "<u8", count, _BLOCK.size)
    ledger_ids = np.full(count, first, dtype=np.int64)
    if width:
        offsets = np.frombuffer(data, _LEDGER_TYPES[width], count, ledgers_at)
        if int(offsets.max()) > LEDGER_ID_MAX - first:
            return None
        ledger_ids += offsets.astype(np.int64)
    return KeyColumns(hashes, ledger_ids, np.frombuffer(data, "<u4", count, entries_at))


def _is_in_place(keys: KeyColumns, header: KeyRunHeader, fences: Fences, index: int) -> bool:
    """KEYRUN-1 as far as one block and the fences tell."""
    first, last = int(keys.ledger_ids.min()), int(keys.ledger_ids.max())
    return (
        keys.hashes[0] == fences.first_hashes[index]
        and (index + 1 == len(fences) or keys.hashes[-1] <= fences.first_hashes[index + 1])
        and header.first_ledger_id <= first
        and last <= header.last_ledger_id
        and bool(_rises(keys).all())
    )


def _rises(keys: KeyColumns) -> BoolColumn:
    """For each entry but the first, whether it lies after the one before it."""
    hashes, ledger_ids, entry_ids = keys.hashes, keys.ledger_ids, keys.entry_ids
    rises: BoolColumn = hashes[1:] > hashes[:-1]
    if not rises.all():
        is_later = (ledger_ids[1:] > ledger_ids[:-1]) | (
            (ledger_ids[1:] == ledger_ids[:-1]) & (entry_ids[1:] > entry_ids[:-1])
        )
        rises |= (hashes[1:] == hashes[:-1]) & is_later
    return rises


def encode_fences(first_hashes: UInt64Column, lengths: UInt32Column, crcs: UInt32Column) -> bytes:
    columns = (first_hashes.astype("<u8"), lengths.astype("<u4"), crcs.astype("<u4"))
    return b"".join(column.tobytes() for column in columns)


def decode_fences(data: bytes, header: KeyRunHeader, path: str = "") -> Fences:
    """From the bytes at `fences_at`."""
    if len(data) != header.fences_bytes or value(data) != header.fences_crc:
        what = "The checksum of the fences of a key run does not match"
        raise Corrupt(what, path=path, offset=header.fences_at, advice=ADVICE)
    count = header.block_count
    first_hashes = np.frombuffer(data, "<u8", count)
    lengths = np.frombuffer(data, "<u4", count, 8 * count).astype(np.int64)
    offsets = HEADER_BYTES + np.cumsum(lengths) - lengths
    if (
        int(offsets[-1] + lengths[-1]) != header.filter_at
        or int(lengths.max()) > BLOCK_BYTES_MAX
        or (first_hashes[1:] < first_hashes[:-1]).any()
    ):
        what = "The fences of a key run have impossible values"
        raise Corrupt(what, path=path, offset=header.fences_at, advice=ADVICE)
    return Fences(first_hashes, offsets, lengths, np.frombuffer(data, "<u4", count, 12 * count))


def decode_filter(data: bytes | bytearray, crc: int, header: KeyRunHeader, path: str = "") -> KeyFilter:
    """From the bytes at `filter_at`; `crc`: their crc32c, which whoever reads them part by part has taken."""
    if len(data) != header.filter_bytes or crc != header.filter_crc:
        what = "The checksum of the filter of a key run does not match"
        raise Corrupt(what, path=path, offset=header.filter_at, advice=ADVICE)
    return KeyFilter(data)
