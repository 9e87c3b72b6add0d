"""Ports of a node that does not own its shard: health, metrics and the page of its cluster, and the owner
behind its gRPC port."""

from __future__ import annotations

from collections.abc import Callable

from broker.node.following import Following
from broker.node.member import Member
from broker.observe.audit_trail import AuditTrail
from broker.observe.cluster_view import ClusterView, OwnerRoute
from broker.observe.logs import get_logger
from broker.observe.metrics import BrokerCollector, BrokerCounters, BrokerSnapshot, ClusterSnapshot
from broker.rpc.cluster import encode_view
from broker.rpc.front import Front, FrontHost
from broker.rpc.own_calls import OwnCalls
from broker.runtime.supervise import Spawn
from broker.server import broker_version
from broker.settings import UNIX
from broker.web.server import HttpServer
from broker.web.source import ClusterSource, PageSource

log = get_logger(__name__)


class StandbyPorts:
    """See the module's description."""

    def __init__(self, member: Member, complete: Callable[[ClusterView], ClusterView]) -> None:
        """`complete` adds to a view what other nodes have told."""
        self._complete = complete
        self.following: Following | None = None  # while there is a folder to follow with
        self.state: str = ""  # else what is waited for
        self._member = member
        config = member.config
        self._audit = AuditTrail(member.clock)  # of the pages
        self._front = Front(FrontHost(config, member.clock, BrokerCounters()), self._view)
        version = broker_version()
        cluster = ClusterSource(lambda: [self._view()], self._take_cluster_snapshot, self._describe_state)
        self._http = HttpServer(
            UNIX + config.http_socket if config.http_socket else config.http_address,
            BrokerCollector(self._take_snapshot, version=version).render,
            self._not_ready_because,
            shard_view=lambda: encode_view(self._view()),
            pages=PageSource(
                config, member.clock, version, self._audit, self._front.page_calls(), cluster=cluster
            ),
            calls=None if config.http_socket else OwnCalls(lambda: self._front.address),
            ready_line=self._ready_line,
            connections_max=config.tuning.http_connections_max,
        )

    @property
    def http_address(self) -> str:
        return self._http.address

    async def start(self, spawn_lasting: Spawn) -> None:
        """Open the ports. `spawn_lasting` runs what lasts as long. Raises Fenced or ConfigError if that cannot be."""
        self._http.listen()
        await self._front.start(spawn_lasting)
        await self._http.start()
        log.info("Standing by", node=self._member.name, grpc=self._front.address, http=self.http_address)

    async def stop(self) -> None:
        """Close the ports: an owner opens them anew."""
        await self._front.stop()
        await self._http.stop()
        self._audit.flush()

    def look_now(self) -> None:
        """Read security files without waiting for the next look."""
        self._front.look_now()

    def _not_ready_because(self) -> str | None:
        return self.state if self.following is None else self.following.not_ready_because

    def _ready_line(self) -> str:
        return "standby" if self.following is None else self.following.ready_line

    def _describe_state(self) -> str:
        return self._not_ready_because() or self._ready_line()

    def _view(self) -> ClusterView:
        if self.following is not None:
            return self._complete(self.following.view().of_standby())
        member = self._member
        nodes = tuple(member.nodes.items())
        own = ClusterView(member.cluster.id, member.name, nodes, member.shard.number, OwnerRoute())
        return self._complete(own)

    def _take_cluster_snapshot(self) -> ClusterSnapshot | None:
        return None if self.following is None else self.following.cluster_snapshot()

    def _take_snapshot(self) -> BrokerSnapshot:
        if self.following is None:
            return BrokerSnapshot(
                BrokerCounters(), (), (), topics_count=0, subscriptions_count=0, ready=False
            )
        return self.following.take_snapshot()
