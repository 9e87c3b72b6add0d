"""One Subscribe stream: reads what a consumer says, writes what it gets."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from broker.errors import InvalidRequest
from broker.folder.broker import Broker
from broker.model import Entries
from broker.observe.logs import get_logger
from broker.rpc.batch_room import StreamRoom
from broker.rpc.calls import END_OF_STREAM, parse, refuse_unread
from broker.rpc.delays import check_delay_ms
from broker.rpc.encode import encode_batch_response
from broker.rpc.entries import api_type, check_size, entries_of, ids_at_most, ids_in
from broker.rpc.lease_lengths import check_lease_ms
from broker.rpc.slow_readers import not_read
from broker.rpc.status import FAILURE_BYTES_MAX, Context, encode_failures
from broker.rpc.unread_room import FrameRoom, StreamUnread, UnreadRooms
from broker.storage.manifest import REASON_BYTES_MAX
from broker.storage.message_fields import tag_of
from broker.storage.varint import encode_varint
from broker.subscriptions import requests
from broker.subscriptions.consumer import Consumer
from broker.subscriptions.requests import FailedIds
from broker.subscriptions.subscription import Subscription
from broker.topics.topic import Topic
from postdate_api.v1 import consumer_pb2, message_pb2

log = get_logger(__name__)

_CONFIRMED_HEAD = bytes((tag_of("confirmed", consumer_pb2.SubscribeResponse),))
_SETTLING = {
    bytes((tag_of(name, consumer_pb2.SubscribeRequest),)): name for name in ("ack", "nack", "extend")
}
"""Frames that name messages, by the first byte that every library writes: to say which one is too large, unparsed."""


_CONTROL_BYTES_MAX = 64
"""No frame that names no messages takes more."""


_PART_OF_ANSWERS = 8
"""Of the answers that wait, one in so many goes before a batch. A group of the journal that took long settles dozens of
acknowledgements at once, and what is due then is not to wait until all of them are confirmed."""


class _FrameAnswer(NamedTuple):
    """The answer to a frame."""

    frame: bytes
    is_recorded: bool  # see `Confirmation`


_Work: TypeAlias = Callable[[], Coroutine[None, None, _FrameAnswer]]
"""The rest of the work of a frame. The task that does it makes the call, as it may be cancelled before it begins."""


class Session:
    """One consumer's stream, from Opened to its end.

    Two tasks: one reads frames and starts what they ask for, the other writes confirmations, batches and
    heartbeats. A consumer that half-closes gets its confirmations before the stream ends.

    Batches, heartbeats and confirmations of what is not recorded leave only while the broker owns what they tell of,
    looked at with no `await` before they are written (CLUSTER-10); until then they wait. The dispatcher hands out no
    second batch meanwhile.
    """

    def __init__(
        self,
        broker: Broker,
        topic: Topic,
        subscription: Subscription,
        consumer: Consumer,
        context: Context,
        rooms: UnreadRooms,
        batch_rooms: UnreadRooms,
        epoch: int = 0,
    ) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._broker = broker
        self._topic = topic
        self._subscription = subscription
        self._consumer = consumer
        self._context = context
        self._epoch = epoch
        self._ids_max = broker.config.tuning.ack_entries_max
        self._answers: deque[tuple[bytes, FrameRoom | None]] = deque()
        # Given only while the state is owned.
        self._owner_answers: deque[tuple[bytes, FrameRoom | None]] = deque()
        self._answer_room = StreamUnread(rooms, context.peer, self._stall)
        self._batch_room = StreamRoom(batch_rooms, context.peer, self._stall, consumer, subscription.work)
        self._owns = broker.ownership.holds
        self._stalled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._in_flight: set[asyncio.Task[None]] = set()
        self._failure: Exception | None = None
        self._finished_reading = False
        self._was_drained = False  # by the consumer
        self._told_end = False
        self._is_leaving = False

    async def run(self) -> None:
        """Serve the stream until either side ends it; raises what it is to be ended with."""
        try:
            opened = self._opened().SerializeToString()
            self._broker.ownership.check()
            await self._context.write(opened)
            self._batch_room.begin()
            await self._serve()
        finally:
            self._batch_room.close()
            self._answer_room.close()

    async def _serve(self) -> None:
        reader = asyncio.create_task(self._read_frames(), name="frames of a consumer")
        writer = asyncio.create_task(self._write_frames(), name="answers to a consumer")
        try:
            await asyncio.wait({writer, self._stalled}, return_when=asyncio.FIRST_COMPLETED)
            if not writer.done():
                reader.cancel()
                await self._end_unread()
                return
            writer.result()
            if self._was_drained and self._subscription.states.leases.held(self._consumer.consumer_id):
                # The end of a stream that was cut may look like a half-close; but nothing can be written to it.
                self._broker.ownership.check()
                await self._context.write(self._heartbeat().SerializeToString())
                self._consumer.hands_back = True
        finally:
            await end_tasks((reader, writer, *self._in_flight))

    def drain(self, grace_ms: int) -> None:
        """Send no more messages; acks are taken until the stream ends, which it does once none can come. What is left
        then goes back uncounted."""
        self._is_leaving = True
        self._subscription.consumers.drain(self._consumer)
        self._consumer.hands_back = True
        self._answer(consumer_pb2.SubscribeResponse(draining=consumer_pb2.Draining(grace_ms=grace_ms)))

    def _stall(self) -> None:
        if not self._stalled.done():
            self._stalled.set_result(None)

    async def _end_unread(self) -> None:
        """End the stream although an answer is still being written; returns when it no longer is."""
        await refuse_unread(self._broker, self._context, not_read())

    # -- reading ---------------------------------------------------------------------------------------------

    async def _read_frames(self) -> None:
        try:
            while (raw := await self._context.read()) is not END_OF_STREAM:
                if len(raw) <= _CONTROL_BYTES_MAX and raw[:1] not in _SETTLING:
                    frame = self._parsed(raw)  # which decides, whatever it begins with
                    if frame.WhichOneof("frame") not in _SETTLING.values():
                        self._take_frame(frame)
                        continue
                self._check_size(raw)
                place = await self._answer_room.take(len(raw) + self._failures_bytes_max(raw))
                frame = self._parsed(raw)
                place.shrink(len(raw) + _ids_in(frame) * FAILURE_BYTES_MAX)
                work = self._take_frame(frame)
                if work is None:
                    place.release()
                    continue
                task = asyncio.create_task(self._answer_frame(work, place))
                self._in_flight.add(task)
                task.add_done_callback(self._in_flight_done)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # told to the consumer by the writer, which ends the stream
            self._failure = error
        finally:
            self._finished_reading = True
            self._consumer.draining = True
            self._consumer.wakeup.set()

    def _check_size(self, raw: bytes) -> None:
        """Refuse a frame that is larger than one that names no more messages than it may."""
        named = _SETTLING.get(raw[:1])
        check_size(raw, f"{named}.entries" if named else "frame", self._ids_max)

    def _failures_bytes_max(self, raw: bytes) -> int:
        return FAILURE_BYTES_MAX * ids_at_most(raw, lambda raw: _ids_in(self._parsed(raw)), self._ids_max)

    def _parsed(self, raw: bytes) -> consumer_pb2.SubscribeRequest:
        return parse(consumer_pb2.SubscribeRequest, raw, self._broker.config)

    async def _answer_frame(self, work: _Work, place: FrameRoom) -> None:
        answer, is_recorded = await work()
        place.answered(len(answer))
        (self._answers if is_recorded else self._owner_answers).append((answer, place))
        self._consumer.wakeup.set()

    def _take_frame(self, frame: consumer_pb2.SubscribeRequest) -> _Work | None:
        """Do what a frame asks for; what has to wait for the disk is returned."""
        self._subscription.consumers.heard(self._consumer)
        match frame.WhichOneof("frame"):
            case "ack":
                return partial(self._acknowledge, frame.ack)
            case "permits":
                self._consumer.grant(frame.permits.messages, frame.permits.bytes)
                self._subscription.work.set()
            case "nack":
                return partial(self._give_back, frame.nack)
            case "extend":
                return self._extend(frame.extend)
            case "drain":
                self._was_drained = True
                self._subscription.consumers.drain(self._consumer)
            case "open":
                raise InvalidRequest("Only the first frame may be open", field="open", reason="ALREADY_OPEN")
            case _:
                raise InvalidRequest("The frame sets no known field", field="frame", reason="EMPTY_FRAME")
        return None

    async def _acknowledge(self, ack: consumer_pb2.Ack) -> _FrameAnswer:
        entries, failures = self._entries_of(ack.entries, "ack.entries")
        confirmation = await requests.acknowledge(self._subscription, entries)
        return await self._confirmed(ack.request_id, failures, confirmation)

    async def _give_back(self, nack: consumer_pb2.Nack) -> _FrameAnswer:
        check_nack(nack, "nack.")
        entries, failures = self._entries_of(nack.entries, "nack.entries")
        confirmation = await requests.give_back(
            self._subscription,
            self._consumer.consumer_id,
            entries,
            nack.redeliver_after_ms,
            dead_letter=nack.dead_letter,
            reason=nack.reason,
            release=nack.release,
        )
        return await self._confirmed(nack.request_id, failures, confirmation)

    def _extend(self, extend: consumer_pb2.Extend) -> _Work:
        lease_ms = check_lease_ms(
            extend.lease_ms or self._consumer.lease_ms, "extend.lease_ms", self._broker.config
        )
        entries, failures = self._entries_of(extend.entries, "extend.entries")
        not_held = requests.extend(self._subscription, self._consumer.consumer_id, entries, lease_ms)
        confirmation = requests.Confirmation(not_held, is_recorded=False)
        return partial(self._confirmed, extend.request_id, failures, confirmation)

    def _entries_of(
        self, sets: Sequence[message_pb2.EntrySet], field: str
    ) -> tuple[Entries, list[FailedIds]]:
        return entries_of(sets, field, self._ids_max)

    async def _confirmed(
        self, request_id: int, impossible: list[FailedIds], confirmation: requests.Confirmation
    ) -> _FrameAnswer:
        failures = impossible + confirmation.failures
        confirmed = consumer_pb2.Confirmed(request_id=request_id).SerializeToString()
        # A message is the concatenation of its fields: the failures are already on their wire form.
        confirmed += await encode_failures(failures, consumer_pb2.Confirmed)
        answer = b"".join((_CONFIRMED_HEAD, encode_varint(len(confirmed)), confirmed))
        return _FrameAnswer(answer, confirmation.is_recorded and not impossible)

    def _in_flight_done(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        self._consumer.wakeup.set()
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and self._failure is None:
            self._failure = error

    # -- writing ---------------------------------------------------------------------------------------------

    async def _write_frames(self) -> None:
        consumer = self._consumer
        while True:
            consumer.wakeup.clear()
            await self._write_answers()
            if self._failure is not None:
                raise self._failure
            if consumer.closed_because is not None:
                raise consumer.closed_because
            if consumer.ended and not self._told_end:
                self._told_end = True
                self.drain(0)
                continue
            if self._owns() and (batch := consumer.next_nowait()) is not None:
                self._subscription.work.set()  # the next batch may gather while this one is sent
                place, frame = self._batch_room.leave(), encode_batch_response(batch)
                del batch  # or its messages would be held beside the frame
                await self._write(frame, place)
                continue
            finished = self._finished_reading or consumer.ended or self._holds_nothing_more()
            if finished and not (self._in_flight or self._answers or self._owner_answers):
                return
            await self._wait_work()

    async def _write_answers(self) -> None:
        """Write the answers that wait; only some of them while a batch does too, unless the stream is to end."""
        left = 1 + (len(self._answers) + len(self._owner_answers)) // _PART_OF_ANSWERS
        while left > 0 or not self._sends_batch():
            if self._answers:
                answer = self._answers.popleft()
            elif self._owner_answers and self._owns():
                answer = self._owner_answers.popleft()
            else:
                return
            await self._write(*answer)
            left -= 1

    def _sends_batch(self) -> bool:
        """Return whether a batch is what comes next; false if something else comes first that ends the stream."""
        consumer = self._consumer
        is_ending = self._failure is not None or consumer.closed_because is not None or consumer.ended
        return consumer.has_unsent and not is_ending and self._owns()

    async def _write(self, answer: bytes, place: FrameRoom | None) -> None:
        await self._context.write(answer)
        if place is not None:
            place.release()

    def _holds_nothing_more(self) -> bool:
        """Return whether the broker leaves, and the consumer has nothing left to acknowledge."""
        return self._is_leaving and not self._subscription.states.leases.holds(self._consumer.consumer_id)

    async def _wait_work(self) -> None:
        """Wait for something to write; say that all is well when there is nothing for long."""
        wakeup = self._consumer.wakeup
        if wakeup.is_set():
            return
        quiet = asyncio.get_running_loop().call_later(
            self._broker.config.tuning.heartbeat_ms / 1000, self._queue_heartbeat
        )
        try:
            await wakeup.wait()
        finally:
            quiet.cancel()

    def _queue_heartbeat(self) -> None:
        # What would be told late is told of another time: without the state there is no heartbeat.
        if self._owns() and not self._owner_answers:
            self._owner_answers.append((self._heartbeat().SerializeToString(), None))
        self._consumer.wakeup.set()

    def _heartbeat(self) -> consumer_pb2.SubscribeResponse:
        heartbeat = consumer_pb2.Heartbeat(
            broker_time_ms=self._broker.clock.now_ms(),
            ready_messages=self._topic.subscription_counts(self._subscription).ready,
            next_due_time_ms=self._topic.index.next_due_ms() or 0,
        )
        return consumer_pb2.SubscribeResponse(heartbeat=heartbeat)

    def _answer(self, response: consumer_pb2.SubscribeResponse) -> None:
        self._answers.append((response.SerializeToString(), None))
        self._consumer.wakeup.set()

    def _opened(self) -> consumer_pb2.SubscribeResponse:
        opened = consumer_pb2.Opened(
            consumer_id=self._consumer.consumer_id,
            lease_ms=self._consumer.lease_ms,
            heartbeat_ms=self._broker.config.tuning.heartbeat_ms,
            type=api_type(self._subscription),
            honor_delay=self._subscription.honors_delay,
            ack_entries_max=self._ids_max,
            epoch=self._epoch,
        )
        return consumer_pb2.SubscribeResponse(opened=opened)


async def end_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def check_nack(nack: consumer_pb2.Nack | consumer_pb2.NackRequest, within: str = "") -> None:
    """Refuse what a nack cannot ask for; `within` is where its fields lie in the request."""
    if nack.release and (nack.redeliver_after_ms or nack.dead_letter or nack.reason):
        raise InvalidRequest(
            "release cannot be combined with redeliver_after_ms, dead_letter or reason",
            field=f"{within}release",
            reason="INVALID_RELEASE",
        )
    check_delay_ms(nack.redeliver_after_ms, "redeliver_after_ms", within)
    if len(nack.reason.encode()) > REASON_BYTES_MAX:
        raise InvalidRequest(
            f"reason is at most {REASON_BYTES_MAX} bytes", field=f"{within}reason", reason="REASON_TOO_LARGE"
        )


def _ids_in(frame: consumer_pb2.SubscribeRequest) -> int:
    """Return how many messages a frame names."""
    kind = frame.WhichOneof("frame")
    if kind not in _SETTLING.values():
        return 0
    return ids_in(getattr(frame, kind).entries)
