"""The values that travel between the layers: positions, columns of entries, decoded batches.

Entry ids fit in 32 bits (a ledger never holds more), ledger ids in 48, so that both fit a bitmap and a
fixed-width header. Times are milliseconds since the Unix epoch; 0 means unset.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

Int64Column = npt.NDArray[np.int64]
UInt32Column = npt.NDArray[np.uint32]
UInt64Column = npt.NDArray[np.uint64]
RowColumn = npt.NDArray[np.void]
Array = npt.NDArray[Any]

Entries = dict[int, BitMap]
"""A set of positions: entry ids by ledger. No set is empty."""

ENTRY_ID_MAX = (1 << 32) - 1
LEDGER_ID_MAX = (1 << 48) - 1
TIME_MS_MAX = (1 << 53) - 1
"""Greatest time accepted anywhere: the year 287396; leaves room to add a delay without overflow."""

DELIVER_AT_MS_MIN = 10**12
"""Least delivery time taken from a client, 2001-09-09T01:46:40Z: what is less counts seconds, most likely."""

DELIVER_AT_MS_MAX = 253_402_300_799_999
"""Greatest delivery time taken from a client, the end of the year 9999: what is more counts microseconds, most likely.
No calendar in use shows what lies beyond."""

EXPIRE_MS_MAX = 2 * TIME_MS_MAX
"""Greatest expiry that a message can have: the greatest time, and the greatest time to live counted from it."""

CANCELLED_MS = 1 << 62
"""Effective time of an entry that was cancelled: never due."""


class Position(NamedTuple):
    """The name of an entry for life; orders as the entries arrived. `(0, 0)` lies before every entry."""

    ledger_id: int
    entry_id: int


START = Position(0, 0)

ROW = np.dtype(
    [
        ("publish_time_ms", "<i8"),  # the broker's clock when the batch was accepted
        ("expire_at_ms", "<i8"),  # max(publish, deliver_at) + ttl; 0: never
        ("schedule_hash", "<u8"),  # of schedule_key; 0: none
        ("offset", "<u4"),  # of the message's frame in `data`, bytes
        ("length", "<u4"),  # of the message's frame in `data`, bytes
        ("crc", "<u4"),  # crc32c of the frame
        ("key_hash", "<u4"),  # of key; 0: none
        ("flags", "<u2"),
        ("zero", "<u2"),
    ]
)
"""One index row, 44 bytes. Rows never change once stored."""
ROW_STRUCT = struct.Struct("<qqQIIIIHH")
"""The same for one row."""

FEW_ROWS = 16
"""Up to so many rows, a look at each of them costs less than the NumPy calls that many share."""

FLAG_DELAYED = 1
"""The message's time had not come when its batch was accepted. Equivalent to a nonzero entry in `times`."""


@dataclass(frozen=True, slots=True, eq=False)
class KeySpans:
    """Keys of a batch's messages, as places in bytes that hold them: nearly all are looked at by their hashes only."""

    buffer: bytes
    starts: Int64Column  # one element a message
    ends: Int64Column  # no greater than the start: the message has none

    @classmethod
    def of(cls, keys: Collection[bytes]) -> KeySpans:
        """Of the key of each message; an empty one is none."""
        ends = np.fromiter(accumulate(map(len, keys)), dtype=np.int64, count=len(keys))
        starts = np.zeros_like(ends)
        starts[1:] = ends[:-1]
        return cls(b"".join(keys), starts, ends)

    def places(self) -> Int64Column:
        """The messages that have a key."""
        return np.flatnonzero(self.ends > self.starts)

    def key(self, place: int) -> bytes:
        return self.buffer[self.starts[place] : self.ends[place]]

    def part(self, places: npt.NDArray[np.intp]) -> KeySpans | None:
        """Those of the messages at some places; None: no message has one."""
        starts, ends = self.starts[places], self.ends[places]
        return KeySpans(self.buffer, starts, ends) if (ends > starts).any() else None


@dataclass(frozen=True, slots=True)
class Batch:
    """A produce request's messages, decoded once: columns for the broker, bytes for the consumers.

    `frames` is the concatenation of one frame a message, `0x12 length message`: the wire form of
    `Delivery.message`, so a delivery is a header followed by stored bytes. All columns have one element a message.
    """

    frames: bytes
    lengths: UInt32Column  # of each frame, bytes; they add up to len(frames)
    crcs: UInt32Column  # crc32c of each frame
    deliver_at_ms: Int64Column  # absolute, as asked; 0: unset
    deliver_after_ms: Int64Column  # relative, as asked; 0: unset
    ttl_ms: Int64Column  # 0: the topic's default
    key_hashes: UInt32Column
    schedule_hashes: UInt64Column
    producer_name: str = ""
    sequence_ids: UInt64Column | None = None  # 0: none; only of a named producer, if a message has one
    schedule_keys: KeySpans | None = None  # None: no message has one

    @property
    def count(self) -> int:
        return len(self.lengths)

    def part(self, places: npt.NDArray[np.intp]) -> Batch:
        """The messages at some places, which rise."""
        lengths = self.lengths.astype(np.int64)
        ends = lengths.cumsum()
        breaks = np.flatnonzero(np.diff(places) != 1)
        firsts, lasts = places[np.concatenate(([0], breaks + 1))], places[np.append(breaks, len(places) - 1)]
        spans = zip((ends[firsts] - lengths[firsts]).tolist(), ends[lasts].tolist(), strict=True)
        return Batch(
            frames=b"".join(self.frames[start:end] for start, end in spans),
            lengths=self.lengths[places],
            crcs=self.crcs[places],
            deliver_at_ms=self.deliver_at_ms[places],
            deliver_after_ms=self.deliver_after_ms[places],
            ttl_ms=self.ttl_ms[places],
            key_hashes=self.key_hashes[places],
            schedule_hashes=self.schedule_hashes[places],
            producer_name=self.producer_name,
            sequence_ids=None if self.sequence_ids is None else self.sequence_ids[places],
            schedule_keys=None if self.schedule_keys is None else self.schedule_keys.part(places),
        )


