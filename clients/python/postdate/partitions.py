"""A topic that is spread over several by key, its partitions: one producer and one consumer for all of them.

Each partition is a topic like any other. Which one a key belongs to is fixed for good, and any client can compute it:
`fmix32(crc32c(key)) % partitions`, of the key's UTF-8 bytes, where `fmix32` is the final mix of MurmurHash3
(docs/sdk.md has values to test against).

Invariants:
  PARTITIONS-1  Messages of one key go to one partition, as long as the number of partitions is the same.
  PARTITIONS-2  What a consumer was sent ahead is at most its permits in all, or one a partition if that is more.
  PARTITIONS-3  While several partitions have messages, each is taken from in its turn.
  PARTITIONS-4  With a limit, no more than that are taken of all of them together. What was sent ahead beyond it is
      handed back, uncounted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import TracebackType

from postdate import _trace
from postdate._inbox import PERMITS, PartitionedInbox, run_permits, take_within
from postdate._runner import Handler, Runner
from postdate._sigterm import returning_on_sigterm
from postdate._topic_shards import key_hash
from postdate.errors import PartlyStored, PostdateError
from postdate.message import Message
from postdate.model import MessageId, OutgoingMessage, Receipt, Receipts, SubscriptionType
from postdate.producer import Producer
from postdate.subscription import Subscription

PARTITIONS_MAX = 1000


def partition_topics(topic: str, partitions: int) -> tuple[str, ...]:
    """Names of the topics that a topic is spread over: `orders-000`, `orders-001` and so on.

    They always have three digits, so that more partitions change no name.
    """
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise ValueError(f"partitions is between 1 and {PARTITIONS_MAX}")
    return tuple(f"{topic}-{number:03}" for number in range(partitions))


def partition_of(key: str, partitions: int) -> int:
    """Return the number of the partition that messages with this key go to."""
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise ValueError(f"partitions is between 1 and {PARTITIONS_MAX}")
    return key_hash(key) % partitions


@dataclass(frozen=True, slots=True)
class PartitionReceipt:
    """A `Receipt`, with the partition's topic that the message is in: ids are of use together with it."""

    topic: str
    id: MessageId
    publish_time: datetime
    duplicate: bool = False


