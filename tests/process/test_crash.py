"""P1 and P3 with real processes and real files: kill -9 and SIGTERM under load."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from broker.jobs.verify import verify_data_dir
from broker.runtime.vfs import LocalVfs
from tests.depth import at_depth
from tests.process.conftest import SMALL, Start
from tests.process.load import SUBSCRIPTIONS, UNDER_WAY, Load, run_for
from tests.starvation import starvation_of

ROUNDS = at_depth(change=2, deep=20)
FIRST_DELIVERY_SECONDS = 10.0
"""Generous: the machine may be busy. `make bench` measures it."""
STOP_SECONDS = 6.0
"""Seconds that a stop may take if its consumers leave."""


class StreamCut(AssertionError):
    """A broker ended a stream; of what has not come nothing is known."""


async def settle(load: Load, broker: object, seconds: float = 15.0) -> None:
    """Consume until nothing that was promised is missing, and of what was stored without an answer nothing either.

    Raises StreamCut if the broker ended a stream before, as an owner does that does not hold its lease.
    """
    tasks = [asyncio.ensure_future(load.consume(broker, name)) for name in SUBSCRIPTIONS]  # type: ignore[arg-type]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(load.missing(name) for name in SUBSCRIPTIONS):
        if any(task.done() for task in tasks):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise StreamCut("a stream was cut while messages were missing")
        await asyncio.sleep(0.02)
    for name in SUBSCRIPTIONS:
        missing = sorted(load.missing(name))
        assert not missing, f"{name}: {len(missing)} answered messages are gone, {missing[:5]}"
    while time.monotonic() < deadline and any(load.torn_batches(name) for name in SUBSCRIPTIONS):
        await asyncio.sleep(0.02)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def verify(data_dir: Path) -> None:
    """The files of a stopped broker agree."""
    assert verify_data_dir(LocalVfs(), str(data_dir)).problems == []


async def test_kill_9_under_load_loses_nothing_and_brings_nothing_back(start: Start, tmp_path: Path):
    load = Load(seed=9)
    waits = []
    for _ in range(ROUNDS):
        load.begin_life()
        broker = await (await start(data_dir=str(tmp_path / "d"), **SMALL)).serving()
        tasks = await run_for(broker, load, 0.3 * load.rng.random())
        await broker.kill()
        await asyncio.gather(*tasks)
        waits.append(load.first_delivery - broker.started)
        assert not load.violations, load.violations[:5]
    load.begin_life()
    broker = await (await start(data_dir=str(tmp_path / "d"), **SMALL)).serving()
    await settle(load, broker)
    assert not load.violations, load.violations[:5]
    assert len(load.answered) >= ROUNDS * UNDER_WAY
    assert all(load.confirmed.values())
    for name in SUBSCRIPTIONS:
        assert not load.torn_batches(name)
    assert max(waits) < FIRST_DELIVERY_SECONDS, waits
    broker.process.send_signal(signal.SIGTERM)
    assert await broker.wait() == 0
    verify(tmp_path / "d")


async def test_sigterm_under_load_ends_well_and_what_was_answered_is_there(start: Start, tmp_path: Path):
    load = Load(seed=15)
    broker = await (await start(data_dir=str(tmp_path / "d"), drain_grace_ms="1m", **SMALL)).serving()
    tasks = await run_for(broker, load, 0.1)
    broker.process.send_signal(signal.SIGTERM)
    begun = time.monotonic()
    async with starvation_of(broker.process.pid) as starvation:
        assert await broker.wait() == 0
    took = time.monotonic() - begun
    assert took < STOP_SECONDS + starvation.seconds, "consumers that leave end the drain, not its grace"
    await asyncio.gather(*tasks)
    assert load.drained == set(SUBSCRIPTIONS)
    assert broker.logged("Stopped")
    assert not [line for line in broker.lines if '"error"' in line or "Traceback" in line], broker.lines
    verify(tmp_path / "d")
    load.begin_life()
    again = await (await start(data_dir=str(tmp_path / "d"), **SMALL)).serving()
    assert again.logged("Data directory opened")["replayed_records"] == 0
    await settle(load, again)
    assert not load.violations, load.violations[:5]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
async def test_consumers_that_stay_are_cut_after_the_grace(
    start: Start, tmp_path: Path, number: signal.Signals
):
    load = Load(seed=3)
    broker = await (await start(data_dir=str(tmp_path / "d"), drain_grace_ms="1500ms", **SMALL)).serving()
    tasks = await run_for(broker, load, 0, polite=False)
    broker.process.send_signal(number)
    broker.process.send_signal(number)  # impatience changes nothing
    begun = time.monotonic()
    assert await broker.wait() == 0
    assert time.monotonic() - begun < 5.0
    await asyncio.gather(*tasks)
    assert load.drained == set(SUBSCRIPTIONS)
    assert not [line for line in broker.lines if "Traceback" in line], broker.lines
    verify(tmp_path / "d")


async def test_kill_9_while_it_stops_is_safe(start: Start, tmp_path: Path):
    load = Load(seed=4)
    for _ in range(at_depth(change=2, deep=6)):
        load.begin_life()
        broker = await (await start(data_dir=str(tmp_path / "d"), **SMALL)).serving()
        tasks = await run_for(broker, load, 0)
        broker.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(load.rng.random() * 0.05)
        await broker.kill()
        await asyncio.gather(*tasks)
    load.begin_life()
    broker = await (await start(data_dir=str(tmp_path / "d"), **SMALL)).serving()
    await settle(load, broker)
    assert not load.violations, load.violations[:5]
