"""The order in which nodes would take a shard over."""

from __future__ import annotations

from collections import Counter

from broker.cluster.group_head import Shard
from broker.node.placement import rank_nodes

NODES = [f"node-{number}" for number in range(5)]


def shard(number: int) -> Shard:
    return Shard(bytes(range(16)), number, 1000)


def test_every_node_computes_the_same_order_whatever_the_order_of_its_list() -> None:
    for number in range(20):
        assert rank_nodes(shard(number), NODES) == rank_nodes(shard(number), reversed(NODES))
        assert sorted(rank_nodes(shard(number), NODES)) == NODES


def test_a_node_that_goes_changes_the_order_of_no_others() -> None:
    for number in range(50):
        ranks = rank_nodes(shard(number), NODES)
        assert rank_nodes(shard(number), NODES[1:]) == tuple(node for node in ranks if node != NODES[0])


def test_shards_are_spread() -> None:
    firsts = Counter(rank_nodes(shard(number), NODES)[0] for number in range(1000))
    assert all(150 < firsts[node] < 250 for node in NODES)