@dataclass(frozen=True, slots=True)
class IdRange:
    """Consecutive ids given to a batch."""

    ledger_id: int
    first_entry_id: int
    count: int
    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class EntryColumns:
    """Entries read from one ledger, aligned: element i of each is entry `entry_ids[i]`."""

    ledger_id: int
    entry_ids: UInt32Column
    times: Int64Column  # deliver_at_ms of the rows; 0 where the row is not DELAYED
    rows: RowColumn  # dtype ROW
    frames: list[bytes]  # the stored frames of the first entries, checksums verified


class DueSpan(NamedTuple):
    """The times of messages that are DELAYED: how many, the earliest and the latest; all 0 if none is."""

    row_count: int
    first_ms: int
    last_ms: int

    @classmethod
    def of(cls, times: Int64Column) -> DueSpan:
        """Of due times, 0 where a message is not DELAYED."""
        if len(times) <= FEW_ROWS:
            few = [time for time in times.tolist() if time]
            return cls(len(few), min(few), max(few)) if few else cls(0, 0, 0)
        count = int(np.count_nonzero(times))
        first_ms = int((times if count == len(times) else times[times > 0]).min()) if count else 0
        return cls(count, first_ms, int(times.max()))


def bitmap_of(entry_ids: UInt32Column) -> BitMap:
    """The set of some entry ids. The detour through `array` is several times faster than BitMap(ndarray)."""
    return BitMap(array("I", np.ascontiguousarray(entry_ids, dtype=np.uint32).tobytes()))


def ids_of(bitmap: BitMap) -> UInt32Column:
    """The entry ids of a set, rising."""
    return np.frombuffer(bitmap.to_array(), dtype=np.uint32)


def members(entry_ids: UInt32Column, *bitmaps: BitMap) -> npt.NDArray[np.bool_]:
    """For each of some entry ids, whether one of the sets has it."""
    ids, hits = bitmap_of(entry_ids), BitMap()
    for bitmap in bitmaps:
        hits |= ids & bitmap
    return _is_among_ordered(entry_ids, ids_of(hits))


def distinct_values(values: Array) -> Array:
    """The values of a column, each once and rising.

    `np.unique` loads the module of masked arrays at its first call, as `np.isin` may: 70 ms of the loop.
    """
    ordered = np.sort(values)
    is_first = np.ones(len(ordered), dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return ordered[is_first]


_FEW_VALUES = 16


def is_among(values: Array, others: Array | Sequence[int]) -> npt.NDArray[np.bool_]:
    """For each value of a column, whether another one of its type has it; both in any order."""
    if len(others) <= _FEW_VALUES:
        same = np.zeros(values.shape, dtype=np.bool_)
        for other in others:
            same |= values == other
        return same
    return _is_among_ordered(values, np.sort(others))


def _is_among_ordered(values: Array, ordered: Array) -> npt.NDArray[np.bool_]:
    if not len(ordered):
        return np.zeros(values.shape, dtype=np.bool_)
    same: npt.NDArray[np.bool_] = (
        ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values
    )
    return same


def merge_entries(into: Entries, entries: Entries) -> None:
    """Add positions to a set, in place."""
    for ledger_id, bitmap in entries.items():
        held = into.get(ledger_id)
        if held is None:
            into[ledger_id] = bitmap.copy()
        else:
            held |= bitmap  # in place


def remove_entries(from_: Entries, entries: Entries) -> None:
    """Take positions out of a set, in place; sets that became empty are dropped."""
    for ledger_id, bitmap in entries.items():
        held = from_.get(ledger_id)
        if held is not None:
            held -= bitmap  # in place
            if not held:
                del from_[ledger_id]


def common_entries(left: Entries, right: Entries) -> Entries:
    """The positions that are in both."""
    both = {i: left[i] & right[i] for i in left.keys() & right.keys()}
    return {ledger_id: bitmap for ledger_id, bitmap in both.items() if bitmap}


def without_entries(left: Entries, right: Entries) -> Entries:
    """The positions that are in the left set only."""
    rest = {i: bitmap - right[i] if i in right else bitmap for i, bitmap in left.items()}
    return {ledger_id: bitmap for ledger_id, bitmap in rest.items() if bitmap}


def count_entries(entries: Entries) -> int:
    """Return how many positions there are."""
    return sum(map(len, entries.values()))
