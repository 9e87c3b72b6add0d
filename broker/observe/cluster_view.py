"""A cluster as one of its nodes knows it. Pure values: calls answer with them, and pages show them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias


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

    def of_standby(self) -> ClusterView:
        """Return the view of a node that owns nothing now, whatever it owned before."""
        return (
            self._replace(route=OwnerRoute(self.route.epoch)) if self.route.owner_node == self.node else self
        )


ViewCluster: TypeAlias = Callable[[], ClusterView]
