"""Changes and lists what is pending, through the SDK."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import postdate
from benchmarks.client import keyed, raw
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
    """List 1,000 after 1,000 of what is stored, count it, and look for messages by their keys; then pages and keys once
    more beside what is begun in the phase `beside`."""
    count, pages = task["count"], task["pages"]
    rng = random.Random(7)
    async with postdate.connect(task["address"]) as client:
        await client.schedule.count(raw.TOPIC)
        await phase("measuring")
        shown = await _pages(client, task["page"], pages)
        counts: list[float] = []
        for _ in range(pages):
            started = time.perf_counter()
            found = await client.schedule.count(raw.TOPIC, width=timedelta(hours=1))
            counts.append((time.perf_counter() - started) * 1000)
            check(found.messages == count, f"{found.messages} counted of {count}")
        finds = await _finds(client, count, task["finds"], rng)
        await phase("measured")
        await phase("beside")
        beside = await _pages(client, task["page"], pages), await _finds(client, count, task["finds"], rng)
        await phase("done")
    return {
        "page_ms": shown["p50"],
        "count_ms": percentiles(counts)["p50"],
        "find_ms": finds["p50"],
        "find_p99_ms": finds["p99"],
        "beside_page_ms": beside[0]["p50"],
        "beside_find_ms": beside[1]["p50"],
        "beside_find_p99_ms": beside[1]["p99"],
    }


async def _pages(client: postdate.Client, size: int, pages: int) -> dict[str, float]:
    """Milliseconds that pages take, one after the other, from the first message on."""
    taken: list[float] = []
    started, shown = time.perf_counter(), 0
    async for _ in client.schedule.list(raw.TOPIC):
        shown += 1
        if not shown % size:
            taken.append((time.perf_counter() - started) * 1000)
            started = time.perf_counter()
            if len(taken) == pages:
                break
    return percentiles(taken)


async def _finds(client: postdate.Client, count: int, times: int, rng: random.Random) -> dict[str, float]:
    """Milliseconds that it takes to get a message by its key, of `count` that `keyed.load` stored."""
    taken: list[float] = []
    for _ in range(times):
        key = keyed.key_of(rng.randrange(count))
        started = time.perf_counter()
        found = await client.schedule.get(raw.TOPIC, schedule_key=key)
        taken.append((time.perf_counter() - started) * 1000)
        check(found.schedule_key == key, f"{found.schedule_key} is not {key}")
    return percentiles(taken)


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
