"""All file access. The broker opens, renames and removes files through a `Vfs` and in no other way, so that
the tests can record every write, sync and rename, and reopen the broker at each of them.

Every call blocks. Callers on the event loop hand the call to the file thread.

A write or a sync that fails raises `WriteFailed`: what is on disk is unknown then, and nothing may be written after it.
Every other call that fails has changed nothing, and may be tried again (`runtime.patience`).

What a crash leaves behind (and `MemVfs` reproduces):
  - bytes written but not synced may be kept, lost, torn or zero, in any order;
  - a name made, renamed or removed is durable only after `sync_dir` of its directory;
  - a file whose `sync` returned has its bytes and length, but perhaps no name yet.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from typing import Protocol

from broker.runtime.spare_files import SpareDescriptors

Buffer = bytes | bytearray | memoryview

_IOV_MAX = 1024
_COPY_BYTES = 1 << 20
_NO_FLAGS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
_NO_COPY_RANGE = frozenset({errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM})


class WriteFailed(OSError):
    """Bytes could not be written, or a sync failed: nobody knows what is on disk. Never tried again."""


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WriteFailed(error.errno, error.strerror, path) from error


class File(Protocol):
    """An open file. Offsets and lengths are bytes."""

    @property
    def path(self) -> str: ...

    def size(self) -> int: ...

    def pread(self, length: int, offset: int) -> bytes:
        """At most `length` bytes; fewer only at the end of the file."""

    def pread_nowait(self, length: int, offset: int) -> bytes | None:
        """As `pread`, or None if it would have to wait for the disk: the one read that the event loop may do."""

    def read_ahead(self, begins: Sequence[int], ends: Sequence[int]) -> None:
        """Have the system read ranges at once that `pread` will be asked for: a hint, whose failure does nothing."""

    def pwrite(self, parts: Sequence[Buffer], offset: int) -> None:
        """Write all parts, one after the other, at `offset`; raises WriteFailed unless every byte was taken."""

    def pwrite_synced(self, parts: Sequence[Buffer], offset: int) -> None:
        """As `pwrite`, and return once these bytes are on disk, with the length that they give the file."""

    def copy_from(self, source: File, length: int, offset: int) -> None:
        """Write what `source` holds at `offset` to the same place; raises OSError unless all of it was there."""

    def truncate(self, length: int) -> None:
        """Cut the file, or make it longer by zeros; raises WriteFailed, and only the length is in doubt then."""

    def sync(self) -> None:
        """Return once bytes and length are on disk (`fdatasync`). WriteFailed: nothing is known; stop writing."""

    def close(self) -> None: ...


class Vfs(Protocol):
    """A file system. Paths are strings with `/`; directories must exist before files are made in them."""

    def open(self, path: str, *, create: bool = False) -> File:
        """Open for reading and writing. With `create` the file must not exist yet, else it must.

        Raises FileNotFoundError, FileExistsError, OSError. Symbolic links are not followed. On a file system that
        is mounted read-only, files can be opened and read; writing to them fails.
        """

    def exists(self, path: str) -> bool: ...

    def list_dir(self, path: str) -> list[str]:
        """Names in a directory, sorted; an absent directory is FileNotFoundError."""

    def make_dir(self, path: str) -> None:
        """Make a directory if it is not there; its parent must be. Not durable before `sync_dir(parent)`."""

    def remove_dir(self, path: str) -> None:
        """Remove an empty directory."""

    def rename(self, source: str, target: str) -> None:
        """Atomic, replaces `target`. Not durable before `sync_dir`."""

    def link(self, source: str, target: str) -> None:
        """Give a file a second name, which must not be taken. Not durable before `sync_dir`.

        Raises OSError, with EXDEV if the names lie on different file systems.
        """

    def remove(self, path: str) -> None: ...

    def sync_dir(self, path: str) -> None:
        """Return once every name made, renamed or removed in this directory so far is durable.

        Raises WriteFailed if the sync fails, another OSError if the directory cannot be opened for it.
        """

    def free_bytes(self, path: str) -> int:
        """Bytes that can still be written on the file system that holds `path`."""

    def lock(self, path: str) -> File | None:
        """Hold `path` exclusively until the returned file is closed; None if another process holds it."""


class LocalFile:
    """A file of the operating system."""

    def __init__(self, path: str, fd: int) -> None:
        self._path = path
        self._fd = fd
        self._takes_flag: bool | None = None  # to sync what is written; None until the system has shown it

    @property
    def path(self) -> str:
        return self._path

    def fileno(self) -> int:
        return self._fd

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def pread(self, length: int, offset: int) -> bytes:
        block = os.pread(self._fd, length, offset)
        if len(block) == length or not block:
            return block
        parts = [block]
        missing = length - len(block)
        while missing and (block := os.pread(self._fd, missing, offset + length - missing)):
            parts.append(block)
            missing -= len(block)
        return b"".join(parts)

    def pread_nowait(self, length: int, offset: int) -> bytes | None:
        block = bytearray(length)
        try:
            count = os.preadv(self._fd, [block], offset, os.RWF_NOWAIT)
        except OSError:  # not in memory, or a file system that cannot tell: whoever waits for it finds out
            return None
        return bytes(block) if count == length else None

    def read_ahead(self, begins: Sequence[int], ends: Sequence[int]) -> None:
        with contextlib.suppress(OSError):
            for begin, end in zip(begins, ends, strict=True):
                os.posix_fadvise(self._fd, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def pwrite(self, parts: Sequence[Buffer], offset: int) -> None:
        for first in range(0, len(parts), _IOV_MAX):
            chunk = list(parts[first : first + _IOV_MAX])
            length = sum(len(part) for part in chunk)
            with _writing(self._path):
                done = os.pwritev(self._fd, chunk, offset)
                if done < length:  # a short write: finish it, or fail with the error that cut it short
                    rest = memoryview(b"".join(chunk))
                    while done < length:
                        done += os.pwrite(self._fd, rest[done:], offset + done)
            offset += length

    def pwrite_synced(self, parts: Sequence[Buffer], offset: int) -> None:
        # In one call, where the system takes all of it.
        if self._takes_flag is not False and len(parts) <= _IOV_MAX:
            try:
                done = os.pwritev(self._fd, parts, offset, os.RWF_DSYNC)
            except OSError as error:
                if self._takes_flag or error.errno not in _NO_FLAGS:  # from a disk, once the flag has worked
                    raise WriteFailed(error.errno, error.strerror, self._path) from error
                self._takes_flag = False
            else:
                if done:  # where there are no bytes, nobody looks at the flag
                    self._takes_flag = True
                if done == sum(map(len, parts)):
                    return
        self.pwrite(parts, offset)
        self.sync()

    def copy_from(self, source: File, length: int, offset: int) -> None:
        end = offset + length
        if isinstance(source, LocalFile):
            # In the kernel, where some file systems share the blocks. Others do not know the call.
            offset += self._copy_range(source, length, offset)
        while offset < end:
            block = source.pread(min(end - offset, _COPY_BYTES), offset)
            if not block:
                raise OSError(errno.EIO, "The file is shorter than what is to be copied", source.path)
            self.pwrite([block], offset)
            offset += len(block)

    def _copy_range(self, source: LocalFile, length: int, offset: int) -> int:
        copied = 0
        try:
            while copied < length:
                at = offset + copied
                count = os.copy_file_range(source._fd, self._fd, length - copied, at, at)
                if not count:
                    break
                copied += count
        except OSError as error:
            if error.errno not in _NO_COPY_RANGE:
                raise WriteFailed(error.errno, error.strerror, self._path) from error
        return copied

    def truncate(self, length: int) -> None:
        with _writing(self._path):
            os.ftruncate(self._fd, length)

    def sync(self) -> None:
        with _writing(self._path):
            os.fdatasync(self._fd)

    def close(self) -> None:
        # Whatever `close` answers, the number is the system's again: a second close would hit somebody else's file.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class LocalVfs:
    """The operating system's files. Made readable by their owner only."""

    def __init__(self, spares: SpareDescriptors | None = None) -> None:
        self._spares = spares or SpareDescriptors(0)

    def open(self, path: str, *, create: bool = False) -> LocalFile:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        try:
            return LocalFile(path, self._spares.open(path, flags))
        except OSError as error:
            if error.errno != errno.EROFS or create:
                raise
        return LocalFile(path, self._spares.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))

    def exists(self, path: str) -> bool:
        # Not os.path.lexists, which takes every error for an absent file: an empty folder would be begun in its place.
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def list_dir(self, path: str) -> list[str]:
        with self._open_dir(path) as fd:
            return sorted(os.listdir(fd))

    def make_dir(self, path: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)

    def remove_dir(self, path: str) -> None:
        os.rmdir(path)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def link(self, source: str, target: str) -> None:
        os.link(source, target, follow_symlinks=False)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def sync_dir(self, path: str) -> None:
        with self._open_dir(path) as fd, _writing(path):
            os.fsync(fd)

    def free_bytes(self, path: str) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def lock(self, path: str) -> LocalFile | None:
        fd = self._spares.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if isinstance(error, BlockingIOError):
                return None
            raise
        return LocalFile(path, fd)

    @contextlib.contextmanager
    def _open_dir(self, path: str) -> Iterator[int]:
        fd = self._spares.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)


