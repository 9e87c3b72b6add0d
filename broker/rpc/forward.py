"""Calls passed on to the owner of a shard, as bytes.

No message is parsed, and none is kept once it has been written. One message a direction is in flight: the next is read
when the one before has been written, so that each side is as slow as the other one.

Invariants:
  FORWARD-1  Messages that were read and are not written yet take at most `receiving_bytes_max` of memory, but for one.
      The answer of a unary call counts until its client has read it. Where they would take more, clients are ended that
      have left an answer unread for `STALLED_SECONDS`; then calls, the one first whose message has waited for longest;
      and where all calls together would not be enough, clients whose answers are younger.
  FORWARD-2  A call ends with its route: once another owner or a higher epoch is known, nothing of the former is
      passed on any more.
  FORWARD-3  A call is passed on once: it carries the tag that asks for the owner alone.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc

from broker.errors import LimitReached, PostdateError, Unavailable
from broker.observe.logs import get_logger
from broker.rpc.call_metadata import DIRECT, SHARD
from broker.rpc.calls import END_OF_STREAM, CallHost, refuse, refuse_unread
from broker.rpc.local_context import Metadata
from broker.rpc.shortcut import Shortcut
from broker.rpc.slow_readers import ASK_SECONDS, ask_unread, end_client, not_read, tag_of, when_over
from broker.rpc.status import DETAILS_KEY, Context
from broker.rpc.tls import OpenChannel
from broker.rpc.unread_room import STALLED_SECONDS
from broker.runtime.clock import Clock
from broker.settings import ConfigError

log = get_logger(__name__)

_TAGS = itertools.count(1)
_CALLS_A_CONNECTION = 200
"""Less than `grpc.max_concurrent_streams` of the owner's port."""
CONNECTION_SECONDS = 600.0
"""Time for which a connection takes new calls: the next one is opened with the certificates of that day."""
PAUSE_SECONDS = 1.0
"""Time for which no file is read again, on the event loop, once one could not be."""
_OPTIONS = {
    "grpc.max_receive_message_length": -1,  # the owner has bounds of its own, and so has the port here
    "grpc.max_send_message_length": -1,
    "grpc.http2.bdp_probe": 0,
    "grpc.use_local_subchannel_pool": 1,
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.min_reconnect_backoff_ms": 2_000,  # in truth the time that one attempt may take
    "grpc.max_reconnect_backoff_ms": 1_000,
}
_OWN_METADATA = ("grpc-", ":", "user-agent", DIRECT, SHARD)
"""Beginnings of the names of metadata that belong to a connection, or to a front."""

Send: TypeAlias = Callable[[Any], Awaitable[None]]
"""Writes what the caller sends to the owner's call."""
Take: TypeAlias = Callable[[bytes], Awaitable[None]]
"""Takes an answer of the owner."""
End: TypeAlias = Callable[[CallHost, Context, PostdateError], Awaitable[None]]
"""Ends a call with a failure."""


class ForwardedCall:
    """One call under way."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self.tag = tag_of(next(_TAGS))
        """Names it to the owner."""
        self.ended_because: PostdateError | None = None

    def end(self, error: PostdateError) -> None:
        """End the call with what its caller is told."""
        if self.ended_because is None:
            self.ended_because = error
            self._task.cancel()

    @contextmanager
    def telling_end(self) -> Iterator[None]:
        """Raise why the call was ended, in place of the cancellation that ends it; another one is left alone."""
        try:
            yield
        except asyncio.CancelledError:
            if self.ended_because is None or self._task.uncancel():
                raise
            raise self.ended_because from None


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A message in the room."""

    end: Callable[[], None]
    size: int
    since_ns: int


class MessageRoom:
    """Memory for messages that were read and are not written yet (FORWARD-1)."""

    def __init__(self, bytes_max: int, clock: Clock) -> None:
        self._bytes_max = bytes_max
        self._clock = clock
        self._calls: dict[_Held, None] = {}  # the oldest first
        self._calls_bytes = 0
        self._answers: dict[_Held, None] = {}  # of unary calls; the oldest first
        self.held_bytes: int = 0

    @contextmanager
    def hold(self, call: ForwardedCall, size: int) -> Iterator[None]:
        held = self._enter(self._calls, partial(call.end, _crowded()), size)
        try:
            yield
        finally:
            self._let_go(held)

    def hold_until_read(self, context: Context, answer: bytes) -> None:
        """Hold the answer of a call, which gRPC keeps until the call is over."""
        held = self._enter(self._answers, partial(end_client, context), len(answer))
        when_over(context, partial(self._let_go, held))

    def _enter(self, kind: dict[_Held, None], end: Callable[[], None], size: int) -> _Held:
        held = _Held(end, size, self._clock.monotonic_ns())
        kind[held] = None
        self.held_bytes += size
        self._calls_bytes += size if kind is self._calls else 0
        while self.held_bytes > self._bytes_max and len(self._calls) + len(self._answers) > 1:
            first = self._first_to_end(held)
            self._let_go(first)
            first.end()
        return held

    def _first_to_end(self, entering: _Held) -> _Held:
        """Return what is to go for a message; never its own answer, which may be larger than the room."""
        answer = next((each for each in self._answers if each is not entering), None)
        late = self._clock.monotonic_ns() - int(STALLED_SECONDS * 1e9)
        missing = self.held_bytes - self._bytes_max
        if answer is not None and (answer.since_ns <= late or self._calls_bytes < missing):
            return answer
        return next(iter(self._calls))

    def _let_go(self, held: _Held) -> None:
        if held in self._calls:
            del self._calls[held]
            self._calls_bytes -= held.size
        elif held in self._answers:
            del self._answers[held]
        else:
            return
        self.held_bytes -= held.size


