"""The journal record that compaction leaves: ledgers were rewritten as generations that lack what is not live.

    type  record            body
    17    LedgersCompacted  protobuf, see manifest.proto

The files of the generations are on disk under their final names before the record is submitted; in a cluster each node
writes its own afterwards (`folder/ledger_rewrites.py`). That it names the
entries that are there makes applying it read nothing, and lets it look once more: see `topics.generations`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pyroaring import BitMap

from broker.model import ENTRY_ID_MAX
from broker.storage.blocks import SparseSizes
from broker.storage.manifest import (
    bitmap_from_bytes,
    check,
    check_id,
    check_ledger_id,
    check_rising,
    checked_lsn,
    checked_time,
    parse_known,
)
from broker.storage.record_types import RecordType
from broker.storage.v1 import manifest_pb2 as pb

_GENERATION_MAX = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class CompactedLedger:
    """One ledger that was rewritten."""

    ledger_id: int
    from_generation: int  # that was read
    generation: int  # that was written
    data_bytes: int
    present_bytes: int  # of the section that says which entries are there
    present: BitMap
    last_expire_ms: int  # of the entries that are there; 0: at least one never expires, or there is none

    @property
    def sizes(self) -> SparseSizes:
        return SparseSizes(len(self.present), self.present_bytes)


@dataclass(frozen=True, slots=True)
class LedgersCompacted:
    """Ledgers of one topic were rewritten."""

    type: ClassVar[RecordType] = RecordType.LEDGERS_COMPACTED
    topic_id: int
    amended_lsn: int  # moves and cancels up to this record are folded in
    ledgers: tuple[CompactedLedger, ...]
    files_follow: bool = False
    """Each node of a cluster writes files of its own later."""

    def encode(self) -> list[bytes]:
        message = pb.LedgersCompacted(
            topic_id=self.topic_id, amended_lsn=self.amended_lsn, files_follow=self.files_follow
        )
        for ledger in self.ledgers:
            message.ledgers.add(
                ledger_id=ledger.ledger_id,
                from_generation=ledger.from_generation,
                generation=ledger.generation,
                data_bytes=ledger.data_bytes,
                present_bytes=ledger.present_bytes,
                present=ledger.present.serialize(),
                last_expire_ms=ledger.last_expire_ms,
            )
        return [message.SerializeToString(deterministic=True)]


def decode_compacted(body: memoryview) -> LedgersCompacted:
    """Raises ValueError or DecodeError for what `encode` does not write."""
    message = parse_known(pb.LedgersCompacted, body)
    check_id(message.topic_id, "topic_id")
    check(len(message.ledgers) > 0, "it names no ledger")
    check_rising([(ledger.ledger_id, 0) for ledger in message.ledgers], "ledgers")
    ledgers = tuple(map(_ledger, message.ledgers))
    return LedgersCompacted(message.topic_id, checked_lsn(message.amended_lsn), ledgers, message.files_follow)


def _ledger(entry: pb.CompactedLedger) -> CompactedLedger:
    check_ledger_id(entry.ledger_id)
    check(entry.from_generation < entry.generation <= _GENERATION_MAX, f"generation {entry.generation}")
    present = bitmap_from_bytes(entry.present)
    check((entry.data_bytes > 0) == bool(present), "a ledger has bytes without entries, or none")
    check(not present or present.max() <= ENTRY_ID_MAX, "an entry out of range")
    return CompactedLedger(
        ledger_id=entry.ledger_id,
        from_generation=entry.from_generation,
        generation=entry.generation,
        data_bytes=entry.data_bytes,
        present_bytes=entry.present_bytes,
        present=present,
        last_expire_ms=checked_time(entry.last_expire_ms),
    )
