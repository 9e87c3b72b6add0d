"""Backups of brokers with several shards in an object store: a base of each shard, and an object that names them all.

    backups/<name>               names a base of each shard; from when it is there, the backup counts
    parts/<shard>/bases/<name>   bases of each shard by itself, as of a broker without shards, with chunks of its own
    parts/<shard>/chunks/...

Parts are stored first and the object that names them last, so a backup is whole or not there. What an upload that was
killed leaves is used by the next one, or goes as what removed backups leave. Nothing is overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

import google_crc32c

from broker.cluster.base_store import BaseStore, Tell
from broker.cluster.object_store import ObjectStore
from broker.cluster.patient_store import PatientStore
from broker.cluster.shard_store import ShardStore
from broker.errors import Corrupt, NotFound, Refused
from broker.folder.backup import read_marker
from broker.folder.bases import restore_base, upload_backup
from broker.folder.restore import NewShardFolders
from broker.folder.shard_folders import read_shards, shard_folder
from broker.runtime.clock import Clock
from broker.runtime.vfs import Vfs
from broker.storage.backup_marker import is_backup_name, plan_prune
from broker.storage.layout import Layout

_FORMAT = "postdate-sharded-backup"
_BYTES_MAX = 1 << 20
_KEPT_MIN = 2


@dataclass(frozen=True, slots=True)
class ShardedBackup:
    """A backup of all shards of a broker."""

    name: str
    label: str
    broker_id: str
    create_time_ms: int
    topics: int
    bytes: int
    uploaded_bytes: int
    bases: tuple[str, ...]
    """Names of the bases of the shards, in order."""


class ShardUploads:
    """The backups of brokers with several shards under one prefix of an object store."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._objects = store
        self._store = PatientStore(store)
        self._clock = clock

    async def backups(self) -> list[ShardedBackup]:
        """All backups, the oldest first. Raises Corrupt."""
        names = sorted(
            info.name for info in await self._store.objects("backups") if is_backup_name(info.name)
        )
        found = []
        for name in names:
            with suppress(FileNotFoundError):  # removed since it was listed
                found.append(_decode(await self._store.read_range(f"backups/{name}", 0, _BYTES_MAX), name))
        return found

    async def find(self, name: str) -> ShardedBackup:
        """Return the backup of a name, or the newest if the name is empty. Raises NotFound, Corrupt."""
        backups = await self.backups()
        for backup in reversed(backups):
            if name in ("", backup.name):
                return backup
        raise NotFound(f"{self._store.url} has no backup {name!a}", reason="BACKUP_NOT_FOUND")

    async def upload(self, vfs: Vfs, folder: str, tell: Tell = lambda count: None) -> ShardedBackup:
        """Store a backup of several shards. Raises NotFound or Corrupt unless it is one, Unavailable, OSError."""
        root = Layout(folder.rstrip("/")).root
        marker, shards = read_marker(vfs, root), read_shards(vfs, root)
        bases = [
            await upload_backup(self._part(number), vfs, shard_folder(root, number), tell=tell)
            for number in range(shards)
        ]
        backup = ShardedBackup(
            marker.name,
            marker.label,
            marker.broker_id,
            marker.create_time_ms,
            sum(base.topics for base in bases),
            sum(base.bytes for base in bases),
            sum(base.uploaded_bytes for base in bases),
            tuple(base.name for base in bases),
        )
        await self._store.put(f"backups/{backup.name}", _encode(backup))
        return backup

    async def restore(
        self,
        backup: ShardedBackup,
        vfs: Vfs,
        data_dir: str,
        broker_ids: Sequence[str],
        tell: Tell = lambda count: None,
    ) -> None:
        """Make the data directory of a broker with as many shards. Raises as `restore_base` does."""
        parts = [self._part(number) for number in range(len(backup.bases))]
        manifests = [
            await part.read_manifest(name) for part, name in zip(parts, backup.bases, strict=True)
        ]  # before anything is made
        new = NewShardFolders(vfs, data_dir, len(parts))
        with new.being_made():
            for part, manifest, folder, broker_id in zip(
                parts, manifests, new.folders, broker_ids, strict=True
            ):
                await restore_base(part, manifest.base, vfs, folder, broker_id, tell=tell)
            new.finish()

    async def remove(self, name: str) -> None:
        """Remove a backup. Raises NotFound, or Refused for the two newest of a broker."""
        backup = await self.find(name)
        backups = await self.backups()
        own = [each.name for each in backups if each.broker_id == backup.broker_id]
        if backup.name in own[-_KEPT_MIN:]:
            raise Refused(f"The backup {name} stays: a broker's two newest are kept", reason="BACKUP_KEPT")
        await self._store.remove(f"backups/{backup.name}")  # from here on it is none
        await self._sweep(backups)

    async def prune(self, broker_id: str, keep_count: int, max_age_ms: int) -> list[str]:
        """Remove a broker's backups that are too many or too old, never its two newest; returns their names."""
        backups = await self.backups()
        kept = [each.name for each in backups if each.broker_id == broker_id][-_KEPT_MIN:]
        pruned = plan_prune(backups, broker_id, self._clock.now_ms(), keep_count, max_age_ms)
        names = [name for name in pruned if name not in kept]
        for name in names:
            await self._store.remove(f"backups/{name}")
        await self._sweep(backups)
        return names

    def _part(self, number: int) -> BaseStore:
        return BaseStore(ShardStore(self._objects, number, "parts"), self._clock)

    async def _sweep(self, before: Sequence[ShardedBackup]) -> None:
        """Remove the bases that no backup names: of backups that are gone, and of uploads that were killed.

        `before`: all backups before some were removed. What an upload under way may build on stays until a later call.
        """
        named = {part for backup in await self.backups() for part in enumerate(backup.bases)}
        for number in range(max((len(backup.bases) for backup in before), default=0)):
            part = self._part(number)
            for name in await part.names():
                if (number, name) not in named:
                    with suppress(NotFound, Refused):
                        await part.remove(name)


def _encode(backup: ShardedBackup) -> bytes:
    content = {"format": _FORMAT, "version": 1, **asdict(backup), "bases": list(backup.bases)}
    return json.dumps({**content, "crc32c": _crc(content)}, sort_keys=True).encode() + b"\n"


def _decode(data: bytes, name: str) -> ShardedBackup:
    """Any bytes give a backup or Corrupt."""
    try:
        content = json.loads(data)
        crc, kind, version = (content.pop(key) for key in ("crc32c", "format", "version"))
        backup = ShardedBackup(**{**content, "bases": tuple(content["bases"])})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(name) from error
    whole = {"format": kind, "version": version, **content}
    if (kind, crc, backup.name) != (_FORMAT, _crc(whole), name):
        raise _damaged(name)
    if version != 1:
        raise Corrupt(
            f"The backup {name} has version {version}, which is newer than this", path=f"backups/{name}"
        )
    return backup


def _damaged(name: str) -> Corrupt:
    return Corrupt("The object that names the parts of a backup is damaged", path=f"backups/{name}")


def _crc(content: dict[str, object]) -> int:
    plain = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return int(google_crc32c.value(plain))
