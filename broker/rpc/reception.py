"""Reception of every call: it takes a place, and then its first message is read, within a time and a budget.

gRPC's own way of serving a unary method reads the message before any code of ours runs, for as long as that takes and
up to the greatest request, for everybody. Here all methods are served as streams, which is the same on the wire: what
stands before this (`AccessInterceptor`) sees a call by its headers alone, and nothing is read for whoever is refused.

Invariants:
  RECEPTION-1  Calls of each kind (`CallKind`) are bounded, and none takes the place of another kind.
  RECEPTION-2  A call that has sent no message yet gives way to a new call where all places are taken: the oldest one
      of the connection that has most of them. So whoever has fewer such calls than another connection keeps them.
  RECEPTION-3  Messages that arrive at once are bounded (`Turns`). A call without a turn is not read, and gRPC takes
      no more of it than one window (`window_bytes`); such calls of a kind are bounded (`begun_max`), and give way as
      in RECEPTION-2. A call that ends before its message was read has its turn until it is gone: until then gRPC
      holds what has arrived.
  RECEPTION-4  Connections have turns in turn. While others wait, a turn may last as long as lets all of them have one
      within `_TURN_SECONDS` or `_PROBE_SECONDS`, but not less than `_TURN_SECONDS_MIN`. So calls that only begin, on
      C connections and however many, delay a call of another one by C * _TURN_SECONDS_MIN / turns, if that is longer.
  RECEPTION-5  Of the later messages of streams a round of the loop handles a bounded amount (`LoopShare`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import AsyncIterator
from enum import Enum
from operator import itemgetter
from typing import Any

import grpc

from broker.config import BrokerConfig
from broker.errors import InvalidRequest, LimitReached, PostdateError, forget_frames
from broker.rpc.access_rules import RULES
from broker.rpc.calls import END_OF_STREAM, CallHost, refuse
from broker.rpc.loop_share import SMALL_BYTES, LoopShare
from broker.rpc.silent import SilentConnections
from broker.rpc.status import Context
from broker.rpc.unfinished_messages import Arrivals, UnfinishedMessages
from broker.runtime.allocator import Trimmer
from broker.runtime.foreground import Foreground


class CallKind(Enum):
    """Calls that share places."""

    PROBE = "probes"  # open to all
    SHORT = "calls"
    LONG = "streams"  # and calls that wait


_PROBES_MAX = 5_000
_PROBE_TURNS = 16
_PROBE_SECONDS = 0.5
_SHORT_MAX = 5_000
_TURN_SECONDS = 1.0
"""Within this time everybody who waits shall have a turn."""
_TURN_SECONDS_MIN = 0.03
"""A message that has arrived is read sooner."""

_WINDOW_BYTES_MIN = 1 << 16
_WINDOW_BYTES_MAX = 1 << 18
_BEGUN_MIN = 64
"""Callers who come all at once are read at once: of 5,000 calls a handful wait."""

TRIM_SECONDS = 2.0
"""After a call that ended before its message was whole, or failed with large ones, memory is given back."""
_LARGE_BYTES = 256 << 10
_COSTS = {"/postdate.v1.ConsumerService/Subscribe": 32}
"""Of a byte of later messages: consumers name messages in a byte or two, and each of them may be refused."""


class Shares:
    """Calls by connection; knows which connection has most of them."""

    def __init__(self) -> None:
        self._calls: dict[str, OrderedDict[BegunCall, None]] = {}  # by connection; the oldest first
        self._peers: dict[int, OrderedDict[str, None]] = {}  # by how many calls they have
        self._most = 0
        self.count = 0

    def add(self, place: BegunCall) -> None:
        self.count += 1
        calls = self._calls.setdefault(place.peer, OrderedDict())
        self._move(place.peer, len(calls), len(calls) + 1)
        calls[place] = None

    def discard(self, place: BegunCall) -> None:
        calls = self._calls.get(place.peer)
        if calls is None or place not in calls:
            return
        self.count -= 1
        self._move(place.peer, len(calls), len(calls) - 1)
        del calls[place]
        if not calls:
            del self._calls[place.peer]

    def lead(self, peer: str) -> int:
        """By how many calls another connection is ahead of this one."""
        return self._most - len(self._calls.get(peer, ()))

    def oldest_of_most(self) -> BegunCall | None:
        """The oldest call of the connection that has most of them."""
        if not self._most:
            return None
        return next(iter(self._calls[next(iter(self._peers[self._most]))]))

    def _move(self, peer: str, before: int, after: int) -> None:
        if before:
            peers = self._peers[before]
            del peers[peer]
            if not peers:
                del self._peers[before]
        if after:
            self._peers.setdefault(after, OrderedDict())[peer] = None
        if after > self._most or self._most not in self._peers:
            self._most = after


class Turns:
    """Calls whose message is being read. When all turns are taken, connections have them in turn."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._held: dict[BegunCall, float] = {}  # since when its connection has the turn
        self._shares = Shares()  # of what is held, without those that are ending
        self._ending: set[BegunCall] = set()  # held until their calls have gone
        self._queue: OrderedDict[str, OrderedDict[BegunCall, asyncio.Future[None]]] = (
            OrderedDict()
        )  # by connection
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, place: BegunCall) -> None:
        """Wait for a turn."""
        if len(self._held) < self._most:
            self._hold(place, _now())
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.setdefault(place.peer, OrderedDict())[place] = turn
        if self._shares.lead(place.peer) >= 2 and (greedy := self._shares.oldest_of_most()) is not None:
            self._end(greedy)
            self._queue.move_to_end(place.peer, last=False)
        self._watch()
        try:
            await turn
        finally:
            self._forget(place)

    def give_back(self, place: BegunCall) -> None:
        """End a turn whose message was read, or whose call is over."""
        since = self._held.pop(place, None)
        if since is None:
            return
        self._shares.discard(place)
        if place in self._ending:
            self._ending.remove(place)
        elif place.peer in self._queue and since > self._began_by():  # the rest of it is for its connection
            self._give(place.peer, since)
        self._pass_on()

    def _hold(self, place: BegunCall, since: float) -> None:
        self._held[place] = since
        self._shares.add(place)

    def _began_by(self) -> float:
        """Turns that began by then are over if somebody waits."""
        share = min(1.0, self._most / max(1, len(self._queue)))
        return _now() - max(_TURN_SECONDS_MIN, self._seconds * share)

    def _end(self, place: BegunCall) -> None:
        """End a call; it keeps its turn until it has gone, and with it what has arrived of its message."""
        self._shares.discard(place)
        self._ending.add(place)
        place.give_way(_crowded())

    def _forget(self, place: BegunCall) -> None:
        """It waits no more."""
        calls = self._queue.get(place.peer)
        if calls is not None:
            calls.pop(place, None)
            if not calls:
                del self._queue[place.peer]

    def _pass_on(self) -> None:
        while self._queue and len(self._held) < self._most:
            self._give(next(iter(self._queue)), _now())

    def _give(self, peer: str, since: float) -> None:
        """Give a turn to the newest call that waits on a connection: those who waited long may have been given up."""
        calls = self._queue[peer]
        place, turn = calls.popitem()
        if calls:
            self._queue.move_to_end(peer)
        else:
            del self._queue[peer]
        if not turn.done():
            self._hold(place, since)
            turn.set_result(None)

    def _watch(self) -> None:
        """Look at the turns now and then while somebody waits."""
        if self._timer is None and self._queue:
            self._timer = asyncio.get_running_loop().call_later(_TURN_SECONDS_MIN, self._end_oldest)

    def _end_oldest(self) -> None:
        """End the turns that have lasted too long."""
        self._timer = None
        began_by = self._began_by()
        turns = [turn for turn in self._held.items() if turn[0] not in self._ending]
        for place, since in sorted(turns, key=itemgetter(1)):
            if since > began_by or len(self._ending) >= len(self._queue):
                break
            self._end(place)
        self._watch()


