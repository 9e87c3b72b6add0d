"""`postdate.partitions` without async. Made by tools/generate_sync.py."""

from __future__ import annotations

from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from datetime import datetime, timedelta
from types import TracebackType

from postdate import partitions as _partitions
from postdate.model import OutgoingMessage, SubscriptionType
from postdate.partitions import PartitionReceipt
from postdate.sync._portal import Portal
from postdate.sync.message import Message


class PartitionedProducer:
    """A producer of all partitions of a topic; made by `Client.partitioned_producer`.

    A message goes to the partition of its key; without a key to that of its schedule key; with neither, `send`
    takes the partitions in turn, and `send_many` the next one for all such messages of its list.

    It is a `Producer` for each partition: batches, sequence ids and what is sent again are each partition's
    own.
    """

    def __init__(self, inner: _partitions.PartitionedProducer, portal: Portal) -> None:
        self._inner = inner
        self._portal = portal

    @property
    def topic(self) -> str:
        return self._inner.topic

    @property
    def topics(self) -> tuple[str, ...]:
        """Topics of the partitions, in order."""
        return self._inner.topics

    def topic_of(self, key: str) -> str:
        """Return the topic that messages with this key go to."""
        return self._portal.call(self._inner.topic_of, key)

    def __enter__(self) -> PartitionedProducer:
        self._portal.enter(self._inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._portal.leave(self._inner.__aexit__(kind, error, traceback))

    def open(self) -> None:
        """Begin, in place of a `with` block: for a producer that is kept for as long as the program runs."""
        self._portal.enter(self._inner.open())

    def close(self) -> None:
        """Send what has gathered, wait until all is settled, and end the streams."""
        self._portal.leave(self._inner.close())

    def send(
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
        return self._portal.run(
            self._inner.send(
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
        )

    def send_many(
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
        return self._portal.run(
            self._inner.send_many(
                messages, deliver_at=deliver_at, deliver_after=deliver_after, replace=replace
            )
        )


class PartitionedSubscription:
    """One consumer of a subscription on all partitions of a topic; made by `Client.subscribe_partitioned`.

    Iterate over it, or call `receive_many` or `run`; several threads may do so at once. Partitions that have
    messages take turns. `permits` is for all of them together, an equal share each and at least one; `limit` is
    so, too.

    It is a `Subscription` for each partition: a connection that breaks is made again alone, messages are acked,
    nacked, extended and released where they came from (`Message.topic`), and the type's promises about order
    hold within each. What ends one of them for good, such as a topic that is deleted, is raised here.
    """

    def __init__(self, inner: _partitions.PartitionedSubscription, portal: Portal) -> None:
        self._inner = inner
        self._portal = portal

    @property
    def topic(self) -> str:
        return self._inner.topic

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def topics(self) -> tuple[str, ...]:
        """Topics of the partitions, in order."""
        return self._inner.topics

    @property
    def effective_type(self) -> SubscriptionType:
        """The way in which messages are shared out, as the broker says."""
        return self._inner.effective_type

    def __enter__(self) -> PartitionedSubscription:
        self._portal.enter(self._inner.__aenter__())
        return self

    def open(self) -> None:
        """Begin, in place of a `with` block: for a consumer that is kept for as long as the program runs.

        Returns once the broker has answered for every partition; if one cannot be opened, none stays open.
        """
        self._portal.enter(self._inner.open())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._portal.leave(self._inner.__aexit__(kind, error, traceback))

    def __iter__(self) -> PartitionedSubscription:
        return self

    def __next__(self) -> Message:
        return Message(self._portal.next(self._inner), self._portal)

    def run(
        self,
        handler: Callable[[Message], object],
        *,
        concurrency: int = 16,
        grace: timedelta = timedelta(seconds=30),
    ) -> None:
        """Call `handler` in a thread for each message, for at most `concurrency` of them at a time, until it is told
        to stop.

        See `Subscription.run`. The concurrency is for all partitions together.
        """
        self._portal.run_handlers(
            lambda handle: self._inner.run(handle, concurrency=concurrency, grace=grace),
            lambda message: handler(Message(message, self._portal)),
            concurrency,
        )

    def receive_many(self, max_messages: int = 1000, timeout: timedelta | None = None) -> list[Message]:
        """Take what is there, at most `max_messages`, of all partitions; wait up to `timeout` for the first.

        See `Subscription.receive_many`.
        """
        return [
            Message(each, self._portal)
            for each in self._portal.run(self._inner.receive_many(max_messages, timeout))
        ]

    def ack_many(self, messages: Iterable[Message]) -> None:
        """Ack all of them; return when that is durable. Raises the first failure, if any."""
        self._portal.run(self._inner.ack_many([each._inner for each in messages]))

    def wait_confirmed(self) -> None:
        """Wait until everything asked for so far is durable. Raises the first failure of `ack_nowait`."""
        self._portal.run(self._inner.wait_confirmed())

    def stop(self) -> None:
        """Take no more: iteration ends, what was not taken goes back, acks still count."""
        self._portal.call(self._inner.stop)

    def close(self) -> None:
        """Take no more, wait until all acks are confirmed, and leave every partition. See `Subscription.close`."""
        self._portal.leave(self._inner.close())
