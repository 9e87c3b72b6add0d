"""Waits for the first delivery of a broker that was killed and started again."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc

from benchmarks.client import raw
from benchmarks.client.control import check, phase
from benchmarks.client.wire import Columns, read_frame
from postdate_api.v1 import consumer_pb2, message_pb2, producer_pb2

_FEW = 10
_MARK = b"due just after the restart"


async def restart(task: dict[str, Any]) -> dict[str, Any]:
    """Store a few messages that are due soon, have the broker killed and started, and wait for them.

    `pending` messages are stored already and due much later; the broker must still know them all.
    """
    async with raw.connect(task["address"]) as channel:
        messages = [message_pb2.Message(payload=_MARK, deliver_after_ms=task["due_ms"]) for _ in range(_FEW)]
        request = producer_pb2.ProduceRequest(topic=raw.TOPIC, messages=messages)
        await raw.produce_unary(channel)(request.SerializeToString(), wait_for_ready=True)
    await phase("stored")  # killed and started now
    async with raw.connect(task["address"]) as channel:
        first_at, attempts = await _first_delivery(channel)
        indexed_at = await _wait_indexed(channel, task["pending"])
    return {"first_at": first_at, "attempts": attempts, "indexed_at": indexed_at}


async def _first_delivery(channel: Any) -> tuple[float, int]:
    """The monotonic time of the first delivery, and how often it took to connect."""
    attempts = 0
    while True:
        attempts += 1
        try:
            return await _consume(raw.subscribe_stream(channel)), attempts
        except grpc.aio.AioRpcError as error:
            check(error.code() == grpc.StatusCode.UNAVAILABLE, f"{error.code()}: {error.details()}")
        await asyncio.sleep(0.01)


async def _consume(call: Any) -> float:
    first_at = 0.0
    count = 0
    opening = consumer_pb2.Open(
        topic=raw.TOPIC, subscription="subscription-0", permits=consumer_pb2.Permits(messages=1000)
    )
    await call.write(consumer_pb2.SubscribeRequest(open=opening).SerializeToString())
    while count < _FEW:
        response = await call.read()
        check(response is not raw.EOF, "the broker ended the stream")
        frame = read_frame(response)
        if isinstance(frame, Columns):
            first_at = first_at or time.monotonic()
            count += len(frame.parts)
            check(all(_MARK in part for part in frame.parts), "a message that is not due was delivered")
    call.cancel()
    check(count == _FEW, f"{count} messages delivered, expected {_FEW}")
    return first_at


async def _wait_indexed(channel: Any, pending: int) -> float:
    """The monotonic time from which on the index holds every pending message again."""
    deadline = time.monotonic() + 30
    while (scheduled := (await raw.topic_stats(channel)).scheduled_messages) != pending:
        check(time.monotonic() < deadline, f"{scheduled} messages are scheduled, expected {pending}")
        await asyncio.sleep(0.05)
    return time.monotonic()
