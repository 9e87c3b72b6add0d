"""Backups of a broker with several shards: a folder with a backup of each, which counts as a whole or not at all.

    <backups>/shard-<number>/<name>   where a shard makes its part
    <backups>/<name>.partial          parts that were moved together; removed by the next backup
    <backups>/<name>                  shard-<number>/ of each shard, shards.json, and backup.json, which is written last

No cut through all shards is needed: no record spans two of them. Everything blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from broker.errors import NotFound
from broker.folder.backup import PARTIAL, backup_running, free_name, lock_backups, read_markers
from broker.folder.shard_folders import shard_folder, write_shards
from broker.runtime.vfs import Vfs, replace_file
from broker.storage.backup_marker import (
    Backup,
    check_backup_name,
    encode_marker,
    is_backup_name,
    plan_prune,
)
from broker.storage.layout import Layout, remove_tree


class ShardBackups:
    """Backups in one folder. `hold` it for whatever changes it."""

    def __init__(self, vfs: Vfs, folder: str) -> None:
        self._vfs = vfs
        self._folder = folder

    def path(self, name: str) -> str:
        """The folder of a backup."""
        return f"{self._folder}/{name}"

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep others out, and remove what an earlier one left unfinished. Raises Refused while another holds it."""
        lock = lock_backups(self._vfs, self._folder)
        if lock is None:
            raise backup_running()
        try:
            # Who deleted a backup may have been killed before that was durable.
            self._vfs.sync_dir(self._folder)
            for name in self._vfs.list_dir(self._folder):
                if name.endswith(PARTIAL) and is_backup_name(name.removesuffix(PARTIAL)):
                    remove_tree(self._vfs, self.path(name))
            yield
        finally:
            lock.close()

    def list(self) -> list[Backup]:
        """All complete backups, the oldest first."""
        return read_markers(self._vfs, self._folder)

    def free_name(self, now_ms: int, label: str) -> str:
        """Return a name that no backup has."""
        return free_name(self._vfs, self._folder, now_ms, label)

    def assemble(self, backup: Backup, parts: Sequence[str]) -> None:
        """Make a backup of those of the shards, in order; their folders move."""
        vfs, partial = self._vfs, self.path(backup.name) + PARTIAL
        vfs.make_dir(partial)
        for number, part in enumerate(parts):
            vfs.rename(part, shard_folder(partial, number))
        vfs.sync_dir(partial)
        for part in parts:
            vfs.sync_dir(part.rpartition("/")[0])
        write_shards(vfs, partial, len(parts))
        replace_file(vfs, Layout(partial).backup_marker, [encode_marker(backup)])
        vfs.rename(partial, self.path(backup.name))
        vfs.sync_dir(self._folder)

    def delete(self, name: str) -> None:
        """Delete a backup. Raises NotFound."""
        check_backup_name(name)
        path = self.path(name)
        if not self._vfs.exists(path):
            raise NotFound(f"Backup {name!r} does not exist", reason="BACKUP_NOT_FOUND")
        self._vfs.rename(path, path + PARTIAL)  # from here on it is no backup, whatever is left of it
        self._vfs.sync_dir(self._folder)
        remove_tree(self._vfs, path + PARTIAL)

    def prune(self, broker_id: str, now_ms: int, keep_count: int, max_age_ms: int) -> Sequence[str]:
        """Delete those that are too many or too old; returns their names. 0 means no limit."""
        names = plan_prune(self.list(), broker_id, now_ms, keep_count, max_age_ms)
        for name in names:
            self.delete(name)
        return names
