"""Bounds what connections of the HTTP port can hold: how many there are, and how long each may say nothing.

aiohttp waits for a request for as long as it takes. Here a connection has a deadline at all times. Until a request of
it is whole, its body included, and again after the answer, the connection waits. Beyond the limit the one that has
waited longest gives its place to a new one, so that who sends nothing, or half, cannot shut out a probe; while whole
requests of all of them are being answered, a new one is closed.

The head of a request, its line and headers, is bounded here too, before aiohttp keeps any of it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

from aiohttp import web

from broker.observe.logs import Notice, get_logger
from broker.runtime.clock import SystemClock
from broker.settings import KIB

log = get_logger(__name__)

HEAD_BYTES_MAX = 32 * KIB
_HEAD_END = b"\r\n\r\n"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Times that a connection may take."""

    headers_seconds: float = 10.0
    """From its begin to the end of the first headers."""
    idle_seconds: float = 75.0
    """From an answer to the next headers; the answer has to be taken within it, too."""
    body_seconds: float = 5.0
    """From the headers to the end of the body: pages send forms alone, which are small."""
    request_seconds: float = 75.0
    """From the end of the body to the answer: longer than a call of Receive may wait."""


class Connections:
    """Those of one port; makes the protocol of each, and is the middleware that sees its requests."""

    def __init__(self, limit: int, timeouts: Timeouts | None = None) -> None:
        self._limit = limit
        self._timeouts = timeouts or Timeouts()
        self._notice = Notice(SystemClock())
        self._all: dict[asyncio.BaseTransport, _TimedConnection] = {}
        self._waiting: OrderedDict[_TimedConnection, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._all)

    def protocol(self, make: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """For a new connection; `make` makes what serves it."""
        return _TimedConnection(self, make())

    @web.middleware
    async def watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Note from when on a request is being answered, and how long it may take to come and to be answered."""
        connection = self._all.get(request.transport) if request.transport is not None else None
        if connection is None:
            return await handler(request)
        is_over = False

        def answer() -> None:
            if not is_over and connection.transport in self._all:
                self._waiting.pop(connection, None)
                connection.expect(self._timeouts.request_seconds)

        connection.expect(self._timeouts.body_seconds)
        request.content.on_eof(answer)  # at once if the body is there, or there is none
        try:
            return await handler(request)
        finally:
            is_over = True
            connection.expect_head()
            self._wait(connection, self._timeouts.idle_seconds)

    def begin(self, connection: _TimedConnection, transport: asyncio.Transport) -> bool:
        """Return whether there is a place for it."""
        if len(self._all) >= self._limit:
            if not self._waiting:
                return False
            oldest, _ = self._waiting.popitem(last=False)
            self.end(oldest)
            oldest.cut()
        self._all[transport] = connection
        self._wait(connection, self._timeouts.headers_seconds)
        return True

    def end(self, connection: _TimedConnection) -> None:
        self._waiting.pop(connection, None)
        if connection.transport is not None:
            self._all.pop(connection.transport, None)

    def cut_long_head(self, connection: _TimedConnection) -> None:
        """End a connection whose request has a head that is too long."""
        if self._notice.is_time():
            log.warning(
                "Closed an HTTP connection: the headers of its request are too long", bytes_max=HEAD_BYTES_MAX
            )
        self.end(connection)
        connection.cut()

    def _wait(self, connection: _TimedConnection, seconds: float) -> None:
        if connection.transport in self._all:
            self._waiting.pop(connection, None)
            self._waiting[connection] = None
            connection.expect(seconds)


class _TimedConnection(asyncio.Protocol):
    """Passes on to aiohttp's protocol what comes in, and cuts the connection when its time is up."""

    def __init__(self, connections: Connections, inner: asyncio.Protocol) -> None:
        self.transport: asyncio.Transport | None = None
        self._connections = connections
        self._inner = inner
        self._timer: asyncio.TimerHandle | None = None
        self._is_served = False
        self.expect_head()

    def expect_head(self) -> None:
        """The head of a request comes now."""
        self._is_in_head = True
        self._head_bytes = 0
        self._head_rest = b""  # in which its end may have begun

    def expect(self, seconds: float) -> None:
        """Something must happen within this time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.cut)

    def cut(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._is_served = self._connections.begin(self, self.transport)
        if self._is_served:
            self._inner.connection_made(transport)
        else:
            self.cut()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._connections.end(self)
        if self._is_served:
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_served:
            return
        if self._is_in_head and not self._head_fits(data):
            self._is_served = False
            self._connections.cut_long_head(self)
            self._inner.connection_lost(None)
            return
        self._inner.data_received(data)

    def _head_fits(self, data: bytes) -> bool:
        seen = self._head_rest + data
        end = seen.find(_HEAD_END)
        self._is_in_head = end < 0
        head_bytes = self._head_bytes - len(self._head_rest) + (len(seen) if end < 0 else end)
        self._head_bytes, self._head_rest = head_bytes, seen[1 - len(_HEAD_END) :]
        return head_bytes <= HEAD_BYTES_MAX

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._is_served else None

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
