"""Batches on their way to the broker: building them, and settling those who wait for them.

Invariants:
  BATCH-1  A batch is settled exactly once: stored, refused, or failed.
  BATCH-2  Whoever awaits a message hears of it even if others of the same batch were at fault.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Protocol, cast

from postdate._numbering import refuse_number
from postdate._time import duration_ms, epoch_ms
from postdate.errors import (
    AlreadyExists,
    FailedPrecondition,
    Internal,
    InvalidRequest,
    PostdateError,
)
from postdate.model import IdRange, MessageId, OutgoingMessage, Receipt
from postdate_api.v1 import message_pb2, producer_pb2

# What a message weighs besides its payload and its texts, for limits in bytes: an estimate.
MESSAGE_OVERHEAD_BYTES = 48

_GUILTY = re.compile(r"messages\[(\d+)\]")


class Batch(Protocol):
    """A batch as the pipeline knows it."""

    request: producer_pb2.ProduceRequest
    deadline: float
    unsure: bool
    """True once it was written and lost its answer, so that it may be stored."""

    @property
    def abandoned(self) -> bool:
        """Tell whether nobody waits for it any more."""
        ...

    def stored(self, ranges: Sequence[IdRange]) -> None:
        """Nothing can lose it any more."""

    def refused(self, error: PostdateError) -> Sequence[Batch]:
        """Nothing of it was stored. Returns the innocent rest, to be tried again."""
        ...

    def failed(self, error: PostdateError) -> None:
        """There will be no answer."""


class SharedBatch:
    """A batch gathered from many `send` calls, each with a future of its own."""

    __slots__ = ("deadline", "futures", "request", "schedule_keys", "size", "unsure")

    def __init__(self, empty: producer_pb2.ProduceRequest) -> None:
        self.request = empty
        self.deadline = 0.0
        self.unsure = False
        self.size = 0
        self.schedule_keys: set[str] | None = None
        self.futures: list[asyncio.Future[Receipt]] = []

    def add(self, message: message_pb2.Message, size: int, future: asyncio.Future[Receipt]) -> None:
        self.request.messages.append(message)
        if message.schedule_key:
            if self.schedule_keys is None:
                self.schedule_keys = set()
            self.schedule_keys.add(message.schedule_key)
        self.size += size
        self.futures.append(future)

    def rises_to(self, sequence_id: int) -> bool:
        """Tell whether a message with this id may come next: within a batch the broker wants them to rise."""
        return not self.futures or sequence_id > self.request.messages[-1].sequence_id

    def has_schedule_key(self, schedule_key: str) -> bool:
        """Tell whether a message with this key has to go in another batch: the broker takes each once in one."""
        return self.schedule_keys is not None and schedule_key in self.schedule_keys

    @property
    def abandoned(self) -> bool:
        return all(future.done() for future in self.futures)

    def stored(self, ranges: Sequence[IdRange]) -> None:
        futures = iter(self.futures)
        for ledger_id, first, count, publish_time, duplicate in ranges:
            for entry_id, future in zip(range(first, first + count), futures, strict=False):
                if not future.done():  # its task was cancelled; the message is stored all the same
                    future.set_result(Receipt(MessageId(ledger_id, entry_id), publish_time, duplicate))
        for future in futures:
            _fail(future, Internal("the broker answered with fewer ids than messages"))

    def refused(self, error: PostdateError) -> Sequence[Batch]:
        # The broker takes a batch whole or not at all, and these messages were put together by
        # us, not by their senders. One bad message must not fail the others (BATCH-2).
        guilty = _guilty(error)
        if guilty is not None:
            error.field = _GUILTY.sub("", error.field).lstrip(".")  # its sender knows of one message only
        if len(self.futures) > 1:
            if guilty is not None and guilty < len(self.futures):
                _fail(self.futures[guilty], error)
                return [self._part(0, guilty, guilty + 1, len(self.futures))]
            if _may_concern_one(error):
                middle = len(self.futures) // 2
                return [self._part(0, middle), self._part(middle, len(self.futures))]
        self.failed(error)
        return []

    def failed(self, error: PostdateError) -> None:
        for future in self.futures:
            _fail(future, error)

    def _part(self, *bounds: int) -> SharedBatch:
        """The messages between pairs of bounds, as a batch of their own."""
        part = SharedBatch(_like(self.request))
        request = part.request
        part.deadline = self.deadline
        for start, end in zip(bounds[::2], bounds[1::2], strict=True):
            request.messages.extend(self.request.messages[start:end])
            part.futures += self.futures[start:end]
        return part


class ListBatch:
    """A batch that one `send_many` made: one future for all of it.

    `offset` is the place of its first message in the caller's list.
    """

    __slots__ = ("deadline", "future", "offset", "request", "unsure")

    def __init__(self, request: producer_pb2.ProduceRequest, offset: int) -> None:
        self.request = request
        self.offset = offset
        self.deadline = 0.0
        self.unsure = False
        self.future: asyncio.Future[Sequence[IdRange]] = asyncio.get_running_loop().create_future()

    @property
    def abandoned(self) -> bool:
        return self.future.done()

    def stored(self, ranges: Sequence[IdRange]) -> None:
        if not self.future.done():
            self.future.set_result(ranges)

    def refused(self, error: PostdateError) -> Sequence[Batch]:
        guilty = _guilty(error)
        if guilty is not None:
            error.field = _GUILTY.sub(f"messages[{guilty + self.offset}]", error.field)
        self.failed(error)
        return []

    def failed(self, error: PostdateError) -> None:
        _fail(self.future, error)


def fill(
    message: message_pb2.Message,
    key: str,
    properties: Mapping[str, str] | None,
    deliver_at: datetime | None,
    deliver_after: timedelta | None,
    schedule_key: str,
    ttl: timedelta | None,
    event_time: datetime | None,
    traceparent: str,
) -> None:
    """Set what a message has besides its payload; most have little, so ask before setting."""
    if deliver_at is not None:
        if deliver_after is not None:
            raise ValueError("give deliver_at or deliver_after, not both")
        message.deliver_at_ms = epoch_ms(deliver_at, "deliver_at")
    elif deliver_after is not None:
        message.deliver_after_ms = duration_ms(deliver_after, "deliver_after")
    if ttl is not None:
        message.ttl_ms = duration_ms(ttl, "ttl")
        if not ttl:
            raise ValueError("ttl is zero, which nothing outlives; leave it out for the topic's own")
    if event_time is not None:
        message.event_time_ms = epoch_ms(event_time, "event_time")
    try:
        if key:
            message.key = key
        if properties:
            message.properties.update(properties)
        if schedule_key:
            message.schedule_key = schedule_key
        if traceparent:
            message.traceparent = traceparent
    except (TypeError, ValueError, AttributeError):
        # protobuf does not say which; asking beforehand would cost every message what only these few deserve.
        _check_texts(key=key, schedule_key=schedule_key, traceparent=traceparent)
        _check_properties(properties)
        raise


def list_requests(
    messages: Iterable[bytes | OutgoingMessage],
    empty: producer_pb2.ProduceRequest,
    shared: message_pb2.Message,
    number: Callable[[int | None], int] | None,
    *,
    messages_max: int,
    bytes_max: int,
) -> list[producer_pb2.ProduceRequest]:
    """The requests that carry a list; `shared` holds the times of the messages given as bytes.

    `number` gives a message its sequence id, if the producer has a name.
    """
    requests: list[producer_pb2.ProduceRequest] = []
    request = _like(empty)
    add = request.messages.add
    count = size = 0
    at_ms, after_ms = shared.deliver_at_ms, shared.deliver_after_ms
    for message in messages:
        # Building in the C library's `add` costs 0.4 us; a Message of one's own, appended, twice that.
        if isinstance(message, OutgoingMessage):
            weight = len(message.payload) + MESSAGE_OVERHEAD_BYTES
            if message.properties:
                weight += properties_bytes(message.properties)
        else:
            weight = len(message) + MESSAGE_OVERHEAD_BYTES
        if count == messages_max or (size + weight > bytes_max and count):
            requests.append(request)
            request = _like(empty)
            add = request.messages.add
            count = size = 0
        count += 1
        size += weight
        if isinstance(message, OutgoingMessage):
            if number is not None:
                added = add(payload=message.payload, sequence_id=number(message.sequence_id))
            elif message.sequence_id is None:
                added = add(payload=message.payload)
            else:
                refuse_number()
            fill(
                added,
                message.key,
                message.properties,
                message.deliver_at,
                message.deliver_after,
                message.schedule_key,
                message.ttl,
                message.event_time,
                message.traceparent,
            )
        elif number is not None:
            add(payload=message, deliver_at_ms=at_ms, deliver_after_ms=after_ms, sequence_id=number(None))
        else:
            add(payload=message, deliver_at_ms=at_ms, deliver_after_ms=after_ms)
    if count:
        requests.append(request)
    return requests


def properties_bytes(properties: Mapping[str, str]) -> int:
    try:
        return sum(len(name) + len(value) + 8 for name, value in properties.items())
    except (TypeError, AttributeError):
        _check_properties(properties)
        raise


def _check_properties(properties: object) -> None:
    if not isinstance(properties, Mapping):
        raise TypeError(f"properties must be a mapping of str to str, not {type(properties).__name__}")
    for name, value in cast(Mapping[object, object], properties).items():
        _check_texts(**{f"a name in properties, {name!r},": name, f"properties[{name!r}]": value})


def _check_texts(**texts: object) -> None:
    for field, text in texts.items():
        if not isinstance(text, str):
            raise TypeError(f"{field} must be a str, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{field} cannot be sent as UTF-8: {error}") from None


def _like(empty: producer_pb2.ProduceRequest) -> producer_pb2.ProduceRequest:
    return producer_pb2.ProduceRequest(
        topic=empty.topic, producer_name=empty.producer_name, replace=empty.replace
    )


def _guilty(error: PostdateError) -> int | None:
    found = _GUILTY.match(error.field)
    return int(found.group(1)) if found else None


def _may_concern_one(error: PostdateError) -> bool:
    return isinstance(error, InvalidRequest | AlreadyExists | FailedPrecondition) and not error.field


def _fail(future: asyncio.Future[Receipt] | asyncio.Future[Sequence[IdRange]], error: PostdateError) -> None:
    if not future.done():
        future.set_exception(error)
