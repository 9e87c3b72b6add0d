"""Many holes between acknowledgements, on real files, and kill -9: nothing confirmed comes back, what is done goes.

A change makes a quarter of a million, `make test-deep` a million.

The process that is killed runs this very module. Files in the page cache survive it, as they do any kill.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from broker.folder.broker import Broker
from broker.jobs.verify import verify_data_dir
from broker.model import Entries, bitmap_of, count_entries
from broker.policy import SubscriptionPolicy
from broker.runtime.clock import SystemClock
from broker.runtime.vfs import LocalVfs
from broker.subscriptions import requests
from broker.subscriptions.consumer import Consumer, DeliveryBatch
from broker.subscriptions.subscription import Subscription
from broker.subscriptions.types import SubscriptionType
from tests.configs import broker_config
from tests.depth import at_depth
from tests.harness import EARLIEST, Outgoing, batch_of

LEDGER_ENTRIES = 250_000
HELD = at_depth(change=2, deep=8)
"""Ledgers of which every second entry is acknowledged, in random order; between them lie some that are done."""
HOLES = HELD * LEDGER_ENTRIES // 2
BATCH = 5_000
LIMIT_SECONDS = 120.0


def open_broker(data_dir: str) -> Broker:
    config = broker_config(
        data_dir=data_dir,
        ledger_max_entries=LEDGER_ENTRIES,
        reclaim_interval_ms=100,
        checkpoint_interval_ms=200,
        disk_reserve_bytes=0,
    )
    broker = Broker(
        config,
        vfs=LocalVfs(),
        clock=SystemClock(),
        rng=random.Random(1),
        journal_executor=ThreadPoolExecutor(1),
        file_executor=ThreadPoolExecutor(1),
        read_executor=ThreadPoolExecutor(2),
        index_executor=ThreadPoolExecutor(1),
        on_failure=lambda error: sys.exit(f"failed: {error}"),
    )
    broker.open()
    broker.start()
    return broker


def odd_ones(rng: random.Random, parts: int) -> list[np.ndarray]:
    """Every second entry of a ledger, in random parts."""
    odd = np.arange(1, LEDGER_ENTRIES, 2, dtype=np.uint32)
    part_of = np.random.default_rng(rng.randrange(1 << 32)).integers(0, parts, len(odd))
    return [odd[part_of == part] for part in range(parts)]


async def live_until_killed(data_dir: str) -> None:
    broker = open_broker(data_dir)
    topic = await broker.registry.topic_or_create("orders")
    subscription = await topic.subscriptions.create(
        "one", SubscriptionType.SHARED, EARLIEST, SubscriptionPolicy()
    )
    batch = batch_of("orders", [Outgoing(b".")] * BATCH, broker.config)
    for _ in range((HELD + 2) * LEDGER_ENTRIES // BATCH):
        accepted = topic.submit(batch)
        await broker.journal.wait_room()
    await accepted.durable
    ledger_ids = [ledger.name.ledger_id for ledger in topic.log]
    done = {ledger_ids[0], ledger_ids[1 + HELD // 2]}  # the first one, and one in the middle
    rng = random.Random(3)
    acks: list[Entries] = [
        {ledger_id: bitmap_of(part)}
        for ledger_id in ledger_ids
        if ledger_id not in done
        for part in odd_ones(rng, 10)
    ]
    acks += [{ledger_id: bitmap_of(np.arange(LEDGER_ENTRIES, dtype=np.uint32))} for ledger_id in done]
    rng.shuffle(acks)
    for each in acks:
        assert (await requests.acknowledge(subscription, each)).failures == []
    while broker.counters.removed_ledgers < len(done):
        await asyncio.sleep(0.01)
    print("acknowledged", flush=True)
    await asyncio.Event().wait()


class Taker(Consumer):
    """Counts what it is sent, and forgets it."""

    def __init__(self) -> None:
        super().__init__("taker", "taker", lease_ms=3_600_000)
        self.taken: dict[int, list[np.ndarray]] = {}

    def deliver(self, batch: DeliveryBatch) -> None:
        super().deliver(batch)
        self.next_nowait()
        for ledger_id in set(batch.ledger_ids.tolist()):
            self.taken.setdefault(ledger_id, []).append(batch.entry_ids[batch.ledger_ids == ledger_id])

    def entries(self) -> Entries:
        return {ledger_id: bitmap_of(np.concatenate(parts)) for ledger_id, parts in self.taken.items()}

    def count(self) -> int:
        return sum(len(part) for parts in self.taken.values() for part in parts)


def ledger_files(data_dir: str) -> list[str]:
    return LocalVfs().list_dir(f"{data_dir}/topics/1/ledgers")


async def look_and_drain(data_dir: str) -> None:
    broker = open_broker(data_dir)
    topic = broker.registry.topic("orders")
    subscription: Subscription = topic.subscription("one")
    held = [ledger.name.ledger_id for ledger in topic.log]
    assert len(held) == HELD
    names = {name.partition(".")[0] for name in ledger_files(data_dir)}
    assert names == {str(ledger_id) for ledger_id in held}, "the files of those that are done are gone"
    assert subscription.unsettled_count() == HOLES
    consumer = Taker()
    consumer.grant(1 << 30, 0)
    topic.subscriptions.attach(subscription, consumer)
    async with asyncio.timeout(LIMIT_SECONDS):
        while consumer.count() < HOLES:
            await asyncio.sleep(0.01)
        even = bitmap_of(np.arange(0, LEDGER_ENTRIES, 2, dtype=np.uint32))
        found = consumer.entries()
        assert consumer.count() == count_entries(found), "P4: twice"
        assert found == dict.fromkeys(held, even), "P3: what was confirmed came back, or something is lost"
        assert (await requests.acknowledge(subscription, found)).failures == []
        while topic.log.ledger_count or broker.counters.removed_ledgers < HELD:
            await asyncio.sleep(0.01)
    topic.subscriptions.detach(subscription, consumer)
    await broker.stop()


async def test_many_holes_survive_kill_9_and_what_is_done_goes(tmp_path: Path):
    data_dir = str(tmp_path / "data")
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.crash.test_reclaim_holes", data_dir, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    async with asyncio.timeout(LIMIT_SECONDS):
        assert await child.stdout.readline() == b"acknowledged\n"
    child.send_signal(signal.SIGKILL)
    await child.wait()
    await look_and_drain(data_dir)
    assert verify_data_dir(LocalVfs(), data_dir).problems == []
    assert ledger_files(data_dir) == []


if __name__ == "__main__":
    asyncio.run(live_until_killed(sys.argv[1]))
