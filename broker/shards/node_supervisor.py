"""A node of a cluster with several shards: a process for each of them, owner or standby, and one front.

The front passes each call on to the shard's owner: to a process of this node, or to the front of the node that has it.
What it knows of owners comes from its own processes, which follow every shard's log, and from other nodes
(`rpc/peers.py`); the highest epoch is right.

Invariants:
  NODE-1  A node that stops hands over one shard after the other, each once the one before has another owner, or a lease
      has passed. Those that do not answer are stopped together at the end: they serve nobody, and each may take as
      long as it takes to kill it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from broker.cluster.creation import Cluster
from broker.config import BrokerConfig, parse_nodes
from broker.errors import Fenced, Unavailable
from broker.node.member import node_name
from broker.node.placement import rank_nodes
from broker.observe.cluster_view import ClusterView, OwnerRoute, merge_views
from broker.rpc.cluster import decode_view
from broker.rpc.front import FrontHost
from broker.rpc.peers import Peers
from broker.rpc.shard_front import ShardFront
from broker.rpc.shard_owners import ClusterShards
from broker.runtime.notify import ServiceNotifier
from broker.runtime.vfs import File, LocalVfs
from broker.settings import ConfigError, split_address
from broker.shards.supervisor import Command, ShardSupervisor, process_stop_seconds
from broker.storage.layout import Layout
from broker.web.shard_http import ShardHttp, pages_url
from broker.web.source import ClusterSource, PageSource

_VIEW_SECONDS = 0.2
"""Between questions to a process: for so long a hand-over may go unnoticed."""
_ANSWER_SECONDS = 2.0


class NodeSupervisor(ShardSupervisor):
    """See the module's description."""

    def __init__(
        self,
        config: BrokerConfig,
        cluster: Cluster,
        command: Command,
        *,
        notifier: ServiceNotifier,
        read_config: Callable[[], BrokerConfig],
    ) -> None:
        """`command` starts the process of a shard. Raises ConfigError."""
        if config.access_file and config.tls_client_ca_file:
            raise ConfigError(
                f"access_file and tls_client_ca_file cannot be used together in a cluster of {cluster.shards} "
                "shards, because identities of client certificates are not passed on to shards. Use tokens, "
                "without tls_client_ca_file"
            )
        name, nodes = node_name(config), parse_nodes(config.cluster_nodes)
        self._node = name
        self._owner_lease_ms = cluster.owner_lease_ms
        self._views = [
            ClusterView(
                cluster.id,
                name,
                tuple(nodes.items()),
                number,
                OwnerRoute(),
                standbys=rank_nodes(cluster.shard(number), nodes),
            )
            for number in range(cluster.shards)
        ]
        others = {node: address for node, address in nodes.items() if node != name}
        self._peers = Peers(config, cluster.id, others, self._misses_owner, self._note_told)
        self._told = asyncio.Event()
        self._owners: ClusterShards
        super().__init__(config, command, notifier=notifier, read_config=read_config, shards=cluster.shards)

    async def run(self) -> int:
        self._peers.start(self._supervisor.spawn_lasting)
        try:
            return await super().run()
        finally:
            await self._supervisor.stop()  # where it came to no end of its own

    def _open_folder(self) -> File:
        vfs, layout = LocalVfs(), Layout(self._config.data_dir.rstrip("/"))
        vfs.make_dir(layout.root)
        lock = vfs.lock(layout.lock)
        if lock is None:
            raise Fenced(
                f"Another node uses the data directory {layout.root!r}: stop it, or choose another directory",
                reason="DATA_DIR_LOCKED",
            )
        return lock

    def _note_begun(self) -> None:
        """A shard of a cluster begins anew from its base, and may hold nothing."""

    def _make_front(self, host: FrontHost, addresses: Sequence[str]) -> ShardFront:
        self._owners = ClusterShards(
            host.config, self._node, addresses, lambda number: self._view(number).route
        )
        return ShardFront(host, self._owners, self._describe)

    def _make_pages(self) -> PageSource:
        cluster = ClusterSource(lambda: self._describe(False), lambda: None, self._describe_state)
        return replace(super()._make_pages(), cluster=cluster)

    def _find_pages(self, number: int) -> ShardHttp:
        if self._owns(number):
            return super()._find_pages(number)
        view = self._view(number)
        route = view.route
        if not route.owner_address:
            raise Unavailable(f"The owner of shard {number} is not known")
        host = split_address(route.owner_address)[0]
        raise Unavailable(
            f"The pages of shard {number} are on its owner, node {route.owner_node}, {host}",
            reason="NOT_OWNER",
            pages=pages_url(dict(view.pages).get(route.owner_node, ""), host),
        )

    def _describe_state(self) -> str:
        return self._not_ready_because() or self._ready_line()

    def _ready_line(self) -> str:
        owned = [str(view.shard) for view in self._views if self._owns(view.shard)]
        return f"ok, owns {', '.join(owned) or 'nothing'}"

    def _watches(self) -> list[Coroutine[Any, Any, None]]:
        return [*super()._watches(), *(self._watch_view(child.number) for child in self._children)]

    async def _stop_children(self, running: Sequence[asyncio.Task[None]]) -> None:
        left = list(self._children)
        # Looked at anew each time: meanwhile this node may take over a shard that it did not own.
        while (child := next((each for each in left if self._can_hand_over(each.number)), None)) is not None:
            left.remove(child)
            child.stop()
            await self._wait_end({child.number: running[child.number]})
            await self._wait_owner(child.number)
        await super()._stop_children(running)

    def _can_hand_over(self, number: int) -> bool:
        return self._owns(number) and number not in self._silent

    async def _wait_owner(self, number: int) -> None:
        """Return when another node owns a shard; or a lease has passed, and it may never be."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._owner_lease_ms / 1e3):
                while not self._view(number).route.owner_address:
                    self._told.clear()
                    await self._told.wait()

    # -- what is known of the shards ---------------------------------------------------------------------------

    def _owns(self, number: int) -> bool:
        return self._views[number].route.owner_node == self._node

    def _own_view(self, number: int) -> ClusterView:
        return self._views[number]._replace(pages=((self._node, self._http.address),))

    def _view(self, number: int) -> ClusterView:
        return merge_views(self._own_view(number), self._peers.views(number))

    def _describe(self, is_alone: bool) -> Sequence[ClusterView]:
        describe = self._own_view if is_alone else self._view
        views = [describe(number) for number in range(len(self._views))]
        return [_without_owner(view) for view in views]

    def _misses_owner(self) -> bool:
        return any(not self._view(view.shard).route.owner_address for view in self._views)

    async def _watch_view(self, number: int) -> None:
        """Ask a process what it knows of its shard, until cancelled. While it does not answer, what it said holds."""
        child, http = self._children[number], self._https[number]
        ranks = self._views[number].standbys
        while True:
            start = child.starts
            answer = await http.view(_ANSWER_SECONDS)
            if answer is not None and child.starts == start and child.pid:
                self._views[number] = decode_view(answer)._replace(standbys=ranks)
                self._note_told()
            await asyncio.sleep(_VIEW_SECONDS)

    def _note_told(self) -> None:
        """Take what a process or another node has told."""
        self._owners.follow()
        self._told.set()

    def _note_ended(self, number: int) -> None:
        super()._note_ended(number)
        # It follows nothing now, so that no owner hands the shard over to it.
        self._views[number] = self._views[number].of_standby()._replace(progress=(), applied_time_ms=0)
        self._owners.follow()


def _without_owner(view: ClusterView) -> ClusterView:
    """Return a view as it is told: its owner is no standby."""
    return view._replace(standbys=tuple(node for node in view.standbys if node != view.route.owner_node))


def stop_seconds_max(config: BrokerConfig, owned: int, owner_lease_ms: int) -> float:
    """Return the time that a node takes to stop which owns so many shards and follows others, if no process ends.

    What a supervisor of the node is to give it: `terminationGracePeriodSeconds`, `TimeoutStopSec`.
    """
    process_seconds = process_stop_seconds(config)
    return owned * (process_seconds + owner_lease_ms / 1e3) + process_seconds
