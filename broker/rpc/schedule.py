"""ScheduleService: see, cancel and move what is pending."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from google.protobuf.message import Message

from broker.config import check_name
from broker.errors import InvalidRequest, NotFound
from broker.folder.broker import Broker
from broker.model import TIME_MS_MAX, Position
from broker.rpc.answer_ownership import answer_without_ownership
from broker.rpc.audit_trail import note_counts
from broker.rpc.bulk_changes import BulkChangeCalls
from broker.rpc.calls import Handler, unary
from broker.rpc.entries import is_full_view
from broker.rpc.paging import check_page_size
from broker.rpc.recurring import RecurringCalls
from broker.rpc.request_ids import RequestIds
from broker.rpc.schedule_answers import (
    encode_outcomes,
    encode_returned,
    encode_scheduled,
)
from broker.rpc.schedule_requests import Limits, Named, due_range, is_possible, move_of
from broker.rpc.schedule_tokens import decode_place, encode_place, fingerprint
from broker.topics.message_look import returned_message, returned_to
from broker.topics.schedule_values import Cancel, Change, ChangeResult, DueRange, Outcome, OutcomeColumns
from broker.topics.topic import Topic
from postdate_api.v1 import schedule_pb2

SERVICE = "postdate.v1.ScheduleService"

_TOPICS_MAX = 1_000
_BARS_MAX = 10_000
RETURNED_SHOWN = 100
"""Subscriptions that got a message back, of which an answer tells."""

ChangeRequest = schedule_pb2.CancelScheduledRequest | schedule_pb2.RescheduleRequest


class ScheduleService:
    """See the module's description."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._request_ids = RequestIds(broker.clock)
        self._limits = Limits.of(broker.config)
        self._recurring = RecurringCalls(broker, self._request_ids)
        self._bulk_changes = BulkChangeCalls(broker, self._limits)

    def handlers(self) -> dict[str, Handler]:
        calls: dict[str, tuple[type[Message], Callable[[Any], Awaitable[Message | bytes]]]] = {
            "GetScheduled": (schedule_pb2.GetScheduledRequest, self._get),
            "ListScheduled": (schedule_pb2.ListScheduledRequest, self._list),
            "CountScheduled": (schedule_pb2.CountScheduledRequest, self._count),
            "CancelScheduled": (schedule_pb2.CancelScheduledRequest, self._cancel),
            "Reschedule": (schedule_pb2.RescheduleRequest, self._reschedule),
            **self._bulk_changes.calls(),
            **self._recurring.calls(),
        }
        check = self._limits.check_size
        return {
            name: unary(
                self._broker, kind, call, check=check if call in (self._cancel, self._reschedule) else None
            )
            for name, (kind, call) in calls.items()
        }

    # -- what is pending -------------------------------------------------------------------------------------

    async def _get(self, request: schedule_pb2.GetScheduledRequest) -> bytes:
        is_full = is_full_view(request.view)
        name = self._name_of(request)
        topic = self._topic(request.topic)
        if not is_possible(name):
            raise NotFound("No message has this id", reason="SCHEDULED_NOT_FOUND")
        try:
            message = await topic.schedule.get(name)
        except NotFound:
            found = await returned_message(topic, name) if isinstance(name, Position) else None
            if found is None:
                raise
            message = found
        returned = returned_to(topic, message.position, RETURNED_SHOWN)
        frame_bytes_max = self._broker.config.frame_bytes_max
        encoded, _ = encode_scheduled([message], frame_bytes_max, is_full=is_full)
        return encode_returned(encoded, returned, frame_bytes_max) if returned else encoded

    async def _list(self, request: schedule_pb2.ListScheduledRequest) -> bytes:
        count = check_page_size(request.page_size)
        is_full = is_full_view(request.view)
        due = due_range(request.due, "due")
        self._limits.check_prefix(request.key_prefix, "key_prefix")
        print_ = fingerprint(request.topic, due, request.key_prefix)
        start = decode_place(request.page_token, print_)
        topic = self._topic(request.topic)
        page = await topic.schedule.page(due, request.key_prefix, start, count)
        encoded, cut = encode_scheduled(page.scheduled, self._broker.config.frame_bytes_max, is_full=is_full)
        rest = schedule_pb2.ListScheduledResponse()
        if (next_ := cut or page.next) is not None:
            rest.next_page_token = encode_place(print_, next_)
        return encoded + bytes(rest.SerializeToString())

    async def _count(self, request: schedule_pb2.CountScheduledRequest) -> Message:
        topics = self._topics(request.topics)
        due = due_range(request.due, "due")
        width_ms = _width_of(request.width_ms, due)
        response = schedule_pb2.CountScheduledResponse(exact=True)
        bars: dict[int, tuple[int, int]] = {}
        for topic in topics:
            counts = await topic.schedule.count(due, width_ms)
            response.before += counts.before
            response.after += counts.after
            response.exact &= counts.is_exact
            message_bytes = topic.log.data_bytes / max(1, topic.log.entry_total)
            for start_ms, messages in counts.bars:
                held = bars.get(start_ms, (0, 0))
                bars[start_ms] = (held[0] + messages, held[1] + round(messages * message_bytes))
            if len(bars) > _BARS_MAX:
                raise InvalidRequest(
                    f"The topics have messages in more than {_BARS_MAX} bars: give a greater width_ms",
                    field="width_ms",
                    reason="TOO_MANY_BARS",
                    limit=_BARS_MAX,
                )
            await asyncio.sleep(0)  # a thousand topics must not hold up deliveries
        for start_ms, (messages, size) in sorted(bars.items()):
            response.buckets.add(start_ms=start_ms, messages=messages, bytes=size)
        return response

    # -- changes ---------------------------------------------------------------------------------------------

    async def _cancel(self, request: schedule_pb2.CancelScheduledRequest) -> bytes:
        return await self._change(request, Cancel())

    async def _reschedule(self, request: schedule_pb2.RescheduleRequest) -> bytes:
        move = move_of(request, self._broker.clock.now_ms())
        return await self._change(request, move)

    async def _change(self, request: ChangeRequest, change: Change) -> bytes:
        self._broker.check_serving()
        check_name("topic", request.topic, "topic")
        chosen = self._limits.selected(request.selector)
        return await self._request_ids.once(
            request.topic, request, self._change_named(request, chosen, change)
        )

    def _change_named(
        self, request: ChangeRequest, chosen: Named, change: Change
    ) -> Callable[[], Awaitable[bytes]]:
        """The change of messages that are named, in the order of their names, each as often as it is named."""

        async def work() -> bytes:
            schedule = self._broker.registry.topic(request.topic).schedule
            names: Sequence[Position | str] = chosen.names
            distinct: list[Any] = list(dict.fromkeys(names))
            if not chosen.are_possible:
                distinct = [name for name in distinct if is_possible(name)]
            outcomes = await schedule.change(distinct, change, dry_run=request.dry_run)
            matched = _matched(outcomes)
            if not request.dry_run and distinct and _done(outcomes) == len(names):
                answer_without_ownership()
            return self._answer(_in_places(names, distinct, outcomes), matched)

        return work

    def _answer(self, outcomes: Sequence[Outcome], matched: int) -> bytes:
        """The answer to either change: their fields have the same numbers."""
        note_counts(matched=matched, done=_done(outcomes))
        rest = schedule_pb2.CancelScheduledResponse(matched=matched)
        encoded = encode_outcomes(outcomes, self._broker.config.frame_bytes_max)
        return encoded + bytes(rest.SerializeToString())

    # -- what requests name ----------------------------------------------------------------------------------

    def _topic(self, name: str) -> Topic:
        check_name("topic", name, "topic")
        return self._broker.registry.topic(name)

    def _topics(self, names: Sequence[str]) -> list[Topic]:
        if not names:
            raise InvalidRequest("Name at least one topic", field="topics", reason="NO_TOPICS")
        if len(names) > _TOPICS_MAX:
            raise InvalidRequest(
                f"At most {_TOPICS_MAX} topics at once", field="topics", reason="TOO_MANY_NAMES"
            )
        for index, name in enumerate(names):
            check_name("topic", name, f"topics[{index}]")
        return [self._broker.registry.topic(name) for name in dict.fromkeys(names)]

    def _name_of(self, request: schedule_pb2.GetScheduledRequest) -> Position | str:
        match request.WhichOneof("name"):
            case "id":
                return Position(request.id.ledger_id, request.id.entry_id)
            case "schedule_key":
                self._limits.check_key(request.schedule_key, "schedule_key")
                return request.schedule_key
            case _:
                raise InvalidRequest(
                    "The request names no message: set an id or a schedule_key",
                    field="name",
                    reason="INVALID_SELECTOR",
                )


