"""Connections to the owner of a shard, whoever that is at the time (FORWARD-2)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from broker.errors import Unavailable
from broker.observe.cluster_view import OwnerRoute
from broker.rpc.forward import OwnerConnections
from broker.rpc.shortcut import Shortcut
from broker.rpc.tls import OpenChannel

_RETRY_MS = 200
"""Time after which a caller may ask again who the owner is."""


class FollowedOwner:
    """See the module's description."""

    def __init__(
        self,
        route: Callable[[], OwnerRoute],
        opening: Callable[[OwnerRoute], OpenChannel],
        window_bytes: int,
        *,
        shard: int | None = None,
        shortcut: Callable[[OwnerRoute], Shortcut | None] = lambda _: None,
    ) -> None:
        """`route`: what is known now. `opening`: how a channel to the owner of a route is opened.

        `shard` is named to nodes that have several. `shortcut`: to the owner of a route, if it has one.
        """
        self._shard = shard
        self._ask_route = route
        self._opening = opening
        self._shortcut = shortcut
        self._window_bytes = window_bytes
        self.route = OwnerRoute()
        self.connections: OwnerConnections | None = None
        """None while nobody is known."""
        self._closing: set[asyncio.Task[None]] = set()

    def follow(self) -> OwnerConnections | None:
        """Take the route that is known now, and end all calls of the one before; return the connections."""
        route = self._ask_route()
        if route == self.route:
            return self.connections
        former, self.route, self.connections = self.connections, route, None
        if route.owner_address:
            self.connections = OwnerConnections(
                self._opening(route), self._window_bytes, self._shard, self._shortcut(route)
            )
        if former is not None:
            closing = asyncio.create_task(former.close(_lost_owner()), name="connections to a former owner")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        return self.connections

    async def close(self) -> None:
        """End all calls, and the connections."""
        if self.connections is not None:
            await self.connections.close(_lost_owner())
        await asyncio.gather(*self._closing, return_exceptions=True)


def not_owner(route: OwnerRoute) -> Unavailable:
    """Return the refusal of a call that only the owner can answer."""
    where = f"its owner is at {route.owner_address}" if route.owner_address else "its owner is not known"
    return Unavailable(
        f"This node does not own the shard; {where}",
        reason="NOT_OWNER",
        retry_after_ms=_RETRY_MS,
        owner_address=route.owner_address,
        epoch=route.epoch,
    )


def _lost_owner() -> Unavailable:
    """Return the end of a call that was passed on to somebody who owns the shard no more."""
    return Unavailable(
        "The owner of the shard has changed; the call may or may not have taken effect",
        reason="OWNER_UNREACHABLE",
        retry_after_ms=_RETRY_MS,
    )
