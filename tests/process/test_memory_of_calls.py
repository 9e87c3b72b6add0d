"""Memory that strangers who heed windows can take: bounded, and given back when they have gone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.strangers.floods import Flood
from benchmarks.strangers.measure import access_flags, resident_bytes
from broker.config import BrokerConfig
from broker.rpc.reception import window_bytes
from tests.depth import TODAY, at_depth, deep_but
from tests.process.conftest import BrokerProcess, Start, until

MIB = 1 << 20
SECONDS = at_depth(change=1, deep=6)
"""Of a flood at least."""
BUDGET_BYTES = 64 * MIB  # four turns of 16 MiB
KEPT_BYTES = 64 * MIB
OVERHEAD_BYTES = 64 * MIB
"""Windows of calls without a turn, buffers of sockets, messages of calls that have just lost their turn, and what the
allocator keeps. Without turns it is 120 messages of 15 MiB."""
TWO_ARENAS = {"MALLOC_ARENA_MAX": "2"}
"""Or the allocator keeps some memory for each thread, more or less of it by how they are scheduled."""
WINDOWS_BYTES = BUDGET_BYTES // 2
"""Of all streams that wait to be read."""
CALLS_BYTES = 2 * 512 * (16 << 10)
"""Those streams without their windows, and as many that have given way and are not gone yet."""


@dataclass(frozen=True)
class Case:
    scale: float
    sent_bytes: int
    """Bytes that it must have sent: else there was no flood."""
    beyond_bytes: int = 0
    """Bytes that it may take apart from the budget and the overhead."""
    calls: int = 0


FLOODS = {
    "half-sent messages of 15 MiB": Case(1, 100 * MIB),
    "a window of each message": Case(0.3, 30 * MIB, WINDOWS_BYTES + CALLS_BYTES),
    "large calls without a right": Case(1, 100 * MIB),
    # Without a bound it is 120 messages of 15 MiB here too; a fast client sends some between two looks.
    "half-sent later messages of 15 MiB": Case(1, at_depth(change=300, deep=1_000) * MIB, 128 * MIB),
    # These begin well: what arrives then at once is a message of each.
    "streams of large messages": Case(1, 200 * MIB, 120 * 2 * MIB),
}
OF_THE_DAY = [list(FLOODS)[(TODAY + step) % len(FLOODS)] for step in range(3)]
"""Floods that a change meets, on the next day one of them another."""


async def flooded(broker: BrokerProcess, name: str, case: Case, budget_bytes: int = BUDGET_BYTES) -> Flood:
    """Return the figures of a flood, after the broker held no more than it may and gave it back."""
    await broker.serving()
    pid = broker.process.pid
    peak = before = resident_bytes(pid)
    least = (0, case.calls, case.sent_bytes)
    flood = Flood(broker.grpc_address, broker.http_address, SECONDS, case.scale, least=least)
    flooding = asyncio.create_task(flood.run(name))
    while not flooding.done():
        peak = max(peak, resident_bytes(pid))
        await asyncio.wait({flooding}, timeout=0.05)
    await flooding
    assert flood.is_enough, f"there was no flood: {flood.calls}, {flood.sent_bytes}"
    assert peak - before < budget_bytes + OVERHEAD_BYTES + case.beyond_bytes

    async def is_given_back() -> bool:
        return resident_bytes(pid) - before <= KEPT_BYTES

    await until(is_given_back, "memory of calls that have gone is kept")
    return flood


@pytest.mark.parametrize("name", deep_but(OF_THE_DAY, FLOODS))
async def test_messages_that_arrive_hold_a_bounded_memory(start: Start, tmp_path: Path, name: str):
    broker = await start(
        environ=TWO_ARENAS,
        data_dir=str(tmp_path / "d"),
        receiving_bytes_max=str(BUDGET_BYTES),
        first_message_ms="20s",
    )
    await flooded(broker, name, FLOODS[name])


@pytest.mark.deep
async def test_messages_that_arrive_hold_a_gibibyte_by_default(start: Start, tmp_path: Path):
    """64 turns of 16 MiB: of 120 messages of 15 MiB the others wait, each with a window."""
    config = BrokerConfig()
    assert config.receiving_bytes_max == 1 << 30
    broker = await start(environ=TWO_ARENAS, data_dir=str(tmp_path / "d"), first_message_ms="20s")
    case = Case(1, 900 * MIB, 120 * window_bytes(config))
    await flooded(broker, "half-sent messages of 15 MiB", case, config.receiving_bytes_max)


async def test_who_is_refused_by_the_headers_sends_no_message(start: Start, tmp_path: Path):
    broker = await start(*access_flags(tmp_path), data_dir=str(tmp_path / "d"), first_message_ms="20s")
    flood = await flooded(broker, "half-sent messages of 15 MiB", Case(1, 0, calls=120))
    assert flood.calls == 120
    assert flood.sent_bytes < flood.calls * window_bytes(BrokerConfig()) + MIB, (
        "more than a window of each call"
    )
