"""Recurring schedules: puts them, and takes what they store."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import postdate
from benchmarks.client import raw
from benchmarks.client.control import check, percentiles, phase

_AT_ONCE = 64
_FIRST_SECONDS = 2.0


async def recurring(task: dict[str, Any]) -> dict[str, Any]:
    """Put `count` schedules that each recur once a minute, spread over its seconds; consume for `seconds`."""
    count = task["count"]
    async with postdate.connect(task["address"]) as client:
        await client.topics.create(raw.TOPIC)
        await client.subscriptions.create(raw.TOPIC, "subscription-0")
        await phase("empty")
        started = time.perf_counter()
        free = asyncio.Semaphore(_AT_ONCE)

        async def put(number: int) -> None:
            async with free:
                schedule = postdate.RecurringSchedule(
                    name=f"schedule-{number:06}",
                    cron=f"{number % 60} * * * * *",
                    time_zone="Europe/Berlin",
                    payload=bytes(100),
                )
                await client.recurring.put(raw.TOPIC, schedule)

        await asyncio.gather(*(put(number) for number in range(count)))
        put_seconds = time.perf_counter() - started
        await phase("full")
        late_ms: list[float] = []
        expected = count * task["seconds"] / 60

        async def consume() -> None:
            async with client.subscribe(raw.TOPIC, "subscription-0") as subscription:
                async for message in subscription:
                    late_ms.append((time.time() - message.deliver_at.timestamp()) * 1_000)
                    message.ack_nowait()

        consumer = asyncio.create_task(consume())
        await asyncio.sleep(_FIRST_SECONDS)
        late_ms.clear()
        await phase("measuring")
        await asyncio.sleep(task["seconds"])
        await phase("measured")
        measured = list(late_ms)
        consumer.cancel()
    check(
        abs(len(measured) - expected) < expected / 10 + 5, f"{len(measured)} arrived of about {expected:.0f}"
    )
    late = percentiles(measured)
    return {"put_rate": count / put_seconds, "late_p50_ms": late["p50"], "late_p99_ms": late["p99"]}
