"""Sends messages to one topic: each `send` alone for its caller, in batches for the broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any

from postdate import _trace
from postdate._batch import (
    MESSAGE_OVERHEAD_BYTES,
    Destination,
    ListBatch,
    SharedBatch,
    list_batches,
    properties_bytes,
)
from postdate._encode import encode_message, encode_traceparent
from postdate._numbering import Numbering, refuse_number
from postdate._pipeline import Pipeline
from postdate._rpc import Rpc
from postdate.errors import Closed, PartlyStored, PostdateError
from postdate.model import IdRange, OutgoingMessage, Receipt, Receipts


class Producer:
    """A producer of one topic; made by `Client.producer`.

    A lone message leaves at the end of the loop's turn in which it was sent. While earlier batches
    are on their way, later messages gather: until the batch is full, an answer comes, or `linger`
    has passed. Nothing is lost in silence: `send` returns when the message is on the broker's
    disk, and raises otherwise.

    When the connection breaks, what had not left is sent again by itself. What had left and lost
    its answer raises `Disconnected`: it may be stored, and only the caller knows whether a second
    copy would hurt.

    With a `producer_name` the broker knows a repeat by its sequence id. What lost its answer is then sent
    again too, for as long as the client's `retry_for`, and stored once; its receipt says `duplicate` if it
    had been. Sequence ids rise by themselves, or are the caller's (`sequence_id`): then a message that is sent
    again by another process is known as well. It takes a topic that remembers them (`dedup_window`), and one
    producer at a time that uses the name.

    A cancelled `send` whose batch has not left is withdrawn if it was alone in it;
    otherwise the message is sent all the same.
    """

    def __init__(
        self,
        rpc: Rpc,
        topic: str,
        *,
        linger: timedelta,
        batch_messages_max: int,
        batch_bytes_max: int,
        in_flight_max: int,
        producer_name: str | None,
    ) -> None:
        if batch_messages_max < 1 or batch_bytes_max < 1 or in_flight_max < 1:
            raise ValueError("the limits of a producer are at least 1")
        self.topic = topic
        self._rpc = rpc
        self._linger_s = linger.total_seconds()
        self._messages_max = batch_messages_max
        self._bytes_max = batch_bytes_max
        self._in_flight_max = in_flight_max
        self._destination = Destination(topic, producer_name or "", replace=False)
        self._numbering = Numbering(time.time_ns()) if producer_name else None
        self._pipeline: Pipeline | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gathering: SharedBatch | None = None
        self._seal_at: asyncio.Handle | None = None
        self._overdue = False
        self._closed = False

    async def __aenter__(self) -> Producer:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None or issubclass(kind, Exception):
            await self.close()
        elif self._pipeline is not None:
            self._closed = True
            await self._pipeline.abort()  # somebody wants to be gone, not to wait for the broker

    async def send(
        self,
        payload: bytes,
        *,
        key: str = "",
        properties: Mapping[str, str] | None = None,
        deliver_at: datetime | None = None,
        deliver_after: timedelta | None = None,
        schedule_key: str = "",
        ttl: timedelta | None = None,
        event_time: datetime | None = None,
        traceparent: str = "",
        sequence_id: int | None = None,
        replace: bool = False,
    ) -> Receipt:
        """Send one message; return when the broker has it on disk.

        It is delivered no earlier than `deliver_at`, or than `deliver_after` counted from the
        moment the broker accepts it, on the broker's clock. Without either it is due at once.
        A repeat with the same `sequence_id` and `producer_name` is not stored again.

        No two messages of a topic wait under one `schedule_key`: the second one raises `AlreadyExists`, or
        takes the place of the first one in the same step, with `replace`.
        """
        if not isinstance(payload, bytes):
            raise TypeError(f"payload must be bytes, not {type(payload).__name__}")
        size = len(payload) + MESSAGE_OVERHEAD_BYTES
        if properties:
            size += properties_bytes(properties)
        pipeline, loop = self._started()
        if self._numbering is not None:
            sequence_id = self._numbering.number(sequence_id)
        elif sequence_id is not None:
            refuse_number()
        message = encode_message(
            payload,
            key=key,
            properties=properties,
            deliver_at=deliver_at,
            deliver_after=deliver_after,
            schedule_key=schedule_key,
            ttl=ttl,
            sequence_id=sequence_id,
            event_time=event_time,
            traceparent=traceparent,
        )
        batch = self._gathering
        if batch is not None and (
            batch.size + size > self._bytes_max
            or (sequence_id and not batch.rises_to(sequence_id))
            or batch.destination.replace != replace
            or (schedule_key and batch.has_schedule_key(schedule_key))
        ):
            self._seal()
            batch = None
        if batch is None:
            batch = self._begin(pipeline, loop, replace)
        future: asyncio.Future[Receipt] = loop.create_future()
        if _trace.tracing is not None:
            added = _trace.tracing.sent(self.topic, len(payload), schedule_key, future)
            if not traceparent:
                message += encode_traceparent(added)
        batch.add(message, size, schedule_key, sequence_id, future)
        if batch.count >= self._messages_max or batch.size >= self._bytes_max:
            self._seal()
        return await future

    async def send_many(
        self,
        messages: Sequence[bytes] | Sequence[OutgoingMessage] | Sequence[bytes | OutgoingMessage],
        *,
        deliver_at: datetime | None = None,
        deliver_after: timedelta | None = None,
        replace: bool = False,
    ) -> Receipts:
        """Send a list; return when all of it is on the broker's disk.

        `deliver_at` and `deliver_after` are those of the messages that are given as plain bytes; an
        `OutgoingMessage` has its own. A list within one batch (1,000 messages, 1 MiB by default) is
        stored all or none. A longer one goes in several; if only some of those are stored,
        `PartlyStored` says how many messages were and why the others are not known to be.
        With `replace` messages that wait under the schedule keys of these give way to them.
        """
        with _trace.sending_many(self.topic, messages) as traceparent:
            return await self.submit(
                self.prepare(
                    messages,
                    deliver_at=deliver_at,
                    deliver_after=deliver_after,
                    replace=replace,
                    traceparent=traceparent,
                )
            )

    def prepare(
        self,
        messages: Sequence[bytes | OutgoingMessage],
        *,
        deliver_at: datetime | None,
        deliver_after: timedelta | None,
        replace: bool,
        traceparent: str,
    ) -> Sequence[ListBatch]:
        """For `PartitionedProducer`: what `send_many` sends, checked and numbered. `submit` has to follow at once."""
        self._started()
        return list_batches(
            messages,
            self._destination._replace(replace=replace),
            deliver_at=deliver_at,
            deliver_after=deliver_after,
            numbering=self._numbering,
            traceparent=traceparent,
            messages_max=self._messages_max,
            bytes_max=self._bytes_max,
        )

    def submit(self, batches: Sequence[ListBatch]) -> Coroutine[Any, Any, Receipts]:
        """For `PartitionedProducer`: send them; what it returns waits until they are stored."""
        pipeline, _ = self._started()
        self._seal()  # what was sent before goes before
        for batch in batches:
            pipeline.submit(batch)
        return self._stored(batches)

    async def _stored(self, batches: Sequence[ListBatch]) -> Receipts:
        if len(batches) == 1:
            return Receipts(await batches[0].future)
        results = await asyncio.gather(*(batch.future for batch in batches), return_exceptions=True)
        return _receipts(results)

    async def open(self) -> None:
        """Begin, in place of a `with` block: for a producer that is kept for as long as the program runs."""
        if self._pipeline is not None:
            raise RuntimeError("a producer is opened once")
        self._loop = asyncio.get_running_loop()
        self._pipeline = Pipeline(
            self._rpc, self.topic, in_flight_max=self._in_flight_max, on_settled=self._on_settled
        )

    async def close(self) -> None:
        """Send what has gathered, wait until all is settled, and end the stream."""
        self._closed = True
        if self._pipeline is not None:
            self._seal()
            await self._pipeline.close()

    def _started(self) -> tuple[Pipeline, asyncio.AbstractEventLoop]:
        if self._pipeline is None or self._loop is None:
            raise RuntimeError(
                "the producer is used before `with client.producer(...) as producer:` or `open()`"
            )
        if self._closed:
            raise Closed("the producer is closed")
        return self._pipeline, self._loop

    def _begin(self, pipeline: Pipeline, loop: asyncio.AbstractEventLoop, replace: bool) -> SharedBatch:
        batch = SharedBatch(self._destination._replace(replace=replace))
        self._gathering = batch
        self._overdue = False
        if pipeline.idle or self._linger_s <= 0:
            # All tasks that were woken in this turn come first: they were queued before us.
            self._seal_at = loop.call_soon(self._on_time)
        else:
            self._seal_at = loop.call_later(self._linger_s, self._on_time)
        return batch

    def _on_time(self) -> None:
        assert self._pipeline is not None
        if self._pipeline.backed_up:
            # It would only wait in the queue. Let it grow instead; the next answer sends it.
            self._overdue = True
        else:
            self._seal()

    def _on_settled(self) -> None:
        pipeline = self._pipeline
        if self._gathering is None or pipeline is None:
            return
        if pipeline.idle or (self._overdue and not pipeline.backed_up):
            self._seal()

    def _seal(self) -> None:
        batch = self._gathering
        if batch is None or self._pipeline is None:
            return
        self._gathering = None
        if self._seal_at is not None:
            self._seal_at.cancel()
        self._pipeline.submit(batch)


def _receipts(results: Sequence[Sequence[IdRange] | BaseException]) -> Receipts:
    ranges: list[IdRange] = []
    first_error: BaseException | None = None
    for result in results:
        if isinstance(result, BaseException):
            first_error = first_error or result
        else:
            ranges += result
    if first_error is None:
        return Receipts(ranges)
    if not ranges or not isinstance(first_error, PostdateError):
        raise first_error
    stored = len(Receipts(ranges))
    raise PartlyStored(
        f"{stored} messages were stored, the others failed: {first_error}", stored_count=stored
    ) from first_error
