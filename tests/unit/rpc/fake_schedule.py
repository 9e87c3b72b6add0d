"""A schedule of plain dictionaries, and a ScheduleService around it that takes and gives bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from broker.delayed.due_rows import Key
from broker.errors import NotFound
from broker.model import Position
from broker.observe.audit_trail import AuditTrail
from broker.rpc import schedule
from broker.rpc.decode import ProduceEnvelope
from broker.runtime.ownership import AlwaysOwner
from broker.testing.sim_clock import SimClock
from broker.topics.schedule_values import (
    Cancel,
    Change,
    ChangeResult,
    DueRange,
    Move,
    Outcome,
    Scheduled,
    ScheduledCounts,
    ScheduledPage,
    ScheduledState,
)
from postdate_api.v1 import message_pb2, schedule_pb2
from tests.configs import broker_config

NOW_MS = 1_000_000
METHODS: dict[str, Any] = {
    "GetScheduled": schedule_pb2.GetScheduledResponse,
    "ListScheduled": schedule_pb2.ListScheduledResponse,
    "CountScheduled": schedule_pb2.CountScheduledResponse,
    "CancelScheduled": schedule_pb2.CancelScheduledResponse,
    "Reschedule": schedule_pb2.RescheduleResponse,
}


def frame_of(message: message_pb2.Message) -> bytes:
    return bytes(ProduceEnvelope(messages=[message.SerializeToString()]).SerializeToString())


@dataclass
class FakeSchedule:
    """Messages by position. What is asked of it is recorded."""

    held: dict[Position, Scheduled] = field(default_factory=dict)
    cancelled: set[Position] = field(default_factory=set)
    delivered: dict[Position, tuple[str, ...]] = field(default_factory=dict)
    counts: ScheduledCounts = field(default_factory=lambda: ScheduledCounts([], 0, 0, True))
    asked: list[Any] = field(default_factory=list)
    page_max: int = 1_000_000

    def add(self, position: tuple[int, int], at_ms: int, **fields: Any) -> None:
        message = message_pb2.Message(**fields)
        here = Position(*position)
        self.held[here] = Scheduled(
            here, message.schedule_key, at_ms, 5, ScheduledState.WAITING, 0, frame_of(message)
        )

    async def get(self, name: Position | str) -> Scheduled:
        position = self._find(name)
        if position not in self.held:
            raise NotFound("no", reason="SCHEDULED_NOT_FOUND")
        return self.held[position]

    async def page(self, due: DueRange, key_prefix: str, start: Key | None, limit: int) -> ScheduledPage:
        self.asked.append((due, key_prefix, start, limit))
        keys = self._matching(due, key_prefix, start)
        cut = min(limit, self.page_max)
        page = [self.held[Position(*key[1:])] for key in keys[:cut]]
        return ScheduledPage(page, keys[cut] if len(keys) > cut else None)

    async def count(self, due: DueRange, width_ms: int) -> ScheduledCounts:
        self.asked.append((due, width_ms))
        return self.counts

    async def change(
        self, names: Sequence[Position] | Sequence[str], change: Change, *, dry_run: bool
    ) -> list[Outcome]:
        self.asked.append((list(names), change, dry_run))
        return [self._change(self._find(name), str(name), change, dry_run) for name in names]

    def _find(self, name: Position | str) -> Position | None:
        if isinstance(name, Position):
            return name
        return next((each.position for each in self.held.values() if each.schedule_key == name), None)

    def _matching(self, due: DueRange, key_prefix: str, start: Key | None) -> list[Key]:
        keys = (
            (each.deliver_at_ms, *each.position)
            for each in self.held.values()
            if due.start_ms <= each.deliver_at_ms < due.end_ms and each.schedule_key.startswith(key_prefix)
        )
        return sorted(key for key in keys if start is None or key >= start)

    def _change(self, position: Position | None, name: str, change: Change, dry_run: bool) -> Outcome:
        if position in self.delivered:
            return Outcome(position, "", ChangeResult.ALREADY_DELIVERED, 0, self.delivered[position])
        if position in self.cancelled:
            return Outcome(position, "", ChangeResult.ALREADY_CANCELLED, 0)
        if position is None or position not in self.held:
            return Outcome(position, name if position is None else "", ChangeResult.NOT_FOUND, 0)
        held = self.held[position]
        at_ms = 0
        if isinstance(change, Move):
            at_ms = change.deliver_at_ms or held.deliver_at_ms + (change.shift_ms or 0)
        if isinstance(change, Cancel) and not dry_run:
            del self.held[position]
            self.cancelled.add(position)
        return Outcome(position, held.schedule_key, ChangeResult.DONE, at_ms)


class HandTime:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.us = 0

    def now_us(self) -> int:
        return self.us

    def advance(self, ms: int) -> None:
        self.us += ms * 1_000


class Refused(Exception):
    """Refusal of a call."""

    def __init__(self, code: grpc.StatusCode, status: status_pb2.Status) -> None:
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        for detail in status.details:
            if not detail.Unpack(info):
                detail.Unpack(bad)
        super().__init__(f"{code.name} {info.reason}: {status.message}")
        self.code, self.reason, self.limit = code, info.reason, info.metadata.get("limit")
        self.field = bad.field_violations[0].field if bad.field_violations else ""


class _Context:
    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def abort(self, code: grpc.StatusCode, message: str, trailing_metadata: Any) -> None:
        raise Refused(code, status_pb2.Status.FromString(dict(trailing_metadata)["grpc-status-details-bin"]))


class FakeRegistry:
    """Topics by name."""

    def __init__(self) -> None:
        self.topics: dict[str, Any] = {}

    def topic(self, name: str) -> Any:
        if name not in self.topics:
            raise NotFound("no topic", reason="TOPIC_NOT_FOUND")
        return self.topics[name]


class Edge:
    """A ScheduleService of topic `t`."""

    def __init__(self, **settings: Any) -> None:
        self.time = HandTime()
        self.schedule = FakeSchedule()
        self.registry = FakeRegistry()
        self.add_topic("t", self.schedule)
        broker: Any = SimpleNamespace(
            audit=AuditTrail(SimClock(self.time, NOW_MS)),
            config=broker_config(**settings),
            clock=SimClock(self.time, NOW_MS),
            registry=self.registry,
            check_serving=lambda: None,
            recurring=None,
            counters=SimpleNamespace(refuse=lambda reason: None),
            ownership=AlwaysOwner(),
        )
        self._handlers: Any = schedule.ScheduleService(broker).handlers()

    def add_topic(self, name: str, held: FakeSchedule, data_bytes: int = 0, entry_total: int = 0) -> None:
        log = SimpleNamespace(
            data_bytes=data_bytes, entry_total=entry_total, entry_count=lambda ledger_id: None
        )
        self.registry.topics[name] = SimpleNamespace(name=name, schedule=held, log=log, subscriptions={})

    async def call(self, method: str, request: Message | bytes) -> Any:
        raw = request if isinstance(request, bytes) else request.SerializeToString()
        answer = await self._handlers[method].unary_unary(raw, _Context())
        assert isinstance(answer, bytes)
        return METHODS[method].FromString(answer)
