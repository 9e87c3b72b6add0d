"""The shortcut of small calls from a front to a shard of its machine: a socket without gRPC.

gRPC has a thread that takes part in each operation, and a call of one message and one answer needs six operations on
its way to a shard. On one core that takes as long as all the rest. So a front writes such a call, with its metadata,
into a socket of the shard's folder, and the shard serves it as one that came by gRPC: the same interceptors and
handlers, in the same order, see a context with the same peer, metadata and end.

    frame:  length u32, kind u8, call u32, parts u16, length u32 of each part, the parts
    CALL    path, message, then key and value of each metadatum
    ANSWER  status code, message of the status, answer, then the trailing metadata
    CANCEL  nothing: whoever asked has gone
    LEAVE   nothing: the shard takes no new calls here
    PING    nothing, and is answered by the same

It is a way for calls that gRPC can take as well: there they go while the shortcut is not open, or full.

Invariants:
  SHORTCUT-1  Calls under way are bounded, in number and in bytes, so that neither side needs flow control for them.
  SHORTCUT-2  A call has ended for the shard once its answer is with the kernel: what counts until an answer was read
      (`call_room.py`) counts for one that a front does not take.
  SHORTCUT-3  A call that was begun and whose shortcut broke ends as one whose connection broke: with UNAVAILABLE and
      no details. It is not repeated. That a shard says nothing for `SILENT_SECONDS` while calls wait is such a break,
      as it is for gRPC's keepalive.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, cast

import grpc

from broker.observe.logs import get_logger
from broker.rpc.calls import Handler
from broker.rpc.local_context import Behavior, LocalContext, Metadata, behind
from broker.rpc.status import Context

log = get_logger(__name__)

METHODS = frozenset(
    {
        "/postdate.v1.ProducerService/Produce",
        "/postdate.v1.ConsumerService/Acknowledge",
        "/postdate.v1.ConsumerService/Nack",
        "/postdate.v1.ConsumerService/ExtendLease",
        "/postdate.v1.ScheduleService/CancelScheduled",
        "/postdate.v1.ScheduleService/Reschedule",
    }
)
"""Calls that clients make message by message: none of them waits, and each answer is bounded by its request."""
CALLS_MAX = 64
CALL_BYTES_MAX = 16 << 10
"""Of a message; the metadata of a call are bounded by the port where it came."""
PEER = "unix:shortcut"
PING_SECONDS = 5.0
SILENT_SECONDS = 15.0
_RETRY_SECONDS = 0.2
_ANSWER_BYTES_MAX = 64 << 20
"""More than any answer of these methods has: what says more is no frame."""

_HEAD = struct.Struct("<IBIH")
_UNAVAILABLE, _UNKNOWN = (code.value[0] for code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN))


class _FrameKind(IntEnum):
    CALL = 1
    ANSWER = 2
    CANCEL = 3
    LEAVE = 4
    PING = 5


@dataclass(frozen=True, slots=True)
class _Frame:
    kind: int
    call: int
    parts: Sequence[bytes]


def socket_beside(grpc_socket: str) -> str:
    """Return the path of the shortcut to a process, by that of its gRPC socket."""
    return f"{grpc_socket.removesuffix('.grpc')}.call"


def encode_frame(kind: int, call: int, parts: Sequence[bytes] = ()) -> bytes:
    lengths = [len(part) for part in parts]
    head = _HEAD.pack(_HEAD.size + 4 * len(parts) + sum(lengths), kind, call, len(parts))
    return b"".join((head, struct.pack(f"<{len(parts)}I", *lengths), *parts))


def decode_frames(arrived: bytearray) -> Iterator[_Frame]:
    """Take the frames that are whole out of what has arrived. Raises ValueError for what is no frame."""
    while len(arrived) >= _HEAD.size:
        size, kind, call, count = _HEAD.unpack_from(arrived)
        at = _HEAD.size + 4 * count
        if not at <= size <= _ANSWER_BYTES_MAX:
            raise ValueError(f"no frame has {size} bytes")
        if len(arrived) < size:
            return
        whole = bytes(memoryview(arrived)[:size])
        del arrived[:size]
        parts = []
        for length in struct.unpack_from(f"<{count}I", whole, _HEAD.size):
            parts.append(whole[at : at + length])
            at += length
        if at != size:
            raise ValueError("the parts of a frame are longer than it")
        yield _Frame(kind, call, parts)


def _encode_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[bytes]:
    for key, value in metadata:
        yield key.encode()
        yield value.encode(errors="surrogateescape") if isinstance(value, str) else value


def _decode_metadata(parts: Sequence[bytes]) -> Metadata:
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return tuple(
        (key.decode(), value if key.endswith(b"-bin") else value.decode(errors="surrogateescape"))
        for key, value in pairs
    )


class _Frames(asyncio.Protocol, ABC):
    """One end of a connection."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._arrived = bytearray()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._arrived += data
        try:
            for frame in decode_frames(self._arrived):
                self._take(frame)
        except ValueError as error:
            log.error("A shortcut between processes of this broker is broken", error=error)
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _send(self, kind: _FrameKind, call: int = 0, parts: Sequence[bytes] = ()) -> None:
        if self._transport is not None:
            self._transport.write(encode_frame(kind, call, parts))

    @abstractmethod
    def _take(self, frame: _Frame) -> None:
        """Take a frame that has come."""


