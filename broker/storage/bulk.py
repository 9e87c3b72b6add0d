"""Bulk changes in the journal and in a checkpoint.

    type  record       body (little-endian)
    20    BulkStepped  kind 1 (0 nothing, 1 Cancelled, 2 Moved), zero 3, change_bytes 4, Cancelled or Moved (or
                       nothing), BulkStep

A record says how far a bulk change has come, and holds the messages that it changed on its way there: a crash leaves
both or neither. A checkpoint has them in `topics/<topic_id>/cursors/bulk.<lsn>`, framed as manifests are, with the
magic bytes PDMK. Pure: bytes in, dataclasses out; any bytes give a value or an error of the callers'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from broker.model import ENTRY_ID_MAX, LEDGER_ID_MAX, TIME_MS_MAX
from broker.storage.manifest import (
    ID_MAX,
    check,
    check_id,
    checked_time,
    decode_framed,
    frame_message,
    parse_known,
)
from broker.storage.v1 import bulk_pb2 as pb

MAGIC_BULK = b"PDMK"

DuePlace = tuple[int, int, int]
"""(due time, ledger_id, entry_id): a place in due order."""


class BulkKind(IntEnum):
    """Kind of a bulk change. Numbers as on disk."""

    CANCEL = 1
    MOVE = 2  # to `new_ms`
    SHIFT = 3  # by `new_ms`
    DELAY = 4  # to `new_ms`, which lies a delay after `begin_ms`


class BulkEnd(IntEnum):
    """End of a bulk change. Numbers as on disk."""

    NONE = 0  # it goes on
    DONE = 1
    CANCELLED = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class BulkDefinition:
    """A bulk change as somebody began it."""

    kind: BulkKind
    new_ms: int = 0
    start_ms: int = 0
    end_ms: int = TIME_MS_MAX + 1  # the first due time that is not in its range
    key_prefix: str = ""
    dry_run: bool = False
    request_id: str = ""
    principal: str = ""
    begin_ms: int = 0
    total: int = 0  # messages that were due in its range when it was begun


@dataclass(frozen=True, slots=True)
class BulkProgress:
    """Place and counts that a bulk change has come to."""

    place: DuePlace = (0, 0, 0)  # from which it goes on
    examined: int = 0
    matched: int = 0  # of these
    done: int = 0  # of these


@dataclass(frozen=True, slots=True)
class BulkStep:
    """One bulk change from a record on."""

    bulk_id: int
    definition: BulkDefinition | None = None  # as before
    progress: BulkProgress | None = None  # as before
    end: BulkEnd = BulkEnd.NONE
    end_ms: int = 0
    failure_reason: str = ""
    failure: str = ""
    forgotten_ids: tuple[int, ...] = ()  # ended ones that are not kept any more


@dataclass(frozen=True, slots=True)
class BulkStanding:
    """One bulk change: what it is, how far it has come, how it ended."""

    definition: BulkDefinition
    progress: BulkProgress = BulkProgress()
    first_lsn: int = 0  # of the record with its first step; 0: there was none
    end: BulkEnd = BulkEnd.NONE
    end_ms: int = 0
    failure_reason: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True)
class BulkImage:
    """All bulk changes of a topic at one moment."""

    topic_id: int
    last_id: int  # the greatest number that was given to one
    by_id: Mapping[int, BulkStanding]

    def encode(self) -> bytes:
        """The file."""
        message = pb.BulkFile(topic_id=self.topic_id, last_id=self.last_id)
        for bulk_id in sorted(self.by_id):
            standing = self.by_id[bulk_id]
            message.changes.add(
                bulk_id=bulk_id,
                definition=_definition_to_record(standing.definition),
                progress=_progress_to_record(standing.progress),
                first_lsn=standing.first_lsn,
                end=standing.end,
                end_ms=standing.end_ms,
                failure_reason=standing.failure_reason,
                failure=standing.failure,
            )
        return frame_message(MAGIC_BULK, message)


def decode_bulk(content: bytes, path: str) -> BulkImage:
    """Raises Corrupt."""
    return decode_framed(MAGIC_BULK, content, path, pb.BulkFile(), _image_of)


def encode_bulk_step(topic_id: int, step: BulkStep) -> bytes:
    message = pb.BulkStep(
        topic_id=topic_id,
        bulk_id=step.bulk_id,
        definition=None if step.definition is None else _definition_to_record(step.definition),
        progress=None if step.progress is None else _progress_to_record(step.progress),
        end=step.end,
        end_ms=step.end_ms,
        failure_reason=step.failure_reason,
        failure=step.failure,
        forgotten_ids=step.forgotten_ids,
    )
    return message.SerializeToString(deterministic=True)


def decode_bulk_step(body: memoryview) -> tuple[int, BulkStep]:
    """Raises ValueError for what `encode_bulk_step` does not write."""
    message = parse_known(pb.BulkStep, body)
    check_id(message.topic_id, "topic_id")
    check_id(message.bulk_id, "bulk_id")
    for forgotten_id in message.forgotten_ids:
        check_id(forgotten_id, "bulk_id")
    check(message.bulk_id not in message.forgotten_ids, "a bulk change forgets itself")
    step = BulkStep(
        message.bulk_id,
        _definition_of(message.definition) if message.HasField("definition") else None,
        _progress_of(message.progress) if message.HasField("progress") else None,
        BulkEnd(message.end),
        checked_time(message.end_ms),
        message.failure_reason,
        message.failure,
        tuple(message.forgotten_ids),
    )
    return message.topic_id, step


def _image_of(message: pb.BulkFile) -> BulkImage:
    check_id(message.topic_id, "topic_id")
    ids = [entry.bulk_id for entry in message.changes]
    check(ids == sorted(set(ids)), "bulk changes are out of order")
    check(all(0 < bulk_id <= message.last_id <= ID_MAX for bulk_id in ids), "a bulk change has no number")
    by_id = {entry.bulk_id: _standing_of(entry) for entry in message.changes}
    return BulkImage(message.topic_id, message.last_id, by_id)


def _standing_of(entry: pb.BulkEntry) -> BulkStanding:
    check(entry.first_lsn <= ID_MAX, f"lsn {entry.first_lsn}")
    return BulkStanding(
        _definition_of(entry.definition),
        _progress_of(entry.progress),
        entry.first_lsn,
        BulkEnd(entry.end),
        checked_time(entry.end_ms),
        entry.failure_reason,
        entry.failure,
    )


def _progress_to_record(progress: BulkProgress) -> pb.BulkProgress:
    at_ms, ledger_id, entry_id = progress.place
    return pb.BulkProgress(
        at_ms=at_ms,
        at_ledger_id=ledger_id,
        at_entry_id=entry_id,
        examined=progress.examined,
        matched=progress.matched,
        done=progress.done,
    )


def _progress_of(record: pb.BulkProgress) -> BulkProgress:
    # One beyond the greatest: a step may begin behind the last entry that there can be.
    check(0 <= record.at_ms <= TIME_MS_MAX + 1, f"time {record.at_ms}")
    check(record.at_ledger_id <= LEDGER_ID_MAX, f"ledger_id {record.at_ledger_id}")
    check(record.at_entry_id <= ENTRY_ID_MAX + 1, f"entry_id {record.at_entry_id}")
    counts = record.done, record.matched, record.examined
    check(list(counts) == sorted(counts) and counts[-1] <= ID_MAX, "its counts do not fit each other")
    return BulkProgress((record.at_ms, record.at_ledger_id, record.at_entry_id), *reversed(counts))


def _definition_to_record(definition: BulkDefinition) -> pb.BulkDefinition:
    return pb.BulkDefinition(
        start_ms=definition.start_ms,
        end_ms=definition.end_ms,
        key_prefix=definition.key_prefix,
        kind=definition.kind,
        new_ms=definition.new_ms,
        dry_run=definition.dry_run,
        request_id=definition.request_id,
        principal=definition.principal,
        begin_ms=definition.begin_ms,
        total=definition.total,
    )


def _definition_of(record: pb.BulkDefinition) -> BulkDefinition:
    check(0 <= record.start_ms < record.end_ms <= TIME_MS_MAX + 1, "its range is empty")
    check(abs(record.new_ms) <= TIME_MS_MAX, "its new time is out of range")
    kind = BulkKind(record.kind)
    check(kind is BulkKind.SHIFT or record.new_ms >= 0, "its new time is out of range")
    check(record.total <= ID_MAX, "its total is out of range")
    return BulkDefinition(
        kind,
        record.new_ms,
        record.start_ms,
        record.end_ms,
        record.key_prefix,
        record.dry_run,
        record.request_id,
        record.principal,
        checked_time(record.begin_ms),
        record.total,
    )
