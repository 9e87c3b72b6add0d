"""ScheduleService, recurring schedules: put, show, pause, delete, trigger and backfill them."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from google.protobuf.message import Message

from broker.config import check_name
from broker.errors import InvalidRequest
from broker.folder.broker import Broker
from broker.model import DELIVER_AT_MS_MAX
from broker.rpc.audit_trail import note_created
from broker.rpc.caller import CALLER, creating
from broker.rpc.decode import decode_produce
from broker.rpc.paging import check_page_size, decode_token, encode_token
from broker.rpc.request_ids import RequestIds
from broker.runtime.supervise import YieldBudget
from broker.settings import DAY_MS
from broker.storage.recurring import RecurringStanding
from broker.storage.recurring_values import INTERVAL_MS_MIN, TIMES_MAX, Definition, OverdueRuns, RecurringRule
from broker.topics.recurrence import check_rule, next_after, occurrence
from broker.topics.recurring_reading import read_occurrences, wall_time
from broker.topics.topic import Topic
from postdate_api.v1 import producer_pb2, schedule_pb2

CRON_CHARACTERS_MAX = 200
JITTER_MS_MAX = DAY_MS
_COUNT = 10
_COUNT_MAX = 1_000
_UNSET = ("deliver_at_ms", "deliver_after_ms", "schedule_key", "sequence_id")

Call = tuple[type[Message], Callable[[Any], Awaitable[Message]]]


class RecurringCalls:
    """See the module's description. Part of the ScheduleService, whose answers to repeats it shares."""

    def __init__(self, broker: Broker, request_ids: RequestIds) -> None:
        self._broker = broker
        self._schedules = broker.recurring
        self._request_ids = request_ids

    def calls(self) -> dict[str, Call]:
        return {
            "PutRecurring": (schedule_pb2.PutRecurringRequest, self._put),
            "GetRecurring": (schedule_pb2.GetRecurringRequest, self._get),
            "ListRecurring": (schedule_pb2.ListRecurringRequest, self._list),
            "DeleteRecurring": (schedule_pb2.DeleteRecurringRequest, self._delete),
            "PauseRecurring": (schedule_pb2.PauseRecurringRequest, self._pause),
            "TriggerRecurring": (schedule_pb2.TriggerRecurringRequest, self._trigger),
            "BackfillRecurring": (schedule_pb2.BackfillRecurringRequest, self._backfill),
            "PreviewRecurring": (schedule_pb2.PreviewRecurringRequest, self._preview),
        }

    async def _put(self, request: schedule_pb2.PutRecurringRequest) -> Message:
        self._broker.check_serving()
        check_name("topic", request.topic, "topic")
        definition = self._definition_of(request.topic, request.schedule)
        registry = self._broker.registry
        is_new_topic = request.topic not in registry.by_name
        before = (
            None if is_new_topic else registry.by_name[request.topic].recurring.get(request.schedule.name)
        )
        # The same again changes nothing, also once it is over, and whether it is paused or not.
        if before is None or replace(before.definition, paused=definition.paused) != definition:
            self._check_comes(definition)
        with creating(self._broker, request.topic):
            topic = await registry.topic_or_create(request.topic)
        if is_new_topic:
            note_created(self._broker, request.topic)
        created = await self._schedules.put(topic, request.schedule.name, definition, keeps_pause=True)
        state = self._state(topic, request.schedule.name)
        return schedule_pb2.PutRecurringResponse(state=state, created=created)

    async def _get(self, request: schedule_pb2.GetRecurringRequest) -> Message:
        topic = self._topic(request.topic)
        return schedule_pb2.GetRecurringResponse(state=self._state(topic, request.name))

    async def _list(self, request: schedule_pb2.ListRecurringRequest) -> Message:
        count, after = check_page_size(request.page_size), decode_token(request.page_token)
        topic = self._topic(request.topic)
        names, prefix = topic.recurring.names(), request.name_prefix
        first = max(bisect_left(names, prefix), bisect_right(names, after) if after else 0)
        response = schedule_pb2.ListRecurringResponse()
        room = self._broker.config.frame_bytes_max
        for name in names[first:]:
            if not name.startswith(prefix):
                break
            state = self._state(topic, name)
            room -= state.ByteSize()
            if len(response.states) == count or (room < 0 and response.states):
                response.next_page_token = encode_token(response.states[-1].schedule.name)
                break
            response.states.append(state)
        return response

    async def _delete(self, request: schedule_pb2.DeleteRecurringRequest) -> Message:
        self._broker.check_serving()
        await self._schedules.delete(self._topic(request.topic), request.name)
        return schedule_pb2.DeleteRecurringResponse()

    async def _pause(self, request: schedule_pb2.PauseRecurringRequest) -> Message:
        self._broker.check_serving()
        topic = self._topic(request.topic)
        await self._schedules.pause(topic, request.name, paused=request.paused)
        return schedule_pb2.PauseRecurringResponse(state=self._state(topic, request.name))

    async def _trigger(self, request: schedule_pb2.TriggerRecurringRequest) -> Message:
        self._broker.check_serving()
        check_name("topic", request.topic, "topic")

        async def work() -> schedule_pb2.TriggerRecurringResponse:
            size = self._check_room(request.topic, request.name)
            position, time_ms = await self._schedules.trigger(self._topic(request.topic), request.name)
            _count(request.topic, 1, size)
            response = schedule_pb2.TriggerRecurringResponse(time_ms=time_ms)
            response.id.ledger_id, response.id.entry_id = position
            return response

        return await self._request_ids.once(request.topic, request, work)

    async def _backfill(self, request: schedule_pb2.BackfillRecurringRequest) -> Message:
        self._broker.check_serving()
        check_name("topic", request.topic, "topic")
        start_ms, end_ms, now_ms = request.start_ms, request.end_ms, self._broker.clock.now_ms()
        if not 0 <= start_ms < end_ms <= now_ms:
            raise InvalidRequest(
                "A backfill goes from start_ms to a later end_ms, which is not after now",
                field="end_ms",
                reason="INVALID_TIME_RANGE",
            )

        async def work() -> schedule_pb2.BackfillRecurringResponse:
            size = 0 if request.dry_run else self._check_room(request.topic, request.name)
            times, rest_ms = await self._schedules.backfill(
                self._topic(request.topic), request.name, start_ms, end_ms, dry_run=request.dry_run
            )
            if not request.dry_run:
                _count(request.topic, len(times), len(times) * size)
            return schedule_pb2.BackfillRecurringResponse(times_ms=times, next_start_ms=rest_ms)

        return await self._request_ids.once(request.topic, request, work)

    async def _preview(self, request: schedule_pb2.PreviewRecurringRequest) -> Message:
        check_name("topic", request.topic, "topic")
        if not 0 <= request.count <= _COUNT_MAX:
            raise InvalidRequest(
                f"count is between 0 and {_COUNT_MAX}",
                field="count",
                reason="INVALID_COUNT",
                limit=_COUNT_MAX,
            )
        after_ms = _checked_ms(request.after_ms, "after_ms") or self._broker.clock.now_ms()
        match request.WhichOneof("of"):
            case "name":
                name = request.name
                definition = self._schedules.state(self._topic(request.topic), name).definition
            case "schedule":
                name = request.schedule.name
                definition = self._definition_of(request.topic, request.schedule)
                self._check_comes(definition)
            case _:
                raise InvalidRequest(
                    "The request names no schedule: set a name, or a schedule",
                    field="of",
                    reason="INVALID_SELECTOR",
                )
        response = schedule_pb2.PreviewRecurringResponse()
        budget = YieldBudget(self._broker.clock)
        following = read_occurrences(name, definition, after_ms)
        for time_ms in itertools.islice(following, request.count or _COUNT):
            wall = wall_time(definition.rule, time_ms)
            response.occurrences.add(
                time_ms=time_ms,
                deliver_at_ms=occurrence(name, definition, time_ms).deliver_at_ms,
                wall_time=wall.isoformat(timespec="milliseconds" if time_ms % 1_000 else "seconds"),
            )
            await budget.spent()
        return response

    # -- schedules as the API has them -----------------------------------------------------------------------

    def _check_room(self, topic: str, name: str) -> int:
        """Raise LimitReached where the caller may store no message of a schedule now; returns the bytes of one."""
        size = len(self._schedules.state(self._topic(topic), name).definition.message)
        if (caller := CALLER.get()) is not None:
            caller.check_room(topic, size)
        return size

    def _topic(self, name: str) -> Topic:
        check_name("topic", name, "topic")
        return self._broker.registry.topic(name)

    def _state(self, topic: Topic, name: str) -> schedule_pb2.RecurringState:
        state = self._schedules.state(topic, name)
        response = schedule_pb2.RecurringState(
            schedule=_schedule_of(name, state), through_ms=state.progress.through_ms
        )
        if (following := self._schedules.next_of(name, state)) is not None:
            response.next_time_ms, response.next_deliver_at_ms = following.time_ms, following.deliver_at_ms
            if following.time_ms == state.progress.ahead_ms and state.progress.position.ledger_id:
                response.next_id.ledger_id, response.next_id.entry_id = state.progress.position
        if response.next_time_ms:
            response.through_ms = min(response.through_ms, response.next_time_ms - 1)
        return response

    def _definition_of(self, topic: str, schedule: schedule_pb2.RecurringSchedule) -> Definition:
        """Return what is to be put, or perhaps will be; raises the refusal."""
        check_name("schedule", schedule.name, "schedule.name")
        rule = _rule_of(schedule)
        check_rule(rule)
        start_ms = _checked_ms(schedule.start_ms, "schedule.start_ms")
        end_ms = _checked_ms(schedule.end_ms, "schedule.end_ms")
        if end_ms and end_ms <= start_ms:
            raise InvalidRequest(
                "end_ms is not after start_ms", field="schedule.end_ms", reason="INVALID_TIME_RANGE"
            )
        if not 0 <= schedule.jitter_ms <= JITTER_MS_MAX:
            raise InvalidRequest(
                f"jitter_ms is between 0 and {JITTER_MS_MAX}, a day",
                field="schedule.jitter_ms",
                reason="INVALID_JITTER_MS",
            )
        overdue = schedule.overdue_action or OverdueRuns.ALL
        if overdue not in tuple(OverdueRuns):
            raise InvalidRequest(
                "overdue_action is unknown",
                field="schedule.overdue_action",
                reason="INVALID_OVERDUE_ACTION",
            )
        message = self._message_of(topic, schedule)
        return Definition(
            rule, message, start_ms, end_ms, schedule.jitter_ms, OverdueRuns(overdue), schedule.paused
        )

    def _check_comes(self, definition: Definition) -> None:
        if next_after(definition, self._broker.clock.now_ms()) is None:
            raise InvalidRequest(
                "The schedule has no occurrence after now", field="schedule", reason="NO_OCCURRENCE"
            )

    def _message_of(self, topic: str, schedule: schedule_pb2.RecurringSchedule) -> bytes:
        """The message of each occurrence, checked as one that is produced."""
        message = schedule.message
        for name in _UNSET:
            if getattr(message, name):
                raise InvalidRequest(
                    f"{name} is set: each occurrence has its own",
                    field=f"schedule.message.{name}",
                    reason="INVALID_RECURRING_MESSAGE",
                )
        request = producer_pb2.ProduceRequest(topic=topic, messages=[message])
        decode_produce(request.SerializeToString(), self._broker.config)
        encoded = message.SerializeToString(deterministic=True)
        limit = self._broker.config.tuning.recurring_message_bytes_max
        if len(encoded) > limit:
            raise InvalidRequest(
                f"The message of a recurring schedule has {len(encoded)} bytes, over the limit of {limit}",
                field="schedule.message",
                reason="RECURRING_MESSAGE_TOO_LARGE",
                limit=limit,
            )
        return encoded


