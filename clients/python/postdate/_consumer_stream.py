"""One consumer's part of its stream: what it asks the broker for, and what the broker tells it.

    Link -> ConsumerStream -> Held         what came and waits to be taken, and its leases
                           -> Permits      what the broker may send
                           -> Settlements  what was asked about messages, and is not confirmed

It answers the link, which makes one connection after another, and keeps the others in step with the connection. It
knows nothing of how messages are taken: `Inbox` does that, above it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from time import monotonic
from typing import cast

from postdate._deliveries import Deliveries
from postdate._held import Held
from postdate._link import Link
from postdate._permits import Permits
from postdate._rpc import Rpc
from postdate._settlement import RELEASE, Done, Settlements, Verb
from postdate._time import duration_ms, span
from postdate.errors import Closed, Disconnected, PostdateError
from postdate.message import Message
from postdate.model import InitialPosition, MessageId, SubscriptionType
from postdate_api.v1 import consumer_pb2

_KEEP = Verb("extend")  # by the consumer's own lease

_UNCONFIRMED = "the subscription was closed before the broker confirmed"

_log = logging.getLogger("postdate")


class Outages:
    """Tells the program, and its log, that a connection broke and that there is one again."""

    def __init__(self, whose: str, on_connection: Callable[[PostdateError | None], object] | None) -> None:
        self._whose = whose
        self._on_connection = on_connection
        self._was_up = False
        self._since: float | None = None  # monotonic; None: nobody was told of one

    def begin(self, error: PostdateError) -> None:
        """The connection broke, or another attempt failed."""
        if self._was_up and self._since is None:
            self._since = monotonic()
            self._tell(error, f"{error.message}; trying again")

    def end(self) -> None:
        """There is a connection."""
        self._was_up = True
        if self._since is not None:
            away_s = monotonic() - self._since
            self._since = None
            self._tell(None, f"connected again after {away_s:.1f} s")

    def _tell(self, error: PostdateError | None, what: str) -> None:
        _log.warning("%s: %s", self._whose, what)
        if self._on_connection is None:
            return
        try:
            self._on_connection(error)
        except Exception:
            _log.exception("on_connection failed")


def open_request(
    topic: str,
    name: str,
    *,
    kind: SubscriptionType | None,
    initial_position: InitialPosition | None,
    lease: timedelta | None,
    honor_delay: bool | None,
    consumer_name: str,
) -> consumer_pb2.Open:
    """Build what opens a stream, without its permits. None leaves a setting to the subscription."""
    request = consumer_pb2.Open(topic=topic, subscription=name, consumer_name=consumer_name)
    if kind is not None:
        request.type = cast(consumer_pb2.SubscriptionType, kind.value)
    if initial_position is not None:
        request.initial_position = cast(consumer_pb2.InitialPosition, initial_position.value)
    if lease is not None:
        request.lease_ms = duration_ms(lease, "lease")
    if honor_delay is not None:
        request.honor_delay = honor_delay
    return request


class ConsumerStream:
    """See the module's description. The `Peer` of its link, and the `Holder` of its messages."""

    def __init__(
        self,
        request: consumer_pb2.Open,
        kind: SubscriptionType,
        permits: Permits,
        changed: asyncio.Event,
        outages: Outages,
    ) -> None:
        self.topic: str = request.topic
        self.name: str = request.subscription
        self.kind: SubscriptionType = kind
        """The way in which messages are shared out, as the broker says."""
        self.permits: Permits = permits
        self.changed: asyncio.Event = changed
        """Messages arrived, or the state did change."""
        self.held: Held = Held(self._extend, monotonic)
        self.settlements: Settlements = Settlements(self.wake, self.held.extended)
        self.connection: int = 0  # counts up
        self.lease: timedelta = timedelta(0)
        self.consumer_id: str = ""
        self.is_stopped: bool = False  # no more will be handed out
        self.error: PostdateError | None = None
        """Its end for good."""
        self._open = request
        self._outages = outages
        self._drain = False
        self._unbegun: list[MessageId] = []  # to be handed back when it leaves, all at once
        self._link: Link | None = None

    # -- life ------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True from `open` until it was left."""
        return self._link is not None

    async def open(self, rpc: Rpc) -> None:
        """Connect; return once the broker has answered. Raises what makes that no use."""
        self._link = Link(rpc, self.topic, self)
        self.settlements.open()
        try:
            while not self.settlements.is_connected and self.error is None and not self.is_stopped:
                await self.wait_change()
            if self.error is not None:
                raise self.error
        except asyncio.CancelledError:
            await self._link.abort()
            raise

    def stop(self) -> None:
        """Take no more of the broker: what was not taken goes back, acks still count."""
        self.hand_back(self.held.ready)
        self.end_taking()
        self._drain = True
        self.wake()

    def end_taking(self) -> None:
        """Hand out no more."""
        self.is_stopped = True
        self.held.ready.clear()
        self.changed.set()

    async def close(self, patience_s: float) -> None:
        """Wait for what was asked for, and leave: what is not settled goes back uncounted. It was stopped before."""
        assert self._link is not None
        barriers = self.settlements.barriers(asyncio.get_running_loop().create_future)
        if barriers and self.error is None:
            await asyncio.wait(barriers, timeout=patience_s)
        if self.settlements.is_connected:
            await self._link.close()
        else:
            await self._link.abort()
        self._end(Disconnected(_UNCONFIRMED))

    async def leave(self, patience_s: float) -> None:
        """Hand back what was not taken, and cut the connection: what was taken and is not settled counts."""
        assert self._link is not None
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + patience_s
        try:
            waits = self.settlements.barriers(loop.create_future)
            if self.settlements.is_connected:
                heard = self.hear()  # that all has arrived that was sent before the broker knew
                heard.add_done_callback(lambda done: done.cancelled() or done.exception())
                waits.append(heard)
            while waits and self.error is None:
                _, late = await asyncio.wait(waits, timeout=max(0.0, give_up_at - loop.time()))
                if late:
                    break
                if self._unbegun and self.settlements.is_connected:
                    self.settlements.add(RELEASE, self._unbegun)
                    self._unbegun = []
                waits = self.settlements.barriers(loop.create_future)
        finally:
            await self._link.abort()
            self._end(Disconnected(_UNCONFIRMED))

    async def abort(self) -> None:
        """Cut the connection, and await nothing but what ends at once."""
        self.end_taking()
        if self._link is not None:
            await self._link.abort()
        self._end(Closed("the subscription was closed"))

    def _end(self, error: PostdateError) -> None:
        self.held.disconnected()
        self.settlements.close(error)
        self._link = None

    # -- what whoever takes messages asks --------------------------------------------------------------------

    def wake(self) -> None:
        """There is something to send."""
        if self._link is not None:
            self._link.wake()

    async def wait_change(self) -> None:
        """Return once messages arrived, or the state changed."""
        if self._link is None:
            raise RuntimeError(
                "the subscription is used before `with client.subscribe(...) as subscription:` or `open()`"
            )
        self.changed.clear()
        await self.changed.wait()

    def hand_back(self, messages: Iterable[Message]) -> None:
        """Give to others what was not begun; at once, as handlers take long, or in order at the end."""
        ids = [message.id for message in messages]
        if self.kind is not SubscriptionType.SHARED:
            self._unbegun += ids
        elif ids and self.settlements.is_connected:
            self.settlements.add(RELEASE, ids)

    def hear(self) -> Done:
        """Ask for an answer, which comes behind what was sent before."""
        heard: Done = asyncio.get_running_loop().create_future()
        self.settlements.add(_KEEP, (), heard)
        return heard

    # -- Holder: what messages ask ---------------------------------------------------------------------------

    async def settle(self, verb: Verb, ids: Sequence[tuple[int, int]]) -> None:
        await self.settlements.settle(verb, ids)

    def settle_nowait(self, verb: Verb, ids: Sequence[tuple[int, int]]) -> None:
        self.settlements.settle_nowait(verb, ids)

    def ack_nowait(self, message: Message) -> None:
        settlements = self.settlements
        if settlements.refusal is not None:  # looked at here first: a call costs more
            settlements.check()
        message.is_settled = True
        deliveries, place = message.deliveries, message.place
        settlements.add_ack(deliveries.ledger_ids[place], deliveries.entry_ids[place])

    def keep(self, message: Message) -> None:
        self.held.keep(message)

    def let_go(self, message: Message) -> None:
        self.held.let_go(message)

    def _extend(self, ids: Sequence[MessageId]) -> None:
        self.settlements.add(_KEEP, ids)

    # -- Peer: what the link asks and tells ------------------------------------------------------------------

    def open_frame(self) -> consumer_pb2.SubscribeRequest:
        self.connection += 1
        # Acks from the connection before are settled first, or what they are about would be given
        # out once more. `opened` sees to the permits then.
        waits = self.is_stopped or not self.settlements.empty
        self._open.permits.messages = self.permits.connect(held=waits)
        return consumer_pb2.SubscribeRequest(open=self._open)

    def next_frame(self) -> consumer_pb2.SubscribeRequest | None:
        if self._drain:  # before anything is handed back, or it would come here again
            self._drain = False
            return consumer_pb2.SubscribeRequest(drain=consumer_pb2.Drain())
        if (frame := self.settlements.next_frame()) is not None:
            return frame
        if not self.is_stopped and (unsent := self.permits.take_unsent()):
            return consumer_pb2.SubscribeRequest(permits=consumer_pb2.Permits(messages=unsent))
        return None

    def opened(self, opened: consumer_pb2.Opened) -> None:
        self.consumer_id = opened.consumer_id
        self.lease = span(opened.lease_ms)
        self.held.connected(self.lease)
        self.settlements.connected(opened.ack_entries_max)
        if opened.type:
            self.kind = SubscriptionType(opened.type)
        self.changed.set()
        self._outages.end()
        if self.permits.are_held:
            barriers = self.settlements.barriers(asyncio.get_running_loop().create_future)
            connection = self.connection
            settled = asyncio.gather(*barriers)
            settled.add_done_callback(lambda _: self._release(connection))

    def _release(self, connection: int) -> None:
        """The acks of an earlier connection are settled: now messages may come."""
        if connection == self.connection and self.settlements.is_connected and self.permits.release():
            self.wake()

    def arrived(self, deliveries: Deliveries) -> None:
        if self.is_stopped:  # they were on their way
            self.hand_back(Message(deliveries, place, self) for place in range(len(deliveries)))
            return
        self.held.arrived(deliveries, self)
        self.changed.set()

    def confirmed(self, confirmed: consumer_pb2.Confirmed) -> None:
        self.settlements.confirm(confirmed)

    def draining(self) -> None:
        # The broker stops, or the subscription was moved or changed. What nobody has begun to work on may be
        # settled by a seek, and comes again if it is not.
        self.held.ready.clear()

    def disconnected(self, error: PostdateError) -> None:
        self.held.ready.clear()  # the broker gives them out anew
        self._unbegun.clear()
        self.held.disconnected()
        self.settlements.disconnected(error)
        self._outages.begin(error)

    def failed(self, error: PostdateError) -> None:
        self.error = error
        self.held.disconnected()
        self.settlements.give_up(error)
        self.changed.set()
