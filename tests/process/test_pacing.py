"""Pacing of a real broker on a real clock: the rate that consumers see."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import postdate
from tests.depth import at_depth
from tests.process.conftest import Start

RATE = 500
SECONDS = at_depth(change=2, deep=10)
TOLERANCE = at_depth(change=30, deep=5) / 100
"""Two seconds on a machine that does other work are no measure; ten are."""


async def test_consumers_together_get_the_rate(start: Start, tmp_path: Path) -> None:
    broker = await (await start(data_dir=str(tmp_path / "data"))).serving()
    arrived: list[float] = []
    is_over = asyncio.Event()

    async def consume(client: postdate.Client) -> None:
        async with client.subscribe("t", "s") as subscription:
            async for message in subscription:
                arrived.append(time.monotonic())
                message.ack_nowait()
                if arrived[-1] - arrived[0] > SECONDS + 0.2:
                    is_over.set()

    async with postdate.connect(broker.grpc_address) as client, asyncio.timeout(60):
        policy = postdate.SubscriptionPolicy(max_delivery_rate=RATE)
        await client.topics.create("t")
        await client.subscriptions.create("t", "s", policy=policy)
        async with client.producer("t") as producer:
            await producer.send_many([b"x"] * RATE * (SECONDS + 2))
        consumers = [asyncio.create_task(consume(client)) for _ in range(3)]
        await is_over.wait()
        for consumer in consumers:
            consumer.cancel()
        await asyncio.gather(*consumers, return_exceptions=True)
    begun = arrived[0] + 0.1  # the burst has gone
    count = sum(begun <= at < begun + SECONDS for at in arrived)
    assert abs(count - RATE * SECONDS) <= RATE * SECONDS * TOLERANCE
