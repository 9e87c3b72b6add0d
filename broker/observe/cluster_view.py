"""A cluster as one of its nodes knows it. Pure: calls answer with these values, pages show them, and what several nodes
tell is made into one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias


class OwnerRoute(NamedTuple):
    """The owner of a shard, as far as is known."""

    epoch: int = 0
    owner_node: str = ""
    owner_address: str = ""
    """Empty where nobody is known."""


class NodeProgress(NamedTuple):
    """Progress of a node with a shard, as it told itself."""

    node: str
    applied_lsn: int
    behind_records: int = 0
    behind_ms: int = 0


class ClusterView(NamedTuple):
    """A cluster and one of its shards, as one of its nodes knows them."""

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
    progress: tuple[NodeProgress, ...] = ()
    """Of the nodes that have told of themselves, this one among them once it follows."""
    pages: tuple[tuple[str, str], ...] = ()
    """Names of nodes that have told where they serve their pages, and the addresses on which they listen there."""

    def of_standby(self) -> ClusterView:
        """Return the view of a node that owns nothing now, whatever it owned before."""
        return (
            self._replace(route=OwnerRoute(self.route.epoch)) if self.route.owner_node == self.node else self
        )


ViewCluster: TypeAlias = Callable[[], ClusterView]


def merge_views(own: ClusterView, others: Iterable[ClusterView]) -> ClusterView:
    """Return a shard as a node knows it that has asked others: the highest epoch is right, and the newest base.

    Others do not know whether this node owns the shard; of the rest, where one is depends on this node's list. Where a
    node has its pages is for that one to say.
    """
    others = tuple(others)
    routes = [own.route, *(_route_by(other.route, own) for other in others)]
    route = max(routes, key=lambda route: (route.epoch, bool(route.owner_address)))
    base_lsn, base_time_ms = max((view.base_lsn, view.base_time_ms) for view in (own, *others))
    return add_progress(own, others)._replace(
        route=route,
        standbys=tuple(node for node in own.standbys if node != route.owner_node),
        base_lsn=base_lsn,
        base_time_ms=base_time_ms,
        pages=tuple(place for view in (own, *others) for place in view.pages if place[0] == view.node),
    )


def add_progress(own: ClusterView, others: Iterable[ClusterView]) -> ClusterView:
    """Return a view with how far other nodes have come, as they told."""
    told = {progress.node: progress for view in (*others, own) for progress in view.progress}
    return own._replace(progress=tuple(told[name] for name, _ in own.nodes if name in told))


def _route_by(route: OwnerRoute, own: ClusterView) -> OwnerRoute:
    """Return a route that another node told, as this node believes it."""
    address = dict(own.nodes).get(route.owner_node, "")
    if route.owner_node == own.node or not (route.owner_address and address):
        return OwnerRoute(route.epoch)
    return route._replace(owner_address=address)
