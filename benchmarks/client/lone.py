"""One message at a time, by each way to send one, with the times of the client's own steps."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import postdate
from benchmarks import echo
from benchmarks.client import raw
from benchmarks.client.control import phase

Stamps = list[tuple[str, int]]
_WARM = 200
_DELAY_MS = [1_000, 3_600_000]


async def lone(task: dict[str, Any]) -> dict[str, Any]:
    """For each way of `ways`, in turns: `begin` and `end` of every message, and the stamps of the SDK."""
    stamps: dict[str, Stamps] = {way: [] for way in task["ways"]}
    cpu: dict[str, int] = dict.fromkeys(task["ways"], 0)
    requests = raw.requests(64, 1, task["payload_bytes"], {"after_ms": _DELAY_MS})
    async with (
        raw.connect(task["address"]) as channel,
        raw.connect(task["echo_address"]) as echo_channel,
        postdate.connect(task["address"]) as client,
    ):
        await raw.create_subscriptions(channel, 1)
        unary, stream = raw.produce_unary(channel), raw.produce_stream(channel)
        echo_unary = echo_channel.unary_unary(f"/{echo.SERVICE}/{echo.METHOD}")
        echo_stream = echo_channel.stream_stream(f"/{echo.SERVICE}/{echo.STREAM}")(wait_for_ready=True)
        async with client.producer(raw.TOPIC) as producer:

            async def on(call: Any, request: bytes) -> None:
                await call.write(request)
                await call.read()

            ways: dict[str, Callable[[bytes], Awaitable[Any]]] = {
                "unary": unary,
                "stream": lambda request: on(stream, request),
                "sdk": lambda _: producer.send(payload),
                "echo-unary": lambda request: echo_unary(request, wait_for_ready=True),
                "echo-stream": lambda request: on(echo_stream, request),
            }
            payload = os.urandom(task["payload_bytes"])
            for way in task["ways"]:
                await _send(ways[way], requests, _WARM, [])
            for turn in range(task["turns"]):
                for way in task["ways"]:
                    await phase(f"{way}:begin:{turn}")
                    begin = time.process_time_ns()
                    await _send(ways[way], requests, task["count"], stamps[way])
                    cpu[way] += time.process_time_ns() - begin
                    await phase(f"{way}:end:{turn}")
        stream.cancel()
        echo_stream.cancel()
    return {"stamps": stamps, "cpu_us": {way: ns / 1000 for way, ns in cpu.items()}}


async def _send(
    send: Callable[[bytes], Awaitable[Any]], requests: list[bytes], count: int, stamps: Stamps
) -> None:
    for number in range(count):
        begin = time.perf_counter_ns()
        await send(requests[number % len(requests)])
        end = time.perf_counter_ns()
        stamps += (("begin", begin), ("end", end))
