"""`postdate.schedule` without async. Made by tools/generate_sync.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta

from postdate import schedule as _schedule
from postdate.model import MessageId
from postdate.schedule import Progress
from postdate.scheduled import (
    BulkChange,
    ChangeOutcome,
    ScheduleChange,
    ScheduledCounts,
    ScheduledMessage,
)
from postdate.sync._portal import Portal


class Schedule:
    """`client.schedule`.

    A change that was sent and not answered is never made again: if the connection breaks in the middle of one,
    `Disconnected` says that it may have happened or not. `get` shows which, by `revision` and `deliver_at`.
    """

    def __init__(self, inner: _schedule.Schedule, portal: Portal) -> None:
        self._inner = inner
        self._portal = portal

    def get(
        self, topic: str, id: MessageId | None = None, *, schedule_key: str = "", payload: bool = False
    ) -> ScheduledMessage:
        """One pending message, by id or by schedule_key; or by id one that came back and is not settled.

        `returned` tells which subscriptions got it back, how often and why. `NotFound` for all others.
        """
        return self._portal.run(self._inner.get(topic, id, schedule_key=schedule_key, payload=payload))

    def list(
        self,
        topic: str,
        *,
        start: datetime | None = None,
        end: datetime | None = None,
        key_prefix: str = "",
        limit: int | None = None,
        payloads: bool = False,
    ) -> Iterator[ScheduledMessage]:
        """Messages due from `start` on and before `end`, soonest first, page by page as the iteration goes on.

        Only those whose time has not come; with `key_prefix`, only those whose schedule_key begins so.
        """
        return self._portal.iterate(
            self._inner.list(
                topic, start=start, end=end, key_prefix=key_prefix, limit=limit, payloads=payloads
            )
        )

    def count(
        self,
        *topics: str,
        start: datetime | None = None,
        end: datetime | None = None,
        width: timedelta | None = None,
    ) -> ScheduledCounts:
        """Count the messages of these topics that are due from `start` on and before `end`, in bars of `width`.

        No message is read, however many there are. Without `width` there is one bar. Bars begin at `start`.
        """
        return self._portal.run(self._inner.count(*topics, start=start, end=end, width=width))

    def count_matching(
        self, topic: str, *, start: datetime | None = None, end: datetime | None = None, key_prefix: str = ""
    ) -> int:
        """Count, exactly, the messages that `cancel_matching` or `move_matching` would change now. Nothing changes.

        With `key_prefix` every message of the range is read: it takes as long as the change. `BulkChangeFailed` if
        somebody cancels the count, which is a bulk change too.
        """
        return self._portal.run(
            self._inner.count_matching(topic, start=start, end=end, key_prefix=key_prefix)
        )

    def cancel(
        self, topic: str, id: MessageId | None = None, *, schedule_key: str = "", dry_run: bool = False
    ) -> ChangeOutcome:
        """Cancel one pending message: after DONE no consumer gets it, and its schedule_key is free."""
        return self._portal.run(self._inner.cancel(topic, id, schedule_key=schedule_key, dry_run=dry_run))

    def cancel_many(
        self,
        topic: str,
        ids: Iterable[MessageId] = (),
        *,
        schedule_keys: Iterable[str] = (),
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> ScheduleChange:
        """Cancel these, in calls of 5,000, several at a time. `PartlyChanged` if some calls failed."""
        return self._portal.run(
            self._inner.cancel_many(
                topic, ids, schedule_keys=schedule_keys, dry_run=dry_run, progress=progress
            )
        )

    def cancel_matching(
        self,
        topic: str,
        *,
        start: datetime | None = None,
        end: datetime | None = None,
        key_prefix: str = "",
        dry_run: bool = False,
        progress: Progress | None = None,
        wait: bool = True,
    ) -> BulkChange:
        """Cancel all that are due from `start` on and before `end`, and whose schedule_key begins with `key_prefix`.

        Without any of the three: all that are waiting. The broker does it by itself, and goes on if this client
        goes away; without `wait` this returns as soon as it has begun. `BulkChangeFailed` if it ended before its
        time.
        """
        return self._portal.run(
            self._inner.cancel_matching(
                topic,
                start=start,
                end=end,
                key_prefix=key_prefix,
                dry_run=dry_run,
                progress=progress,
                wait=wait,
            )
        )

    def move(
        self,
        topic: str,
        id: MessageId | None = None,
        *,
        schedule_key: str = "",
        deliver_at: datetime | None = None,
        deliver_after: timedelta | None = None,
        shift: timedelta | None = None,
        dry_run: bool = False,
    ) -> ChangeOutcome:
        """Give one pending message another time: absolute, counted from now, or shifted. It keeps its id."""
        return self._portal.run(
            self._inner.move(
                topic,
                id,
                schedule_key=schedule_key,
                deliver_at=deliver_at,
                deliver_after=deliver_after,
                shift=shift,
                dry_run=dry_run,
            )
        )

    def send_now(self, topic: str, id: MessageId | None = None, *, schedule_key: str = "") -> ChangeOutcome:
        """Have one pending message delivered at once."""
        return self._portal.run(self._inner.send_now(topic, id, schedule_key=schedule_key))

    def move_many(
        self,
        topic: str,
        ids: Iterable[MessageId] = (),
        *,
        schedule_keys: Iterable[str] = (),
        deliver_at: datetime | None = None,
        deliver_after: timedelta | None = None,
        shift: timedelta | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> ScheduleChange:
        """Move these, in calls of 5,000, several at a time. `PartlyChanged` if some calls failed."""
        return self._portal.run(
            self._inner.move_many(
                topic,
                ids,
                schedule_keys=schedule_keys,
                deliver_at=deliver_at,
                deliver_after=deliver_after,
                shift=shift,
                dry_run=dry_run,
                progress=progress,
            )
        )

    def move_matching(
        self,
        topic: str,
        *,
        start: datetime | None = None,
        end: datetime | None = None,
        key_prefix: str = "",
        deliver_at: datetime | None = None,
        deliver_after: timedelta | None = None,
        shift: timedelta | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
        wait: bool = True,
    ) -> BulkChange:
        """Move all that `cancel_matching` would cancel, each once, also where its new time matches again.

        As with `cancel_matching`, the broker does it by itself.
        """
        return self._portal.run(
            self._inner.move_matching(
                topic,
                start=start,
                end=end,
                key_prefix=key_prefix,
                deliver_at=deliver_at,
                deliver_after=deliver_after,
                shift=shift,
                dry_run=dry_run,
                progress=progress,
                wait=wait,
            )
        )

    def bulk_change(self, topic: str, id: int) -> BulkChange:
        """A change by `cancel_matching` or `move_matching`, as it stands now."""
        return self._portal.run(self._inner.bulk_change(topic, id))

    def bulk_changes(self, topic: str) -> Sequence[BulkChange]:
        """Those that have not ended, and the last 100 that have; the newest first."""
        return self._portal.run(self._inner.bulk_changes(topic))

    def cancel_bulk_change(self, topic: str, id: int) -> BulkChange:
        """End it where it is, if it has not ended. What it has changed stays changed."""
        return self._portal.run(self._inner.cancel_bulk_change(topic, id))

    def wait_bulk_change(self, topic: str, id: int, *, progress: Progress | None = None) -> BulkChange:
        """Return once it has ended; `BulkChangeFailed` if that was before its time and nobody cancelled it."""
        return self._portal.run(self._inner.wait_bulk_change(topic, id, progress=progress))
