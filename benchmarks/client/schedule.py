"""Changes and lists what is pending, through the SDK."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import postdate
from benchmarks.client import raw
from benchmarks.client.control import check, percentiles, phase

_BATCH = 5_000
_MONTH = timedelta(days=30)


async def change(task: dict[str, Any]) -> dict[str, Any]:
    """Store `count` messages that are due within a month; cancel half of them by id, or half of that month."""
    count, rng = task["count"], random.Random(7)
    async with postdate.connect(task["address"]) as client:
        await client.topics.create(raw.TOPIC)
        await client.subscriptions.create(raw.TOPIC, "subscription-0")
        begin = datetime.now(UTC) + timedelta(hours=1)
        ids = await _store(client, count, begin, rng)
        await asyncio.sleep(task["rest_seconds"])
        await phase("measuring")
        started = time.perf_counter()
        if task["by"] == "ids":
            done = (await client.schedule.cancel_many(raw.TOPIC, rng.sample(ids, count // 2))).done
        else:
            done = (await client.schedule.cancel_matching(raw.TOPIC, end=begin + _MONTH / 2)).done
        seconds = time.perf_counter() - started
        await phase("done")
        left = (await client.schedule.count(raw.TOPIC)).messages
        check(done + left == count, f"{done} cancelled and {left} left of {count}")
    return {"seconds": seconds, "cancelled": done, "rate": done / seconds}


async def look(task: dict[str, Any]) -> dict[str, Any]:
    """List 1,000 after 1,000 of what is stored, and count it."""
    async with postdate.connect(task["address"]) as client:
        await client.schedule.count(raw.TOPIC)
        await phase("measuring")
        pages: list[float] = []
        started, shown = time.perf_counter(), 0
        async for _ in client.schedule.list(raw.TOPIC):
            shown += 1
            if not shown % task["page"]:
                pages.append((time.perf_counter() - started) * 1000)
                started = time.perf_counter()
                if len(pages) == task["pages"]:
                    break
        counts: list[float] = []
        for _ in range(task["pages"]):
            started = time.perf_counter()
            found = await client.schedule.count(raw.TOPIC, width=timedelta(hours=1))
            counts.append((time.perf_counter() - started) * 1000)
            check(found.messages == task["count"], f"{found.messages} counted of {task['count']}")
        await phase("done")
    return {"page_ms": percentiles(pages)["p50"], "count_ms": percentiles(counts)["p50"]}


async def _store(
    client: postdate.Client, count: int, begin: datetime, rng: random.Random
) -> list[postdate.MessageId]:
    ids: list[postdate.MessageId] = []
    async with client.producer(raw.TOPIC) as producer:
        for first in range(0, count, _BATCH):
            messages = [
                postdate.OutgoingMessage(b"x" * 100, deliver_at=begin + _MONTH * rng.random())
                for _ in range(min(_BATCH, count - first))
            ]
            ids += [receipt.id for receipt in await producer.send_many(messages)]
    return ids