def _width_of(width_ms: int, due: DueRange) -> int:
    if not 0 <= width_ms <= TIME_MS_MAX:
        raise InvalidRequest(
            f"width_ms is between 0 and {TIME_MS_MAX}", field="width_ms", reason="INVALID_WIDTH_MS"
        )
    return width_ms or due.end_ms - due.start_ms


def _in_places(
    names: Sequence[Position | str], changed: Sequence[Any], outcomes: Sequence[Outcome]
) -> Sequence[Outcome]:
    """The outcome of each name, from those of the distinct ones that messages can have."""
    if len(names) == len(outcomes):
        return outcomes
    by_name = dict(zip(changed, outcomes, strict=True))
    return [by_name.get(name) or _impossible(name) for name in names]


def _matched(outcomes: Sequence[Outcome]) -> int:
    if isinstance(outcomes, OutcomeColumns):
        return len(outcomes.found())
    return sum(outcome.result is not ChangeResult.NOT_FOUND for outcome in outcomes)


def _done(outcomes: Sequence[Outcome]) -> int:
    if isinstance(outcomes, OutcomeColumns):
        return int((outcomes.results == ChangeResult.DONE).sum())
    return sum(outcome.result is ChangeResult.DONE for outcome in outcomes)


def _impossible(name: Position | str) -> Outcome:
    assert isinstance(name, Position)
    return Outcome(name, "", ChangeResult.NOT_FOUND, 0)
