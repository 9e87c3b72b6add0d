"""An HTTP proxy that cuts connections before a request reaches the server, in the middle of it, and before its answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from enum import Enum
from typing import NamedTuple


class Cut(Enum):
    """The place where a request's connection is cut."""

    BEFORE = "before the request"
    IN = "in the request"
    AFTER = "after the request"


class _Message(NamedTuple):
    """A request or a response, whole."""

    start: str
    data: bytes


class CuttingProxy:
    """Passes requests on to a server; those of one method meet the next cut, if one is planned."""

    def __init__(self, method: str = "PUT") -> None:
        self._method = method
        self.cuts: deque[Cut | None] = deque()
        self.cut_count = 0

    @contextlib.asynccontextmanager
    async def before(self, port: int) -> AsyncIterator[int]:
        """The proxy in front of a port, and its own port."""
        serving = set[asyncio.Task[None]]()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            serving.add(task)
            try:
                await self._serve(reader, writer, port)
            finally:
                serving.discard(task)
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in [*serving]:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while (request := await _read_message(reader)) is not None:
                cut = self._next_cut(request)
                if cut is Cut.BEFORE:
                    return
                server_writer.write(request.data[: len(request.data) // 2 if cut is Cut.IN else None])
                await server_writer.drain()
                if cut is Cut.IN:
                    return
                response = await _read_message(server_reader, has_body=not request.start.startswith("HEAD"))
                if response is None or cut is Cut.AFTER:
                    return
                writer.write(response.data)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            server_writer.close()

    def _next_cut(self, request: _Message) -> Cut | None:
        if not request.start.startswith(self._method) or not self.cuts:
            return None
        cut = self.cuts.popleft()
        self.cut_count += cut is not None
        return cut


async def _read_message(reader: asyncio.StreamReader, *, has_body: bool = True) -> _Message | None:
    """The next message; None at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    start, *lines = head.decode("latin-1").split("\r\n")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if fields.get("transfer-encoding") == "chunked":
        body = await _read_chunks(reader)
    else:
        body = await reader.readexactly(int(fields.get("content-length", 0)) if has_body else 0)
    return _Message(start, head + body)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while True:
        size = await reader.readline()
        length = int(size.split(b";")[0], 16)
        parts += [size, await reader.readexactly(length + 2)]
        if length == 0:
            return b"".join(parts)
