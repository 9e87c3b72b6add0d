"""The SDK and several nodes: it finds the owner, follows the shard to the next one, and believes nobody older.

The nodes are real brokers and fronts. They take turns over one folder, as they would over one log.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

import postdate
import postdate.sync
from benchmarks.processes import free_ports
from broker.folder.broker import Broker
from broker.observe.cluster_view import ClusterView, OwnerRoute
from broker.observe.metrics import BrokerCounters, ClusterSnapshot
from broker.rpc.front import Front, FrontHost
from broker.runtime.clock import SystemClock
from broker.runtime.ownership import AlwaysOwner
from broker.runtime.supervise import Supervisor
from broker.server import OwnedShard, Server
from postdate import _link, _owner, _pipeline, _rpc
from tests.configs import broker_config
from tests.wire.conftest import eventually, within

SOON = timedelta(seconds=15)


async def open_broker(broker: Broker) -> None:
    broker.open()


class Nodes:
    """Three nodes of a cluster, one of which owns the shard."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        names = "abc"
        self.addresses = {
            name: f"127.0.0.1:{port}" for name, port in zip(names, free_ports(len(names)), strict=True)
        }
        self.epoch = 0
        self.owner = ""
        self.cluster_id = "c"
        self.believes: dict[str, OwnerRoute] = {}  # those who know another owner than there is
        self.server: Server
        self._fronts: dict[str, Front] = {}
        self._supervisor = Supervisor(lambda name, error: None)

    @property
    def address(self) -> str:
        """The addresses, as a client takes them."""
        return ",".join(self.addresses.values())

    def _view(self, name: str) -> Callable[[], ClusterView]:
        def view() -> ClusterView:
            address = self.addresses.get(self.owner, "")
            route = self.believes.get(name, OwnerRoute(self.epoch, self.owner, address))
            return ClusterView(self.cluster_id, name, tuple(self.addresses.items()), 0, route)

        return view

    async def own(self, name: str) -> None:
        """Let a node own the shard."""
        if name in self._fronts:
            await self._fronts.pop(name).stop()
        self.owner = name
        self.epoch += 1
        config = broker_config(
            data_dir=str(self._folder / "shard"),
            grpc_address=self.addresses[name],
            http_address="127.0.0.1:0",
            drain_grace_ms=200,
            disk_reserve_bytes=0,
            dedup_window_ms=3_600_000,
        )
        snapshot = ClusterSnapshot(True, self.epoch, 1, 0, 0, 0, 1, 0, 0)
        shard = OwnedShard(AlwaysOwner(), open_broker, self._view(name), lambda: snapshot, lambda node: None)
        self.server = Server(config, shard=shard)
        await self.server.start()

    async def follow(self, *names: str) -> None:
        """Let nodes be standbys."""
        for name in names:
            config = broker_config(grpc_address=self.addresses[name])
            front = Front(FrontHost(config, SystemClock(), BrokerCounters()), self._view(name))
            await front.start(self._supervisor.spawn_lasting)
            self._fronts[name] = front

    async def lose_owner(self) -> None:
        """Cut all that is connected to the owner; nobody owns the shard then."""
        await self.server._port.server.stop(None)
        await within(self.server.stop())
        self.owner = ""

    async def stop(self) -> None:
        await within(self._supervisor.stop())
        for front in self._fronts.values():
            await front.stop()
        if self.owner:
            await within(self.server.stop())


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    nodes = Nodes(tmp_path)
    await nodes.own("a")
    await nodes.follow("b", "c")
    yield nodes
    await nodes.stop()
    shutil.rmtree(tmp_path / "shard", ignore_errors=True)


@asynccontextmanager
async def connected(address: str, **options: Any) -> AsyncIterator[postdate.Client]:
    async with postdate.connect(address, retry_for=SOON, **options) as client:
        yield client


def consumers(server: Server) -> int:
    return len(server._consumer._sessions)