class PartitionedProducer:
    """A producer of all partitions of a topic; made by `Client.partitioned_producer`.

    A message goes to the partition of its key; without a key to that of its schedule key; with neither, `send` takes
    the partitions in turn, and `send_many` the next one for all such messages of its list.

    It is a `Producer` for each partition: batches, sequence ids and what is sent again are each partition's own.
    """

    def __init__(self, topic: str, producers: Sequence[Producer]) -> None:
        self.topic = topic
        self._producers = tuple(producers)
        self._next = 0

    @property
    def topics(self) -> tuple[str, ...]:
        """Topics of the partitions, in order."""
        return tuple(producer.topic for producer in self._producers)

    def topic_of(self, key: str) -> str:
        """Return the topic that messages with this key go to."""
        return self._producers[partition_of(key, len(self._producers))].topic

    async def __aenter__(self) -> PartitionedProducer:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await _all(producer.__aexit__(kind, error, traceback) for producer in self._producers)

    async def open(self) -> None:
        """Begin, in place of a `with` block: for a producer that is kept for as long as the program runs."""
        for producer in self._producers:
            await producer.open()

    async def close(self) -> None:
        """Send what has gathered, wait until all is settled, and end the streams."""
        await _all(producer.close() for producer in self._producers)

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
    ) -> PartitionReceipt:
        """Send one message; return when the broker has it on disk. See `Producer.send`.

        A `sequence_id` of the caller's needs a key or a schedule key: a repeat has to go to the same partition.
        """
        producer = self._producers[self._place(key or schedule_key, sequence_id)]
        receipt = await producer.send(
            payload,
            key=key,
            properties=properties,
            deliver_at=deliver_at,
            deliver_after=deliver_after,
            schedule_key=schedule_key,
            ttl=ttl,
            event_time=event_time,
            traceparent=traceparent,
            sequence_id=sequence_id,
            replace=replace,
        )
        return _receipt(producer.topic, receipt)

    async def send_many(
        self,
        messages: Sequence[bytes] | Sequence[OutgoingMessage] | Sequence[bytes | OutgoingMessage],
        *,
        deliver_at: datetime | None = None,
        deliver_after: timedelta | None = None,
        replace: bool = False,
    ) -> list[PartitionReceipt]:
        """Send a list; return when all of it is on the broker's disk. See `Producer.send_many`.

        Each partition stores its part by itself, so only a list for one partition is stored all or none. If some
        partitions fail, `PartlyStored` says how many messages were stored and why the others are not known to be.
        """
        parts: dict[int, list[int]] = {}  # of each partition, which messages of the list
        shared: int | None = None  # the partition of those without keys
        for index, message in enumerate(messages):
            key, sequence_id = "", None
            if isinstance(message, OutgoingMessage):
                key, sequence_id = message.key or message.schedule_key, message.sequence_id
            if key or sequence_id is not None:
                place = self._place(key, sequence_id)
            else:
                place = shared = self._place("", None) if shared is None else shared
            parts.setdefault(place, []).append(index)
        with _trace.sending_many(self.topic, messages) as traceparent:
            # All of them are looked at before the first is sent, so that what makes no sense sends nothing.
            ready = [
                (
                    producer := self._producers[place],
                    producer.prepare(
                        [messages[index] for index in indexes],
                        deliver_at=deliver_at,
                        deliver_after=deliver_after,
                        replace=replace,
                        traceparent=traceparent,
                    ),
                )
                for place, indexes in parts.items()
            ]
            # All leave in this step: numbers and order are those in which the lists were sent.
            waits = [producer.submit(batches) for producer, batches in ready]
            outcomes = await asyncio.gather(*waits, return_exceptions=True)
        _raise_failures(outcomes)
        receipts: list[PartitionReceipt | None] = [None] * len(messages)
        for (producer, _), indexes, stored in zip(ready, parts.values(), outcomes, strict=True):
            assert isinstance(stored, Receipts)
            for index, receipt in zip(indexes, stored, strict=True):
                receipts[index] = _receipt(producer.topic, receipt)
        return [receipt for receipt in receipts if receipt is not None]

    def _place(self, key: str, sequence_id: int | None) -> int:
        """Return the number of the partition of a message."""
        if key:
            return partition_of(key, len(self._producers))
        if sequence_id is not None:
            raise ValueError("a sequence_id needs a key: a repeat has to go to the same partition")
        place = self._next
        self._next = (place + 1) % len(self._producers)
        return place


