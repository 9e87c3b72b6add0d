"""Recurring schedules: to put, see, pause, delete, trigger and backfill."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from postdate._encode import encode_message
from postdate._rpc import Rpc
from postdate._time import duration_ms, epoch_ms, moment, moment_or_none, span
from postdate.errors import PartlyStored, PostdateError
from postdate.model import MessageId
from postdate_api.v1 import message_pb2, schedule_pb2

_PAGE_SIZE = 1_000


class RecurringOverdue(enum.Enum):
    """Occurrences that are stored of those that were missed, because the broker was down or had no room."""

    ALL = "all"
    ONE = "one"
    """The last one."""
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurringSchedule:
    """A schedule that recurs: exactly one of `cron`, `interval` and `times` says when."""

    name: str
    """Unique in its topic."""
    cron: str = ""
    """Five fields, or six with seconds before them."""
    interval: timedelta | None = None
    """From one occurrence to the next, at least a second; counted from `start`, or from 1970 in UTC."""
    times: Sequence[datetime] = ()
    """The occurrences themselves, rising."""
    time_zone: str = "UTC"
    """Of a cron, such as Europe/Berlin."""
    start: datetime | None = None
    """No occurrence before it."""
    end: datetime | None = None
    """No occurrence from it on."""
    jitter: timedelta = timedelta()
    """Each occurrence is delivered so much later at most, and before the next one."""
    overdue: RecurringOverdue = RecurringOverdue.ALL
    """Action on occurrences that were missed."""
    paused: bool = False
    """Nothing is stored for as long. `put` of one that is there leaves it as it is."""
    payload: bytes = b""
    """Of each message."""
    key: str = ""
    """Of each message (KEY_SHARED)."""
    properties: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of each message, beside postdate.schedule.name and postdate.schedule.time-ms."""
    ttl: timedelta | None = None
    """Of each message, from its delivery time on; None: the topic's."""


@dataclass(frozen=True, slots=True)
class RecurringState:
    """A recurring schedule as it stands."""

    schedule: RecurringSchedule
    next_time: datetime | None
    """Its next occurrence; None: there is none, or it is paused."""
    next_deliver_at: datetime | None
    """Its delivery time, with its jitter."""
    next_id: MessageId | None
    """Its message, once it is stored: a moment after the one before was due."""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One occurrence of a schedule."""

    time: datetime
    deliver_at: datetime
    """With its jitter."""
    wall_time: str
    """In the schedule's zone, with the offset from UTC, as ISO 8601 writes it."""


class Recurring:
    """`client.recurring`."""

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc

    async def put(self, topic: str, schedule: RecurringSchedule) -> RecurringState:
        """Create a schedule, or replace one: its occurrences from now on follow this. The same again does nothing."""
        request = schedule_pb2.PutRecurringRequest(topic=topic, schedule=to_message(schedule))
        return state_of((await self._rpc.call_once(self._rpc.schedule.PutRecurring, request)).state)

    async def get(self, topic: str, name: str) -> RecurringState:
        """One schedule; `NotFound` if there is none of that name."""
        request = schedule_pb2.GetRecurringRequest(topic=topic, name=name)
        return state_of((await self._rpc.call(self._rpc.schedule.GetRecurring, request)).state)

    def list(
        self, topic: str, *, name_prefix: str = "", limit: int | None = None
    ) -> AsyncIterator[RecurringState]:
        """The schedules of a topic by name, page by page as the iteration goes on."""
        return self._rpc.rows(
            self._rpc.schedule.ListRecurring,
            schedule_pb2.ListRecurringRequest(topic=topic, name_prefix=name_prefix),
            lambda page: [state_of(each) for each in page.states],
            page_size=_PAGE_SIZE,
            limit=limit,
        )

    async def delete(self, topic: str, name: str) -> None:
        """Delete a schedule; its next occurrence is cancelled."""
        request = schedule_pb2.DeleteRecurringRequest(topic=topic, name=name)
        await self._rpc.call_once(self._rpc.schedule.DeleteRecurring, request)

    async def pause(self, topic: str, name: str) -> RecurringState:
        """Stop a schedule; its next occurrence is cancelled."""
        return await self._pause(topic, name, paused=True)

    async def resume(self, topic: str, name: str) -> RecurringState:
        """Let a schedule go on from now; what it would have stored meanwhile is left out."""
        return await self._pause(topic, name, paused=False)

    async def trigger(self, topic: str, name: str, *, request_id: str = "") -> MessageId:
        """Store one message of a schedule now, and leave its times. With a `request_id` a repeat changes nothing."""
        request = schedule_pb2.TriggerRecurringRequest(topic=topic, name=name, request_id=request_id)
        response = await self._rpc.call_once(self._rpc.schedule.TriggerRecurring, request)
        return MessageId(response.id.ledger_id, response.id.entry_id)

    async def backfill(
        self, topic: str, name: str, start: datetime, end: datetime, *, dry_run: bool = False
    ) -> Sequence[datetime]:
        """Store the occurrences from `start` on and before `end` once more, both in the past; returns which.

        Calls of at most 1,000 occurrences follow each other. If one fails after others: `PartlyStored`, whose message
        says where to go on.
        """
        start_ms, end_ms = epoch_ms(start, "start"), epoch_ms(end, "end")
        found: list[datetime] = []
        while start_ms:
            request = schedule_pb2.BackfillRecurringRequest(
                topic=topic, name=name, start_ms=start_ms, end_ms=end_ms, dry_run=dry_run
            )
            call = self._rpc.call if dry_run else self._rpc.call_once
            try:
                response = await call(self._rpc.schedule.BackfillRecurring, request)
            except PostdateError as error:
                if dry_run or not found:
                    raise
                raise PartlyStored(
                    f"{len(found):,} occurrences were stored, those before {moment(start_ms).isoformat()}; "
                    f"then a call failed: {error}",
                    stored_count=len(found),
                ) from error
            found += map(moment, response.times_ms)
            start_ms = response.next_start_ms
        return found

    async def preview(
        self, topic: str, schedule: RecurringSchedule | str, *, count: int = 10, after: datetime | None = None
    ) -> Sequence[Occurrence]:
        """The next occurrences of a schedule, by name or of one that is not put, after a time or after now."""
        request = schedule_pb2.PreviewRecurringRequest(
            topic=topic, count=count, after_ms=0 if after is None else epoch_ms(after, "after")
        )
        if isinstance(schedule, str):
            request.name = schedule
        else:
            request.schedule.CopyFrom(to_message(schedule))
        response = await self._rpc.call(self._rpc.schedule.PreviewRecurring, request)
        return [
            Occurrence(moment(each.time_ms), moment(each.deliver_at_ms), each.wall_time)
            for each in response.occurrences
        ]

    async def _pause(self, topic: str, name: str, *, paused: bool) -> RecurringState:
        request = schedule_pb2.PauseRecurringRequest(topic=topic, name=name, paused=paused)
        return state_of((await self._rpc.call_once(self._rpc.schedule.PauseRecurring, request)).state)