async def test_a_client_talks_to_the_owner_whatever_comes_first(nodes: Nodes):
    last_first = ",".join(reversed(nodes.addresses.values()))
    async with connected(last_first) as client:
        await within(client.topics.create("t"))
        assert client._rpc.front.connection.address == nodes.addresses["a"]
        info = await client.cluster()
        assert (info.node, info.shards[0].owner, info.shards[0].epoch) == ("a", "a", 1)
        assert [node.address for node in info.nodes] == list(nodes.addresses.values())


async def test_a_client_of_one_node_is_passed_on(nodes: Nodes):
    async with connected(nodes.addresses["b"]) as client, client.producer("t") as producer:
        await within(producer.send(b"x"))
        assert not client._rpc.is_routed
        assert client._rpc.front.connection.address == nodes.addresses["b"]


async def test_producer_and_consumer_never_notice_that_the_owner_changes(nodes: Nodes):
    """Every message once in the log, in spite of three changes under load, and all of them delivered."""
    taken: list[bytes] = []
    async with connected(nodes.address) as client:
        await client.topics.create("t")
        subscription = client.subscribe("t", "s", initial_position=postdate.InitialPosition.EARLIEST)
        await within(subscription.open())

        async def consume() -> None:
            async for message in subscription:
                taken.append(message.payload)
                await message.ack()

        consuming = asyncio.ensure_future(consume())
        sent: list[bytes] = []

        async def produce() -> None:
            async with client.producer("t", producer_name="p", linger=timedelta(0)) as producer:
                for number in range(400):
                    sent.append(payload := b"%d" % number)
                    await producer.send(payload)

        producing = asyncio.ensure_future(produce())
        for number, name in enumerate("bca", 1):
            await eventually(lambda number=number: len(sent) >= 100 * number)  # type: ignore[misc]
            former = nodes.owner
            await nodes.lose_owner()
            await nodes.follow(former)
            await nodes.own(name)
        await within(producing, 30)
        async with asyncio.timeout(30):
            while not set(sent) <= set(taken):
                await asyncio.sleep(0.01)
        consuming.cancel()
        await asyncio.wait({consuming})
        await within(subscription.close())
        ids = [message.payload async for message in peek(client)]
    assert ids == sent  # none twice, none lost, in order


async def peek(client: postdate.Client) -> AsyncIterator[postdate.Message]:
    """All messages in the log."""
    async with client.subscribe(
        "t", "all", initial_position=postdate.InitialPosition.EARLIEST
    ) as subscription:
        while messages := await subscription.receive_many(1000, timedelta(seconds=1)):
            for message in messages:
                yield message


async def test_calls_wait_for_the_next_owner(nodes: Nodes):
    async with connected(nodes.address) as client:
        await client.topics.create("t")
        await nodes.lose_owner()
        await nodes.follow("a")
        creating = asyncio.ensure_future(client.topics.create("u"))
        listing = asyncio.ensure_future(client.topics.get("t"))
        await asyncio.wait({creating, listing}, timeout=0.5)
        assert not creating.done() and not listing.done()
        await nodes.own("b")
        assert (await within(creating)).name == "u"
        assert (await within(listing)).name == "t"


async def test_without_an_owner_calls_fail_in_the_end(nodes: Nodes):
    await nodes.lose_owner()
    async with postdate.connect(nodes.address, retry_for=timedelta(seconds=0.5)) as client:
        with pytest.raises(postdate.Unavailable, match="no node knows who owns the shard"):
            await within(client.server_info())


