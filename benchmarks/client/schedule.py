"""Changes and lists what is pending, through the SDK."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import postdate
from benchmarks.client import keyed, raw
from benchmarks.client.control import check, percentiles, phase
from postdate_api.v1 import message_pb2, producer_pb2

_BATCH = 5_000
_MONTH = timedelta(days=30)
_HOUR_MS = 3_600_000
_NEIGHBOUR = "neighbour"


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


async def beside(task: dict[str, Any]) -> dict[str, Any]:
    """Time of single messages of another topic: idle, beside a cancel by due time, beside one by key prefix.

    In turns; each cancel goes through as many of the `count` messages that `keyed.load` stored, and no message twice.
    """
    turns, rate = task["turns"], task["rate"]
    took: dict[str, list[float]] = {"idle": [], "filter": [], "prefix": []}
    seconds: dict[str, list[float]] = {"filter": [], "prefix": []}
    part, begin = _MONTH / (2 * turns), datetime.now(UTC)
    async with raw.connect(task["address"]) as channel, postdate.connect(task["address"]) as client:
        await client.subscriptions.create(_NEIGHBOUR, "subscription-0")
        await phase("measuring")
        for number in range(2 * turns):
            by, prefix = ("prefix", keyed.key_of(0)[: task["prefix"]]) if number % 2 else ("filter", "")
            async with _single_messages(channel, rate, took["idle"]):
                await asyncio.sleep(task["idle_seconds"])
            async with _single_messages(channel, rate, took[by]):
                started = time.perf_counter()
                changed = await client.schedule.cancel_matching(
                    raw.TOPIC, key_prefix=prefix, start=begin + number * part, end=begin + (number + 1) * part
                )
                seconds[by].append(time.perf_counter() - started)
            check(changed.done > 0, "nothing was cancelled")
        await phase("measured")
    found = {f"{kind}_{name}_ms": ms for kind in took for name, ms in percentiles(took[kind]).items()}
    found |= {f"{by}_seconds": sum(each) / turns for by, each in seconds.items()}
    found |= {
        f"{by}_{name}_ratio": found[f"{by}_{name}_ms"] / found[f"idle_{name}_ms"]
        for by in seconds
        for name in ("p50", "p99")
    }
    return found


@asynccontextmanager
async def _single_messages(channel: Any, rate: float, took: list[float]) -> AsyncIterator[None]:
    """Produce one message after the other meanwhile; a time counts from the moment at which the call was to be made."""
    unary = raw.produce_unary(channel)
    message = message_pb2.Message(payload=bytes(100), deliver_after_ms=_HOUR_MS)
    request = producer_pb2.ProduceRequest(topic=_NEIGHBOUR, messages=[message]).SerializeToString()

    async def produce() -> None:
        begin, number = time.perf_counter(), 0
        while not ended.is_set():
            meant = begin + number / rate
            await asyncio.sleep(max(0.0, meant - time.perf_counter()))
            await unary(request)
            took.append((time.perf_counter() - meant) * 1000)
            number += 1

    ended = asyncio.Event()
    producing = asyncio.create_task(produce())
    try:
        yield
    finally:
        ended.set()
        await producing


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
