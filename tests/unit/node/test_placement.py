"""The order in which nodes would take a shard over."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.cluster.group_head import Shard
from broker.node.placement import rank_nodes

NODES = [f"node-{number}" for number in range(5)]
CLUSTERS = st.binary(min_size=16, max_size=16)
LISTS = st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=6, unique=True)


def orders(cluster: bytes, shards: int, nodes: list[str]) -> list[tuple[str, ...]]:
    return [rank_nodes(Shard(cluster, number, shards), nodes) for number in range(shards)]


@pytest.mark.slow
@given(CLUSTERS, LISTS, st.integers(1, 12), st.randoms())
def test_every_node_computes_the_same_order_of_all_whatever_the_order_of_its_list(
    cluster: bytes, nodes: list[str], shards: int, random: object
) -> None:
    shuffled = sorted(nodes, key=lambda node: hash((node, repr(random))))
    assert orders(cluster, shards, nodes) == orders(cluster, shards, shuffled)
    assert all(sorted(order) == sorted(nodes) for order in orders(cluster, shards, nodes))


@given(CLUSTERS, LISTS, st.integers(1, 12))
def test_shards_that_nobody_has_owned_are_spread_as_evenly_as_can_be(
    cluster: bytes, nodes: list[str], shards: int
) -> None:
    firsts = Counter(order[0] for order in orders(cluster, shards, nodes))
    counts = [firsts[node] for node in nodes]
    assert sum(counts) == shards and max(counts) - min(counts) <= 1


@given(CLUSTERS, LISTS, st.integers(1, 12))
def test_a_node_that_is_gone_moves_its_own_shards_alone(
    cluster: bytes, nodes: list[str], shards: int
) -> None:
    """Nodes that are away stay in the list, and the next in the order takes over."""
    gone = nodes[0]
    for order in orders(cluster, shards, nodes):
        left = [node for node in order if node != gone]
        assert not left or (order[0] == gone) == (left[0] != order[0])


def test_a_node_that_leaves_the_list_changes_the_order_of_no_others_behind_the_first() -> None:
    cluster = bytes(range(16))
    for before, after in zip(orders(cluster, 50, NODES), orders(cluster, 50, NODES[1:]), strict=True):
        kept = [node for node in before if node not in (NODES[0], before[0], after[0])]
        assert [node for node in after if node in kept] == kept


@pytest.mark.slow
def test_the_shards_of_a_node_that_is_gone_go_to_all_others() -> None:
    heirs = Counter(order[1] for order in orders(bytes(range(16)), 400, NODES) if order[0] == NODES[0])
    assert sum(heirs.values()) == 80 and all(8 < heirs[node] < 32 for node in NODES[1:])
