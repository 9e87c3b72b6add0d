"""A node of which a task fails ends with status 1, and is started again by whoever supervises it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.cluster.creation import create_cluster
from broker.cluster.object_group_log import LOG_ATTEMPT
from broker.cluster.stores import open_store
from broker.node.node import Node
from broker.rpc.front import Front
from broker.rpc.peers import Peers
from broker.runtime.notify import ServiceNotifier
from tests.configs import broker_config


@pytest.mark.parametrize("task", ["route of the front", "service watchdog", "questions to node b"])
async def test_a_node_ends_loudly_where_a_task_of_its_own_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, task: str
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    async def stand_by(node: Node, *_: object) -> None:
        await node._stop.wait()

    monkeypatch.setattr(Node, "_follow", stand_by)
    owner, method = {
        "route of the front": (Front, "_watch_route"),
        "service watchdog": (ServiceNotifier, "keep_alive"),
        "questions to node b": (Peers, "_ask_again"),
    }[task]
    monkeypatch.setattr(owner, method, fail)
    store = tmp_path / "store"
    store.mkdir()
    config = broker_config(
        data_dir=str(tmp_path / "data"),
        cluster_store=store.as_uri(),
        cluster_nodes="a=127.0.0.1:1,b=127.0.0.1:2",
        node="a",
        grpc_address="127.0.0.1:0",
        http_address="127.0.0.1:0",
        disk_reserve_bytes=0,
    )
    cluster = await create_cluster(open_store(config.cluster_store, LOG_ATTEMPT), 1, 60_000)
    node = Node(config, cluster, notifier=ServiceNotifier({}))
    async with asyncio.timeout(20):
        assert await node.run() == 1
