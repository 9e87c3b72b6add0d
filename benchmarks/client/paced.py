"""Produces at a given rate, however long the answers take."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from benchmarks.client import raw
from benchmarks.client.control import check, percentiles, phase, say

_DISTINCT = 64
_HOUR_MS = 3_600_000


class _Paced:
    """A stream with batches at fixed moments. An answer's time counts from the moment its batch was to be written."""

    def __init__(
        self, channel: Any, requests: list[bytes], batch: int, rate: float, *, from_zero: bool = True
    ) -> None:
        self.answered_after_ms: list[float] = []
        self.ledgers = raw.Ledgers(from_zero=from_zero)
        self.stored = 0
        self._call = raw.produce_stream(channel)
        self._requests = requests
        self._batch = batch
        self._pause = batch / rate
        self._begin = 0.0
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True

    async def run(self) -> None:
        """Produce until `stop`; return when all batches are answered."""
        async with asyncio.TaskGroup() as tasks:
            self._begin = time.perf_counter()
            tasks.create_task(self._write())
            tasks.create_task(self._read())

    async def _write(self) -> None:
        number = 0
        while not self._stopping:
            ahead = self._begin + number * self._pause - time.perf_counter()
            if ahead > 0:
                await asyncio.sleep(ahead)
            await self._call.write(self._requests[number % len(self._requests)])
            number += 1
        await self._call.done_writing()

    async def _read(self) -> None:
        number = 0
        while (message := await self._call.read()) is not raw.EOF:
            for answer in raw.answers_in(message):
                meant = self._begin + number * self._pause
                self.answered_after_ms.append((time.perf_counter() - meant) * 1000)
                self.ledgers.take(answer, number % len(self._requests), self._batch)
                self.stored += self._batch
                number += 1


async def paced(task: dict[str, Any]) -> dict[str, Any]:
    """`rate` messages a second in batches of `batch` for `seconds`, after `warm_seconds` of the same."""
    batch = task["batch"]
    requests = raw.requests(_DISTINCT, batch, task["payload_bytes"], task["delay"])
    async with raw.connect(task["address"]) as channel:
        await raw.create_subscriptions(channel, 1, task.get("tracker", "bucket"))
        producer = _Paced(channel, requests, batch, task["rate"])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(producer.run())
            await asyncio.sleep(task["warm_seconds"])
            await phase("measuring")
            producer.answered_after_ms.clear()
            begin, before = time.perf_counter(), producer.stored
            await asyncio.sleep(task["seconds"])
            rate = (producer.stored - before) / (time.perf_counter() - begin)
            answered = percentiles(producer.answered_after_ms)
            await phase("measured")
            producer.stop()
    return {"rate": rate, "stored": producer.stored} | {
        f"answer_{name}_ms": value for name, value in answered.items()
    }


async def beside(task: dict[str, Any]) -> dict[str, Any]:
    """Batches of a topic of their own, `rate` messages a second, beside something else, until a line comes on standard
    input."""
    batch = task["batch"]
    requests = raw.requests(_DISTINCT, batch, task["payload_bytes"], task["delay"], topic="beside")
    async with raw.connect(task["address"]) as channel:
        producer = _Paced(channel, requests, batch, task["rate"])
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(producer.run())
            say({"phase": "producing"})
            line = await asyncio.to_thread(sys.stdin.readline)
            check(bool(line), "whoever started this is gone")
            rate = producer.stored / (time.perf_counter() - begin)
            producer.stop()
    return {"rate": rate}


async def probe(task: dict[str, Any]) -> dict[str, Any]:
    """Single messages, `rate` a second, beside something else, until a line comes on standard input."""
    requests = raw.requests(_DISTINCT, 1, 100, {"after_ms": [_HOUR_MS, 2 * _HOUR_MS]})
    async with raw.connect(task["address"]) as channel:
        producer = _Paced(channel, requests, 1, task["rate"], from_zero=False)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(producer.run())
            say({"phase": "producing"})
            line = await asyncio.to_thread(sys.stdin.readline)
            check(bool(line), "whoever started this is gone")
            producer.stop()
    return {"count": producer.stored, **percentiles(producer.answered_after_ms)}
