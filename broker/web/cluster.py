"""The page of the cluster, as this node knows it: the same on the owner and on standbys. No other node is asked."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from broker.observe.cluster_view import ClusterView
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


async def show_cluster(visit: Visit) -> web.Response:
    """GET /cluster"""
    source = visit.site.cluster
    if source is None:
        raise PageRefusal("This broker is in no cluster.", 404)
    view, snapshot = source.view(), source.snapshot()
    return await visit.page(
        "cluster.html",
        view=view,
        owner=view.route.owner_node,
        epoch=view.route.epoch,
        rows=node_rows(view, snapshot),
        snapshot=snapshot,
        state=source.state(),
    )


def node_rows(view: ClusterView, snapshot: ClusterSnapshot | None) -> list[NodeRow]:
    """Return the nodes of a cluster with what the node of this view knows of each."""
    is_owner = snapshot is not None and snapshot.is_owner
    is_known = bool(view.route.owner_node)
    turns = {name: turn for turn, name in enumerate(view.standbys, 1)} if is_owner or is_known else {}
    rows = []
    for name, address in view.nodes:
        is_here = name == view.node
        if name == view.route.owner_node:
            role = "owner"
        elif is_here:
            role = "owner without a lease" if is_owner else "standby" if snapshot is not None else ""
        else:
            role = "standby" if name in turns else ""
        rows.append(NodeRow(name, address, is_here, role, turns.get(name, 0)))
    return rows
