"""Facts that a node tells of its cluster: who owns which shard, and how far the nodes have come that hold it."""

from __future__ import annotations

from collections.abc import Sequence

from broker.folder.broker import Broker
from broker.observe.cluster_view import ClusterView, NodeProgress, OwnerRoute
from broker.topic_shards import port_address
from postdate_api.v1 import admin_pb2

FOLLOWED_WITHIN_MS = 5_000
"""A standby that is further behind is not ready, and is handed no shard."""


def describe_cluster(views: Sequence[ClusterView]) -> admin_pb2.GetClusterResponse:
    """Return the answer to GetCluster, from a node's views of its shards."""
    pages = dict(views[0].pages)
    nodes = [
        admin_pb2.ClusterNode(name=name, address=address, pages_address=pages.get(name, ""))
        for name, address in views[0].nodes
    ]
    return admin_pb2.GetClusterResponse(
        cluster_id=views[0].cluster_id,
        shards=[_describe_shard(view) for view in views],
        nodes=nodes,
        node=views[0].node,
    )


def _describe_shard(view: ClusterView) -> admin_pb2.ClusterShard:
    return admin_pb2.ClusterShard(
        number=view.shard,
        epoch=view.route.epoch,
        owner=view.route.owner_node,
        owner_address=view.route.owner_address,
        standbys=view.standbys,
        applied_lsn=view.applied_lsn,
        applied_time_ms=view.applied_time_ms,
        base_lsn=view.base_lsn,
        base_time_ms=view.base_time_ms,
        progress=[admin_pb2.ShardProgress(**progress._asdict()) for progress in view.progress],
    )


def encode_view(view: ClusterView) -> bytes:
    """Return what the process of a shard tells its supervisor."""
    return bytes(describe_cluster([view]).SerializeToString())


def decode_view(told: bytes) -> ClusterView:
    """Return what the process of a shard has told."""
    (view,) = read_views(admin_pb2.GetClusterResponse.FromString(told))
    return view


def read_views(answer: admin_pb2.GetClusterResponse) -> list[ClusterView]:
    """Return the views of a node that has answered so."""
    nodes = tuple((node.name, node.address) for node in answer.nodes)
    pages = tuple((node.name, node.pages_address) for node in answer.nodes if node.pages_address)
    return [
        ClusterView(
            cluster_id=answer.cluster_id,
            node=answer.node,
            nodes=nodes,
            shard=shard.number,
            route=OwnerRoute(shard.epoch, shard.owner, shard.owner_address),
            standbys=tuple(shard.standbys),
            applied_lsn=shard.applied_lsn,
            applied_time_ms=shard.applied_time_ms,
            base_lsn=shard.base_lsn,
            base_time_ms=shard.base_time_ms,
            progress=tuple(
                NodeProgress(each.node, each.applied_lsn, each.behind_records, each.behind_ms)
                for each in shard.progress
            ),
            pages=pages,
        )
        for shard in answer.shards
    ]


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