def to_message(schedule: RecurringSchedule) -> schedule_pb2.RecurringSchedule:
    """A schedule as the broker takes it."""
    given = [bool(schedule.cron), schedule.interval is not None, bool(schedule.times)]
    if sum(given) != 1:
        raise ValueError("give exactly one of cron, interval and times")
    encoded = encode_message(
        schedule.payload,
        key=schedule.key,
        properties=schedule.properties,
        deliver_at=None,
        deliver_after=None,
        schedule_key="",
        ttl=schedule.ttl,
        sequence_id=None,
        event_time=None,
        traceparent="",
    )
    message = schedule_pb2.RecurringSchedule(
        name=schedule.name,
        time_zone=schedule.time_zone,
        start_ms=0 if schedule.start is None else epoch_ms(schedule.start, "start"),
        end_ms=0 if schedule.end is None else epoch_ms(schedule.end, "end"),
        jitter_ms=duration_ms(schedule.jitter, "jitter"),
        overdue_action=f"RECURRING_OVERDUE_{schedule.overdue.name}",
        paused=schedule.paused,
        message=message_pb2.Message.FromString(encoded),
    )
    if schedule.interval is not None:
        message.interval_ms = duration_ms(schedule.interval, "interval")
    elif schedule.times:
        message.times.times_ms.extend(epoch_ms(each, "times") for each in schedule.times)
    else:
        message.cron = schedule.cron
    return message


def state_of(state: Any) -> RecurringState:
    """A schedule as it stands, from the broker's answer."""
    message = state.schedule
    content = message.message
    kind = message.WhichOneof("recurrence")
    overdue = schedule_pb2.RecurringOverdue.Name(message.overdue_action).removeprefix("RECURRING_OVERDUE_")
    return RecurringState(
        RecurringSchedule(
            name=message.name,
            cron=message.cron if kind == "cron" else "",
            interval=span(message.interval_ms) if kind == "interval_ms" else None,
            times=tuple(map(moment, message.times.times_ms)),
            time_zone=message.time_zone,
            start=moment_or_none(message.start_ms),
            end=moment_or_none(message.end_ms),
            jitter=span(message.jitter_ms),
            overdue=RecurringOverdue[overdue],
            paused=message.paused,
            payload=content.payload,
            key=content.key,
            properties=dict(content.properties),
            ttl=span(content.ttl_ms) if content.ttl_ms else None,
        ),
        moment_or_none(state.next_time_ms),
        moment_or_none(state.next_deliver_at_ms),
        MessageId(state.next_id.ledger_id, state.next_id.entry_id) if state.HasField("next_id") else None,
    )