def _count(topic: str, messages: int, bytes_: int) -> None:
    """Count what a call has stored against the limits of its caller."""
    if (caller := CALLER.get()) is not None:
        caller.count(topic, messages, bytes_)


def _rule_of(schedule: schedule_pb2.RecurringSchedule) -> RecurringRule:
    zone = schedule.time_zone or "UTC"
    match schedule.WhichOneof("recurrence"):
        case "cron":
            if len(schedule.cron) > CRON_CHARACTERS_MAX:
                raise InvalidRequest(
                    f"A cron has at most {CRON_CHARACTERS_MAX} characters",
                    field="schedule.cron",
                    reason="INVALID_CRON",
                )
            return RecurringRule(cron=schedule.cron or " ", zone=zone)
        case "interval_ms":
            if not INTERVAL_MS_MIN <= schedule.interval_ms <= DELIVER_AT_MS_MAX:
                raise InvalidRequest(
                    f"interval_ms is at least {INTERVAL_MS_MIN}",
                    field="schedule.interval_ms",
                    reason="INVALID_INTERVAL_MS",
                )
            return RecurringRule(interval_ms=schedule.interval_ms, zone=zone)
        case "times":
            times = tuple(schedule.times.times_ms)
            rises = all(before < after for before, after in itertools.pairwise(times))
            if not (
                0 < len(times) <= TIMES_MAX and rises and times[0] > 0 and times[-1] <= DELIVER_AT_MS_MAX
            ):
                raise InvalidRequest(
                    f"times holds 1 to {TIMES_MAX} times that rise, in milliseconds since the Unix epoch",
                    field="schedule.times.times_ms",
                    reason="INVALID_TIMES",
                )
            return RecurringRule(times_ms=times, zone=zone)
        case _:
            raise InvalidRequest(
                "The schedule does not say when it recurs: set cron, interval_ms or times",
                field="schedule.recurrence",
                reason="NO_RECURRENCE",
            )


def _checked_ms(time_ms: int, field: str) -> int:
    if not 0 <= time_ms <= DELIVER_AT_MS_MAX:
        raise InvalidRequest(
            f"{field} is between 0 and the end of the year 9999, in milliseconds",
            field=field,
            reason="INVALID_TIME_RANGE",
        )
    return time_ms


def _schedule_of(name: str, state: RecurringStanding) -> schedule_pb2.RecurringSchedule:
    definition, rule = state.definition, state.definition.rule
    schedule = schedule_pb2.RecurringSchedule(
        name=name,
        time_zone=rule.zone,
        start_ms=definition.start_ms,
        end_ms=definition.end_ms,
        jitter_ms=definition.jitter_ms,
        overdue_action=int(definition.overdue),  # type: ignore[arg-type]
        paused=definition.paused,
    )
    if rule.cron:
        schedule.cron = rule.cron
    elif rule.interval_ms:
        schedule.interval_ms = rule.interval_ms
    else:
        schedule.times.times_ms.extend(rule.times_ms)
    schedule.message.ParseFromString(definition.message)
    return schedule
