"""Values of the fake broker: its state, its knobs, its failures."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from postdate_api.v1 import admin_pb2, consumer_pb2, message_pb2, schedule_pb2

LEDGER = 7
DETAILS_KEY = "grpc-status-details-bin"


def status(
    code: str, reason: str, message: str, *, field: str = "", retry_ms: int = 0, **metadata: str
) -> status_pb2.Status:
    """An error as the broker describes it."""
    result = status_pb2.Status(code=code_pb2.Code.Value(code), message=message)
    details: list[Any] = [
        error_details_pb2.ErrorInfo(reason=reason, domain="postdate.dev", metadata=metadata)
    ]
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if retry_ms:
        delay = duration_pb2.Duration(seconds=retry_ms // 1000, nanos=retry_ms % 1000 * 1_000_000)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        result.details.append(packed)
    return result


async def abort(context: Any, error: status_pb2.Status) -> None:
    code = grpc.StatusCode[code_pb2.Code.Name(error.code)]
    await context.abort(code, error.message, ((DETAILS_KEY, error.SerializeToString()),))


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def entry_failures(ids: list[tuple[int, int]], error: status_pb2.Status) -> list[consumer_pb2.EntryFailure]:
    return [
        consumer_pb2.EntryFailure(
            id=message_pb2.MessageId(ledger_id=ledger_id, entry_id=entry_id), error=error
        )
        for ledger_id, entry_id in ids
    ]


@dataclass
class FakeTopic:
    """Produced messages of a topic, and what each subscription has settled."""

    deliveries: list[consumer_pb2.Delivery] = field(default_factory=list)
    subscriptions: dict[str, FakeSubscription] = field(default_factory=dict)
    policy: admin_pb2.TopicPolicy = field(default_factory=admin_pb2.TopicPolicy)
    sequences: dict[str, dict[int, int]] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    revisions: dict[int, int] = field(default_factory=dict)
    bulk_changes: list[schedule_pb2.BulkChange] = field(default_factory=list)
    recurring: dict[str, schedule_pb2.RecurringState] = field(default_factory=dict)


@dataclass
class FakeSubscription:
    """Acks by consumer. Messages that are neither acked nor held are given out."""

    acked: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    not_before_ms: dict[int, int] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    type: int = 0
    policy: admin_pb2.SubscriptionPolicy = field(default_factory=admin_pb2.SubscriptionPolicy)
    paused: bool = False
    dead_letters: list[admin_pb2.DeadLetter] = field(default_factory=list)


@dataclass
class Knobs:
    """Ways to disappoint. Each deque is used up, one item a request or stream."""

    cluster: admin_pb2.GetClusterResponse | None = None  # what GetCluster says; None: no cluster

    produce_errors: deque[status_pb2.Status] = field(default_factory=deque)
    poison: bytes = b""  # a batch with this payload is refused
    poison_named: bool = True  # with its index
    break_produce_after: int = -1  # so many requests are read, the last is not answered
    break_produce_stored: bool = True  # but stored
    hold_answers: asyncio.Event | None = None
    joined: int = 0  # answers in one message of a produce stream; 0: one each, not joined
    subscribe_errors: deque[status_pb2.Status] = field(default_factory=deque)
    unary_errors: deque[status_pb2.Status] = field(default_factory=deque)
    schedule_errors: deque[status_pb2.Status | None] = field(default_factory=deque)  # None spares a call
    schedule_names_max: int = 5_000
    bulk_change_fails: bool = False
    counts_exact: bool = True
    bars_max: int = 10_000
    due_ms: tuple[int, int] = (0, 0)  # what stats say of the first and the last, whatever there is
    change_status: grpc.StatusCode | None = None  # ends the next change after it was made, without an answer
    die_in_change: bool = False  # after it was made; a new broker takes the place of this one
    hold_confirms: asyncio.Event | None = None
    hold_opened: asyncio.Event | None = None  # a stream that has begun is answered once it is set
    hold_end: asyncio.Event | None = None  # a stream that is to end waits for it
    fail_ids: dict[int, status_pb2.Status] = field(default_factory=dict)
    silent: bool = False  # no heartbeats
    early_ms: int = 0  # delivers so much too early
    drop_every: int = 0  # loses every so-many-th message
    heartbeat_ms: int = 1000
    lease_ms: int = 30_000
