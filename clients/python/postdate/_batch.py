"""Batches on their way to the broker: building them, and settling those who wait for them.

Invariants:
  BATCH-1  A batch is settled exactly once: stored, refused, or failed.
  BATCH-2  Whoever awaits a message hears of it even if others of the same batch were at fault.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import accumulate
from typing import NamedTuple, Protocol, cast

from postdate._encode import check_properties, encode_messages, encode_payloads, encode_times, framed
from postdate._numbering import Numbering, refuse_number
from postdate.errors import (
    AlreadyExists,
    FailedPrecondition,
    Internal,
    InvalidRequest,
    PostdateError,
)
from postdate.model import IdRange, MessageId, OutgoingMessage, Receipt
from postdate_api.v1 import producer_pb2

# What a message weighs besides its payload and its texts, for limits in bytes: an estimate.
MESSAGE_OVERHEAD_BYTES = 48

_GUILTY = re.compile(r"messages\[(\d+)\]")


class Destination(NamedTuple):
    """Fields of a request besides its messages."""

    topic: str
    producer_name: str
    replace: bool

    def request(self, messages: bytes, request_id: int) -> bytes:
        """A ProduceRequest with messages that are encoded already."""
        head = producer_pb2.ProduceRequest(topic=self.topic)
        tail = producer_pb2.ProduceRequest(
            producer_name=self.producer_name,
            request_id=request_id,
            replace=self.replace,
            join_answers=True,
        )
        return b"".join((head.SerializeToString(), messages, tail.SerializeToString()))


class Batch(Protocol):
    """A batch as the pipeline knows it."""

    destination: Destination
    request_id: int
    """0 until it is written."""
    deadline: float
    unsure: bool
    """True once it was written and lost its answer, so that it may be stored."""

    @property
    def count(self) -> int:
        """Messages in it."""
        ...

    @property
    def abandoned(self) -> bool:
        """Tell whether nobody waits for it any more."""
        ...

    def encode(self) -> bytes:
        """The request as the wire has it."""
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

    __slots__ = (
        "deadline",
        "destination",
        "futures",
        "last_sequence_id",
        "messages",
        "request_id",
        "schedule_keys",
        "size",
        "unsure",
    )

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        self.request_id = 0
        self.deadline = 0.0
        self.unsure = False
        self.size = 0
        self.last_sequence_id = 0
        self.schedule_keys: set[str] | None = None
        self.messages: list[bytes] = []
        self.futures: list[asyncio.Future[Receipt]] = []

    def add(
        self,
        message: bytes,
        size: int,
        schedule_key: str,
        sequence_id: int | None,
        future: asyncio.Future[Receipt],
    ) -> None:
        self.messages.append(message)
        if schedule_key:
            if self.schedule_keys is None:
                self.schedule_keys = set()
            self.schedule_keys.add(schedule_key)
        if sequence_id is not None:
            self.last_sequence_id = sequence_id
        self.size += size
        self.futures.append(future)

    def rises_to(self, sequence_id: int) -> bool:
        """Tell whether a message with this id may come next: within a batch the broker wants them to rise."""
        return not self.futures or sequence_id > self.last_sequence_id

    def has_schedule_key(self, schedule_key: str) -> bool:
        """Tell whether a message with this key has to go in another batch: the broker takes each once in one."""
        return self.schedule_keys is not None and schedule_key in self.schedule_keys

    @property
    def count(self) -> int:
        return len(self.messages)

    def encode(self) -> bytes:
        return self.destination.request(framed(self.messages), self.request_id)

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
        part = SharedBatch(self.destination)
        part.deadline = self.deadline
        for start, end in zip(bounds[::2], bounds[1::2], strict=True):
            part.messages += self.messages[start:end]
            part.futures += self.futures[start:end]
        return part


class ListBatch:
    """A batch that one `send_many` made: one future for all of it.

    `offset` is the place of its first message in the caller's list.
    """

    __slots__ = ("count", "deadline", "destination", "future", "messages", "offset", "request_id", "unsure")

    def __init__(self, destination: Destination, messages: bytes, count: int, *, offset: int) -> None:
        self.destination = destination
        self.messages = messages
        self.count = count
        self.offset = offset
        self.request_id = 0
        self.deadline = 0.0
        self.unsure = False
        self.future: asyncio.Future[Sequence[IdRange]] = asyncio.get_running_loop().create_future()

    def encode(self) -> bytes:
        return self.destination.request(self.messages, self.request_id)

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


def list_batches(
    messages: Iterable[bytes | OutgoingMessage],
    destination: Destination,
    *,
    deliver_at: datetime | None,
    deliver_after: timedelta | None,
    numbering: Numbering | None,
    traceparent: str,
    messages_max: int,
    bytes_max: int,
) -> list[ListBatch]:
    """The batches that carry a list. The times are those of the messages that are given as bytes.

    Messages without a traceparent get this one.
    """
    times = encode_times(deliver_at, deliver_after)
    listed = list(messages)
    batches: list[ListBatch] = []
    start = 0
    while start < len(listed):
        part = listed[start : start + messages_max]
        if list(map(type, part)).count(bytes) == len(part):
            payloads = cast(list[bytes], part)
            sizes = list(map(len, payloads))
            count = _fitting(sizes, bytes_max)
            sequence_ids = numbering.numbers([None] * count) if numbering is not None else None
            encoded = encode_payloads(payloads[:count], sizes[:count], times, sequence_ids, traceparent)
        else:
            whole = [
                each
                if isinstance(each, OutgoingMessage)
                else OutgoingMessage(each, deliver_at=deliver_at, deliver_after=deliver_after)
                for each in part
            ]
            count = _fitting(_sizes(whole), bytes_max)
            given = [message.sequence_id for message in whole[:count]]
            if numbering is None and given.count(None) < count:
                refuse_number()
            sequence_ids = numbering.numbers(given) if numbering is not None else None
            encoded = encode_messages(whole[:count], sequence_ids, traceparent)
        batches.append(ListBatch(destination, encoded, count, offset=start))
        start += count
    return batches


def _sizes(messages: Sequence[OutgoingMessage]) -> Sequence[int]:
    sizes = [len(message.payload) for message in messages]
    properties = [message.properties for message in messages]
    if any(properties):
        return [
            size + properties_bytes(some) if some else size
            for size, some in zip(sizes, properties, strict=True)
        ]
    return sizes


def _fitting(sizes: Sequence[int], bytes_max: int) -> int:
    """Return how many messages of these sizes, from the first on, go in one batch: one at least."""
    if sum(sizes) + len(sizes) * MESSAGE_OVERHEAD_BYTES <= bytes_max:
        return len(sizes)
    totals = accumulate(size + MESSAGE_OVERHEAD_BYTES for size in sizes)
    return max(1, sum(1 for total in totals if total <= bytes_max))


def properties_bytes(properties: Mapping[str, str]) -> int:
    try:
        return sum(len(name) + len(value) + 8 for name, value in properties.items())
    except (TypeError, AttributeError):
        check_properties(properties)
        raise


def _guilty(error: PostdateError) -> int | None:
    found = _GUILTY.match(error.field)
    return int(found.group(1)) if found else None


def _may_concern_one(error: PostdateError) -> bool:
    return isinstance(error, InvalidRequest | AlreadyExists | FailedPrecondition) and not error.field


def _fail(future: asyncio.Future[Receipt] | asyncio.Future[Sequence[IdRange]], error: PostdateError) -> None:
    if not future.done():
        future.set_exception(error)