# -- the front's side ------------------------------------------------------------------------------------------


class _Asking(_Frames):
    """Connection to a shard, and the calls that wait for an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[int, asyncio.Future[tuple[bytes, Metadata]]] = {}
        self.takes_calls = True
        self._numbers = itertools.count(1)
        self._heard_at = 0.0  # by the loop's clock
        self._timer: asyncio.TimerHandle | None = None

    async def ask(self, path: str, message: bytes, metadata: Metadata) -> tuple[bytes, Metadata]:
        number = next(self._numbers) & 0xFFFF_FFFF
        answer: asyncio.Future[tuple[bytes, Metadata]] = asyncio.get_running_loop().create_future()
        self.answers[number] = answer
        self._send(_FrameKind.CALL, number, (path.encode(), message, *_encode_metadata(metadata)))
        self._watch()
        try:
            return await answer
        finally:
            del self.answers[number]
            if not answer.done() or answer.cancelled():
                self._send(_FrameKind.CANCEL, number)

    def data_received(self, data: bytes) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        super().data_received(data)

    def abort(self) -> None:
        """Close it without waiting for what was not written."""
        if self._transport is not None:
            self._transport.abort()

    def _watch(self) -> None:
        """Look now and then whether the shard lives, while calls wait."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._heard_at = loop.time()
            self._timer = loop.call_later(PING_SECONDS, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self.answers or not self.is_open:
            return
        loop = asyncio.get_running_loop()
        if loop.time() - self._heard_at >= SILENT_SECONDS:
            self.abort()
            return
        self._send(_FrameKind.PING)
        self._timer = loop.call_later(PING_SECONDS, self._look)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(_failure(_UNAVAILABLE, "The connection broke", ()))

    def _take(self, frame: _Frame) -> None:
        if frame.kind == _FrameKind.LEAVE:
            self.takes_calls = False
        elif frame.kind == _FrameKind.ANSWER:
            self._take_answer(frame)

    def _take_answer(self, frame: _Frame) -> None:
        answer = self.answers.get(frame.call)
        if answer is None or answer.done():  # of a call that was cancelled meanwhile
            return
        (code,), details, message, *trailing = frame.parts
        if code:
            answer.set_exception(_failure(code, details.decode(), _decode_metadata(trailing)))
        else:
            answer.set_result((message, _decode_metadata(trailing)))


class Shortcut:
    """Calls to one shard; opened when it is first wanted, and again once the shard is back."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._asking: _Asking | None = None
        self._opening: asyncio.Task[None] | None = None
        self._opens_at = 0.0  # by the loop's clock

    def takes(self, path: str, message: bytes) -> bool:
        """Return whether a call may go here now (SHORTCUT-1); opens it if it is not."""
        if path not in METHODS or len(message) > CALL_BYTES_MAX:
            return False
        asking = self._asking
        if asking is None or not asking.is_open:
            self._open_soon()
            return False
        return asking.takes_calls and len(asking.answers) < CALLS_MAX

    async def ask(self, path: str, message: bytes, metadata: Metadata) -> tuple[bytes, Metadata]:
        """Make a call that it takes; returns the answer and the trailing metadata. Raises AioRpcError."""
        assert self._asking is not None
        return await self._asking.ask(path, message, metadata)

    async def close(self) -> None:
        """Close it for good. Calls under way end."""
        self._opens_at = math.inf
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._asking is not None:
            self._asking.abort()

    def _open_soon(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() >= self._opens_at and (self._opening is None or self._opening.done()):
            self._opens_at = loop.time() + _RETRY_SECONDS
            self._opening = loop.create_task(self._open(), name="shortcut to a shard")

    async def _open(self) -> None:
        # A shard that does not listen, or not there: its calls go by gRPC, which says what is to be said.
        with suppress(OSError):
            _, self._asking = await asyncio.get_running_loop().create_unix_connection(_Asking, self._path)


def _failure(code: int, details: str, trailing: Metadata) -> grpc.aio.AioRpcError:
    status = next(each for each in grpc.StatusCode if each.value[0] == code)
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details, None)


# -- the shard's side ------------------------------------------------------------------------------------------


class _Answering(_Frames):
    """Connection from a front, and its calls that are served."""

    def __init__(self, behaviors: dict[str, Behavior], connections: set[_Answering]) -> None:
        super().__init__()
        self.calls: dict[int, asyncio.Task[None]] = {}
        self._behaviors = behaviors
        self._connections = connections
        self._unwritten: list[LocalContext] = []
        self._is_written = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self._transport is not None
        self._transport.set_write_buffer_limits(0)  # so that it is told what the kernel has not taken
        self._connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._connections.discard(self)
        for task in self.calls.values():
            task.cancel()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._is_written = False

    def resume_writing(self) -> None:
        self._is_written = True
        unwritten, self._unwritten = self._unwritten, []
        for context in unwritten:
            context.end()

    def leave(self) -> None:
        """Have the front make no new calls here."""
        self._send(_FrameKind.LEAVE)

    def _take(self, frame: _Frame) -> None:
        if frame.kind == _FrameKind.CALL:
            task = asyncio.get_running_loop().create_task(self._serve(frame), name="call by the shortcut")
            self.calls[frame.call] = task
            task.add_done_callback(lambda _: self.calls.pop(frame.call, None))
        elif frame.kind == _FrameKind.PING:
            self._send(_FrameKind.PING)
        elif (running := self.calls.get(frame.call)) is not None:
            running.cancel()

    async def _serve(self, frame: _Frame) -> None:
        path, message, *metadata = frame.parts
        context = LocalContext(PEER, message, _decode_metadata(metadata))
        answer = b""
        try:
            answer = await self._behaviors[path.decode()](None, cast(Context, context))
        except grpc.aio.AbortError:
            pass  # the context has the status
        except (
            asyncio.CancelledError
        ):  # the front has gone, or this shard ends; the task ends here in any case
            context.status, context.details = _UNAVAILABLE, "The shard has ended the call"
        except Exception as error:  # as gRPC does
            log.error("A call by the shortcut has failed", exc_info=error)
            context.status, context.details = _UNKNOWN, "Unexpected failure"
        head = (bytes((context.status,)), context.details.encode(), answer)
        self._send(_FrameKind.ANSWER, frame.call, (*head, *_encode_metadata(context.trailing)))
        if self._is_written:
            context.end()
        else:
            self._unwritten.append(context)


class ShortcutPort:
    """Serves the calls that come by the shortcut, as those of the gRPC port beside it."""

    def __init__(self, grpc_socket: str, interceptors: Sequence[Any], find: Callable[[str], Handler]) -> None:
        """`find` returns the handler of a method of the API."""
        self._path = socket_beside(grpc_socket)
        self._interceptors = interceptors
        self._find = find
        self._server: asyncio.Server | None = None
        self._connections: set[_Answering] = set()

    async def start(self) -> None:
        behaviors = {path: await behind(self._interceptors, self._find, path) for path in METHODS}
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _Answering(behaviors, self._connections), self._path
        )

    async def stop(self, grace_seconds: float) -> None:
        """Take no new calls; end those that are still under way after the grace."""
        if self._server is None:
            return
        self._server.close()
        for connection in tuple(self._connections):
            connection.leave()
        running = [task for connection in self._connections for task in connection.calls.values()]
        if running:
            await asyncio.wait(running, timeout=grace_seconds)
        for connection in tuple(self._connections):
            connection.close()
