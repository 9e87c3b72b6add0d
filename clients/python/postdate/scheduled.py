"""What is told of pending messages: typed results of `client.schedule`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import MappingProxyType

from postdate._time import moment, moment_or_none, span
from postdate.model import MessageId
from postdate.v1 import schedule_pb2


class ScheduledState(enum.Enum):
    """Where a pending message stands."""

    WAITING = 1
    """Its time has not come."""
    DUE = 2
    """Its time has come, and no subscription was sent it yet."""


class ChangeResult(enum.Enum):
    """What became of one message that was to be cancelled or moved."""

    DONE = 1
    """The change holds: no consumer sees the old schedule."""
    ALREADY_DELIVERED = 2
    """A subscription was sent it, or may have been; nothing has changed."""
    NOT_FOUND = 3
    """There is no such pending message."""
    ALREADY_CANCELLED = 4
    """It was cancelled before."""


@dataclass(frozen=True, slots=True)
class ScheduledMessage:
    """A pending message. `payload` is None unless it was asked for; `revision` counts how often it was moved."""

    id: MessageId
    schedule_key: str
    deliver_at: datetime
    publish_time: datetime
    state: ScheduledState
    revision: int
    size_bytes: int
    key: str
    properties: Mapping[str, str]
    ttl: timedelta | None
    event_time: datetime | None
    traceparent: str
    payload: bytes | None


@dataclass(frozen=True, slots=True)
class ScheduledBar:
    """How many messages are due from `start` on, up to the start of the next bar. `bytes` is an estimate."""

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
        """How many there are within the range."""
        return sum(bar.messages for bar in self.bars)


@dataclass(frozen=True, slots=True)
class ChangeOutcome:
    """What became of one message, or in a dry run would become of it.

    `id` is None where a key names nothing, `deliver_at` where the message is not pending (any more). With
    ALREADY_DELIVERED, `delivered_to` names the subscriptions that were sent it, or may have been.
    """

    id: MessageId | None
    schedule_key: str
    result: ChangeResult
    deliver_at: datetime | None
    delivered_to: tuple[str, ...]

    @property
    def done(self) -> bool:
        return self.result is ChangeResult.DONE


@dataclass(frozen=True, slots=True)
class ScheduleChange:
    """What became of many messages: how many of each result, and every one that was not done.

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


def scheduled_message(scheduled: schedule_pb2.ScheduledMessage, with_payload: bool) -> ScheduledMessage:
    message = scheduled.message
    return ScheduledMessage(
        id=MessageId(scheduled.id.ledger_id, scheduled.id.entry_id),
        schedule_key=scheduled.schedule_key,
        deliver_at=moment(scheduled.deliver_at_ms),
        publish_time=moment(scheduled.publish_time_ms),
        state=ScheduledState(scheduled.state),
        revision=scheduled.revision,
        size_bytes=scheduled.size_bytes,
        key=message.key,
        properties=MappingProxyType(dict(message.properties)),
        ttl=span(message.ttl_ms) if message.ttl_ms else None,
        event_time=moment_or_none(message.event_time_ms),
        traceparent=message.traceparent,
        payload=message.payload if with_payload else None,
    )
