"""The cluster that a broker is in, as one of its nodes tells of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from postdate._rpc import Rpc
from postdate._time import moment_or_none
from postdate_api.v1 import admin_pb2


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A broker of a cluster, and where it takes calls."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class ClusterShard:
    """A part of the topics: who owns it, and how far the node has come that tells of it.

    `owner` and `owner_address` are empty where nobody is known; an address without a host, as in ":7651", is on
    the host that was asked. Of a broker with several shards `owner` is the id of the shard. `applied_time` is when the
    owner wrote what was applied last, `base_time` when the newest complete copy in the object store was made; None:
    nothing yet.
    """

    number: int
    epoch: int
    owner: str
    owner_address: str
    standbys: tuple[str, ...]
    applied_lsn: int
    applied_time: datetime | None
    base_lsn: int
    base_time: datetime | None


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """A cluster. Without one `cluster_id` and `node` are empty, and the broker that was asked owns all shards."""

    cluster_id: str
    node: str
    nodes: tuple[ClusterNode, ...]
    shards: tuple[ClusterShard, ...]


async def get_cluster(rpc: Rpc) -> ClusterInfo:
    return cluster_info(await rpc.call(rpc.admin.GetCluster, admin_pb2.GetClusterRequest()))


async def move_shard(rpc: Rpc, to: str, shard: int) -> None:
    # A repeat meets a node that owns the shard by then, or asks once more for what was wanted.
    await rpc.call(rpc.admin.MoveShard, admin_pb2.MoveShardRequest(to=to, shard=shard))


def cluster_info(response: admin_pb2.GetClusterResponse) -> ClusterInfo:
    return ClusterInfo(
        cluster_id=response.cluster_id,
        node=response.node,
        nodes=tuple(ClusterNode(node.name, node.address) for node in response.nodes),
        shards=tuple(_shard(shard) for shard in response.shards),
    )


def _shard(shard: admin_pb2.ClusterShard) -> ClusterShard:
    return ClusterShard(
        number=shard.number,
        epoch=shard.epoch,
        owner=shard.owner,
        owner_address=shard.owner_address,
        standbys=tuple(shard.standbys),
        applied_lsn=shard.applied_lsn,
        applied_time=moment_or_none(shard.applied_time_ms),
        base_lsn=shard.base_lsn,
        base_time=moment_or_none(shard.base_time_ms),
    )
