"""Receives the messages of one subscription, on a stream with permits and confirmed acks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from weakref import WeakSet

from postdate._consumer_stream import ConsumerStream, Outages, open_request
from postdate._inbox import PERMITS, Inbox, run_permits, take_within
from postdate._permits import Permits
from postdate._rpc import Rpc
from postdate._runner import Handler, Runner
from postdate._settlement import ACK
from postdate._sigterm import add_consumer, remove_consumer, returning_on_sigterm
from postdate.errors import PostdateError
from postdate.message import Message
from postdate.model import InitialPosition, MessageId, SubscriptionType

_LEAVE_S = 1.0
"""Seconds that a program that is cancelled waits for the broker to take back what was not begun."""

entered: WeakSet[Subscription] = WeakSet()
"""Those of this process, for `postdate.testing`: it has to know what they hold."""


class Subscription:
    """One consumer of a subscription; made by `Client.subscribe`.

    Iterate over it, or call `receive_many`; several tasks may do so at once. The broker sends no
    more than `permits` messages ahead of what was taken, and none before the first is asked for unless `permits`
    was given.

    When the connection breaks, it is made again for as long as it takes. Messages that were not
    taken yet are forgotten, because the broker gives them out anew; acks that were not confirmed
    are sent again; nacks and extensions raise `Disconnected`, because the lease is gone.

    SIGTERM ends iteration after the current message, where the block was opened in the main thread and nobody else
    handles it; once the block is left, the program ends by it. A second SIGTERM ends it at once.

    Whatever ends it, messages that were not taken yet are handed back, and that delivery of them does not count
    as an attempt. Of those that were taken and not settled it counts if an exception ends the block: the next one
    could fail at the same message for ever. `Message.release` hands such a one back uncounted.

    The leases of messages that were not taken yet, and of those inside `Message.processing`, are kept
    as long as the connection lives. A message that lost its lease all the same is not handed out.
    """

    def __init__(
        self,
        rpc: Rpc,
        topic: str,
        name: str,
        *,
        kind: SubscriptionType | None,
        initial_position: InitialPosition | None,
        permits: int | None,
        lease: timedelta | None,
        honor_delay: bool | None,
        consumer_name: str,
        limit: int | None,
        on_connection: Callable[[PostdateError | None], object] | None = None,
        changed: asyncio.Event | None = None,
    ) -> None:
        self.topic = topic
        self.name = name
        self._rpc = rpc
        request = open_request(
            topic,
            name,
            kind=kind,
            initial_position=initial_position,
            lease=lease,
            honor_delay=honor_delay,
            consumer_name=consumer_name,
        )
        self._stream = ConsumerStream(
            request,
            kind or SubscriptionType.SHARED,
            Permits(permits, limit),
            changed or asyncio.Event(),
            Outages(f"subscription {name} of topic {topic}", on_connection),
        )
        self.inbox: Inbox = Inbox(self._stream)
        """For `PartitionedSubscription`."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """On which it was opened."""

    @property
    def lease(self) -> timedelta:
        """The time that a message may be held."""
        return self._stream.lease

    @property
    def effective_type(self) -> SubscriptionType:
        """The way in which messages are shared out, as the broker says."""
        return self._stream.kind

    @property
    def consumer_id(self) -> str:
        """The broker's name for this consumer; another one after each reconnect."""
        return self._stream.consumer_id

    @property
    def address(self) -> str:
        """For `postdate.testing`: the broker's."""
        return self._rpc.address

    async def __aenter__(self) -> Subscription:
        await self.open()
        return self

    async def open(self) -> None:
        """Begin, in place of a `with` block: for a consumer that is kept for as long as the program runs.

        Returns once the broker has answered. `close` ends it, as leaving the block would.
        """
        if self.loop is not None:
            raise RuntimeError("a subscription is opened once")
        self.loop = asyncio.get_running_loop()
        entered.add(self)
        add_consumer(self, self._terminated)
        try:
            await self._stream.open(self._rpc)
        except BaseException:
            remove_consumer(self)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._exit(kind, error)
        finally:
            remove_consumer(self)

    async def _exit(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        if kind is None:
            await self.close()
        elif issubclass(kind, Exception):
            try:
                await self._leave(max(1.0, self._rpc.retry_for_s))
            except PostdateError as fault:
                assert error is not None
                error.add_note(f"closing the subscription failed too: {fault}")
        elif issubclass(kind, GeneratorExit):
            await self._stream.abort()  # nothing may be awaited any more but what ends at once
        else:
            with suppress(PostdateError):
                await self._leave(_LEAVE_S if self._stream.settlements.is_connected else 0.0)

    async def _leave(self, patience_s: float) -> None:
        """Hand back what was not taken, and cut the connection: what was taken and is not settled counts."""
        if not self._stream.is_open:
            return
        self.stop()
        try:
            await self._stream.leave(patience_s)
        finally:
            self._stream.settlements.raise_faults()

    def __aiter__(self) -> AsyncIterator[Message]:
        return self.inbox

    async def __anext__(self) -> Message:
        return await self.inbox.__anext__()

    async def run(
        self, handler: Handler, *, concurrency: int = 16, grace: timedelta = timedelta(seconds=30)
    ) -> None:
        """Call `handler` for each message, for at most `concurrency` of them at a time, until it is told to stop.

        A message is acked when its handler returns and nacked when it raises, with the exception's text as the
        reason; the exception goes to the log `postdate`. A handler that settles its message itself is left alone.
        Leases are kept however long it takes. With KEY_SHARED, messages of one key run one after the other.

        `stop`, a `limit` that is reached, SIGTERM (in the main thread, if nobody else handles it) and a
        cancellation stop it: handlers that run have `grace` to finish and are cancelled then. What was not begun
        goes back to the broker and counts as no attempt, of a SHARED subscription at once, of another when it is
        closed. It returns then; cancelled, it raises `CancelledError`. A second cancellation cancels the handlers at
        once. It raises what ends the subscription for good, such as `NotFound`.
        """
        runner = Runner(self.inbox, handler, concurrency=concurrency, grace=grace)
        self.inbox.begin(run_permits(self._stream.kind, concurrency))
        with returning_on_sigterm():
            await runner.run()

    async def receive_many(self, max_messages: int = 1000, timeout: timedelta | None = None) -> list[Message]:
        """Take what is there, at most `max_messages`; wait up to `timeout` for the first.

        None waits as long as it takes. An empty list means that the time is up, or that the
        subscription was closed. After SIGTERM, a program that asks again with a timeout gets `Closed`.
        """
        if max_messages < 1:
            raise ValueError("max_messages is at least 1")
        self.inbox.begin(PERMITS)
        await self.inbox.note_asked(timeout)
        return await take_within(self.inbox, self.inbox.take, max_messages, timeout)

    async def ack_many(self, messages: Iterable[Message]) -> None:
        """Ack all of them; return when that is durable. Raises the first failure, if any."""
        ids: list[tuple[int, int]] = []
        for message in messages:
            message.is_settled = True
            deliveries, place = message.deliveries, message.place
            # A MessageId costs six times that.
            ids.append((deliveries.ledger_ids[place], deliveries.entry_ids[place]))
        if ids:
            await self._stream.settle(ACK, ids)

    def ack_nowait(self, message: Message) -> None:
        """Ack it without waiting. `wait_confirmed` and `close` wait for all such acks.

        This is the fast way for consumers that take message after message in one task.
        """
        self._stream.ack_nowait(message)

    async def wait_confirmed(self) -> None:
        """Wait until everything asked for so far is durable. Raises the first failure of `ack_nowait`."""
        await self._stream.settlements.wait_confirmed()

    def stop(self) -> None:
        """Take no more: iteration ends, what was not taken goes back, acks still count."""
        self.inbox.stop()

    async def close(self) -> None:
        """Take no more, wait until all acks are confirmed, and leave.

        Messages that were not settled go back to the broker, uncounted: a consumer that closes in good order has
        failed at none of them. Waits for a broker that is away up to the client's `retry_for`; what is not
        confirmed by then raises.
        """
        if not self._stream.is_open:
            return
        self.stop()
        await self._stream.close(max(1.0, self._rpc.retry_for_s))
        remove_consumer(self)
        self._stream.settlements.raise_faults()

    async def kept(self) -> list[MessageId]:
        """For `postdate.testing`: `inbox.kept`."""
        return await self.inbox.kept()

    def _terminated(self) -> None:
        """SIGTERM, in the main thread: stop, on the loop."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.stop)
        self.inbox.note_sigterm()
