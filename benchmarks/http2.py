"""HTTP/2 as it lies on the wire: enough of it to misbehave with. For floods, and for the tests of the port's limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM, END_HEADERS, ACK = 1, 4, 1
_FRAME_BYTES_MAX = 16_384


def frame(kind: int, flags: int = 0, stream: int = 0, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


def literal(name: bytes, value: bytes) -> bytes:
    """A header field that is not indexed."""
    assert len(name) < 127 and len(value) < 127
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value


def call(path: str, headers: Iterable[tuple[str, str]] = ()) -> bytes:
    """The headers of a call, as HPACK has them: POST, http, and the rest in full."""
    fields = [
        (":path", path),
        (":authority", "broker"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
    return b"\x83\x86" + b"".join(
        literal(name.encode(), value.encode()) for name, value in (*fields, *headers)
    )


def message(stream: int, body: bytes, *, of_bytes: int | None = None, ends: bool = False) -> bytes:
    """A gRPC message in DATA frames; with `of_bytes` only the beginning of one of that size."""
    data = b"\x00" + (len(body) if of_bytes is None else of_bytes).to_bytes(4, "big") + body
    parts = [data[at : at + _FRAME_BYTES_MAX] for at in range(0, len(data), _FRAME_BYTES_MAX)]
    last = len(parts) - 1
    return b"".join(
        frame(DATA, END_STREAM if ends and number == last else 0, stream, part)
        for number, part in enumerate(parts)
    )


class Raw:
    """A connection that speaks HTTP/2 as badly as one wants. An honest one answers pings."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_honest: bool = False
    ) -> None:
        self.reader = reader
        self.writer = writer
        self._is_honest = is_honest
        self._seconds_max: float | None = 20.0

    async def send(self, *frames: bytes) -> None:
        async with asyncio.timeout(self._seconds_max):
            self.writer.write(b"".join(frames))
            await self.writer.drain()

    async def frame(self) -> tuple[int, int, bytes]:
        """The next frame: kind, flags, body. IncompleteReadError once the broker has closed the connection."""
        async with asyncio.timeout(self._seconds_max):
            head = await self.reader.readexactly(9)
            body = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
        if self._is_honest and head[3] == PING and not head[4] & ACK:
            await self.send(frame(PING, ACK, body=body))
        return head[3], head[4], body

    async def until(self, kind: int, flags: int = 0) -> bytes:
        while (found := await self.frame())[:2] != (kind, flags):
            pass
        return found[2]

    async def live(self) -> None:
        """Read on until the broker closes the connection."""
        self._seconds_max = None
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await self.frame()

    async def until_closed(self) -> None:
        async with asyncio.timeout(self._seconds_max):
            while await self.reader.read(65_536):
                pass

    async def greet(self) -> None:
        """Shake hands, as HTTP/2 does."""
        await self.send(PREFACE, frame(SETTINGS))
        await self.until(SETTINGS)
        await self.send(frame(SETTINGS, ACK))


@asynccontextmanager
async def connected(
    address: str, *, greet: bool = True, is_honest: bool = False, **tls: Any
) -> AsyncIterator[Raw]:
    """A connection to `host:port`."""
    host, _, port = address.rpartition(":")
    raw = Raw(*await asyncio.open_connection(host, int(port), **tls), is_honest=is_honest)
    try:
        if greet:
            await raw.greet()
        yield raw
    finally:
        raw.writer.close()
