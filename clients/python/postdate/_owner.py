"""The owner of a shard, as a client knows it: looked for, connected to, and left for the next one.

    in doubt -> found -> connected -> in doubt ...

A client of several addresses talks to owners alone. One of a single address is passed on by whoever is there, and goes
to the owners of several shards by itself where it can reach them.

Invariants:
  OWNER-1  A call waits for an owner to be found only where there is no other way. A new stream of a client of a
      single address waits too, for `_PATIENCE_S` at most, and once: an owner that could not be reached is tried again
      beside the calls.
  OWNER-2  An address that was told by somebody else is used once it has said itself that it is the owner: it may be
      nobody's, or another broker's, on this side of a network. So without TLS no token is shown there, not even to
      ask, unless `allow_plaintext_token` says that whoever listens there may see it: see `Credentials.open_channel`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from postdate._connection import Connection
from postdate._routes import Route, Routes
from postdate.credentials import Credentials
from postdate.errors import Closed, PostdateError, Unavailable
from postdate_api.v1 import admin_pb2

_LOOK_S = 3.0  # without an answer, before another node is asked whether it knows a later owner
_PATIENCE_S = 1.0  # for a new stream, while the owner is looked for
_REACH_S = 1.0  # for a connection to an owner
_AGAIN_S = 1.0  # before an owner that nobody knows is looked for by a call again
_UNREACHABLE_S = 30.0  # before an owner that could not be reached is tried again
_MOVED = "another node owns the shard now"

AnswerT = TypeVar("AnswerT")


class Host(Protocol):
    """The client that an owner belongs to."""

    credentials: Credentials
    is_routed: bool
    """True where calls go to owners alone."""

    @property
    def is_closed(self) -> bool: ...

    @property
    def front(self) -> Owner:
        """The way of calls about no topic, and of those about a shard whose owner is not reached."""
        ...

    def keep(self, task: asyncio.Future[Any]) -> None:
        """Keep a task until it is done."""

    def forget_shards(self) -> None:
        """Have it asked anew how many shards there are."""

    async def ask_over(self, connection: Connection) -> admin_pb2.GetClusterResponse:
        """Ask a node for its cluster."""
        ...


class Owner:
    """See the module's description."""

    def __init__(self, host: Host, routes: Routes, connection: Connection | None = None) -> None:
        """`connection` is that of a front, to the address that was given."""
        self._host = host
        self.routes: Routes = routes
        self._connection = connection
        self._in_doubt = connection is None or host.is_routed
        self._finding: asyncio.Task[None] | None = None
        self._looked_at = 0.0
        self._find_at = 0.0  # by the loop's clock: when calls look for it again
        self._reach_at = 0.0  # the same for streams, too
        self._is_unreachable = False

    @property
    def connection(self) -> Connection:
        """The connection to the owner, or to the front as long as there is none."""
        if self._connection is not None:
            return self._connection
        if self is self._host.front:
            raise Closed("the client is closed")
        return self._host.front.connection

    @property
    def epoch(self) -> int:
        """The highest epoch that was seen; what an owner of a lower one sends does not count."""
        return self.routes.epoch

    @property
    def is_watched(self) -> bool:
        """True where the shard may have another owner while this one is silent."""
        return self._host.is_routed or (self is not self._host.front and self.routes.epoch > 0)

    def believes(self, epoch: int) -> bool:
        """Tell whether an owner of this epoch may be believed, and remember it if so."""
        if epoch < self.routes.epoch:  # also 0: a broker without a cluster
            self._in_doubt = self.is_watched
            return False
        self.routes.epoch = max(self.routes.epoch, epoch)
        return True

    def doubt(self, error: PostdateError) -> None:
        """Note that a call or stream has failed, or that its broker cannot serve now: look for the owner again."""
        if error.reason == "NOT_OWNER" and "shards" in error.metadata:  # a shard of a broker with several
            self._host.forget_shards()
        elif error.reason == "NOT_OWNER" and (address := error.metadata.get("owner_address")):
            epoch = error.metadata.get("epoch", "")
            self.routes.learn((*self.routes.addresses, address), int(epoch) if epoch.isdecimal() else 0)
            self._host.is_routed = True
        if self._host.is_closed:
            return
        if self is self._host.front and not self._host.is_routed:
            self._host.forget_shards()  # it may be another broker that comes back
            return
        self._in_doubt = True
        if self.is_watched and self._connection is not None and self._connection.streams:
            self._host.keep(asyncio.ensure_future(self.look()))

    async def look(self) -> None:
        """Ask another node whether it knows a later owner, unless that was asked just now; go there if it does."""
        loop = asyncio.get_running_loop()
        if not self.is_watched or self._host.is_closed or loop.time() < self._looked_at + _LOOK_S:
            return
        self._looked_at = loop.time()
        here = self.connection
        if await self.routes.has_moved(here.address, here.epoch) and not self._host.is_closed:
            self._in_doubt = True
            with suppress(PostdateError):
                await asyncio.shield(self._begin_finding())

    async def follow(self, *, is_stream: bool = False) -> Connection:
        """Return the connection for a call. Raises PostdateError if no owner is known, and there is no other way."""
        is_front = self is self._host.front
        if is_front and not self._host.is_routed:
            return self.connection
        if self._connection is None or not self._connection.is_ready:
            self._in_doubt = True  # nobody knows who will be at that address
        if not self._in_doubt:
            return self.connection
        if is_front or self._host.is_routed:
            await asyncio.shield(self._begin_finding())
            return self.connection
        now = asyncio.get_running_loop().time()
        if now >= (self._reach_at if is_stream else self._find_at):
            finding = self._begin_finding()
            if is_stream and not self._is_unreachable:
                await asyncio.wait({finding}, timeout=_PATIENCE_S)
        return self._host.front.connection if self._in_doubt else self.connection

    async def answer(self, connection: Connection, call: Awaitable[AnswerT]) -> AnswerT:
        """Return the answer of a call. Where the owner may be another one meanwhile, others are asked now and then."""
        if not self.is_watched:
            try:
                return await call
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if connection.left.is_set() and not (task and task.cancelling()):
                    raise _moved() from None
                raise
        answer, left = asyncio.ensure_future(call), asyncio.ensure_future(connection.left.wait())
        try:
            while not answer.done():
                await asyncio.wait({answer, left}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if left.done() and (not answer.done() or answer.cancelled()):
                    raise _moved()
                if not answer.done():
                    await self.look()
            return await answer
        finally:
            answer.cancel()
            left.cancel()

    def leave(self) -> None:
        """Close the connection to an owner that is no more."""
        before, self._connection = self._connection, None
        if before is not None:
            self._close(before)

    async def close(self) -> None:
        """Close the connection of a client that is closed."""
        if self._connection is not None:
            await self._connection.channel.close(None)

    def forget(self) -> None:
        """Forget the connection of a client that is closed."""
        self._connection = None

    def _begin_finding(self) -> asyncio.Task[None]:
        if self._finding is None:
            self._finding = asyncio.ensure_future(self._find())
            self._host.keep(self._finding)
        return self._finding

    async def _find(self) -> None:
        now = asyncio.get_running_loop().time
        try:
            self._find_at = now() + _AGAIN_S
            learns_nodes = self._host.is_routed and self._host.credentials.may_go_elsewhere
            route = await self.routes.find(learns_nodes=learns_nodes)
            if self._host.is_closed:
                return
            await self._go(route)
            if not self._host.is_closed:
                self.connection.epoch = route.epoch
                self._in_doubt = False
        except ValueError as error:  # the token must not be sent there
            self._find_at = self._reach_at = now() + _UNREACHABLE_S
            raise Unavailable(str(error), code="UNAVAILABLE") from error
        finally:
            self._finding = None

    async def _go(self, route: Route) -> None:
        """Have the connection be one to the owner that was found."""
        before = self._connection
        if self is self._host.front or self._host.is_routed:
            if before is None or route.address != before.address:
                self._connection = Connection(route.address, self._host.credentials)
            elif route.epoch > before.epoch > 0:
                before.leave(
                    _MOVED
                )  # it lost the shard and owns it again: what it said before does not count
                before.left = asyncio.Event()
        elif before is None or route.address != before.address or not before.is_ready:
            self._connection = await self._reach(route)
        else:
            await self._check(before, route)
        if before is not None and before is not self._connection:
            self._close(before)

    async def _reach(self, route: Route) -> Connection:
        """Return a connection to the owner, which has said that it is the owner (OWNER-2). Raises PostdateError."""
        self._is_unreachable = True
        if not self._host.credentials.may_go_elsewhere:
            raise ValueError(f"the token would be shown to whoever listens on {route.address}")
        connection = Connection(route.address, self._host.credentials)
        try:
            async with asyncio.timeout(_REACH_S):
                await connection.wait_ready()
                await self._check(connection, route)
            self._is_unreachable = False
        except (TimeoutError, PostdateError) as error:
            self._find_at = self._reach_at = asyncio.get_running_loop().time() + _UNREACHABLE_S
            raise Unavailable(f"no way to {route.address}: {error}", code="UNAVAILABLE") from error
        finally:
            if self._is_unreachable:
                await connection.channel.close(None)
        return connection

    async def _check(self, connection: Connection, route: Route) -> None:
        """Raise Unavailable if somebody else than the owner answers."""
        told = await self._host.ask_over(connection)
        if told.node != route.owner or not route.owner:
            raise Unavailable(f"{connection.address} is not {route.owner}", code="UNAVAILABLE")

    def _close(self, connection: Connection) -> None:
        connection.leave(_MOVED)
        self._host.keep(asyncio.ensure_future(connection.channel.close(None)))


def _moved() -> Unavailable:
    return Unavailable(_MOVED, code="UNAVAILABLE", reason="OWNER_UNREACHABLE")