class _Connection:
    """A connection to the owner, and how many calls it has."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.calls = 0
        self._opened = asyncio.get_running_loop().time()

    @property
    def is_old(self) -> bool:
        return asyncio.get_running_loop().time() - self._opened >= CONNECTION_SECONDS


class OwnerConnections:
    """Connections to one owner: as many as the calls under way need, and one."""

    def __init__(
        self,
        open_channel: OpenChannel,
        window_bytes: int,
        shard: int | None = None,
        shortcut: Shortcut | None = None,
    ) -> None:
        """`shard`: the one that calls are for, where the owner has several. `shortcut`: to an owner that has one."""
        self._open_channel = open_channel
        self._shortcut = shortcut
        self._shard = () if shard is None else ((SHARD, str(shard)),)
        self._options = (*_OPTIONS.items(), ("grpc.http2.lookahead_bytes", window_bytes))
        self._connections: list[_Connection] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._problem = ""  # that no connection could be opened for, until one can
        self._opens_at = 0.0  # by the loop's clock
        self._forwarded: set[ForwardedCall] = set()

    @contextmanager
    def channel(self, call: ForwardedCall) -> Iterator[grpc.aio.Channel]:
        """Return a channel with room for one more call. Raises Unavailable if none can be opened."""
        self._close_old()
        rooms = (each for each in self._connections if each.calls < _CALLS_A_CONNECTION and not each.is_old)
        connection = next(rooms, None) or self._open()
        connection.calls += 1
        self._forwarded.add(call)
        try:
            yield connection.channel
        finally:
            self._forwarded.discard(call)
            connection.calls -= 1
            self._close_old()

    async def ask(
        self, call: ForwardedCall, path: str, message: bytes, context: Context
    ) -> tuple[bytes, Metadata]:
        """Make a call of one message and one answer; returns that, and the trailing metadata. Raises AioRpcError."""
        metadata = self.metadata_for(context, call)
        if self._shortcut is not None and self._shortcut.takes(path, message):
            self._forwarded.add(call)
            try:
                return await self._shortcut.ask(path, message, metadata)
            finally:
                self._forwarded.discard(call)
        with self.channel(call) as channel:
            made: Any = channel.unary_unary(path, None, None)(
                message, timeout=context.time_remaining(), metadata=metadata
            )
            return await made, tuple(await made.trailing_metadata() or ())

    def metadata_for(self, context: Context, call: ForwardedCall) -> tuple[tuple[str, Any], ...]:
        """Return the metadata of a call as the owner gets it: all but what belongs to the connection (FORWARD-3)."""
        given: Any = context.invocation_metadata() or ()
        kept = [(key, value) for key, value in given if not key.startswith(_OWN_METADATA)]
        return (*kept, (DIRECT, call.tag), *self._shard)

    def _open(self) -> _Connection:
        now = asyncio.get_running_loop().time()
        if now < self._opens_at:
            raise _unreadable()
        try:
            connection = _Connection(self._open_channel(self._options))
        except ConfigError as error:
            if str(error) != self._problem:
                log.error("Calls cannot be forwarded to the owner", error=error)
            self._problem, self._opens_at = str(error), now + PAUSE_SECONDS
            raise _unreadable() from error
        self._problem = ""
        self._connections.append(connection)
        return connection

    def _close_old(self) -> None:
        """Close the connections that take no more calls and have none."""
        for connection in [each for each in self._connections if each.is_old and not each.calls]:
            self._connections.remove(connection)
            closing = asyncio.create_task(connection.channel.close(None), name="old connection to the owner")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def end_unread(self) -> None:
        """Ask the owner which calls to end because their clients do not read, and end them."""
        in_use = [each.channel for each in self._connections if each.calls]
        tags = {tag for told in await asyncio.gather(*map(ask_unread, in_use)) for tag in told}
        for call in [each for each in self._forwarded if each.tag in tags]:
            call.end(not_read())

    async def close(self, error: PostdateError) -> None:
        """End all calls, and the connections (FORWARD-2)."""
        for call in tuple(self._forwarded):
            call.end(error)
        connections, self._connections = self._connections, []
        for connection in connections:
            await connection.channel.close(None)
        if self._shortcut is not None:
            await self._shortcut.close()
        await asyncio.gather(*self._closing)


async def watch_unread(connections: Callable[[], Iterable[OwnerConnections]]) -> None:
    """End the calls that owners name because their clients do not read; ends only by being cancelled."""
    while True:
        await asyncio.sleep(ASK_SECONDS)
        await asyncio.gather(*(each.end_unread() for each in connections()))


def _crowded() -> LimitReached:
    return LimitReached(
        "Messages to be forwarded have reached the memory limit; this call had waited longest",
        reason="TOO_MANY_CALLS",
    )


def _unreadable() -> Unavailable:
    return Unavailable("The certificate of the node cannot be read: see its log")


async def forward_unary(
    host: CallHost, room: MessageRoom, owner: OwnerConnections, path: str, message: bytes, context: Context
) -> bytes:
    """Pass on a call of one message and one answer; returns that."""
    answers: list[bytes] = []
    forwarded = ForwardedCall()

    async def work() -> None:
        with room.hold(forwarded, len(message)):
            answer, trailing = await owner.ask(forwarded, path, message, context)
            answers.append(answer)
            if trailing:
                context.set_trailing_metadata(tuple(trailing))

    await end_alike(host, context, forwarded, work(), refuse)
    room.hold_until_read(context, answers[0])
    return answers[0]


async def forward_stream(
    host: CallHost,
    room: MessageRoom,
    owner: OwnerConnections,
    path: str,
    context: Context,
    unsent: list[bytes] | None = None,
) -> None:
    """Pass on a stream, both ways, until the owner ends it or the caller goes away.

    `unsent` has its first message, where that was read to find the owner, and is emptied.
    """
    forwarded = ForwardedCall()

    async def send(call: Any) -> None:
        if unsent:
            with room.hold(forwarded, len(unsent[0])):
                await call.write(unsent.pop())
        while (message := await context.read()) is not END_OF_STREAM:
            with room.hold(forwarded, len(message)):
                await call.write(message)
            message = None  # not kept while the next one is awaited
        await call.done_writing()

    async def take(answer: bytes) -> None:
        with room.hold(forwarded, len(answer)):
            await context.write(answer)

    async def work() -> None:
        with owner.channel(forwarded) as channel:
            metadata = owner.metadata_for(context, forwarded)
            await _converse(channel, path, context, forwarded, metadata, send, take)

    await end_alike(host, context, forwarded, work(), refuse_unread)


async def end_alike(
    host: CallHost, context: Context, forwarded: ForwardedCall, work: Awaitable[None], end: End
) -> None:
    """Pass on a call by `work`, and end it as the owner ends it, or as it was ended here."""
    try:
        await work
    except asyncio.CancelledError:
        if forwarded.ended_because is None:
            raise
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        await end(host, context, forwarded.ended_because)
    except grpc.aio.AioRpcError as error:
        await _fail_alike(host, context, error)
    except PostdateError as error:
        await refuse(host, context, error)


async def _converse(
    channel: grpc.aio.Channel,
    path: str,
    context: Context,
    forwarded: ForwardedCall,
    metadata: tuple[tuple[str, Any], ...],
    send: Send,
    take: Take,
) -> None:
    call: Any = channel.stream_stream(path, None, None)(  # type: ignore[call-arg]  # it is written to, and needs no iterator
        timeout=context.time_remaining(), metadata=metadata
    )
    sending = asyncio.ensure_future(_send(send, call, forwarded))
    try:
        while (answer := await call.read()) is not END_OF_STREAM:
            await take(answer)
            del answer
        context.set_trailing_metadata(tuple(await call.trailing_metadata() or ()))
    finally:
        sending.cancel()
        call.cancel()
        await asyncio.wait({sending})


async def _send(send: Send, call: Any, forwarded: ForwardedCall) -> None:
    try:
        # Once the owner has ended the call nothing can be written, and whoever reads from it hears why.
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await send(call)
    except grpc.aio.BaseError:
        forwarded.end(Unavailable("The caller's stream broke"))
    except Exception as error:
        log.error("A call could not be forwarded", exc_info=error)
        forwarded.end(Unavailable("The call could not be forwarded: see the log of this node"))


async def _fail_alike(host: CallHost, context: Context, error: grpc.aio.AioRpcError) -> None:
    """End a call as the owner has ended it; does not return."""
    trailing: Any = tuple(error.trailing_metadata() or ())
    if error.code() is grpc.StatusCode.UNAVAILABLE and all(key != DETAILS_KEY for key, _ in trailing):
        await refuse(
            host,
            context,
            Unavailable(
                "The owner of the shard cannot be reached, or the connection to it broke",
                reason="OWNER_UNREACHABLE",
            ),
        )
    await context.abort(error.code(), error.details() or "", trailing_metadata=trailing)
