"""The ports of shards: what a client may do there that knows of shards, and what holds there as at any port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

import postdate
from broker.server import Server
from broker.shards.shard_process import shard_config
from postdate_api.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    consumer_pb2,
    producer_pb2_grpc,
    schedule_pb2,
)
from tests.certificates import Authority
from tests.wire.access_files import ACCESS, Files, bearer
from tests.wire.conftest import Wire, batch, refused, sets, within
from tests.wire.test_shard_front import SHARDS, A, B, Shards, topics_of

_NO_TIME = timedelta(0)


@asynccontextmanager
async def started(**settings: Any) -> AsyncIterator[Shards]:
    shards = Shards(**settings)
    await shards.start()
    try:
        yield shards
    finally:
        await shards.stop()


@pytest.fixture
async def shards() -> AsyncIterator[Shards]:
    async with started() as shards:
        yield shards


def port_of(server: Server) -> int:
    return server._port.shard_port


class Direct(Wire):
    """A client of a shard's port."""

    def __init__(self, server: Server, **fields: Any) -> None:
        self.server, self.broker, self.streams = server, server.broker, []
        self.channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{port_of(server)}", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self.producer = producer_pb2_grpc.ProducerServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)


async def described(wire: Wire) -> list[admin_pb2.ClusterShard]:
    return list((await within(wire.admin.GetCluster(admin_pb2.GetClusterRequest()))).shards)


async def test_the_front_tells_where_each_shard_is_and_who_answers_there(shards: Shards):
    told = await described(shards.wire)
    assert [(each.number, each.owner, each.owner_address) for each in told] == [
        (number, server.broker.broker_id, f":{port_of(server)}")
        for number, server in enumerate(shards.servers)
    ]
    for server, shard in zip(shards.servers, told, strict=True):
        direct = Direct(server)
        answer = await within(direct.admin.GetCluster(admin_pb2.GetClusterRequest()))
        assert answer.node == shard.owner
        assert [each.number for each in answer.shards] == [shard.number]
        await direct.channel.close()
    await shards.stop_shard(0)
    away, there = await described(shards.wire)
    assert (away.number, away.owner, away.owner_address) == (0, "", "")
    assert (there.number, there.owner_address) == (1, told[1].owner_address)


REQUESTS: dict[str, Callable[[str], Any]] = {
    "ProducerService/Produce": lambda topic: batch(topic, b"x"),
    "ConsumerService/Receive": lambda topic: consumer_pb2.ReceiveRequest(topic=topic, subscription="s"),
    "ConsumerService/Acknowledge": lambda topic: consumer_pb2.AcknowledgeRequest(
        topic=topic, subscription="s", entries=sets([(1, 0)])
    ),
    "ConsumerService/ListOwed": lambda topic: consumer_pb2.ListOwedRequest(topic=topic, subscription="s"),
    "AdminService/CreateTopic": lambda topic: admin_pb2.CreateTopicRequest(name=topic),
    "AdminService/GetTopic": lambda topic: admin_pb2.GetTopicRequest(name=topic),
    "AdminService/DeleteTopic": lambda topic: admin_pb2.DeleteTopicRequest(name=topic),
    "AdminService/VerifyTopic": lambda topic: admin_pb2.VerifyTopicRequest(name=topic),
    "AdminService/GetStats": lambda topic: admin_pb2.GetStatsRequest(topics=[topic]),
    "AdminService/GetSubscription": lambda topic: admin_pb2.GetSubscriptionRequest(topic=topic, name="s"),
    "AdminService/ListSubscriptions": lambda topic: admin_pb2.ListSubscriptionsRequest(topic=topic),
    "AdminService/ListDeadLetters": lambda topic: admin_pb2.ListDeadLettersRequest(
        topic=topic, subscription="s"
    ),
    "ScheduleService/CountScheduled": lambda topic: schedule_pb2.CountScheduledRequest(topics=[topic]),
    "ScheduleService/CancelScheduled": lambda topic: schedule_pb2.CancelScheduledRequest(
        topic=topic, selector=schedule_pb2.Selector(schedule_keys=["k"])
    ),
}


@pytest.mark.parametrize("creates", [True, False])
async def test_a_topic_of_another_shard_is_refused_whatever_is_asked_of_it(creates: bool):
    async with started(auto_create_topics=creates) as shards:
        direct = Direct(shards.servers[0])
        for method, request in REQUESTS.items():
            call = direct.raw(f"/postdate.v1.{method}")
            refusal = await refused(call(request(B).SerializeToString()))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_OWNER"), method
            assert (refusal.metadata["shard"], refusal.metadata["shards"]) == ("1", str(SHARDS))
        assert [topics_of(server) for server in shards.servers] == [[], []]
        await direct.channel.close()


