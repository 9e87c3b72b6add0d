"""A wall clock that is stepped in both directions, with real timers (P2). The simulation does it at random."""

from __future__ import annotations

import asyncio
import time

import pytest

from broker.runtime.clock import SystemClock
from tests.wire.conftest import LIMIT_SECONDS, Message, Serve

HOUR_MS = 3_600_000


class Steps:
    """Moves every wall clock of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offset_ms = 0
        monkeypatch.setattr(SystemClock, "now_ms", lambda _: time.time_ns() // 1_000_000 + self.offset_ms)


async def test_step_forward_delivers_what_has_become_due(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    steps = Steps(monkeypatch)
    wire = await serve(clock_recheck_ms=50)
    stream = await wire.subscribe("t")
    await wire.produce("t", Message(payload=b"in an hour", deliver_after_ms=HOUR_MS))
    await stream.stays_quiet()
    steps.offset_ms = HOUR_MS
    assert (await stream.delivery()).message.payload == b"in an hour"


async def test_step_back_makes_nothing_early_and_loses_nothing(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    steps = Steps(monkeypatch)
    wire = await serve(clock_recheck_ms=50)
    stream = await wire.subscribe("t")
    [id_] = await wire.produce("t", Message(payload=b"soon", deliver_after_ms=400))
    steps.offset_ms = -HOUR_MS
    await stream.stays_quiet(0.6)
    await wire.produce("t", b"now")  # the others go on
    assert (await stream.delivery()).message.payload == b"now"
    steps.offset_ms = 0
    delivery = await stream.delivery()
    assert (delivery.id.ledger_id, delivery.id.entry_id) == id_


async def test_step_back_between_due_and_hand_out_waits_again(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    steps = Steps(monkeypatch)
    wire = await serve(clock_recheck_ms=50)
    await wire.subscribe("t", permits=0)
    await wire.produce("t", Message(payload=b"due", deliver_after_ms=50))
    async with asyncio.timeout(LIMIT_SECONDS):
        while (await wire.stats("t")).scheduled_messages:  # until it is due; nobody may take it
            await asyncio.sleep(0.005)
    steps.offset_ms = -HOUR_MS
    other = await wire.subscribe("t")
    await other.stays_quiet()
    steps.offset_ms = 0
    assert (await other.delivery()).message.payload == b"due"


async def test_lease_follows_the_monotonic_clock(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    steps = Steps(monkeypatch)
    wire = await serve(clock_recheck_ms=50)
    ids = await wire.produce("t", b"x")
    stream = await wire.subscribe("t", permits=1, lease_ms=60_000)
    await stream.delivery()
    other = await wire.subscribe("t")
    steps.offset_ms = 24 * HOUR_MS
    await other.stays_quiet()
    assert await stream.ack(ids) == []
