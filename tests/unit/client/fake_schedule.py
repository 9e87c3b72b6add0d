"""The fake broker's ScheduleService: a message waits until its time, unless it was cancelled."""

from __future__ import annotations

from typing import Any

from postdate_api.v1 import consumer_pb2, message_pb2, schedule_pb2, schedule_pb2_grpc
from tests.unit.client.fake_values import FakeTopic, Knobs, abort, now_ms, status

_PAGE = 2  # small pages, so that paging is seen to work


class FakeSchedule(schedule_pb2_grpc.ScheduleServiceServicer):
    """Sees and changes what waits."""

    knobs: Knobs
    topics: dict[str, FakeTopic]
    unary: list[Any]

    async def _lose_answer(self, context: Any) -> None:
        raise NotImplementedError

    async def GetScheduled(self, request: schedule_pb2.GetScheduledRequest, context: Any) -> Any:
        topic = await self._scheduled_topic(request, request.topic, context)
        name = (request.id.ledger_id, request.id.entry_id) if request.HasField("id") else request.schedule_key
        delivery = _find(topic, name)
        if delivery is None or not _waits(topic, delivery):
            await abort(context, status("NOT_FOUND", "SCHEDULED_NOT_FOUND", "not pending"))
            raise AssertionError
        return schedule_pb2.GetScheduledResponse(scheduled=_shown(topic, delivery, request.view))

    async def ListScheduled(self, request: schedule_pb2.ListScheduledRequest, context: Any) -> Any:
        topic = await self._scheduled_topic(request, request.topic, context)
        found = _matching(topic, request.due, request.key_prefix)
        start = int(request.page_token or 0)
        page = found[start : start + min(request.page_size, _PAGE)]
        more = start + len(page) < len(found)
        return schedule_pb2.ListScheduledResponse(
            scheduled=[_shown(topic, each, request.view) for each in page],
            next_page_token=str(start + len(page)) if more else "",
        )

    async def PutRecurring(self, request: schedule_pb2.PutRecurringRequest, context: Any) -> Any:
        topic = await self._scheduled_topic(request, request.topic, context)
        state = schedule_pb2.RecurringState(schedule=request.schedule)
        created = request.schedule.name not in topic.recurring
        topic.recurring[request.schedule.name] = state
        return schedule_pb2.PutRecurringResponse(state=state, created=created)

    async def ListRecurring(self, request: schedule_pb2.ListRecurringRequest, context: Any) -> Any:
        topic = await self._scheduled_topic(request, request.topic, context)
        names = [name for name in sorted(topic.recurring) if name > request.page_token]
        page = names[: min(request.page_size, _PAGE)]
        return schedule_pb2.ListRecurringResponse(
            states=[topic.recurring[name] for name in page],
            next_page_token=page[-1] if len(page) < len(names) else "",
        )

    async def DeleteRecurring(self, request: schedule_pb2.DeleteRecurringRequest, context: Any) -> Any:
        topic = await self._scheduled_topic(request, request.topic, context)
        del topic.recurring[request.name]
        return schedule_pb2.DeleteRecurringResponse()

    async def PauseRecurring(self, request: schedule_pb2.PauseRecurringRequest, context: Any) -> Any:
        topic = await self._scheduled_topic(request, request.topic, context)
        topic.recurring[request.name].schedule.paused = request.paused
        return schedule_pb2.PauseRecurringResponse(state=topic.recurring[request.name])

    async def TriggerRecurring(self, request: schedule_pb2.TriggerRecurringRequest, context: Any) -> Any:
        await self._scheduled_topic(request, request.topic, context)
        return schedule_pb2.TriggerRecurringResponse()

    async def BackfillRecurring(self, request: schedule_pb2.BackfillRecurringRequest, context: Any) -> Any:
        """One occurrence a call, each minute."""
        await self._scheduled_topic(request, request.topic, context)
        rest_ms = request.start_ms + 60_000
        return schedule_pb2.BackfillRecurringResponse(
            times_ms=[request.start_ms], next_start_ms=rest_ms if rest_ms < request.end_ms else 0
        )

    async def CountScheduled(self, request: schedule_pb2.CountScheduledRequest, context: Any) -> Any:
        topics = [await self._scheduled_topic(request, name, context) for name in request.topics]
        due = request.due
        start_ms, end_ms = due.start_ms, due.end_ms or 1 << 60
        width_ms = request.width_ms or end_ms - start_ms
        response = schedule_pb2.CountScheduledResponse(exact=self.knobs.counts_exact)
        bars: dict[int, int] = {}
        for topic in topics:
            for delivery in _matching(topic, schedule_pb2.TimeRange(), ""):
                at_ms = delivery.deliver_at_ms
                response.before += at_ms < start_ms
                response.after += at_ms >= end_ms
                if start_ms <= at_ms < end_ms:
                    bar = start_ms + (at_ms - start_ms) // width_ms * width_ms
                    bars[bar] = bars.get(bar, 0) + 1
        if bars and (max(bars) - min(bars)) // width_ms >= self.knobs.bars_max:
            await abort(context, status("INVALID_ARGUMENT", "TOO_MANY_BARS", "too many bars"))
        for bar, count in sorted(bars.items()):
            response.buckets.add(start_ms=bar, messages=count, bytes=10 * count)
        return response

    async def CancelScheduled(self, request: schedule_pb2.CancelScheduledRequest, context: Any) -> Any:
        return await self._changed(request, schedule_pb2.CancelScheduledResponse(), context)

    async def Reschedule(self, request: schedule_pb2.RescheduleRequest, context: Any) -> Any:
        return await self._changed(request, schedule_pb2.RescheduleResponse(), context)

    async def StartBulkChange(self, request: schedule_pb2.StartBulkChangeRequest, context: Any) -> Any:
        """Made at once; shown as ended when it is looked at again."""
        topic = await self._scheduled_topic(request, request.topic, context)
        found = _matching(topic, request.filter.due, request.filter.key_prefix)
        for delivery in [] if request.dry_run else found:
            if request.cancel:
                topic.cancelled.add(delivery.id.entry_id)
            else:
                delivery.deliver_at_ms = _new_time_ms(delivery, request)
                topic.revisions[delivery.id.entry_id] = topic.revisions.get(delivery.id.entry_id, 0) + 1
        change = schedule_pb2.BulkChange(
            id=len(topic.bulk_changes) + 1,
            filter=request.filter,
            dry_run=request.dry_run,
            state=schedule_pb2.BULK_CHANGE_STATE_RUNNING,
            total_messages=len(found),
            begin_time_ms=now_ms(),
            principal="anonymous",
        )
        if request.cancel:
            change.cancel = True
        elif request.HasField("shift_ms"):
            change.shift_ms = request.shift_ms
        else:
            change.deliver_at_ms = request.deliver_at_ms or now_ms() + request.deliver_after_ms
        topic.bulk_changes.append(change)
        await self._lose_answer(context)
        return schedule_pb2.StartBulkChangeResponse(bulk_change=change)

    async def GetBulkChange(self, request: schedule_pb2.GetBulkChangeRequest, context: Any) -> Any:
        topic = await self._scheduled_topic(request, request.topic, context)
        if request.id > len(topic.bulk_changes):
            await abort(context, status("NOT_FOUND", "BULK_CHANGE_NOT_FOUND", "no such bulk change"))
        change = topic.bulk_changes[request.id - 1]
        if not change.end_time_ms:
            change.end_time_ms = now_ms()
            change.examined_messages = change.matched_messages = change.done_messages = change.total_messages
            change.state = schedule_pb2.BULK_CHANGE_STATE_DONE
            if self.knobs.bulk_change_fails:
                change.state = schedule_pb2.BULK_CHANGE_STATE_FAILED
                change.failure_reason, change.failure = "DELIVER_AT_TOO_FAR", "too far"
        return schedule_pb2.GetBulkChangeResponse(bulk_change=change)

    async def ListBulkChanges(self, request: schedule_pb2.ListBulkChangesRequest, context: Any) -> Any:
        topic = await self._scheduled_topic(request, request.topic, context)
        return schedule_pb2.ListBulkChangesResponse(bulk_changes=reversed(topic.bulk_changes))

    async def CancelBulkChange(self, request: schedule_pb2.CancelBulkChangeRequest, context: Any) -> Any:
        topic = await self._scheduled_topic(request, request.topic, context)
        change = topic.bulk_changes[request.id - 1]
        if not change.end_time_ms:
            change.state, change.end_time_ms = schedule_pb2.BULK_CHANGE_STATE_CANCELLED, now_ms()
        return schedule_pb2.CancelBulkChangeResponse(bulk_change=change)

    async def _changed(self, request: Any, response: Any, context: Any) -> Any:
        topic = await self._scheduled_topic(request, request.topic, context)
        selector = request.selector
        names: list[Any] = [(each.ledger_id, i) for each in selector.entries for i in each.entry_ids]
        names += selector.schedule_keys
        limit = self.knobs.schedule_names_max
        if len(names) > limit:
            await abort(context, status("INVALID_ARGUMENT", "TOO_MANY_ENTRIES", "too many", limit=str(limit)))
        for name in names:
            response.outcomes.append(_outcome(topic, name, request))
        response.matched = sum(each.result != 3 for each in response.outcomes)
        await self._lose_answer(context)
        return response

    async def _scheduled_topic(self, request: Any, name: str, context: Any) -> FakeTopic:
        self.unary.append(request)
        if self.knobs.schedule_errors and (error := self.knobs.schedule_errors.popleft()) is not None:
            await abort(context, error)
        if name not in self.topics:
            await abort(context, status("NOT_FOUND", "TOPIC_NOT_FOUND", f"no topic {name}", topic=name))
        return self.topics[name]


