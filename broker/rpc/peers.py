"""Other nodes of a cluster, as this one hears of them: each is asked for what it knows by itself.

They are asked as this node, without a token. Where access control demands one, what they know is not known here, and
calls go where this node's own shards say. A node that refuses this one is asked seldom: it counts and logs each
refusal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from broker.config import BrokerConfig
from broker.observe.cluster_view import ClusterView, add_progress
from broker.observe.logs import get_logger
from broker.rpc.call_metadata import DIRECT
from broker.rpc.cluster import read_views
from broker.rpc.tls import channel_to_node
from broker.runtime.supervise import Spawn
from broker.settings import ConfigError
from postdate_api.v1 import admin_pb2, admin_pb2_grpc

log = get_logger(__name__)

_LOOK_SECONDS = 1.0
_HURRIED_SECONDS = 0.2
"""Between questions while an owner is not known."""
_ANSWER_SECONDS = 2.0
_CONNECTION_SECONDS = 600.0
"""Time after which a node is asked over a new connection, with the certificates of that day; and after which one is
asked again that has refused this node."""
_PAUSE_SECONDS = 60.0
"""Time after which a node is asked again that could not be asked, or whose answer is none."""
_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_ANSWER_BYTES_MAX = 1 << 20
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", _ANSWER_BYTES_MAX),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class Peers:
    """See the module's description."""

    def __init__(
        self,
        config: BrokerConfig,
        cluster_id: str,
        others: Mapping[str, str],
        hurries: Callable[[], bool] = lambda: False,
        note_told: Callable[[], None] = lambda: None,
    ) -> None:
        """`others`: addresses by name. `hurries` tells whether an answer is waited for, `note_told` is told of each."""
        self._config = config
        self._cluster_id = cluster_id
        self._others = dict(others)
        self._hurries = hurries
        self._note_told = note_told
        self._views: dict[str, dict[int, ClusterView]] = {}  # by node and shard, of those that answer

    def start(self, spawn_lasting: Spawn) -> None:
        """Begin to ask; `spawn_lasting` runs what asks."""
        for node, address in self._others.items():
            spawn_lasting(f"questions to node {node}", self._ask_again(node, address))

    def views(self, shard: int) -> list[ClusterView]:
        """Return what the nodes that answer know of a shard."""
        return [views[shard] for views in self._views.values() if shard in views]

    def complete(self, view: ClusterView) -> ClusterView:
        """Return what this node knows of a shard, with how far others have come."""
        return add_progress(view, self.views(view.shard))

    async def _ask_again(self, node: str, address: str) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with channel_to_node(self._config, address)(_OPTIONS) as channel:
                    end = loop.time() + _CONNECTION_SECONDS
                    while loop.time() < end:
                        pause_seconds = await self._ask(node, channel)
                        await asyncio.sleep(pause_seconds)
            except Exception as error:  # whatever a node answers, it is asked again
                self._views.pop(node, None)
                trace = None if isinstance(error, ConfigError) else error
                log.warning(
                    "Another node of the cluster cannot be queried", node=node, error=error, exc_info=trace
                )
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _ask(self, node: str, channel: grpc.aio.Channel) -> float:
        """Take what a node answers; returns the seconds until the next question."""
        stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
        try:
            answer = await stub.GetCluster(
                admin_pb2.GetClusterRequest(), timeout=_ANSWER_SECONDS, metadata=((DIRECT, "1"),)
            )
        except grpc.aio.AioRpcError as error:
            self._views.pop(node, None)
            return _CONNECTION_SECONDS if error.code() in _REFUSALS else self._look_seconds()
        if answer is None:  # what gRPC yields for bytes that it cannot parse
            raise DecodeError("The answer is no GetClusterResponse")
        views = read_views(answer)
        if (answer.cluster_id, answer.node) != (self._cluster_id, node):
            views = []  # somebody else has that address now
        self._views[node] = {view.shard: view for view in views}
        self._note_told()
        return self._look_seconds()

    def _look_seconds(self) -> float:
        return _HURRIED_SECONDS if self._hurries() else _LOOK_SECONDS
