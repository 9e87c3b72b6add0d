"""An object store in a folder of a local file system, for trying things out and for backups to a disk.

    <root>/<name>              an object, of which no byte changes once it has its name
    <root>/<folder>/.new-<id>  an object before it has its name; what a crash leaves behind is removed a day later

`create` writes such a file, syncs it and gives it its name by a hard link, which a local file system does for one of
all who try. A network file system may not: it is no such store.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from broker.cluster.object_store import ObjectInfo, StoreFailed, StoreRefused, check_name, is_name
from broker.runtime.steps import run_step
from broker.runtime.vfs import Buffer, LocalVfs, Vfs, WriteFailed, read_file

T = TypeVar("T")

_PAGE = 1000
_NEW = ".new-"
_LEFT_OVER_MS = 86_400_000


def _modified_ms(path: str) -> int:
    return os.stat(path, follow_symlinks=False).st_mtime_ns // 1_000_000


class FileStore:
    """Objects as files. Its calls run in a thread, each to its end."""

    def __init__(
        self,
        root: str,
        *,
        vfs: Vfs | None = None,
        executor: Executor | None = None,
        modified_ms: Callable[[str], int] = _modified_ms,
    ) -> None:
        self._root = root.rstrip("/") or "/"
        self._vfs = vfs or LocalVfs()
        self._executor = executor
        self._modified_ms = modified_ms
        self._folders: set[str] = set()  # that are there, durably
        self._tidied: set[str] = set()
        self._failed = False

    @property
    def url(self) -> str:
        return f"file://{self._root}"

    async def create(self, name: str, body: Buffer) -> None:
        await self._run(lambda: self._create(self._path(name), body))

    async def read(self, name: str) -> bytes:
        return await self._run(lambda: read_file(self._vfs, self._path(name)))

    async def read_range(self, name: str, start: int, length: int) -> bytes:
        return await self._run(lambda: self._read_range(self._path(name), start, length))

    async def info(self, name: str) -> ObjectInfo:
        return await self._run(lambda: self._info(name))

    async def objects(self, folder: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        names = await self._run(lambda: sorted(name for name in self._walk(folder) if name > after))
        for first in range(0, len(names), _PAGE):
            page = names[first : first + _PAGE]
            for info in await self._run(partial(self._infos, page)):
                yield info

    async def remove(self, name: str) -> None:
        await self._run(lambda: self._remove(self._path(name)))

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await run_step(self._executor, work)
        except FileNotFoundError as error:
            if await run_step(self._executor, lambda: self._vfs.exists(self._root)):
                raise
            raise StoreRefused(
                f"Folder {self._root} does not exist: create it, or mount its file system"
            ) from error

    def _path(self, name: str) -> str:
        check_name(name)
        return f"{self._root}/{name}"

    def _create(self, path: str, body: Buffer) -> None:
        self._check_syncs()
        folder = path.rpartition("/")[0]
        self._make_folder(folder)
        aside = f"{folder}/{_NEW}{uuid.uuid4().hex}"
        file = self._vfs.open(aside, create=True)
        try:
            try:
                file.pwrite([body], 0)
                file.sync()
            except WriteFailed as error:  # in doubt is a file without a name, which nobody will read
                raise StoreFailed(error.errno, error.strerror, path) from error
            # Also of a name that was there: an earlier attempt of ours may have failed between link and sync.
            with contextlib.ExitStack() as at_end:
                at_end.callback(self._sync_folder, folder)
                self._vfs.link(aside, path)
            self._tidy(folder, aside)
        finally:
            file.close()
            self._vfs.remove(aside)

    def _tidy(self, folder: str, aside: str) -> None:
        """Remove, once, what those left behind who were killed while they stored something in a folder."""
        if folder in self._tidied:
            return
        self._tidied.add(folder)
        with contextlib.suppress(OSError):  # it lies there until the next time
            now_ms = self._modified_ms(aside)
            for name in self._vfs.list_dir(folder):
                path = f"{folder}/{name}"
                if name.startswith(_NEW) and now_ms - self._modified_ms(path) >= _LEFT_OVER_MS:
                    self._vfs.remove(path)

    def _sync_folder(self, folder: str) -> None:
        try:
            self._vfs.sync_dir(folder)
        except WriteFailed as error:
            self._failed = True  # a later sync would vouch for names that the system has dropped
            raise StoreFailed(error.errno, error.strerror, folder) from error

    def _check_syncs(self) -> None:
        if self._failed:
            raise StoreRefused(f"A folder of {self.url} could not be synced: check the disk, then restart")

    def _make_folder(self, folder: str) -> None:
        if folder in self._folders:
            return
        parent = folder.rpartition("/")[0]
        if folder != self._root:
            self._make_folder(parent)
            self._vfs.make_dir(folder)
            self._sync_folder(parent)
        self._folders.add(folder)

    def _read_range(self, path: str, start: int, length: int) -> bytes:
        file = self._vfs.open(path)
        try:
            return file.pread(length, start)
        finally:
            file.close()

    def _info(self, name: str) -> ObjectInfo:
        path = self._path(name)
        file = self._vfs.open(path)
        try:
            return ObjectInfo(name, file.size(), self._modified_ms(path))
        finally:
            file.close()

    def _infos(self, names: list[str]) -> list[ObjectInfo]:
        infos = []
        for name in names:
            try:
                infos.append(self._info(name))
            except FileNotFoundError:  # removed since it was listed
                pass
            except OSError as error:
                if error.errno != errno.ELOOP:  # a symbolic link, which is no object
                    raise
        return infos

    def _walk(self, folder: str) -> Iterator[str]:
        """Names of the objects in a folder and below it."""
        try:
            entries = self._vfs.list_dir(f"{self._root}/{folder}" if folder else self._root)
        except FileNotFoundError:
            if not self._vfs.exists(self._root):
                raise
            return
        for entry in entries:
            name = f"{folder}/{entry}" if folder else entry
            if not is_name(name):  # not stored by us
                continue
            try:
                yield from self._walk(name)
            except NotADirectoryError:
                yield name

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._vfs.remove(path)
            self._sync_folder(path.rpartition("/")[0])
