"""Journal records that change what is pending: cancelled and moved entries.

    type  record     body (little-endian)
    9     Cancelled  topic_id 8, ledger_count 4, zero 4, then for each ledger:
                     ledger_id 8, count 4, zero 4, old_ms 8 * count, entry_ids 4 * count
    10    Moved      the same, with new_ms 8 * count behind old_ms

`old_ms` are the times under which the index may hold the entries. They are in the record so that applying it reads
nothing: they were decided on, and a change that is under way holds its entries back from any other.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from broker.model import TIME_MS_MAX, Entries, Int64Column, UInt32Column, bitmap_of
from broker.storage.manifest import check, check_id, check_ledger_id
from broker.storage.record_types import RecordType

_HEAD = struct.Struct("<QII")
_LEDGER = struct.Struct("<QII")


@dataclass(frozen=True, slots=True, eq=False)
class Changed:
    """Entries of one ledger; the columns are aligned."""

    entry_ids: UInt32Column  # rising
    old_ms: Int64Column  # their effective times until now
    new_ms: Int64Column | None = None  # from here on; None: they are cancelled


@dataclass(frozen=True, slots=True)
class _Changes:
    """Entries of one topic that are changed. Nobody that honours delays was sent them."""

    topic_id: int
    ledgers: dict[int, Changed]

    def encode(self) -> list[bytes]:
        return _encode(self.topic_id, self.ledgers)

    @property
    def entries(self) -> Entries:
        return {ledger_id: bitmap_of(changed.entry_ids) for ledger_id, changed in self.ledgers.items()}


@dataclass(frozen=True, slots=True)
class Cancelled(_Changes):
    """Entries that no subscription gets."""

    type: ClassVar[RecordType] = RecordType.CANCELLED


@dataclass(frozen=True, slots=True)
class Moved(_Changes):
    """Entries that are due at another time."""

    type: ClassVar[RecordType] = RecordType.MOVED


def decode_cancelled(body: memoryview) -> Cancelled:
    """Raises ValueError or struct.error for what `encode` does not write."""
    return Cancelled(*_decode(body, has_new=False))


def decode_moved(body: memoryview) -> Moved:
    """Raises ValueError or struct.error for what `encode` does not write."""
    return Moved(*_decode(body, has_new=True))


def _encode(topic_id: int, ledgers: dict[int, Changed]) -> list[bytes]:
    parts = [_HEAD.pack(topic_id, len(ledgers), 0)]
    for ledger_id, changed in sorted(ledgers.items()):
        parts += (_LEDGER.pack(ledger_id, len(changed.entry_ids), 0), changed.old_ms.tobytes())
        if changed.new_ms is not None:
            parts.append(changed.new_ms.tobytes())
        parts.append(changed.entry_ids.tobytes())
    return parts


def _decode(body: memoryview, *, has_new: bool) -> tuple[int, dict[int, Changed]]:
    topic_id, ledger_count, zero = _HEAD.unpack_from(body)
    check_id(topic_id, "topic_id")
    check(zero == 0 and ledger_count > 0, "it names nothing")
    ledgers: dict[int, Changed] = {}
    at, previous = _HEAD.size, 0
    # Bounded, whatever the count says: a ledger takes at least its header, and unpack_from checks that it is there.
    for _ in range(ledger_count):
        ledger_id, count, zero = _LEDGER.unpack_from(body, at)
        at += _LEDGER.size
        check_ledger_id(ledger_id)
        check(ledger_id > previous and zero == 0 and count > 0, "its ledgers are out of order")
        check(at + (20 if has_new else 12) * count <= len(body), "its entries do not fit")
        times = []
        for _ in range(2 if has_new else 1):
            column = np.frombuffer(body[at : at + 8 * count], dtype=np.int64).copy()
            check(bool(((column > 0) & (column <= TIME_MS_MAX)).all()), "one of its times is out of range")
            times.append(column)
            at += 8 * count
        entry_ids = np.frombuffer(body[at : at + 4 * count], dtype=np.uint32).copy()
        check(bool((entry_ids[1:] > entry_ids[:-1]).all()), "its entries are out of order")
        at += 4 * count
        ledgers[ledger_id] = Changed(entry_ids, *times)
        previous = ledger_id
    check(at == len(body), "bytes are left over")
    return topic_id, ledgers
