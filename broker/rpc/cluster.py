"""Facts that a node tells of its cluster: who owns which shard, and how far the node itself has come."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from broker.folder.broker import Broker
from postdate_api.v1 import admin_pb2

FOLLOWED_WITHIN_MS = 5_000
"""A standby that is further behind is not ready, and is handed no shard."""


class OwnerRoute(NamedTuple):
    """The owner of a shard, as far as is known."""

    epoch: int = 0
    owner_node: str = ""
    owner_address: str = ""
    """Empty where nobody is known."""


class ClusterView(NamedTuple):
    """A cluster of one shard, as one of its nodes knows it."""

    cluster_id: str
    node: str
    nodes: tuple[tuple[str, str], ...]
    """Names and addresses."""
    shard: int
    route: OwnerRoute
    standbys: tuple[str, ...] = ()
    """Nodes that hold the shard and do not own it, in the order in which they would take it over."""
    applied_lsn: int = 0
    applied_time_ms: int = 0
    """Owner's clock when it wrote the last group that was applied here; 0 before the first."""
    base_lsn: int = 0
    base_time_ms: int = 0


ViewCluster: TypeAlias = Callable[[], ClusterView]


def describe_cluster(view: ClusterView) -> admin_pb2.GetClusterResponse:
    """Return the answer to GetCluster."""
    shard = admin_pb2.ClusterShard(
        number=view.shard,
        epoch=view.route.epoch,
        owner=view.route.owner_node,
        owner_address=view.route.owner_address,
        standbys=view.standbys,
        applied_lsn=view.applied_lsn,
        applied_time_ms=view.applied_time_ms,
        base_lsn=view.base_lsn,
        base_time_ms=view.base_time_ms,
    )
    nodes = [admin_pb2.ClusterNode(name=name, address=address) for name, address in view.nodes]
    return admin_pb2.GetClusterResponse(
        cluster_id=view.cluster_id, shards=[shard], nodes=nodes, node=view.node
    )


def describe_alone(broker: Broker) -> admin_pb2.GetClusterResponse:
    """Return the answer of a broker that is in no cluster: it owns all there is."""
    shard = admin_pb2.ClusterShard(
        applied_lsn=broker.journal.durable_lsn, applied_time_ms=broker.clock.now_ms()
    )
    return admin_pb2.GetClusterResponse(shards=[shard])
