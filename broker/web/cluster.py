"""The page of the cluster, as this node knows it: the same on the owner and on standbys. Nodes ask each other every
second, and none is asked for a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from broker.observe.cluster_view import ClusterView, NodeProgress
from broker.observe.metrics import ClusterSnapshot
from broker.web.refusals import PageRefusal
from broker.web.site import Visit


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node."""

    name: str
    address: str
    is_here: bool
    role: str
    """Empty: not known here."""
    turn: int
    """Place in the order of take-overs, from 1; 0: it owns the shard, or who does is not known."""
    progress: NodeProgress | None
    """None: it has not told."""


@dataclass(frozen=True, slots=True)
class ShardRow:
    """A shard of several."""

    view: ClusterView
    owner: NodeProgress | None
    standbys: tuple[tuple[str, NodeProgress | None], ...]
    """In the order of take-overs, with what each has told."""


async def show_cluster(visit: Visit) -> web.Response:
    """GET /cluster"""
    source = visit.site.cluster
    if source is None:
        raise PageRefusal("This broker is in no cluster.", 404)
    views, snapshot = source.views(), source.snapshot()
    if len(views) > 1:
        return await _show_shards(visit, views, source.state())
    view = views[0]
    return await visit.page(
        "cluster.html",
        view=view,
        owner=view.route.owner_node,
        epoch=view.route.epoch,
        rows=node_rows(view, snapshot),
        snapshot=snapshot,
        state=source.state(),
    )


async def _show_shards(visit: Visit, views: Sequence[ClusterView], state: str) -> web.Response:
    nodes = views[0].nodes
    owned = {name: [view.shard for view in views if view.route.owner_node == name] for name, _ in nodes}
    return await visit.page(
        "cluster_shards.html",
        view=views[0],
        rows=[shard_row(view) for view in views],
        owned=owned,
        owned_count=sum(bool(view.route.owner_node) for view in views),
        state=state,
    )


def shard_row(view: ClusterView) -> ShardRow:
    """Return a shard with what each of its nodes has told."""
    told = {progress.node: progress for progress in view.progress}
    standbys = tuple((name, told.get(name)) for name in view.standbys)
    return ShardRow(view, told.get(view.route.owner_node), standbys)


def node_rows(view: ClusterView, snapshot: ClusterSnapshot | None) -> list[NodeRow]:
    """Return the nodes of a cluster with what the node of this view knows of each."""
    is_owner = snapshot is not None and snapshot.is_owner
    is_known = bool(view.route.owner_node)
    turns = {name: turn for turn, name in enumerate(view.standbys, 1)} if is_owner or is_known else {}
    told = {progress.node: progress for progress in view.progress}
    rows = []
    for name, address in view.nodes:
        is_here = name == view.node
        if name == view.route.owner_node:
            role = "owner"
        elif is_here:
            role = "owner without a lease" if is_owner else "standby" if snapshot is not None else ""
        else:
            role = "standby" if name in turns else ""
        rows.append(NodeRow(name, address, is_here, role, turns.get(name, 0), told.get(name)))
    return rows
