"""Recurring schedules in the journal and in a checkpoint.

    type  record    body (little-endian)
    19    Recurred  produced_bytes 4, cancelled_bytes 4, Produced (or nothing), Cancelled (or nothing), RecurringSteps

A record says where schedules stand from here on, and holds the messages of the occurrences that brought them there: a
crash leaves both or neither. A checkpoint has them in `topics/<topic_id>/cursors/recurring.<lsn>`, framed as manifests
are, with the magic bytes PDMR. Pure: bytes in, dataclasses out; any bytes give a value or an error of the callers'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from broker.model import DELIVER_AT_MS_MAX, ENTRY_ID_MAX, START, TIME_MS_MAX, Position
from broker.storage.manifest import (
    check,
    check_id,
    check_ledger_id,
    checked_time,
    decode_framed,
    frame_message,
    parse_known,
)
from broker.storage.message_fields import key_and_ttl
from broker.storage.recurring_values import (
    INTERVAL_MS_MIN,
    Definition,
    OverdueRuns,
    RecurringProgress,
    RecurringRule,
)
from broker.storage.v1 import recurring_pb2 as pb

MAGIC_RECURRING = b"PDMR"


@dataclass(frozen=True, slots=True)
class RecurringStep:
    """One schedule from a record on."""

    name: str
    progress: RecurringProgress
    """Its position is left open: `place` says it."""
    definition: Definition | None = None  # as before
    deleted: bool = False
    place: int = 0  # in the record's batch, of the occurrence that is stored ahead


@dataclass(frozen=True, slots=True)
class RecurringStanding:
    """One schedule: what it is, and how far it has come."""

    definition: Definition
    progress: RecurringProgress


@dataclass(frozen=True, slots=True)
class RecurringImage:
    """All recurring schedules of a topic at one moment."""

    topic_id: int
    by_name: Mapping[str, RecurringStanding]

    def encode(self) -> bytes:
        """The file."""
        message = pb.RecurringFile(topic_id=self.topic_id)
        for name in sorted(self.by_name):
            state = self.by_name[name]
            message.schedules.add(
                name=name,
                definition=_definition_to_record(state.definition),
                after_ms=state.progress.after_ms,
                ahead_ms=state.progress.ahead_ms,
                deliver_at_ms=state.progress.deliver_at_ms,
                ledger_id=state.progress.position.ledger_id,
                entry_id=state.progress.position.entry_id,
            )
        return frame_message(MAGIC_RECURRING, message)


def decode_recurring(content: bytes, path: str) -> RecurringImage:
    """Raises Corrupt."""
    return decode_framed(MAGIC_RECURRING, content, path, pb.RecurringFile(), _image_of)


def encode_steps(topic_id: int, steps: tuple[RecurringStep, ...]) -> bytes:
    message = pb.RecurringSteps(topic_id=topic_id)
    for step in steps:
        if step.deleted:
            message.steps.add(name=step.name, deleted=True)
            continue
        definition = None if step.definition is None else _definition_to_record(step.definition)
        message.steps.add(
            name=step.name,
            definition=definition,
            after_ms=step.progress.after_ms,
            ahead_ms=step.progress.ahead_ms,
            deliver_at_ms=step.progress.deliver_at_ms,
            place=step.place,
        )
    return message.SerializeToString(deterministic=True)


def decode_steps(body: memoryview, produced_count: int) -> tuple[int, tuple[RecurringStep, ...]]:
    """Raises ValueError for what `encode_steps` does not write."""
    message = parse_known(pb.RecurringSteps, body)
    check_id(message.topic_id, "topic_id")
    steps = tuple(_step_of(step, produced_count) for step in message.steps)
    check(len({step.name for step in steps}) == len(steps) > 0, "it moves no schedule, or one twice")
    return message.topic_id, steps


def _step_of(step: pb.RecurringStep, produced_count: int) -> RecurringStep:
    check(bool(step.name), "a schedule has no name")
    progress = _progress_of(step.after_ms, step.ahead_ms, step.deliver_at_ms, START)
    check(step.place < max(1, produced_count), "an occurrence lies behind its batch")
    check(not progress.ahead_ms or produced_count > 0, "an occurrence has no message")
    definition = _definition_of(step.definition) if step.HasField("definition") else None
    return RecurringStep(step.name, progress, definition, step.deleted, step.place)


def _image_of(message: pb.RecurringFile) -> RecurringImage:
    check_id(message.topic_id, "topic_id")
    names = [entry.name for entry in message.schedules]
    check(names == sorted(set(names)) and all(names), "schedules are out of order, or one has no name")
    return RecurringImage(message.topic_id, {entry.name: _state_of(entry) for entry in message.schedules})


def _state_of(entry: pb.RecurringEntry) -> RecurringStanding:
    position = START
    if entry.ledger_id:
        check_ledger_id(entry.ledger_id)
        check(entry.entry_id <= ENTRY_ID_MAX, "an occurrence lies behind every ledger")
        position = Position(entry.ledger_id, entry.entry_id)
    progress = _progress_of(entry.after_ms, entry.ahead_ms, entry.deliver_at_ms, position)
    return RecurringStanding(_definition_of(entry.definition), progress)


def _progress_of(after_ms: int, ahead_ms: int, deliver_at_ms: int, position: Position) -> RecurringProgress:
    has_order = after_ms < ahead_ms <= deliver_at_ms or ahead_ms == deliver_at_ms == 0
    check(has_order, "the times of a schedule are out of order")
    return RecurringProgress(
        checked_time(after_ms), checked_time(ahead_ms), checked_time(deliver_at_ms), position
    )


def _definition_to_record(definition: Definition) -> pb.RecurringDefinition:
    rule = definition.rule
    return pb.RecurringDefinition(
        cron=rule.cron,
        interval_ms=rule.interval_ms,
        times_ms=rule.times_ms,
        zone=rule.zone,
        message=definition.message,
        start_ms=definition.start_ms,
        end_ms=definition.end_ms,
        jitter_ms=definition.jitter_ms,
        overdue=definition.overdue,
        paused=definition.paused,
    )


def _definition_of(record: pb.RecurringDefinition) -> Definition:
    times_ms = tuple(map(checked_time, record.times_ms))
    check(
        bool(record.cron) + (record.interval_ms != 0) + bool(times_ms) == 1,
        "a schedule has no time, or several kinds of times",
    )
    check(not record.interval_ms or record.interval_ms >= INTERVAL_MS_MIN, "an interval out of range")
    check(list(times_ms) == sorted(set(times_ms)), "the times of a list do not rise")
    check(bool(record.zone), "a schedule has no zone")
    check(0 <= record.jitter_ms <= DELIVER_AT_MS_MAX, "a jitter out of range")
    _, ttl_ms = key_and_ttl(record.message)
    check(ttl_ms <= TIME_MS_MAX, "the time to live of a message out of range")
    return Definition(
        RecurringRule(record.cron, record.interval_ms, times_ms, record.zone),
        record.message,
        checked_time(record.start_ms),
        checked_time(record.end_ms),
        record.jitter_ms,
        OverdueRuns(record.overdue),
        record.paused,
    )
