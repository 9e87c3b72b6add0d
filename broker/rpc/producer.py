"""ProducerService: one batch a call, or request after request on a stream; small ones may become a batch together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import grpc

from broker.errors import PostdateError, forget_frames
from broker.folder.broker import Broker
from broker.observe import spans
from broker.rpc.answer_ownership import refusal_as_owner
from broker.rpc.audit_trail import CONTEXT, note_created
from broker.rpc.call_span import CallSpan, begin_span
from broker.rpc.caller import CALLER, Caller, creating
from broker.rpc.calls import END_OF_STREAM, Handler, refuse_as_owner
from broker.rpc.decode import DecodedProduce, ProduceEnvelope, decode_produce, read_envelope
from broker.rpc.field_counts import check_field_count
from broker.rpc.gathered_requests import GatheredBytes, GatheredRequests, put_together
from broker.rpc.status import Context, to_status
from broker.runtime.ownership import ownership_lost
from broker.storage.message_fields import tag_of
from broker.storage.varint import encode_varint
from broker.topics.intake import Accepted
from postdate_api.v1 import producer_pb2

SERVICE = "postdate.v1.ProducerService"

_IN_FLIGHT_MAX = 256
"""Batches of one stream that wait for the disk; beyond it the stream is not read."""
_APART_MAX = 16
"""Times that what has gathered is taken request by request, after a time when it could not be taken together."""
_JOINED_BYTES = 1 << 10
"""Of answers in one message, besides the last of them: some forty. More of them would gain little and hold the loop."""


@dataclass(slots=True)
class _Pending:
    """A request that was read and is not answered yet."""

    request_id: int
    accepted: Accepted | None = None
    refusal: Exception | None = None
    ids: bytes = b""  # the answer, where it was written while the disk worked
    span: CallSpan | None = None
    may_join: bool = False  # with others, in one message

    @property
    def is_decided(self) -> bool:
        """Tell whether the disk has nothing to say any more."""
        return self.accepted is None or self.accepted.durable.done()

    def note_failure(self) -> None:
        """A disk that has failed becomes the refusal, once it is decided."""
        if self.accepted is not None and (failure := self.accepted.durable.exception()) is not None:
            assert isinstance(failure, Exception)
            self.refusal = failure


class _Stream:
    """A produce stream."""

    def __init__(self, gathered: GatheredRequests, caller: Caller | None) -> None:
        self.gathered = gathered
        self.caller = caller
        self.pending: asyncio.Queue[_Pending] = asyncio.Queue(_IN_FLIGHT_MAX)
        self.apart = 0  # times that what has gathered is taken request by request yet


_ANSWERS_HEAD = bytes((tag_of("answers", producer_pb2.ProduceResponse),))
_A = TypeVar("_A", Accepted, Accepted | None)
_END = _Pending(0)
"""Behind the last request of a stream."""


class ProducerService:
    """See the module's description."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._gathered = GatheredBytes()

    def handlers(self) -> dict[str, Handler]:
        return {
            "Produce": grpc.unary_unary_rpc_method_handler(self._produce),
            "ProduceStream": grpc.stream_stream_rpc_method_handler(self._produce_stream),
        }

    async def _produce(self, raw: bytes, context: Context) -> bytes:
        CONTEXT.set(context)
        pending = await self._accept(raw, CALLER.get(), begin_span("Produce", context))
        if pending.refusal is None:
            await self._wait_durable(pending)
        refusal = self._refusal_as_owner(pending)
        if pending.span is not None:
            pending.span.end(refusal)
        if refusal is not None:
            await refuse_as_owner(self._broker, context, refusal)
        return _answer(pending)

    async def _produce_stream(self, _: object, context: Context) -> None:
        CONTEXT.set(context)
        # Requests are read and accepted by one task and answered by another, so that the next ones gather while those
        # before are on their way to the disk; what has gathered then is accepted by a third.
        stream = _Stream(GatheredRequests(self._gathered), CALLER.get())
        try:
            async with asyncio.TaskGroup() as tasks:
                accepting = tasks.create_task(self._accept_released(stream))
                tasks.create_task(self._read_requests(context, stream, accepting))
                tasks.create_task(self._write_answers(context, stream.pending))
        except ExceptionGroup as failures:
            await refuse_as_owner(self._broker, context, failures.exceptions[0])
        finally:
            stream.gathered.close()

    async def _read_requests(self, context: Context, stream: _Stream, accepting: asyncio.Task[None]) -> None:
        gathered = stream.gathered
        if stream.caller is None:
            while (raw := await context.read()) is not END_OF_STREAM:
                gathered.add(raw)
                del raw  # or it would be held until the next one has come
                if not gathered.may_wait:
                    await self._accept_gathered(stream)
        else:
            async for raw in _read_while_welcome(context, stream.caller):
                gathered.add(raw)
                del raw
                if not gathered.may_wait:
                    await self._accept_gathered(stream)
        await self._accept_gathered(stream)
        accepting.cancel()
        await stream.pending.put(_END)

    async def _accept_released(self, stream: _Stream) -> None:
        while True:
            await stream.gathered.wait_released()
            await self._accept_gathered(stream)

    async def _accept_gathered(self, stream: _Stream) -> None:
        """Accept what has gathered, as one batch if that can be."""
        async with stream.gathered.turn:
            with stream.gathered.taken() as requests:
                await self._accept_taken(stream, requests)

    async def _accept_taken(self, stream: _Stream, requests: list[bytes]) -> None:
        gathered, pending = stream.gathered, stream.pending
        if len(requests) > 1 and not stream.apart:
            if together := await self._accept_together(requests, stream.caller):
                gathered.submitted(together[0].accepted, len(together))
                for each in together:
                    await pending.put(each)
                return
            stream.apart = _APART_MAX
        elif stream.apart:
            stream.apart -= 1
        requests.reverse()
        while requests:
            each = await self._accept(requests.pop(), stream.caller, begin_span("Produce", None))
            gathered.submitted(each.accepted)
            await pending.put(each)

    async def _write_answers(self, context: Context, pending: asyncio.Queue[_Pending]) -> None:
        """Answer in order. What has been decided when an answer is written goes with it, if both requests take that."""
        following: _Pending | None = None
        while (answer := following or await pending.get()) is not _END:
            following = None
            if answer.refusal is None:
                await self._wait_durable(answer)
            answers = [self._finish(answer)]
            size = len(answers[0])
            while answer.may_join and size < _JOINED_BYTES and not pending.empty():
                following = pending.get_nowait()
                if not (following.may_join and following.is_decided):
                    break
                following.note_failure()
                answers.append(self._finish(following))
                size += len(answers[-1])
                following = None
            await context.write(_joined(answers))

    def _finish(self, answer: _Pending) -> bytes:
        """Return the answer to a request on a stream, to be written with no `await` from here on."""
        answer.refusal = self._refusal_as_owner(answer)
        if answer.span is not None:
            answer.span.end(answer.refusal)
        if answer.refusal is not None:
            reason = answer.refusal.reason if isinstance(answer.refusal, PostdateError) else "INTERNAL"
            self._broker.counters.refuse(reason)
        return _answer(answer)

    async def _accept(self, raw: bytes, caller: Caller | None, span: CallSpan | None) -> _Pending:
        pending = _Pending(0, span=span)
        try:
            check_field_count(ProduceEnvelope.DESCRIPTOR, raw, self._broker.config)
            envelope = read_envelope(raw)
            pending.request_id = envelope.request_id
            pending.may_join = envelope.join_answers
            if span is not None:
                span.note_topic(envelope.topic)
            if caller is not None:  # before the messages are looked at
                caller.check_batch(envelope)
            request = decode_produce(raw, self._broker.config, envelope)
            if span is not None:
                span.note_batch(request.batch)
            submit = partial(self._submit, request)
            pending.accepted = await (submit() if caller is None else self._limited(request, caller, submit))
            if span is not None:
                span.note_submitted()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if isinstance(error, PostdateError):  # of a bug, the log tells the frames
                forget_frames(error)
            pending.refusal = error
        return pending

    async def _accept_together(self, requests: Sequence[bytes], caller: Caller | None) -> list[_Pending]:
        """Accept requests as one batch; nothing is stored or returned if each is to be accepted by itself."""
        if spans.tracing is not None:  # each has a span of its own
            return []
        try:
            if (together := put_together(requests, self._broker.config)) is None:
                return []
            topic = together.envelope.topic
            # What is refused here is neither counted nor logged: it is when they are tried one by one.
            if topic not in self._broker.registry.by_name:
                return []
            if caller is not None and not caller.has_allowed_batch(topic):
                return []
            request = decode_produce(together.raw, self._broker.config, together.envelope)
            submit = partial(self._broker.submit_together, request.topic, request.batch)
            accepted = await (
                submit() if caller is None else self._limited(request, caller, submit, is_tried=True)
            )
        except PostdateError as error:
            forget_frames(error)
            return []
        if accepted is None:
            return []
        return [
            _Pending(of_one.request_id, part, may_join=of_one.join_answers)
            for of_one, part in zip(together.of_each, accepted.parts(together.counts), strict=True)
        ]

    async def _submit(self, request: DecodedProduce) -> Accepted:
        is_new = request.topic not in self._broker.registry.by_name
        try:
            return await self._broker.submit_batch(request.topic, request.batch, replace=request.replace)
        finally:
            if is_new and request.topic in self._broker.registry.by_name:
                note_created(self._broker, request.topic)

    async def _limited(
        self,
        request: DecodedProduce,
        caller: Caller,
        submit: Callable[[], Awaitable[_A]],
        *,
        is_tried: bool = False,
    ) -> _A:
        """Count a batch against the caller's limits while it is submitted. Raises LimitReached before that.

        `is_tried`: see `Limiter.take`.
        """
        batch = request.batch
        taken = caller.take(request.topic, batch.count, len(batch.frames), is_tried=is_tried)
        try:
            with creating(self._broker, request.topic):
                accepted = await submit()
        except PostdateError:
            if taken is not None:
                taken.refused()
            raise
        except BaseException:  # it may have been stored
            if taken is not None:
                taken.ended()
            raise
        if taken is not None and accepted is not None:
            taken.accepted(accepted)
        elif taken is not None:
            taken.refused()
        return accepted

    def _refusal_as_owner(self, answer: _Pending) -> Exception | None:
        """Return what the answer refuses, looked at last: no `await` from here to the frame (CLUSTER-10).

        Ids of what was stored now are the completion of a record. Ids of repeats are not.
        """
        ownership = self._broker.ownership
        if answer.refusal is not None:
            return refusal_as_owner(ownership, answer.refusal)
        assert answer.accepted is not None
        if ownership.holds() or not answer.accepted.has_repeats:
            return None
        return ownership_lost(ownership)

    async def _wait_durable(self, pending: _Pending) -> None:
        """Wait until the batch is on disk (P1); a failed disk becomes the refusal."""
        assert pending.accepted is not None
        durable = pending.accepted.durable
        if not durable.done():  # one sync makes many batches durable: most are done when their turn comes
            pending.ids = _ids(pending.request_id, pending.accepted)
            with suppress(Exception):  # which is read below
                await asyncio.shield(durable)
        pending.note_failure()


