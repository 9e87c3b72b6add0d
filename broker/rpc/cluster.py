"""Facts that a node tells of its cluster: who owns which shard, and how far the node itself has come."""

from __future__ import annotations

from broker.folder.broker import Broker
from broker.observe.cluster_view import ClusterView
from broker.topic_shards import port_address
from postdate_api.v1 import admin_pb2

FOLLOWED_WITHIN_MS = 5_000
"""A standby that is further behind is not ready, and is handed no shard."""


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


def describe_alone(broker: Broker, shard_port: int) -> admin_pb2.GetClusterResponse:
    """Return the answer of a broker that is in no cluster: it owns all there is, or one of several shards.

    `shard_port`: that of a shard, where clients reach it; 0: none.
    """
    held = broker.config.topic_shard
    shard = admin_pb2.ClusterShard(
        number=held.number, applied_lsn=broker.journal.durable_lsn, applied_time_ms=broker.clock.now_ms()
    )
    if held.shards == 1:
        return admin_pb2.GetClusterResponse(shards=[shard])
    shard.owner = broker.broker_id
    shard.owner_address = port_address(shard_port) if shard_port else ""
    return admin_pb2.GetClusterResponse(shards=[shard], node=broker.broker_id)