class Places:
    """Calls of one kind that are served at once."""

    def __init__(
        self,
        kind: CallKind,
        most: int,
        begun_most: int,
        turns: Turns,
        trimmer: Trimmer,
        unfinished: UnfinishedMessages,
        foreground: Foreground,
        silent: SilentConnections | None = None,
    ) -> None:
        """With `silent`, a connection with such a call is not a silent one."""
        self._foreground = foreground
        self._kind = kind
        self._silent = silent
        self._trimmer = trimmer
        self._unfinished = unfinished
        self._most = most
        self._begun_most = begun_most
        self._turns = turns
        self._count = 0
        self._beginning = Shares()

    def enter(self, context: Context, seconds: float) -> BegunCall:
        """A place for a call, which must send its first message in time. Raises LimitReached."""
        if self._count >= self._most or self._beginning.count >= self._begun_most:
            oldest = self._beginning.oldest_of_most()
            if oldest is None:
                raise LimitReached(
                    f"The broker serves at most {self._most} {self._kind.value} at a time",
                    reason="TOO_MANY_CALLS",
                    limit=self._most,
                )
            self._beginning.discard(oldest)
            oldest.give_way(_crowded())
        self._count += 1
        self._foreground.calls += self._kind is CallKind.SHORT
        place = BegunCall(context, seconds)
        place.arrivals = self._unfinished.of(place.peer)
        place.arrivals.begin()
        self._beginning.add(place)
        if self._silent is not None:
            self._silent.began(place.peer)
        return place

    async def first_message(self, place: BegunCall) -> Any:
        """The first message of a call; END_OF_STREAM if there is none. Raises LimitReached if it does not come."""
        try:
            try:
                await self._turns.take(place)
                message = await place.context.read()
                self._turns.give_back(place)
                if isinstance(message, bytes):
                    place.arrivals.read(len(message))
                else:  # it has ended, perhaps as its connection did, in the middle of the message
                    self._trimmer.ask()
                place.is_large = isinstance(message, bytes) and len(message) > _LARGE_BYTES
                return message
            finally:
                self._beginning.discard(place)
                place.settle()
        except asyncio.CancelledError:
            self._trimmer.ask()  # for what had arrived of the message
            if place.gone_because is None:
                raise
            place.task.uncancel()
            raise place.gone_because from None

    def forget(self, place: BegunCall, error: BaseException, *, is_stream: bool = False) -> None:
        """A call has failed: nothing of its messages stays."""
        forget_frames(error)
        if place.is_large or is_stream:
            self._trimmer.ask()

    def leave(self, place: BegunCall) -> None:
        self._count -= 1
        self._foreground.calls -= self._kind is CallKind.SHORT
        place.arrivals.calls -= 1
        if self._silent is not None:
            self._silent.ended(place.peer)
        self._beginning.discard(place)
        self._turns.give_back(place)


