"""Sources of the pages: what a node has to show. Light: what makes pages of it is loaded with the first one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from broker.config import BrokerConfig
from broker.observe.audit_trail import AuditTrail
from broker.observe.cluster_view import ClusterView
from broker.observe.metrics import ClusterSnapshot
from broker.runtime.clock import Clock
from broker.settings import split_address

if TYPE_CHECKING:
    from broker.folder.broker import Broker


@dataclass(frozen=True, slots=True)
class ClusterSource:
    """A node's knowledge of its cluster, asked for with each page."""

    views: Callable[[], Sequence[ClusterView]]
    """Of each shard."""
    snapshot: Callable[[], ClusterSnapshot | None]
    """None: the node does not follow yet, or has several shards."""
    state: Callable[[], str]
    """The line of /readyz."""


class ShardPage(NamedTuple):
    """Answer of a shard to a request for a page."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class PageShard(Protocol):
    """The process of a shard, as its front asks it."""

    async def page(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, seconds: float
    ) -> ShardPage:
        """Return a page, or what came of a form.

        Raises Unavailable if there is no answer: OWNER_UNREACHABLE where the request was begun.
        """

    async def figures(self, path: str, headers: Mapping[str, str], seconds: float) -> ShardPage:
        """Return figures, for which no page is waited for. Raises Unavailable if there is no answer."""


class HttpAnswer(Protocol):
    """Answer to a call over HTTP."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> dict[str, str]: ...
    @property
    def body(self) -> bytes: ...


class Calls(Protocol):
    """The calls that can be made over HTTP."""

    async def call(self, name: str, body: bytes, authorization: str) -> HttpAnswer:
        """Make a call; `body` is its request in JSON."""

    async def refusal(self, status: int, reason: str, detail: str) -> HttpAnswer:
        """Return the answer to a request that does not become a call."""

    async def description(self) -> bytes:
        """Return the OpenAPI document of all calls."""

    async def close(self) -> None:
        """End, after the last call."""


@dataclass(frozen=True, slots=True)
class ShardSource:
    """Shards behind a front."""

    count: int
    find: Callable[[int], PageShard]
    """Returns the process that has a shard's pages; raises Unavailable where there is none. NOT_OWNER where it is
    another node's, with the URL of that one's pages as the fact `pages`, if they can be reached."""


@dataclass(frozen=True, slots=True)
class PageSource:
    """A node without a broker, a standby, has only the page of its cluster; a front, those of its shards."""

    config: BrokerConfig
    clock: Clock
    version: str
    audit: AuditTrail
    broker: Broker | None = None
    cluster: ClusterSource | None = None
    shards: ShardSource | None = None


def point_to_owner(views: Sequence[ClusterView]) -> str:
    """Return what a node without a broker says in the place of the pages that it does not have."""
    view = views[0]
    standby = f"Node {view.node} is a standby, and has only the page of its cluster"
    if not view.route.owner_address:
        return f"{standby}; nobody is known who owns the shard"
    owner, address = view.route.owner_node, view.route.owner_address
    return f"{standby}; those of the owner are on node {owner}, {split_address(address)[0]}"
