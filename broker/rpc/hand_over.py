"""Moving a shard to a node that follows it: whether that one may have it now, and the start of the hand-over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from broker.errors import NotFound, Refused
from broker.folder.broker import Broker
from broker.observe.cluster_view import ViewCluster
from broker.rpc.audit_trail import CONTEXT
from broker.rpc.call_metadata import DIRECT
from broker.rpc.cluster import FOLLOWED_WITHIN_MS
from broker.rpc.tls import channel_to_node
from broker.settings import ConfigError
from postdate_api.v1 import admin_pb2, admin_pb2_grpc

_ANSWER_SECONDS = 2.0


class HandOver:
    """The moves of a shard that this broker owns."""

    def __init__(self, broker: Broker, view: ViewCluster, resign_to: Callable[[str], None]) -> None:
        self._broker = broker
        self._view = view
        self._resign_to = resign_to

    async def move(self, to: str, shard: int = 0) -> None:
        """Begin to hand the shard over, unless the node owns it already. Raises NotFound, Refused or Unavailable."""
        broker, view = self._broker, self._view()
        broker.check_serving()
        if shard != view.shard:
            raise NotFound(f"The cluster has no shard {shard}", reason="SHARD_NOT_FOUND")
        address = dict(view.nodes).get(to)
        if address is None:
            names = ", ".join(name for name, _ in view.nodes)
            raise NotFound(f"The cluster has no node {to!r}, only {names}", reason="NODE_NOT_FOUND")
        if to == view.node:
            return
        self._check_follows(to, await self._ask(to, address))
        broker.check_serving()  # nobody else has begun a hand-over meanwhile
        broker.ownership.check()
        self._resign_to(to)

    async def _ask(self, node: str, address: str) -> admin_pb2.GetClusterResponse:
        """Return what a node itself knows of the cluster, asked with the token of the caller.

        Marked as direct: without that a node with several shards tells what others know as well, its epochs among it.
        """
        try:
            async with channel_to_node(self._broker.config, address)(()) as channel:
                stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
                answer: admin_pb2.GetClusterResponse = await stub.GetCluster(
                    admin_pb2.GetClusterRequest(),
                    timeout=_ANSWER_SECONDS,
                    metadata=(*_token(), (DIRECT, "1")),
                )
                return answer
        except grpc.aio.AioRpcError as error:
            why = error.details() or error.code().name
        except ConfigError as error:
            why = str(error)
        raise _not_following(node, f"it does not answer at {address} ({why})")

    def _check_follows(self, node: str, answer: admin_pb2.GetClusterResponse) -> None:
        """Raise Refused unless a node that has answered so would take over soon."""
        view = self._view()
        if (answer.cluster_id, answer.node) != (view.cluster_id, node):
            raise _not_following(
                node, f"node {answer.node!r} of cluster {answer.cluster_id!r} answers at its address"
            )
        shard = next((each for each in answer.shards if each.number == view.shard), admin_pb2.ClusterShard())
        if shard.epoch != view.route.epoch:
            raise _not_following(
                node, f"it has read up to epoch {shard.epoch}, and the shard is at epoch {view.route.epoch}"
            )
        # Both times are of this clock: the owner stores at least a heartbeat every quarter of a lease.
        behind_ms = self._broker.clock.now_ms() - shard.applied_time_ms
        if not shard.applied_time_ms or behind_ms > FOLLOWED_WITHIN_MS:
            records = max(view.applied_lsn - shard.applied_lsn, 0)
            raise _not_following(
                node, f"it is {records} records and more than {FOLLOWED_WITHIN_MS} ms behind"
            )


def _token() -> tuple[tuple[str, Any], ...]:
    context = CONTEXT.get()
    metadata: Any = (context.invocation_metadata() if context is not None else None) or ()
    return tuple((key, value) for key, value in metadata if key == "authorization")


def _not_following(node: str, why: str) -> Refused:
    return Refused(
        f"Node {node!r} cannot take the shard over now: {why}", reason="NODE_NOT_FOLLOWING", node=node
    )
