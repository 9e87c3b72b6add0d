"""The SDK and a broker with two shards: it goes to each of them where it can, and through the front where it cannot."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import postdate
from broker.server import Server
from broker.shards.shard_process import shard_config
from broker.topic_shards import shard_of
from postdate import InitialPosition, _owner
from postdate._connection import Connection
from tests.certificates import Authority
from tests.configs import broker_config
from tests.wire.access_files import ACCESS, Files
from tests.wire.conftest import Serve, eventually, within
from tests.wire.test_shard_front import A, B, Shards, names_on, topics_of
from tests.wire.test_shard_ports import port_of, started

SOON = timedelta(seconds=20)
EARLIEST = InitialPosition.EARLIEST


@pytest.fixture
async def shards() -> AsyncIterator[Shards]:
    async with started() as shards:
        yield shards


@asynccontextmanager
async def connected(shards: Shards, **options: Any) -> AsyncIterator[postdate.Client]:
    async with postdate.connect(shards.front.address, retry_for=SOON, **options) as client:
        yield client


def place(client: postdate.Client, topic: str) -> int:
    """Return the port that calls about a topic go to."""
    return int(client._rpc.owner(topic).connection.address.rpartition(":")[2])


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses of owners that were tried, each time."""
    tried: list[str] = []

    def connect(address: str, *args: Any) -> Connection:
        tried.append(address)
        return Connection(address, *args)

    monkeypatch.setattr(_owner, "Connection", connect)
    return tried


def lead_to(shards: Shards, number: int, port: int) -> None:
    """Have a shard tell another port than its own."""
    shards.servers[number]._port.shard_port = port


async def test_streams_go_to_the_owners_and_need_the_front_no_more(shards: Shards):
    async with connected(shards) as client:
        for topic, server in zip((A, B), shards.servers, strict=True):
            async with (
                client.producer(topic) as producer,
                client.subscribe(topic, "s", initial_position=EARLIEST) as subscription,
            ):
                await within(producer.send(b"one"))
                assert place(client, topic) == port_of(server)
                if topic == B:
                    await within(shards.front.stop())
                await within(producer.send(b"two"))
                for _ in range(2):
                    await (await within(anext(aiter(subscription)))).ack()
                assert topics_of(server) == [topic]


async def test_partitions_lie_on_several_shards_and_are_taken_from_as_one(shards: Shards):
    topics = postdate.partition_topics("payments", 8)
    assert {shard_of(topic, 2) for topic in topics} == {0, 1}
    async with (
        connected(shards) as client,
        client.subscribe_partitioned(
            "payments", "s", partitions=8, initial_position=EARLIEST, limit=300
        ) as subscription,
        client.partitioned_producer("payments", partitions=8) as producer,
    ):
        sent = [postdate.OutgoingMessage(b"%d" % number, key=str(number)) for number in range(300)]
        await within(producer.send_many(sent))
        assert {place(client, topic) for topic in topics} == {port_of(server) for server in shards.servers}
        taken: list[bytes] = []
        while messages := await within(subscription.receive_many(100)):
            assert all(message.topic == producer.topic_of(message.key) for message in messages)
            taken += [message.payload for message in messages]
            await within(subscription.ack_many(messages))
        assert sorted(taken) == sorted(message.payload for message in sent)
        for stats in await client.stats(*topics):
            (counted,) = stats.subscriptions
            assert (counted.ready_messages, counted.leased_messages) == (0, 0)


async def test_calls_wait_for_nobody_and_then_go_to_the_owners(shards: Shards):
    async with connected(shards) as client:
        await within(client.topics.create(A))  # through the front
        await within(client.topics.get(A))

        async def is_direct() -> bool:
            await client.topics.get(A)
            return place(client, A) == port_of(shards.servers[0])

        async with asyncio.timeout(20):
            while not await is_direct():
                pass
        await client.topics.create(B)
        assert [topic.name async for topic in client.topics.list()] == sorted([A, B]), "of all shards"
        assert [stats.topic for stats in await client.stats(A, B)] == sorted([A, B])
        await within(shards.front.stop())
        assert (await within(client.topics.get(A))).name == A


