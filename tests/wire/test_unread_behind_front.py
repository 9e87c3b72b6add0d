"""Clients of a front that ask and do not read: their shard has them ended, and others go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from broker.rpc import calls as rpc_calls
from broker.rpc import unread
from broker.rpc.unread_marks import marks_in
from broker.server import Server
from broker.settings import MIB
from broker.web.shard_http import ShardHttp
from postdate_api.v1 import consumer_pb2, consumer_pb2_grpc
from tests.wire.conftest import LIMIT_SECONDS, Stream, eventually
from tests.wire.test_shard_front import A, B, Shards, shards
from tests.wire.test_unread_answers import IDS, UNKNOWN, flood

__all__ = ["shards"]


def room_of(server: Server) -> unread.UnreadRoom:
    return server._consumer._unread.large


@asynccontextmanager
async def supervised(shards: Shards) -> AsyncIterator[None]:
    """Pass on what a shard says to the front, as its supervisor does."""
    http = ShardHttp(shards.servers[0].config.http_socket)

    async def pass_on() -> None:
        while True:
            shards.front.end_unread(0, marks_in((await http.readiness(2.0)).line))
            await asyncio.sleep(0.05)

    passing = asyncio.create_task(pass_on())
    try:
        yield
    finally:
        passing.cancel()
        await asyncio.gather(passing, return_exceptions=True)
        await http.close()


async def test_others_go_on_while_clients_of_the_front_do_not_read(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
):
    wire = shards.wire
    room = room_of(shards.servers[0])
    room.bytes_max = 6 * MIB
    monkeypatch.setattr(unread, "STALLED_SECONDS", LIMIT_SECONDS)  # until all have been heard
    monkeypatch.setattr(rpc_calls, "STATUS_SECONDS", 0.2)
    ids = await wire.produce(A, *(b"%d" % i for i in range(10)))
    large = await wire.produce(B, *(bytes(500_000) for _ in range(8)))
    idle = [await wire.subscribe(A, permits=0) for _ in range(4)]
    await asyncio.gather(*(flood(each, 20) for each in idle))
    assert 3 * MIB < room.held <= 6 * MIB
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with supervised(shards), grpc.aio.insecure_channel(shards.grpc_address, options=options) as channel:
        consumers = consumer_pb2_grpc.ConsumerServiceStub(channel)
        slow = Stream(consumers.Subscribe())  # to read what it asked for, and nobody waits for that
        await slow.open(B, "s")
        good = Stream(consumers.Subscribe())
        await good.open(A, "s")
        await good.deliveries(10)
        assert await good.ack(ids) == []
        monkeypatch.setattr(unread, "STALLED_SECONDS", 1.0)
        await good.send(ack=consumer_pb2.Ack(request_id=1, entries=UNKNOWN))
        assert len((await good.frame("confirmed")).failures) == IDS
        assert len(await slow.deliveries(len(large))) == len(large)
    await eventually(lambda: any(each.call.done() for each in idle))
