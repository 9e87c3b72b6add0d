"""Sources of the pages: what a node has to show. Light: what makes pages of it is loaded with the first one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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

    async def page(self, path: str, headers: Mapping[str, str], seconds: float) -> ShardPage:
        """Return a page. Raises Unavailable if there is no answer."""

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

    async def call(
        self, name: str, body: bytes, authorization: str = "", traceparent: str = ""
    ) -> HttpAnswer:
        """Make a call; `body` is its request in JSON, and the others are the headers of these names."""

    async def refusal(self, status: int, reason: str, detail: str) -> HttpAnswer:
        """Return the answer to a request that does not become a call."""

    async def description(self) -> bytes:
        """Return the OpenAPI document of all calls."""

    async def close(self) -> None:
        """End, after the last call."""


class PortAnswer(Protocol):
    """Answer to a call that a page made."""

    @property
    def status(self) -> int:
        """HTTP's."""

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the answer, or what a refusal says."""


class LimitRow(Protocol):
    """One bound of a limit of the access file, as a page shows it."""

    @property
    def limit(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def allowed(self) -> int: ...
    @property
    def used(self) -> int | None:
        """Count against it now; None for rates, and where it is not known."""

    @property
    def is_of_each(self) -> bool:
        """True if each principal has it for itself."""

    @property
    def refusals(self) -> int: ...


class PagePort(Protocol):
    """The gRPC port of this process, as pages use it. Calls have the names that they have over gRPC."""

    @property
    def has_rules(self) -> bool:
        """Return whether there are access rules; without them everybody is alike."""

    def identify(self, authorization: str, address: str) -> str:
        """Return whose token it is that somebody shows. Raises Unauthenticated."""

    def allows(self, principal: str, name: str, topic: str = "", subscription: str = "") -> bool:
        """Return whether somebody may make a call; without a topic, whether of any."""

    def check(self, principal: str, address: str, name: str, topic: str = "", subscription: str = "") -> None:
        """Check that somebody may make a call: PermissionDenied."""

    def sees_all(self, principal: str) -> bool:
        """Return whether somebody may see what is about the whole broker."""

    def limits_of(self, topic: str, principal: str) -> Sequence[LimitRow]:
        """Return the limits of a topic that somebody may see."""

    async def call(
        self, name: str, fields: Mapping[str, Any], authorization: str, address: str
    ) -> PortAnswer:
        """Make a call for somebody; `fields` are its request. Raises PermissionDenied."""


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
    calls: PagePort
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