async def test_a_batch_that_met_no_owner_is_sent_again_without_a_name(nodes: Nodes):
    """Nothing of it was stored, so it needs no sequence ids: whoever it met had not begun with it."""
    async with connected(nodes.address) as client, client.producer("t") as producer:
        await within(producer.send(b"one"))
        nodes.believes["b"] = OwnerRoute(9, "c", nodes.addresses["c"])  # who does not own it either
        nodes.believes["a"] = nodes.believes["b"]
        client._rpc.front._in_doubt = True
        client._rpc.front.connection.leave("another node owns the shard now")
        # What goes into a stream that is just ending is in doubt, and not sent again without a name.
        await eventually(lambda: producer._pipeline is not None and producer._pipeline._call is None)
        sending = asyncio.ensure_future(producer.send(b"two"))
        await asyncio.wait({sending}, timeout=0.5)
        assert not sending.done()
        nodes.believes.clear()
        nodes.epoch = 10
        await within(sending)


async def test_a_stream_of_an_older_epoch_is_not_believed(nodes: Nodes):
    async with connected(nodes.address) as client:
        await client.topics.create("t")
        client._rpc.front.routes.epoch = 5  # somebody has told of a later owner
        async with client.producer("t") as producer, asyncio.TaskGroup() as group:
            subscription = client.subscribe("t", "s")
            opening = group.create_task(subscription.open())
            await asyncio.wait({opening}, timeout=0.5)
            assert not opening.done()
            nodes.epoch = 6
            nodes.server._consumer._epoch = 6
            await within(opening)
            await producer.send(b"x")
        assert [message.payload for message in await subscription.receive_many(1, SOON)] == [b"x"]
        assert client._rpc.front.epoch == 6
        client._rpc.front.routes.epoch = 7
        before = subscription._stream.connection
        async with client.producer("t") as producer:
            nodes.epoch = nodes.server._consumer._epoch = 7
            await producer.send(b"y")  # on the stream of epoch 6: dropped, and it comes on the next
        first = await subscription.receive_many(1, SOON)
        assert [message.payload for message in first] in ([b"x"], [b"y"])
        assert subscription._stream.connection > before
        await within(subscription.close())


async def test_an_owner_of_another_cluster_is_not_talked_to(nodes: Nodes):
    async with postdate.connect(nodes.address, retry_for=timedelta(milliseconds=500)) as client:
        await client.topics.create("t")
        client._rpc.front.routes.epoch = 5
        nodes.cluster_id = "another"
        with pytest.raises(postdate.Unavailable, match="of cluster another"):
            async with client.subscribe("t", "s"):
                pass


@asynccontextmanager
async def alone_at(address: str, folder: Path) -> AsyncIterator[Server]:
    """A broker of no cluster where a node was."""
    config = broker_config(
        data_dir=str(folder / "alone"),
        grpc_address=address,
        http_address="127.0.0.1:0",
        drain_grace_ms=200,
        disk_reserve_bytes=0,
    )
    server = Server(config)
    await server.start()
    try:
        yield server
    finally:
        await within(server.stop())


