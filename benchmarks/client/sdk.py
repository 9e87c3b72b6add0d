"""The same through the SDK, by its public names only."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import postdate
from benchmarks.client import raw
from benchmarks.client.control import check, percentiles, phase

_SUBSCRIPTION = "subscription-0"
_PERMITS = 10_000
_DELAY_MS = (1_000, 3_600_000)


async def send_many(task: dict[str, Any]) -> dict[str, Any]:
    """Lists of `batch` from `tasks` tasks; with `each`, every message has a delay of its own."""
    batch, rng = task["batch"], random.Random(7)
    lists = [[os.urandom(task["payload_bytes"]) for _ in range(batch)] for _ in range(64)]

    async def send(producer: postdate.Producer, number: int) -> int:
        payloads = lists[number % len(lists)]
        if task["each"]:
            messages = [
                postdate.OutgoingMessage(
                    payload, deliver_after=timedelta(milliseconds=rng.randint(*_DELAY_MS))
                )
                for payload in payloads
            ]
            return len(await producer.send_many(messages))
        delay = timedelta(milliseconds=rng.randint(*_DELAY_MS))
        return len(await producer.send_many(payloads, deliver_after=delay))

    return await _produce(task, send)


async def send(task: dict[str, Any]) -> dict[str, Any]:
    """One message each from `tasks` tasks; the SDK gathers them."""
    payloads = [os.urandom(task["payload_bytes"]) for _ in range(1024)]
    rng = random.Random(7)
    delays = [timedelta(milliseconds=rng.randint(*_DELAY_MS)) for _ in range(1021)]

    async def send_one(producer: postdate.Producer, number: int) -> int:
        await producer.send(payloads[number % 1024], deliver_after=delays[number % 1021])
        return 1

    return await _produce(task, send_one)


async def _produce(
    task: dict[str, Any], send_next: Callable[[postdate.Producer, int], Awaitable[int]]
) -> dict[str, Any]:
    stored = number = 0
    took_ms: list[float] = []
    stopping = False

    async def work(producer: postdate.Producer) -> None:
        nonlocal stored, number
        while not stopping:
            number += 1
            begin = time.perf_counter()
            count = await send_next(producer, number)
            stored += count  # not in one statement: that would read `stored` before it waits
            took_ms.append((time.perf_counter() - begin) * 1000)

    async with postdate.connect(task["address"]) as client:
        await _create(client)
        async with client.producer(raw.TOPIC) as producer, asyncio.TaskGroup() as tasks:
            for _ in range(task["tasks"]):
                tasks.create_task(work(producer))
            await asyncio.sleep(task["warm_seconds"])
            await phase("measuring")
            took_ms.clear()
            begin, before = time.perf_counter(), stored
            await asyncio.sleep(task["seconds"])
            end, after = time.perf_counter(), stored
            await phase("measured")
            stopping = True
        await _wait_counts(client, stored)
    answered = percentiles(took_ms)
    return {
        "rate": (after - before) / (end - begin),
        "answer_p50_ms": answered["p50"],
        "answer_p99_ms": answered["p99"],
        "stored": stored,
    }


async def deliver(task: dict[str, Any]) -> dict[str, Any]:
    """Take `count` messages, all due, by the iterator, with acks that are coalesced and confirmed.

    Exactly once follows without a look at each id: as many were taken as are stored, each was acknowledged,
    and the broker says that not one of the stored is left.
    """
    count = task["count"]
    async with postdate.connect(task["address"]) as client:
        await client.server_info()
        await phase("measuring")
        begin = time.perf_counter()
        async with client.subscribe(raw.TOPIC, _SUBSCRIPTION, permits=_PERMITS) as subscription:
            taken = 0
            async for message in subscription:
                subscription.ack_nowait(message)
                taken += 1
                if taken == count:
                    break
            await subscription.wait_confirmed()
            end = time.perf_counter()
            await phase("measured")
            more = await subscription.receive_many(timeout=timedelta(milliseconds=300))
            check(not more, f"{len(more)} messages more than were stored")
        await _wait_counts(client, 0)
    return {"rate": count / (end - begin)}


async def _create(client: postdate.Client) -> None:
    await client.topics.create(raw.TOPIC)
    await client.subscriptions.create(
        raw.TOPIC, _SUBSCRIPTION, initial_position=postdate.InitialPosition.EARLIEST
    )


async def _wait_counts(client: postdate.Client, expected: int) -> None:
    """The subscription must come to hold so many messages, ready, taken or waiting for their time."""
    deadline = time.monotonic() + 30
    while True:
        (stats,) = await client.stats(raw.TOPIC)
        of = stats.subscriptions[0]
        held = of.ready_messages + of.leased_messages + of.scheduled_messages
        if held == expected:
            return
        check(time.monotonic() < deadline, f"the broker holds {held} messages, expected {expected}")
        await asyncio.sleep(0.2)
