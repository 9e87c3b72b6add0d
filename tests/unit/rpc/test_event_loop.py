"""The loop takes all that gRPC's thread hands over: counted in rounds, as a round may be long."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from broker import cli
from broker.rpc.event_loop import GrpcLoop

STREAMS = 600
"""Each makes four wake-ups; gRPC's thread may leave 280 unread."""
ROUNDS_MAX = 2 * STREAMS
"""A dozen, where gRPC's threads are not kept waiting for a processor; 2,300 where a round takes one event."""
AT_WORK_SECONDS = 0.005


async def _echo(requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def _rounds_of_echoes() -> int:
    """Return how many rounds of a busy loop a message on each of many streams takes, there and back."""
    method = grpc.stream_stream_rpc_method_handler(_echo)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("S", {"M": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    rounds = 0
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        open_stream: Any = channel.stream_stream("/S/M", None, None)
        streams = [open_stream() for _ in range(STREAMS)]

        async def echo(stream: Any) -> None:
            await stream.write(b"x")
            assert await stream.read() == b"x"

        await asyncio.gather(*map(echo, streams))  # all have begun
        echoes = asyncio.gather(*map(echo, streams))
        while not echoes.done():
            rounds += 1
            time.sleep(AT_WORK_SECONDS)  # noqa: ASYNC251 - as work of others does
            await asyncio.sleep(0)
        await echoes
        for stream in streams:
            stream.cancel()
    await server.stop(None)
    return rounds


@pytest.mark.slow
def test_a_burst_of_events_does_not_take_a_round_each():
    with asyncio.Runner(loop_factory=GrpcLoop) as runner:
        assert runner.run(_rounds_of_echoes()) < ROUNDS_MAX


def test_a_broker_runs_on_this_loop():
    async def is_it() -> int:
        return int(isinstance(asyncio.get_running_loop(), GrpcLoop))

    try:
        assert cli._run(is_it()) == 1
    finally:
        gc.unfreeze()
