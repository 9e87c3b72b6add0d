"""Restores of a shard to a point in time: a base from before it, and the groups of the shard's log up to it.

    1  choose the newest base that was made by then, and holds nothing that was stored later
    2  download it, without a root manifest
    3  write the groups that follow it, up to the first that was stored later, as segments of a journal
    4  write the root manifest, of a broker without a cluster, which replays that journal when it starts

The time of a group is that of the wall clock of its owner when its append began (`Head.wall_ms`). A group belongs to
a point in time only together with all before it, so clocks that disagree may leave out some, and never make holes.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial

from broker.cluster.base_manifest import Base, BaseManifest
from broker.cluster.base_store import BaseStore, Tell
from broker.cluster.creation import read_cluster
from broker.cluster.group_head import GroupKind, LogEntry
from broker.cluster.group_objects import Trimmed
from broker.cluster.lease import OwnerLease, SystemLeaseClock
from broker.cluster.object_group_log import ObjectGroupLog
from broker.cluster.object_store import ObjectStore
from broker.cluster.patient_store import PatientReads
from broker.cluster.shard_store import ShardStore
from broker.cluster.take_over import is_void
from broker.errors import Corrupt, NotFound, Refused
from broker.folder.bases import data_paths, read_root
from broker.folder.restore import NewDataDir
from broker.folder.tree_copy import check_room
from broker.runtime.clock import iso_time
from broker.runtime.flight import for_all
from broker.runtime.steps import run_step
from broker.runtime.vfs import Vfs
from broker.storage.layout import Layout
from broker.storage.manifest import BrokerImage, decode_topic
from broker.storage.segment_writer import SegmentWriter

_AT_ONCE = 16
_FIRST_OF_AN_OWNER = 2
"""The lsn behind the first group of a log, which has no time: without it there is nothing to restore."""


@dataclass(frozen=True, slots=True)
class Point:
    """The end of what was restored."""

    lsn: int
    wall_ms: int
    """Time of the last group; 0 if there was none after the base."""

    base: Base | None
    """None: the log was replayed from its beginning."""


@dataclass(frozen=True, slots=True)
class _Start:
    """A base, and what of the log must follow it for its files to agree with each other."""

    manifest: BaseManifest | None
    root: BrokerImage
    needed_to_lsn: int

    @property
    def from_lsn(self) -> int:
        return self.root.checkpoint_lsn + 1


class PointInTime:
    """A restore of the shard whose log and bases are given, to a time."""

    def __init__(
        self,
        group_log: ObjectGroupLog,
        bases: BaseStore,
        to_ms: int,
        *,
        executor: Executor | None = None,
        tell: Tell = lambda count: None,
    ) -> None:
        self._log = group_log
        self._bases = bases
        self._to_ms = to_ms
        self._executor = executor
        self._tell = tell

    async def restore(self, vfs: Vfs, data_dir: str, broker_id: str) -> Point:
        """Make a data directory. Raises NotFound if neither bases nor log reach to the time, and as `restore_base`."""
        await self._log.open(1, 0)
        start = await self._choose()
        target = NewDataDir(vfs, data_dir)
        held = contextlib.ExitStack()
        try:
            await run_step(self._executor, lambda: held.enter_context(target.being_made()))
            byte_count = self._log.stored_bytes
            if start.manifest is not None:
                byte_count += start.manifest.base.bytes
            await run_step(self._executor, lambda: check_room(vfs, target.layout.root, byte_count, 0))
            if start.manifest is not None:
                paths = data_paths(start.manifest)
                await self._bases.download(vfs, start.manifest, paths, target.layout.root, self._tell)
            point = await self._write_journal(vfs, target.layout, start)
            alive_ms = max(start.root.last_alive_ms, point.wall_ms)
            root = replace(start.root, shard="", epoch=0, last_alive_ms=alive_ms)
            await run_step(self._executor, lambda: target.finish(root, broker_id))
        finally:
            await run_step(self._executor, held.close)
        return point

    async def _choose(self) -> _Start:
        """Return the newest base that holds nothing from after the time, or the beginning of the log."""
        later: list[Base] = []
        for base in sorted((stored.base for stored in await self._bases.bases()), key=_by_name, reverse=True):
            if base.create_time_ms <= self._to_ms:
                start = await self._read_start(base)
                try:
                    if await self._is_in_time(start):
                        return start
                except Trimmed as error:
                    raise self._too_early(later) from error
            later.append(base)
        beginning = _Start(None, BrokerImage("", 0, {}, 1, 1, 0), _FIRST_OF_AN_OWNER)
        with contextlib.suppress(Trimmed):
            if await self._is_in_time(beginning):
                return beginning
        raise self._too_early(later)

    def _too_early(self, later: list[Base]) -> NotFound:
        """Return the error for a time of which the log is gone; `later` are the bases that came after it."""
        since = f"; it can be restored to {iso_time(later[-1].create_time_ms)} and later" if later else ""
        return NotFound(
            f"{self._bases.url} no longer contains the state at {iso_time(self._to_ms)}{since}",
            reason="BACKUP_NOT_FOUND",
        )

    async def _read_start(self, base: Base) -> _Start:
        manifest = await self._bases.read_manifest(base.name)
        root = await read_root(self._bases, manifest)
        needed = [root.checkpoint_lsn]

        async def read_topic(topic_id: int) -> None:
            path = Layout("").topic_manifest(topic_id).lstrip("/")
            image = decode_topic(await self._bases.read_file(manifest, path), f"{base.name}/{path}")
            needed.append(image.applied_lsn)

        await for_all(iter(root.topics), read_topic, _AT_ONCE)
        return _Start(manifest, root, max(needed))

    async def _is_in_time(self, start: _Start) -> bool:
        """Return whether all that the files of a base hold was stored by the time. Raises Trimmed, Corrupt."""
        lsn = start.root.checkpoint_lsn
        if lsn and not await self._was_stored_in_time(lsn):
            return False  # the clock of who made the base was behind
        async with contextlib.aclosing(self._entries_in_time(start.from_lsn)) as entries:
            async for entry in entries:
                lsn = entry.next_index - 1
                # Take-overs are never trimmed; the oldest other group that is there has all later ones behind it.
                if lsn >= start.needed_to_lsn and entry.head.kind is not GroupKind.TAKE_OVER:
                    return True
        return lsn >= start.needed_to_lsn

    async def _was_stored_in_time(self, lsn: int) -> bool:
        """Return whether the group that holds an lsn was stored by the time; also if it was trimmed."""
        with contextlib.suppress(Trimmed):
            async with contextlib.aclosing(self._log.entries(lsn)) as entries:
                async for entry in entries:
                    return entry.head.wall_ms <= self._to_ms
        return True

    async def _entries_in_time(self, from_lsn: int) -> AsyncGenerator[LogEntry, None]:
        """Yield the groups from an lsn on, up to the first that was stored after the time."""
        epoch = 0
        async with contextlib.aclosing(self._log.entries(from_lsn)) as entries:
            async for entry in entries:
                if is_void(entry.head.epoch, epoch):
                    lsn = entry.head.first_lsn
                    raise Corrupt(f"The group with lsn {lsn} is of an older epoch than the one before it")
                if entry.head.wall_ms > self._to_ms:
                    return
                epoch = entry.head.epoch
                yield entry

    async def _write_journal(self, vfs: Vfs, layout: Layout, start: _Start) -> Point:
        writer = SegmentWriter(vfs, layout.journal)
        lsn, wall_ms = start.root.checkpoint_lsn, 0
        try:
            async with contextlib.aclosing(self._entries_in_time(start.from_lsn)) as entries:
                async for entry in entries:
                    await run_step(self._executor, partial(writer.add, entry.group))
                    lsn, wall_ms = entry.next_index - 1, entry.head.wall_ms
            if lsn < start.from_lsn:
                await run_step(self._executor, lambda: writer.begin(start.from_lsn))
        finally:
            await run_step(self._executor, writer.close)
        await run_step(self._executor, lambda: vfs.sync_dir(layout.journal))
        return Point(lsn, wall_ms, None if start.manifest is None else start.manifest.base)


async def restore_point(
    store: ObjectStore, number: int, to_ms: int, vfs: Vfs, data_dir: str, broker_id: str, *, url: str
) -> str:
    """Restore a shard of the cluster in a store to a time; returns what was restored, in words.

    Raises NotFound if there is no such shard, and as `PointInTime.restore`.
    """
    reads, clock = PatientReads(store), SystemLeaseClock()
    try:
        cluster = await read_cluster(reads)
    except NotFound as error:
        raise await _no_log(BaseStore(store, clock), to_ms, url) from error
    if number >= cluster.shards:
        raise NotFound(
            f"The cluster in {url} has shards 0 to {cluster.shards - 1}", reason="BACKUP_NOT_FOUND"
        )
    group_log = ObjectGroupLog(reads, cluster.shard(number), "", OwnerLease(clock, cluster.owner_lease_ms))
    bases = BaseStore(ShardStore(store, number), clock)
    point = await PointInTime(group_log, bases, to_ms).restore(vfs, data_dir, broker_id)
    if point.base is None:
        return (
            f"shard {number} as of lsn {point.lsn}, {iso_time(point.wall_ms)}, from the beginning of its log"
        )
    until = iso_time(max(point.base.create_time_ms, point.wall_ms))
    return (
        f"shard {number} as of lsn {point.lsn}, {until}, from base {point.base.name} of lsn {point.base.lsn}"
    )


async def refuse_cluster(store: ObjectStore, url: str) -> None:
    """Raise Refused if a store holds a cluster: without a time nobody knows what of it to restore."""
    try:
        await read_cluster(PatientReads(store))
    except NotFound:
        return
    raise Refused(
        f"{url} contains a cluster: give the time to restore it to with --to TIME",
        reason="BASE_OF_A_SHARD",
    )


async def _no_log(bases: BaseStore, to_ms: int, url: str) -> NotFound:
    """Return the error for a store without a cluster, with the backup that comes nearest."""
    before = [stored.base for stored in await bases.bases() if stored.base.create_time_ms <= to_ms]
    newest = max(before, key=lambda base: base.create_time_ms, default=None)
    nearest = (
        f"and none of them is as old as {iso_time(to_ms)}"
        if newest is None
        else f"by name: the newest before {iso_time(to_ms)} is {url}#{newest.name}"
    )
    return NotFound(
        f"{url} contains no cluster, so there is no journal of the changes between backups. Only backups can be "
        f"restored, {nearest}",
        reason="CLUSTER_NOT_FOUND",
    )


def _by_name(base: Base) -> str:
    return base.name