async def test_an_owner_out_of_reach_costs_one_attempt(shards: Shards, attempts: list[str]):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and says nothing
        lead_to(shards, 0, silent.getsockname()[1])
        async with connected(shards) as client:
            for number in range(5):
                async with client.producer(A) as producer:
                    await within(producer.send(b"%d" % number))
                await within(client.topics.get(A))
                assert place(client, A) == int(shards.front.address.rpartition(":")[2])
            async with client.producer(B) as producer:
                await within(producer.send(b"x"))
            assert place(client, B) == port_of(shards.servers[1]), "the other one is in reach"
    assert len(attempts) == 2


async def test_nobody_waits_for_a_second_attempt(
    shards: Shards, attempts: list[str], monkeypatch: pytest.MonkeyPatch
):
    right = port_of(shards.servers[0])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        lead_to(shards, 0, silent.getsockname()[1])
        monkeypatch.setattr(_owner, "_UNREACHABLE_S", 0.0)
        async with connected(shards) as client:
            async with client.producer(A) as producer:
                await within(producer.send(b"x"))
            await eventually(lambda: client._rpc.owner(A)._finding is None)  # the first one has ended
            monkeypatch.setattr(_owner, "_PATIENCE_S", 1_000.0)
            monkeypatch.setattr(_owner, "_REACH_S", 1_000.0)
            async with client.producer(A) as producer:
                await within(producer.send(b"x"))
                assert client._rpc.owner(A)._finding is not None, "it is being tried meanwhile"
                await eventually(lambda: len(attempts) == 2)
    async with connected(shards) as client:
        lead_to(shards, 0, right)
        async with client.producer(A) as producer:
            await within(producer.send(b"x"))
        assert place(client, A) == right


async def test_an_owner_is_tried_again_later(shards: Shards, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_owner, "_UNREACHABLE_S", 0.0)
    right = port_of(shards.servers[0])
    with socket.create_server(("127.0.0.1", 0)) as closed:
        lead_to(shards, 0, closed.getsockname()[1])
    async with connected(shards) as client:
        async with client.producer(A) as producer:
            await within(producer.send(b"x"))
        assert place(client, A) != right
        lead_to(shards, 0, right)

        async def is_direct() -> bool:
            await client.topics.get(A)
            return place(client, A) == right

        async with asyncio.timeout(20):
            while not await is_direct():
                pass


async def test_another_broker_at_the_address_of_a_shard_gets_nothing(shards: Shards, serve: Serve):
    other = await serve()
    lead_to(shards, 0, int(other.server.grpc_address.rpartition(":")[2]))
    lead_to(shards, 1, port_of(shards.servers[0]))
    async with connected(shards) as client:
        for topic in (A, B):
            async with client.producer(topic) as producer:
                await within(producer.send(b"x"))
            for _ in range(3):
                await within(client.topics.get(topic))
    assert topics_of(other.server) == []
    assert [topics_of(server) for server in shards.servers] == [[A], [B]]


async def test_a_broker_that_comes_to_the_port_of_a_shard_gets_nothing(shards: Shards, tmp_path: Path):
    """Also where nobody has called meanwhile, and so nothing has failed."""
    async with connected(shards) as client:
        async with client.producer(A) as producer:
            await within(producer.send(b"one"))
        port = place(client, A)
        connection = client._rpc.owner(A).connection
        await shards.stop_shard(0)
        await eventually(lambda: not connection.is_ready)
        config = {"grpc_address": f"127.0.0.1:{port}", "http_address": "127.0.0.1:0", "disk_reserve_bytes": 0}
        other = Server(broker_config(data_dir=str(tmp_path), **config))
        await other.start()
        await restart(shards, 0)
        async with client.producer(A) as producer:
            await within(producer.send(b"two"))
        await within(client.topics.get(A))
        assert place(client, A) == port_of(shards.servers[0]) != port
    assert topics_of(other) == []
    await within(other.stop())


async def restart(shards: Shards, number: int) -> None:
    """Start a shard again, on another port."""
    shards.servers[number] = Server(shard_config(shards.config, number))
    shards._stopped.discard(number)
    await shards.servers[number].start()


