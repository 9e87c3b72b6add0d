"""Backups of brokers with several shards in an object store, made, restored and removed.

Parts are stored first and the object that names them last, so a backup is whole or not there. What an upload that was
killed leaves is used by the next one, or goes as what removed backups leave. Nothing is overwritten. What lies where:
`uploaded_shards.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from broker.cluster.base_manifest import OtherVersion
from broker.cluster.base_store import Tell
from broker.errors import Corrupt, NotFound, Refused
from broker.folder.backup import read_marker
from broker.folder.bases import restore_base, upload_backup
from broker.folder.restore import NewShardFolders
from broker.folder.shard_folders import read_shards, shard_folder
from broker.folder.uploaded_shards import ShardedBackup, ShardedBackups, encode_backup
from broker.runtime.vfs import Vfs
from broker.storage.backup_marker import plan_prune
from broker.storage.layout import Layout

_KEPT_MIN = 2


class ShardUploads(ShardedBackups):
    """Makes, restores and removes the backups under one prefix of an object store."""

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
        await self._store.put(f"backups/{backup.name}", encode_backup(backup))
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
        """Remove a backup. Raises NotFound, or Refused for the two newest of a broker, unless it is damaged."""
        backups = await self.backups()
        try:
            backup = await self.find(name)
        except OtherVersion:
            raise
        except Corrupt:  # nobody can restore it, and nothing can be swept while it is there
            await self._store.remove(f"backups/{name}")
            await self._sweep(backups)
            return
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

    async def _sweep(self, before: Sequence[ShardedBackup]) -> None:
        """Remove the bases that no backup names: of backups that are gone, and of uploads that were killed.

        `before`: all backups before some were removed. What an upload under way may build on stays until a later call.
        """
        backups, unread = await self._read_all()
        if unread:  # it could name any base
            raise Corrupt(
                f"{unread[0].message} No parts of backups are removed from {self._store.url} while it is there. If it "
                "can be done without, delete it: postdate-broker backup delete 'URL#NAME'"
            )
        named = {part for backup in backups for part in enumerate(backup.bases)}
        for number in range(max((len(backup.bases) for backup in before), default=0)):
            part = self._part(number)
            for name in await part.names():
                if (number, name) not in named:
                    with suppress(NotFound, Refused):
                        await part.remove(name)
