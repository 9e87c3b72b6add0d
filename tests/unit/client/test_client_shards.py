"""Shards as the SDK computes them by itself are those of the broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from random import Random
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory

import postdate
from broker.rpc import topic_of as broker_topic_of
from broker.topic_shards import shard_of as broker_shard_of
from postdate import _owner, _rpc
from postdate._backoff import Backoff
from postdate._routes import Routes, count_shards
from postdate._topic_shards import shard_of, topic_of
from postdate_api.v1 import admin_pb2
from tests.unit.client.fake_server import FakeBroker

NAMES = ["", "123456789", "a", "a~b", "~", "x" * 255, *(f"orders-{number:03}" for number in range(500))]


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 8, 64, 4096])
def test_a_topic_lies_where_the_broker_says(shards: int) -> None:
    assert [shard_of(name, shards) for name in NAMES] == [broker_shard_of(name, shards) for name in NAMES]


def test_the_topic_of_each_request_is_found_as_the_front_finds_it() -> None:
    found = set()
    for path, descriptor in broker_topic_of._REQUESTS.items():
        request = message_factory.GetMessageClass(descriptor)()
        field = broker_topic_of._FIELDS.get(path, "")
        if field:
            setattr(request, field, "orders")
            found.add(path)
        assert topic_of(request) == ("orders" if field else ""), path
    assert found == broker_topic_of.TOPIC_METHODS


def told(*addresses: str, numbers: range | None = None) -> admin_pb2.GetClusterResponse:
    places = zip(numbers or range(len(addresses)), addresses, strict=True)
    shards = [
        admin_pb2.ClusterShard(number=number, owner=f"shard {number}", owner_address=address)
        for number, address in places
    ]
    return admin_pb2.GetClusterResponse(shards=shards)


NOBODY = admin_pb2.GetClusterResponse(shards=[admin_pb2.ClusterShard(number=number) for number in range(2)])
"""Answer of a front none of whose shards is up."""


@pytest.mark.parametrize(
    ("response", "count"),
    [
        (admin_pb2.GetClusterResponse(), 1),
        (admin_pb2.GetClusterResponse(shards=[admin_pb2.ClusterShard()]), 1),
        (told(":1", ":2"), 2),
        (told("", ":2", ""), 3),
        (told("", ""), 1),  # nobody can be gone to
        (told(":1", ":2", numbers=range(1, 3)), 1),  # one is missing: a topic would be sought in vain
        (told(*[":1"] * 4097), 1),
        (NOBODY, 0),  # not yet
    ],
)
def test_shards_count_where_clients_can_go_to_them(
    response: admin_pb2.GetClusterResponse, count: int
) -> None:
    assert count_shards(response) == count


@pytest.mark.parametrize("asked", ["db.example:7650", "[::1]:7650", "10.0.0.1:7650"])
async def test_an_address_without_a_host_is_on_the_host_that_was_asked(asked: str) -> None:
    async def ask(_: str) -> admin_pb2.GetClusterResponse:
        return told("other:1", ":7652")

    host = asked.removesuffix(":7650")
    assert (await Routes([asked], ask, 1).find()).address == f"{host}:7652"
    route = await Routes([asked], ask, 0).find()
    assert (route.address, route.owner, route.is_own) == ("other:1", "shard 0", False)


@pytest.mark.parametrize("is_routed", [False, True])
@pytest.mark.parametrize("is_trusted", [False, True])
async def test_without_encryption_a_token_is_shown_to_given_addresses_alone(
    is_routed: bool, is_trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on this machine, where a tunnel's broker tells addresses of another one, and not even to ask who it is."""
    monkeypatch.setattr(_owner, "_UNREACHABLE_S", 0.0)
    brokers = [FakeBroker() for _ in range(3)]
    *given, elsewhere = [await broker.start() for broker in brokers]
    elsewhere = elsewhere.replace("127.0.0.1", "localhost")
    for broker in brokers:
        broker.knobs.cluster = admin_pb2.GetClusterResponse(
            cluster_id="c",
            node="near",
            nodes=[admin_pb2.ClusterNode(name="far", address=elsewhere)],
            shards=[
                admin_pb2.ClusterShard(number=number, epoch=1, owner="far", owner_address=elsewhere)
                for number in range(2)
            ],
        )
    topic = next(name for name in NAMES if shard_of(name, 2) == 1)
    address = ",".join(given) if is_routed else given[0]
    options: Any = {"token": "secret", "allow_plaintext_token": is_trusted, "retry_for": timedelta(0)}
    async with AsyncExitStack() as stack:
        for broker in brokers:
            stack.push_async_callback(broker.stop)
        client = await stack.enter_async_context(postdate.connect(address, **options))
        for _ in range(3):
            with suppress(postdate.Unavailable):
                assert [topic async for topic in client.topics.list()] == []
            await client._rpc._count_shards(is_stream=True)
            owner = client._rpc.owner(topic)
            assert owner is not client._rpc.front
            with suppress(postdate.Unavailable):
                await owner._begin_finding()
    assert (elsewhere in owner.routes.addresses) is (is_routed and is_trusted), "one address needs no nodes"
    assert brokers[0].authorizations
    assert set(brokers[-1].authorizations) == ({"Bearer secret"} if is_trusted else set())


