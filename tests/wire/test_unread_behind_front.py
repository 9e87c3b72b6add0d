"""Clients of a front that ask and do not read: whoever owns the shard has them ended, and others go on."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from broker.rpc import calls as rpc_calls
from broker.rpc import unread_room
from broker.server import Server
from broker.settings import MIB
from postdate_api.v1 import consumer_pb2, consumer_pb2_grpc
from tests.wire.conftest import LIMIT_SECONDS, Stream, Wire, eventually
from tests.wire.test_front import Face, face
from tests.wire.test_node_fronts import FrontOfNode, nodes
from tests.wire.test_shard_front import A, B, Shards, shards
from tests.wire.test_unread_answers import IDS, UNKNOWN, flood

__all__ = ["face", "nodes", "shards"]


def room_of(server: Server) -> unread_room.UnreadRoom:
    return server._consumer._unread.large


async def test_others_go_on_while_clients_of_the_front_do_not_read(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
):
    wire = shards.wire
    room = room_of(shards.servers[0])
    room.bytes_max = 6 * MIB
    monkeypatch.setattr(unread_room, "STALLED_SECONDS", LIMIT_SECONDS)  # until all have been heard
    monkeypatch.setattr(rpc_calls, "STATUS_SECONDS", 0.2)
    ids = await wire.produce(A, *(b"%d" % i for i in range(10)))
    large = await wire.produce(B, *(bytes(500_000) for _ in range(8)))
    idle = [await wire.subscribe(A, permits=0) for _ in range(4)]
    await asyncio.gather(*(flood(each, 20) for each in idle))
    assert 3 * MIB < room.held <= 6 * MIB
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(shards.grpc_address, options=options) as channel:
        consumers = consumer_pb2_grpc.ConsumerServiceStub(channel)
        slow = Stream(consumers.Subscribe())  # to read what it asked for, and nobody waits for that
        await slow.open(B, "s")
        good = Stream(consumers.Subscribe())
        await good.open(A, "s")
        await good.deliveries(10)
        assert await good.ack(ids) == []
        monkeypatch.setattr(unread_room, "STALLED_SECONDS", 1.0)
        await good.send(ack=consumer_pb2.Ack(request_id=1, entries=UNKNOWN))
        assert len((await good.frame("confirmed")).failures) == IDS
        assert len(await slow.deliveries(len(large))) == len(large)
    await eventually(lambda: any(each.call.done() for each in idle))


async def test_a_connection_that_fronts_share_outlives_a_client_that_does_not_read(
    nodes: list[FrontOfNode], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Two fronts lie between a client and its shard: each ends the call by the tag that it gave it."""
    monkeypatch.setattr(rpc_calls, "STATUS_SECONDS", 0.2)
    monkeypatch.setattr(unread_room, "STALLED_SECONDS", 2.0)
    through, owner = nodes[0].wire, nodes[1]
    room = room_of(owner.server)
    room.bytes_max = 4 * MIB
    await through.produce(B, b"x")  # of the second node
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(nodes[0].grpc_address, options=options) as channel:
        consumers = consumer_pb2_grpc.ConsumerServiceStub(channel)
        good = Stream(consumers.Subscribe())
        await good.open(B, "good")
        idle = [await through.subscribe(B, f"s{number}", permits=0) for number in range(4)]
        await asyncio.gather(*(flood(each, 20) for each in idle))
        for _ in range(3):  # for which there is room once some of the idle are ended
            await good.send(ack=consumer_pb2.Ack(request_id=1, entries=UNKNOWN))
            assert len((await good.frame("confirmed")).failures) == IDS
        await eventually(lambda: any(each.call.done() for each in idle))
        assert not good.call.done()
    fronts = {record.fields["peer"] for record in caplog.records if "does not read" in record.message}  # type: ignore[attr-defined]
    assert len(fronts) == 1, "that of the client alone"


async def test_the_connection_of_a_standby_outlives_a_client_that_does_not_read(
    wire: Wire, face: Face, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rpc_calls, "STATUS_SECONDS", 0.2)
    monkeypatch.setattr(unread_room, "STALLED_SECONDS", 0.5)
    node = await face(wire)
    room = room_of(wire.server)
    room.bytes_max = 4 * MIB
    await node.wire.produce("t", b"x")
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(node.grpc_address, options=options) as channel:
        good = Stream(consumer_pb2_grpc.ConsumerServiceStub(channel).Subscribe())
        await good.open("t", "good")
        idle = [await node.wire.subscribe("t", f"s{number}", permits=0) for number in range(4)]
        await asyncio.gather(*(flood(each, 20) for each in idle))
        for _ in range(3):
            await good.send(ack=consumer_pb2.Ack(request_id=1, entries=UNKNOWN))
            assert len((await good.frame("confirmed")).failures) == IDS
        await eventually(lambda: any(each.call.done() for each in idle))
        assert not good.call.done()
