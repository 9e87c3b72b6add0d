"""Decides what becomes of messages that are to be cancelled or moved, and hands the decision to the journal.

    read effective times -> decide (one step) -> submit, hold back -> durable: done

Invariants:
  CHANGE-1  From the last look at times, subscriptions and other changes to the submission there is no await: what is
      decided is so when the record is submitted, and from then on nobody is sent the entries (`RecordsUnderWay`).
  CHANGE-2  All or nothing over subscriptions: an entry changes only if no subscription that honours delays was sent
      it, or may have been; then none will be under the old schedule (P5).
  CHANGE-3  A new time lies after the index's frontier, so that a move cannot fall between catch-up and index.
  CHANGE-4  A request that is refused has changed nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from broker.delayed.index_pump import IndexPump
from broker.errors import InvalidRequest, NotFound
from broker.model import (
    CANCELLED_MS,
    DELIVER_AT_MS_MAX,
    Array,
    Int64Column,
    Position,
    UInt32Column,
    bitmap_of,
    common_entries,
    distinct_values,
    members,
)
from broker.policy import EffectiveTopicPolicy
from broker.runtime.clock import Clock
from broker.storage.changes import Cancelled, Changed, Moved
from broker.storage.log import TopicLog
from broker.storage.records import BulkStepped
from broker.storage.salvage import times_around_damage
from broker.subscriptions.entry_states import HELD
from broker.subscriptions.subscription import Subscription
from broker.topics.refusals import check_max_delay, topic_not_found
from broker.topics.schedule_values import Cancel, Change, ChangeResult, Move, OutcomeColumns
from broker.topics.topic_subscriptions import Subscriptions

_DONE, _DELIVERED = int(ChangeResult.DONE), int(ChangeResult.ALREADY_DELIVERED)
_NOT_FOUND, _CANCELLED = int(ChangeResult.NOT_FOUND), int(ChangeResult.ALREADY_CANCELLED)


@dataclass(slots=True)
class _Asked:
    """Entries of one ledger that are to be changed, aligned."""

    ledger_id: int
    entry_ids: UInt32Column  # rising
    places: Array  # in the request, where an entry may be named twice
    rows: Array  # which of the entries each place names
    times: Int64Column  # effective
    results: Array
    delivered_to: dict[int, list[str]] = field(default_factory=dict)  # by row
    new_ms: Int64Column | None = None  # of a move, for all of them


Submit = Callable[[Cancelled | Moved | None, OutcomeColumns], asyncio.Future[None] | None]
"""Submits what was decided, if anything is to be changed, in the step in which it was (CHANGE-1)."""


class ChangingTopic(Protocol):
    """A topic as changes of its schedule need it."""

    topic_id: int
    name: str
    deleted: bool
    log: TopicLog
    subscriptions: Subscriptions

    @property
    def policy(self) -> EffectiveTopicPolicy: ...

    @property
    def index(self) -> IndexPump: ...

    def submit_change(self, record: Cancelled | Moved | BulkStepped) -> asyncio.Future[None]:
        """Hand the record to the journal; from now on nobody is sent the entries."""


class Changing:
    """Cancels and moves of one topic."""

    def __init__(self, topic: ChangingTopic, clock: Clock) -> None:
        self._topic = topic
        self._clock = clock

    async def change(
        self,
        ledger_ids: Int64Column,
        entry_ids: UInt32Column,
        change: Change,
        *,
        dry_run: bool,
        waiting_only: bool = False,
        expected_ms: Int64Column | None = None,
        submit: Submit | None = None,
    ) -> OutcomeColumns:
        """Change entries; returns once that is durable, with an outcome for each, in order.

        `waiting_only`: those whose time has come are not changed; what was sent to nobody is not found. `expected_ms`:
        their times when they were chosen; who has another one by now is not found, and left alone. `submit`: called in
        the place of the topic's own.
        """
        asked = _by_ledger(ledger_ids, entry_ids)
        entries = {part.ledger_id: bitmap_of(part.entry_ids) for part in asked}
        while True:
            await self._topic.log.under_way.wait_unchanged(entries)
            await self._read(asked, around_damage=expected_ms is not None)
            if not common_entries(entries, self._topic.log.under_way.changing):
                break
        for part in asked:
            self._find_results(part, waiting_only=waiting_only)
            if expected_ms is not None:
                expected = np.zeros(len(part.entry_ids), dtype=np.int64)
                expected[part.rows] = expected_ms[part.places]
                part.results[part.times != expected] = _NOT_FOUND
        record = self._decide(asked, change)
        outcomes = _outcomes(ledger_ids, entry_ids, asked, change)
        durable = (submit or self._submit)(None if dry_run else record, outcomes)
        if durable is not None:
            await asyncio.shield(durable)
        return outcomes

    def is_due(self, position: Position, deliver_at_ms: int) -> bool:
        """Return whether a message whose time has come can still be held back from everybody."""
        ledger_id, entry_id = position
        if ledger_id in self._topic.log.under_way.going:
            return False
        times = np.array([deliver_at_ms], dtype=np.int64)
        return not self._sent_to(ledger_id, np.array([entry_id], dtype=np.uint32), times)

    async def _read(self, asked: Sequence[_Asked], *, around_damage: bool) -> None:
        """`around_damage`: what cannot be read has no time that anybody expects; else Corrupt is raised."""
        log = self._topic.log
        for part in asked:
            count = log.entry_count(part.ledger_id) or 0
            known = int(np.searchsorted(part.entry_ids, count))
            part.times[:] = 0
            if known:
                try:
                    ids = part.entry_ids[:known]
                    if around_damage:
                        part.times[:known], _ = await times_around_damage(log.times_of, part.ledger_id, ids)
                    else:
                        part.times[:known] = await log.times_of(part.ledger_id, ids)
                except NotFound:  # dropped meanwhile
                    continue

    # -- one step with what follows the last read: no await from here on (CHANGE-1) ----------------------------------

    def _submit(self, record: Cancelled | Moved | None, _: OutcomeColumns) -> asyncio.Future[None] | None:
        return None if record is None else self._topic.submit_change(record)

    def _decide(self, asked: Sequence[_Asked], change: Change) -> Cancelled | Moved | None:
        """Return what is to be changed; None if nothing is."""
        topic = self._topic
        if topic.deleted:
            raise topic_not_found(topic.name)
        for part in asked:
            if isinstance(change, Move):
                part.new_ms = self._new_times(part, change)
        ledgers: dict[int, Changed] = {}
        for part in asked:
            chosen = part.results == _DONE
            if part.new_ms is not None:
                chosen &= part.new_ms != part.times
            at = np.flatnonzero(chosen)
            if len(at):
                new_ms = None if part.new_ms is None else part.new_ms[at]
                ledgers[part.ledger_id] = Changed(part.entry_ids[at], part.times[at], new_ms)
        if not ledgers:
            return None
        kind = Cancelled if isinstance(change, Cancel) else Moved
        return kind(topic.topic_id, ledgers)

    def _find_results(self, asked: _Asked, *, waiting_only: bool) -> None:
        """Decide the outcome of each entry (CHANGE-2)."""
        log = self._topic.log
        if log.entry_count(asked.ledger_id) is None or asked.ledger_id in log.under_way.going:
            asked.times[:] = 0
        asked.times = times = log.amendments.effective_now(asked.ledger_id, asked.entry_ids, asked.times)
        asked.results = np.full(len(times), _DONE)
        asked.results[times == 0] = _NOT_FOUND
        asked.results[times >= CANCELLED_MS] = _CANCELLED
        if (amendments := log.amendments.get(asked.ledger_id)) is not None and amendments.left_out:
            left_out = members(asked.entry_ids, amendments.left_out)
            asked.results[left_out & (times >= CANCELLED_MS)] = _DELIVERED  # to whom is not known any more
        if waiting_only:
            asked.results[(times > 0) & (times <= self._frontier_ms)] = _NOT_FOUND
        due_ms = max(self._frontier_ms, self._topic.index.reached_ms)
        due = np.flatnonzero((times > 0) & (times <= due_ms))
        if not len(due):
            return
        for name, sent in self._sent_to(asked.ledger_id, asked.entry_ids[due], times[due]):
            asked.results[due[sent]] = _DELIVERED
            for row in due[sent].tolist():
                asked.delivered_to.setdefault(row, []).append(name)

    def _sent_to(
        self, ledger_id: int, entry_ids: UInt32Column, times: Int64Column
    ) -> list[tuple[str, Array]]:
        """The subscriptions that were sent some of the entries, whose time has come, or may have been."""
        deliveries = []
        for subscription in self._topic.subscriptions.values():
            if subscription.honors_delay:
                sent = _was_sent(subscription, ledger_id, entry_ids, times)
                if sent.any():
                    deliveries.append((subscription.name, sent))
        return deliveries

    def _new_times(self, asked: _Asked, move: Move) -> Int64Column:
        """Return the due times after a move (CHANGE-3); raises the refusal."""
        now_ms = self._clock.now_ms()
        is_done = asked.results == _DONE
        if move.shift_ms is not None:
            wanted = asked.times[is_done] + move.shift_ms
            field = "shift_ms"
        else:
            is_absolute = move.deliver_at_ms is not None
            at_ms = move.deliver_at_ms if is_absolute else now_ms + (move.deliver_after_ms or 0)
            wanted = np.full(int(is_done.sum()), at_ms, dtype=np.int64)
            field = "deliver_at_ms" if is_absolute else "deliver_after_ms"
        latest_ms = int(wanted.max(initial=0))
        if latest_ms > DELIVER_AT_MS_MAX:
            why = f"With this {field} a message would be due after the year 9999: it counts milliseconds"
            raise InvalidRequest(why, field=field, reason="INVALID_NEW_TIME")
        check_max_delay(
            wanted,
            now_ms,
            self._topic.policy,
            lambda _: field,
            lambda index: f"{asked.ledger_id}:{asked.entry_ids[is_done][index]}",
        )
        new_ms = asked.times.copy()
        new_ms[is_done] = np.maximum(wanted, self._frontier_ms + 1)
        return new_ms

    @property
    def _frontier_ms(self) -> int:
        return self._topic.index.tracker.frontier.deliver_at_ms


def _was_sent(
    subscription: Subscription, ledger_id: int, entry_ids: UInt32Column, times: Int64Column
) -> Array:
    """For each entry whose time has come, whether a subscription was sent it, may have been, or has settled it."""
    start = subscription.image.start
    if ledger_id < start.ledger_id:
        return np.zeros(len(entry_ids), dtype=np.bool_)
    sent = subscription.settled_or_in(ledger_id, entry_ids, HELD)
    came_back = subscription.states.redelivery.came_back({ledger_id: bitmap_of(entry_ids)})
    if ledger_id in came_back:
        sent |= members(entry_ids, came_back[ledger_id])
    sent |= times <= subscription.unknown_through_ms
    if ledger_id == start.ledger_id:
        sent &= entry_ids >= start.entry_id
    return sent


def _by_ledger(ledger_ids: Int64Column, entry_ids: UInt32Column) -> list[_Asked]:
    """The entries, each once, by ledger."""
    asked = []
    for ledger_id in distinct_values(ledger_ids).tolist():
        places = np.flatnonzero(ledger_ids == ledger_id)
        ids, rows = np.unique(entry_ids[places], return_inverse=True)
        nothing = np.zeros(len(ids), dtype=np.int64)
        asked.append(_Asked(ledger_id, ids, places, rows, nothing, np.full(len(ids), _NOT_FOUND)))
    return asked


def _outcomes(
    ledger_ids: Int64Column, entry_ids: UInt32Column, asked: Sequence[_Asked], change: Change
) -> OutcomeColumns:
    """Return the outcome of each entry, in the order of the request."""
    results = np.zeros(len(ledger_ids), dtype=np.int64)
    due = np.zeros(len(ledger_ids), dtype=np.int64)
    delivered_to: dict[int, tuple[str, ...]] = {}
    for part in asked:
        results[part.places] = part.results[part.rows]
        if part.new_ms is not None:
            due[part.places] = np.where(part.results == _DONE, part.new_ms, 0)[part.rows]
        if part.delivered_to:
            for place, row in zip(part.places.tolist(), part.rows.tolist(), strict=True):
                if row in part.delivered_to:
                    delivered_to[place] = tuple(part.delivered_to[row])
    return OutcomeColumns(ledger_ids, entry_ids, results, due, delivered_to)
