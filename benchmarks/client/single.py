"""One message at a time, each awaited before the next."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks import echo
from benchmarks.client import raw
from benchmarks.client.control import percentiles, phase

_WARM = 100

Send = Callable[[bytes], Awaitable[bytes]]


async def single(task: dict[str, Any]) -> dict[str, Any]:
    """In turns, as disks drift: syncs (by who started this), round trips, unary calls, messages on a stream."""
    requests = raw.requests(64, 1, task["payload_bytes"], {"after_ms": [1_000, 3_600_000]})
    trips: list[float] = []
    by_unary: list[float] = []
    by_stream: list[float] = []
    async with raw.connect(task["address"]) as channel, raw.connect(task["echo_address"]) as echo_channel:
        await raw.create_subscriptions(channel, 1)
        ledgers = raw.Ledgers()
        echo_call = _echo_call(echo_channel)
        unary = raw.produce_unary(channel)
        stream = raw.produce_stream(channel)

        async def on_stream(request: bytes) -> bytes:
            await stream.write(request)
            answer: bytes = await stream.read()
            return answer

        async def run(count: int, send: Send, took: list[float]) -> None:
            for number in range(count):
                place = number % len(requests)
                begin = time.perf_counter_ns()
                answer = await send(requests[place])
                took.append((time.perf_counter_ns() - begin) / 1000)
                ledgers.take(answer, place, 1)

        await run(_WARM, unary, [])
        await run(_WARM, on_stream, [])
        await _trips(echo_call, requests[0], _WARM)
        for turn in range(task["turns"]):
            await phase("sync")
            trips += await _trips(echo_call, requests[0], task["count"])
            if not turn:
                await phase("measuring")
            await run(task["count"], unary, by_unary)
            if not turn:
                await phase("measured")
            await run(task["count"], on_stream, by_stream)
        stream.cancel()
    return {
        "trip_us": percentiles(trips),
        "unary_us": percentiles(by_unary),
        "stream_us": percentiles(by_stream),
    }


async def round_trip(task: dict[str, Any]) -> dict[str, Any]:
    """Microseconds of unary calls to a server that does nothing."""
    async with raw.connect(task["echo_address"]) as channel:
        call = _echo_call(channel)
        request = bytes(task["payload_bytes"])
        await _trips(call, request, _WARM)
        return {"us": await _trips(call, request, task["count"])}


def _echo_call(channel: Any) -> Send:
    call = channel.unary_unary(f"/{echo.SERVICE}/{echo.METHOD}")

    async def send(request: bytes) -> bytes:
        answer: bytes = await call(request, wait_for_ready=True)
        return answer

    return send


async def _trips(call: Send, request: bytes, count: int) -> list[float]:
    took = []
    for _ in range(count):
        begin = time.perf_counter_ns()
        await call(request)
        took.append((time.perf_counter_ns() - begin) / 1000)
    return took