class Front(FakeBroker):
    """Front that counts how often it is asked for its cluster."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.is_away = False  # it cannot answer
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def GetCluster(self, request: admin_pb2.GetClusterRequest, context: Any) -> Any:
        self.asked += 1
        await self.goes_on.wait()
        if self.is_away:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        return await super().GetCluster(request, context)


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    front = Front()
    await front.start()
    front.knobs.cluster = told(":1", ":1")
    yield front
    await front.stop()


async def call_counted(client: postdate.Client) -> None:
    """Make a call, and wait for the question that may have begun with it."""
    assert len([topic async for topic in client.topics.list()]) < 2
    if client._rpc._counting is not None:
        await asyncio.wait({client._rpc._counting})


async def test_a_front_that_cannot_tell_its_shards_is_not_asked_with_each_call(front: Front) -> None:
    front.is_away = True
    async with postdate.connect(f"127.0.0.1:{front.port}") as client:
        client._rpc._count_backoff = Backoff(Random(1), first_s=1_000.0, longest_s=1_000.0)
        for _ in range(10):
            await call_counted(client)
        assert front.asked == 1
        front.is_away = False
        client._rpc._count_at = 0.0  # the pause is over
        for _ in range(10):
            await call_counted(client)
        assert (front.asked, client._rpc._shards) == (2, 2)


@pytest.mark.parametrize("first", [NOBODY, None])
async def test_shards_that_come_up_later_are_counted(
    front: Front, first: admin_pb2.GetClusterResponse | None
) -> None:
    later, front.knobs.cluster = front.knobs.cluster, first
    async with postdate.connect(f"127.0.0.1:{front.port}") as client:
        client._rpc._count_backoff = Backoff(Random(1), first_s=0.0)
        for _ in range(3):
            await call_counted(client)
        assert client._rpc._shards == 1
        assert front.asked == (2 if first else 1)
        front.knobs.cluster = later
        await call_counted(client)
        assert client._rpc._shards == (2 if first else 1), "a broker of one shard is asked once"


async def test_streams_wait_in_vain_for_the_count_of_shards_but_once(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    front.goes_on.clear()
    monkeypatch.setattr(_rpc, "_ASK_S", 1_000.0)
    monkeypatch.setattr(_rpc, "_COUNT_S", 0.05)
    async with postdate.connect(f"127.0.0.1:{front.port}") as client, asyncio.timeout(20):
        async with client.producer("t") as producer:
            await producer.send(b"x")
        monkeypatch.setattr(_rpc, "_COUNT_S", 1_000.0)
        async with client.producer("t") as producer:
            await producer.send(b"x")
        front.goes_on.set()
        await call_counted(client)
        assert client._rpc._shards == 2
