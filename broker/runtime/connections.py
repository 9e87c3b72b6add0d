"""Finds and ends TCP connections of this process that a library holds and offers no way to end."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from stat import S_ISSOCK
from typing import TypeAlias
from urllib.parse import unquote

_DESCRIPTORS = Path("/dev/fd")

_RECEIVED_AT, _RECEIVED, _TCP_INFO_BYTES = 128, struct.Struct("=Q20xI"), 160
"""In Linux's `struct tcp_info`: tcpi_bytes_received and tcpi_data_segs_out."""

Peer: TypeAlias = tuple[IPv4Address | IPv6Address, int]


def peer_of(name: str) -> Peer | None:
    """Return the peer of gRPC's name for it (`ipv4:192.0.2.1:5555`); None if that is no address."""
    family, _, rest = unquote(name).partition(":")
    if family not in ("ipv4", "ipv6"):
        return None
    host, _, port = rest.rpartition(":")
    return _plain(host.strip("[]")), int(port)


def cut_connections(peers: Collection[Peer]) -> set[Peer]:
    """End the connections from these peers; which there were."""
    ended: set[Peer] = set()
    for connection, peer in _connections():
        if peer in peers:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
                ended.add(peer)
                if len(ended) == len(peers):
                    break
    return ended


def peers_by_family(port: int) -> dict[int, list[Peer]]:
    """Return the peers connected to a port of this process, by the family of the socket."""
    peers: dict[int, list[Peer]] = {}
    for connection, peer in _connections():
        with suppress(OSError):
            if connection.getsockname()[1] == port:
                peers.setdefault(connection.family, []).append(peer)
    return peers


@dataclass(frozen=True, slots=True)
class ReceiveCounters:
    """Counters of the kernel for a connection."""

    total_bytes: int
    """Bytes that have arrived."""
    segments_sent: int
    """Segments with data that went out."""


def received_by_peer(port: int) -> dict[Peer, ReceiveCounters]:
    """Return what arrived on the connections to a port of this process; nothing where the system does not count it."""
    received: dict[Peer, ReceiveCounters] = {}
    if not hasattr(socket, "TCP_INFO"):
        return received
    for connection, peer in _connections():
        with suppress(OSError):
            if connection.getsockname()[1] == port:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                if len(info) == _TCP_INFO_BYTES:
                    received[peer] = ReceiveCounters(*_RECEIVED.unpack_from(info, _RECEIVED_AT))
    return received


def descriptor_count() -> int:
    return len(os.listdir(_DESCRIPTORS))


def _connections() -> Iterator[tuple[socket.socket, Peer]]:
    """Connections of this process. Looks at all descriptors: for a thread.

    Yields duplicates, so that a descriptor that is closed meanwhile harms nobody.
    """
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError, ValueError):
            copy = os.dup(int(name))
            if not S_ISSOCK(os.fstat(copy).st_mode):
                os.close(copy)  # a socket object would not have taken it, nor closed it
                continue
            with socket.socket(fileno=copy) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    address = connection.getpeername()
                    yield connection, (_plain(address[0]), address[1])


def _plain(host: str) -> IPv4Address | IPv6Address:
    """An address without its zone, and of IPv4 if it is one that IPv6 carries."""
    address = ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address
