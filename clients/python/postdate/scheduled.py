"""Typed results of `client.schedule`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import MappingProxyType

from postdate._time import moment, moment_or_none, span
from postdate.model import MessageId
from postdate_api.v1 import schedule_pb2


class ScheduledState(enum.Enum):
    """The state of a message of the schedule."""

    WAITING = 1
    """Its time has not come."""
    DUE = 2
    """Its time has come, and no subscription was sent it yet."""
    RETURNED = 3
    """It is not pending: a subscription was sent it, got it back, and has not settled it."""


class ChangeResult(enum.Enum):
    """The kinds of result for one message that was to be cancelled or moved."""

    DONE = 1
    """The change holds: no consumer sees the old schedule."""
    ALREADY_DELIVERED = 2
    """A subscription was sent it, or may have been; nothing has changed."""
    NOT_FOUND = 3
    """There is no such pending message."""
    ALREADY_CANCELLED = 4
    """It was cancelled before."""


@dataclass(frozen=True, slots=True)
class ReturnedMessage:
    """A message as a subscription has it that got it back and has not settled it.

    `attempts` is how often it came back; `last_reason` is what the last nack said that gave a reason, most often an
    error; empty if none did.
    """

    subscription: str
    attempts: int
    last_reason: str


class ScheduledMessage:
    """A pending message, or one that came back, as it was when it was asked for.

    What a page of a list holds is decoded when it is looked at.
    """

    __slots__ = ("_has_payload", "_scheduled")

    def __init__(self, scheduled: schedule_pb2.ScheduledMessage, has_payload: bool) -> None:
        self._scheduled = scheduled
        self._has_payload = has_payload

    @property
    def id(self) -> MessageId:
        id_ = self._scheduled.id
        return MessageId(id_.ledger_id, id_.entry_id)

    @property
    def schedule_key(self) -> str:
        """The producer's name for it; empty if it has none."""
        return self._scheduled.schedule_key

    @property
    def deliver_at(self) -> datetime:
        """Time at which it is due; of a message that was not delayed its publish time."""
        return moment(self._scheduled.deliver_at_ms)

    @property
    def publish_time(self) -> datetime:
        """Time at which the broker accepted the message, on the broker's clock."""
        return moment(self._scheduled.publish_time_ms)

    @property
    def state(self) -> ScheduledState:
        return ScheduledState(self._scheduled.state)

    @property
    def revision(self) -> int:
        """Number of times that it was moved."""
        return self._scheduled.revision

    @property
    def returned(self) -> tuple[ReturnedMessage, ...]:
        """The subscriptions that got it back, by name, at most 100. Only of a message that was asked for by `get`."""
        return tuple(
            ReturnedMessage(each.subscription, each.attempts, each.last_reason)
            for each in self._scheduled.returned
        )

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes in the broker's log."""
        return self._scheduled.size_bytes

    @property
    def key(self) -> str:
        return self._scheduled.message.key

    @property
    def properties(self) -> Mapping[str, str]:
        return MappingProxyType(dict(self._scheduled.message.properties))

    @property
    def ttl(self) -> timedelta | None:
        ttl_ms = self._scheduled.message.ttl_ms
        return span(ttl_ms) if ttl_ms else None

    @property
    def event_time(self) -> datetime | None:
        """Time of the event, as the producer gave it."""
        return moment_or_none(self._scheduled.message.event_time_ms)

    @property
    def traceparent(self) -> str:
        return self._scheduled.message.traceparent

    @property
    def payload(self) -> bytes | None:
        """None unless it was asked for."""
        return self._scheduled.message.payload if self._has_payload else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ScheduledMessage):
            return NotImplemented
        return self._scheduled == other._scheduled and self._has_payload == other._has_payload

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        key = f", schedule_key {self.schedule_key!r}" if self.schedule_key else ""
        return f"<ScheduledMessage {self.id}{key}, due {self.deliver_at.isoformat()}>"