async def _read_while_welcome(context: Context, caller: Caller) -> AsyncIterator[bytes]:
    """The requests of a stream until it ends, or must end: what was read by then is still answered."""
    reader = asyncio.current_task()
    assert reader is not None
    is_reading = False

    def stop_reading() -> None:
        if is_reading:  # and not in the middle of storing something
            reader.cancel()

    caller.when_ended = stop_reading
    while not caller.must_end:
        is_reading = True
        try:
            raw = await context.read()
        except asyncio.CancelledError:
            if not caller.must_end:
                raise
            reader.uncancel()
            return
        finally:
            is_reading = False
        if raw is END_OF_STREAM:
            return
        yield raw
        del raw


def _answer(pending: _Pending) -> bytes:
    if pending.refusal is not None:
        response = producer_pb2.ProduceResponse(
            request_id=pending.request_id, error=to_status(pending.refusal)
        )
        return response.SerializeToString()
    assert pending.accepted is not None
    return pending.ids or _ids(pending.request_id, pending.accepted)


def _joined(answers: list[bytes]) -> bytes:
    """Return one message of a stream for answers to requests."""
    if len(answers) == 1:
        return answers[0]
    parts = [b""] * (3 * len(answers))
    parts[0::3] = [_ANSWERS_HEAD] * len(answers)
    parts[1::3] = [encode_varint(len(answer)) for answer in answers]
    parts[2::3] = answers
    return b"".join(parts)


def _ids(request_id: int, accepted: Accepted) -> bytes:
    """Return the answer to a batch that was accepted."""
    answer = producer_pb2.ProduceResponse(request_id=request_id, publish_time_ms=accepted.publish_time_ms)
    for ids in accepted.ids:  # to copy them from a list costs several times as much
        answer.ids.add(
            ledger_id=ids.ledger_id,
            first_entry_id=ids.first_entry_id,
            count=ids.count,
            duplicate=ids.duplicate,
        )
    return answer.SerializeToString()
