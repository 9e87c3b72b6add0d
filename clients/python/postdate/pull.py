"""Messages taken by a single call, without a stream."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import cast
from weakref import WeakSet

from postdate._deliveries import Deliveries
from postdate._rpc import Rpc
from postdate._settlement import ACK, SettlementIds, Verb, entry_sets, faults_of
from postdate._time import duration_ms, moment_or_none
from postdate.errors import PostdateError
from postdate.message import Message
from postdate.model import InitialPosition, MessageId
from postdate_api.v1 import consumer_pb2

# ReceiveResponse does not say how long the lease is where the request left it to the subscription.
# Half the broker's default is safe for keeping it.
_ASSUMED_LEASE = timedelta(seconds=15)
_RENEWALS = 3  # a lease, so that two may fail

holders: WeakSet[PullHolder] = WeakSet()
"""Those of this process, for `postdate.testing`: it has to know what they hold."""


@dataclass(frozen=True, slots=True)
class Received:
    """Messages that one `Client.receive` took; empty if nothing became ready in time."""

    messages: tuple[Message, ...]
    next_due_time: datetime | None

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)

    def __len__(self) -> int:
        return len(self.messages)

    async def ack(self) -> None:
        """Ack all of them with one call; return when that is durable."""
        if self.messages:
            for message in self.messages:
                message.is_settled = True
            await self.messages[0].holder.settle(ACK, [message.id for message in self.messages])


class PullHolder:
    """Holds the messages of one `receive`, and settles them by unary calls."""

    def __init__(
        self, rpc: Rpc, topic: str, subscription: str, consumer_id: str, lease: timedelta | None
    ) -> None:
        self.topic = topic
        self.name = subscription
        self._rpc = rpc
        self.consumer_id = consumer_id
        self._renewal_s = (lease or _ASSUMED_LEASE).total_seconds() / _RENEWALS
        self._renewers: dict[Message, _Renewer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        holders.add(self)

    async def settle(self, verb: Verb, ids: Sequence[MessageId]) -> None:
        gathered = SettlementIds(verb)
        gathered.add(ids)
        faults = faults_of(verb, (await self._ask(verb, gathered)).failures)
        for message_id in ids:
            if message_id in faults:
                raise faults[message_id]

    def settle_nowait(self, verb: Verb, ids: Sequence[MessageId]) -> None:
        task = asyncio.get_running_loop().create_task(self._settle_quietly(verb, ids))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def ack_nowait(self, message: Message) -> None:
        message.is_settled = True
        self.settle_nowait(ACK, (message.id,))

    def keep(self, message: Message) -> None:
        self._renewers[message] = _Renewer(message, self._renewal_s)

    def let_go(self, message: Message) -> None:
        self._renewers.pop(message).stop()

    @property
    def address(self) -> str:
        """The broker's."""
        return self._rpc.address

    async def kept(self) -> list[MessageId]:
        """For `postdate.testing`, on any loop: all whose leases are kept, once what nobody waits for is confirmed."""
        for task in list(self._tasks):
            if not task.done() and task.get_loop().is_running():
                ended = asyncio.run_coroutine_threadsafe(asyncio.wait([task]), task.get_loop())
                await asyncio.wrap_future(ended)
        return [message.id for message in list(self._renewers)]

    async def _settle_quietly(self, verb: Verb, ids: Sequence[MessageId]) -> None:
        try:
            await self.settle(verb, ids)
        except PostdateError:
            return  # the lease ends by itself

    async def _ask(
        self, verb: Verb, gathered: SettlementIds
    ) -> consumer_pb2.AcknowledgeResponse | consumer_pb2.NackResponse | consumer_pb2.ExtendLeaseResponse:
        entries = entry_sets(gathered.columns)
        if verb.kind == "ack":
            ack = consumer_pb2.AcknowledgeRequest(topic=self.topic, subscription=self.name, entries=entries)
            return await self._rpc.call(self._rpc.consumer.Acknowledge, ack)
        if verb.kind == "nack":
            nack = consumer_pb2.NackRequest(
                topic=self.topic,
                subscription=self.name,
                consumer_id=self.consumer_id,
                entries=entries,
                redeliver_after_ms=verb.redeliver_after_ms,
                dead_letter=verb.dead_letter,
                reason=verb.reason,
                release=verb.release,
            )
            return await self._rpc.call(self._rpc.consumer.Nack, nack)
        extend = consumer_pb2.ExtendLeaseRequest(
            topic=self.topic,
            subscription=self.name,
            consumer_id=self.consumer_id,
            entries=entries,
            lease_ms=verb.lease_ms,
        )
        return await self._rpc.call(self._rpc.consumer.ExtendLease, extend)


class _Renewer:
    """Renews one lease every so often. Most blocks end before its first timer, which costs little."""

    __slots__ = ("_every_s", "_message", "_task", "_timer")

    def __init__(self, message: Message, every_s: float) -> None:
        self._message = message
        self._every_s = every_s
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(every_s, self._start)

    def stop(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="postdate-lease")

    async def _run(self) -> None:
        while not self._message.is_settled:
            # A renewal that fails changes nothing for the block: it goes on, and its ack counts
            # even after the lease was lost.
            with suppress(PostdateError):
                await self._message.extend()
            await asyncio.sleep(self._every_s)


async def receive(
    rpc: Rpc,
    topic: str,
    subscription: str,
    *,
    max_messages: int,
    wait: timedelta,
    lease: timedelta | None,
    initial_position: InitialPosition | None,
) -> Received:
    if lease is not None and not lease:
        raise ValueError("lease is zero; leave it out for the subscription's own")
    request = consumer_pb2.ReceiveRequest(
        topic=topic,
        subscription=subscription,
        max_messages=max_messages,
        wait_ms=duration_ms(wait, "wait"),
        lease_ms=0 if lease is None else duration_ms(lease, "lease"),
        attempt_id=uuid.uuid4().hex,  # so that trying again after a lost answer gives the same messages
    )
    if initial_position is not None:
        request.initial_position = cast(consumer_pb2.InitialPosition, initial_position.value)
    response = await rpc.call(rpc.consumer.Receive, request, wait_s=wait.total_seconds())
    holder = PullHolder(rpc, topic, subscription, response.consumer_id, lease)
    deliveries = Deliveries(response.deliveries)
    messages = tuple(Message(deliveries, place, holder) for place in range(len(deliveries)))
    return Received(messages, moment_or_none(response.next_due_time_ms))
