"""Connections by the thousand: honest ones are served, idle ones leave descriptors for files, and their places come
back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from benchmarks.http2 import END_HEADERS, HEADERS, call, connected, frame, message
from broker.runtime.descriptors import raise_descriptor_limit
from postdate_api.v1 import message_pb2, producer_pb2
from tests.depth import at_depth
from tests.process.conftest import BrokerProcess, Start, until

HONEST = at_depth(change=1_200, deep=5_000)
IDLE = 1_500
INFO = call("/postdate.v1.AdminService/GetServerInfo")


async def produce(broker: BrokerProcess) -> None:
    request = producer_pb2.ProduceRequest(topic="t", messages=[message_pb2.Message(payload=b"x")])
    await broker.producer.Produce(request, timeout=10, wait_for_ready=True)


async def get(address: str, path: str) -> bytes:
    """The first line of what the HTTP port answers; empty if it closes the connection."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        async with asyncio.timeout(10):
            return await reader.readline()
    finally:
        writer.close()


def open_files_of(broker: BrokerProcess) -> int:
    return len(os.listdir(f"/proc/{broker.process.pid}/fd"))


def sockets_of(broker: BrokerProcess) -> int:
    """Count the broker's open sockets."""
    count = 0
    for each in Path(f"/proc/{broker.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            count += str(each.readlink()).startswith("socket:")
    return count


async def idle(address: str, count: int, stack: AsyncExitStack) -> list[asyncio.StreamReader]:
    """Connections that say nothing, closed with the stack."""
    host, _, port = address.rpartition(":")
    readers = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection(host, int(port))
        stack.callback(writer.close)
        readers.append(reader)
    return readers


async def test_thousands_of_clients_are_served_at_once(start: Start, tmp_path: Path):
    if raise_descriptor_limit() < HONEST + 500:
        pytest.fail("this machine lets a process open too few files: raise the hard limit (ulimit -Hn)")
    broker = await (await start(data_dir=str(tmp_path / "d"))).serving()
    async with AsyncExitStack() as stack:

        async def client() -> None:
            raw = await stack.enter_async_context(connected(broker.grpc_address, is_honest=True))
            await raw.send(frame(HEADERS, END_HEADERS, 1, INFO), message(1, b"", ends=True))
            await raw.until(HEADERS, END_HEADERS)  # of the answer
            stack.callback(asyncio.ensure_future(raw.live()).cancel)

        for _ in range(HONEST // 100):
            await asyncio.gather(*(client() for _ in range(100)))
        assert sockets_of(broker) >= HONEST
        await produce(broker)
        assert b"200" in await get(broker.http_address, "/readyz")


async def test_a_broker_opens_as_many_files_as_it_is_allowed_to(start_command: Start, tmp_path: Path):
    """Shells and systemd start processes with a soft limit of 1,024, and a hard one far above it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1_024, before[1]))  # a child has the limits of its parent
    try:
        broker = await start_command(data_dir=str(tmp_path / "d"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    await broker.serving()
    assert resource.prlimit(broker.process.pid, resource.RLIMIT_NOFILE)[0] > 1_024


async def test_idle_connections_on_both_ports_leave_descriptors_for_files(start: Start, tmp_path: Path):
    assert raise_descriptor_limit() >= 2 * IDLE + 500
    # Many small files, so that each of these messages opens some.
    broker = await start(
        data_dir=str(tmp_path / "d"), files_max=1_024, ledger_max_entries="2", batch_messages_max="2",
        checkpoint_interval_ms="50ms",
    )  # fmt: skip
    await broker.serving()
    assert resource.prlimit(broker.process.pid, resource.RLIMIT_NOFILE) == (1_024, 1_024)
    assert "connections_max" in broker.logged("A setting was lowered")["setting"]
    await produce(broker)  # its connection has a place
    async with AsyncExitStack() as stack:
        readers = await idle(broker.grpc_address, IDLE, stack)
        await idle(broker.http_address, IDLE, stack)
        assert open_files_of(broker) < 1_024 - 64, "too little is left for files"
        for _ in range(50):
            await produce(broker)
        assert b"200" in await get(broker.http_address, "/readyz")
        # Those beyond the limit were closed at once, the others when they had said nothing for some seconds.
        async with asyncio.timeout(20):
            await asyncio.gather(*(reader.read() for reader in readers), return_exceptions=True)
    host_port = broker.grpc_address

    async def can_connect() -> bool:
        async with grpc.aio.insecure_channel(
            host_port, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            stub = channel.unary_unary("/grpc.health.v1.Health/Check", None, None)
            try:
                await stub(b"", timeout=2)
            except grpc.aio.AioRpcError:
                return False
        return True

    await until(can_connect, "the places of closed connections did not come back")
    assert not [line for line in broker.lines if '"level":"error"' in line.lower().replace(" ", "")]


async def test_silent_connections_keep_nobody_out(start: Start, tmp_path: Path):
    """More than there are places shake hands, stay silent, and come again when they are ended. An honest stream goes on."""
    broker = await (await start(data_dir=str(tmp_path / "d"), connections_max="200")).serving()
    await produce(broker)
    stream = broker.producer.ProduceStream()
    await stream.write(producer_pb2.ProduceRequest(topic="t", messages=[message_pb2.Message(payload=b"x")]))
    assert (await stream.read()).ids
    taken = 0

    async def hold() -> None:
        nonlocal taken
        while True:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
                async with connected(broker.grpc_address) as raw:
                    taken += 1
                    await raw.live()
            await asyncio.sleep(0.5)  # it is no flood of handshakes

    holding = asyncio.gather(*(hold() for _ in range(300)))
    try:

        async def is_full() -> bool:
            return taken >= 190

        await until(is_full, "the places were not taken")
        channel = grpc.aio.insecure_channel(
            broker.grpc_address,
            options=[("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 500)],
        )
        async with channel:
            call = channel.unary_unary("/postdate.v1.ProducerService/Produce", None, None)
            request = producer_pb2.ProduceRequest(topic="t", messages=[message_pb2.Message(payload=b"y")])
            await call(request.SerializeToString(), timeout=15, wait_for_ready=True)
        await stream.write(
            producer_pb2.ProduceRequest(topic="t", messages=[message_pb2.Message(payload=b"z")])
        )
        assert (await stream.read()).ids
        assert broker.logged("Closed idle connections because connections_max is nearly reached")["ended"]
    finally:
        holding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await holding
