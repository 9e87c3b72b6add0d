"""The gRPC port: how it listens, whom it lets connect, and those who stand before every call."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import grpc

from broker.config import is_loopback
from broker.errors import Fenced
from broker.folder.broker import Broker
from broker.observe.logs import get_logger
from broker.rpc.access import AccessControl
from broker.rpc.calls import CallHost
from broker.rpc.reception import TRIM_SECONDS, Reception, window_bytes
from broker.rpc.silent import SilentConnections
from broker.rpc.tls import ServerCertificates
from broker.rpc.unfinished_messages import UnfinishedMessages
from broker.runtime.allocator import Trimmer
from broker.runtime.foreground import Foreground
from broker.settings import UNIX, split_address

log = get_logger(__name__)

GRPC_OPTIONS = {
    "grpc.http2.bdp_probe": 0,  # or windows would grow with the speed of a connection, whoever it belongs to
    "grpc.so_reuseport": 0,  # or a second broker would get half of the connections
    # Equal: between a soft and a hard limit the refusal would be a matter of luck.
    "grpc.max_metadata_size": 16_384,
    "grpc.absolute_max_metadata_size": 16_384,
    "grpc.max_concurrent_streams": 250,  # of one connection
    # Calls that the loop has not seen yet, of a queue (`server.py` tells which there are). Beyond it gRPC refuses at
    # random, whoever calls.
    "grpc.server.max_pending_requests": 10_000,
    "grpc.server.max_pending_requests_hard_limit": 10_000,
    "grpc.server_handshake_timeout_ms": 5_000,
    "grpc.max_connection_idle_ms": 300_000,
    # A peer that is cut off or frozen is noticed within 30 s, and one that pings more often than every 5 s is cut.
    "grpc.keepalive_time_ms": 20_000,
    "grpc.keepalive_timeout_ms": 10_000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.ping_timeout_ms": 10_000,
    "grpc.http2.min_ping_interval_without_data_ms": 5_000,
    "grpc.http2.max_ping_strikes": 2,
}
MTLS_OPTIONS = {
    # A client whose authority is not trusted any more stays connected until its next handshake.
    "grpc.max_connection_age_ms": 3_600_000,
    "grpc.max_connection_age_grace_ms": 30_000,
}


class GrpcPort:
    """The port of a broker, or of a node that passes calls on to one."""

    def __init__(
        self, host: CallHost, *, broker: Broker | None, guard: Callable[[AccessControl], Any]
    ) -> None:
        """`guard` makes the interceptor that asks for rights, where there is an access file. Raises ConfigError."""
        config = host.config
        self._config = config
        self._tls = ServerCertificates(config, host.counters) if config.tls_cert_file else None
        self._access = AccessControl(config, host, broker) if config.access_file else None
        # gRPC counts them for each address that it listens on.
        connections_max = max(1, config.connections_max // _listeners(config.grpc_address))
        self._silent = SilentConnections(connections_max)
        self._unfinished = UnfinishedMessages(
            config.receiving_bytes_max, config.request_bytes_max, Trimmer(TRIM_SECONDS)
        )
        self._look_now = asyncio.Event()
        options = [
            ("grpc.max_receive_message_length", config.request_bytes_max),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_allowed_incoming_connections", connections_max),
            ("grpc.http2.lookahead_bytes", window_bytes(config)),
            *GRPC_OPTIONS.items(),
        ]
        if config.tls_client_ca_file:
            options += MTLS_OPTIONS.items()
        self.interceptors: list[Any] = [guard(self._access)] if self._access is not None else []
        foreground = Foreground(lambda: False) if broker is None else broker.foreground
        self.interceptors.append(Reception(host, self._silent, self._unfinished, foreground))
        self.server = grpc.aio.server(options=options, interceptors=self.interceptors)
        self.address = ""
        self.shard_port = 0
        """Port on which clients reach a shard beside its socket; 0: none."""

    @property
    def access(self) -> AccessControl | None:
        """None where there are no access rules."""
        return self._access

    def bind(self) -> None:
        """Take the address. Raises Fenced if that cannot be."""
        config = self._config
        if not config.grpc_socket:
            self.address = self._bind_address(config.grpc_address)
            return
        self._bind_socket(config.grpc_socket)
        if config.shard_address:
            try:
                self.shard_port = split_address(self._bind_address(config.shard_address))[1]
            except Fenced as error:
                # Clients may take some time to notice, and no more than that: the front passes their calls on.
                log.warning("Clients can reach this shard only through the front", because=error)

    def _bind_address(self, address: str) -> str:
        """Take an address, and return it with its port. Raises Fenced if that cannot be."""
        host, _ = split_address(address)
        if not is_loopback(host) and not self._config.tls_cert_file:
            log.warning("gRPC accepts connections from other machines without encryption", address=address)
        cause: BaseException | None = None
        try:
            if self._tls is None:
                port = self.server.add_insecure_port(address)
            else:
                port = self.server.add_secure_port(address, self._tls.credentials())
        except RuntimeError as error:
            port, cause = 0, error
        if not port:
            raise Fenced(
                f"gRPC cannot listen on {address}: another process uses the port, or the address does not belong to "
                "this machine. Stop that process, or choose another --grpc-address",
                reason="ADDRESS_IN_USE",
            ) from cause
        return f"{host}:{port}"

    def _bind_socket(self, path: str) -> None:
        """Take a socket that this user alone can reach: it needs no certificate, and no limits for strangers."""
        try:
            is_bound = bool(self.server.add_insecure_port(UNIX + quote(path)))
        except RuntimeError:
            is_bound = False
        if not is_bound:
            raise Fenced(f"gRPC cannot listen on {path}", reason="ADDRESS_IN_USE")
        self.address = UNIX + path

    def watches(self) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        """Return what must run for as long as the port is open, each with its name. Bind it before."""
        if self._access is not None or self._tls is not None:
            yield "security files", self._watch_security()
        if self._access is not None and self._access.broker is not None:
            yield "limits", self._access.limiter.run(self._access.broker.registry)
        port = self.shard_port if self._config.grpc_socket else split_address(self.address)[1]
        if not port:
            return
        yield "silent connections", self._silent.watch(port)
        yield "unfinished messages", self._unfinished.watch(port)

    def look_now(self) -> None:
        """Read the security files without waiting for the next look."""
        self._look_now.set()

    async def _watch_security(self) -> None:
        """Take what changed of certificates, keys, tokens and rights, and end what they do not allow any more."""
        watched = [self._tls.watched] if self._tls is not None else []
        watched += self._access.watched if self._access is not None else ()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.tuning.security_recheck_ms / 1000):
                    await self._look_now.wait()
            self._look_now.clear()
            await asyncio.to_thread(lambda: [file.refresh() for file in watched])
            if self._access is not None:
                await self._access.recheck()


def _listeners(grpc_address: str) -> int:
    """On how many addresses gRPC listens. For all addresses of the machine it needs one socket."""
    host, port = split_address(grpc_address)
    try:
        addresses = {place[4][:2] for place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        return 1  # it cannot listen there, and will say so
    return len(addresses)
