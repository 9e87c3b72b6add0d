"""Produces over one ProduceStream, pipelined with a bounded window."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from benchmarks import echo
from benchmarks.client import raw
from benchmarks.client.control import check, percentiles, phase

_DISTINCT = 64


class Pipeline:
    """Batch after batch on one stream; at most `window` are not answered."""

    def __init__(
        self, call: Any, requests: Sequence[bytes], batch: int, window: int, *, from_zero: bool = True
    ) -> None:
        self.acknowledged = 0  # messages
        self.ledgers = raw.Ledgers(from_zero=from_zero)
        self.answered_after_ms: list[float] = []
        self._call = call
        self._requests = requests
        self._batch = batch
        self._slots = asyncio.Semaphore(window)
        self._written_at: deque[float] = deque()
        self._stopping = False
        self._batches_left = -1  # without end

    async def run(self, batches: int = -1) -> None:
        """Produce so many batches, or until `stop`; return when all are answered."""
        self._batches_left = batches
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write())
            tasks.create_task(self._read())

    def stop(self) -> None:
        self._stopping = True

    async def _write(self) -> None:
        place = 0
        while not self._stopping and self._batches_left:
            await self._slots.acquire()
            self._written_at.append(time.perf_counter())
            await self._call.write(self._requests[place])
            place = (place + 1) % len(self._requests)
            self._batches_left -= 1
        await self._call.done_writing()

    async def _read(self) -> None:
        place = 0
        while (message := await self._call.read()) is not raw.EOF:
            for answer in raw.answers_in(message):
                self.ledgers.take(answer, place, self._batch)
                self.answered_after_ms.append((time.perf_counter() - self._written_at.popleft()) * 1000)
                self.acknowledged += self._batch
                place = (place + 1) % len(self._requests)
                self._slots.release()
        check(not self._written_at, f"the stream ended with {len(self._written_at)} batches not answered")


async def produce(task: dict[str, Any]) -> dict[str, Any]:
    """Produce for `seconds` after `warm_seconds`, or exactly `count` messages as a load for another step."""
    batch = task["batch"]
    requests = raw.requests(_DISTINCT, batch, task["payload_bytes"], task["delay"])
    async with raw.connect(task["address"]) as channel:
        if "subscriptions" in task:
            await raw.create_subscriptions(channel, task["subscriptions"])
        pipeline = Pipeline(
            raw.produce_stream(channel), requests, batch, task["window"], from_zero="subscriptions" in task
        )
        if "count" in task:
            check(task["count"] % batch == 0, "count is not a multiple of batch")
            begin = time.perf_counter()
            await pipeline.run(task["count"] // batch)
            rate = task["count"] / (time.perf_counter() - begin)
            return {"rate": rate, "stored": pipeline.acknowledged, "ledgers": pipeline.ledgers.counts}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pipeline.run())
            rate = await _measure(pipeline, task["warm_seconds"], task["seconds"])
        await _check_stored(channel, pipeline)
    answered = percentiles(pipeline.answered_after_ms)
    return {
        "rate": rate,
        "stored": pipeline.acknowledged,
        "answer_p50_ms": answered["p50"],
        "answer_p99_ms": answered["p99"],
        "ledgers": pipeline.ledgers.counts,
    }


async def take_in(task: dict[str, Any]) -> dict[str, Any]:
    """The same requests to a server that does nothing: messages a second that gRPC itself takes in."""
    requests = raw.requests(_DISTINCT, task["batch"], task["payload_bytes"], task["delay"])
    async with raw.connect(task["echo_address"]) as channel:
        call = channel.stream_stream(f"/{echo.SERVICE}/{echo.TAKE}")(wait_for_ready=True)
        slots, answered = asyncio.Semaphore(task["window"]), 0

        async def write() -> None:
            for request in itertools.cycle(requests):
                await slots.acquire()
                await call.write(request)

        async def read() -> None:
            nonlocal answered
            while await call.read() == echo.TAKEN:
                answered += 1
                slots.release()

        tasks = [asyncio.create_task(write()), asyncio.create_task(read())]
        await asyncio.sleep(task["warm_seconds"])
        begin, before = time.perf_counter(), answered
        await asyncio.sleep(task["seconds"])
        rate = (answered - before) * task["batch"] / (time.perf_counter() - begin)
        check(not any(each.done() for each in tasks), "the stream to the server that does nothing ended")
        for each in tasks:
            each.cancel()
        call.cancel()
    return {"rate": rate, "request_bytes": len(requests[0])}


async def _measure(pipeline: Pipeline, warm_seconds: float, seconds: float) -> float:
    await asyncio.sleep(warm_seconds)
    await phase("measuring")
    pipeline.answered_after_ms.clear()
    begin, before = time.perf_counter(), pipeline.acknowledged
    await asyncio.sleep(seconds)
    end, after = time.perf_counter(), pipeline.acknowledged
    await phase("measured")
    pipeline.stop()
    return (after - before) / (end - begin)


async def _check_stored(channel: Any, pipeline: Pipeline) -> None:
    """The broker must know of every message that it acknowledged: waiting for its time, or ready."""
    deadline = time.monotonic() + 30
    while True:
        of = (await raw.topic_stats(channel)).subscriptions[0]
        known = of.scheduled_messages + of.ready_messages
        if known == pipeline.acknowledged:
            return
        check(time.monotonic() < deadline, f"{pipeline.acknowledged} acknowledged, the broker knows {known}")
        await asyncio.sleep(0.2)
