"""`postdate.recurring` without async. Made by tools/generate_sync.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from postdate import recurring as _recurring
from postdate.model import MessageId
from postdate.recurring import Occurrence, RecurringSchedule, RecurringState
from postdate.sync._portal import Portal


class Recurring:
    """`client.recurring`."""

    def __init__(self, inner: _recurring.Recurring, portal: Portal) -> None:
        self._inner = inner
        self._portal = portal

    def put(self, topic: str, schedule: RecurringSchedule) -> RecurringState:
        """Create a schedule, or replace one: its occurrences from now on follow this. The same again does nothing."""
        return self._portal.run(self._inner.put(topic, schedule))

    def get(self, topic: str, name: str) -> RecurringState:
        """One schedule; `NotFound` if there is none of that name."""
        return self._portal.run(self._inner.get(topic, name))

    def list(
        self, topic: str, *, name_prefix: str = "", limit: int | None = None
    ) -> Iterator[RecurringState]:
        """The schedules of a topic by name, page by page as the iteration goes on."""
        return self._portal.iterate(self._inner.list(topic, name_prefix=name_prefix, limit=limit))

    def delete(self, topic: str, name: str) -> None:
        """Delete a schedule; its next occurrence is cancelled."""
        self._portal.run(self._inner.delete(topic, name))

    def pause(self, topic: str, name: str) -> RecurringState:
        """Stop a schedule; its next occurrence is cancelled."""
        return self._portal.run(self._inner.pause(topic, name))

    def resume(self, topic: str, name: str) -> RecurringState:
        """Let a schedule go on from now; what it would have stored meanwhile is left out."""
        return self._portal.run(self._inner.resume(topic, name))

    def trigger(self, topic: str, name: str, *, request_id: str = "") -> MessageId:
        """Store one message of a schedule now, and leave its times. With a `request_id` a repeat changes nothing."""
        return self._portal.run(self._inner.trigger(topic, name, request_id=request_id))

    def backfill(
        self, topic: str, name: str, start: datetime, end: datetime, *, dry_run: bool = False
    ) -> Sequence[datetime]:
        """Store the occurrences from `start` on and before `end` once more, both in the past; returns which.

        Calls of at most 1,000 occurrences follow each other. If one fails after others: `PartlyStored`, whose
        message says where to go on.
        """
        return self._portal.run(self._inner.backfill(topic, name, start, end, dry_run=dry_run))

    def preview(
        self, topic: str, schedule: RecurringSchedule | str, *, count: int = 10, after: datetime | None = None
    ) -> Sequence[Occurrence]:
        """The next occurrences of a schedule, by name or of one that is not put, after a time or after now."""
        return self._portal.run(self._inner.preview(topic, schedule, count=count, after=after))
