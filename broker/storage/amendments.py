"""Amendments of one ledger, its cancels and moves: an immutable file, `ledgers/<ledger_id>.<lsn>.amend`. Pure.

    header     magic 4 "PDA1", version 1, zero 3, topic_id 8, ledger_id 8, cancelled_bytes 4, moved_count 4,
               left_out_bytes 4, crc32c 4 of the 36 bytes before and of everything behind it
    moved      deliver_at_ms 8 ..., lsn 8 ..., entry_id 4 ..., revision 4 ...: columns of `moved_count` items, rising
               by entry_id
    cancelled  roaring bitmap of entry ids, portable format, `cancelled_bytes` long
    left_out   the same, `left_out_bytes` long, 0 where it is empty: of these, what nobody cancelled and compaction
               left out; with it the file ends

Integers are little-endian. Rows never change; an entry's *effective time* is 0 if it was cancelled, else the time
it was moved to, else its row's.

Invariants:
  AMENDMENT-1  A decoder gives a value or `Corrupt`, whatever the bytes; it allocates nothing it has not checked.
  AMENDMENT-2  An entry that was cancelled stays cancelled, whether it was moved or not.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from google_crc32c import extend, value
from pyroaring import BitMap

from broker.errors import Corrupt
from broker.model import TIME_MS_MAX, Int64Column, UInt32Column, UInt64Column, members
from broker.storage.manifest import ID_MAX, bitmap_from_bytes, check, check_id, check_ledger_id

MAGIC = b"PDA1"
VERSION = 1
HEADER_BYTES = 40

_HEADER = struct.Struct("<4sB3sQQIII")
_CRC = struct.Struct("<I")
_MOVED_BYTES = 24
_ADVICE = "Restore this topic from a backup"


@dataclass(frozen=True, slots=True, eq=False)
class Amendments:
    """Changes to the rows of one ledger. Nobody changes what is in it."""

    cancelled: BitMap
    entry_ids: UInt32Column  # of moved entries, rising; the other columns are aligned with it
    deliver_at_ms: Int64Column
    revisions: UInt32Column  # how often the entry was moved
    lsns: UInt64Column  # of the record of the last move
    left_out: BitMap = field(default_factory=BitMap)
    """Of `cancelled`, what compaction left out and nobody had cancelled: every subscription was done with it."""

    def effective(self, entry_ids: UInt32Column, times: Int64Column) -> Int64Column:
        """The effective times of entries whose rows say `times`; 0 where cancelled. Ids in any order."""
        effective = times.copy()
        if len(self.entry_ids):
            places, moved = self._find(entry_ids)
            effective[moved] = self.deliver_at_ms[places[moved]]
        if self.cancelled:
            effective[members(entry_ids, self.cancelled)] = 0
        return effective

    def is_current(self, entry_ids: UInt32Column, times: Int64Column) -> npt.NDArray[np.bool_]:
        """Return where `times`, from an index, may be the entries' effective times.

        False for a cancelled entry, and for a moved one at another time than it was moved to. Ids in any order.
        """
        current = np.ones(len(entry_ids), dtype=np.bool_)
        if len(self.entry_ids):
            places, moved = self._find(entry_ids)
            current[moved] = self.deliver_at_ms[places[moved]] == times[moved]
        if self.cancelled:
            current &= ~members(entry_ids, self.cancelled)
        return current

    def cancels(self, entry_id: int) -> bool:
        return entry_id in self.cancelled

    def touches(self, entries: BitMap) -> bool:
        """Return whether one of some entries was cancelled, or moved at any time."""
        if self.cancelled and not self.cancelled.isdisjoint(entries):
            return True
        return bool(len(self.entry_ids)) and bool(members(self.entry_ids, entries).any())

    def cancel(self, entries: BitMap) -> Amendments:
        """With more entries cancelled."""
        return replace(self, cancelled=self.cancelled | entries)

    def leave_out(self, absent: BitMap) -> Amendments:
        """With entries left out of the files by a compaction: they count as cancelled, and what moved them is gone."""
        cancelled = self.cancelled | absent
        left_out = cancelled - (self.cancelled - self.left_out)
        cancelled.run_optimize()
        left_out.run_optimize()
        kept = ~members(self.entry_ids, cancelled) if len(self.entry_ids) else slice(0, 0)
        return Amendments(
            cancelled,
            self.entry_ids[kept],
            self.deliver_at_ms[kept],
            self.revisions[kept],
            self.lsns[kept],
            left_out,
        )

    def move(self, entry_ids: UInt32Column, deliver_at_ms: Int64Column, lsn: int) -> Amendments:
        """With entries (ids rising) moved by a record; each move counts one revision."""
        kept = np.ones(len(self.entry_ids), dtype=np.bool_)
        revisions = np.ones(len(entry_ids), dtype=np.uint32)
        if len(self.entry_ids):
            places, moved = self._find(entry_ids)
            revisions[moved] += self.revisions[places[moved]]
            kept[places[moved]] = False
        ids = np.concatenate((self.entry_ids[kept], entry_ids))
        order = np.argsort(ids, kind="stable")
        return replace(
            self,
            entry_ids=ids[order],
            deliver_at_ms=np.concatenate((self.deliver_at_ms[kept], deliver_at_ms))[order],
            revisions=np.concatenate((self.revisions[kept], revisions))[order],
            lsns=np.concatenate((self.lsns[kept], np.full(len(entry_ids), lsn, dtype=np.uint64)))[order],
        )

    def revisions_of(self, entry_ids: UInt32Column) -> UInt32Column:
        """Return how often each entry was moved. Ids in any order."""
        revisions = np.zeros(len(entry_ids), dtype=np.uint32)
        if len(self.entry_ids):
            places, moved = self._find(entry_ids)
            revisions[moved] = self.revisions[places[moved]]
        return revisions

    def lsns_of(self, entry_ids: UInt32Column) -> UInt64Column:
        """Of the record that moved each entry last; 0 if none did. Ids in any order."""
        lsns = np.zeros(len(entry_ids), dtype=np.uint64)
        if len(self.entry_ids):
            places, moved = self._find(entry_ids)
            lsns[moved] = self.lsns[places[moved]]
        return lsns

    def _find(self, entry_ids: UInt32Column) -> tuple[Int64Column, npt.NDArray[np.bool_]]:
        """Of each entry its place among the moved ones, and whether it is there."""
        places = np.minimum(np.searchsorted(self.entry_ids, entry_ids), len(self.entry_ids) - 1)
        return places, self.entry_ids[places] == entry_ids


NONE = Amendments(
    BitMap(),
    np.empty(0, dtype=np.uint32),
    np.empty(0, dtype=np.int64),
    np.empty(0, dtype=np.uint32),
    np.empty(0, dtype=np.uint64),
)
"""Of a ledger that was never amended."""


class _Gone(Amendments):
    """Of a ledger that is not there any more: nothing that an index says of it is current."""

    __slots__ = ()

    def is_current(self, entry_ids: UInt32Column, times: Int64Column) -> npt.NDArray[np.bool_]:
        return np.zeros(len(entry_ids), dtype=np.bool_)

    def cancels(self, entry_id: int) -> bool:
        return True

    def touches(self, entries: BitMap) -> bool:
        return bool(entries)


GONE = _Gone(BitMap(), NONE.entry_ids, NONE.deliver_at_ms, NONE.revisions, NONE.lsns)


@dataclass(frozen=True, slots=True, eq=False)
class AmendmentsImage:
    """One file: whose amendments, and what they are."""

    topic_id: int
    ledger_id: int
    amendments: Amendments


def encode_amendments(image: AmendmentsImage) -> bytes:
    amendments = image.amendments
    cancelled = amendments.cancelled.serialize()
    left_out = amendments.left_out.serialize() if amendments.left_out else b""
    body = b"".join(
        (
            np.ascontiguousarray(amendments.deliver_at_ms, "<i8").tobytes(),
            np.ascontiguousarray(amendments.lsns, "<u8").tobytes(),
            np.ascontiguousarray(amendments.entry_ids, "<u4").tobytes(),
            np.ascontiguousarray(amendments.revisions, "<u4").tobytes(),
            cancelled,
            left_out,
        )
    )
    lengths = len(cancelled), len(amendments.entry_ids), len(left_out)
    head = _HEADER.pack(MAGIC, VERSION, b"", image.topic_id, image.ledger_id, *lengths)
    return head + _CRC.pack(extend(value(head), body)) + body


def decode_amendments(data: bytes, path: str = "") -> AmendmentsImage:
    """From a whole file."""
    if len(data) < HEADER_BYTES:
        raise Corrupt("A file of amendments is shorter than its header", path=path, offset=0, advice=_ADVICE)
    head = data[: _HEADER.size]
    magic, version, zeros, topic_id, ledger_id, *lengths = _HEADER.unpack(head)
    cancelled_bytes, moved_count, left_out_bytes = lengths
    if magic != MAGIC:
        raise Corrupt("This is not a file of amendments", path=path, offset=0, advice=_ADVICE)
    if version != VERSION:
        advice = "Start the version of the broker that wrote it"
        raise Corrupt(f"Version {version} of amendments is not supported", path=path, offset=4, advice=advice)
    body = data[HEADER_BYTES:]
    is_whole = len(body) == moved_count * _MOVED_BYTES + cancelled_bytes + left_out_bytes
    crc = _CRC.unpack_from(data, _HEADER.size)[0]
    if not is_whole or any(zeros) or crc != extend(value(head), body):
        raise Corrupt("The checksum of amendments does not match", path=path, offset=8, advice=_ADVICE)
    try:
        check_id(topic_id, "topic_id")
        check_ledger_id(ledger_id)
        return AmendmentsImage(topic_id, ledger_id, _from_body(body, moved_count, left_out_bytes))
    except ValueError as error:
        what = f"Amendments have impossible values: {error}"
        raise Corrupt(what, path=path, offset=HEADER_BYTES, advice=_ADVICE) from error


def _from_body(body: bytes, moved_count: int, left_out_bytes: int) -> Amendments:
    times = np.frombuffer(body, "<i8", moved_count).astype(np.int64)
    lsns = np.frombuffer(body, "<u8", moved_count, 8 * moved_count).astype(np.uint64)
    entry_ids = np.frombuffer(body, "<u4", moved_count, 16 * moved_count).astype(np.uint32)
    revisions = np.frombuffer(body, "<u4", moved_count, 20 * moved_count).astype(np.uint32)
    check(bool((entry_ids[1:] > entry_ids[:-1]).all()), "moved entries are out of order")
    check(bool(((times > 0) & (times <= TIME_MS_MAX)).all()), "a time out of range")
    check(bool((lsns <= ID_MAX).all()), "an lsn out of range")
    end = len(body) - left_out_bytes
    cancelled = bitmap_from_bytes(body[_MOVED_BYTES * moved_count : end])
    left_out = bitmap_from_bytes(body[end:]) if left_out_bytes else BitMap()
    check(left_out <= cancelled, "what was left out does not count as cancelled")
    return Amendments(cancelled, entry_ids, times, revisions, lsns, left_out)
