"""Receives the messages of one subscription, on a stream with permits and confirmed acks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from types import TracebackType
from typing import cast
from weakref import WeakSet

from postdate._held import Held
from postdate._link import Link
from postdate._permits import Permits
from postdate._rpc import Rpc
from postdate._runner import Handler, Runner, Source
from postdate._settlement import ACK, RELEASE, Done, Settlements, Verb
from postdate._sigterm import add_consumer, remove_consumer, returning_on_sigterm
from postdate._time import duration_ms, span
from postdate.errors import Closed, Disconnected, PostdateError
from postdate.message import Message
from postdate.model import InitialPosition, MessageId, SubscriptionType
from postdate_api.v1 import consumer_pb2

_KEEP = Verb("extend")  # by the consumer's own lease
PERMITS = 1000
_PERMITS_A_HANDLER = 4
_LEAVE_S = 1.0
"""Seconds that a program that is cancelled waits for the broker to take back what was not begun."""

_log = logging.getLogger("postdate")

entered: WeakSet[Subscription] = WeakSet()
"""Those of this process, for `postdate.testing`: it has to know what they hold."""


def run_permits(kind: SubscriptionType, concurrency: int) -> int:
    """Permits of a `run`, unless they were given."""
    # More would starve other workers; but keys have one worker, and a hot one must not hold up the others.
    return PERMITS if kind is SubscriptionType.KEY_SHARED else _PERMITS_A_HANDLER * concurrency


async def take_within(
    source: Source, take: Callable[[int], list[Message]], max_messages: int, timeout: timedelta | None
) -> list[Message]:
    """Take what is there; wait for the first. An empty list: the time is up, or the subscription ended."""
    give_up_at = None if timeout is None else asyncio.get_running_loop().time() + timeout.total_seconds()
    while not (messages := take(max_messages)) and not source.is_stopped:
        try:
            async with asyncio.timeout_at(give_up_at):
                await source.wait_change()
        except TimeoutError:
            return []
    return messages


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
        self._permits = Permits(permits, limit)
        self._on_connection = on_connection
        self._broken_at: float | None = None
        self._open = consumer_pb2.Open(topic=topic, subscription=name, consumer_name=consumer_name)
        if kind is not None:
            self._open.type = cast(consumer_pb2.SubscriptionType, kind.value)
        if initial_position is not None:
            self._open.initial_position = cast(consumer_pb2.InitialPosition, initial_position.value)
        if lease is not None:
            self._open.lease_ms = duration_ms(lease, "lease")
        if honor_delay is not None:
            self._open.honor_delay = honor_delay
        self.connection: int = 0  # counts up
        self._drain = False
        self.yield_due: bool = False
        """Its taker must let the loop turn before it takes more."""
        self._lease = timedelta(0)
        self._type = kind or SubscriptionType.SHARED
        self._consumer_id = ""
        self._connected = False
        self.is_stopped: bool = False  # no more will be handed out
        self._is_terminated = False  # by SIGTERM
        self._was_told = False  # that there will be no more
        self.stop_asked: bool = False  # by `stop`, and not because the limit was reached
        self._unbegun: list[MessageId] = []  # to be handed back when it leaves, all at once
        self._error: PostdateError | None = None
        self._changed = changed or asyncio.Event()  # messages arrived, or the state did change
        self._link: Link | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        """On which it was opened."""
        self._held = Held(self._extend, monotonic)
        self._ready = self._held.ready
        self._settlements = Settlements(self._wake, self._held.extended)

    @property
    def permits_max(self) -> int:
        """For `Runner`: how many messages the broker sends ahead of what was taken; 0: not known yet."""
        return self._permits.most

    @property
    def lease(self) -> timedelta:
        """The time that a message may be held."""
        return self._lease

    @property
    def effective_type(self) -> SubscriptionType:
        """The way in which messages are shared out, as the broker says."""
        return self._type

    @property
    def consumer_id(self) -> str:
        """The broker's name for this consumer; another one after each reconnect."""
        return self._consumer_id

    async def __aenter__(self) -> Subscription:
        await self.open()
        return self

    async def open(self) -> None:
        """Begin, in place of a `with` block: for a consumer that is kept for as long as the program runs.

        Returns once the broker has answered. `close` ends it, as leaving the block would.
        """
        if self.loop is not None:
            raise RuntimeError("a subscription is opened once")
        self._link = Link(self._rpc, self.topic, self)
        self.loop = asyncio.get_running_loop()
        entered.add(self)
        add_consumer(self, self._terminated)
        try:
            while not self._connected and self._error is None and not self.is_stopped:
                await self.wait_change()
            if self._error is not None:
                raise self._error
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                await self._link.abort()
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
            await self._abort()  # nothing may be awaited any more but what ends at once
        else:
            with suppress(PostdateError):
                await self._leave(_LEAVE_S if self._connected else 0.0)

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Message:
        if self.yield_due:
            # A consumer that never waits must not keep the link from sending and receiving.
            self.yield_due = False
            await asyncio.sleep(0)
        held = self._held
        if not held.ready or held.clock() >= held.sound_until:  # looked at here first: a call costs more
            self.begin(PERMITS)
            while not self._has_ready():
                if self.is_stopped:
                    raise StopAsyncIteration
                if self._error is not None:
                    raise self._error
                await self.wait_change()
        message, permits = self._ready.popleft(), self._permits
        permits.taken += 1
        if permits.left is not None:
            self._spend(1)
        if permits.taken * 2 >= permits.most:
            self._give_back()
            self.yield_due = True
        return message

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
        runner = Runner(self, handler, concurrency=concurrency, grace=grace)
        self.begin(run_permits(self._type, concurrency))
        with returning_on_sigterm():
            await runner.run()

    async def receive_many(self, max_messages: int = 1000, timeout: timedelta | None = None) -> list[Message]:
        """Take what is there, at most `max_messages`; wait up to `timeout` for the first.

        None waits as long as it takes. An empty list means that the time is up, or that the
        subscription was closed. After SIGTERM, a program that asks again with a timeout gets `Closed`.
        """
        if max_messages < 1:
            raise ValueError("max_messages is at least 1")
        self.begin(PERMITS)
        await self.note_asked(timeout)
        return await take_within(self, self.take_ready, max_messages, timeout)

    async def note_asked(self, timeout: timedelta | None) -> None:
        """For `PartitionedSubscription`: raise Closed for who asks again with a timeout after SIGTERM."""
        if self._is_terminated:
            await asyncio.sleep(0)  # `stop` comes first
            if self._was_told and timeout is not None:  # it takes the time to be up, and would ask for ever
                raise Closed("SIGTERM stopped the subscription")
            self._was_told = True

    def take_ready(self, max_messages: int) -> list[Message]:
        """For `PartitionedSubscription`: take what is there; raises what ended it for good, once there is nothing."""
        if not self._has_ready():
            if self._error is not None and not self.is_stopped:
                raise self._error
            return []
        ready = self._ready
        messages = [ready.popleft() for _ in range(min(max_messages, len(ready)))]
        permits = self._permits
        permits.taken += len(messages)
        if permits.left is not None:
            self._spend(len(messages))
        if permits.taken * 2 >= permits.most:
            self._give_back()
            self.yield_due = True
        return messages

    async def ack_many(self, messages: Iterable[Message]) -> None:
        """Ack all of them; return when that is durable. Raises the first failure, if any."""
        ids: list[tuple[int, int]] = []
        for message in messages:
            message.is_settled = True
            message_id = message.delivery.id
            ids.append((message_id.ledger_id, message_id.entry_id))  # a MessageId costs six times that
        if ids:
            await self.settle(ACK, ids)

    def ack_nowait(self, message: Message) -> None:
        """Ack it without waiting. `wait_confirmed` and `close` wait for all such acks.

        This is the fast way for consumers that take message after message in one task.
        """
        if self._error is not None or self.is_stopped:
            self._check_usable()
        message.is_settled = True
        message_id = message.delivery.id
        self._settlements.add_ack(message_id.ledger_id, message_id.entry_id)

    async def wait_confirmed(self) -> None:
        """Wait until everything asked for so far is durable. Raises the first failure of `ack_nowait`."""
        barriers = self._settlements.barriers(asyncio.get_running_loop().create_future)
        if barriers:
            await asyncio.wait(barriers)
        self._raise_faults()

    def stop(self) -> None:
        """Take no more: iteration ends, what was not taken goes back, acks still count."""
        self.stop_asked = True
        self.finish()

    def finish(self) -> None:
        """For `PartitionedSubscription`: take no more, as `stop` does, without having been asked to."""
        self.hand_back(self._ready)
        self._stop()
        self._drain = True
        self._wake()

    async def close(self) -> None:
        """Take no more, wait until all acks are confirmed, and leave.

        Messages that were not settled go back to the broker, uncounted: a consumer that closes in good order has
        failed at none of them. Waits for a broker that is away up to the client's `retry_for`; what is not
        confirmed by then raises.
        """
        if self._link is None:
            return
        self.stop()
        barriers = self._settlements.barriers(asyncio.get_running_loop().create_future)
        if barriers and self._error is None:
            await asyncio.wait(barriers, timeout=max(1.0, self._rpc.retry_for_s))
        if self._connected:
            await self._link.close()
        else:
            await self._link.abort()
        self._end()

    async def _leave(self, patience_s: float) -> None:
        """Hand back what was not taken, and cut the connection: what was taken and is not settled counts."""
        link = self._link
        if link is None:
            return
        self.stop()
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + patience_s
        try:
            waits = self._settlements.barriers(loop.create_future)
            if self._connected:
                # The answer to this one says that all has arrived that was sent before the broker knew.
                heard: Done = loop.create_future()
                heard.add_done_callback(lambda done: done.cancelled() or done.exception())
                self._settlements.add(_KEEP, (), heard)
                waits.append(heard)
            while waits and self._error is None:
                _, late = await asyncio.wait(waits, timeout=max(0.0, give_up_at - loop.time()))
                if late:
                    break
                if self._unbegun and self._connected:
                    self._settlements.add(RELEASE, self._unbegun)
                    self._unbegun = []
                waits = self._settlements.barriers(loop.create_future)
        finally:
            await link.abort()
            self._end()

    def _end(self) -> None:
        self._held.disconnected()
        self._settlements.give_up(Disconnected("the subscription was closed before the broker confirmed"))
        self._link = None
        remove_consumer(self)
        self._raise_faults()

    def hand_back(self, messages: Iterable[Message]) -> None:
        """For `Runner`: give to others what was not begun; at once, as handlers take long, or in order at the end."""
        ids = [message.id for message in messages]
        if self._type is not SubscriptionType.SHARED:
            self._unbegun += ids
        elif ids and self._connected:
            self._settlements.add(RELEASE, ids)

    async def settle(self, verb: Verb, ids: Sequence[tuple[int, int]]) -> None:
        """For `Message`: ask, and wait for the confirmation."""
        self._check_usable(verb)
        done: Done = asyncio.get_running_loop().create_future()
        self._settlements.add(verb, ids, done)
        await done

    def settle_nowait(self, verb: Verb, ids: Sequence[MessageId]) -> None:
        """For `Message`: ask without waiting."""
        if self._connected and self._link is not None:
            self._settlements.add(verb, ids)

    def keep(self, message: Message) -> None:
        """For `Message`: extend its lease until `let_go`."""
        self._held.keep(message)

    def let_go(self, message: Message) -> None:
        """For `Message`: extend it no more."""
        self._held.let_go(message)

    @property
    def address(self) -> str:
        """For `postdate.testing`: the broker's."""
        return self._rpc.address

    # What the link asks and tells.

    def open_frame(self) -> consumer_pb2.SubscribeRequest:
        self.connection += 1
        # Acks from the connection before are settled first, or what they are about would be given
        # out once more. `opened` sees to the permits then.
        waits = self.is_stopped or not self._settlements.empty
        self._open.permits.messages = self._permits.connect(held=waits)
        return consumer_pb2.SubscribeRequest(open=self._open)

    def _terminated(self) -> None:
        """SIGTERM, in the main thread: stop, on the loop."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.stop)
        self._is_terminated = True
        self.yield_due = True  # or a consumer that never waits would take more before the loop gets to it

    def begin(self, permits: int) -> None:
        """For `PartitionedSubscription`: ask for messages, if that was left to how they are taken."""
        if self._permits.begin(permits, is_connected=self._connected and not self.is_stopped):
            self._wake()

    def next_frame(self) -> consumer_pb2.SubscribeRequest | None:
        if self._drain:  # before anything is handed back, or it would come here again
            self._drain = False
            return consumer_pb2.SubscribeRequest(drain=consumer_pb2.Drain())
        if (frame := self._settlements.next_frame()) is not None:
            return frame
        if not self.is_stopped and (unsent := self._permits.take_unsent()):
            return consumer_pb2.SubscribeRequest(permits=consumer_pb2.Permits(messages=unsent))
        return None

    def opened(self, opened: consumer_pb2.Opened) -> None:
        self._consumer_id = opened.consumer_id
        self._lease = span(opened.lease_ms)
        self._held.connected(self._lease)
        self._settlements.limit(opened.ack_entries_max)
        if opened.type:
            self._type = SubscriptionType(opened.type)
        self._connected = True
        self._changed.set()
        if self._broken_at is not None:
            away_s = monotonic() - self._broken_at
            self._broken_at = None
            self._tell(None, f"connected again after {away_s:.1f} s")
        if self._permits.are_held:
            barriers = self._settlements.barriers(asyncio.get_running_loop().create_future)
            connection = self.connection
            settled = asyncio.gather(*barriers)
            settled.add_done_callback(lambda _: self._release(connection))

    def arrived(self, deliveries: Sequence[consumer_pb2.Delivery]) -> None:
        if self.is_stopped:  # they were on their way
            self.hand_back(Message(delivery, self) for delivery in deliveries)
            return
        self._held.arrived(deliveries, self)
        self._changed.set()

    def confirmed(self, confirmed: consumer_pb2.Confirmed) -> None:
        self._settlements.confirm(confirmed)

    def draining(self) -> None:
        # The broker stops, or the subscription was moved or changed. What nobody has begun to work on may be
        # settled by a seek, and comes again if it is not.
        self._ready.clear()

    def disconnected(self, error: PostdateError) -> None:
        self._connected = False
        if self._broken_at is None:
            self._broken_at = monotonic()
            self._tell(error, f"{error.message}; trying again")
        self._ready.clear()  # the broker gives them out anew
        self._unbegun.clear()
        self._held.disconnected()
        self._settlements.disconnected(error)

    def failed(self, error: PostdateError) -> None:
        self._connected = False
        self._error = error
        self._held.disconnected()
        self._settlements.give_up(error)
        self._changed.set()

    def _tell(self, error: PostdateError | None, what: str) -> None:
        _log.warning("subscription %s of topic %s: %s", self.name, self.topic, what)
        if self._on_connection is None:
            return
        try:
            self._on_connection(error)
        except Exception:
            _log.exception("on_connection failed")

    def _release(self, connection: int) -> None:
        """The acks of an earlier connection are settled: now messages may come."""
        if connection == self.connection and self._connected and self._permits.release():
            self._wake()

    def _has_ready(self) -> bool:
        """Tell whether there is a message whose lease holds; what has lost it is dropped and paid back."""
        if self._ready and self._held.clock() >= self._held.sound_until:
            self._permits.lose(self._held.drop_lost())
            self._give_back()
        return bool(self._ready)

    async def kept(self) -> list[MessageId]:
        """For `postdate.testing`: all whose leases are kept, once everything has arrived that the broker has sent."""
        if not self._connected:
            return []
        self.begin(PERMITS)  # what comes due while a test sets its clock forward has to arrive
        done: Done = asyncio.get_running_loop().create_future()
        self._settlements.add(_KEEP, (), done)  # its answer comes behind what was sent before
        try:
            await done
        except PostdateError:
            return []
        return self._held.kept()

    def connection_of(self, message: Message) -> int:
        """For `Runner`: the number of the connection that there is now."""
        return self.connection

    def holds(self, message: Message) -> bool:
        """For `Runner`: tell whether its lease holds, as far as one can know here."""
        return self._connected and message.held_until > self._held.clock()

    def _extend(self, ids: Sequence[MessageId]) -> None:
        self._settlements.add(_KEEP, ids)

    def _give_back(self) -> None:
        if self._permits.give_back():
            self._wake()

    def _spend(self, count: int) -> None:
        """Count what was taken against the limit; the last of it ends the iteration (PERMITS-2)."""
        permits = self._permits
        assert permits.left is not None
        permits.left -= count
        if permits.left <= 0:
            self._stop()

    def note_change(self) -> None:
        """For `Runner`: wake who waits for a change."""
        self._changed.set()

    async def wait_change(self) -> None:
        """For `Runner`: return once messages arrived, or the state changed."""
        if self._link is None:
            raise RuntimeError(
                "the subscription is used before `with client.subscribe(...) as subscription:` or `open()`"
            )
        self._changed.clear()
        await self._changed.wait()

    def _wake(self) -> None:
        if self._link is not None:
            self._link.wake()

    def _stop(self) -> None:
        self.is_stopped = True
        self._ready.clear()
        self._changed.set()

    def _check_usable(self, verb: Verb = ACK) -> None:
        if self._link is None:
            raise Closed("the subscription is closed")
        if self._error is not None:
            raise self._error
        if verb is not ACK and not self._connected:
            raise Disconnected("the connection is broken, and the lease with it")

    def _raise_faults(self) -> None:
        faults, count = self._settlements.take_faults()
        if faults:
            if count > 1:
                faults[0].add_note(f"{count - 1} more acks failed")
            raise faults[0]

    async def _abort(self) -> None:
        self._stop()
        if self._link is not None:
            await self._link.abort()
            self._link = None
        self._held.disconnected()
        self._settlements.give_up(Closed("the subscription was closed"))
