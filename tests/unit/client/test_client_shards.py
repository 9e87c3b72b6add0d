"""Shards as the SDK computes them by itself are those of the broker."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from typing import Any

import pytest
from google.protobuf import message_factory

import postdate
from broker.rpc import topic_of as broker_topic_of
from broker.topic_shards import shard_of as broker_shard_of
from postdate import _owner
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
