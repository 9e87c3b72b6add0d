"""Messages that a subscription is owed, and where they stand."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from postdate._time import moment, moment_or_none
from postdate.model import MessageId
from postdate_api.v1 import consumer_pb2


class OwedState(enum.Enum):
    """The state of a message for a subscription that is owed it, once its time has come."""

    READY = 1
    """It could be delivered now; it may have come back before."""
    LEASED = 2
    """A consumer holds it."""
    RETRYING = 3
    """It came back, and waits for the time of its next attempt."""


@dataclass(frozen=True, slots=True)
class OwedMessage:
    """A message that a subscription is owed, as it was when it was looked at.

    `attempts` is how often it came back; `last_reason` is what the last nack said that gave a reason, most often an
    error; empty if none did. `deliver_at` is when it was due; of a message that was not delayed its publish time.
    `consumer_name` and `lease_end` are set of a message that is LEASED, `next_attempt` of one that is RETRYING.
    `payload` is None unless it was asked for.
    """

    id: MessageId
    state: OwedState
    attempts: int
    last_reason: str
    publish_time: datetime
    deliver_at: datetime
    consumer_name: str
    lease_end: datetime | None
    next_attempt: datetime | None
    size_bytes: int
    key: str
    properties: Mapping[str, str]
    payload: bytes | None


def owed_message(owed: consumer_pb2.OwedMessage, with_payload: bool) -> OwedMessage:
    return OwedMessage(
        id=MessageId(owed.id.ledger_id, owed.id.entry_id),
        state=OwedState(owed.state),
        attempts=owed.attempts,
        last_reason=owed.last_reason,
        publish_time=moment(owed.publish_time_ms),
        deliver_at=moment(owed.deliver_at_ms),
        consumer_name=owed.consumer_name,
        lease_end=moment_or_none(owed.lease_end_ms),
        next_attempt=moment_or_none(owed.next_attempt_ms),
        size_bytes=owed.size_bytes,
        key=owed.message.key,
        properties=dict(owed.message.properties),
        payload=owed.message.payload if with_payload else None,
    )
