"""Owners of shards, as a front that passes calls on finds them: sockets of this machine, or nodes of a cluster.

Invariants:
  OWNERS-1  What a node's front passes on to another node goes to the process of that node which owns the shard, or is
      refused: it is passed on to no third one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from urllib.parse import quote

import grpc

from broker.config import BrokerConfig
from broker.errors import Unavailable
from broker.observe.cluster_view import OwnerRoute
from broker.rpc.call_metadata import DIRECT, SHARD, metadata_value
from broker.rpc.followed_owner import FollowedOwner, not_owner
from broker.rpc.forward import OwnerConnections
from broker.rpc.reception import window_bytes
from broker.rpc.shortcut import Shortcut, socket_beside
from broker.rpc.status import Context
from broker.rpc.tls import OpenChannel, channel_to_node
from broker.settings import UNIX

_SOCKET_OPTIONS = {"grpc.max_reconnect_backoff_ms": 200}
"""A try to connect to a socket of this machine costs next to nothing, and a shard that is back is to be found soon."""


class ShardOwners(Protocol):
    """Owners of all shards, as calls find them."""

    @property
    def count(self) -> int:
        """Number of shards."""

    def find(self, number: int, context: Context | None) -> OwnerConnections:
        """Return the owner of a shard, for a call, or (None) for one about all shards.

        Raises Unavailable if nobody is known, or the call may not be passed on.
        """

    def named(self, context: Context) -> int | None:
        """Return the shard that a call is for as a whole, whatever is in it; None if that depends on its requests."""

    def connections(self) -> Sequence[OwnerConnections]:
        """Return those to owners that are known."""

    async def close(self) -> None:
        """End all calls, and the connections."""


class LocalShards:
    """Shards of this machine."""

    def __init__(self, config: BrokerConfig, addresses: Sequence[str]) -> None:
        """`addresses`: the sockets of the shards, in order."""
        window = window_bytes(config)
        self._shards = tuple(
            OwnerConnections(_to_socket(address), window, shortcut=_shortcut(address))
            for address in addresses
        )

    @property
    def count(self) -> int:
        return len(self._shards)

    def find(self, number: int, context: Context | None) -> OwnerConnections:
        return self._shards[number]

    def named(self, context: Context) -> int | None:
        return None

    def connections(self) -> Sequence[OwnerConnections]:
        return self._shards

    async def close(self) -> None:
        for shard in self._shards:
            await shard.close(Unavailable("The broker is stopping"))


class ClusterShards:
    """Shards of a cluster, each with an owner among the nodes: a process of this one, or another node's front."""

    def __init__(
        self,
        config: BrokerConfig,
        node: str,
        addresses: Sequence[str],
        route: Callable[[int], OwnerRoute],
    ) -> None:
        """`addresses`: the sockets of this node's processes. `route`: what is known of a shard's owner now."""
        self._node = node
        window = window_bytes(config)

        def follow(number: int) -> FollowedOwner:
            def opening(known: OwnerRoute) -> OpenChannel:
                if known.owner_node == node:
                    return _to_socket(addresses[number])
                return channel_to_node(config, known.owner_address)

            def shortcut(known: OwnerRoute) -> Shortcut | None:
                return _shortcut(addresses[number]) if known.owner_node == node else None

            return FollowedOwner(lambda: route(number), opening, window, shard=number, shortcut=shortcut)

        self._owners = tuple(follow(number) for number in range(len(addresses)))

    @property
    def count(self) -> int:
        return len(self._owners)

    def find(self, number: int, context: Context | None) -> OwnerConnections:
        owner = self._owners[number]
        connections = owner.follow()
        is_here = owner.route.owner_node == self._node
        is_direct = context is not None and bool(metadata_value(context, DIRECT))
        if connections is None or (is_direct and not is_here):
            raise not_owner(owner.route)
        return connections

    def named(self, context: Context) -> int | None:
        number = metadata_value(context, SHARD)
        if not (metadata_value(context, DIRECT) and number.isdecimal()):
            return None
        return int(number) if len(number) < 6 and int(number) < self.count else None

    def follow(self) -> None:
        """End the calls of owners that are known to be none any more."""
        for owner in self._owners:
            owner.follow()

    def connections(self) -> Sequence[OwnerConnections]:
        return [owner.connections for owner in self._owners if owner.connections is not None]

    async def close(self) -> None:
        for owner in self._owners:
            await owner.close()


def _shortcut(address: str) -> Shortcut:
    return Shortcut(socket_beside(address.removeprefix(UNIX)))


def _to_socket(address: str) -> OpenChannel:
    target = UNIX + quote(address.removeprefix(UNIX))

    def open_channel(options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(target, options=[*{**dict(options), **_SOCKET_OPTIONS}.items()])

    return open_channel
