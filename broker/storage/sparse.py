"""Bitmap of the entries that a sparse ledger still holds. Pure.

Compaction rewrites a ledger of which little is live under its old ids (a new *generation*): `data`, `times` and `rows`
hold the surviving entries only, in the order of their ids, and are otherwise as in `blocks`, with version 2. `times`
are the effective ones as of the rewrite. The surviving ids stand at the end of `times`, behind the footer:

    present  roaring bitmap of entry ids, portable format; then the trailer:
             magic 4 "PDLP", version 1, zero 3, entry_count 8, present_count 8, bitmap_bytes 4, crc32c 4 of the bitmap
             and the 28 bytes before it

`entry_count` is the ledger's logical length, which no rewrite changes; the columns' footers count present rows.
The *place* of an entry is its rank among the surviving ones: the row with that number is its own.

Invariants:
  SPARSE-1  A decoder gives a value or `Corrupt`, whatever the bytes; it allocates nothing it has not checked.
  SPARSE-2  Every id in the bitmap lies below `entry_count`, and there are `present_count` of them.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from google_crc32c import extend, value
from pyroaring import BitMap

from broker.errors import Corrupt
from broker.model import ENTRY_ID_MAX, Int64Column, UInt32Column, bitmap_of, ids_of
from broker.storage.manifest import bitmap_from_bytes, check

PRESENT_TRAILER_BYTES = 32

_TRAILER = struct.Struct("<4sB3xQQI")
_CRC = struct.Struct("<I")
_MAGIC = b"PDLP"
_VERSION = 1
_FEW_ENTRIES = 16
"""Up to so many entries, a look at each of them costs less than the NumPy calls that many share."""


class PresentTrailer(NamedTuple):
    """Trailer of a sparse `times` file."""

    entry_count: int
    present_count: int
    bitmap_bytes: int

    @property
    def section_bytes(self) -> int:
        return self.bitmap_bytes + PRESENT_TRAILER_BYTES


def encode_present(present: BitMap, entry_count: int) -> bytes:
    """The section that names the surviving entries."""
    bitmap = present.serialize()
    trailer = _TRAILER.pack(_MAGIC, _VERSION, entry_count, len(present), len(bitmap))
    return bitmap + trailer + _CRC.pack(extend(value(bitmap), trailer))


def peek_present(tail: bytes) -> PresentTrailer | None:
    """Decode the last bytes of a file if they look like a trailer. No checksum is verified."""
    if len(tail) < PRESENT_TRAILER_BYTES:
        return None
    start = len(tail) - PRESENT_TRAILER_BYTES
    magic, version, entry_count, present_count, bitmap_bytes = _TRAILER.unpack_from(tail, start)
    known = magic == _MAGIC and version == _VERSION and tail[start + 5 : start + 8] == bytes(3)
    if not known or present_count > entry_count or entry_count > ENTRY_ID_MAX + 1:
        return None
    return PresentTrailer(entry_count, present_count, bitmap_bytes)


def decode_present(section: bytes, entry_count: int, present_count: int, path: str, offset: int) -> BitMap:
    """The surviving entries, from a whole section; `offset` is where it lies, for the error."""
    trailer = peek_present(section)
    if trailer is None or trailer.section_bytes != len(section):
        raise Corrupt(
            "the list of entries at the end of a sparse ledger is missing", path=path, offset=offset
        )
    if (trailer.entry_count, trailer.present_count) != (entry_count, present_count):
        raise Corrupt(
            "the number of entries in a sparse ledger differs from that in the manifest",
            path=path,
            offset=offset,
        )
    if _CRC.unpack_from(section, len(section) - 4)[0] != value(section[:-4]):
        raise Corrupt("the list of entries of a sparse ledger is damaged", path=path, offset=offset)
    try:
        present = bitmap_from_bytes(section[: trailer.bitmap_bytes])
        check(len(present) == present_count, f"{len(present)} entries where there are {present_count}")
        check(not present or present.max() < entry_count, "an entry beyond the end")
    except ValueError as error:
        what = "the list of entries of a sparse ledger is damaged"
        raise Corrupt(what, path=path, offset=offset) from error
    return present


def find_places(present: BitMap, entry_ids: UInt32Column) -> tuple[Int64Column, npt.NDArray[np.bool_]]:
    """The place of each entry (rising ids), and whether it is there; the place counts only if it is."""
    if len(entry_ids) <= _FEW_ENTRIES:
        ids = entry_ids.tolist()
        there = np.fromiter((entry_id in present for entry_id in ids), np.bool_, len(ids))
        return np.fromiter((present.rank(entry_id) - 1 for entry_id in ids), np.int64, len(ids)), there
    present_ids = ids_of(present)
    if not len(present_ids):
        return np.zeros(len(entry_ids), np.int64), np.zeros(len(entry_ids), np.bool_)
    places = np.searchsorted(present_ids, entry_ids)
    there = present_ids[np.minimum(places, len(present_ids) - 1)] == entry_ids
    return places, there


def absent_of(present: BitMap, entry_count: int) -> BitMap:
    """The entries that are not there, packed as runs."""
    absent = BitMap(range(entry_count)) - present
    absent.run_optimize()
    return absent


def present_between(present: BitMap, first: int, count: int) -> tuple[UInt32Column, int]:
    """The surviving ones of consecutive entries, rising, and the place of the first of them."""
    if not count:
        return np.empty(0, np.uint32), 0
    ids = ids_of(present & BitMap(range(first, first + count)))
    return ids, (present.rank(first - 1) if first else 0)


def as_bitmap(entry_ids: UInt32Column) -> BitMap:
    """A packed set of ids."""
    bitmap = bitmap_of(entry_ids)
    bitmap.run_optimize()
    return bitmap
