"""Placement of shards on nodes: each node computes the same orders, without asking anybody.

The order of a shard's nodes is that in which they would take it over, by rendezvous hashing: a node that comes or goes
changes the order of no others. The first of them takes a shard that nobody has owned yet. So that such shards lie on
all nodes alike, however few there are, the first one is chosen among the nodes that are first for the fewest so far.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from broker.cluster.group_head import Shard


def rank_nodes(shard: Shard, nodes: Collection[str]) -> tuple[str, ...]:
    """Return the nodes in the order in which they would take a shard over."""
    firsts = dict.fromkeys(nodes, 0)
    order: list[str] = []
    for number in range(shard.number + 1):
        order = sorted(nodes, key=lambda node: _weigh(shard.cluster, number, node))
        fewest = min(firsts.values())
        first = next(node for node in order if firsts[node] == fewest)
        firsts[first] += 1
        order.remove(first)
        order.insert(0, first)
    return tuple(order)


def _weigh(cluster: bytes, number: int, node: str) -> bytes:
    return hashlib.sha256(cluster + number.to_bytes(2, "little") + node.encode()).digest()
