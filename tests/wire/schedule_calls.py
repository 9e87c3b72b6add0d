"""Calls of the ScheduleService, about the topic t."""

from __future__ import annotations

import asyncio
from typing import Any

from postdate_api.v1 import message_pb2, schedule_pb2
from tests.wire.conftest import Id, Message, Wire, sets, within

HOUR_MS = 3_600_000
DONE = schedule_pb2.CHANGE_RESULT_DONE
DELIVERED = schedule_pb2.CHANGE_RESULT_ALREADY_DELIVERED
NOT_FOUND = schedule_pb2.CHANGE_RESULT_NOT_FOUND
CANCELLED = schedule_pb2.CHANGE_RESULT_ALREADY_CANCELLED
FULL = message_pb2.MESSAGE_VIEW_FULL


def after(ms: int = HOUR_MS, payload: bytes = b"x", **fields: Any) -> Message:
    return Message(payload=payload, deliver_after_ms=ms, **fields)


def at(ms: int, payload: bytes = b"x", **fields: Any) -> Message:
    return Message(payload=payload, deliver_at_ms=ms, **fields)


def by_ids(*ids: Id) -> schedule_pb2.Selector:
    return schedule_pb2.Selector(entries=sets(ids))


def by_keys(*keys: str) -> schedule_pb2.Selector:
    return schedule_pb2.Selector(schedule_keys=keys)


def by_filter(start_ms: int = 0, end_ms: int = 0, key_prefix: str = "") -> schedule_pb2.ScheduleFilter:
    due = schedule_pb2.TimeRange(start_ms=start_ms, end_ms=end_ms)
    return schedule_pb2.ScheduleFilter(due=due, key_prefix=key_prefix)


async def cancel(wire: Wire, selector: schedule_pb2.Selector, **fields: Any) -> Any:
    request = schedule_pb2.CancelScheduledRequest(topic="t", selector=selector, **fields)
    return await within(wire.schedule.CancelScheduled(request))


async def move(wire: Wire, selector: schedule_pb2.Selector, **fields: Any) -> Any:
    request = schedule_pb2.RescheduleRequest(topic="t", selector=selector, **fields)
    return await within(wire.schedule.Reschedule(request))


async def change_all(wire: Wire, chosen: schedule_pb2.ScheduleFilter, **fields: Any) -> Any:
    """A bulk change, once it has ended."""
    begin = schedule_pb2.StartBulkChangeRequest(topic="t", filter=chosen, **fields)
    answer = await within(wire.schedule.StartBulkChange(begin))
    request = schedule_pb2.GetBulkChangeRequest(topic="t", id=answer.bulk_change.id)
    while not (shown := (await within(wire.schedule.GetBulkChange(request))).bulk_change).end_time_ms:
        await asyncio.sleep(0.01)
    return shown


async def get(wire: Wire, **fields: Any) -> schedule_pb2.ScheduledMessage:
    request = schedule_pb2.GetScheduledRequest(topic="t", **fields)
    found: schedule_pb2.ScheduledMessage = (await within(wire.schedule.GetScheduled(request))).scheduled
    return found


async def listed(wire: Wire, **fields: Any) -> list[schedule_pb2.ScheduledMessage]:
    """All pages."""
    request = schedule_pb2.ListScheduledRequest(topic="t", **fields)
    found: list[schedule_pb2.ScheduledMessage] = []
    while True:
        response = await within(wire.schedule.ListScheduled(request))
        found += response.scheduled
        if not response.next_page_token:
            return found
        request.page_token = response.next_page_token


async def count(wire: Wire, **fields: Any) -> schedule_pb2.CountScheduledResponse:
    request = schedule_pb2.CountScheduledRequest(topics=["t"], **fields)
    response: schedule_pb2.CountScheduledResponse = await within(wire.schedule.CountScheduled(request))
    return response


def results(response: Any) -> list[int]:
    return [each.result for each in response.outcomes]


def name_of(id_: Id) -> message_pb2.MessageId:
    return message_pb2.MessageId(ledger_id=id_[0], entry_id=id_[1])


def shown_ids(messages: list[schedule_pb2.ScheduledMessage]) -> list[Id]:
    return [(each.id.ledger_id, each.id.entry_id) for each in messages]