def _waits(topic: FakeTopic, delivery: consumer_pb2.Delivery) -> bool:
    return delivery.deliver_at_ms > now_ms() and delivery.id.entry_id not in topic.cancelled


def _find(topic: FakeTopic, name: Any) -> consumer_pb2.Delivery | None:
    for delivery in topic.deliveries:
        if name in ((delivery.id.ledger_id, delivery.id.entry_id), delivery.message.schedule_key):
            return delivery
    return None


def _matching(topic: FakeTopic, due: Any, key_prefix: str) -> list[consumer_pb2.Delivery]:
    end_ms = due.end_ms or 1 << 60
    found = [
        each
        for each in topic.deliveries
        if _waits(topic, each)
        and due.start_ms <= each.deliver_at_ms < end_ms
        and each.message.schedule_key.startswith(key_prefix)
    ]
    return sorted(found, key=lambda each: (each.deliver_at_ms, each.id.entry_id))


def _outcome(topic: FakeTopic, name: Any, request: Any) -> schedule_pb2.ChangeOutcome:
    delivery = _find(topic, name)
    outcome = schedule_pb2.ChangeOutcome(result=schedule_pb2.CHANGE_RESULT_NOT_FOUND)
    if isinstance(name, str):
        outcome.schedule_key = name
    else:
        outcome.id.ledger_id, outcome.id.entry_id = name
    if delivery is None:
        return outcome
    outcome.id.CopyFrom(delivery.id)
    if delivery.id.entry_id in topic.cancelled:
        outcome.result = schedule_pb2.CHANGE_RESULT_ALREADY_CANCELLED
    elif not _waits(topic, delivery):
        outcome.result = schedule_pb2.CHANGE_RESULT_ALREADY_DELIVERED
        outcome.delivered_to.extend(("billing", "audit"))
    else:
        outcome.result = schedule_pb2.CHANGE_RESULT_DONE
        if isinstance(request, schedule_pb2.RescheduleRequest):
            outcome.deliver_at_ms = _new_time_ms(delivery, request)
        if not request.dry_run and isinstance(request, schedule_pb2.RescheduleRequest):
            delivery.deliver_at_ms = outcome.deliver_at_ms
            topic.revisions[delivery.id.entry_id] = topic.revisions.get(delivery.id.entry_id, 0) + 1
        elif not request.dry_run:
            topic.cancelled.add(delivery.id.entry_id)
    return outcome


def _new_time_ms(
    delivery: consumer_pb2.Delivery,
    request: schedule_pb2.RescheduleRequest | schedule_pb2.StartBulkChangeRequest,
) -> int:
    if request.HasField("shift_ms"):
        return delivery.deliver_at_ms + request.shift_ms
    return request.deliver_at_ms or now_ms() + request.deliver_after_ms


def _shown(topic: FakeTopic, delivery: consumer_pb2.Delivery, view: int) -> schedule_pb2.ScheduledMessage:
    shown = schedule_pb2.ScheduledMessage(
        id=delivery.id,
        schedule_key=delivery.message.schedule_key,
        deliver_at_ms=delivery.deliver_at_ms,
        publish_time_ms=delivery.publish_time_ms,
        state=schedule_pb2.SCHEDULED_STATE_WAITING,
        revision=topic.revisions.get(delivery.id.entry_id, 0),
        size_bytes=delivery.message.ByteSize(),
        message=delivery.message,
    )
    if view != message_pb2.MESSAGE_VIEW_FULL:
        shown.message.ClearField("payload")
    return shown