def list_if_there(vfs: Vfs, folder: str) -> list[str]:
    """The names in a folder; none if there is no such folder."""
    return vfs.list_dir(folder) if vfs.exists(folder) else []


def read_file(vfs: Vfs, path: str, length_max: int | None = None) -> bytes:
    """A file's bytes from its beginning: all of them, or at most so many."""
    file = vfs.open(path)
    try:
        return file.pread(file.size() if length_max is None else length_max, 0)
    finally:
        file.close()


def size_if_there(vfs: Vfs, path: str) -> int:
    """A file's length in bytes; 0 if there is no such file."""
    if not vfs.exists(path):
        return 0
    file = vfs.open(path)
    try:
        return file.size()
    finally:
        file.close()


def replace_file(vfs: Vfs, path: str, parts: Sequence[Buffer]) -> None:
    """Replace a file in one atomic, durable step: write aside, sync, rename, sync the directory.

    A crash at any point leaves the old content or the new, whole; at worst a `.new` file that nobody
    names, which the next replacement or recovery removes.
    """
    aside = path + ".new"
    if vfs.exists(aside):
        vfs.remove(aside)
    file = vfs.open(aside, create=True)
    try:
        file.pwrite(parts, 0)
        file.sync()
    finally:
        file.close()
    vfs.rename(aside, path)
    vfs.sync_dir(path.rpartition("/")[0] or ".")
