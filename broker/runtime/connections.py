"""Ends TCP connections of this process that a library holds and offers no way to end."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from urllib.parse import unquote

_DESCRIPTORS = Path("/dev/fd")


def cut_connection(peer: str) -> bool:
    """End the connection from `peer`, written as gRPC writes it (`ipv4:192.0.2.1:5555`); whether there was one.

    Looks at all descriptors: for a thread. Works on duplicates, so that a descriptor closed meanwhile harms nobody.
    """
    family, _, rest = unquote(peer).partition(":")
    if family not in ("ipv4", "ipv6"):
        return False
    host, _, port = rest.rpartition(":")
    wanted = (_plain(host.strip("[]")), int(port))
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError, ValueError), socket.socket(fileno=os.dup(int(name))) as found:
            address = found.getpeername()
            if (
                found.family in (socket.AF_INET, socket.AF_INET6)
                and (_plain(address[0]), address[1]) == wanted
            ):
                found.shutdown(socket.SHUT_RDWR)
                return True
    return False


def _plain(host: str) -> IPv4Address | IPv6Address:
    """An address without its zone, and of IPv4 if it is one that IPv6 carries."""
    address = ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address
