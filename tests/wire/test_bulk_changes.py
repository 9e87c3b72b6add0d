"""Bulk changes with a real broker over gRPC: what is shown, refused, repeated and cancelled."""

from __future__ import annotations

from typing import Any

import pytest

from postdate_api.v1 import schedule_pb2
from tests.wire.conftest import Wire, now_ms, refused, within
from tests.wire.schedule_calls import HOUR_MS, after, at, listed

DONE = schedule_pb2.BULK_CHANGE_STATE_DONE
CANCELLED = schedule_pb2.BULK_CHANGE_STATE_CANCELLED


def start(wire: Wire, key_prefix: str = "", **fields: Any) -> Any:
    request = schedule_pb2.StartBulkChangeRequest(topic="t", **fields)
    request.filter.key_prefix = key_prefix
    return wire.schedule.StartBulkChange(request)


async def ended(wire: Wire, answer: schedule_pb2.StartBulkChangeResponse) -> schedule_pb2.BulkChange:
    request = schedule_pb2.GetBulkChangeRequest(topic="t", id=answer.bulk_change.id)
    while True:
        found: schedule_pb2.BulkChange = (await within(wire.schedule.GetBulkChange(request))).bulk_change
        if found.end_time_ms:
            return found


async def test_what_is_changed_is_shown(wire: Wire):
    due_ms = now_ms() + HOUR_MS
    for prefix in "ab":
        await wire.produce("t", *(at(due_ms + n, schedule_key=f"{prefix}{n}") for n in range(3)))
    dry = await ended(wire, await within(start(wire, "a", cancel=True, dry_run=True)))
    assert (dry.dry_run, dry.total_messages, dry.matched_messages, dry.done_messages) == (True, 6, 3, 3)
    assert len(await listed(wire)) == 6
    cancelled = await ended(wire, await within(start(wire, "a", cancel=True)))
    assert (cancelled.state, cancelled.cancel, cancelled.filter.key_prefix) == (DONE, True, "a")
    assert (cancelled.examined_messages, cancelled.done_messages, cancelled.principal) == (6, 3, "anonymous")
    shifted = await ended(wire, await within(start(wire, shift_ms=1_000)))
    assert (shifted.shift_ms, shifted.done_messages) == (1_000, 3)
    delayed = await ended(wire, await within(start(wire, deliver_after_ms=5 * HOUR_MS)))
    assert delayed.deliver_at_ms == delayed.begin_time_ms + 5 * HOUR_MS
    assert {each.deliver_at_ms for each in await listed(wire)} == {delayed.deliver_at_ms}
    moved = await ended(wire, await within(start(wire, deliver_at_ms=due_ms)))
    assert moved.deliver_at_ms == due_ms
    answer = await within(wire.schedule.ListBulkChanges(schedule_pb2.ListBulkChangesRequest(topic="t")))
    assert [each.id for each in answer.bulk_changes] == [5, 4, 3, 2, 1]
    assert answer.bulk_changes[0] == moved


async def test_a_range_is_of_due_times(wire: Wire):
    due_ms = now_ms() + HOUR_MS
    await wire.produce("t", *(at(due_ms + n) for n in range(6)))
    request = schedule_pb2.StartBulkChangeRequest(topic="t", cancel=True)
    request.filter.due.start_ms, request.filter.due.end_ms = due_ms + 1, due_ms + 3
    found = await ended(wire, await within(wire.schedule.StartBulkChange(request)))
    assert (found.filter.due, found.total_messages, found.done_messages) == (request.filter.due, 2, 2)
    assert [each.deliver_at_ms - due_ms for each in await listed(wire)] == [0, 3, 4, 5]


async def test_a_repeat_begins_nothing_and_one_that_ended_stays_so(wire: Wire):
    await wire.produce("t", after())
    first = await ended(wire, await within(start(wire, shift_ms=1_000, request_id="r")))
    assert (await within(start(wire, shift_ms=1_000, request_id="r"))).bulk_change == first
    request = schedule_pb2.CancelBulkChangeRequest(topic="t", id=first.id)
    assert (await within(wire.schedule.CancelBulkChange(request))).bulk_change == first


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({}, "CHANGE_EXPECTED", "change"),
        ({"cancel": False}, "CHANGE_EXPECTED", "change"),
        ({"deliver_at_ms": 5}, "INVALID_DELIVER_AT_MS", "deliver_at_ms"),
        ({"deliver_after_ms": -1}, "INVALID_DELIVER_AFTER_MS", "deliver_after_ms"),
        ({"shift_ms": 1 << 62}, "INVALID_SHIFT_MS", "shift_ms"),
        ({"cancel": True, "request_id": "x" * 256}, "INVALID_REQUEST_ID", "request_id"),
        ({"cancel": True, "key_prefix": "x" * 513}, "SCHEDULE_KEY_TOO_LARGE", "filter.key_prefix"),
    ],
)
async def test_refusals(wire: Wire, fields: dict[str, Any], reason: str, field: str):
    await wire.produce("t", after())
    refusal = await refused(start(wire, **fields))
    assert (refusal.reason, refusal.fields[0]) == (reason, field)


async def test_what_is_not_there_is_not_found(wire: Wire):
    assert (await refused(start(wire, cancel=True))).reason == "TOPIC_NOT_FOUND"
    await wire.produce("t", after())
    request = schedule_pb2.GetBulkChangeRequest(topic="t", id=9)
    assert (await refused(wire.schedule.GetBulkChange(request))).reason == "BULK_CHANGE_NOT_FOUND"
    cancel = schedule_pb2.CancelBulkChangeRequest(topic="t", id=9)
    assert (await refused(wire.schedule.CancelBulkChange(cancel))).reason == "BULK_CHANGE_NOT_FOUND"
