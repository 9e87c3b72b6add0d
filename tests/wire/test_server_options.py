"""The port's own limits, each seen from outside: floods, silence and oversize end, and good clients go on.

Times are made short where the broker's own would make a test wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from broker import server as server_module
from postdate.v1 import admin_pb2
from tests.wire.conftest import Serve, Wire, batch, within

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_HEADERS, ACK = 4, 1


def frame(kind: int, flags: int = 0, stream: int = 0, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


def literal(name: bytes, value: bytes) -> bytes:
    """A header field that is not indexed."""
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value


CALL = b"\x83\x86" + b"".join(
    literal(name, value)
    for name, value in (
        (b":path", b"/postdate.v1.AdminService/GetServerInfo"),
        (b":authority", b"broker"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    )
)
"""The headers of a call, as HPACK has them: POST, http, and the rest in full."""


class Raw:
    """A connection that speaks HTTP/2 as badly as a test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))
        await within(self.writer.drain())

    async def frame(self) -> tuple[int, int, bytes]:
        """The next frame: kind, flags, body. IncompleteReadError once the broker has closed the connection."""
        head = await within(self.reader.readexactly(9))
        return head[3], head[4], await within(self.reader.readexactly(int.from_bytes(head[:3], "big")))

    async def until(self, kind: int, flags: int = 0) -> bytes:
        while (found := await self.frame())[:2] != (kind, flags):
            pass
        return found[2]

    async def until_closed(self) -> None:
        while await within(self.reader.read(65_536)):
            pass


@asynccontextmanager
async def raw(wire: Wire, *, greet: bool = True) -> AsyncIterator[Raw]:
    host, _, port = wire.server.grpc_address.rpartition(":")
    connection = Raw(*await asyncio.open_connection(host, int(port)))
    try:
        if greet:
            await connection.send(PREFACE, frame(SETTINGS))
            await connection.until(SETTINGS)
        yield connection
    finally:
        connection.writer.close()


def option(monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    assert name in server_module._GRPC_OPTIONS
    monkeypatch.setitem(server_module._GRPC_OPTIONS, name, value)


async def serves(wire: Wire, **how: Any) -> None:
    await within(wire.admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), **how))


async def code_of(call: Awaitable[Any]) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await within(call)
    return caught.value.code()


async def test_requests_over_the_limit_are_refused_also_when_they_are_small_on_the_wire(wire: Wire):
    limit = wire.broker.config.request_bytes_max
    path = "/postdate.v1.ProducerService/Produce"
    send = wire.channel.unary_unary(path, None, None)
    assert await code_of(send(bytes(limit + 1))) is EXHAUSTED
    assert await code_of(send(bytes(4 * limit), compression=grpc.Compression.Gzip)) is EXHAUSTED
    await serves(wire)


async def test_metadata_over_the_limit_is_refused_for_certain(wire: Wire):
    for _ in range(5):
        assert await code_of(serves(wire, metadata=(("x-long", "x" * 17_000),))) is EXHAUSTED
    await serves(wire, metadata=(("x-long", "x" * 15_000),))


