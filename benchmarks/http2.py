"""HTTP/2 as it lies on the wire: enough of it to misbehave with. For floods, and for the tests of the port's limits."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    0,
    1,
    2,
    3,
    4,
    6,
    7,
    8,
    9,
)
END_STREAM, END_HEADERS, ACK = 1, 4, 1
WINDOW_BYTES = 65_535
"""A window until somebody says otherwise."""
_INITIAL_WINDOW_SIZE = 4
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


def prefixed(body: bytes, *, of_bytes: int | None = None) -> bytes:
    """A gRPC message; with `of_bytes` only the beginning of one of that size."""
    return b"\x00" + (len(body) if of_bytes is None else of_bytes).to_bytes(4, "big") + body


def message(stream: int, body: bytes, *, of_bytes: int | None = None, ends: bool = False) -> bytes:
    """A gRPC message in DATA frames, whatever windows there are."""
    data = prefixed(body, of_bytes=of_bytes)
    parts = [data[at : at + _FRAME_BYTES_MAX] for at in range(0, len(data), _FRAME_BYTES_MAX)]
    last = len(parts) - 1
    return b"".join(
        frame(DATA, END_STREAM if ends and number == last else 0, stream, part)
        for number, part in enumerate(parts)
    )


class Raw:
    """A connection that speaks HTTP/2 as badly as one wants. An honest one answers pings, and gives room for answers.

    `send` heeds no windows, so a server may cut it for too much. `upload` heeds those that the frames which somebody
    reads meanwhile (`live`) tell of.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_honest: bool = False
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.sent_bytes = 0
        self._is_honest = is_honest
        self._seconds_max: float | None = 20.0
        self._initial = WINDOW_BYTES
        self._window = WINDOW_BYTES
        self._given = defaultdict[int, int](int)  # by stream: beyond the first window, less what was sent
        self._ended: set[int] = set()  # streams
        self._is_closed = False
        self._changed = asyncio.Event()

    async def send(self, *frames: bytes) -> None:
        async with asyncio.timeout(self._seconds_max):
            data = b"".join(frames)
            self.writer.write(data)
            await self.writer.drain()
        self.sent_bytes += len(data)

    async def frame(self) -> tuple[int, int, bytes]:
        """The next frame: kind, flags, body. IncompleteReadError once the broker has closed the connection."""
        async with asyncio.timeout(self._seconds_max):
            head = await self.reader.readexactly(9)
            body = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
        self._heed(kind, flags, stream, body)
        if kind == SETTINGS and not flags & ACK:
            await self.send(frame(SETTINGS, ACK))
        if self._is_honest and kind == PING and not flags & ACK:
            await self.send(frame(PING, ACK, body=body))
        if self._is_honest and kind == DATA and body:
            room = len(body).to_bytes(4, "big")
            await self.send(*(frame(WINDOW_UPDATE, stream=each, body=room) for each in (0, stream)))
        return kind, flags, body

    def _heed(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        """Note what a frame says about windows and the ends of streams."""
        if kind == WINDOW_UPDATE and stream:
            self._given[stream] += int.from_bytes(body, "big")
        elif kind == WINDOW_UPDATE:
            self._window += int.from_bytes(body, "big")
        elif kind == SETTINGS:
            for at in range(0, len(body), 6):
                if int.from_bytes(body[at : at + 2], "big") == _INITIAL_WINDOW_SIZE:
                    self._initial = int.from_bytes(body[at + 2 : at + 6], "big")
        elif kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self._ended.add(stream)
        self._changed.set()

    async def upload(self, stream: int, data: bytes, *, ends: bool = False) -> bool:
        """Send data as the windows allow, and wait for them; whether all went out before the call was ended."""
        rest = memoryview(data)
        while rest and stream not in self._ended:
            room = min(self._window, self._initial + self._given[stream], _FRAME_BYTES_MAX)
            if room > 0:
                part, rest = rest[:room], rest[room:]
                self._window -= len(part)
                self._given[stream] -= len(part)
                await self.send(frame(DATA, END_STREAM if ends and not rest else 0, stream, bytes(part)))
            elif self._is_closed:
                raise ConnectionResetError("The connection was closed")
            else:
                self._changed.clear()
                await self._changed.wait()
        return not rest

    async def until(self, kind: int, flags: int = 0) -> bytes:
        while (found := await self.frame())[:2] != (kind, flags):
            pass
        return found[2]

    async def until_ended(self, stream: int) -> None:
        """Wait until the broker has ended a call; somebody reads meanwhile."""
        while stream not in self._ended and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()

    async def live(self) -> None:
        """Read on until the broker closes the connection."""
        self._seconds_max = None
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    await self.frame()
        finally:
            self._is_closed = True
            self._changed.set()

    async def until_closed(self) -> None:
        async with asyncio.timeout(self._seconds_max):
            while await self.reader.read(65_536):
                pass

    async def greet(self) -> None:
        """Shake hands, as HTTP/2 does."""
        await self.send(PREFACE, frame(SETTINGS))
        await self.until(SETTINGS)


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