async def test_a_node_that_comes_back_without_its_cluster_is_not_talked_to(
    nodes: Nodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async with connected(nodes.address) as client:
        await client.topics.create("t")
        async with client.subscribe("t", "s") as subscription, client.producer("t") as producer:
            await nodes.lose_owner()
            async with alone_at(nodes.addresses["a"], tmp_path) as alone:
                await eventually(lambda: "is of no cluster" in caplog.text)
                await nodes.own("b")
                await within(producer.send(b"x"))
                assert (await within(anext(subscription))).payload == b"x"
                assert alone.broker.registry.topics == {} and not consumers(alone)


async def test_a_client_without_streams_does_not_talk_to_a_node_that_comes_back_without_its_cluster(
    nodes: Nodes, tmp_path: Path
):
    """An answer to a single call says nothing of clusters: it must not be asked for."""
    async with connected(nodes.address) as client:
        await client.topics.create("t")
        await nodes.lose_owner()
        async with alone_at(nodes.addresses["a"], tmp_path) as alone:
            creating = asyncio.ensure_future(client.topics.create("u"))
            getting = asyncio.ensure_future(client.topics.get("t"))
            await nodes.own("b")
            await within(creating)
            assert (await within(getting)).name == "t"
            assert alone.broker.registry.topics == {}


class Frozen(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """A node that takes calls and answers none, as a process that was stopped and left its port open."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def service(self, handler_call_details: Any) -> Any:
        async def hang(_: Any, context: Any) -> None:
            self.calls[handler_call_details.method.rpartition("/")[2]] += 1
            await asyncio.Event().wait()

        return grpc.stream_stream_rpc_method_handler(hang)


@pytest.fixture
async def frozen(nodes: Nodes) -> AsyncIterator[Callable[[], Awaitable[Frozen]]]:
    """Puts a frozen node in the place of the owner."""
    server = grpc.aio.server()

    async def freeze() -> Frozen:
        await nodes.lose_owner()
        nodes.owner = "a"  # as far as anybody knows
        server.add_generic_rpc_handlers((hanging := Frozen(),))
        server.add_insecure_port(nodes.addresses["a"])
        await server.start()
        return hanging

    yield freeze
    await server.stop(None)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask others often."""
    for module in (_owner, _pipeline, _link):
        monkeypatch.setattr(module, "_LOOK_S", 0.1)
    monkeypatch.setattr(_rpc, "_ASK_S", 0.5)


Freeze = Callable[[], Awaitable[Frozen]]


@pytest.mark.usefixtures("often")
async def test_a_producer_leaves_a_frozen_owner_once_another_is_known(nodes: Nodes, frozen: Freeze):
    """It neither answers nor ends its streams: other nodes are asked, and know a later one. So in the next tests."""
    async with connected(nodes.address) as client:
        await client.topics.create("t")
        async with client.producer("t", producer_name="p") as producer:
            await within(producer.send(b"one"))
            hanging = await frozen()
            sending = asyncio.ensure_future(producer.send(b"two"))
            await eventually(lambda: hanging.calls["ProduceStream"] > 0)
            await nodes.own("b")
            await within(sending)


@pytest.mark.usefixtures("often")
async def test_a_subscription_leaves_a_frozen_owner_once_another_is_known(nodes: Nodes, frozen: Freeze):
    async with connected(nodes.address) as client, connected(nodes.address) as other:
        await client.topics.create("t")
        async with client.subscribe("t", "s", permits=10) as subscription:
            hanging = await frozen()
            await eventually(lambda: hanging.calls["Subscribe"] > 0)
            await nodes.own("b")
            async with other.producer("t") as producer:
                await within(producer.send(b"x"))
            assert [message.payload for message in await subscription.receive_many(1, SOON)] == [b"x"]


@pytest.mark.usefixtures("often")
async def test_calls_leave_a_frozen_owner_once_another_is_known(nodes: Nodes, frozen: Freeze):
    async with connected(nodes.address) as client:
        await client.topics.create("t")
        hanging = await frozen()
        getting = asyncio.ensure_future(client.topics.get("t"))
        changing = asyncio.ensure_future(client.topics.delete("u"))
        await eventually(lambda: hanging.calls["GetTopic"] > 0 and hanging.calls["DeleteTopic"] > 0)
        assert not getting.done() and not changing.done()
        await nodes.own("b")
        assert (await within(getting)).name == "t"
        with pytest.raises(postdate.Disconnected, match="may have happened or not"):
            await within(changing)


async def test_the_sync_client_takes_several_addresses(nodes: Nodes):
    def work() -> bytes:
        with (
            postdate.sync.connect(nodes.address, retry_for=SOON) as client,
            client.subscribe("t", "s") as subscription,
            client.producer("t") as producer,
        ):
            producer.send(b"x")
            return next(iter(subscription)).payload

    assert await within(asyncio.to_thread(work), 15) == b"x"


def test_each_address_is_looked_at() -> None:
    with pytest.raises(ValueError, match="'b' is not an address"):
        postdate.connect("a:7650,b")
    with pytest.raises(ValueError, match="a token for b:7650"):
        postdate.connect("127.0.0.1:7650, b:7650", token="secret")
