"""The bases of a shard: new nodes begin with the newest one, and the log is trimmed behind the second newest.

    make   a checkpoint, second names for its files, their upload (`cluster/base_store.py`), then the trim
    seed   an empty folder, marked unfinished, gets the files of the newest base that can be used

A base is made by whoever first finds the newest one old. Standbys are more impatient than the owner, the first among
them most, so that usually it is made where no client waits. The log is trimmed behind
the second newest base (CLUSTER-17); a base goes a day after two newer ones are there.
"""

from __future__ import annotations

import asyncio

from broker.cluster.base_manifest import Base, base_lsn
from broker.cluster.base_plan import StoredBase
from broker.cluster.base_store import BaseCut, BaseStore
from broker.cluster.group_head import Shard
from broker.cluster.object_group_log import ObjectGroupLog
from broker.cluster.shard_log import shard_name
from broker.errors import Corrupt, NotFound, PostdateError
from broker.folder.bases import restore_base
from broker.folder.broker import Broker
from broker.observe.logs import get_logger
from broker.runtime.clock import Clock
from broker.runtime.steps import run_step
from broker.runtime.vfs import Vfs
from broker.storage.layout import Layout, remove_tree

log = get_logger(__name__)

_BASE_BYTES = 2 << 30
"""Log after which a base is made, however young the newest one is."""

_KEPT = 2
_LOOK_SECONDS = 60.0
_RETRY_SECONDS = 60.0


class ShardBases:
    """The bases of one shard, as one of its nodes sees them."""

    def __init__(
        self, bases: BaseStore, shard: Shard, vfs: Vfs, clock: Clock, node: str, *, interval_ms: int
    ) -> None:
        self._bases = bases
        self._broker_id = shard_name(shard).broker_id
        self._vfs = vfs
        self._clock = clock
        self._node = node
        self._interval_ms = interval_ms
        self.newest: Base | None = None
        """As of the last look."""

    @property
    def age_ms(self) -> int:
        """Return the age of the newest base; 0 if none is known."""
        return max(self._clock.now_ms() - self.newest.create_time_ms, 0) if self.newest is not None else 0

    async def trimmed_below(self) -> int:
        """Return the index below which the log may be trimmed: the older of the two newest bases goes on with it.

        0 where there are not two. Also of bases that cannot be read here, as they are damaged or of a later version:
        other nodes may trim behind them.
        """
        indexes = sorted(base_lsn(name) + 1 for name in await self._bases.names())
        return indexes[-_KEPT] if len(indexes) >= _KEPT else 0

    async def names(self) -> frozenset[str]:
        """Return the names of all bases, also of those that cannot be used here."""
        return frozenset(await self._bases.names())

    async def seed(self, data_dir: str) -> bool:
        """Make a folder anew from the newest base that can be used; returns False, and leaves it empty, without one."""
        own = await self._look()
        for base in [stored.base for stored in reversed(own)]:
            await self._empty(data_dir)
            log.info(
                "Building the data directory from a base", data_dir=data_dir, base=base.name, bytes=base.bytes
            )
            try:
                await restore_base(self._bases, base, self._vfs, data_dir, self._broker_id)
            except (Corrupt, NotFound) as error:
                log.warning(
                    "A base cannot be used; trying the previous one", base=base.name, error=error.message
                )
                continue
            return True
        await self._empty(data_dir)
        return False

    async def _empty(self, data_dir: str) -> None:
        if self._vfs.exists(data_dir):
            await run_step(None, lambda: _remove_folder(self._vfs, data_dir))

    async def keep(self, broker: Broker, group_log: ObjectGroupLog, *, patience: float) -> None:
        """Make a base whenever the newest one is `patience` times as old as it shall be, until cancelled."""
        bytes_before, known = broker.journal.appended_bytes, self.newest
        while True:
            await asyncio.sleep(min(_LOOK_SECONDS, self._interval_ms / 4e3))
            if not group_log.epoch:
                continue  # nobody has owned the shard yet
            try:
                await self._look()
                if self.newest != known:  # somebody else may have made it
                    bytes_before, known = broker.journal.appended_bytes, self.newest
                log_bytes = broker.journal.appended_bytes - bytes_before
                is_young = self.newest is not None and self.age_ms < self._interval_ms * patience
                if not is_young or log_bytes >= _BASE_BYTES * patience:
                    await self.make(broker, group_log)
            except (OSError, PostdateError) as error:
                log.warning(
                    "A base could not be made; the journal is not trimmed until one is", error=str(error)
                )
                await asyncio.sleep(_RETRY_SECONDS)

    async def make(self, broker: Broker, group_log: ObjectGroupLog) -> Base:
        """Store a base of a broker's folder, and trim the log. Raises OSError, Unavailable."""
        async with broker.pinned() as (pins, root):
            cut = BaseCut(
                tag=self._node,
                label="",
                broker_id=self._broker_id,
                create_time_ms=self._clock.now_ms(),
                lsn=root.checkpoint_lsn,
                topics=len(root.topics),
            )
            base = await self._bases.upload(self._vfs, pins, cut)
        log.info("A base was stored", base=base.name, bytes=base.bytes, uploaded_bytes=base.uploaded_bytes)
        own = await self._look()
        if len(own) >= _KEPT:
            await group_log.trim(own[-_KEPT].base.lsn + 1)
        await self._bases.prune(self._broker_id, _KEPT, 0)
        return base

    async def _look(self) -> list[StoredBase]:
        """Return the bases of this shard, by lsn."""
        own = [stored for stored in await self._bases.bases() if stored.base.broker_id == self._broker_id]
        own.sort(key=lambda stored: stored.base.name)
        self.newest = own[-1].base if own else None
        return own


def _remove_folder(vfs: Vfs, data_dir: str) -> None:
    """Remove a folder, its root first: what a crash leaves of it is not taken for a folder to begin with. Blocks."""
    layout = Layout(data_dir)
    if vfs.exists(layout.manifest):
        vfs.remove(layout.manifest)
    vfs.sync_dir(layout.root)  # also where a process did so that was killed before the sync
    remove_tree(vfs, data_dir)


def needs_seed(vfs: Vfs, data_dir: str) -> bool:
    """Return whether a folder is not there, or not whole. Blocks."""
    layout = Layout(data_dir)
    return not vfs.exists(layout.manifest) or vfs.exists(layout.unfinished)