@dataclass(frozen=True, slots=True)
class ScheduledBar:
    """Count of the messages due from `start` on, up to the start of the next bar. `bytes` is an estimate."""

    start: datetime
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ScheduledCounts:
    """Messages by due time: those bars that hold any, and what is due before and after the range.

    The sums are exact in any case. Where `exact` is false, messages that the index holds as one piece count as
    spread evenly over the bars that the piece touches.
    """

    bars: tuple[ScheduledBar, ...]
    before: int
    after: int
    exact: bool

    @property
    def messages(self) -> int:
        """Number of messages within the range."""
        return sum(bar.messages for bar in self.bars)


@dataclass(frozen=True, slots=True)
class ChangeOutcome:
    """Result for one message: what became of it, or in a dry run would become of it.

    `id` is None where a key names nothing, `deliver_at` where the message is not pending (any more). With
    ALREADY_DELIVERED, `delivered_to` names the subscriptions that were sent it, or may have been. It is true in a
    condition if it is `done`.
    """

    id: MessageId | None
    schedule_key: str
    result: ChangeResult
    deliver_at: datetime | None
    delivered_to: tuple[str, ...]

    @property
    def done(self) -> bool:
        return self.result is ChangeResult.DONE

    def __bool__(self) -> bool:
        return self.done


@dataclass(frozen=True, slots=True)
class ScheduleChange:
    """Result for many messages: how many of each kind, and every one that was not done.

    `matched` is how many messages the names or the filter met.
    """

    matched: int
    counts: Mapping[ChangeResult, int]
    not_done: tuple[ChangeOutcome, ...]

    @property
    def done(self) -> int:
        return self.counts.get(ChangeResult.DONE, 0)


def change_outcome(outcome: schedule_pb2.ChangeOutcome) -> ChangeOutcome:
    return ChangeOutcome(
        id=MessageId(outcome.id.ledger_id, outcome.id.entry_id) if outcome.HasField("id") else None,
        schedule_key=outcome.schedule_key,
        result=ChangeResult(outcome.result),
        deliver_at=moment_or_none(outcome.deliver_at_ms),
        delivered_to=tuple(outcome.delivered_to),
    )


class BulkChangeState(enum.Enum):
    """The state of a bulk change."""

    QUEUED = 1
    """It waits for those of its topic that were begun before it."""
    RUNNING = 2
    """It is at work."""
    DONE = 3
    """It has come to the end of its range."""
    CANCELLED = 4
    """Somebody ended it before."""
    FAILED = 5
    """It could not go on; `failure` says why."""


@dataclass(frozen=True, slots=True)
class BulkChange:
    """A cancel or move of all messages that match a filter, as it was when it was asked for.

    `total` messages were due in its range when it was begun, whatever their schedule_key; `examined` of them, about, it
    has come past; `matched` of these matched, and `done` of these are changed, or would be in a dry run. It cancels if
    neither `deliver_at` nor `shift` is set.
    """

    id: int
    start: datetime | None
    end: datetime | None
    key_prefix: str
    deliver_at: datetime | None
    shift: timedelta | None
    dry_run: bool
    state: BulkChangeState
    total: int
    examined: int
    matched: int
    done: int
    begin_time: datetime
    end_time: datetime | None
    principal: str
    failure_reason: str
    failure: str


def bulk_change_of(change: schedule_pb2.BulkChange) -> BulkChange:
    return BulkChange(
        id=change.id,
        start=moment_or_none(change.filter.due.start_ms),
        end=moment_or_none(change.filter.due.end_ms),
        key_prefix=change.filter.key_prefix,
        deliver_at=moment_or_none(change.deliver_at_ms),
        shift=timedelta(milliseconds=change.shift_ms) if change.HasField("shift_ms") else None,
        dry_run=change.dry_run,
        state=BulkChangeState(change.state),
        total=change.total_messages,
        examined=change.examined_messages,
        matched=change.matched_messages,
        done=change.done_messages,
        begin_time=moment(change.begin_time_ms),
        end_time=moment_or_none(change.end_time_ms),
        principal=change.principal,
        failure_reason=change.failure_reason,
        failure=change.failure,
    )
