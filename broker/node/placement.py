"""Placement of shards on nodes: each node computes the same order, without asking anybody."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from broker.cluster.group_head import Shard


def rank_nodes(shard: Shard, nodes: Iterable[str]) -> tuple[str, ...]:
    """Return the nodes in the order in which they would take a shard over.

    By rendezvous hashing: a node that comes or goes changes the order of no others.
    """

    def weight(node: str) -> bytes:
        return hashlib.sha256(shard.cluster + shard.number.to_bytes(2, "little") + node.encode()).digest()

    return tuple(sorted(nodes, key=weight))
