"""The folders that an audit reads: a backup, bases in an object store, or the data directory of a stopped broker.

Blocks; changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from broker.cluster.base_store import ATTEMPT
from broker.cluster.base_vfs import open_base_vfs, pin_base
from broker.cluster.stores import is_store_url, open_store
from broker.errors import Corrupt, Fenced, NotFound
from broker.folder.shard_folders import read_shards, refuse_shard_folders, shard_folder
from broker.folder.uploaded_shards import ShardedBackups, part_urls
from broker.runtime.clock import SystemClock
from broker.runtime.vfs import LocalFile, LocalVfs, Vfs
from broker.storage.layout import Layout, is_unused
from broker.topic_shards import ALL_TOPICS, TopicShard

BACKUP, BASE, DATA_DIR = "backup", "base", "data directory"


# A file system in everything else: what cannot be written through a file opened this way is not written at all, and
# a backup may lie on a medium that nobody may write to.
class ReadOnlyVfs(LocalVfs):
    """Opens files for reading only."""

    def open(self, path: str, *, create: bool = False) -> LocalFile:
        if create:
            raise PermissionError(f"nothing is made here ({path})")
        return LocalFile(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))


@dataclass(frozen=True, slots=True)
class Folder:
    """Folder that is audited."""

    path: str
    kind: str  # BACKUP, BASE or DATA_DIR
    vfs: Vfs
    shard: TopicShard = ALL_TOPICS
    whole: str = ""
    """Path of all shards, where there are several."""

    @property
    def layout(self) -> Layout:
        return Layout(self.path)


def pin_folders(path: str) -> list[str]:
    """Return the paths by which every process reads the same: with the names of bases, if it is the URL of a store.

    Of a broker with several shards there is one for each that holds something. Raises NotFound, Refused and Corrupt.
    """
    if is_store_url(path):
        return list(_pin_parts(path)[1])
    vfs = ReadOnlyVfs()
    if not (shards := read_shards(vfs, path)):
        return [path]
    return [shard_folder(path, number) for number in used_shards(vfs, path, shards)]


def _pin_parts(url: str) -> tuple[str, Sequence[str]]:
    """Return the URL of a backup with its name, and that of the base of each shard; without shards both are one."""
    store, _, name = url.partition("#")
    backups = ShardedBackups(open_store(store, ATTEMPT), SystemClock())
    backup = asyncio.run(backups.choose(name))
    if backup is None:
        base = pin_base(url)
        return base, [base]
    return f"{store}#{backup.name}", part_urls(store, backup)


def reading_vfs(root: str, *, anew: bool = False) -> Vfs:
    """The files of a folder whose path is a `Folder`'s, in this process; `anew`: nothing is kept of earlier reads."""
    if not is_store_url(root):
        return ReadOnlyVfs()
    vfs = open_base_vfs(root)
    if anew:
        vfs.forget()
    return vfs


@contextlib.contextmanager
def open_folders(path: str) -> Iterator[list[Folder]]:
    """Hold a folder still as `open_folder` does; of a broker with several shards the whole and each of them.

    Shards in which nothing was ever stored are left out. The URL of an object store means the newest backup there, or
    with `#name` that one. Also raises Refused and Corrupt, if it cannot be told which shards there are.
    """
    if is_store_url(path):
        whole, parts = _pin_parts(path)
        shards = len(parts)
        yield [
            Folder(part, BASE, _open_part(part, number, shards), TopicShard(number, shards), whole)
            for number, part in enumerate(parts)
        ]
        return
    vfs, layout = ReadOnlyVfs(), Layout(path.rstrip("/") or "/")
    shards = read_shards(vfs, path)
    with contextlib.ExitStack() as held:
        if not shards:
            yield [held.enter_context(open_folder(path))]
            return
        if not vfs.exists(layout.backup_marker):
            # The lock of a shard alone is free while its process is down, and would keep it down.
            held.enter_context(_locked(vfs, layout))
            if read_shards(vfs, path) != shards:
                raise _at_work(path)
        yield [
            replace(
                held.enter_context(open_folder(shard_folder(path, number))),
                shard=TopicShard(number, shards),
                whole=path,
            )
            for number in used_shards(vfs, path, shards)
        ]


def _open_part(part: str, number: int, shards: int) -> Vfs:
    try:
        return open_base_vfs(part)
    except (NotFound, Corrupt) as error:
        if shards == 1:
            raise
        raise Corrupt(f"The part of shard {number} cannot be read: {error.message}") from error


def used_shards(vfs: Vfs, data_dir: str, shards: int) -> list[int]:
    """Return the numbers of the shards that hold something; of a backup every shard has its part.

    Raises NotFound if none does.
    """
    if vfs.exists(Layout(data_dir.rstrip("/")).backup_marker):
        return list(range(shards))
    used = [number for number in range(shards) if not is_unused(vfs, Layout(shard_folder(data_dir, number)))]
    if not used:
        raise NotFound(f"Nothing was ever stored in {data_dir!r}")
    return used


@contextlib.contextmanager
def open_folder(path: str, vfs: Vfs | None = None) -> Iterator[Folder]:
    """Hold a folder still. A backup never changes; a data directory is locked, as a broker locks it.

    Raises NotFound for what is none of these, Fenced if a broker or another job is at work there.
    """
    root = path.rstrip("/") or "/"
    layout = Layout(root)
    vfs = vfs or ReadOnlyVfs()
    refuse_shard_folders(vfs, root)
    if is_unused(vfs, layout):
        raise NotFound(f"{path!r} is neither a backup nor a data directory: it contains no files of a broker")
    if vfs.exists(layout.unfinished):
        raise NotFound(f"{path!r} is incomplete: a backup or a restore was interrupted or is still running")
    if vfs.exists(layout.backup_marker):
        yield Folder(root, BACKUP, vfs)
        return
    with _locked(vfs, layout):
        yield Folder(root, DATA_DIR, vfs)


@contextlib.contextmanager
def _locked(vfs: Vfs, layout: Layout) -> Iterator[None]:
    lock = vfs.lock(layout.lock)
    if lock is None:
        raise _at_work(layout.root)
    try:
        yield
    finally:
        lock.close()


def _at_work(path: str) -> Fenced:
    return Fenced(
        f"A broker or another job uses {path!r}: audit a backup of it (`postdate-broker backup create`), or stop it "
        "first",
        reason="DATA_DIR_LOCKED",
    )