async def test_connections_that_stay_silent_are_closed(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    option(monkeypatch, "grpc.server_handshake_timeout_ms", 200)
    wire = await serve()
    async with raw(wire, greet=False) as silent, raw(wire, greet=False) as slow:
        await slow.send(PREFACE[:10])
        await silent.until_closed()
        await slow.until_closed()
    await serves(wire)


async def test_connections_without_calls_are_closed(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    option(monkeypatch, "grpc.max_connection_idle_ms", 200)
    wire = await serve()
    async with raw(wire) as idle:
        await idle.until(GOAWAY)
        await idle.until_closed()
    await serves(wire)


async def test_streams_of_one_connection_are_bounded(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    option(monkeypatch, "grpc.max_concurrent_streams", 3)
    wire = await serve()
    host, _, port = wire.server.grpc_address.rpartition(":")
    connection = Raw(*await asyncio.open_connection(host, int(port)))
    await connection.send(PREFACE, frame(SETTINGS))
    settings = await connection.until(SETTINGS)
    told = {settings[at : at + 2]: settings[at + 2 : at + 6] for at in range(0, len(settings), 6)}
    assert int.from_bytes(told[b"\x00\x03"], "big") == 3
    # Calls that send nothing hold their streams; the one too many is refused, and the connection goes on.
    await connection.send(*(frame(HEADERS, END_HEADERS, number, CALL) for number in (1, 3, 5, 7)))
    refusal = int.from_bytes(await connection.until(RST_STREAM), "big")
    assert refusal in (7, 11)  # REFUSED_STREAM, or ENHANCE_YOUR_CALM
    await connection.send(frame(PING, body=b"12345678"))
    assert await connection.until(PING, ACK) == b"12345678"
    connection.writer.close()
    await serves(wire)


async def test_calls_at_once_are_bounded(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_module, "_CALLS_MAX", 3)
    wire = await serve()
    streams = [await wire.subscribe("t", f"s{number}") for number in range(3)]
    for _ in range(3):
        assert await code_of(wire.producer.Produce(batch("t", b"x"))) is EXHAUSTED
    await streams[0].close()
    await wire.produce("t", b"x")


async def test_who_pings_too_often_is_cut_and_who_pings_in_time_is_not(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    wire = await serve()
    async with raw(wire) as hasty:
        await hasty.send(*(frame(PING, body=b"%08d" % number) for number in range(10)))
        body = await hasty.until(GOAWAY)
        assert body[4:] == (11).to_bytes(4, "big") + b"too_many_pings"  # ENHANCE_YOUR_CALM
    option(monkeypatch, "grpc.http2.min_ping_interval_without_data_ms", 10)
    patient_wire = await serve()
    async with raw(patient_wire) as patient:
        for number in range(8):
            await patient.send(frame(PING, body=b"%08d" % number))
            assert await patient.until(PING, ACK) == b"%08d" % number
            await asyncio.sleep(0.02)  # longer than the interval: that is what is tested


async def test_frozen_peers_are_noticed(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    option(monkeypatch, "grpc.keepalive_time_ms", 100)
    option(monkeypatch, "grpc.keepalive_timeout_ms", 100)
    option(monkeypatch, "grpc.http2.ping_timeout_ms", 100)
    wire = await serve()
    async with raw(wire) as frozen:  # it reads, but answers no ping
        await frozen.until(PING)
        await frozen.until_closed()
    await serves(wire)


async def test_flood_of_streams_that_are_reset_at_once_is_survived(wire: Wire):
    async with raw(wire) as attacker:
        numbers = range(1, 8_001, 2)
        for number in numbers:
            await attacker.send(
                frame(HEADERS, END_HEADERS, number, CALL),
                frame(RST_STREAM, stream=number, body=(8).to_bytes(4, "big")),
            )
        await serves(wire)
    await serves(wire)


SLOW: dict[str, Callable[[Raw], Awaitable[None]]] = {
    "garbage": lambda connection: connection.send(b"GET / HTTP/1.1\r\n\r\n"),
    "a frame that is too long": lambda connection: connection.send(
        PREFACE, frame(SETTINGS), b"\xff\xff\xff" + bytes((DATA, 0)) + bytes(4) + bytes(100)
    ),
    "headers that are none": lambda connection: connection.send(
        PREFACE, frame(SETTINGS), frame(HEADERS, END_HEADERS, 1, b"\xff" * 50)
    ),
}


@pytest.mark.parametrize("what", SLOW)
async def test_what_is_no_http2_ends_its_connection_only(wire: Wire, what: str):
    async with raw(wire, greet=False) as connection:
        await SLOW[what](connection)
        await connection.until_closed()
    await serves(wire)
