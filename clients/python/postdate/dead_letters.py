"""Messages that a subscription gave up: to list, to send again, to drop."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TypeVar

from postdate._rpc import Rpc
from postdate._settlement import IDS_MAX, entry_sets, fault_table
from postdate._time import duration_ms, moment
from postdate.errors import PostdateError
from postdate.model import MessageId
from postdate.schedule import time_range
from postdate_api.v1 import admin_pb2, message_pb2

_PAGE_SIZE = 100
_FULL_PAGE_SIZE = 20  # payloads may be large, and a page is one answer
_ALL_S = 3_600.0  # how long a call about all of very many may take

RequestT = TypeVar("RequestT", admin_pb2.RequeueDeadLettersRequest, admin_pb2.PurgeDeadLettersRequest)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that a subscription gave up.

    `id` names it in `dead_letter_topic` and is what `requeue` and `purge` take; `original_id` was its own.
    `reason` is why it was given up: "max_delivery_attempts", "overdue", "damaged", or what the nack said that did it.
    `last_reason` is what the last nack said that gave a reason, most often an error; empty if none did. `payload` is
    None unless it was asked for.
    """

    id: MessageId
    dead_letter_topic: str
    original_id: MessageId
    attempts: int
    reason: str
    time: datetime
    payload_bytes: int
    key: str
    properties: Mapping[str, str]
    payload: bytes | None
    last_reason: str = ""


@dataclass(frozen=True, slots=True)
class DeadLetterChange:
    """Result of a requeue or purge: how many it was, and which of those that were named it was not."""

    count: int
    failures: Mapping[MessageId, PostdateError] = field(default_factory=dict[MessageId, PostdateError])


class DeadLetters:
    """`client.dead_letters`."""

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc

    def list(
        self,
        topic: str,
        subscription: str,
        *,
        reason: str = "",
        start: datetime | None = None,
        end: datetime | None = None,
        limit: int | None = None,
        payloads: bool = False,
    ) -> AsyncIterator[DeadLetter]:
        """Dead letters of the subscription, oldest first, page by page as the iteration goes on; at most `limit`.

        Those whose `reason` or `last_reason` contains this text, upper or lower case, and that were given up from
        `start` on and before `end`.
        """
        view = message_pb2.MESSAGE_VIEW_FULL if payloads else message_pb2.MESSAGE_VIEW_BASIC
        return self._rpc.rows(
            self._rpc.admin.ListDeadLetters,
            admin_pb2.ListDeadLettersRequest(
                topic=topic,
                subscription=subscription,
                view=view,
                reason=reason,
                dead_letter_time=time_range(start, end),
            ),
            lambda page: [_dead_letter(each, payloads) for each in page.dead_letters],
            page_size=_FULL_PAGE_SIZE if payloads else _PAGE_SIZE,
            limit=limit,
        )

    async def requeue(
        self,
        topic: str,
        subscription: str,
        ids: Iterable[MessageId] = (),
        *,
        all: bool = False,
        deliver_after: timedelta | None = None,
    ) -> DeadLetterChange:
        """Send these dead letters, or all, to this subscription again; no other one gets them.

        They are new messages with new ids, counted from the first attempt, and due after `deliver_after`.
        What may have happened is not repeated: `Disconnected`.
        """
        delay_ms = 0 if deliver_after is None else duration_ms(deliver_after, "deliver_after")
        count = 0
        failures: dict[MessageId, PostdateError] = {}
        request = admin_pb2.RequeueDeadLettersRequest(
            topic=topic, subscription=subscription, deliver_after_ms=delay_ms
        )
        for part in _parts(request, ids, all):
            response = await self._rpc.call_once(self._rpc.admin.RequeueDeadLetters, part, wait_s=_ALL_S)
            count += response.requeued_messages
            failures |= fault_table(response.failures)
        return DeadLetterChange(count, failures)

    async def purge(
        self, topic: str, subscription: str, ids: Iterable[MessageId] = (), *, all: bool = False
    ) -> DeadLetterChange:
        """Drop these dead letters of the subscription, or all, for good; `Disconnected` as in `requeue`."""
        count = 0
        failures: dict[MessageId, PostdateError] = {}
        request = admin_pb2.PurgeDeadLettersRequest(topic=topic, subscription=subscription)
        for part in _parts(request, ids, all):
            response = await self._rpc.call_once(self._rpc.admin.PurgeDeadLetters, part, wait_s=_ALL_S)
            count += response.purged_messages
            failures |= fault_table(response.failures)
        return DeadLetterChange(count, failures)


def _parts(request: RequestT, ids: Iterable[MessageId], every: bool) -> list[RequestT]:
    """The request for all, or as many as it takes to name the ids."""
    named = list(dict.fromkeys(ids))
    if bool(named) == every:
        raise ValueError("give ids or all=True, one of the two")
    parts: list[RequestT] = []
    for start in range(0, len(named), IDS_MAX) if named else [0]:
        part = type(request)()
        part.CopyFrom(request)
        part.request_id = uuid.uuid4().hex
        part.all = every
        columns: dict[int, list[int]] = {}
        for ledger_id, entry_id in named[start : start + IDS_MAX]:
            columns.setdefault(ledger_id, []).append(entry_id)
        part.entries.extend(entry_sets(columns))
        parts.append(part)
    return parts


def _dead_letter(letter: admin_pb2.DeadLetter, with_payload: bool) -> DeadLetter:
    return DeadLetter(
        id=MessageId(letter.id.ledger_id, letter.id.entry_id),
        dead_letter_topic=letter.dead_letter_topic,
        original_id=MessageId(letter.original_id.ledger_id, letter.original_id.entry_id),
        attempts=letter.delivery_attempts,
        reason=letter.reason,
        time=moment(letter.dead_letter_time_ms),
        last_reason=letter.last_reason,
        payload_bytes=letter.payload_bytes,
        key=letter.message.key,
        properties=dict(letter.message.properties),
        payload=letter.message.payload if with_payload else None,
    )
