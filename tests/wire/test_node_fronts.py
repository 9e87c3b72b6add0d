"""Fronts of two nodes, each of which owns one shard of two: any call may be made at either, and is passed on once."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest

from broker.errors import Refused
from broker.observe.cluster_view import ClusterView, OwnerRoute
from broker.observe.metrics import BrokerCounters
from broker.rpc import call_metadata, forward, shard_front
from broker.rpc.front import FrontHost
from broker.rpc.hand_over import HandOver
from broker.rpc.peers import Peers
from broker.rpc.produce_fan_out import ProduceFanOut
from broker.rpc.shard_front import ShardFront
from broker.rpc.shard_owners import ClusterShards
from broker.runtime.clock import SystemClock
from broker.runtime.supervise import Supervisor
from broker.server import Server
from broker.settings import UNIX
from broker.shards.shard_process import grpc_socket, shard_config
from broker.storage.varint import encode_varint
from postdate_api.v1 import admin_pb2, compaction_pb2, consumer_pb2, schedule_pb2
from tests.configs import broker_config
from tests.wire.conftest import Wire, batch, eventually, ids_of, refused, within
from tests.wire.test_shard_front import ALL, SHARDS, A, B

DIRECT = ((call_metadata.DIRECT, "1"),)
NODES = ("a", "b")


class FrontOfNode:
    """The front of a node, whose routes a test may change, and the process of the one shard that it owns."""

    def __init__(self, number: int, folder: str) -> None:
        self.name = NODES[number]
        self.number = number
        self.config = broker_config(
            data_dir=f"{folder}/{self.name}",
            shards=SHARDS,
            shard_ports=False,
            grpc_address="127.0.0.1:0",
            http_address="127.0.0.1:0",
            drain_grace_ms=100,
            disk_reserve_bytes=0,
        )
        os.makedirs(f"{folder}/{self.name}/run")
        self.server = Server(shard_config(self.config, number))
        self.routes = [OwnerRoute()] * SHARDS
        self.nodes: tuple[tuple[str, str], ...] = ()
        sockets = [UNIX + grpc_socket(self.config, shard) for shard in range(SHARDS)]
        self.owners = ClusterShards(self.config, self.name, sockets, lambda shard: self.routes[shard])
        self.asked_alone: list[bool] = []
        self.front = ShardFront(
            FrontHost(self.config, SystemClock(), BrokerCounters()), self.owners, self.views
        )
        self.supervisor = Supervisor(lambda name, error: None)
        self.broker = None  # it has none; a `Wire` asks
        self.wire: Wire

    def views(self, is_alone: bool) -> list[ClusterView]:
        self.asked_alone.append(is_alone)
        return [
            ClusterView("k", self.name, self.nodes, shard, route) for shard, route in enumerate(self.routes)
        ]

    @property
    def grpc_address(self) -> str:
        return self.front.address

    async def start(self) -> None:
        await self.server.start()
        self.front.bind()
        await self.front.start(self.supervisor)
        self.wire = Wire(cast(Server, self))

    async def stop(self) -> None:
        await self.wire.disconnect()
        await within(self.supervisor.stop())
        await within(self.front.stop())
        await within(self.server.stop())


@pytest.fixture
async def nodes() -> AsyncIterator[list[FrontOfNode]]:
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder:
        made = [FrontOfNode(number, folder) for number in range(SHARDS)]
        for node in made:
            await node.start()
        addresses = tuple((node.name, node.grpc_address) for node in made)
        for node in made:
            node.nodes = addresses
            node.routes = [OwnerRoute(1, name, address) for name, address in addresses]
        yield made
        for node in made:
            await node.stop()


async def test_each_topic_is_served_by_the_owner_of_its_shard_whichever_node_is_asked(
    nodes: list[FrontOfNode],
):
    for through in nodes:
        for topic in (A, B):
            ids = await through.wire.produce(topic, b"one", b"two")
            stream = await through.wire.subscribe(
                topic, initial_position=consumer_pb2.INITIAL_POSITION_EARLIEST
            )
            deliveries = await stream.deliveries(2)
            assert ids_of(deliveries) == ids
            assert await stream.ack(ids) == []
            assert await stream.close() is grpc.StatusCode.OK
    assert [sorted(node.server.broker.registry.by_name) for node in nodes] == [[A], [B]]


async def test_a_produce_stream_serves_shards_of_both_nodes_in_order(nodes: list[FrontOfNode]):
    call = nodes[0].wire.producer.ProduceStream()
    for number in range(1, 20):
        await within(call.write(batch((A, B)[number % 2], b"x" * 1_000, request_id=number)))
        assert (await within(call.read())).request_id == number
    await within(call.done_writing())
    assert await within(call.read()) is grpc.aio.EOF  # type: ignore[attr-defined]
    assert await within(call.code()) is grpc.StatusCode.OK


async def test_batches_before_one_whose_owner_is_unknown_are_answered(nodes: list[FrontOfNode]):
    a = nodes[0]
    await a.wire.produce(A, b"x")
    a.routes[1] = OwnerRoute(2)
    call = a.wire.producer.ProduceStream()
    for number in range(1, 6):
        await within(call.write(batch(A, b"x", request_id=number)))
    await within(call.write(batch(B, b"x", request_id=6)))
    for number in range(1, 6):
        assert (await within(call.read())).request_id == number
    assert (await refused(call.read())).reason == "NOT_OWNER"


async def test_a_shard_that_refuses_a_stream_does_not_speak_for_another_one(
    nodes: list[FrontOfNode], monkeypatch: pytest.MonkeyPatch
):
    a, b = nodes
    b.routes[1] = OwnerRoute(2)
    take = ProduceFanOut._take

    async def take_late(fan_out: ProduceFanOut, shard: int, *rest: Any) -> None:
        await eventually(lambda: shard == 0 or 0 in fan_out._order._queue)  # type: ignore[attr-defined]
        await take(fan_out, shard, *rest)

    monkeypatch.setattr(ProduceFanOut, "_take", take_late)
    call = a.wire.producer.ProduceStream()
    await within(call.write(batch(B, b"x", request_id=1)))
    await within(call.write(batch(A, b"x", request_id=2)))
    assert (await refused(call.read())).reason == "OWNER_UNREACHABLE"


async def test_calls_about_all_shards_are_answered_by_either(nodes: list[FrontOfNode]):
    for topic in ALL:
        await nodes[0].wire.produce(topic, b"x")
    for node in nodes:
        assert await node.wire.topic_names() == ALL
        stats = await within(
            node.wire.admin.GetStats(admin_pb2.GetStatsRequest(topics=[B, A]), metadata=DIRECT)
        )
        assert sorted(topic.topic for topic in stats.topics) == sorted([A, B])
        counted = schedule_pb2.CountScheduledRequest(topics=[A, B], width_ms=1_000)
        await within(node.wire.schedule.CountScheduled(counted))
        assert (await within(node.wire.admin.GetServerInfo(admin_pb2.GetServerInfoRequest()))).version


async def test_a_call_that_was_passed_on_is_passed_on_to_nobody_else(nodes: list[FrontOfNode]):
    """Each node takes the other one for the owner of shard 0, as they may for a moment."""
    a, b = nodes
    a.routes[0] = OwnerRoute(2, "b", b.grpc_address)
    for path in (a.wire.produce(A, b"x"), a.wire.topic_names()):
        refusal = await refused(path)
        assert refusal.reason == "NOT_OWNER" and refusal.metadata["owner_address"] == a.grpc_address
    assert a.front._room.held_bytes == 0


async def test_who_asks_for_the_owner_alone_is_told_where_it_is(nodes: list[FrontOfNode]):
    a, b = nodes
    request = admin_pb2.CreateTopicRequest(name=B)
    refusal = await refused(a.wire.admin.CreateTopic(request, metadata=DIRECT))
    assert (refusal.reason, refusal.metadata["owner_address"]) == ("NOT_OWNER", b.grpc_address)
    await within(b.wire.admin.CreateTopic(request, metadata=DIRECT))


async def test_a_shard_that_a_client_names_changes_nothing(nodes: list[FrontOfNode]):
    named = ((forward.SHARD, "1"),)
    await within(nodes[0].wire.admin.CreateTopic(admin_pb2.CreateTopicRequest(name=A), metadata=named))
    for number in ("1", "2", "x", "9" * 5_000, "-1"):
        request = admin_pb2.CreateTopicRequest(name=f"{A}~{len(number)}")
        marked = (*DIRECT, (forward.SHARD, number))
        if number == "1":
            assert (
                await refused(nodes[0].wire.admin.CreateTopic(request, metadata=marked))
            ).reason == "NOT_OWNER"
        else:
            await within(nodes[0].wire.admin.GetTopic(admin_pb2.GetTopicRequest(name=A), metadata=marked))


async def test_a_shard_is_handed_over_to_a_node_whose_own_process_has_read_of_the_owner(
    nodes: list[FrontOfNode], monkeypatch: pytest.MonkeyPatch
):
    """The newest epoch, which the node heard of from others, says nothing of how far its process has read."""
    a, b = nodes
    resigned: list[str] = []
    own = ClusterView("k", "a", a.nodes, 0, OwnerRoute(2, "a", a.grpc_address))
    now_ms = SystemClock().now_ms()
    read_by_process = 1

    def views(is_alone: bool) -> list[ClusterView]:
        epoch = read_by_process if is_alone else 2
        return [
            ClusterView("k", "b", b.nodes, shard, OwnerRoute(epoch), applied_time_ms=now_ms)
            for shard in range(SHARDS)
        ]

    monkeypatch.setattr(b.front, "_view", views)
    hand_over = HandOver(a.server.broker, lambda: own, resigned.append)
    with pytest.raises(Refused, match="up to epoch 1, and the shard is at epoch 2") as caught:
        await within(hand_over.move("b"))
    assert (caught.value.reason, resigned) == ("NODE_NOT_FOLLOWING", [])
    read_by_process = 2
    await within(hand_over.move("b"))
    assert resigned == ["b"]


async def test_calls_end_once_their_shard_has_another_owner(nodes: list[FrontOfNode]):
    a, b = nodes
    await a.wire.produce(B, b"one")
    stream = await a.wire.subscribe(B)
    a.routes[1] = OwnerRoute(2)
    a.owners.follow()
    assert (await stream.refusal()).reason == "OWNER_UNREACHABLE"
    assert (await refused(a.wire.produce(B, b"two"))).reason == "NOT_OWNER"
    assert await b.wire.produce(B, b"three")


class Silent(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """A node that answers no call."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    def service(self, handler_call_details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._wait)

    async def _wait(self, message: bytes, context: Any) -> bytes:
        self.asked.append(message)
        await asyncio.Event().wait()
        return b""


