"""ScheduleService, bulk changes: begin them, see how far they have come, end them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

from google.protobuf.message import Message

from broker.config import check_name
from broker.errors import InvalidRequest
from broker.folder.broker import Broker
from broker.model import TIME_MS_MAX
from broker.rpc.audit_trail import note_counts
from broker.rpc.caller import CALLER
from broker.rpc.request_ids import check_request_id
from broker.rpc.schedule_requests import Limits, due_range, move_of
from broker.storage.bulk import BulkDefinition, BulkEnd, BulkKind, BulkStanding
from broker.topics.topic import Topic
from postdate_api.v1 import schedule_pb2

_STATES = {
    BulkEnd.DONE: schedule_pb2.BULK_CHANGE_STATE_DONE,
    BulkEnd.CANCELLED: schedule_pb2.BULK_CHANGE_STATE_CANCELLED,
    BulkEnd.FAILED: schedule_pb2.BULK_CHANGE_STATE_FAILED,
}

BulkCall = tuple[type[Message], Callable[[Any], Awaitable[Message]]]


class BulkChangeCalls:
    """See the module's description. Part of the ScheduleService."""

    def __init__(self, broker: Broker, limits: Limits) -> None:
        self._broker = broker
        self._limits = limits

    def calls(self) -> dict[str, BulkCall]:
        return {
            "StartBulkChange": (schedule_pb2.StartBulkChangeRequest, self._start),
            "GetBulkChange": (schedule_pb2.GetBulkChangeRequest, self._get),
            "ListBulkChanges": (schedule_pb2.ListBulkChangesRequest, self._list),
            "CancelBulkChange": (schedule_pb2.CancelBulkChangeRequest, self._cancel),
        }

    async def _start(self, request: schedule_pb2.StartBulkChangeRequest) -> Message:
        self._broker.check_serving()
        topic = self._topic(request.topic)
        bulk_id = await self._broker.bulk_changes.begin(topic, self._definition_of(request))
        note_counts(bulk_change=bulk_id)
        return schedule_pb2.StartBulkChangeResponse(bulk_change=self._shown(topic, bulk_id))

    async def _get(self, request: schedule_pb2.GetBulkChangeRequest) -> Message:
        topic = self._topic(request.topic)
        return schedule_pb2.GetBulkChangeResponse(bulk_change=self._shown(topic, request.id))

    async def _list(self, request: schedule_pb2.ListBulkChangesRequest) -> Message:
        topic = self._topic(request.topic)
        shown = [self._shown(topic, bulk_id) for bulk_id in reversed(topic.bulk.ids())]
        return schedule_pb2.ListBulkChangesResponse(bulk_changes=shown)

    async def _cancel(self, request: schedule_pb2.CancelBulkChangeRequest) -> Message:
        self._broker.check_serving()
        topic = self._topic(request.topic)
        standing = await self._broker.bulk_changes.cancel(topic, request.id)
        return schedule_pb2.CancelBulkChangeResponse(
            bulk_change=_shown(request.id, standing, is_queued=False)
        )

    def _topic(self, name: str) -> Topic:
        check_name("topic", name, "topic")
        return self._broker.registry.topic(name)

    def _shown(self, topic: Topic, bulk_id: int) -> schedule_pb2.BulkChange:
        standing = self._broker.bulk_changes.standing(topic, bulk_id)
        is_queued = not standing.end and topic.bulk.unended_ids()[0] != bulk_id
        return _shown(bulk_id, standing, is_queued=is_queued)

    def _definition_of(self, request: schedule_pb2.StartBulkChangeRequest) -> BulkDefinition:
        """Return what is asked for; raises the refusal."""
        due = due_range(request.filter.due, "filter.due")
        self._limits.check_prefix(request.filter.key_prefix, "filter.key_prefix")
        check_request_id(request.request_id)
        now_ms = self._broker.clock.now_ms()
        caller = CALLER.get()
        kind, new_ms = _change_of(request, now_ms)
        return BulkDefinition(
            kind,
            new_ms,
            due.start_ms,
            due.end_ms,
            request.filter.key_prefix,
            request.dry_run,
            request.request_id,
            "anonymous" if caller is None else caller.principal,
            now_ms,
        )


def _change_of(request: schedule_pb2.StartBulkChangeRequest, now_ms: int) -> tuple[BulkKind, int]:
    which = request.WhichOneof("change")
    if which is None or (which == "cancel" and not request.cancel):
        raise InvalidRequest(
            "The request says no change: set cancel, deliver_at_ms, deliver_after_ms or shift_ms",
            field="change",
            reason="CHANGE_EXPECTED",
        )
    if which == "cancel":
        return BulkKind.CANCEL, 0
    move = move_of(request, now_ms, "change")
    if move.shift_ms is not None:
        return BulkKind.SHIFT, move.shift_ms
    if move.deliver_after_ms is not None:
        return BulkKind.DELAY, now_ms + move.deliver_after_ms
    return BulkKind.MOVE, cast("int", move.deliver_at_ms)


def _shown(bulk_id: int, standing: BulkStanding, *, is_queued: bool) -> schedule_pb2.BulkChange:
    definition, progress = standing.definition, standing.progress
    running = schedule_pb2.BULK_CHANGE_STATE_QUEUED if is_queued else schedule_pb2.BULK_CHANGE_STATE_RUNNING
    shown = schedule_pb2.BulkChange(
        id=bulk_id,
        dry_run=definition.dry_run,
        state=_STATES.get(standing.end, running),
        total_messages=definition.total,
        examined_messages=progress.examined,
        matched_messages=progress.matched,
        done_messages=progress.done,
        begin_time_ms=definition.begin_ms,
        end_time_ms=standing.end_ms,
        principal=definition.principal,
        failure_reason=standing.failure_reason,
        failure=standing.failure,
    )
    shown.filter.key_prefix = definition.key_prefix
    shown.filter.due.start_ms = definition.start_ms
    shown.filter.due.end_ms = definition.end_ms if definition.end_ms <= TIME_MS_MAX else 0
    match definition.kind:
        case BulkKind.CANCEL:
            shown.cancel = True
        case BulkKind.SHIFT:
            shown.shift_ms = definition.new_ms
        case BulkKind.MOVE | BulkKind.DELAY:
            shown.deliver_at_ms = definition.new_ms
    return shown
