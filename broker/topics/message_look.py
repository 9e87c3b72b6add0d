"""One message, whatever became of it: what is stored, and where it stands for each subscription.

Nothing is decided here; what is said was so at the moment after the message was read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from heapq import nsmallest
from operator import attrgetter

import numpy as np

from broker.errors import NotFound
from broker.model import CANCELLED_MS, Position
from broker.storage.sparse_files import GONE_FRAME
from broker.subscriptions.entry_states import PROMISED, State
from broker.subscriptions.subscription import Subscription
from broker.topics.owed_list import OwedState
from broker.topics.schedule_frames import schedule_key_of
from broker.topics.schedule_values import Scheduled, ScheduledState
from broker.topics.topic import Topic


class MessageState(Enum):
    """State of a message over all subscriptions."""

    WAITING = "waiting"  # its time has not come
    DUE = "due"  # it may be delivered, or was
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class MessageStanding:
    """A message as one subscription has it."""

    subscription: str
    state: OwedState
    attempts: int  # deliveries that ended without success
    last_reason: str = ""  # of the last nack that gave one


@dataclass(frozen=True, slots=True)
class LookedMessage:
    """A message that is stored."""

    position: Position
    state: MessageState
    deliver_at_ms: int  # effective; 0: it was not delayed, or is cancelled
    publish_time_ms: int
    expire_at_ms: int  # 0: never
    revision: int  # how often it was moved
    frame: bytes
    owed: tuple[MessageStanding, ...]
    more_subscriptions: int  # that are left out


async def look_at(topic: Topic, position: Position, subscriptions_max: int) -> LookedMessage:
    """Describe a message; NotFound if it is not stored any more, or never was."""
    ledger_id, entry_id = position
    if entry_id >= (topic.log.entry_count(ledger_id) or 0):
        raise _not_there(topic, position)
    ids = np.array([entry_id], dtype=np.uint32)
    with topic.log.keep_files():
        times, rows, frames = await topic.log.read(ledger_id, ids, 1)
    if frames[0] is GONE_FRAME or topic.log.entry_count(ledger_id) is None:
        raise _not_there(topic, position)
    time = int(topic.log.amendments.effective_now(ledger_id, ids, times)[0])
    amendments = topic.log.amendments.get(ledger_id)
    is_waiting = topic.frontier_ms < time < CANCELLED_MS
    subscriptions = topic.subscriptions.values()
    return LookedMessage(
        position=position,
        state=MessageState.CANCELLED
        if time >= CANCELLED_MS
        else MessageState.WAITING
        if is_waiting
        else MessageState.DUE,
        deliver_at_ms=time if time < CANCELLED_MS else 0,
        publish_time_ms=int(rows["publish_time_ms"][0]),
        expire_at_ms=int(rows["expire_at_ms"][0]),
        revision=0 if amendments is None else int(amendments.revisions_of(ids)[0]),
        frame=frames[0],
        owed=tuple(
            _owed(subscription, position, is_waiting=is_waiting)
            for subscription in nsmallest(subscriptions_max, subscriptions, key=attrgetter("name"))
        ),
        more_subscriptions=max(0, len(subscriptions) - subscriptions_max),
    )


async def returned_message(topic: Topic, position: Position) -> Scheduled | None:
    """Describe a message that came back to a subscription and is not settled; None for all others."""
    if not returned_to(topic, position, 1):
        return None
    try:
        looked = await look_at(topic, position, 0)
    except NotFound:
        return None
    return Scheduled(
        position=position,
        schedule_key=schedule_key_of(looked.frame),
        deliver_at_ms=looked.deliver_at_ms or looked.publish_time_ms,
        publish_time_ms=looked.publish_time_ms,
        state=ScheduledState.RETURNED,
        revision=looked.revision,
        frame=looked.frame,
    )


def returned_to(topic: Topic, position: Position, subscriptions_max: int) -> list[MessageStanding]:
    """Return those subscriptions, the first by name, that got a message back and have not settled it."""
    returned = [
        _owed(subscription, position, is_waiting=False)
        for subscription in topic.subscriptions.values()
        if subscription.attempts.count(position)
    ]
    returned.sort(key=lambda owed: owed.subscription)
    return [owed for owed in returned if owed.state is not OwedState.SETTLED][:subscriptions_max]


def _owed(subscription: Subscription, position: Position, *, is_waiting: bool) -> MessageStanding:
    entry_state = subscription.states.state_of(position)
    if position < subscription.cursor.start:
        state = OwedState.BEFORE_START
    elif entry_state is State.SETTLED or entry_state in PROMISED:
        state = OwedState.SETTLED
    elif entry_state is State.LEASED:
        state = OwedState.LEASED
    elif is_waiting and subscription.honors_delay:
        state = OwedState.WAITING
    elif entry_state is State.QUEUED and subscription.waits_again(position):
        state = OwedState.RETRYING
    else:
        state = OwedState.READY
    attempts = subscription.attempts.count(position)
    return MessageStanding(subscription.name, state, attempts, subscription.reasons.of(position))


def _not_there(topic: Topic, position: Position) -> NotFound:
    return NotFound(f"Topic {topic.name!r} has no message {position.ledger_id}:{position.entry_id}")
