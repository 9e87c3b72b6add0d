"""One delivered message, and what its receiver can say of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime, timedelta
from types import MappingProxyType, TracebackType
from typing import Protocol

from postdate._deliveries import Deliveries
from postdate._settlement import ACK, RELEASE, Verb
from postdate._time import duration_ms, moment, moment_or_none, span
from postdate.model import MessageId
from postdate_api.v1 import consumer_pb2

_REASON_CHARS_MAX = 250


class Holder(Protocol):
    """Whoever received the message and can tell the broker what became of it."""

    topic: str
    name: str
    """Of its subscription."""

    async def settle(self, verb: Verb, ids: Sequence[MessageId]) -> None:
        """Return when the broker has confirmed it."""

    def settle_nowait(self, verb: Verb, ids: Sequence[MessageId]) -> None:
        """Ask without waiting."""

    def ack_nowait(self, message: Message) -> None:
        """Acknowledge without waiting."""

    def keep(self, message: Message) -> None:
        """Extend its lease again and again, until `let_go`."""

    def let_go(self, message: Message) -> None:
        """Extend it no more."""


class ProcessTracing(Protocol):
    """A listener that is told of messages that are processed."""

    def processing(self, message: Message) -> AbstractContextManager[None]:
        """Around the processing of a message, in the context of whoever processes it."""
        ...


tracing: ProcessTracing | None = None
"""Set by `postdate.otel`, if it was asked for."""


class Message:
    """A message as its producer sent it, with its delivery on this subscription.

    Fields are decoded when they are asked for. Unless it is settled by `ack`, `nack`, `release` or
    `processing`, the message comes back when its lease ends.
    """

    __slots__ = ("deliveries", "held_until", "holder", "is_settled", "place")

    def __init__(
        self, deliveries: Deliveries, place: int, holder: Holder, held_until: float = math.inf
    ) -> None:
        self.deliveries: Deliveries = deliveries
        """Those with which the broker sent it."""
        self.place: int = place
        """Among them."""
        self.holder: Holder = holder
        """Whoever received it."""
        self.held_until: float = held_until
        """For its holder: the lease's end on his clock, if he looks at that."""
        self.is_settled: bool = False
        """True once it was settled here: acked, nacked or released."""

    @property
    def _delivery(self) -> consumer_pb2.Delivery:
        """As the broker sent it."""
        return self.deliveries.typed[self.place]

    @property
    def id(self) -> MessageId:
        deliveries, place = self.deliveries, self.place
        return MessageId(deliveries.ledger_ids[place], deliveries.entry_ids[place])

    @property
    def topic(self) -> str:
        return self.holder.topic

    @property
    def subscription(self) -> str:
        return self.holder.name

    @property
    def payload(self) -> bytes:
        return self.deliveries.payload(self.place)

    @property
    def key(self) -> str:
        return self._delivery.message.key

    @property
    def properties(self) -> Mapping[str, str]:
        return MappingProxyType(dict(self._delivery.message.properties))

    @property
    def schedule_key(self) -> str:
        return self._delivery.message.schedule_key

    @property
    def traceparent(self) -> str:
        return self._delivery.message.traceparent

    @property
    def publish_time(self) -> datetime:
        """Time at which the broker accepted the message, on the broker's clock."""
        return moment(self._delivery.publish_time_ms)

    @property
    def deliver_at(self) -> datetime:
        """The time before which it was not delivered; the publish time where none was asked for."""
        return moment(self._delivery.deliver_at_ms)

    @property
    def event_time(self) -> datetime | None:
        """Time of the event, as the producer gave it."""
        return moment_or_none(self._delivery.message.event_time_ms)

    @property
    def ttl(self) -> timedelta | None:
        ttl_ms = self._delivery.message.ttl_ms
        return span(ttl_ms) if ttl_ms else None

    @property
    def attempt(self) -> int:
        """1 for the first delivery on this subscription, one more for each nack, ended lease or lost consumer.

        What was handed back unbegun does not count: released, or not taken when its consumer left.
        Deliveries are not recorded: what was out when the broker crashed comes again with the number it had.
        """
        return self._delivery.delivery_attempt

    async def ack(self) -> None:
        """Settle it: it never comes back on this subscription, unless a seek says so. Returns when that is durable."""
        self.is_settled = True
        await self.holder.settle(ACK, (self.id,))

    def ack_nowait(self) -> None:
        """As `ack`, without waiting; `Subscription.wait_confirmed` waits for all of them and raises what failed.

        This is the fast way for consumers that take message after message in one task.
        """
        self.holder.ack_nowait(self)

    async def nack(
        self, delay: timedelta | None = None, *, dead_letter: bool = False, reason: str = ""
    ) -> None:
        """Give it back, to come again after `delay` (None: after the subscription's back-off, less up to half of it).

        With `dead_letter` it moves to the subscription's dead-letter topic instead. The last `reason` is kept until the
        message is settled; a dead letter shows it.
        """
        if dead_letter and delay is not None:
            raise ValueError("a dead letter does not come again; give delay or dead_letter")
        # The wire's 0 means the back-off, so the shortest delay that one can ask for is 1 ms.
        delay_ms = 0 if delay is None else max(1, duration_ms(delay, "delay"))
        reason.encode()  # what cannot be sent raises here
        self.is_settled = True
        await self.holder.settle(Verb("nack", delay_ms, dead_letter, reason), (self.id,))

    async def release(self) -> None:
        """Hand it back unbegun: it goes out again at once, to anybody, and this delivery does not count.

        What comes back so again and again, more than ten times within ten seconds, waits a second each time.
        """
        self.is_settled = True
        await self.holder.settle(RELEASE, (self.id,))

    async def extend(self, lease: timedelta | None = None) -> None:
        """Hold it for `lease` from now (None: for the consumer's own lease)."""
        lease_ms = 0 if lease is None else max(1, duration_ms(lease, "lease"))
        await self.holder.settle(Verb("extend", lease_ms=lease_ms), (self.id,))

    def processing(self) -> AbstractAsyncContextManager[Message]:
        """Ack it at the end of the block, nack it if the block raises; keep the lease meanwhile.

        The exception goes on. A message that the block settled itself is left as it is. The end
        of the block awaits the confirmation; to have many acks share one, process in several tasks.
        """
        return Processing(self, None if tracing is None else tracing.processing(self))

    def __repr__(self) -> str:
        return f"<Message {self.id} of {self.topic!r}, attempt {self.attempt}, {len(self.payload)} bytes>"


class Processing(AbstractAsyncContextManager[Message]):
    """The block of `Message.processing`, with a span around what is in it if there is tracing."""

    __slots__ = ("_message", "_span")

    def __init__(self, message: Message, span: AbstractContextManager[None] | None) -> None:
        self._message = message
        self._span = span

    async def __aenter__(self) -> Message:
        message = self._message
        message.holder.keep(message)
        if self._span is not None:
            self._span.__enter__()
        return message

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        message = self._message
        if self._span is not None:
            self._span.__exit__(kind, error, traceback)
        message.holder.let_go(message)
        if message.is_settled:
            return
        if error is None:
            await message.ack()
            return
        # What the block raised is what the caller must see, and a cancelled task must end
        # soon. If the nack fails, the lease ends and the message comes back all the same.
        message.is_settled = True
        reason = f"{type(error).__name__}: {error}"[:_REASON_CHARS_MAX]
        reason = reason.encode(errors="replace").decode()  # names of files may be no UTF-8
        message.holder.settle_nowait(Verb("nack", reason=reason), (message.id,))
