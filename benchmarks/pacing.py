"""The rate of a paced subscription, as its consumers see it: `python -m benchmarks.pacing`.

Three consumers of the SDK share a subscription that has more messages than they get. Of each rate ten seconds are
counted, after the burst; then the next rate is set while they are connected.
"""

from __future__ import annotations

import asyncio
import os
import time

import postdate
from benchmarks.processes import Broker, own_setup

RATES = (7.5, 50.0, 1_000.0, 20_000.0)
SECONDS = 10.0
CONSUMERS = 3


def main() -> None:
    with own_setup("pacing") as setup, Broker(setup, "pacing") as broker:
        os.sched_setaffinity(0, {setup.client_core})
        asyncio.run(measure(broker.address))


async def measure(address: str) -> None:
    async with postdate.connect(address) as client:
        await _measure(client)


async def _measure(client: postdate.Client) -> None:
    arrived: list[float] = []

    async def consume() -> None:
        async with client.subscribe("t", "s") as subscription:
            async for message in subscription:
                arrived.append(time.monotonic())
                message.ack_nowait()

    await client.topics.create("t")
    await client.subscriptions.create(
        "t", "s", policy=postdate.SubscriptionPolicy(max_delivery_rate=RATES[0])
    )
    async with client.producer("t") as producer:
        for _ in range(int(sum(RATES) * (SECONDS + 2) / 1_000) + 1):
            await producer.send_many([b"x"] * 1_000)
    consumers = [asyncio.create_task(consume()) for _ in range(CONSUMERS)]
    for rate in RATES:
        await client.subscriptions.update("t", "s", max_delivery_rate=rate)
        await asyncio.sleep(1.0)
        begun = len(arrived), time.monotonic()
        await asyncio.sleep(SECONDS)
        found = (len(arrived) - begun[0]) / (time.monotonic() - begun[1])
        print(f"{rate:g}/s: {found:.2f}/s, {100 * (found / rate - 1):+.2f} %")
    for consumer in consumers:
        consumer.cancel()
    await asyncio.gather(*consumers, return_exceptions=True)


if __name__ == "__main__":
    main()
