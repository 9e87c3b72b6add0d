"""The HTTP edge: metrics and health for machines, open to all; pages for operators, guarded (`guard.py`); and the API
over HTTP, which goes through the gRPC port (`http_api.py`)."""

from __future__ import annotations

import asyncio
import errno
import importlib
import os
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from broker.errors import Fenced
from broker.runtime.scheduling import give_way
from broker.settings import UNIX, ConfigError, split_address

if TYPE_CHECKING:
    from aiohttp import web

    from broker.web.connections import Timeouts
    from broker.web.source import Calls, PageSource

_BACKLOG = 128
SHARD_VIEW = "/shard-view"
"""Path at which the process of a shard in a cluster tells its supervisor what it knows: an answer to GetCluster."""


class HttpServer:
    """Serves /metrics, /livez and /readyz, and the pages of a node if there are any.

    `listen` takes the port; whoever connects waits until `start`, which loads what answers. So a broker that
    delivers first and starts this afterwards is ready sooner, and still fails early where the port is taken.
    `stop` gives requests that are being answered `stop_ms` to end, and as long again once cancelled.
    """

    def __init__(
        self,
        address: str,
        render_metrics: Callable[[], Awaitable[bytes]],
        readiness: Callable[[], str | None],
        *,
        pages: PageSource | None = None,
        calls: Calls | None = None,
        shard_view: Callable[[], bytes] | None = None,
        ready_line: Callable[[], str] = lambda: "ok",
        stop_ms: int = 500,
        connections_max: int = 256,
        timeouts: Timeouts | None = None,
    ) -> None:
        """`pages`: what they show. `calls`: the gRPC port, for the API over HTTP; closed with this. `shard_view`: the
        body of `SHARD_VIEW`, on the socket of a process that has a supervisor. `ready_line`: what
        /readyz says where all is well."""
        self._ready_line = ready_line
        self._connections_max = connections_max
        self._timeouts = timeouts
        self._servers: list[asyncio.Server] = []
        self._pages = pages
        self._calls = calls
        self._shard_view = shard_view if address.startswith(UNIX) else None
        self._stop_ms = stop_ms
        self._path = address.removeprefix(UNIX) if address.startswith(UNIX) else ""
        # Whoever may open the socket is on this machine, and asks for localhost.
        self._host, self._port = ("localhost", 0) if self._path else split_address(address)
        self._render_metrics = render_metrics
        self._readiness = readiness
        self._sockets: list[socket.socket] = []
        self._runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        """Return where it listens; with the port that was picked, once it does."""
        if self._path:
            return UNIX + self._path
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}"

    def listen(self) -> None:
        """Take the port. One that somebody else holds is Fenced; an address that is not ours is ConfigError."""
        if self._path:
            self._listen_unix()
            return
        try:
            places = socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, _, _, _, place in dict.fromkeys(places):
                address = (place[0], self._port)
                self._sockets.append(socket.create_server(address, family=family, backlog=_BACKLOG))
                self._port = self._sockets[-1].getsockname()[1]  # the others take the one that was picked
        except OSError as error:
            self._close_sockets()
            if error.errno == errno.EADDRINUSE:
                raise Fenced(
                    f"http_address {self.address} is in use by another process. Stop that process, or choose another "
                    "--http-address",
                    reason="ADDRESS_IN_USE",
                    address=self.address,
                ) from error
            raise ConfigError(f"http_address: cannot listen on {self.address}: {error.strerror}") from error

    def _listen_unix(self) -> None:
        """Take the socket's file, which a process that was killed may have left there."""
        bound = socket.socket(socket.AF_UNIX)
        self._sockets.append(bound)
        try:
            with suppress(FileNotFoundError):
                os.unlink(self._path)
            bound.bind(self._path)
            bound.listen(_BACKLOG)
        except OSError as error:
            self._close_sockets()
            raise ConfigError(f"cannot listen on {self.address}: {error.strerror or error}") from error

    async def start(self) -> None:
        """Answer requests."""
        # In a thread that gives way: the loop delivers meanwhile, first of all what came due before the start.
        loading = ThreadPoolExecutor(1, "http", initializer=give_way)
        try:
            application = await asyncio.get_running_loop().run_in_executor(
                loading, importlib.import_module, "broker.web.application"
            )
        finally:
            loading.shutdown(wait=False)
        from broker.web.connections import Connections  # noqa: PLC0415 - loaded by now

        connections = Connections(self._connections_max, self._timeouts)
        runner = application.make_runner(
            self._render_metrics,
            self._readiness,
            self._ready_line,
            pages=self._pages,
            calls=self._calls,
            listen_host=self._host,
            stop_ms=self._stop_ms,
            connections=connections,
            shard_view=self._shard_view,
        )
        await runner.setup()
        self._runner = runner
        loop = asyncio.get_running_loop()
        create = loop.create_unix_server if self._path else loop.create_server
        for bound in self._sockets:
            self._servers.append(
                await create(lambda: connections.protocol(runner.server), sock=bound, backlog=_BACKLOG)
            )

    async def stop(self) -> None:
        """Stop listening and close all connections. May be called twice, or without a start."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        if self._calls is not None:
            await self._calls.close()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for bound in self._sockets:
            bound.close()
        self._sockets.clear()
