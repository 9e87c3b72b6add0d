"""The port's own limits, each seen from outside: floods, silence and oversize end, and good clients go on.

Times are made short where the broker's own would make a test wait.
"""

from __future__ import annotations

import asyncio
import fcntl
import ssl
import termios
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    Raw,
    call,
    connected,
    frame,
    message,
)
from broker.config import BrokerConfig
from broker.rpc import port as port_module
from broker.rpc.reception import window_bytes
from broker.runtime import connections
from postdate_api.v1 import admin_pb2
from tests.certificates import Authority
from tests.depth import at_depth
from tests.wire.conftest import Serve, Wire, within

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
CALL = call("/postdate.v1.AdminService/GetServerInfo")


def raw(wire: Wire, **how: Any) -> AbstractAsyncContextManager[Raw]:
    return connected(wire.server.grpc_address, **how)


def option(monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    assert name in port_module.GRPC_OPTIONS
    monkeypatch.setitem(port_module.GRPC_OPTIONS, name, value)


async def serves(wire: Wire, **how: Any) -> None:
    await within(wire.admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), **how))


def unread_bytes(port: int) -> int:
    """Bytes that have arrived on the connections to a port of this process, and that gRPC has not read yet."""
    unread = 0
    for connection, _ in connections._connections():
        if connection.getsockname()[1] == port:
            unread += int.from_bytes(fcntl.ioctl(connection, termios.FIONREAD, bytes(4)), "little")
    return unread


def keep_busy_until_read(port: int) -> None:
    """Hold the event loop; gRPC reads on threads of its own."""
    deadline = time.monotonic() + 20
    while unread_bytes(port):
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_calls_that_arrive_while_the_broker_is_busy_are_not_refused(wire: Wire):
    """gRPC refuses some of a thousand that the event loop has not seen yet, and each beyond three thousand."""
    port, calls = int(wire.server.grpc_address.rsplit(":", 1)[1]), at_depth(change=100, deep=250)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(raw(wire, is_honest=True)) for _ in range(16)]
        for each in clients:
            for stream in range(1, 2 * calls, 2):
                each.writer.write(frame(HEADERS, END_HEADERS, stream, CALL))
                each.writer.write(message(stream, b"", ends=True))
            assert not each.writer.transport.get_write_buffer_size(), "all of it is on its way"
        keep_busy_until_read(port)

        async def answers(client: Raw) -> int:
            count = ended = 0
            while ended < calls:
                kind, flags, body = await client.frame()
                count += kind == DATA and len(body) > 0
                ended += kind == RST_STREAM or bool(kind in (DATA, HEADERS) and flags & END_STREAM)
            return count

        counts = await asyncio.wait_for(asyncio.gather(*map(answers, clients)), 60)
        assert counts == [calls] * len(clients)


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


async def test_connections_that_begin_no_handshake_are_closed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    option(monkeypatch, "grpc.server_handshake_timeout_ms", 200)
    pair = Authority(tmp_path).issue("server", is_local=True)
    wire = await serve(tls_cert_file=pair.cert_file, tls_key_file=pair.key_file)
    async with raw(wire, greet=False) as silent, raw(wire, greet=False) as slow:
        await slow.send(b"\x16\x03\x01")  # the beginning of a ClientHello
        await silent.until_closed()
        await slow.until_closed()


async def test_connections_of_clients_with_certificates_end_in_time(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(
        port_module,
        "MTLS_OPTIONS",
        {"grpc.max_connection_age_ms": 200, "grpc.max_connection_age_grace_ms": 200},
    )
    authority = Authority(tmp_path)
    pair, own = authority.issue("server", is_local=True), authority.issue("client", common_name="billing")
    wire = await serve(
        tls_cert_file=pair.cert_file, tls_key_file=pair.key_file, tls_client_ca_file=authority.ca_file
    )
    context = ssl.create_default_context(cafile=authority.ca_file)
    context.load_cert_chain(own.cert_file, own.key_file)
    context.set_alpn_protocols(["h2"])
    async with raw(wire, ssl=context, server_hostname="localhost") as connection:
        await connection.send(frame(HEADERS, END_HEADERS, 1, CALL))  # a call that never ends by itself
        await connection.until(GOAWAY)
        await connection.until_closed()


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
    assert int.from_bytes(told[b"\x00\x04"], "big") == window_bytes(BrokerConfig())
    # Calls that send nothing hold their streams; the one too many is refused, and the connection goes on.
    await connection.send(*(frame(HEADERS, END_HEADERS, number, CALL) for number in (1, 3, 5, 7)))
    refusal = int.from_bytes(await connection.until(RST_STREAM), "big")
    assert refusal in (7, 11)  # REFUSED_STREAM, or ENHANCE_YOUR_CALM
    await connection.send(frame(PING, body=b"12345678"))
    assert await connection.until(PING, ACK) == b"12345678"
    connection.writer.close()
    await serves(wire)


async def test_a_connection_has_as_many_streams_as_the_document_says(wire: Wire):
    async with raw(wire, greet=False) as connection:
        await connection.send(PREFACE, frame(SETTINGS))
        settings = await connection.until(SETTINGS)
    told = {settings[at : at + 2]: settings[at + 2 : at + 6] for at in range(0, len(settings), 6)}
    assert int.from_bytes(told[b"\x00\x03"], "big") == 250


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


@pytest.mark.parametrize("answered", [0, 4])
async def test_frozen_peers_are_noticed(serve: Serve, monkeypatch: pytest.MonkeyPatch, answered: int):
    option(monkeypatch, "grpc.keepalive_time_ms", 100)
    option(monkeypatch, "grpc.keepalive_timeout_ms", 100)
    option(monkeypatch, "grpc.http2.ping_timeout_ms", 100)
    wire = await serve()
    async with raw(wire) as frozen:
        for _ in range(answered):
            await frozen.send(frame(PING, ACK, body=await frozen.until(PING)))
        await frozen.until(PING)  # it reads, but answers no more
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
