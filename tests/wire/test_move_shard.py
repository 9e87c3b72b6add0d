"""Moving a cluster's shard to another node: who may have it, and how the owner is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from broker.cli import main
from broker.folder.broker import Broker
from broker.observe.cluster_view import ClusterView, OwnerRoute
from broker.observe.metrics import BrokerCounters, ClusterSnapshot
from broker.rpc.cluster import FOLLOWED_WITHIN_MS
from broker.rpc.front import Front, FrontHost
from broker.runtime.clock import SystemClock
from broker.runtime.supervise import Supervisor
from broker.server import OwnedShard, Server
from postdate_api.v1 import admin_pb2
from tests.configs import broker_config
from tests.unit.owners import HeldOwner
from tests.wire.access_files import Files, bearer
from tests.wire.conftest import Wire, eventually, refused, within

CLERK = """
[[grant]]
principals = ["token:admin"]
topics = ["*"]
rights = ["manage"]

[[grant]]
principals = ["token:shop"]
topics = ["t"]
rights = ["manage"]
"""


class Pair:
    """An owner, `a`, and a node that follows it, `b`; a third one, `c`, is away."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.wire: Wire
        self.ownership = HeldOwner()
        self.resigned_to: list[str] = []
        config = broker_config(
            data_dir=str(folder / "data"),
            grpc_address="127.0.0.1:0",
            http_address="127.0.0.1:0",
            drain_grace_ms=0,
            **settings,
        )
        self.supervisor = Supervisor(lambda name, error: None)
        self.front = Front(FrontHost(config, SystemClock(), BrokerCounters()), lambda: self.follower)
        self.nodes: tuple[tuple[str, str], ...] = ()
        self.owner, self.follower = self.view("a"), self.view("b")

        async def open_broker(broker: Broker) -> None:
            broker.open()

        snapshot = ClusterSnapshot(True, 7, 1, 0, 0, 0, 1, 0, 0)
        shard = OwnedShard(
            self.ownership, open_broker, lambda: self.owner, lambda: snapshot, self.resigned_to.append
        )
        self.server = Server(config, shard=shard)

    def view(self, node: str, *, epoch: int = 7, late_ms: int = 0) -> ClusterView:
        address = dict(self.nodes).get("a", "")
        time_ms = SystemClock().now_ms() - late_ms
        return ClusterView("c", node, self.nodes, 0, OwnerRoute(epoch, "a", address), ("b", "c"), 12, time_ms)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Pair]:
        await self.server.start()
        await self.front.start(self.supervisor.spawn_lasting)
        addresses = (self.server.grpc_address, self.front.address, "127.0.0.1:1")
        self.nodes = tuple(zip("abc", addresses, strict=True))
        self.owner, self.follower = self.view("a"), self.view("b")
        self.wire = Wire(self.server)
        try:
            yield self
        finally:
            await self.wire.disconnect()
            await within(self.supervisor.stop())
            await within(self.front.stop())
            await within(self.server.stop())


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with Pair(tmp_path).serving() as nodes:
        yield nodes


def move(wire: Wire, to: str, **how: Any) -> Any:
    return wire.admin.MoveShard(admin_pb2.MoveShardRequest(to=to), **how)


async def reason(wire: Wire, to: str) -> str:
    return (await refused(move(wire, to))).reason


async def test_a_node_that_follows_gets_the_shard(pair: Pair):
    await within(move(pair.wire, "b"))
    assert pair.resigned_to == ["b"]


async def test_the_owner_itself_is_a_success_and_nothing_happens(pair: Pair):
    await within(move(pair.wire, "a"))
    assert pair.resigned_to == []


@pytest.mark.parametrize(
    ("to", "expected"), [("", "NODE_MISSING"), ("d", "NODE_NOT_FOUND"), ("c", "NODE_NOT_FOLLOWING")]
)
async def test_no_such_node_and_one_that_is_away_are_refused(pair: Pair, to: str, expected: str):
    assert await reason(pair.wire, to) == expected
    assert pair.resigned_to == []


async def test_a_shard_that_the_owner_does_not_have_is_refused(pair: Pair):
    refusal = await refused(pair.wire.admin.MoveShard(admin_pb2.MoveShardRequest(to="b", shard=1)))
    assert refusal.reason == "SHARD_NOT_FOUND"
    assert pair.resigned_to == []


async def test_a_node_that_is_behind_or_another_one_is_refused(pair: Pair):
    views = (
        pair.view("b", late_ms=FOLLOWED_WITHIN_MS + 1_000),
        pair.view("b", epoch=6),
        pair.view("b")._replace(applied_time_ms=0),
        pair.view("c"),
        pair.view("b")._replace(cluster_id="another"),
    )
    for view in views:
        pair.follower = view
        assert await reason(pair.wire, "b") == "NODE_NOT_FOLLOWING"
    assert pair.resigned_to == []


async def test_an_owner_without_its_lease_moves_nothing(pair: Pair):
    pair.ownership.is_held = False
    assert await reason(pair.wire, "b") == "ENGINE_UNREACHABLE"
    assert pair.resigned_to == []
    pair.ownership.is_held = True


async def test_a_broker_in_no_cluster_has_no_node(wire: Wire):
    assert await reason(wire, "b") == "NODE_NOT_FOUND"


async def test_only_who_manages_all_topics_may_move_it_and_the_node_is_asked_in_his_name(tmp_path: Path):
    files = Files(tmp_path)
    files.access(CLERK)
    async with Pair(tmp_path, **files.settings).serving() as pair:
        denied = await refused(move(pair.wire, "b", metadata=bearer("shop-secret")))
        assert denied.reason == "PERMISSION_DENIED"
        await within(move(pair.wire, "b", metadata=bearer("admin-secret")))
        assert pair.resigned_to == ["b"]


async def test_the_command_goes_through_any_node_and_waits_for_the_new_owner(pair: Pair):
    """Through the node that is to own the shard, which passes the call on."""
    address = dict(pair.nodes)["b"]
    command = ["cluster", "move", "--address", address, "--to"]
    result = await asyncio.to_thread(CliRunner().invoke, main, [*command, "d"])
    assert result.exit_code == 1 and "no node 'd'" in result.output
    done = asyncio.create_task(asyncio.to_thread(CliRunner().invoke, main, [*command, "b"]))
    await eventually(lambda: bool(pair.resigned_to))
    assert not done.done(), "nobody owns the shard yet"
    # As the port of the new owner answers; a front says of its own node that it owns nothing.
    pair.follower = pair.view("a")._replace(route=OwnerRoute(8, "b", address))
    result = await within(done)
    assert (result.exit_code, result.output) == (0, "b owns the shard\n")


async def test_the_command_says_at_once_that_another_node_was_faster(pair: Pair):
    """As where the disk of the named node stalls for a lease: whoever is first in rank takes over then."""
    command = ["cluster", "move", "--address", pair.wire.server.grpc_address, "--to", "b"]
    done = asyncio.create_task(asyncio.to_thread(CliRunner().invoke, main, command))
    await eventually(lambda: bool(pair.resigned_to))
    pair.follower = pair.view("b")._replace(route=OwnerRoute(8, "c", "127.0.0.1:1"))
    result = await within(done)
    assert result.exit_code == 1
    assert "c took the shard over before b could" in result.output
