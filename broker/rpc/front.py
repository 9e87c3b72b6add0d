"""The port of a node that does not own the shard: it passes calls on to the owner.

Whoever has no SDK needs one address, of any node. GetCluster and health are answered here; every other method of the
API goes to the owner as bytes (`forward.py`). A client that asks for the owner alone (`postdate-direct`) is told where
that is, with NOT_OWNER, and so is everybody while nobody is known.

A token passes through, and the owner judges it again. An identity from a client's certificate cannot pass: the owner
sees the certificate of this node. So where certificates count, calls without a token are answered NOT_OWNER.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from broker.config import BrokerConfig
from broker.errors import PostdateError
from broker.observe.cluster_view import ClusterView, ViewCluster
from broker.observe.logs import get_logger
from broker.observe.metrics import BrokerCounters
from broker.rpc import admin, compaction, consumer, producer, schedule
from broker.rpc.access import AccessControl
from broker.rpc.access_rules import RULES
from broker.rpc.call_metadata import DIRECT, metadata_value
from broker.rpc.calls import Handler, refuse
from broker.rpc.cluster import describe_cluster
from broker.rpc.followed_owner import FollowedOwner, not_owner
from broker.rpc.forward import MessageRoom, OwnerConnections, forward_stream, forward_unary, watch_unread
from broker.rpc.health import HealthService
from broker.rpc.page_calls import PageCalls
from broker.rpc.port import GrpcPort
from broker.rpc.reception import window_bytes
from broker.rpc.status import Context
from broker.rpc.tls import channel_to_node
from broker.runtime.clock import Clock
from broker.runtime.supervise import Spawn
from postdate_api.v1 import admin_pb2, compaction_pb2, consumer_pb2, producer_pb2, schedule_pb2

log = get_logger(__name__)

_LOOK_SECONDS = 0.2
SERVICES = (producer, consumer, admin, schedule, compaction)
_GET_CLUSTER = f"/{admin.SERVICE}/GetCluster"
UNARY = frozenset(
    f"/{service.full_name}/{method.name}"
    for file in (producer_pb2, consumer_pb2, schedule_pb2, admin_pb2, compaction_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if not method.client_streaming and not method.server_streaming
)
"""Methods of the API with one message and one answer, by their path."""


@dataclass(frozen=True, slots=True)
class FrontHost:
    """The settings, the clock and the counters of a node."""

    config: BrokerConfig
    clock: Clock
    counters: BrokerCounters


class FrontGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Stands before every method where there is access control: judges calls by their headers, as the owner will."""

    def __init__(self, control: AccessControl) -> None:
        self._control = control

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler, rule = await continuation(details), RULES.get(details.method)
        if handler is None or (rule is not None and rule.is_public):
            return handler
        control = self._control
        is_unary = handler.stream_unary is not None
        behavior = handler.stream_unary if is_unary else handler.stream_stream

        async def guarded(request: Any, context: Context) -> Any:
            try:
                control.admit(rule, context, is_long=False)
            except PostdateError as error:
                await refuse(control.host, context, error)
                raise
            return await behavior(request, context)

        kind = grpc.stream_unary_rpc_method_handler if is_unary else grpc.stream_stream_rpc_method_handler
        return kind(
            guarded,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


class Front:
    """See the module's description."""

    def __init__(self, host: FrontHost, view: ViewCluster) -> None:
        """`view` is what the node knows of the cluster now; it is asked for each call. Raises ConfigError."""
        self._host = host
        self._view = view
        self._room = MessageRoom(host.config.receiving_bytes_max, host.clock)
        self._owner = FollowedOwner(
            lambda: self._seen().route,
            lambda route: channel_to_node(host.config, route.owner_address),
            window_bytes(host.config),
        )
        self._health = HealthService(service.SERVICE for service in SERVICES)
        self._port = GrpcPort(host, broker=None, guard=FrontGuard)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._port.server)
        self._port.server.add_generic_rpc_handlers((_Methods(self),))
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def address(self) -> str:
        """Address on which it listens, once it was started."""
        return self._port.address

    def page_calls(self) -> PageCalls:
        """Return the port as pages use it."""
        methods = _Methods(self)
        return PageCalls(self._port, methods.find, has_tls=bool(self._host.config.tls_cert_file))

    async def start(self, spawn_lasting: Spawn) -> None:
        """Open the port. `spawn_lasting` runs what lasts as long as that is open. Raises Fenced if that cannot be."""
        self._port.bind()
        self._owner.follow()
        self._tell_health()
        await self._port.server.start()
        self._tasks.append(spawn_lasting("route of the front", self._watch_route()))
        self._tasks.append(spawn_lasting("unread calls", watch_unread(self._connections)))
        self._tasks += [spawn_lasting(name, watch) for name, watch in self._port.watches()]
        log.info("Forwarding calls to the owner", grpc=self.address, owner=self._owner.route.owner_address)

    async def stop(self) -> None:
        """Close the port and end all calls."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._port.server.stop(None)
        await self._owner.close()

    def look_now(self) -> None:
        """Read the security files without waiting for the next look."""
        self._port.look_now()

    async def get_cluster(self, _: bytes, __: Context) -> bytes:
        return bytes(describe_cluster([self._seen()]).SerializeToString())

    async def pass_unary(self, path: str, message: bytes, context: Context) -> bytes:
        owner = await self._owner_for(context)
        return await forward_unary(self._host, self._room, owner, path, message, context)

    async def pass_stream(self, path: str, context: Context) -> None:
        owner = await self._owner_for(context)
        await forward_stream(self._host, self._room, owner, path, context)

    def _seen(self) -> ClusterView:
        """Return the cluster as it is known here. A node with a front owns nothing, whatever it owned before."""
        return self._view().of_standby()

    async def _owner_for(self, context: Context) -> OwnerConnections:
        """Return the owner, for a call that may be passed on; others are refused."""
        owner = self._owner.follow()
        config = self._host.config
        by_certificate = (
            config.access_file and config.tls_client_ca_file and not metadata_value(context, "authorization")
        )
        if owner is None or metadata_value(context, DIRECT) or by_certificate:
            error = not_owner(self._owner.route)
            await refuse(self._host, context, error)
            raise error
        return owner

    def _connections(self) -> Sequence[OwnerConnections]:
        return [self._owner.connections] if self._owner.connections is not None else []

    async def _watch_route(self) -> None:
        known = self._owner.route
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self._owner.follow()
            if known != self._owner.route:
                known = self._owner.route
                self._tell_health()

    def _tell_health(self) -> None:
        """Say whether calls can be passed on."""
        self._health.tell(is_serving=self._owner.connections is not None)


class _Methods(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Methods that are passed on: those that are known, as whatever somebody calls is kept by its name."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        return self.find(handler_call_details.method)

    def find(self, path: str) -> Handler | None:
        """Return what serves a method; None for one that nobody knows."""
        front = self._front
        if path not in RULES:
            return None
        if path == _GET_CLUSTER:
            return grpc.unary_unary_rpc_method_handler(front.get_cluster)
        if path in UNARY:
            return grpc.unary_unary_rpc_method_handler(
                lambda message, context: front.pass_unary(path, message, context)
            )
        return grpc.stream_stream_rpc_method_handler(lambda _, context: front.pass_stream(path, context))
