"""Messages that one subscription is owed and that are due, in the order of their ids, page by page.

Nothing is taken and nothing is decided here. A page looks at the next entries from a place on: at columns of states
where they name what is asked for, else at the times of the log. What it tells of each message was so at one moment,
after the message was read. Whatever is ready without having come back is in no set, so that it is found among all that
is not settled; a page is bounded by what it looks at, and may find nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

import numpy as np
from pyroaring import BitMap

from broker.errors import NotFound
from broker.model import (
    Array,
    Entries,
    Int64Column,
    Position,
    RowColumn,
    UInt32Column,
    bitmap_of,
    ids_of,
    members,
)
from broker.runtime.supervise import YieldBudget
from broker.storage.salvage import NO_FRAME, read_what_is_whole, times_around_damage
from broker.storage.sparse_files import GONE_FRAME
from broker.subscriptions.entry_states import PROMISED, State
from broker.subscriptions.subscription import Subscription
from broker.topics.topic import Topic

LOOKED_MAX = 1 << 18
"""Entries that a page looks at."""
_STEP = 1 << 14
_NOTHING = BitMap()


class OwedState(Enum):
    """State of a message for one subscription."""

    BEFORE_START = "begins after it"
    SETTLED = "settled"
    WAITING = "waits for its time"
    READY = "ready"
    LEASED = "with a consumer"
    RETRYING = "waits for its next attempt"


LISTED = (OwedState.READY, OwedState.LEASED, OwedState.RETRYING)
"""States of what is due."""


@dataclass(frozen=True, slots=True)
class OwedMessage:
    """A message as one subscription is owed it."""

    position: Position
    state: OwedState
    attempts: int  # deliveries that ended without success
    last_reason: str  # of the last nack that gave one
    publish_time_ms: int
    deliver_at_ms: int  # effective; 0: it was not delayed
    consumer_name: str  # of whoever holds it
    lease_end_ms: int  # 0: nobody holds it
    next_attempt_ms: int  # 0: it does not wait for one
    frame: bytes


@dataclass(frozen=True, slots=True)
class OwedPage:
    """A page, and the last place that was looked at; None: there is nothing more."""

    messages: list[OwedMessage]
    last: Position | None


class OwedList:
    """See the module's description. For one page."""

    def __init__(self, topic: Topic, subscription: Subscription, states: Collection[OwedState]) -> None:
        self._topic = topic
        self._log = topic.log
        self._subscription = subscription
        self._clock = subscription.clock
        self._states = states

    async def page(self, after: Position, count: int, bytes_max: int) -> OwedPage:
        """At most `count` entries after a place, of `bytes_max` or a little more together."""
        self._subscription.consumers.expire_leases()  # without consumers nobody does it
        found: list[OwedMessage] = []
        budget, looked = YieldBudget(self._clock), 0
        at = Position(after.ledger_id, after.entry_id + 1) if after.ledger_id else after
        with self._log.keep_files():
            while (step := self._next(at)) is not None:
                ledger_id, ids, at = step
                ids = await self._due(ledger_id, ids)
                while len(ids):
                    entries, done = await self._read(ledger_id, ids[: count - len(found)], bytes_max)
                    found += entries
                    bytes_max -= sum(len(entry.frame) for entry in entries)
                    last, ids = Position(ledger_id, int(ids[done - 1])), ids[done:]
                    if len(found) == count or bytes_max <= 0:
                        is_more = len(ids) or self._next(at) is not None
                        return OwedPage(found, last if is_more else None)
                looked += _STEP
                if looked >= LOOKED_MAX:
                    return OwedPage(found, Position(at.ledger_id, at.entry_id - 1))
                await budget.spent()
        return OwedPage(found, None)

    # -- where to look ---------------------------------------------------------------------------------------

    def _next(self, at: Position) -> tuple[int, UInt32Column, Position] | None:
        """Return the next entries that may be wanted, of one ledger, and the place after what was looked at."""
        if OwedState.READY in self._states:
            return self._next_unsettled(at)
        states = self._subscription.states
        states.redelivery.find_all_due(self._clock.now_ms())
        columns: list[tuple[Entries, Entries]] = []
        if OwedState.LEASED in self._states:
            columns.append((states.column(State.LEASED), {}))
        if OwedState.RETRYING in self._states:
            columns.append((states.column(State.QUEUED), states.redelivery.ready))
        ledger_ids = {i for column, _ in columns for i in column if i >= at.ledger_id}
        for ledger_id in sorted(ledger_ids):
            first = at.entry_id if ledger_id == at.ledger_id else 0
            found = BitMap()
            for column, but in columns:
                if bitmap := column.get(ledger_id):
                    found |= _some_from(bitmap - but[ledger_id] if ledger_id in but else bitmap, first)
            if found:
                ids = ids_of(found)[:_STEP]
                return ledger_id, ids, Position(ledger_id, int(ids[-1]) + 1)
        return None

    def _next_unsettled(self, at: Position) -> tuple[int, UInt32Column, Position] | None:
        cursor = self._subscription.cursor
        ledger_id, first = max(at, cursor.mark)
        while True:
            count = self._log.entry_count(ledger_id) or 0
            if first < count and not cursor.has_settled(ledger_id, count):
                end = min(first + _STEP, count)
                ids = np.arange(first, end, dtype=np.uint32)
                return ledger_id, ids, Position(ledger_id, end)
            following = self._log.next_ledger_id(ledger_id)
            if following is None:
                return None
            ledger_id, first = following, 0

    # -- what is there ---------------------------------------------------------------------------------------

    async def _due(self, ledger_id: int, ids: UInt32Column) -> UInt32Column:
        """Return which entries are wanted now, as far as it is known without reading them."""
        ids = ids[~self._subscription.settled_or_in(ledger_id, ids, PROMISED)]
        if not len(ids) or not self._subscription.honors_delay:
            return ids[self._wanted(self._masks(ledger_id, ids, np.zeros(len(ids), np.int64)))]
        try:
            times, _ = await times_around_damage(self._log.times_of, ledger_id, ids)
        except NotFound:  # the ledger was dropped meanwhile: all of it was settled
            return ids[:0]
        return ids[self._wanted(self._masks(ledger_id, ids, times))]

    async def _read(self, ledger_id: int, ids: UInt32Column, bytes_max: int) -> tuple[list[OwedMessage], int]:
        """Read the first entries, as many as the bytes allow; returns those that are wanted, and the number read."""
        try:
            times, rows, frames = await read_what_is_whole(self._log, ledger_id, ids, bytes_max)
        except NotFound:
            return [], len(ids)
        done = len(frames)
        return self._entries(ledger_id, ids[:done], times[:done], rows[:done], frames), done

    # -- one moment: no await from here on -------------------------------------------------------------------

    def _masks(self, ledger_id: int, ids: UInt32Column, times: Int64Column) -> dict[OwedState, Array]:
        """For each listed state, which of some rising ids are in it. `times`: effective ones."""
        subscription = self._subscription
        redelivery = subscription.states.redelivery
        now_ms = self._clock.now_ms()
        redelivery.find_all_due(now_ms)
        owed = ~subscription.settled_or_in(ledger_id, ids, PROMISED)
        leased = owed & members(ids, subscription.states.column(State.LEASED).get(ledger_id, _NOTHING))
        due = owed & ~leased
        if subscription.honors_delay:
            due &= times <= min(self._topic.frontier_ms, now_ms)
        waits = members(ids, redelivery.queued.get(ledger_id, _NOTHING))
        waits &= ~members(ids, redelivery.ready.get(ledger_id, _NOTHING))
        return {
            OwedState.READY: due & ~waits,
            OwedState.LEASED: leased,
            OwedState.RETRYING: due & waits,
        }

    def _wanted(self, masks: dict[OwedState, Array]) -> Array:
        wanted: Array = np.logical_or.reduce([masks[state] for state in self._states])
        return wanted

    def _entries(
        self, ledger_id: int, ids: UInt32Column, times: Int64Column, rows: RowColumn, frames: list[bytes]
    ) -> list[OwedMessage]:
        subscription = self._subscription
        effective = self._log.amendments.effective_now(ledger_id, ids, times)
        masks = self._masks(ledger_id, ids, effective)
        leases = subscription.states.leases.of(ledger_id, bitmap_of(ids[masks[OwedState.LEASED]]))
        waiting = bitmap_of(ids[masks[OwedState.RETRYING]])
        next_ms = subscription.states.redelivery.not_before_ms(ledger_id, waiting)
        attempts = subscription.attempts.counts(ledger_id, ids)
        names = {consumer.consumer_id: consumer.name for consumer in subscription.consumers}
        now_ms, now_ns = self._clock.now_ms(), self._clock.monotonic_ns()
        entries: list[OwedMessage] = []
        for at in np.flatnonzero(self._wanted(masks)).tolist():
            if frames[at] is NO_FRAME or frames[at] is GONE_FRAME:
                continue  # of a damaged message nothing can be shown
            entry_id = int(ids[at])
            position, lease = Position(ledger_id, entry_id), leases.get(entry_id)
            entries.append(
                OwedMessage(
                    position=position,
                    state=next(state for state in LISTED if masks[state][at]),
                    attempts=int(attempts[at]),
                    last_reason=subscription.reasons.of(position),
                    publish_time_ms=int(rows["publish_time_ms"][at]),
                    deliver_at_ms=int(effective[at]),
                    consumer_name=names.get(lease.consumer_id, lease.consumer_id) if lease else "",
                    lease_end_ms=now_ms + max(0, lease.deadline_ns - now_ns) // 1_000_000 if lease else 0,
                    next_attempt_ms=next_ms.get(entry_id, 0),
                    frame=frames[at],
                )
            )
        return entries


def _some_from(bitmap: BitMap, first: int) -> BitMap:
    """The next entries of a set from one on."""
    before = bitmap.rank(first - 1) if first else 0
    return bitmap[before : before + _STEP]
