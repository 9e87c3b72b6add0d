"""What calls that only begin can make the broker hold: bounded, and given back when they have gone."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from benchmarks.http2 import END_HEADERS, HEADERS, Raw, call, connected, frame, message
from tests.process.conftest import BrokerProcess, Start, until
from tests.wire.access_files import Files

PRODUCE = call("/postdate.v1.ProducerService/Produce")
CONNECTIONS, CALLS = 12, 10
REQUEST_BYTES = 15 << 20
BUDGET_BYTES = 64 << 20  # four turns of 16 MiB
KEPT_BYTES = 64 << 20
OVERHEAD_BYTES = 64 << 20
"""Windows of calls without a turn, buffers of sockets, messages of calls that have just lost their turn, and what the
allocator keeps. Without turns it is 120 messages of 16 MiB."""


def resident_bytes(broker: BrokerProcess) -> int:
    lines = Path(f"/proc/{broker.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


async def half_send(raw: Raw, seconds: float) -> None:
    """Begin calls and send most of a great message on each, as far as the broker takes it.

    It does not heed windows, so gRPC cuts its connections: what a sender that heeds them can do is not tried here.
    """
    numbers = range(1, 2 * CALLS, 2)
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(seconds):
            for number in numbers:
                await raw.send(frame(HEADERS, END_HEADERS, number, PRODUCE))
            chunk = message(1, bytes(16_384 - 5), of_bytes=REQUEST_BYTES)[9:]
            for part in range(REQUEST_BYTES // 16_384 - 1):
                for number in numbers:
                    await raw.send(frame(0, 0, number, chunk if part == 0 else bytes(16_384)))


@pytest.mark.parametrize("who", ["nobody asks", "strangers"])
async def test_half_sent_messages_hold_a_bounded_memory(start: Start, tmp_path: Path, who: str):
    settings = {}
    if who == "strangers":
        given = Files(tmp_path).settings
        settings = {name: str(given[name]) for name in ("access_file", "tokens_file")}
    broker = await start(
        data_dir=str(tmp_path / "d"),
        receiving_bytes_max=str(BUDGET_BYTES),
        first_message_ms="20s",
        **settings,
    )
    await broker.serving()
    before = resident_bytes(broker)
    peak = before
    async with AsyncExitStack() as stack:
        raws = [await stack.enter_async_context(connected(broker.grpc_address)) for _ in range(CONNECTIONS)]
        flood = asyncio.gather(*(half_send(raw, 8) for raw in raws))
        while not flood.done():
            peak = max(peak, resident_bytes(broker))
            await asyncio.wait({flood}, timeout=0.05)
    assert peak - before < BUDGET_BYTES + OVERHEAD_BYTES

    async def is_given_back() -> bool:
        return resident_bytes(broker) - before <= KEPT_BYTES

    await until(is_given_back, "memory of calls that have gone is kept")
