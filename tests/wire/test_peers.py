"""Questions to another node: what it knows is forgotten with its answers, and it is asked again whatever it answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from broker.rpc import peers as rpc_peers
from broker.rpc.peers import Peers
from broker.runtime.supervise import Supervisor
from postdate_api.v1 import admin_pb2
from tests.configs import broker_config
from tests.wire.conftest import eventually, within

KNOWN = admin_pb2.GetClusterResponse(
    cluster_id="k", node="b", shards=[admin_pb2.ClusterShard(number=0, epoch=3, owner="b")]
).SerializeToString()


class OtherNode:
    """A node that answers with given bytes, or refuses."""

    def __init__(self) -> None:
        self.answer: bytes | grpc.StatusCode = KNOWN
        self.questions = 0
        self._server = grpc.aio.server()
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(
                    "postdate.v1.AdminService",
                    {"GetCluster": grpc.unary_unary_rpc_method_handler(self._tell)},
                )
            ]
        )

    async def _tell(self, _: bytes, context: Any) -> bytes:
        self.questions += 1
        if isinstance(self.answer, grpc.StatusCode):
            await context.abort(self.answer, "")
        assert isinstance(self.answer, bytes)
        return self.answer

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)


@pytest.fixture
async def other(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OtherNode]:
    for seconds in ("_LOOK_SECONDS", "_HURRIED_SECONDS", "_PAUSE_SECONDS"):
        monkeypatch.setattr(rpc_peers, seconds, 0.02)
    made = OtherNode()
    await made.start()
    yield made
    await within(made.stop())


@contextlib.asynccontextmanager
async def asking(other: OtherNode) -> AsyncIterator[Peers]:
    """A node that asks the other one."""
    peers = Peers(broker_config(), "k", {"b": other.address}, lambda: True)
    supervisor = Supervisor(lambda name, error: None)
    peers.start(supervisor.spawn_lasting)
    try:
        yield peers
    finally:
        await within(supervisor.stop())
    assert supervisor.failure is None


async def test_a_node_is_asked_again_after_an_answer_that_is_none(other: OtherNode):
    async with asking(other) as peers:
        await eventually(lambda: bool(peers.views(0)))
        other.answer = b"\xff\xff\xff"
        await eventually(lambda: not peers.views(0))
        other.answer = KNOWN
        await eventually(lambda: bool(peers.views(0)))


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED])
async def test_a_node_that_refuses_this_one_is_asked_once_a_connection(
    other: OtherNode, monkeypatch: pytest.MonkeyPatch, code: grpc.StatusCode
):
    asleep: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        asleep.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", note)
    other.answer = code
    async with asking(other):
        await eventually(lambda: other.questions >= 1 and rpc_peers._CONNECTION_SECONDS in asleep)
        assert other.questions == 1


async def test_a_node_that_does_not_answer_is_asked_again_soon(other: OtherNode):
    other.answer = grpc.StatusCode.UNAVAILABLE
    async with asking(other) as peers:
        await eventually(lambda: other.questions >= 3)
        other.answer = KNOWN
        await eventually(lambda: bool(peers.views(0)))