async def test_messages_go_both_ways_at_the_port(shards: Shards):
    direct = Direct(shards.servers[1])
    await within(direct.producer.Produce(batch(B, b"direct")))
    await shards.wire.produce(B, b"front")
    received = await shards.wire.receive(B, initial_position=consumer_pb2.INITIAL_POSITION_EARLIEST)
    assert len(received.deliveries) == 1
    assert topics_of(shards.servers[1]) == [B]
    await direct.channel.close()


async def test_without_ports_the_front_names_none():
    async with started(shard_ports=False) as shards:
        assert [port_of(server) for server in shards.servers] == [0, 0]
        assert [shard.owner_address for shard in await described(shards.wire)] == ["", ""]
        await shards.wire.produce(B, b"x")


async def test_a_shard_whose_port_is_taken_serves_behind_the_front():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        shards = Shards()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        shards.servers[1] = Server(replace(shard_config(shards.config, 1), shard_address=address))
        await shards.start()
        try:
            await shards.wire.produce(B, b"x")
            told = await described(shards.wire)
            assert [bool(shard.owner_address) for shard in told] == [True, False]
        finally:
            await shards.stop()


async def test_tokens_are_judged_at_the_port(tmp_path: Path):
    Files(tmp_path).access(ACCESS.replace('"orders"', f'"orders", "{A}"'))
    settings = {
        "access_file": str(tmp_path / "access.toml"),
        "tokens_file": str(tmp_path / "tokens.toml"),
    }
    async with started(**settings) as shards:
        direct = Direct(shards.servers[0])
        await within(direct.producer.Produce(batch(A, b"x"), metadata=bearer("shop-secret")))
        for metadata in ((), bearer("guessed")):
            refusal = await refused(direct.producer.Produce(batch(A, b"x"), metadata=metadata))
            assert refusal.code is grpc.StatusCode.UNAUTHENTICATED
        # Who may not know of a topic is not told where it lies.
        other = await refused(direct.producer.Produce(batch(B, b"x"), metadata=bearer("shop-secret")))
        assert other.code is grpc.StatusCode.PERMISSION_DENIED
        await direct.channel.close()


async def test_certificates_are_shown_and_asked_for_at_the_port_and_not_at_the_socket(tmp_path: Path):
    authority = Authority(tmp_path)
    pair, own = authority.issue("server", is_local=True), authority.issue("client", common_name="billing")
    settings = {
        "tls_cert_file": str(pair.cert_file),
        "tls_key_file": str(pair.key_file),
        "tls_client_ca_file": str(authority.ca_file),
    }
    async with started(**settings) as shards:
        address = f"127.0.0.1:{port_of(shards.servers[0])}"
        good = postdate.Tls(ca_file=authority.ca_file, cert_file=own.cert_file, key_file=own.key_file)
        for tls in (good, postdate.Tls(ca_file=authority.ca_file), None):
            async with postdate.connect(address, tls=tls, retry_for=_NO_TIME) as client:
                if tls is good:
                    await within(client.topics.create(A))
                    continue
                with pytest.raises(postdate.Unavailable):
                    await within(client.server_info())
        # The front shows none to a shard, on a socket that only its user can reach.
        async with postdate.connect(shards.front.address, tls=good, retry_for=_NO_TIME) as client:
            assert [topic.name async for topic in client.topics.list()] == [A]


async def test_connections_are_bounded_at_the_port_and_the_front_is_not_kept_out():
    async with started(connections_max=2) as shards:
        clients = [Direct(shards.servers[0]) for _ in range(3)]
        for client in clients[:2]:
            await within(client.producer.Produce(batch(A, b"x")))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await within(clients[2].producer.Produce(batch(A, b"x")))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await shards.wire.produce(A, b"x")
        for client in clients:
            await client.channel.close()


async def test_idle_connections_to_the_port_give_way():
    async with started(connections_max=4) as shards:
        idle = [Direct(shards.servers[0]) for _ in range(4)]
        for client in idle:
            await within(client.channel.channel_ready())
        newcomer = Direct(shards.servers[0])

        async def is_let_in() -> bool:
            try:
                await newcomer.producer.Produce(batch(A, b"x"))
            except grpc.aio.AioRpcError:
                return False
            return True

        async with asyncio.timeout(60):
            while not await is_let_in():
                await asyncio.sleep(0.05)
        for client in (newcomer, *idle):
            await client.channel.close()