async def test_producer_and_consumer_never_notice_that_a_shard_restarts(shards: Shards):
    taken: list[bytes] = []
    async with (
        connected(shards) as client,
        client.producer(A, producer_name="p") as producer,
        client.subscribe(A, "s", initial_position=EARLIEST) as subscription,
    ):
        await within(client.topics.update(A, dedup_window=timedelta(hours=1)))

        async def take() -> None:
            async for message in subscription:
                taken.append(message.payload)
                await message.ack()

        taking = asyncio.ensure_future(take())
        for life in range(3):
            for number in range(10):
                await within(producer.send(b"%d" % (life * 10 + number)))
            await eventually(lambda: place(client, A) == port_of(shards.servers[0]))
            if life < 2:
                await shards.stop_shard(0)
                sending = asyncio.ensure_future(producer.send(b"meanwhile"))
                await asyncio.sleep(0)
                await restart(shards, 0)
                await within(sending)
        await eventually(lambda: {b"%d" % number for number in range(30)} <= set(taken))
        taking.cancel()
    assert taken.count(b"meanwhile") >= 2


async def test_a_wrong_count_of_shards_is_mended_by_a_refusal(shards: Shards):
    moved = next(
        name for name in names_on(0, 100) if name != A and shard_of(name, 4) == 1
    )  # a topic of shard 1 of 4, if there were 4
    async with connected(shards) as client:
        for topic in (A, B):
            async with client.producer(topic) as producer:
                await within(producer.send(b"x"))
        client._rpc._shards = 4
        async with client.producer(moved) as producer:
            await within(producer.send(b"y"))
            assert client._rpc._shards == 2
            assert place(client, moved) == port_of(shards.servers[0])
        client._rpc._shards = 4
        client._rpc._owners.clear()
        async with client.producer(B) as producer:
            await within(producer.send(b"y"))
        assert (await within(client.topics.get(moved))).name == moved
    assert topics_of(shards.servers[0]) == sorted([A, moved])


async def test_without_ports_there_is_nothing_to_try(attempts: list[str]):
    async with started(shard_ports=False) as shards, connected(shards) as client:
        for _ in range(3):
            async with client.producer(A) as producer:
                await within(producer.send(b"x"))
            await within(client.topics.get(A))
        assert client._rpc.owner(A) is client._rpc.front
    assert attempts == []


async def test_tokens_and_encryption_go_along(tmp_path: Path):
    authority = Authority(tmp_path)
    pair = authority.issue("server", is_local=True)
    Files(tmp_path).access(ACCESS.replace('"orders"', f'"orders", "{A}"'))
    settings = {
        "access_file": str(tmp_path / "access.toml"),
        "tokens_file": str(tmp_path / "tokens.toml"),
        "tls_cert_file": str(pair.cert_file),
        "tls_key_file": str(pair.key_file),
    }
    async with started(**settings) as shards:
        tls = postdate.Tls(ca_file=authority.ca_file)
        async with connected(shards, tls=tls, token="shop-secret") as client, client.producer(A) as producer:
            await within(producer.send(b"x"))
            assert place(client, A) == port_of(shards.servers[0])
            with pytest.raises(postdate.PermissionDenied):
                async with client.producer(B) as denied:
                    await within(denied.send(b"x"))


async def test_without_encryption_a_token_is_shown_to_the_given_address_alone(
    attempts: list[str], tmp_path: Path
):
    Files(tmp_path).access(ACCESS.replace('"orders"', f'"orders", "{A}"'))
    settings = {
        "access_file": str(tmp_path / "access.toml"),
        "tokens_file": str(tmp_path / "tokens.toml"),
    }
    async with started(**settings) as shards:
        for is_trusted in (False, True):
            async with (
                connected(shards, token="shop-secret", allow_plaintext_token=is_trusted) as client,
                client.producer(A) as producer,
            ):
                await within(producer.send(b"x"))
                assert (place(client, A) == port_of(shards.servers[0])) is is_trusted
            assert len(attempts) == is_trusted


async def test_a_client_that_is_closed_in_the_middle_leaves_nothing_behind(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        lead_to(shards, 0, silent.getsockname()[1])
        monkeypatch.setattr(_owner, "_PATIENCE_S", 0.0)
        monkeypatch.setattr(_owner, "_REACH_S", 1_000.0)
        async with connected(shards) as client, client.producer(A) as producer:
            await within(producer.send(b"x"))
            rpc = client._rpc
            assert rpc._keeping
        assert not rpc._keeping
        with pytest.raises(postdate.Closed):
            await rpc.open_produce(A)
