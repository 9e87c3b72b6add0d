"""Restores: a data directory made from a backup, or from a base in an object store. No broker is needed.

    1  make and lock the folder, which must be empty; make `unfinished` in it, durably
    2  copy what the broker will write to (ledgers that still grow, the journal), link or copy the rest, or download
       all of it; sync all
    3  write `broker.manifest`, with a broker_id of its own: from here on it goes another way than the broker it is of
    4  take `unfinished` away, durably

A broker refuses to start while `unfinished` is there, so a crash leaves a folder that says so, or a complete one. A
restore into a folder whose restore was cut begins anew.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace

from broker.errors import Corrupt, Fenced, Refused
from broker.folder.backup import read_marker
from broker.folder.shard_folders import lock_folder, remove_names, shard_folder, write_shards
from broker.folder.tree_copy import Steps, TreeCopy
from broker.runtime.vfs import File, Vfs, replace_file
from broker.storage.backup_marker import Backup
from broker.storage.layout import Layout
from broker.storage.local_group_log import SEGMENT_NAME
from broker.storage.manifest import BrokerImage, decode_broker, encode_broker
from broker.storage.named_files import read_named

_MAY_BE_THERE = frozenset({"lock", "lost+found", "backups"})

_OF_A_RESTORE = re.compile(
    r"journal|topics|alive(\.new)?|broker\.manifest(\.new)?|shard-[0-9]{4}|shards\.json(\.new)?"
)


class NewDataDir:
    """An empty folder on its way to a data directory."""

    def __init__(self, vfs: Vfs, data_dir: str) -> None:
        self._vfs = vfs
        self.layout = Layout(data_dir.rstrip("/") or "/")

    @contextlib.contextmanager
    def being_made(self) -> Iterator[None]:
        """Hold it, marked as unfinished, with nothing in it of an earlier attempt. Raises Refused, Fenced, Corrupt."""
        vfs, target = self._vfs, self.layout
        _check_empty(vfs, target)
        vfs.make_dir(target.root)
        vfs.sync_dir(target.root.rpartition("/")[0] or ".")
        with _locked(vfs, target):
            self._begin()
            yield

    def finish(self, root: BrokerImage, broker_id: str) -> None:
        """Write the root manifest, all else being there and durable: from here on a broker starts in it."""
        vfs, target = self._vfs, self.layout
        replace_file(vfs, target.manifest, [encode_broker(replace(root, broker_id=broker_id))])
        vfs.remove(target.unfinished)
        vfs.sync_dir(target.root)

    def _begin(self) -> None:
        vfs, target = self._vfs, self.layout
        _mark_unfinished(vfs, target)
        make_folders(vfs, target)


class NewShardFolders:
    """An empty folder on its way to the data directory of a broker with several shards."""

    def __init__(self, vfs: Vfs, data_dir: str, shards: int) -> None:
        self._vfs = vfs
        self._target = Layout(data_dir.rstrip("/"))
        self._shards = shards
        self.folders = [shard_folder(self._target.root, number) for number in range(shards)]

    @contextlib.contextmanager
    def being_made(self) -> Iterator[None]:
        """As of `NewDataDir`; the folders of the shards are not there yet."""
        vfs, target = self._vfs, self._target
        _check_empty(vfs, target)
        lock = lock_folder(vfs, target.root)
        try:
            _mark_unfinished(vfs, target)
            yield
        finally:
            lock.close()

    def finish(self) -> None:
        """Say how many shards there are, all of them being whole and durable: from here on a broker starts here."""
        write_shards(self._vfs, self._target.root, self._shards)
        remove_names(self._vfs, self._target.root, ["unfinished"])


def make_folders(vfs: Vfs, target: Layout) -> None:
    """Make the folders in a data directory that is there."""
    vfs.make_dir(target.journal)
    vfs.make_dir(target.topics)
    vfs.sync_dir(target.root)


class Restore:
    """One backup on its way into one data directory."""

    def __init__(
        self, vfs: Vfs, backup_folder: str, data_dir: str, broker_id: str, reserve_bytes: int
    ) -> None:
        """Raises NotFound or Corrupt unless `backup_folder` is a backup; nothing is changed yet."""
        self._vfs = vfs
        self._source = Layout(backup_folder.rstrip("/"))
        self._target = NewDataDir(vfs, data_dir)
        self._broker_id = broker_id
        self.backup: Backup = read_marker(vfs, self._source.root)
        self._copy = TreeCopy(vfs, self._source, self._target.layout, reserve_bytes)

    @property
    def restored_bytes(self) -> int:
        """Linked or copied so far, of about `backup.bytes`."""
        return self._copy.bytes

    def steps(self) -> Steps:
        """Do it, in small steps. Raises Refused, Fenced, Corrupt, LimitReached, OSError."""
        vfs, target = self._vfs, self._target.layout
        root = decode_broker(read_named(vfs, self._source.manifest), self._source.manifest)
        with self._target.being_made():
            yield from self._copy.topics(root)
            for name in vfs.list_dir(self._source.journal):
                if SEGMENT_NAME.fullmatch(name):
                    paths = f"{self._source.journal}/{name}", f"{target.journal}/{name}"
                    yield from self._copy.file(*paths)
            vfs.sync_dir(target.journal)
            if vfs.exists(self._source.alive):
                yield from self._copy.file(self._source.alive, target.alive)
                vfs.sync_dir(target.root)
            self._target.finish(root, self._broker_id)


@contextlib.contextmanager
def _locked(vfs: Vfs, target: Layout) -> Iterator[None]:
    lock: File | None = vfs.lock(target.lock)
    if lock is None:
        raise Fenced(f"A broker or a restore is using {target.root!r}", reason="DATA_DIR_LOCKED")
    try:
        yield
    finally:
        lock.close()


def _mark_unfinished(vfs: Vfs, target: Layout) -> None:
    """Say that a folder is not whole, and remove what an attempt that was cut has left in it."""
    _check_empty(vfs, target)  # again: nobody else changes it now
    if not vfs.exists(target.unfinished):
        file = vfs.open(target.unfinished, create=True)
        file.sync()
        file.close()
    vfs.sync_dir(target.root)
    remove_names(
        vfs, target.root, [name for name in vfs.list_dir(target.root) if _OF_A_RESTORE.fullmatch(name)]
    )


def _check_empty(vfs: Vfs, target: Layout) -> None:
    if not vfs.exists(target.root):
        return
    names = set(vfs.list_dir(target.root)) - _MAY_BE_THERE
    if vfs.exists(target.backup_marker):
        raise Corrupt("The target folder is itself a backup", path=target.root)
    if names and not vfs.exists(target.unfinished):
        raise Refused(
            f"{target.root!r} is not empty: it holds {', '.join(sorted(names)[:5])}. Restore into an empty folder",
            reason="RESTORE_NOT_EMPTY",
        )