class BegunCall:
    """One call from its headers to its end."""

    def __init__(self, context: Context, seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.context = context
        self.task = task
        self.gone_because: PostdateError | None = None
        self._peer = ""
        self._timer = asyncio.get_running_loop().call_later(seconds, self._come_too_late, seconds)
        self._is_settled = False
        self.is_large = False
        self.arrivals = Arrivals()  # of its connection, once it has a place

    @property
    def peer(self) -> str:
        """Return the peer of the connection."""
        self._peer = self._peer or self.context.peer()
        return self._peer

    def give_way(self, error: PostdateError) -> None:
        """End the call, which has sent no message yet."""
        if self.gone_because is None and not self._is_settled:
            self.gone_because = error
            self.task.cancel()

    def settle(self) -> None:
        """It has sent its message, or is over."""
        self._is_settled = True
        self._timer.cancel()

    def _come_too_late(self, seconds: float) -> None:
        self.give_way(
            LimitReached(f"No message arrived within {seconds:g} seconds", reason="FIRST_MESSAGE_LATE")
        )


class Reception(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """See the module's description. Stands behind access control, so that who is refused takes no place."""

    def __init__(
        self,
        host: CallHost,
        silent: SilentConnections,
        unfinished: UnfinishedMessages,
        foreground: Foreground,
    ) -> None:
        config = host.config
        self._unfinished = unfinished
        self._host = host
        self._seconds = config.tuning.first_message_ms / 1000
        turns = Turns(turns_of(config), _TURN_SECONDS)
        probe_turns = Turns(_PROBE_TURNS, _PROBE_SECONDS)
        trimmer = Trimmer(TRIM_SECONDS)
        self._places = {
            kind: Places(
                kind,
                most,
                begun_max(config),
                kind_turns,
                trimmer,
                unfinished,
                foreground,
                None if kind is CallKind.PROBE else silent,
            )
            for kind, most, kind_turns in (
                (CallKind.PROBE, _PROBES_MAX, probe_turns),
                (CallKind.SHORT, _SHORT_MAX, turns),
                (CallKind.LONG, config.streams_max, turns),
            )
        }
        self._share = LoopShare()
        self._served: dict[str, Any] = {}

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        method = details.method
        if (served := self._served.get(method)) is None:
            handler = await continuation(details)
            if handler is None:  # no such method: gRPC says so
                return None
            served = self._served[method] = self._serve(method, handler)
        return served

    def _serve(self, method: str, handler: Any) -> Any:
        rule = RULES.get(method)
        how = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary is not None:
            kind = CallKind.SHORT
            if rule is not None and (rule.is_public or rule.waits):
                kind = CallKind.PROBE if rule.is_public else CallKind.LONG
            return grpc.stream_unary_rpc_method_handler(
                self._serve_unary(self._places[kind], handler.unary_unary), **how
            )
        places = self._places[CallKind.LONG]
        if handler.unary_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                self._serve_stream(places, handler.unary_stream), **how
            )
        assert handler.stream_stream is not None, f"{method} is of a kind that no service here has"
        return grpc.stream_stream_rpc_method_handler(
            self._serve_stream(places, handler.stream_stream, byte_cost=_COSTS.get(method, 1)), **how
        )

    def _serve_unary(self, places: Places, behavior: Any) -> Any:
        host, seconds = self._host, self._seconds

        async def serve(_: Any, context: Context) -> Any:
            try:
                place = places.enter(context, seconds)
            except LimitReached as error:
                return await refuse(host, context, error)
            try:
                return await behavior(await _begun(host, places, place), context)
            except grpc.aio.AbortError as error:
                places.forget(place, error)
                raise
            finally:
                places.leave(place)

        return serve

    def _serve_stream(self, places: Places, behavior: Any, *, byte_cost: int = 0) -> Any:
        """Serve a stream; without a `byte_cost` it takes one message."""
        host, seconds, share = self._host, self._seconds, self._share

        async def serve(_: Any, context: Context) -> None:
            try:
                place = places.enter(context, seconds)
            except LimitReached as error:
                return await refuse(host, context, error)
            try:
                request = await _begun(host, places, place, may_end=byte_cost > 0)
                if byte_cost:
                    self._unfinished.begin(place.arrivals)
                    context = Begun(context, request, share, place.arrivals, byte_cost)  # type: ignore[assignment]
                    request = _messages(context)
                if not inspect.isasyncgenfunction(behavior):
                    await behavior(request, context)
                    return None
                async for response in behavior(request, context):
                    await context.write(response)
            except (grpc.aio.AbortError, asyncio.CancelledError) as error:
                request = None
                places.forget(place, error, is_stream=True)
                raise
            finally:
                if isinstance(context, Begun):
                    self._unfinished.end(place.arrivals)
                places.leave(place)

        return serve


def window_bytes(config: BrokerConfig) -> int:
    """Return how much of a message gRPC takes before it is read.

    A stream carries about one window in the time of a round trip, so small ones are slow over distant links; and this
    is what every call may take of the memory before it has a turn.
    """
    return min(_WINDOW_BYTES_MAX, max(_WINDOW_BYTES_MIN, config.receiving_bytes_max // 4096))


def begun_max(config: BrokerConfig) -> int:
    """Return how many calls of a kind may wait to be read: their windows take half of the memory for what arrives."""
    return max(_BEGUN_MIN, config.receiving_bytes_max // window_bytes(config) // 2)


def turns_of(config: BrokerConfig) -> int:
    """Return how many messages may arrive at once."""
    return max(1, config.receiving_bytes_max // config.request_bytes_max)


class Begun:
    """The context of a stream whose first message was read already."""

    def __init__(
        self, context: Context, first: Any, share: LoopShare, arrivals: Arrivals, byte_cost: int
    ) -> None:
        self._context = context
        self._first = [first]
        self._share = share
        self._arrivals = arrivals
        self._byte_cost = byte_cost
        self._owed = 0  # for the last message, if that was large
        self.write = context.write  # the one that is called most

    async def read(self) -> Any:
        if self._first:
            return self._first.pop()
        if (
            self._owed
        ):  # before the next one comes: what has come and waits would be held twice, here and in gRPC
            await self._share.wait(self._context.peer(), self._owed)
        message = await self._context.read()
        self._owed = 0
        if message is END_OF_STREAM:
            return message
        self._arrivals.read(len(message))
        if (cost := len(message) * self._byte_cost) > SMALL_BYTES:
            self._owed = cost
        return message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


async def _begun(host: CallHost, places: Places, place: BegunCall, *, may_end: bool = False) -> Any:
    """The first message of a call; the call ends if there is none."""
    try:
        message = await places.first_message(place)
        if message is END_OF_STREAM and not may_end:
            raise InvalidRequest("The call ended before its message", reason="MALFORMED_REQUEST")
    except PostdateError as error:
        await refuse(host, place.context, error)
        raise
    return message


async def _messages(context: Context) -> AsyncIterator[Any]:
    while (message := await context.read()) is not END_OF_STREAM:
        yield message


def _crowded() -> LimitReached:
    return LimitReached(
        "The call was ended to make room for others: it had not sent its first message",
        reason="TOO_MANY_CALLS",
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
