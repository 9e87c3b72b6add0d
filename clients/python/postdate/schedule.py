"""Pending messages: to see, to count, to cancel, to move."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from copy import deepcopy
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, NoReturn

from postdate._rpc import Rpc
from postdate._settlement import entry_sets
from postdate._time import duration_ms, epoch_ms, moment, shift_ms
from postdate.errors import (
    BulkChangeFailed,
    DeadlineExceeded,
    Disconnected,
    InvalidRequest,
    PartlyChanged,
    PostdateError,
)
from postdate.model import MessageId
from postdate.scheduled import (
    BulkChange,
    BulkChangeState,
    ChangeOutcome,
    ChangeResult,
    ScheduleChange,
    ScheduledBar,
    ScheduledCounts,
    ScheduledMessage,
    bulk_change_of,
    change_outcome,
)
from postdate_api.v1 import message_pb2, schedule_pb2

NAMES_MAX = 5_000  # ids or keys in a call, and messages in a page of changes; the broker's default
_PAGE_SIZE = 1_000  # the broker ends a page of large payloads before
_IN_FLIGHT = 4
_POLL_S = 0.02
_POLL_MAX_S = 1.0
_CHANGE_S = 120.0  # how long a call about thousands may take, beyond what any call may

Progress = Callable[[int, int], None]
"""Told how many messages were dealt with so far, and how many there are in all; of a filter by the index, about."""
ChangeRequest = schedule_pb2.CancelScheduledRequest | schedule_pb2.RescheduleRequest


class Schedule:
    """`client.schedule`.

    A change that was sent and not answered is never made again: if the connection breaks in the middle of one,
    `Disconnected` says that it may have happened or not. `get` shows which, by `revision` and `deliver_at`.
    """

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc

    # -- see -------------------------------------------------------------------------------------------------

    async def get(
        self, topic: str, id: MessageId | None = None, *, schedule_key: str = "", payload: bool = False
    ) -> ScheduledMessage:
        """One pending message, by id or by schedule_key; or by id one that came back and is not settled.

        `returned` tells which subscriptions got it back, how often and why. `NotFound` for all others.
        """
        _check_one(id, schedule_key)
        request = schedule_pb2.GetScheduledRequest(topic=topic, view=_view(payload))
        if id is not None:
            request.id.ledger_id, request.id.entry_id = id
        else:
            request.schedule_key = schedule_key
        response = await self._rpc.call(self._rpc.schedule.GetScheduled, request)
        return ScheduledMessage(response.scheduled, payload)

    def list(
        self,
        topic: str,
        *,
        start: datetime | None = None,
        end: datetime | None = None,
        key_prefix: str = "",
        limit: int | None = None,
        payloads: bool = False,
    ) -> AsyncIterator[ScheduledMessage]:
        """Messages due from `start` on and before `end`, soonest first, page by page as the iteration goes on.

        Only those whose time has not come; with `key_prefix`, only those whose schedule_key begins so.
        """
        return self._rpc.rows(
            self._rpc.schedule.ListScheduled,
            schedule_pb2.ListScheduledRequest(
                topic=topic, due=time_range(start, end), key_prefix=key_prefix, view=_view(payloads)
            ),
            lambda page: [ScheduledMessage(each, payloads) for each in page.scheduled],
            page_size=_PAGE_SIZE,
            limit=limit,
        )

    async def count(
        self,
        *topics: str,
        start: datetime | None = None,
        end: datetime | None = None,
        width: timedelta | None = None,
    ) -> ScheduledCounts:
        """Count the messages of these topics that are due from `start` on and before `end`, in bars of `width`.

        No message is read, however many there are. Without `width` there is one bar. Bars begin at `start`.
        """
        request = schedule_pb2.CountScheduledRequest(
            topics=topics, due=time_range(start, end), width_ms=0 if width is None else _width_ms(width)
        )
        response = await self._rpc.call(self._rpc.schedule.CountScheduled, request)
        bars = (ScheduledBar(moment(bar.start_ms), bar.messages, bar.bytes) for bar in response.buckets)
        return ScheduledCounts(tuple(bars), response.before, response.after, response.exact)

    async def count_matching(
        self,
        topic: str,
        *,
        start: datetime | None = None,
        end: datetime | None = None,
        key_prefix: str = "",
    ) -> int:
        """Count, exactly, the messages that `cancel_matching` or `move_matching` would change now. Nothing changes.

        With `key_prefix` every message of the range is read: it takes as long as the change. `BulkChangeFailed` if
        somebody cancels the count, which is a bulk change too.
        """
        change = await self.cancel_matching(topic, start=start, end=end, key_prefix=key_prefix, dry_run=True)
        if change.state is BulkChangeState.CANCELLED:
            raise BulkChangeFailed(
                "Somebody cancelled the count before its end", reason="CANCELLED", change=change
            )
        return change.matched

    # -- cancel ----------------------------------------------------------------------------------------------

    async def cancel(
        self, topic: str, id: MessageId | None = None, *, schedule_key: str = "", dry_run: bool = False
    ) -> ChangeOutcome:
        """Cancel one pending message: after DONE no consumer gets it, and its schedule_key is free."""
        request = schedule_pb2.CancelScheduledRequest(topic=topic, dry_run=dry_run)
        return await self._one(request, id, schedule_key)

    async def cancel_many(
        self,
        topic: str,
        ids: Iterable[MessageId] = (),
        *,
        schedule_keys: Iterable[str] = (),
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> ScheduleChange:
        """Cancel these, in calls of 5,000, several at a time. `PartlyChanged` if some calls failed."""
        request = schedule_pb2.CancelScheduledRequest(topic=topic, dry_run=dry_run)
        return await self._many(request, ids, schedule_keys, progress)

    async def cancel_matching(
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

        Without any of the three: all that are waiting. The broker does it by itself, and goes on if this client goes
        away; without `wait` this returns as soon as it has begun. `BulkChangeFailed` if it ended before its time.
        """
        request = schedule_pb2.StartBulkChangeRequest(topic=topic, cancel=True, dry_run=dry_run)
        return await self._matching(request, start, end, key_prefix, progress, wait)

    # -- move ------------------------------------------------------------------------------------------------

    async def move(
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
        request = _move(topic, deliver_at, deliver_after, shift, dry_run)
        return await self._one(request, id, schedule_key)

    async def send_now(
        self, topic: str, id: MessageId | None = None, *, schedule_key: str = ""
    ) -> ChangeOutcome:
        """Have one pending message delivered at once."""
        return await self.move(topic, id, schedule_key=schedule_key, deliver_after=timedelta(0))

    async def move_many(
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
        request = _move(topic, deliver_at, deliver_after, shift, dry_run)
        return await self._many(request, ids, schedule_keys, progress)

    async def move_matching(
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
        given = _new_time(deliver_at, deliver_after, shift)
        request = schedule_pb2.StartBulkChangeRequest(topic=topic, dry_run=dry_run, **given)
        return await self._matching(request, start, end, key_prefix, progress, wait)

    # -- bulk changes ----------------------------------------------------------------------------------------

    async def bulk_change(self, topic: str, id: int) -> BulkChange:
        """A change by `cancel_matching` or `move_matching`, as it stands now."""
        request = schedule_pb2.GetBulkChangeRequest(topic=topic, id=id)
        return bulk_change_of((await self._rpc.call(self._rpc.schedule.GetBulkChange, request)).bulk_change)

    async def bulk_changes(self, topic: str) -> Sequence[BulkChange]:
        """Those that have not ended, and the last 100 that have; the newest first."""
        request = schedule_pb2.ListBulkChangesRequest(topic=topic)
        response = await self._rpc.call(self._rpc.schedule.ListBulkChanges, request)
        return tuple(map(bulk_change_of, response.bulk_changes))

    async def cancel_bulk_change(self, topic: str, id: int) -> BulkChange:
        """End it where it is, if it has not ended. What it has changed stays changed."""
        request = schedule_pb2.CancelBulkChangeRequest(topic=topic, id=id)
        return bulk_change_of(
            (await self._rpc.call(self._rpc.schedule.CancelBulkChange, request)).bulk_change
        )

    async def wait_bulk_change(self, topic: str, id: int, *, progress: Progress | None = None) -> BulkChange:
        """Return once it has ended; `BulkChangeFailed` if that was before its time and nobody cancelled it."""
        poll_s = _POLL_S
        while True:
            change = await self.bulk_change(topic, id)
            if progress is not None:
                progress(change.examined, max(change.examined, change.total))
            if change.end_time is not None:
                if change.state is BulkChangeState.FAILED:
                    raise BulkChangeFailed(
                        f"{change.done} messages were changed, then bulk change {id} failed: {change.failure}",
                        reason=change.failure_reason,
                        change=change,
                    )
                return change
            await asyncio.sleep(poll_s)
            poll_s = min(2 * poll_s, _POLL_MAX_S)

    # -- calls -----------------------------------------------------------------------------------------------

    async def _one(self, request: ChangeRequest, id: MessageId | None, schedule_key: str) -> ChangeOutcome:
        _check_one(id, schedule_key)
        _name(request, [schedule_key] if id is None else [id])
        return change_outcome((await self._call(request)).outcomes[0])

    async def _many(
        self,
        request: ChangeRequest,
        ids: Iterable[MessageId],
        schedule_keys: Iterable[str],
        progress: Progress | None,
    ) -> ScheduleChange:
        _check_many(ids, "ids")
        _check_many(schedule_keys, "schedule_keys")
        # Of a name that comes twice, the calls could not know: a shift would be made twice.
        names: list[Any] = list(dict.fromkeys(ids))
        keys = list(dict.fromkeys(schedule_keys))
        if names and keys:
            raise ValueError("give ids or schedule_keys, not both")
        names = names or keys
        tally = _ChangeTally(progress, len(names))
        parts = (names[start : start + NAMES_MAX] for start in range(0, len(names), NAMES_MAX))
        errors: list[PostdateError] = []

        async def work() -> None:
            for part in parts:  # shared: each part is taken once
                try:
                    await self._part(request, part, tally)
                except PostdateError as error:
                    errors.append(error)
                if errors:
                    return  # calls on their way are awaited all the same: what they did is to be known

        async with asyncio.TaskGroup() as group:
            for _ in range(min(_IN_FLIGHT, -(-len(names) // NAMES_MAX))):
                group.create_task(work())
        if errors:
            # That of a call in doubt, if there is one: it says most about what may have changed.
            tally.fail(min(errors, key=lambda each: not isinstance(each, Disconnected | DeadlineExceeded)))
        return tally.change(tally.matched)

    async def _part(self, request: ChangeRequest, names: Sequence[Any], tally: _ChangeTally) -> None:
        """Ask for some names; in smaller calls if this broker takes fewer at a time."""
        part = deepcopy(request)
        _name(part, names)
        try:
            response = await self._call(part)
        except InvalidRequest as error:
            limit = int(error.metadata.get("limit", 0))
            if error.reason != "TOO_MANY_ENTRIES" or not 0 < limit < len(names):
                raise
            for start in range(0, len(names), limit):
                await self._part(request, names[start : start + limit], tally)
            return
        tally.matched += response.matched
        tally.note(response)

    async def _matching(
        self,
        request: schedule_pb2.StartBulkChangeRequest,
        start: datetime | None,
        end: datetime | None,
        key_prefix: str,
        progress: Progress | None,
        wait: bool,
    ) -> BulkChange:
        request.filter.CopyFrom(_filter(start, end, key_prefix))
        request.request_id = uuid.uuid4().hex  # kept with the bulk change: a repeat begins nothing
        response = await self._rpc.call(self._rpc.schedule.StartBulkChange, request)
        change = bulk_change_of(response.bulk_change)
        return await self.wait_bulk_change(request.topic, change.id, progress=progress) if wait else change

    async def _call(self, request: ChangeRequest) -> Any:
        """One call. It is not repeated where it may have changed something: a second shift would be one too many,
        and the answer to any second change would not tell what the first one did."""
        request.request_id = uuid.uuid4().hex
        stub = self._rpc.schedule
        is_cancel = isinstance(request, schedule_pb2.CancelScheduledRequest)
        method = stub.CancelScheduled if is_cancel else stub.Reschedule
        call = self._rpc.call if request.dry_run else self._rpc.call_once
        return await call(method, request, wait_s=_CHANGE_S)


class _ChangeTally:
    """Tally of what became of the messages so far."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._counts: Counter[ChangeResult] = Counter()
        self._not_done: list[ChangeOutcome] = []
        self.total = total
        self.matched = 0

    def note(self, response: Any) -> None:
        results = Counter(outcome.result for outcome in response.outcomes)
        for result, count in results.items():
            self._counts[ChangeResult(result)] += count
        if results[ChangeResult.DONE.value] != len(response.outcomes):
            self._not_done += (
                change_outcome(each) for each in response.outcomes if each.result != ChangeResult.DONE.value
            )
        if self._progress is not None:
            seen = self._counts.total()
            self._progress(seen, max(seen, self.total))

    def change(self, matched: int) -> ScheduleChange:
        return ScheduleChange(matched, MappingProxyType(dict(self._counts)), tuple(self._not_done))

    def fail(self, error: PostdateError) -> NoReturn:
        """Raise a call's failure: as it is if nothing was answered before it."""
        if not self._counts:
            raise error
        change = self.change(self.matched)
        message = f"{change.done} messages were changed, then a call failed: {error}"
        raise PartlyChanged(message, change=change) from error


def _name(request: ChangeRequest, names: Sequence[Any]) -> None:
    if isinstance(names[0], str):
        request.selector.schedule_keys.extend(names)
        return
    columns: dict[int, list[int]] = {}
    for ledger_id, entry_id in names:
        columns.setdefault(ledger_id, []).append(entry_id)
    request.selector.entries.extend(entry_sets(columns))


def _move(
    topic: str,
    deliver_at: datetime | None,
    deliver_after: timedelta | None,
    shift: timedelta | None,
    dry_run: bool,
) -> schedule_pb2.RescheduleRequest:
    given = _new_time(deliver_at, deliver_after, shift)
    return schedule_pb2.RescheduleRequest(topic=topic, dry_run=dry_run, **given)


def _new_time(
    deliver_at: datetime | None, deliver_after: timedelta | None, shift: timedelta | None
) -> dict[str, Any]:
    """Return the one field of a request that says the new time."""
    if (deliver_at is not None) + (deliver_after is not None) + (shift is not None) != 1:
        raise ValueError("give one of deliver_at, deliver_after and shift")
    if deliver_at is not None:
        return {"deliver_at_ms": epoch_ms(deliver_at, "deliver_at")}
    if deliver_after is not None:
        return {"deliver_after_ms": duration_ms(deliver_after, "deliver_after")}
    return {"shift_ms": shift_ms(shift or timedelta(0), "shift")}


def _check_one(id: MessageId | None, schedule_key: str) -> None:
    if (id is None) == (not schedule_key):
        raise ValueError("give an id or a schedule_key, one of the two")


def _check_many(names: object, name: str) -> None:
    # Either is a sequence, too, of letters or of numbers.
    if isinstance(names, str | MessageId):
        raise TypeError(f"{name} is a list, or another iterable, not one {type(names).__name__}")


def _filter(start: datetime | None, end: datetime | None, key_prefix: str) -> schedule_pb2.ScheduleFilter:
    return schedule_pb2.ScheduleFilter(due=time_range(start, end), key_prefix=key_prefix)


def time_range(start: datetime | None, end: datetime | None) -> schedule_pb2.TimeRange:
    return schedule_pb2.TimeRange(
        start_ms=0 if start is None else epoch_ms(start, "start"),
        end_ms=0 if end is None else epoch_ms(end, "end"),
    )


def _width_ms(width: timedelta) -> int:
    width_ms = duration_ms(width, "width")
    if not width_ms:
        raise ValueError("a bar is at least 1 ms wide")
    return width_ms


def _view(payloads: bool) -> message_pb2.MessageView:
    return message_pb2.MESSAGE_VIEW_FULL if payloads else message_pb2.MESSAGE_VIEW_BASIC
