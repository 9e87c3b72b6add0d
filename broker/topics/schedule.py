"""A topic's schedule: what its messages wait for, shown and changed. The door for the services above."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from broker.delayed.due_rows import Key
from broker.errors import NotFound
from broker.model import Int64Column, Position, UInt32Column
from broker.runtime.clock import Clock
from broker.runtime.foreground import Foreground
from broker.storage.changes import Cancelled, Moved
from broker.topics.changing import Changing, ChangingTopic
from broker.topics.schedule_values import (
    Change,
    ChangeResult,
    DueRange,
    Outcome,
    OutcomeColumns,
    Scheduled,
    ScheduledCounts,
    ScheduledPage,
    ScheduledState,
)
from broker.topics.scheduled import ScheduledLook
from broker.topics.topic_keys import TopicKeys


class ScheduledTopic(ChangingTopic, Protocol):
    """A topic as its schedule needs it."""

    keys: TopicKeys


SubmitStep = Callable[[Cancelled | Moved | None, OutcomeColumns, int, Key | None], asyncio.Future[None]]
"""Submits what was decided about the next messages: told how many were examined for it, and from where the rest is."""


class Schedule:
    """See the module's description. Holds no state of its own."""

    def __init__(self, topic: ScheduledTopic, clock: Clock, foreground: Foreground) -> None:
        self._topic = topic
        self._clock = clock
        self._changing = Changing(topic, clock)
        self._look = ScheduledLook(topic.log, lambda: topic.index, clock, self._changing.is_due, foreground)
        self._foreground = foreground

    async def get(self, name: Position | str) -> Scheduled:
        """A pending message by its id, or by the key that it holds; NotFound for what is not pending."""
        position = name if isinstance(name, Position) else (await self._topic.keys.find([name]))[0]
        scheduled = await self._look.get(position) if position is not None else None
        if isinstance(name, str) and scheduled is not None and scheduled.state is not ScheduledState.WAITING:
            scheduled = None  # its key is free again
        if scheduled is None:
            what = f"{name.ledger_id}:{name.entry_id}" if isinstance(name, Position) else f"with key {name!r}"
            raise NotFound(
                f"Topic {self._topic.name!r} has no pending message {what}",
                reason="SCHEDULED_NOT_FOUND",
                topic=self._topic.name,
            )
        return scheduled

    async def page(self, due: DueRange, key_prefix: str, start: Key | None, limit: int) -> ScheduledPage:
        """Messages whose time has not come, in due order, from a place on."""
        return await self._look.page(due, key_prefix, start, limit)

    async def count(self, due: DueRange, width_ms: int) -> ScheduledCounts:
        """Messages whose time has not come, by due time; one bar if `width_ms` is 0. Reads no messages."""
        return await self._look.count(due, width_ms)

    async def count_matching(self, due: DueRange, key_prefix: str) -> int:
        """Count what waits and matches. Where a prefix is given, every message of the range is read."""
        return await self._look.count_matching(due, key_prefix)

    async def times(self, due: DueRange, limit: int) -> Int64Column | None:
        """The due times of what waits in a range, exactly, rising; None if these are more than `limit`."""
        return await self._look.times(due, limit)

    async def change(
        self, names: Sequence[Position] | Sequence[str], change: Change, *, dry_run: bool
    ) -> Sequence[Outcome]:
        """Cancel or move messages, by id or by key; an outcome for each, in order, once that is durable.

        Raises InvalidRequest or OutOfRange for a time that cannot be kept, before anything has changed.
        """
        keys = [name for name in names if isinstance(name, str)]
        if not keys:
            ids = [name for name in names if isinstance(name, Position)]
            return await self._changing.change(*_columns(ids), change, dry_run=dry_run)
        return await self._change_keys(keys, change, dry_run=dry_run)

    async def _change_keys(self, keys: Sequence[str], change: Change, *, dry_run: bool) -> list[Outcome]:
        outcomes = [Outcome(None, key, ChangeResult.NOT_FOUND, 0) for key in keys]
        tried: list[Position | None] = [None] * len(keys)
        rest = list(range(len(keys)))
        while rest:
            positions = await self._topic.keys.find([keys[place] for place in rest])
            # Who holds a key may be replaced by another one while we look: a key that is held is always found.
            holders = [
                (place, at)
                for place, at in zip(rest, positions, strict=True)
                if at not in (None, tried[place])
            ]
            known = [at for _, at in holders if at is not None]
            changed = await self._changing.change(
                *_columns(known), change, dry_run=dry_run, waiting_only=True
            )
            rest = []
            for (place, at), outcome in zip(holders, changed, strict=True):
                tried[place] = at
                outcomes[place] = outcome._replace(schedule_key=keys[place])
                if outcome.result is not ChangeResult.DONE:
                    rest.append(place)
        await self._look_at_settled(outcomes, change, dry_run=dry_run)
        return outcomes

    async def _look_at_settled(self, outcomes: list[Outcome], change: Change, *, dry_run: bool) -> None:
        """Put in what is remembered of keys under which nothing waits, where it is about a later message."""
        late = [place for place, outcome in enumerate(outcomes) if outcome.result is not ChangeResult.DONE]
        settled = await self._topic.keys.find_settled([outcomes[place].schedule_key for place in late])
        by_id: list[tuple[int, Position]] = []
        for place, ended_key in zip(late, settled, strict=True):
            known, key = outcomes[place].position, outcomes[place].schedule_key
            if ended_key is None or (known is not None and ended_key.position < known):
                continue
            if ended_key.position == known and ended_key.was_cancelled is None:
                continue  # its row was asked already
            if ended_key.was_cancelled is None:
                by_id.append((place, ended_key.position))
                continue
            ended = (
                ChangeResult.ALREADY_CANCELLED if ended_key.was_cancelled else ChangeResult.ALREADY_DELIVERED
            )
            outcomes[place] = Outcome(ended_key.position, key, ended, 0)
        changed = await self._changing.change(
            *_columns([position for _, position in by_id]), change, dry_run=dry_run, waiting_only=True
        )
        for (place, _), outcome in zip(by_id, changed, strict=True):
            outcomes[place] = outcome._replace(schedule_key=outcomes[place].schedule_key)

    async def caught_up(self) -> None:
        """Return once the index has what is durable now; Unavailable if that takes long."""
        await self._look.caught_up()

    async def change_next(
        self,
        due: DueRange,
        key_prefix: str,
        change: Change,
        start: Key,
        limit: int,
        *,
        moved_before_lsn: int,
        dry_run: bool,
        submit: SubmitStep,
    ) -> None:
        """Cancel or move the next messages that match, in due order; returns once that is durable.

        What a record from `moved_before_lsn` on has moved is left alone; 0: nothing is. `submit` is told also of
        messages of which none is changed.
        """
        lsn = moved_before_lsn - 1 if moved_before_lsn else None
        next_ = await self._look.next_matching(due, key_prefix, start, limit, lsn)
        await self._foreground.give_way(0.0)
        entries, began = next_.entries, self._seconds()
        # What was changed by somebody else since it was found does not match any more.
        await self._changing.change(
            entries.ledger_ids,
            entries.entry_ids,
            change,
            dry_run=dry_run,
            expected_ms=entries.deliver_at_ms,
            submit=lambda record, outcomes: submit(record, outcomes, next_.examined, next_.end),
        )
        await self._foreground.give_way(self._seconds() - began)

    def _seconds(self) -> float:
        return self._clock.monotonic_ns() / 1e9


def _columns(positions: Sequence[Position]) -> tuple[Int64Column, UInt32Column]:
    ledger_ids = np.fromiter(
        (position.ledger_id for position in positions), dtype=np.int64, count=len(positions)
    )
    entry_ids = np.fromiter(
        (position.entry_id for position in positions), dtype=np.uint32, count=len(positions)
    )
    return ledger_ids, entry_ids
