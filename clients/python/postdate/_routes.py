"""The way to the owner of a shard: the nodes of its cluster are asked, or its front, and the highest epoch is right.

Invariants:
  ROUTES-1  The epoch never falls: who was replaced is not believed any more. Once a cluster with an owner was seen,
      neither is a broker of another cluster, nor one of none, which may have lost its settings.
  ROUTES-2  Whoever owns the shard and says so itself is believed at once. What others say of it counts if nobody does
      so within `_OTHERS_S`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from postdate.errors import PostdateError, Unavailable
from postdate_api.v1 import admin_pb2

_log = logging.getLogger("postdate")

_OTHERS_S = 0.3
_NODES_MAX = 64
"""Nodes of a cluster that are remembered beside the addresses that were given."""
_SHARDS_MAX = 4096

Ask: TypeAlias = Callable[[str], Awaitable[admin_pb2.GetClusterResponse]]
"""Asks the node at an address for its cluster; raises PostdateError if it does not answer in time."""


class Route(NamedTuple):
    """The owner, as one node tells of it."""

    address: str  # empty: it knows nobody
    epoch: int
    is_own: bool  # the owner says so itself
    nodes: tuple[str, ...]
    owner: str = ""  # its name


class Routes:
    """See the module's description."""

    def __init__(self, addresses: Sequence[str], ask: Ask, number: int = 0) -> None:
        """`number` is that of the shard."""
        self._number = number
        self._given = tuple(addresses)
        self._nodes: tuple[str, ...] = ()
        self._ask = ask
        self._cluster_id = ""  # once its owner was seen; no other one is believed then
        self._strangers = set[str]()  # addresses whose answers were refused, which is logged once
        self._next = 0
        self.epoch: int = 0
        """The highest that was seen; 0 without a cluster."""
        self.shards: int = 0
        """Shards that there are; 0 as long as nobody has told."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of all nodes that are known."""
        return tuple(dict.fromkeys((*self._given, *self._nodes)))

    def learn(self, addresses: Iterable[str], epoch: int = 0) -> None:
        """Remember nodes, and an epoch that was seen."""
        self._nodes = tuple(address for address in addresses if address)[:_NODES_MAX]
        self.epoch = max(self.epoch, epoch)

    async def find(self, *, learns_nodes: bool = True) -> Route:
        """Return the owner. Raises what most of the nodes say if there is none that can be used.

        Nodes that are told of are asked too, from the next time on, unless they are not to be learned.
        """
        asking = {asyncio.ensure_future(self._ask_node(address)) for address in self.addresses}
        try:
            return await self._choose(asking, learns_nodes)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.wait(asking)

    async def has_moved(self, owner: str, epoch: int) -> bool:
        """Ask one node that is not the owner, another one each time, whether there is an owner of a higher epoch.

        `epoch` is that of the owner: a higher one may have been heard of, without its owner.
        """
        others = [address for address in self.addresses if address != owner]
        if not others:
            return False
        self._next += 1
        try:
            route = await self._ask_node(others[self._next % len(others)])
        except PostdateError:
            return False
        return self._is_usable(route) and route.epoch > epoch

    async def _choose(self, asking: set[asyncio.Task[Route]], learns_nodes: bool) -> Route:
        best: Route | None = None
        failures: list[PostdateError] = []
        waiting, give_up_at = asking, None
        loop = asyncio.get_running_loop()
        while waiting:
            timeout = None if give_up_at is None else max(0.0, give_up_at - loop.time())
            done, waiting = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            for task in done:
                if task.cancelled():
                    continue  # its connection was left meanwhile
                try:
                    route = task.result()
                except PostdateError as error:
                    failures.append(error)
                    continue
                self.learn(route.nodes if learns_nodes else (), route.epoch)
                if self._is_usable(route) and (
                    best is None or (route.epoch, route.is_own) > (best.epoch, best.is_own)
                ):
                    best = route
            if best is not None:
                if best.is_own and best.epoch >= self.epoch:
                    return best
                give_up_at = give_up_at or loop.time() + _OTHERS_S
        if best is not None and self._is_usable(best):
            return best
        raise _failure(failures, self.addresses)

    def _is_usable(self, route: Route) -> bool:
        return bool(route.address) and route.epoch >= self.epoch

    async def _ask_node(self, address: str) -> Route:
        response = await self._ask(address)
        nodes = tuple(node.address for node in response.nodes)
        self._check_cluster(address, response.cluster_id)
        self.shards = max(self.shards, count_shards(response))
        if not response.shards or (not response.cluster_id and len(response.shards) == 1):
            return Route(address, 0, is_own=True, nodes=())
        shard = next((shard for shard in response.shards if shard.number == self._number), None)
        if shard is None:
            return Route("", 0, is_own=False, nodes=nodes)
        if shard.epoch:
            self._cluster_id = response.cluster_id
        is_own = bool(shard.owner) and shard.owner == response.node
        return Route(_with_host(shard.owner_address, address), shard.epoch, is_own, nodes, shard.owner)

    def _check_cluster(self, address: str, cluster_id: str) -> None:
        """Raise Unavailable if a node is not of the cluster that was seen."""
        if not self._cluster_id or cluster_id == self._cluster_id:
            self._strangers.discard(address)
            return
        of = f"of cluster {cluster_id}" if cluster_id else "of no cluster"
        message = f"{address} is {of}, and this client has seen an owner of cluster {self._cluster_id}"
        if address not in self._strangers:
            self._strangers.add(address)
            _log.warning("%s: it is not believed", message)
        raise Unavailable(message, code="UNAVAILABLE")


def count_shards(response: admin_pb2.GetClusterResponse) -> int:
    """Return how many shards there are whose owners clients can go to; 1 where it makes no difference.

    0 where that cannot be told yet: owners are missing, and nobody can be gone to.
    """
    numbers = sorted(shard.number for shard in response.shards)
    is_whole = numbers == list(range(len(numbers))) and len(numbers) <= _SHARDS_MAX
    if not is_whole or len(numbers) < 2:
        return 1
    if any(shard.owner_address for shard in response.shards):
        return len(numbers)
    return 1 if all(shard.owner for shard in response.shards) else 0


def _with_host(address: str, asked: str) -> str:
    """Return an address that was told, on the host that was asked if it has none."""
    return asked.rpartition(":")[0] + address if address.startswith(":") else address


def _failure(failures: Sequence[PostdateError], addresses: Sequence[str]) -> PostdateError:
    """Return why there is no owner: a refusal that will not go away by itself, such as that of a wrong token, first."""
    for error in failures:
        if not isinstance(error, Unavailable):
            return error
    if failures and len(failures) == len(addresses):
        return Unavailable(f"no node answers: {failures[0].message}", code="UNAVAILABLE")
    return Unavailable("no node knows who owns the shard", code="UNAVAILABLE", reason="NOT_OWNER")
