"""A member of a cluster: what one node knows of itself, of the others and of the store, the same in each role."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace

from broker.cluster.base_store import ATTEMPT, BaseStore
from broker.cluster.creation import Cluster
from broker.cluster.group_head import Shard
from broker.cluster.lease import LeaseClock, OwnerLease
from broker.cluster.object_group_log import ObjectGroupLog
from broker.cluster.object_store import ObjectStore
from broker.cluster.read_ahead import AheadLimits
from broker.cluster.shard_store import ShardStore
from broker.cluster.stores import costs_money, open_store
from broker.config import BrokerConfig, parse_nodes
from broker.folder.shard_folders import MEMBER_FOLDERS
from broker.node.placement import rank_nodes
from broker.node.rest_after_loss import Rest
from broker.node.shard_bases import ShardBases
from broker.runtime.vfs import Vfs
from broker.settings import ConfigError
from broker.topic_shards import TopicShard


@dataclass(frozen=True, slots=True)
class Member:
    """See the module's description."""

    config: BrokerConfig  # its data_dir is the shard's
    cluster: Cluster
    shard: Shard
    name: str
    nodes: dict[str, str]  # addresses by name
    ranks: tuple[str, ...]  # the nodes, in the order in which they would take over
    store: ObjectStore
    bases: ShardBases
    rest: Rest
    clock: LeaseClock
    vfs: Vfs
    group_gap_ms: int

    @property
    def rank(self) -> int:
        return self.ranks.index(self.name)

    @property
    def others(self) -> tuple[str, ...]:
        """The other nodes, the first in rank first."""
        return tuple(node for node in self.ranks if node != self.name)

    def make_log(self, lease: OwnerLease) -> ObjectGroupLog:
        """Return the shard's log, which is yet to be opened."""
        tuning = self.config.tuning
        ahead = AheadLimits(tuning.follow_ahead_groups, tuning.follow_ahead_bytes)
        return ObjectGroupLog(self.store, self.shard, self.name, lease, ahead=ahead)


def node_name(config: BrokerConfig) -> str:
    """Return the name of this node; raises ConfigError if the cluster has none of it."""
    name, nodes = config.node or socket.gethostname(), parse_nodes(config.cluster_nodes)
    if name not in nodes:
        raise ConfigError(
            f"This node is {name!r}, but cluster_nodes contains only {', '.join(nodes)}: set node"
        )
    return name


def member_config(config: BrokerConfig, cluster: Cluster, number: int) -> BrokerConfig:
    """Return the settings of the process of a shard, from those of its node."""
    return replace(
        config,
        data_dir=f"{config.data_dir.rstrip('/')}/{MEMBER_FOLDERS}/{number}",
        topic_shard=TopicShard(number, cluster.shards),
    )


def make_member(
    config: BrokerConfig, cluster: Cluster, number: int, store: ObjectStore, clock: LeaseClock, vfs: Vfs
) -> Member:
    """Return this node's member for a shard. Raises ConfigError."""
    name, nodes = node_name(config), parse_nodes(config.cluster_nodes)
    shard, own_config = cluster.shard(number), member_config(config, cluster, number)
    bases = BaseStore(ShardStore(open_store(config.cluster_store, ATTEMPT), number), clock)
    return Member(
        config=own_config,
        cluster=cluster,
        shard=shard,
        name=name,
        nodes=nodes,
        ranks=rank_nodes(shard, nodes),
        store=store,
        bases=ShardBases(bases, shard, vfs, clock, name, interval_ms=config.tuning.base_interval_ms),
        rest=Rest(vfs, f"{own_config.data_dir}.rest", clock),
        clock=clock,
        vfs=vfs,
        group_gap_ms=config.tuning.journal_group_gap_ms if costs_money(config.cluster_store) else 0,
    )
