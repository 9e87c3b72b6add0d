"""The SDK's `run` while its broker is killed and started again: nothing is lost, nothing confirmed is repeated."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta
from pathlib import Path

import postdate
from tests.depth import at_depth
from tests.process.conftest import SMALL, Start

COUNT = at_depth(change=150, deep=300)
KILLS = at_depth(change=1, deep=3)


async def test_run_survives_a_killed_broker(start: Start, tmp_path: Path):
    settings = SMALL | {"data_dir": str(tmp_path / "data")}
    broker = await (await start(**settings)).serving()
    settings |= {"grpc_address": broker.grpc_address}
    stored: list[bytes] = []
    confirmed: set[bytes] = set()
    begun: Counter[bytes] = Counter()
    repeated: list[bytes] = []
    running: set[bytes] = set()
    done = asyncio.Event()

    async def handle(message: postdate.Message) -> None:
        payload = message.payload
        assert payload not in running, "one message is handled by two handlers at a time"
        if payload in confirmed:
            repeated.append(payload)
        begun[payload] += 1
        running.add(payload)
        await asyncio.sleep(0.02)
        await message.ack()
        running.remove(payload)
        confirmed.add(payload)
        if len(confirmed) == COUNT:
            done.set()

    async def send(producer: postdate.Producer) -> None:
        for number in range(COUNT):
            payload = b"%d" % number
            await producer.send(
                payload, key=str(number % 20), deliver_after=timedelta(milliseconds=number % 50)
            )
            stored.append(payload)

    kills_at = [COUNT * (number + 1) // (KILLS + 1) for number in range(KILLS)]
    async with postdate.connect(broker.grpc_address, retry_for=timedelta(seconds=30)) as client:
        await client.topics.create("t", postdate.TopicPolicy(dedup_window=timedelta(hours=1)))
        async with (
            client.producer("t", producer_name="p", linger=timedelta(0)) as producer,
            client.subscribe(
                "t", "s", type=postdate.SubscriptionType.KEY_SHARED, lease=timedelta(seconds=5)
            ) as subscription,
            asyncio.timeout(60),
        ):
            sending = asyncio.create_task(send(producer))
            working = asyncio.create_task(subscription.run(handle, concurrency=10))
            for count in kills_at:
                while len(confirmed) < count:
                    await asyncio.sleep(0.005)
                await broker.kill()
                broker = await (await start(**settings)).serving()
            await sending
            await done.wait()
            subscription.stop()
            await working
        stats = (await client.stats("t"))[0].subscriptions[0]
    assert len(stored) == COUNT == len(confirmed)
    assert not repeated
    assert (stats.ready_messages, stats.leased_messages, stats.scheduled_messages) == (0, 0, 0)