@asynccontextmanager
async def silent_node() -> AsyncIterator[tuple[Silent, str]]:
    server, silent = grpc.aio.server(), Silent()
    server.add_generic_rpc_handlers((silent,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield silent, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.parametrize(
    ("path", "request_"),
    [
        ("AdminService/ListTopics", admin_pb2.ListTopicsRequest()),
        ("AdminService/GetStats", admin_pb2.GetStatsRequest()),
        ("AdminService/GetStats", admin_pb2.GetStatsRequest(topics=[A, B])),
        ("ScheduleService/CountScheduled", schedule_pb2.CountScheduledRequest(topics=[B])),
        ("CompactionService/ListCompactions", compaction_pb2.ListCompactionsRequest()),
        ("CompactionService/AbortCompaction", compaction_pb2.AbortCompactionRequest(compaction_id="x")),
    ],
)
async def test_a_list_under_way_ends_once_one_shard_has_another_owner(
    nodes: list[FrontOfNode], path: str, request_: Any
):
    a, b = nodes
    await a.wire.produce(A, b"x")
    async with silent_node() as (silent, address):
        a.routes[1] = OwnerRoute(2, "b", address)
        listing = asyncio.ensure_future(
            refused(a.wire.raw(f"/postdate.v1.{path}")(request_.SerializeToString()))
        )
        await eventually(lambda: len(silent.asked) == 1)
        a.routes[1] = OwnerRoute(3, "b", b.grpc_address)
        a.owners.follow()
        assert (await listing).reason == "OWNER_UNREACHABLE"


@pytest.mark.parametrize(
    ("path", "request_"),
    [
        ("AdminService/ListTopics", admin_pb2.ListTopicsRequest()),
        ("AdminService/GetStats", admin_pb2.GetStatsRequest(topics=[A, B], page_token="dA==")),
        ("ScheduleService/CountScheduled", schedule_pb2.CountScheduledRequest(topics=[A, B], width_ms=9)),
        ("CompactionService/AbortCompaction", compaction_pb2.AbortCompactionRequest(compaction_id="x")),
        ("AdminService/GetServerInfo", admin_pb2.GetServerInfoRequest()),
    ],
)
async def test_what_nobody_knows_of_a_request_is_copied_for_no_shard(
    nodes: list[FrontOfNode], path: str, request_: Any
):
    a, _ = nodes
    room, unknown = a.front._room, bytes((0xFA, 0x7F)) + encode_varint(1 << 20) + bytes(1 << 20)
    message = request_.SerializeToString() + unknown
    async with silent_node() as (silent, address):
        a.routes[:] = [OwnerRoute(2, "b", address)] * SHARDS
        call = a.wire.raw(f"/postdate.v1.{path}")(message)
        await eventually(lambda: len(silent.asked) == SHARDS)
        parts = [type(request_).FromString(part) for part in silent.asked]
        assert room.held_bytes == len(message) + sum(map(len, silent.asked))
        assert all(len(part) <= len(request_.SerializeToString()) for part in silent.asked)
        if hasattr(request_, "topics"):
            assert sorted(topic for part in parts for topic in part.topics) == sorted([A, B])
            for part in parts:
                part.topics[:] = request_.topics
        assert parts == [request_] * SHARDS
        call.cancel()
        await eventually(lambda: room.held_bytes == 0)


async def test_a_page_token_that_is_too_long_goes_to_no_shard(nodes: list[FrontOfNode]):
    admin: Any = nodes[0].wire.admin
    token = "A" * 8_192
    for call in (
        admin.ListTopics(admin_pb2.ListTopicsRequest(page_token=token)),
        admin.GetStats(admin_pb2.GetStatsRequest(topics=[A, B], page_token=token)),
    ):
        assert (await refused(call)).reason == "INVALID_PAGE_TOKEN"


async def test_the_first_shard_that_answers_tells_what_the_server_is(
    nodes: list[FrontOfNode], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shard_front, "_SHARD_SECONDS", 1_000.0)
    a, _ = nodes
    async with silent_node() as (_, address):
        a.routes[:] = [OwnerRoute(2, "b", address), a.routes[1]]
        assert (await within(a.wire.admin.GetServerInfo(admin_pb2.GetServerInfoRequest()))).version


async def test_a_node_hears_of_others_what_they_know_by_themselves(nodes: list[FrontOfNode]):
    a, b = nodes
    told: list[str] = []
    peers = Peers(
        a.config, "k", {"b": b.grpc_address, "c": "127.0.0.1:1"}, lambda: True, lambda: told.append("b")
    )
    supervisor = Supervisor(lambda name, error: None)
    peers.start(supervisor.spawn_lasting)
    try:
        await eventually(lambda: len(peers.views(1)) == 1)
        assert peers.views(1)[0].route == b.routes[1] and peers.views(1)[0].node == "b"
        assert told and set(b.asked_alone) == {True}
        b.nodes, b.name = (), "another"
        await eventually(lambda: not peers.views(1))
        b.name = "b"
        await eventually(lambda: bool(peers.views(1)))
        await b.front._port.server.stop(None)
        await eventually(lambda: not peers.views(1))
    finally:
        await within(supervisor.stop())


async def test_a_shard_is_moved_by_its_number(nodes: list[FrontOfNode]):
    """Both brokers here are in no cluster, and say so with a reason of their own."""
    move: Any = nodes[0].wire.admin.MoveShard
    for number in (0, 1, 2):
        request = admin_pb2.MoveShardRequest(to="x", shard=number)
        assert (await refused(move(request))).reason == "NODE_NOT_FOUND"
    nodes[0].routes[1] = OwnerRoute(2)
    assert (await refused(move(admin_pb2.MoveShardRequest(to="x", shard=1)))).reason == "NOT_OWNER"
    assert (await refused(move(admin_pb2.MoveShardRequest(to="x", shard=0)))).reason == "NODE_NOT_FOUND"
