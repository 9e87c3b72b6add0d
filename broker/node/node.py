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
from dataclasses import replace

from broker.cluster.creation import Cluster, read_cluster
from broker.cluster.follower import CutOff
from broker.cluster.lease import SystemLeaseClock
from broker.cluster.object_group_log import LOG_ATTEMPT
from broker.cluster.object_store import StoreFailed, StoreRefused
from broker.cluster.stores import open_store
from broker.config import BrokerConfig
from broker.errors import StorageFailed, Unavailable
from broker.node.following import Following, Won
from broker.node.member import Member, make_member, node_name
from broker.node.owning import Owning
from broker.node.seeding import Seeding
from broker.node.standby_face import StandbyFace
from broker.observe.logs import get_logger
from broker.runtime.notify import ServiceNotifier
from broker.runtime.vfs import LocalVfs

log = get_logger(__name__)

_STORE_PAUSE_SECONDS = 1.0


class Node:
    """See the module's description."""

    def __init__(
        self,
        config: BrokerConfig,
        *,
        notifier: ServiceNotifier,
        read_config: Callable[[], BrokerConfig] | None = None,
    ) -> None:
        """Raises ConfigError."""
        node_name(config)
        self._config = config
        self._notifier = notifier
        self._read_config = read_config
        self._store = open_store(config.cluster_store, LOG_ATTEMPT)
        self._stop = asyncio.Event()
        self._owning: Owning | None = None
        self._face: StandbyFace | None = None

    async def run(self) -> int:
        """Take part in the cluster until a signal or a failure; returns the exit status.

        Raises ConfigError, NotFound, Fenced, Corrupt or OSError if this node cannot.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        self._notifier.tell("STATUS=Waiting for the object store")
        cluster = await self._read_cluster()
        if cluster is None:
            return 0
        member = make_member(self._config, cluster, self._store, SystemLeaseClock(), LocalVfs())
        self._face = face = StandbyFace(member)
        await face.start()
        self._notifier.tell("READY=1", f"STATUS=Standby of shard {member.shard.number}")
        watchdog = loop.create_task(self._notifier.keep_alive(lambda: True))
        try:
            won = await self._follow(member, face)
        finally:
            await face.stop()
        if won is None:
            return 0
        self._owning = Owning(member, won, self._notifier, self._adapted_config)
        watchdog.cancel()
        return await self._owning.run(self._stop)

    async def _read_cluster(self) -> Cluster | None:
        """Return the cluster, once the store answers; None if this process is to stop."""
        while not self._stop.is_set():
            try:
                return await read_cluster(self._store)
            except StoreRefused:
                raise
            except StoreFailed as error:
                await self._wait_store(error)
        return None

    async def _follow(self, member: Member, face: StandbyFace) -> Won | None:
        """Follow until this node owns the shard; None if it is to stop before."""
        seeding = Seeding(member)
        while not self._stop.is_set():
            try:
                face.following, face.state = None, "seeding"
                if not await seeding.run(self._stop):
                    return None
                face.following = Following(member)
                return await face.following.run(self._stop)
            except CutOff as error:
                seeding.note_cut_off(error)
            except StoreRefused:
                raise
            except StorageFailed:
                raise
            except (StoreFailed, Unavailable) as error:
                face.following, face.state = None, "waiting for the object store"
                await self._wait_store(error)
        return None

    async def _wait_store(self, error: Exception) -> None:
        log.warning("The object store cannot be used yet", url=self._store.url, error=str(error))
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), _STORE_PAUSE_SECONDS)

    def _reload(self) -> None:
        if self._owning is not None:
            self._owning.reload_soon()
        elif self._face is not None:
            self._face.look_now()

    def _adapted_config(self) -> BrokerConfig:
        """Read the settings anew, as the shard's server has them."""
        fresh = self._config if self._read_config is None else self._read_config()
        return replace(fresh, data_dir=f"{fresh.data_dir.rstrip('/')}/shards/0")
