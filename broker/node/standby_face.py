"""Ports of a node that does not own its shard: health and metrics, and the owner behind its gRPC port."""

from __future__ import annotations

from broker.node.following import Following
from broker.node.member import Member
from broker.observe.logs import get_logger
from broker.observe.metrics import BrokerCollector, BrokerCounters, BrokerSnapshot
from broker.rpc.cluster import ClusterView, OwnerRoute
from broker.rpc.front import Front, FrontHost
from broker.server import broker_version
from broker.settings import split_address
from broker.web.server import HttpServer

log = get_logger(__name__)


class StandbyFace:
    """The ports of a standby."""

    def __init__(self, member: Member) -> None:
        self.following: Following | None = None  # while there is a folder to follow with
        self._member = member
        config = member.config
        self._front = Front(FrontHost(config, member.clock, BrokerCounters()), self._view)
        self._http = HttpServer(
            config.http_address,
            BrokerCollector(self._take_snapshot, version=broker_version()).render,
            self._not_ready_because,
            elsewhere=self._point_to_owner,
            ready_line=self._ready_line,
            connections_max=config.tuning.http_connections_max,
        )

    @property
    def http_address(self) -> str:
        return self._http.address

    async def start(self) -> None:
        """Open the ports. Raises Fenced or ConfigError if that cannot be."""
        self._http.listen()
        await self._http.start()
        await self._front.start()
        log.info("Standing by", node=self._member.name, grpc=self._front.address, http=self.http_address)

    async def stop(self) -> None:
        """Close the ports: an owner opens them anew."""
        await self._front.stop()
        await self._http.stop()

    def look_now(self) -> None:
        """Read security files without waiting for the next look."""
        self._front.look_now()

    def _not_ready_because(self) -> str | None:
        return "seeding" if self.following is None else self.following.not_ready_because

    def _ready_line(self) -> str:
        return "standby" if self.following is None else self.following.ready_line

    def _point_to_owner(self) -> str:
        route = self._view().route
        standby = f"Node {self._member.name} is a standby, and shows no pages"
        if not route.owner_address:
            return f"{standby}; nobody is known who owns the shard"
        return f"{standby}; those of the owner are on node {route.owner_node}, {split_address(route.owner_address)[0]}"

    def _view(self) -> ClusterView:
        if self.following is not None:
            return self.following.view()
        member = self._member
        nodes = tuple(member.nodes.items())
        return ClusterView(member.cluster.id, member.name, nodes, member.shard.number, OwnerRoute())

    def _take_snapshot(self) -> BrokerSnapshot:
        if self.following is None:
            return BrokerSnapshot(
                BrokerCounters(), (), (), topics_count=0, subscriptions_count=0, ready=False
            )
        return self.following.take_snapshot()
