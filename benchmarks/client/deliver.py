"""Delivers: what is due already, what becomes due all at once, and a steady trickle."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import numpy as np

from benchmarks.client import raw
from benchmarks.client.consumer import Consumer
from benchmarks.client.control import check, percentiles, phase
from benchmarks.client.produce import Pipeline
from benchmarks.client.wire import Columns
from postdate_api.v1 import consumer_pb2, message_pb2, producer_pb2


async def deliver(task: dict[str, Any]) -> dict[str, Any]:
    """Take and acknowledge all messages, on each of the subscriptions at once; all are due."""
    ledgers = {int(name): count for name, count in task["ledgers"].items()}
    count = sum(ledgers.values())
    async with raw.connect(task["address"]) as channel:
        await channel.channel_ready()
        consumers = [Consumer(channel, f"subscription-{n}") for n in range(task["subscriptions"])]
        await phase("measuring")
        begin = time.perf_counter()
        ends = await asyncio.gather(*(consumer.run(count, ledgers) for consumer in consumers))
        await phase("measured")
    return {
        "rate": count * len(consumers) / (max(ends) - begin),
        "first_ms": (min(consumer.first_at for consumer in consumers) - begin) * 1000,
        "batch": sum(consumer.delivered for consumer in consumers) / sum(c.batches for c in consumers),
    }


class Lateness:
    """Receipt minus due time of every message, in milliseconds, on this machine's wall clock."""

    def __init__(self) -> None:
        self._columns: list[Any] = []

    def note(self, batch: Columns, now_ms: float) -> None:
        self._columns.append(now_ms - batch.deliver_at_ms)

    def result(self) -> dict[str, Any]:
        values = np.concatenate(self._columns)
        return {**percentiles(values.tolist()), "early": int((values < 0).sum()), "count": len(values)}


async def herd(task: dict[str, Any]) -> dict[str, Any]:
    """A waiting consumer; `count` messages become due within `spread_ms`, through the index."""
    count = task["count"]
    lateness = Lateness()
    async with raw.connect(task["address"]) as channel, asyncio.TaskGroup() as tasks:
        await raw.create_subscriptions(channel, 1)
        due_ms = int(time.time() * 1000) + task["lead_ms"]
        requests = raw.requests(count // 1000, 1000, 100, {"at_ms": [due_ms, due_ms + task["spread_ms"]]})
        consumer = Consumer(channel, "subscription-0", on_batch=lateness.note)
        consuming = tasks.create_task(consumer.run(count))
        await consumer.opened.wait()
        pipeline = Pipeline(raw.produce_stream(channel), requests, 1000, 16)
        await pipeline.run(len(requests))
        await phase("loaded")
        left_ms = due_ms - time.time() * 1000
        check(left_ms > 1500, f"the load took until {left_ms:.0f} ms before the first message was due")
        await asyncio.sleep((left_ms - 1000) / 1000)
        await phase("measuring")
        due_at = time.perf_counter() + due_ms / 1000 - time.time()
        ended = await consuming
        await phase("measured")
    consumer._check_complete(pipeline.ledgers.counts)
    return {"rate": count / (ended - due_at), "seconds": ended - due_at, "late_ms": lateness.result()}


async def lateness(task: dict[str, Any]) -> dict[str, Any]:
    """`rate` single messages a second for `seconds`, each due `delay_ms` after it was sent."""
    count = round(task["rate"] * task["seconds"])
    late: list[float] = []
    wrong = 0

    def note(batch: Columns, now_ms: float) -> None:
        # By what the producer asked for, which it wrote into the payload, not by what the broker says.
        nonlocal wrong
        for part, deliver_at_ms in zip(batch.parts, batch.deliver_at_ms.tolist(), strict=True):
            asked_ms = int.from_bytes(consumer_pb2.Delivery.FromString(part).message.payload[:8], "little")
            wrong += asked_ms != deliver_at_ms
            late.append(now_ms - asked_ms)

    async with raw.connect(task["address"]) as channel:
        if not task.get("has_topic"):
            await raw.create_subscriptions(channel, 1)
        consumer = Consumer(channel, "subscription-0", on_batch=note, early_fails=False)
        async with asyncio.TaskGroup() as tasks:
            consuming = tasks.create_task(consumer.run(count))
            await consumer.opened.wait()
            await phase("measuring")
            from_zero = not task.get("has_topic")
            await _trickle(channel, count, task["rate"], task["delay_ms"], from_zero=from_zero)
            await consuming
            await phase("measured")
    check(not wrong, f"{wrong} messages carry another deliver_at_ms than was asked for")
    return {**percentiles(late), "early": sum(each < 0 for each in late), "count": len(late)}


async def _trickle(channel: Any, count: int, rate: float, delay_ms: int, *, from_zero: bool) -> None:
    call = raw.produce_stream(channel)

    async def read() -> None:
        ledgers = raw.Ledgers(from_zero=from_zero)
        for request_id in range(count):
            ledgers.take(await call.read(), request_id, 1)

    payload = os.urandom(92)
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(read())
        for number in range(count):
            ahead = begin + number / rate - time.perf_counter()
            if ahead > 0:
                await asyncio.sleep(ahead)
            due_ms = int(time.time() * 1000) + delay_ms
            message = message_pb2.Message(
                payload=due_ms.to_bytes(8, "little") + payload, deliver_at_ms=due_ms
            )
            request = producer_pb2.ProduceRequest(topic=raw.TOPIC, messages=[message], request_id=number)
            await call.write(request.SerializeToString())
    await call.done_writing()
