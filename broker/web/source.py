"""Sources of the pages: what a node has to show. Light: what makes pages of it is loaded with the first one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker.config import BrokerConfig
from broker.observe.audit import AuditTrail
from broker.observe.cluster_view import ClusterView, ViewCluster
from broker.observe.metrics import ClusterSnapshot
from broker.runtime.clock import Clock
from broker.settings import split_address

if TYPE_CHECKING:
    from broker.folder.broker import Broker


@dataclass(frozen=True, slots=True)
class ClusterSource:
    """A node's knowledge of its cluster, asked for with each page."""

    view: ViewCluster
    snapshot: Callable[[], ClusterSnapshot | None]
    """None: the node does not follow yet."""
    state: Callable[[], str]
    """The line of /readyz."""


@dataclass(frozen=True, slots=True)
class PageSource:
    """A node without a broker, a standby, has only the page of its cluster."""

    config: BrokerConfig
    clock: Clock
    version: str
    audit: AuditTrail
    broker: Broker | None = None
    cluster: ClusterSource | None = None


def point_to_owner(view: ClusterView) -> str:
    """Return what a standby says in the place of the pages that it does not have."""
    standby = f"Node {view.node} is a standby, and has only the page of its cluster"
    if not view.route.owner_address:
        return f"{standby}; nobody is known who owns the shard"
    owner, address = view.route.owner_node, view.route.owner_address
    return f"{standby}; those of the owner are on node {owner}, {split_address(address)[0]}"
