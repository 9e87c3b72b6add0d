"""kill -9 while buckets are sealed, merged, loaded and checkpointed all the time, on one data directory."""

from __future__ import annotations

import asyncio
import signal
import urllib.request
from pathlib import Path

from tests.depth import at_depth
from tests.process.conftest import SMALL, BrokerProcess, Start
from tests.process.load import SUBSCRIPTIONS, UNDER_WAY, Load, run_for
from tests.process.test_crash import settle, verify

ROUNDS = at_depth(change=1, deep=12)
TINY = {
    **SMALL,
    "min_index_count": "50",
    "max_buckets": "2",
    "max_segment_entries": "20",
    "segment_time_step_ms": "500ms",
    "seal_after_ms": "100ms",
    "ledgers_per_bucket": "2",
    "ledger_max_entries": "500",
    "checkpoint_interval_ms": "200ms",
}


def metrics(broker: BrokerProcess) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{broker.http_address}/metrics", timeout=5) as response:
        lines = response.read().decode().splitlines()
    found = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in found}


def done(found: dict[str, float], operation: str) -> float:
    return found.get(f'postdate_index_operations_total{{operation="{operation}",result="ok"}}', 0)


async def test_kill_9_while_buckets_are_sealed_and_merged_loses_and_doubles_nothing(
    start: Start, tmp_path: Path
):
    # Delays beyond the window that is loaded ahead, so that most of what is delivered was in a bucket on disk.
    load = Load(seed=21, delay_ms_max=6_000)
    data_dir = tmp_path / "d"
    operations = dict.fromkeys(("seal", "merge", "load"), 0.0)
    wanted = {"seal": 3 * ROUNDS + 1, "merge": max(1, ROUNDS // 2), "load": ROUNDS // 2 + 1}
    rounds = 0
    # On a busy machine a round does less, so it takes more of them, and longer ones, until enough was interrupted.
    while rounds < ROUNDS or any(operations[each] < least for each, least in wanted.items()):
        rounds += 1
        assert rounds <= 4 + 4 * ROUNDS, operations
        load.begin_life()
        broker = await (await start(data_dir=str(data_dir), **TINY)).serving()
        tasks = await run_for(  # with one producer: merges keep up with so much
            broker, load, (0.5 + 1.5 * load.rng.random()) * max(1.0, rounds / ROUNDS), producers=1
        )
        found = await asyncio.to_thread(metrics, broker)
        await broker.kill()
        await asyncio.gather(*tasks)
        assert not load.violations, load.violations[:5]
        assert found["postdate_index_rebuilds_total"] == 0
        for operation in operations:
            operations[operation] += done(found, operation)
        await asyncio.to_thread(verify, data_dir)
    load.begin_life()
    broker = await (await start(data_dir=str(data_dir), **TINY)).serving()
    await settle(load, broker, seconds=20)
    assert not load.violations, load.violations[:5]
    assert len(load.answered) >= UNDER_WAY * ROUNDS
    for name in SUBSCRIPTIONS:
        assert not load.torn_batches(name)
    found = await asyncio.to_thread(metrics, broker)
    assert found["postdate_index_rebuilds_total"] == 0
    broker.process.send_signal(signal.SIGTERM)
    assert await broker.wait() == 0
    verify(data_dir)


async def checkpointed_bucket(broker: BrokerProcess) -> None:
    """Wait until a bucket was sealed, and a checkpoint that names it was begun after that and has ended."""
    sealed_at = None
    async with asyncio.timeout(60):
        while True:
            found = await asyncio.to_thread(metrics, broker)
            checkpoints = found["postdate_checkpoints_total"]
            if sealed_at is None and done(found, "seal"):
                sealed_at = checkpoints
            if (
                sealed_at is not None and checkpoints >= sealed_at + 2
            ):  # one may have been at work as it was sealed
                return
            await asyncio.sleep(0.1)


async def test_a_bucket_that_is_gone_is_made_again_and_an_operator_can_see_it(start: Start, tmp_path: Path):
    load = Load(seed=22, delay_ms_max=4_000)
    data_dir = tmp_path / "d"
    broker = await (await start(data_dir=str(data_dir), **TINY)).serving()
    tasks = await run_for(broker, load, 0, producers=1)
    await checkpointed_bucket(broker)
    await broker.kill()
    await asyncio.gather(*tasks)
    (gone, *_) = sorted((data_dir / "topics" / "1" / "buckets").iterdir())
    for path in sorted((data_dir / "topics" / "1" / "buckets").iterdir()):
        path.write_bytes(path.read_bytes()[:-1])
    load.begin_life()
    broker = await (await start(data_dir=str(data_dir), **TINY)).serving()
    await settle(load, broker, seconds=20)
    assert not load.violations, load.violations[:5]
    found = await asyncio.to_thread(metrics, broker)
    assert found["postdate_index_rebuilds_total"] == 1
    assert broker.logged("Buckets cannot be used")
    async with asyncio.timeout(10):
        while gone.exists():  # until the next checkpoint's manifest is durable
            await asyncio.sleep(0.01)
    broker.process.send_signal(signal.SIGTERM)
    assert await broker.wait() == 0
    verify(data_dir)
