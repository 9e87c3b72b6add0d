"""ConsumerService: the Subscribe stream, and the same by single calls."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from broker.config import check_name
from broker.errors import InvalidRequest, LimitReached, Refused
from broker.folder.broker import Broker
from broker.policy import SubscriptionPolicy
from broker.rpc.answer_ownership import answer_without_ownership
from broker.rpc.audit_trail import CONTEXT, note_created
from broker.rpc.batch_room import StreamRoom, batch_rooms
from broker.rpc.call_room import answer_within
from broker.rpc.caller import check_request, creating
from broker.rpc.calls import END_OF_STREAM, Handler, answering, parse, refuse, refuse_as_owner, unary
from broker.rpc.encode import encode_deliveries
from broker.rpc.entries import check_initial_position, check_size, check_type, entries_of, ids_at_most, ids_in
from broker.rpc.lease_lengths import check_lease_ms, default_lease_ms
from broker.rpc.owed import list_owed
from broker.rpc.session import Session, check_nack
from broker.rpc.slow_readers import end_client, when_over
from broker.rpc.status import FAILURE_BYTES_MAX, Context, encode_failures
from broker.rpc.unread_room import FrameRoom, UnreadRooms
from broker.subscriptions import requests
from broker.subscriptions.consumer import Consumer, DeliveryBatch
from broker.subscriptions.leases import lease_end_ns
from broker.subscriptions.requests import FailedIds
from broker.subscriptions.subscription import Subscription
from broker.subscriptions.types import SubscriptionType
from broker.topics.topic import Topic
from postdate_api.v1 import consumer_pb2

SERVICE = "postdate.v1.ConsumerService"

Settling = TypeVar(
    "Settling", consumer_pb2.AcknowledgeRequest, consumer_pb2.NackRequest, consumer_pb2.ExtendLeaseRequest
)
"""Requests that name messages, each of which may become a failure in the answer."""

_WAIT_MS_MAX = 60_000
_POLL_MS_MAX = 1_000
"""Seconds that a Receive that does not wait gives the dispatcher to look."""
_ATTEMPTS_MAX = 1_000
_ATTEMPTS_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class _Received:
    """The answer to a Receive with an attempt_id."""

    deadline_ns: int  # of the leases, on the monotonic clock
    subscription: Subscription
    response: bytes


class ConsumerService:
    """See the module's description."""

    def __init__(self, broker: Broker, epoch: int = 0) -> None:
        """`epoch` is that of the owner; 0 without a cluster."""
        self._broker = broker
        self._epoch = epoch
        self._sessions: set[Session] = set()
        self._unread = UnreadRooms(broker.clock)
        self._batch_rooms = batch_rooms(broker.clock)
        self._consumer_numbers = itertools.count(1)
        self._attempts_bytes = 0
        self._attempts: OrderedDict[tuple[str, str, str], _Received] = OrderedDict()

    def handlers(self) -> dict[str, Handler]:
        return {
            "Subscribe": grpc.stream_stream_rpc_method_handler(self._subscribe),
            "Receive": grpc.unary_unary_rpc_method_handler(self._handle_receive),
            "Acknowledge": self._settling(consumer_pb2.AcknowledgeRequest, self._acknowledge),
            "Nack": self._settling(consumer_pb2.NackRequest, self._nack),
            "ExtendLease": self._settling(consumer_pb2.ExtendLeaseRequest, self._extend),
            "ListOwed": unary(self._broker, consumer_pb2.ListOwedRequest, partial(list_owed, self._broker)),
        }

    def drain(self) -> None:
        """Tell every stream that the broker is about to close it."""
        for session in self._sessions:
            session.drain(self._broker.config.drain_grace_ms)

    async def wait_drained(self) -> None:
        """Return once all streams have ended."""
        while self._sessions:
            await asyncio.wait([session.ended for session in self._sessions])

    # -- the stream ------------------------------------------------------------------------------------------

    async def _subscribe(self, _: object, context: Context) -> None:
        CONTEXT.set(context)
        try:
            self._broker.check_serving()
            topic, subscription, consumer = await self._read_open(context)
            await self._run_session(topic, subscription, consumer, context)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await refuse_as_owner(self._broker, context, error)

    async def _read_open(self, context: Context) -> tuple[Topic, Subscription, Consumer]:
        """Read the first frame and do what it asks for; the frame, with whatever is in it, is not kept."""
        first = await context.read()
        if first is END_OF_STREAM:
            raise InvalidRequest(
                "The stream ended before its first frame", field="open", reason="OPEN_EXPECTED"
            )
        check_size(first, "frame", self._broker.config.tuning.ack_entries_max)
        frame = parse(consumer_pb2.SubscribeRequest, first, self._broker.config)
        if frame.WhichOneof("frame") != "open":
            raise InvalidRequest("The first frame must be open", field="open", reason="OPEN_EXPECTED")
        opening = frame.open
        check_request(opening)
        topic, subscription = await self._resolve(opening)
        lease_ms = opening.lease_ms if opening.HasField("lease_ms") else default_lease_ms(subscription)
        consumer = self._consumer(opening.consumer_name, lease_ms)
        consumer.grant(opening.permits.messages, opening.permits.bytes)
        return topic, subscription, consumer

    async def _run_session(
        self, topic: Topic, subscription: Subscription, consumer: Consumer, context: Context
    ) -> None:
        topic.subscriptions.attach(subscription, consumer)
        session = Session(
            self._broker, topic, subscription, consumer, context, self._unread, self._batch_rooms, self._epoch
        )
        self._sessions.add(session)
        try:
            await session.run()
        finally:
            self._sessions.discard(session)
            topic.subscriptions.detach(subscription, consumer)
            session.ended.set_result(None)

    async def _resolve(self, opening: consumer_pb2.Open) -> tuple[Topic, Subscription]:
        """The subscription that an Open frame asks for; created if it is not there and that is allowed."""
        check_name("topic", opening.topic, "open.topic")
        check_name("subscription", opening.subscription, "open.subscription")
        check_type(opening.type, "open.type")
        check_initial_position(opening.initial_position, "open.initial_position")
        if opening.HasField("lease_ms"):
            check_lease_ms(opening.lease_ms, "open.lease_ms", self._broker.config)
        honor_delay = opening.honor_delay if opening.HasField("honor_delay") else None
        self._type_of(opening).check_honor_delay(honor_delay)  # before anything is created
        topic, subscription = await self._subscription(
            opening.topic, opening.subscription, opening.type, opening.initial_position, honor_delay
        )
        asked = SubscriptionType(opening.type or subscription.type)
        if asked is not subscription.type:
            raise Refused(
                f"Subscription {subscription.name!r} is {subscription.type.name}, not {asked.name}",
                reason="SUBSCRIPTION_TYPE_MISMATCH",
                type=subscription.type.name,
            )
        if honor_delay is not None and honor_delay != subscription.honors_delay:
            raise Refused(
                f"Subscription {subscription.name!r} {'honours' if subscription.honors_delay else 'ignores'} "
                "delivery times",
                reason="HONOR_DELAY_MISMATCH",
            )
        return topic, subscription

    def _type_of(self, opening: consumer_pb2.Open) -> SubscriptionType:
        """The type that the subscription has, or would be created with."""
        topic = self._broker.registry.by_name.get(opening.topic)
        existing = topic.subscriptions.find(opening.subscription) if topic is not None else None
        return (
            existing.type
            if existing is not None
            else SubscriptionType(opening.type or SubscriptionType.SHARED)
        )

    async def _subscription(
        self, topic_name: str, name: str, type_: int, initial_position: int, honor_delay: bool | None
    ) -> tuple[Topic, Subscription]:
        config = self._broker.config
        if config.auto_create_subscriptions:
            is_new = topic_name not in self._broker.registry.by_name
            with creating(self._broker, topic_name):
                topic = await self._broker.registry.topic_or_create(topic_name)
            if is_new:
                note_created(self._broker, topic_name)
        else:
            topic = self._broker.registry.topic(topic_name)
        if existing := await topic.subscriptions.find_created(name):
            return topic, existing
        if not config.auto_create_subscriptions:
            return topic, topic.subscription(name)
        policy = SubscriptionPolicy(honor_delay=honor_delay)
        created = await topic.subscriptions.create(
            name, type_ or SubscriptionType.SHARED, initial_position, policy
        )
        note_created(self._broker, topic_name, name)
        return topic, created

    def _consumer(self, name: str, lease_ms: int) -> Consumer:
        # The start time tells consumers of different lives of the broker apart.
        consumer_id = f"{self._broker.started_ms:x}-{next(self._consumer_numbers):x}"
        return Consumer(consumer_id, name[:255] or consumer_id, lease_ms, self._broker.clock.monotonic_ns())

    # -- single calls ----------------------------------------------------------------------------------------

    async def _handle_receive(self, raw: bytes, context: Context) -> bytes:
        receive = partial(self._receive, context)
        return await answering(self._broker, consumer_pb2.ReceiveRequest, receive)(raw, context)

    async def _receive(self, context: Context, request: consumer_pb2.ReceiveRequest) -> bytes:
        self._broker.check_serving()
        check_name("topic", request.topic, "topic")
        check_name("subscription", request.subscription, "subscription")
        if not 0 <= request.wait_ms <= _WAIT_MS_MAX:
            raise InvalidRequest(
                f"wait_ms is between 0 and {_WAIT_MS_MAX}", field="wait_ms", reason="INVALID_WAIT_MS"
            )
        if request.max_messages > self._broker.config.tuning.read_batch_entries:
            raise InvalidRequest(
                f"max_messages is at most {self._broker.config.tuning.read_batch_entries}",
                field="max_messages",
                reason="INVALID_MAX_MESSAGES",
            )
        if request.lease_ms:
            check_lease_ms(request.lease_ms, "lease_ms", self._broker.config)
        check_initial_position(request.initial_position, "initial_position")
        topic, subscription = await self._subscription(
            request.topic, request.subscription, 0, request.initial_position, None
        )
        if not subscription.type.allows_receive:
            raise Refused(
                f"Receive works on SHARED subscriptions, and {subscription.name!r} is not one",
                reason="SUBSCRIPTION_TYPE_MISMATCH",
            )
        lease_ms = request.lease_ms or default_lease_ms(subscription)
        attempt = (request.topic, request.subscription, request.attempt_id)
        if request.attempt_id and (known := self._known(attempt, subscription)):

            async def repeat(_: FrameRoom) -> bytes:
                return self._repeated(known)

            size, bytes_max = request.ByteSize(), len(known.response)
            if repeated := await answer_within(self._batch_rooms, context, size, bytes_max, repeat):
                return repeated
        response, delivered = await self._receive_batch(context, topic, subscription, request, lease_ms)
        if request.attempt_id and delivered:
            deadline_ns = lease_end_ns(self._broker.clock.monotonic_ns(), lease_ms)
            self._remember(attempt, _Received(deadline_ns, subscription, response))
        return response

    async def _receive_batch(
        self,
        context: Context,
        topic: Topic,
        subscription: Subscription,
        request: consumer_pb2.ReceiveRequest,
        lease_ms: int,
    ) -> tuple[bytes, bool]:
        """The response, and whether there are messages in it. They have room until the call is over."""
        consumer = self._consumer("receive", lease_ms)
        consumer.grant(request.max_messages or 1, 0)
        consumer.polls = not request.wait_ms
        end = partial(end_client, context)
        room = StreamRoom(self._batch_rooms, context.peer, end, consumer, subscription.work)
        when_over(context, room.close)
        room.begin()
        topic.subscriptions.attach(subscription, consumer)
        batch = None
        try:
            async with asyncio.timeout((request.wait_ms or _POLL_MS_MAX) / 1000):
                while (batch := self._batch_for(consumer)) is None and not consumer.is_done:
                    consumer.wakeup.clear()
                    await consumer.wakeup.wait()
        except TimeoutError:
            batch = self._batch_for(consumer)
            if batch is None and consumer.lacks_room:
                raise LimitReached(
                    "Messages are available, but too many answers wait for clients that do not read",
                    reason="TOO_MANY_CALLS",
                ) from None
        finally:
            if batch is None:  # also when the caller has gone: what was handed out meanwhile goes to others
                room.close()
                topic.subscriptions.detach(subscription, consumer)
            else:
                topic.subscriptions.detach(subscription, consumer, keep_leases=True)
        if consumer.closed_because is not None:
            raise consumer.closed_because
        rest = consumer_pb2.ReceiveResponse(
            consumer_id=consumer.consumer_id,
            next_due_time_ms=topic.index.next_due_ms() or 0,
        ).SerializeToString()
        # A message is the concatenation of its fields: the deliveries are already on their wire form.
        return (rest, False) if batch is None else (encode_deliveries(batch) + rest, True)

    def _batch_for(self, consumer: Consumer) -> DeliveryBatch | None:
        """Return what was handed out, if it may be sent; there is no await from here to the answer (CLUSTER-10)."""
        return consumer.next_nowait() if self._broker.ownership.holds() else None

    def _known(self, attempt: tuple[str, str, str], subscription: Subscription) -> _Received | None:
        """Return what a request with the same attempt_id was answered, if it may be repeated."""
        known = self._attempts.get(attempt)
        if known is None or known.deadline_ns <= self._broker.clock.monotonic_ns():
            return None
        return known if known.subscription is subscription else None  # it was deleted, and made again

    def _repeated(self, known: _Received) -> bytes:
        """Return the answer again, without what was settled, given back or lost since.

        Empty if that is all of it: the request is a new one. There is no await from here to the answer.
        """
        if not self._broker.ownership.holds():
            return b""
        answer = consumer_pb2.ReceiveResponse.FromString(known.response)
        held = known.subscription.states.leases.held(answer.consumer_id)
        kept = [
            delivery
            for delivery in answer.deliveries
            if delivery.id.entry_id in held.get(delivery.id.ledger_id, ())
        ]
        if len(kept) == len(answer.deliveries):
            return known.response
        del answer.deliveries[:]
        answer.deliveries.extend(kept)
        return answer.SerializeToString() if kept else b""

    def _remember(self, attempt: tuple[str, str, str], received: _Received) -> None:
        if old := self._attempts.pop(attempt, None):
            self._attempts_bytes -= len(old.response)
        self._attempts[attempt] = received
        self._attempts_bytes += len(received.response)
        while len(self._attempts) > _ATTEMPTS_MAX or self._attempts_bytes > _ATTEMPTS_BYTES_MAX:
            _, oldest = self._attempts.popitem(last=False)
            self._attempts_bytes -= len(oldest.response)

    def _settling(self, kind: type[Settling], call: Callable[[Settling], Awaitable[bytes]]) -> Handler:
        """A method whose answer may hold a failure for each id. It waits for room for that, and is parsed after."""
        broker, ids_max = self._broker, self._broker.config.tuning.ack_entries_max

        def count(raw: bytes) -> int:
            return ids_in(parse(kind, raw, broker.config).entries)

        async def handle(raw: bytes, context: Context) -> bytes:
            async def work(place: FrameRoom) -> bytes:
                async def call_within(request: Settling) -> bytes:
                    place.shrink(ids_in(request.entries) * FAILURE_BYTES_MAX)
                    return await call(request)

                check = partial(check_size, field="entries", ids_max=ids_max)
                return await answering(broker, kind, call_within, check=check)(raw, context)

            bytes_max = ids_at_most(raw, count, ids_max) * FAILURE_BYTES_MAX
            try:
                return await answer_within(self._unread, context, len(raw), bytes_max, work)
            except LimitReached as error:
                await refuse(broker, context, error)
                raise

        return grpc.unary_unary_rpc_method_handler(handle)

    async def _acknowledge(self, request: consumer_pb2.AcknowledgeRequest) -> bytes:
        subscription = self._existing(request.topic, request.subscription)
        entries, failures = entries_of(request.entries, "entries", self._broker.config.tuning.ack_entries_max)
        confirmation = await requests.acknowledge(subscription, entries)
        return await _confirmed(consumer_pb2.AcknowledgeResponse, failures, confirmation)

    async def _nack(self, request: consumer_pb2.NackRequest) -> bytes:
        subscription = self._existing(request.topic, request.subscription)
        check_nack(request)
        entries, failures = entries_of(request.entries, "entries", self._broker.config.tuning.ack_entries_max)
        confirmation = await requests.give_back(
            subscription,
            request.consumer_id,
            entries,
            request.redeliver_after_ms,
            dead_letter=request.dead_letter,
            reason=request.reason,
            release=request.release,
        )
        return await _confirmed(consumer_pb2.NackResponse, failures, confirmation)

    async def _extend(self, request: consumer_pb2.ExtendLeaseRequest) -> bytes:
        subscription = self._existing(request.topic, request.subscription)
        lease_ms = default_lease_ms(subscription)
        if request.lease_ms:
            lease_ms = check_lease_ms(request.lease_ms, "lease_ms", self._broker.config)
        entries, failures = entries_of(request.entries, "entries", self._broker.config.tuning.ack_entries_max)
        failures += requests.extend(subscription, request.consumer_id, entries, lease_ms)
        return await encode_failures(failures, consumer_pb2.ExtendLeaseResponse)

    def _existing(self, topic_name: str, name: str) -> Subscription:
        check_name("topic", topic_name, "topic")
        check_name("subscription", name, "subscription")
        if self._broker.journal.failed is not None:
            self._broker.check_serving()
        return self._broker.registry.topic(topic_name).subscription(name)


async def _confirmed(
    answer: type[Message], impossible: list[FailedIds], confirmation: requests.Confirmation
) -> bytes:
    encoded = await encode_failures(impossible + confirmation.failures, answer)
    if confirmation.is_recorded and not impossible:
        answer_without_ownership()
    return encoded
