"""One process of a cluster, from its start to its end.

    SEED       no folder, or one that is behind what was trimmed: begin with the newest base (`seeding.py`)
    FOLLOW     a standby (`following.py`); the gRPC port passes calls on to the owner
    TAKE OVER  the standby is closed and its folder opened anew, as after a crash
    OWN        a server as any other, whose lease is what it appends (`owning.py`)

Roles change in this direction only. Who owned a shard and lost it ends with status 1, and whoever supervises the
process starts the next standby. So nothing of an owner is ever made into something of a standby, or the
other way round.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress

from broker.cluster.creation import Cluster, read_cluster
from broker.cluster.follower import CutOff
from broker.cluster.lease import SystemLeaseClock
from broker.cluster.object_group_log import LOG_ATTEMPT
from broker.cluster.object_store import StoreFailed, StoreRefused
from broker.cluster.stores import open_store
from broker.config import BrokerConfig
from broker.errors import StorageFailed, Unavailable
from broker.node.following import Following, Won
from broker.node.member import Member, make_member, member_config, node_name
from broker.node.owning import Owning
from broker.node.seeding import Seeding
from broker.node.standby_ports import StandbyPorts
from broker.observe.logs import get_logger
from broker.rpc.peers import Peers
from broker.runtime.notify import ServiceNotifier
from broker.runtime.supervise import Supervisor
from broker.runtime.vfs import LocalVfs

log = get_logger(__name__)

_STORE_PAUSE_SECONDS = 1.0


class Node:
    """See the module's description."""

    def __init__(
        self,
        config: BrokerConfig,
        cluster: Cluster,
        *,
        shard: int = 0,
        notifier: ServiceNotifier,
        read_config: Callable[[], BrokerConfig] | None = None,
    ) -> None:
        """`config`: the node's settings. Raises ConfigError."""
        self._config = config
        self._cluster = cluster
        self._shard = shard
        self._notifier = notifier
        self._read_config = read_config
        self._store = open_store(config.cluster_store, LOG_ATTEMPT)
        self._stop = asyncio.Event()
        self._supervisor = Supervisor(lambda *_: self._stop.set())
        self._owning: Owning | None = None
        self._ports: StandbyPorts | None = None

    async def run(self) -> int:
        """Take part in the cluster until a signal or a failure; returns the exit status.

        Raises ConfigError, NotFound, Fenced, Corrupt or OSError if this node cannot.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        clock = SystemLeaseClock()
        member = make_member(self._config, self._cluster, self._shard, self._store, clock, LocalVfs())
        # The process of one shard of several has a supervisor that asks other nodes.
        others = {} if self._config.grpc_socket else {name: member.nodes[name] for name in member.others}
        peers = Peers(self._config, member.cluster.id, others)
        peers.start(self._supervisor.spawn_lasting)
        try:
            status = await self._take_part(member, peers)
        finally:
            await self._supervisor.stop()
        return status or int(self._supervisor.failure is not None)

    async def _take_part(self, member: Member, peers: Peers) -> int:
        self._ports = ports = StandbyPorts(member, peers.complete)
        await ports.start(self._supervisor.spawn_lasting)
        self._notifier.tell("READY=1", f"STATUS=Standby of shard {member.shard.number}")
        watchdog = self._supervisor.spawn("service watchdog", self._notifier.keep_alive(lambda: True))
        try:
            won = await self._follow(member, ports)
        finally:
            watchdog.cancel()  # an owner has one of its own
            await ports.stop()
        if won is None:
            return 0
        self._owning = Owning(member, won, self._notifier, self._adapted_config, peers.complete)
        return await self._owning.run(self._stop)

    async def _follow(self, member: Member, ports: StandbyPorts) -> Won | None:
        """Follow until this node owns the shard; None if it is to stop before."""
        seeding = Seeding(member)
        while not self._stop.is_set():
            try:
                ports.following, ports.state = None, "seeding"
                if not await seeding.run(self._stop):
                    return None
                ports.following = Following(member)
                return await ports.following.run(self._stop)
            except CutOff as error:
                seeding.note_cut_off(error)
            except StoreRefused:
                raise
            except StorageFailed:
                raise
            except (StoreFailed, Unavailable) as error:
                ports.following, ports.state = None, "waiting for the object store"
                await _wait_store(self._store.url, error, self._stop)
        return None

    def _reload(self) -> None:
        if self._owning is not None:
            self._owning.reload_soon()
        elif self._ports is not None:
            self._ports.look_now()

    def _adapted_config(self) -> BrokerConfig:
        """Read the settings anew, as the shard's server has them."""
        fresh = self._config if self._read_config is None else self._read_config()
        return member_config(fresh, self._cluster, self._shard)


async def wait_cluster(config: BrokerConfig, notifier: ServiceNotifier) -> Cluster | None:
    """Return the cluster of a node, once its store answers; None if this process is to stop.

    Raises ConfigError, NotFound or Corrupt.
    """
    node_name(config)
    store, stop = open_store(config.cluster_store, LOG_ATTEMPT), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # what there is to read is read afterwards
    notifier.tell("STATUS=Waiting for the object store")
    while not stop.is_set():
        try:
            cluster = await read_cluster(store)
        except StoreRefused:
            raise
        except StoreFailed as error:
            await _wait_store(store.url, error, stop)
        else:
            return None if stop.is_set() else cluster
    return None


async def _wait_store(url: str, error: Exception, stop: asyncio.Event) -> None:
    log.warning("The object store cannot be used yet", url=url, error=str(error))
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), _STORE_PAUSE_SECONDS)
