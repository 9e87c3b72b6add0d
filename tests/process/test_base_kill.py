"""kill -9 of the command that uploads a backup, and again: nothing that was answered before it is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

from postdate_api.v1 import message_pb2, producer_pb2
from tests.depth import at_depth
from tests.process.conftest import SMALL, Begin, BrokerProcess, Start, command_here, until
from tests.process.load import SUBSCRIPTIONS, Load, run_for
from tests.process.test_crash import verify

ROUNDS = at_depth(change=1, deep=15)
TOPICS = 20
"""Beside the load, so that an upload takes many calls."""


def count_chunks(store: Path) -> int:
    return len(list(store.glob("chunks/[0-9a-f]*")))


def count_bases(store: Path) -> int:
    return len(list(store.glob("bases/[0-9a-f]*")))


async def kill_midway(begin: Begin, broker: BrokerProcess, store: Path, more: int) -> bool:
    """Begin an upload, and kill it once it has stored so many chunks more; False if it was done before."""
    before, bases = count_chunks(store), count_bases(store)
    command = await begin("backup", "create", f"file://{store}", "--address", broker.grpc_address)
    process = command.process
    async with asyncio.timeout(60):
        while process.returncode is None and count_chunks(store) < before + more:
            await asyncio.sleep(0.001)
    if process.returncode is None:
        process.kill()
    await command.finish()
    return count_bases(store) == bases


async def test_kill_9_of_an_upload_under_load(start: Start, begin: Begin, tmp_path: Path) -> None:
    load, store = Load(seed=4, pause_ms=at_depth(change=120, deep=4)), tmp_path / "store"
    store.mkdir()
    # Half of what is delivered is never acknowledged, and must not come again before the kill.
    broker = await (await start(**SMALL, lease_ms="10m", data_dir=str(tmp_path / "d"))).serving()
    messages = [message_pb2.Message(payload=b"x")]
    for number in range(TOPICS):
        await broker.producer.Produce(producer_pb2.ProduceRequest(topic=f"t{number}", messages=messages))
    tasks = await run_for(broker, load, 0.3)
    killed = [await kill_midway(begin, broker, store, 1 + load.rng.randrange(20)) for _ in range(ROUNDS)]
    assert any(killed), "none of them was cut short"
    left = count_chunks(store)
    answered, confirmed = dict(load.answered), {name: set(load.confirmed[name]) for name in SUBSCRIPTIONS}
    status, told = await command_here("backup", "create", f"file://{store}", "--address", broker.grpc_address)
    assert status == 0, told
    url = told.splitlines()[-1]
    assert url.startswith(f"file://{store}#")
    await broker.kill()
    await asyncio.gather(*tasks)
    assert left and not load.violations, load.violations[:5]

    target = tmp_path / "restored"
    status, told = await command_here("restore", f"file://{store}", "--data-dir", str(target))
    assert status == 0, told
    again = await (await start(**SMALL, data_dir=str(target))).serving()
    after = Load(seed=5)
    after.answered, after.confirmed, after.payloads = answered, confirmed, load.payloads
    after.acked = load.acked

    async def is_settled() -> bool:
        return not any(after.missing(name) for name in SUBSCRIPTIONS)

    tasks = [asyncio.ensure_future(after.consume(again, name)) for name in SUBSCRIPTIONS]
    await until(is_settled, "answered messages are gone")
    assert not after.violations, after.violations[:5]
    await again.kill()
    await asyncio.gather(*tasks)
    verify(target)
    status, told = await command_here("verify", url)
    assert status == 0, told