class PartitionedSubscription:
    """One consumer of a subscription on all partitions of a topic; made by `Client.subscribe_partitioned`.

    Iterate over it, or call `receive_many` or `run`; several tasks may do so at once. Partitions that have messages
    take turns. `permits` is for all of them together, an equal share each and at least one; `limit` is so, too.

    It is a `Subscription` for each partition: a connection that breaks is made again alone, messages are acked,
    nacked, extended and released where they came from (`Message.topic`), and the type's promises about order hold
    within each. What ends one of them for good, such as a topic that is deleted, is raised here.
    """

    def __init__(
        self,
        topic: str,
        name: str,
        subscriptions: Sequence[Subscription],
        changed: asyncio.Event,
        limit: int | None,
    ) -> None:
        self.topic = topic
        self.name = name
        self._subscriptions = tuple(subscriptions)
        self._by_topic = {each.topic: each for each in self._subscriptions}
        self._inbox = PartitionedInbox(
            {each.topic: each.inbox for each in self._subscriptions}, changed, limit
        )

    @property
    def topics(self) -> tuple[str, ...]:
        """Topics of the partitions, in order."""
        return tuple(self._by_topic)

    @property
    def effective_type(self) -> SubscriptionType:
        """The way in which messages are shared out, as the broker says."""
        return self._inbox.effective_type

    async def __aenter__(self) -> PartitionedSubscription:
        await self.open()
        return self

    async def open(self) -> None:
        """Begin, in place of a `with` block: for a consumer that is kept for as long as the program runs.

        Returns once the broker has answered for every partition; if one cannot be opened, none stays open.
        """
        if self._subscriptions[0].loop is not None:
            raise RuntimeError("a subscription is opened once")
        try:
            await _all(each.open() for each in self._subscriptions)
        except BaseException:
            await asyncio.gather(*(each.close() for each in self._subscriptions), return_exceptions=True)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None and issubclass(
            kind, GeneratorExit
        ):  # nothing may be awaited that does not end at once
            for each in self._subscriptions:
                await each.__aexit__(kind, error, traceback)
        else:
            await _all(each.__aexit__(kind, error, traceback) for each in self._subscriptions)

    def __aiter__(self) -> AsyncIterator[Message]:
        return self._inbox

    async def __anext__(self) -> Message:
        return await self._inbox.__anext__()

    async def run(
        self, handler: Handler, *, concurrency: int = 16, grace: timedelta = timedelta(seconds=30)
    ) -> None:
        """Call `handler` for each message, for at most `concurrency` of them at a time, until it is told to stop.

        See `Subscription.run`. The concurrency is for all partitions together.
        """
        runner = Runner(self._inbox, handler, concurrency=concurrency, grace=grace)
        self._inbox.begin(run_permits(self._inbox.effective_type, concurrency))
        with returning_on_sigterm():
            await runner.run()

    async def receive_many(self, max_messages: int = 1000, timeout: timedelta | None = None) -> list[Message]:
        """Take what is there, at most `max_messages`, of all partitions; wait up to `timeout` for the first.

        See `Subscription.receive_many`.
        """
        if max_messages < 1:
            raise ValueError("max_messages is at least 1")
        self._inbox.begin(PERMITS)
        await self._inbox.note_asked(timeout)
        return await take_within(self._inbox, self._inbox.take, max_messages, timeout)

    async def ack_many(self, messages: Iterable[Message]) -> None:
        """Ack all of them; return when that is durable. Raises the first failure, if any."""
        parts: dict[str, list[Message]] = {}
        for message in messages:
            parts.setdefault(message.topic, []).append(message)
        await _all(self._by_topic[topic].ack_many(part) for topic, part in parts.items())

    def ack_nowait(self, message: Message) -> None:
        """Ack it without waiting. `wait_confirmed` and `close` wait for all such acks."""
        self._by_topic[message.topic].ack_nowait(message)

    async def wait_confirmed(self) -> None:
        """Wait until everything asked for so far is durable. Raises the first failure of `ack_nowait`."""
        await _all(each.wait_confirmed() for each in self._subscriptions)

    def stop(self) -> None:
        """Take no more: iteration ends, what was not taken goes back, acks still count."""
        self._inbox.stop()

    async def close(self) -> None:
        """Take no more, wait until all acks are confirmed, and leave every partition. See `Subscription.close`."""
        await _all(each.close() for each in self._subscriptions)


async def _all(works: Iterable[Awaitable[object]]) -> None:
    """Wait for all of them, and raise the first failure then."""
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


def _receipt(topic: str, receipt: Receipt) -> PartitionReceipt:
    return PartitionReceipt(topic, receipt.id, receipt.publish_time, receipt.duplicate)


def _raise_failures(outcomes: Sequence[Receipts | BaseException]) -> None:
    """Raise what failed of a list, as `PartlyStored` if any of it was stored."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if not failures:
        return
    stored = sum(len(outcome) for outcome in outcomes if not isinstance(outcome, BaseException))
    stored += sum(failure.stored_count for failure in failures if isinstance(failure, PartlyStored))
    first = failures[0]
    if not stored or not isinstance(first, PostdateError):
        raise first
    raise PartlyStored(
        f"{stored} messages were stored, the others failed: {first}", stored_count=stored
    ) from first
