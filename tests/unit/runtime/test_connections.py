"""Cutting a connection by the name that gRPC gives its peer."""

from __future__ import annotations

import os
import socket
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest

from broker.runtime.connections import cut_connections, peer_of, peers_by_family, received_by_peer


@pytest.mark.parametrize(
    ("family", "host", "target", "peer"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1", "ipv4:127.0.0.1:{}"),
        (socket.AF_INET6, "::1", "::1", "ipv6:%5B::1%5D:{}"),
        (socket.AF_INET6, "::1", "::1", "ipv6:[::1]:{}"),
        (socket.AF_INET6, "::", "127.0.0.1", "ipv4:127.0.0.1:{}"),
        (socket.AF_INET6, "::", "127.0.0.1", "ipv6:[::ffff:127.0.0.1]:{}"),
    ],
)
def test_the_named_connection_is_cut_and_no_other(family: Any, host: str, target: str, peer: str):
    dual = family == socket.AF_INET6 and host == "::"
    with socket.create_server((host, 0), family=family, dualstack_ipv6=dual) as listening:
        address = (target, listening.getsockname()[1])
        with (
            socket.create_connection(address) as first,
            listening.accept()[0],
            socket.create_connection(address) as second,
            listening.accept()[0] as other,
        ):
            named = peer_of(peer.format(first.getsockname()[1]))
            assert named is not None
            assert cut_connections({named}) == {named}
            first.settimeout(5)
            assert first.recv(1) == b""
            other.send(b"x")
            second.settimeout(5)
            assert second.recv(1) == b"x"


@pytest.mark.parametrize("name", ["unix:", "unix:/run/postdate/shard-0.sock", "unknown"])
def test_a_peer_that_is_no_address_has_none(name: str):
    assert peer_of(name) is None


@pytest.mark.parametrize("name", ["ipv4:127.0.0.1:1", "ipv6:[::1]:1"])
def test_a_peer_without_a_connection_is_not_found(name: str):
    peer = peer_of(name)
    assert peer is not None
    assert cut_connections({peer}) == set()


def test_looking_leaves_no_descriptor_open(tmp_path: Path):
    """Files are among the descriptors that are looked at: a stranger can make the broker look often."""
    with (tmp_path / "file").open("w"), socket.create_server(("127.0.0.1", 0)):
        before = len(os.listdir("/dev/fd"))
        for _ in range(3):
            assert not cut_connections({(IPv4Address("127.0.0.1"), 1)})
            peers_by_family(1)
        assert len(os.listdir("/dev/fd")) == before


def test_what_has_arrived_on_each_connection_is_counted_read_or_not():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with (
            socket.create_connection(("127.0.0.1", port)) as first,
            listening.accept()[0] as accepted,
            socket.create_connection(("127.0.0.1", port)) as second,
            listening.accept()[0],
        ):
            first.sendall(b"x" * 1_000)
            assert accepted.recv(400, socket.MSG_WAITALL) == b"x" * 400
            accepted.sendall(b"y")
            assert first.recv(1) == b"y"
            received = received_by_peer(port)
            names = {end: peer_of(f"ipv4:127.0.0.1:{end.getsockname()[1]}") for end in (first, second)}
            assert {peer: received[peer].total_bytes for peer in received} == {
                names[first]: 1_000,
                names[second]: 0,
            }
            assert {peer: received[peer].segments_sent for peer in received} == {
                names[first]: 1,
                names[second]: 0,
            }
