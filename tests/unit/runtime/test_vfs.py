"""The real file system: what `LocalVfs` asks of it, call by call, and what it makes of the answers."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from broker.runtime.spare_files import SpareDescriptors
from broker.runtime.vfs import Buffer, LocalFile, LocalVfs, WriteFailed, replace_file, size_if_there

PARTS: list[Buffer] = [b"first ", bytearray(b"second "), memoryview(b"third")]
WHOLE = b"first second third"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    before = os.umask(0)  # the modes are the broker's own, whatever the shell's mask is
    yield str(tmp_path)
    os.umask(before)


@contextmanager
def calls_noted(*names: str) -> Iterator[list[tuple[str, str]]]:
    """Every call of these functions of `os`, done as always: the name, and the path that it was about."""
    seen: list[tuple[str, str]] = []

    def noting(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(first: Any, *rest: Any, **options: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
            seen.append((name, path))
            return real(first, *rest, **options)

        return call

    patches = [patch.object(os, name, noting(name)) for name in names]
    for each in patches:
        each.start()
    try:
        yield seen
    finally:
        for each in patches:
            each.stop()


def failing(error: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(error, os.strerror(error))

    return fail


def mode_of(path: str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


# -- names and modes -----------------------------------------------------------------------------------------------


def test_what_it_makes_is_its_owners_alone(folder: str):
    vfs = LocalVfs()
    vfs.make_dir(f"{folder}/made")
    vfs.open(f"{folder}/made/file", create=True).close()
    lock = vfs.lock(f"{folder}/lock")
    assert lock is not None
    replace_file(vfs, f"{folder}/replaced", [b"x"])
    assert mode_of(f"{folder}/made") == 0o700
    assert {mode_of(f"{folder}/{name}") for name in ("made/file", "lock", "replaced")} == {0o600}


def test_symbolic_links_are_not_followed(folder: str):
    vfs = LocalVfs()
    Path(folder, "target").write_bytes(b"somebody else's")
    os.symlink(f"{folder}/target", f"{folder}/link")
    os.symlink(f"{folder}/absent", f"{folder}/dangling")
    for name in ("link", "dangling"):
        with pytest.raises(OSError, match="symbolic links") as refusal:
            vfs.open(f"{folder}/{name}")
        assert refusal.value.errno == errno.ELOOP
        with pytest.raises(FileExistsError):
            vfs.open(f"{folder}/{name}", create=True)
        with pytest.raises(OSError, match="symbolic links"):
            vfs.lock(f"{folder}/{name}")
        assert vfs.exists(f"{folder}/{name}")
    vfs.link(f"{folder}/link", f"{folder}/second")
    assert os.path.islink(f"{folder}/second"), (
        "the link itself has the second name, and not what it points to"
    )
    assert not os.path.exists(f"{folder}/absent")
    assert Path(folder, "target").read_bytes() == b"somebody else's"


def test_no_descriptor_goes_to_programs_that_the_broker_starts(folder: str):
    vfs = LocalVfs()
    lock = vfs.lock(f"{folder}/lock")
    assert lock is not None
    for file in (vfs.open(f"{folder}/file", create=True), vfs.open(f"{folder}/file"), lock):
        assert not os.get_inheritable(file._fd)


def test_a_file_is_made_once_and_opened_only_if_it_is_there(folder: str):
    vfs = LocalVfs()
    with pytest.raises(FileNotFoundError):
        vfs.open(f"{folder}/file")
    vfs.open(f"{folder}/file", create=True).close()
    with pytest.raises(FileExistsError):
        vfs.open(f"{folder}/file", create=True)
    vfs.make_dir(f"{folder}/dir")
    vfs.make_dir(f"{folder}/dir")
    with pytest.raises(FileNotFoundError):
        vfs.make_dir(f"{folder}/absent/dir")
    assert vfs.list_dir(folder) == ["dir", "file"]
    vfs.link(f"{folder}/file", f"{folder}/again")
    with pytest.raises(FileExistsError):
        vfs.link(f"{folder}/file", f"{folder}/again")
    assert os.stat(f"{folder}/again").st_nlink == 2
    vfs.rename(f"{folder}/again", f"{folder}/dir/renamed")
    vfs.remove(f"{folder}/file")
    with pytest.raises(OSError, match="not empty"):
        vfs.remove_dir(f"{folder}/dir")
    vfs.remove(f"{folder}/dir/renamed")
    vfs.remove_dir(f"{folder}/dir")
    assert vfs.list_dir(folder) == []
    with pytest.raises(FileNotFoundError):
        vfs.list_dir(f"{folder}/dir")


def test_what_cannot_be_looked_at_is_not_absent(folder: str):
    """A journal that is called absent for a disk error would be begun anew."""
    vfs = LocalVfs()
    assert not vfs.exists(f"{folder}/absent")
    Path(folder, "file").touch()
    assert not vfs.exists(f"{folder}/file/below")
    for error in (errno.EIO, errno.EACCES, errno.ENOMEM):
        with patch.object(os, "lstat", failing(error)), pytest.raises(OSError, match=os.strerror(error)):
            vfs.exists(f"{folder}/file")


def test_one_process_holds_the_lock(folder: str):
    vfs = LocalVfs()
    held = vfs.lock(f"{folder}/lock")
    assert held is not None
    before = len(os.listdir("/proc/self/fd"))
    assert vfs.lock(f"{folder}/lock") is None
    with patch("fcntl.flock", failing(errno.ENOLCK)), pytest.raises(OSError, match="No locks"):
        vfs.lock(f"{folder}/lock")
    assert len(os.listdir("/proc/self/fd")) == before, "a refused lock keeps no descriptor"
    held.close()
    again = vfs.lock(f"{folder}/lock")
    assert again is not None
    again.close()


def test_a_read_only_file_system_can_be_read(folder: str):
    Path(folder, "file").write_bytes(b"content")
    real = os.open

    def refusing(path: str, flags: int, *rest: Any) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, "Read-only file system", path)
        return real(path, flags, *rest)

    with patch.object(os, "open", refusing):
        file = LocalVfs().open(f"{folder}/file")
        assert file.pread(7, 0) == b"content"
        with pytest.raises(WriteFailed):
            file.pwrite([b"x"], 0)
        with pytest.raises(OSError, match="Read-only"):
            LocalVfs().open(f"{folder}/new", create=True)


def test_free_space_is_what_others_than_root_may_use(folder: str):
    status = os.statvfs(folder)
    with patch.object(os, "statvfs", return_value=status) as asked:
        assert LocalVfs().free_bytes(folder) == status.f_bavail * status.f_frsize
    asked.assert_called_once_with(folder)


# -- writing -------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(folder: str) -> Iterator[LocalFile]:
    file = LocalVfs().open(f"{folder}/file", create=True)
    yield file
    file.close()


def content(file: LocalFile) -> bytes:
    return Path(file.path).read_bytes()


@pytest.mark.parametrize("taken", range(1, len(WHOLE)))
@pytest.mark.parametrize("more", [1, 3, 100])
def test_a_short_write_goes_on_where_it_ended(file: LocalFile, taken: int, more: int):
    real_v, real = os.pwritev, os.pwrite
    file.pwrite([b"-" * 40], 0)
    short = patch.object(os, "pwritev", lambda fd, parts, at: real_v(fd, [b"".join(parts)[:taken]], at))
    shorter = patch.object(os, "pwrite", lambda fd, part, at: real(fd, part[:more], at))
    with short, shorter:
        file.pwrite(PARTS, 10)
    assert content(file) == (b"-" * 10 + WHOLE).ljust(40, b"-")


@pytest.mark.parametrize("taken", [1, 7, len(WHOLE) - 1])
def test_a_write_that_the_system_cuts_short_goes_on_where_it_ended(file: LocalFile, taken: int):
    """By a limit to the length of files, which is gone before the rest is written: nothing else shortens a write truly."""
    file.pwrite([b"-" * 10], 0)
    limits, real = resource.getrlimit(resource.RLIMIT_FSIZE), os.pwrite
    sizes: list[int] = []

    def go_on(fd: int, part: Buffer, at: int) -> int:
        sizes.append(os.fstat(fd).st_size)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return real(fd, part, at)

    resource.setrlimit(resource.RLIMIT_FSIZE, (10 + taken, limits[1]))
    try:
        with patch.object(os, "pwrite", go_on):
            file.pwrite(PARTS, 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sizes == [10 + taken], "the system took a part"
    assert content(file) == b"-" * 10 + WHOLE


def test_more_parts_than_one_call_takes_are_written_one_after_the_other(file: LocalFile):
    parts = [b"%04d" % number for number in range(2_500)]
    with calls_noted("pwritev") as seen:
        file.pwrite(parts, 3)
    assert content(file) == bytes(3) + b"".join(parts)
    assert len(seen) == 3


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_a_write_that_fails_says_that_bytes_are_in_doubt(file: LocalFile, error: int):
    real = os.pwritev
    with patch.object(os, "pwritev", failing(error)), pytest.raises(WriteFailed) as refusal:
        file.pwrite(PARTS, 0)
    assert (refusal.value.errno, refusal.value.filename) == (error, file.path)
    half = patch.object(os, "pwritev", lambda fd, parts, at: real(fd, parts[:1], at))
    with half, patch.object(os, "pwrite", failing(error)), pytest.raises(WriteFailed):
        file.pwrite(PARTS, 0)


def test_an_interrupted_write_is_whole(file: LocalFile):
    """A signal during `pwritev` gives a short write or EINTR; Python repeats the call for the second."""
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        while len(seen) < 20:
            file.pwrite([b"x" * 100_000] * 20, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert content(file) == b"x" * 2_000_000


@pytest.mark.parametrize("count", [1, 1024, 1025])
def test_a_synced_write_is_one_call_where_the_system_takes_all_of_it(file: LocalFile, count: int):
    parts = [b"%d," % number for number in range(count)]
    flags: list[int] = []
    real = os.pwritev

    def noting(fd: int, parts: Any, at: int, *flag: int) -> int:
        flags.append(sum(flag))
        return real(fd, parts, at, *flag)

    with patch.object(os, "pwritev", noting), calls_noted("fdatasync") as syncs:
        file.pwrite_synced(parts, 3)
    assert content(file) == bytes(3) + b"".join(parts)
    if count <= 1024:
        assert (flags, syncs) == ([os.RWF_DSYNC], [])
    else:
        assert (sum(flags), len(syncs)) == (0, 1)


@pytest.mark.parametrize("taken", [0, 1, 7, len(WHOLE) - 1])
def test_a_synced_write_that_was_short_is_made_whole_and_synced(file: LocalFile, taken: int):
    real = os.pwritev

    def short(fd: int, parts: Any, at: int, *flag: int) -> int:
        return real(fd, [b"".join(parts)[:taken]] if flag else parts, at, *flag)

    with patch.object(os, "pwritev", short), calls_noted("fdatasync") as syncs:
        file.pwrite_synced(PARTS, 2)
    assert content(file) == bytes(2) + WHOLE
    assert syncs == [("fdatasync", file.path)]


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_system_that_cannot_sync_what_it_writes_is_asked_once(file: LocalFile, error: int):
    asked: list[int] = []
    real = os.pwritev

    def refusing(fd: int, parts: Any, at: int, *flag: int) -> int:
        if flag:
            asked.append(at)
            raise OSError(error, os.strerror(error))
        return real(fd, parts, at)

    with patch.object(os, "pwritev", refusing), calls_noted("fdatasync") as syncs:
        file.pwrite_synced(PARTS, 0)
        file.pwrite_synced([b"F"], 0)
    assert content(file) == b"F" + WHOLE[1:]
    assert asked == [0] and len(syncs) == 2


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_sync_that_fails_after_the_flag_has_worked_is_not_tried_in_another_way(file: LocalFile, error: int):
    file.pwrite_synced(PARTS, 0)
    real = os.pwritev

    def refusing(fd: int, parts: Any, at: int, *flag: int) -> int:
        if flag:
            raise OSError(error, os.strerror(error))
        return real(fd, parts, at)

    with (
        patch.object(os, "pwritev", refusing),
        calls_noted("pwrite", "fdatasync") as calls,
        pytest.raises(WriteFailed) as failed,
    ):
        file.pwrite_synced([b"F"], 0)
    assert failed.value.errno == error
    assert calls == []
    assert content(file) == WHOLE


@pytest.mark.parametrize("taken", [0, 1])
def test_a_short_write_shows_that_the_flag_works_if_it_took_bytes(file: LocalFile, taken: int):
    real = os.pwritev
    flagged = iter([taken, None])

    def short(fd: int, parts: Any, at: int, *flag: int) -> int:
        if not flag:
            return real(fd, parts, at)
        if (count := next(flagged)) is None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, [b"".join(parts)[:count]], at, *flag)

    with patch.object(os, "pwritev", short):
        file.pwrite_synced(PARTS, 0)
        with pytest.raises(WriteFailed) if taken else contextlib.nullcontext():
            file.pwrite_synced(PARTS, 0)
    assert content(file) == WHOLE


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_a_synced_write_that_fails_is_not_tried_in_another_way(file: LocalFile, error: int):
    with (
        patch.object(os, "pwritev", failing(error)),
        calls_noted("pwrite", "fdatasync") as calls,
        pytest.raises(WriteFailed) as failed,
    ):
        file.pwrite_synced(PARTS, 0)
    assert failed.value.errno == error and failed.value.filename == file.path
    assert calls == []


def test_a_sync_is_a_sync_of_that_file(file: LocalFile):
    with calls_noted("fdatasync", "fsync") as seen:
        file.pwrite(PARTS, 0)
        assert seen == []
        file.sync()
    assert seen == [("fdatasync", file.path)]
    with patch.object(os, "fdatasync", failing(errno.EIO)), pytest.raises(WriteFailed):
        file.sync()


def test_a_sync_of_a_folder_is_a_sync_of_that_folder(folder: str):
    before = len(os.listdir("/proc/self/fd"))
    with calls_noted("fdatasync", "fsync") as seen:
        LocalVfs().sync_dir(folder)
    assert seen == [("fsync", folder)]
    with patch.object(os, "fsync", failing(errno.EIO)), pytest.raises(WriteFailed):
        LocalVfs().sync_dir(folder)
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(FileNotFoundError):
        LocalVfs().sync_dir(f"{folder}/absent")


def test_a_file_is_cut_and_lengthened(file: LocalFile):
    file.pwrite(PARTS, 0)
    file.truncate(5)
    assert (content(file), file.size()) == (b"first", 5)
    file.truncate(7)
    assert content(file) == b"first\0\0"
    with patch.object(os, "ftruncate", failing(errno.EIO)), pytest.raises(WriteFailed):
        file.truncate(0)


def test_replacing_writes_aside_syncs_renames_and_syncs_the_folder(folder: str):
    path = f"{folder}/manifest"
    Path(folder, "manifest.new").write_bytes(b"left by a crash, and longer than what is written now")
    with calls_noted("pwritev", "fdatasync", "rename", "fsync") as seen:
        replace_file(LocalVfs(), path, PARTS)
    assert seen == [
        ("pwritev", f"{path}.new"),
        ("fdatasync", f"{path}.new"),
        ("rename", f"{path}.new"),
        ("fsync", folder),
    ]
    assert Path(path).read_bytes() == WHOLE
    assert LocalVfs().list_dir(folder) == ["manifest"]
    assert size_if_there(LocalVfs(), path) == len(WHOLE)
    assert size_if_there(LocalVfs(), f"{folder}/absent") == 0


def test_a_closed_file_is_not_closed_again(file: LocalFile):
    """Its number may be another file's by then."""
    real = os.close
    closed: list[int] = []

    def closing(fd: int) -> None:
        closed.append(fd)
        real(fd)
        raise OSError(errno.EIO, "Input/output error")

    fd = file._fd
    with patch.object(os, "close", closing):
        with pytest.raises(OSError, match="Input/output"):
            file.close()
        file.close()
    assert closed == [fd]


# -- reading and copying -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [1, 4, 18])
def test_a_short_read_goes_on_until_the_end_of_the_file(file: LocalFile, taken: int):
    file.pwrite(PARTS, 0)
    real = os.pread
    with patch.object(os, "pread", lambda fd, length, at: real(fd, min(length, taken), at)):
        assert file.pread(12, 6) == b"second third"
        assert file.pread(100, 6) == b"second third"
        assert file.pread(5, 100) == b""


def test_a_read_that_does_not_wait_answers_all_or_nothing(file: LocalFile):
    file.pwrite(PARTS, 0)
    assert file.pread_nowait(5, 0) in (b"first", None)
    assert file.pread_nowait(100, 0) is None
    for error in (errno.EAGAIN, errno.EIO, errno.EOPNOTSUPP):
        with patch.object(os, "preadv", failing(error)):
            assert file.pread_nowait(5, 0) is None


def test_a_hint_to_read_ahead_changes_nothing_and_may_fail(file: LocalFile):
    file.pwrite(PARTS, 0)
    file.read_ahead([0, 6], [5, 1 << 20])
    with patch.object(os, "posix_fadvise", failing(errno.EIO)):
        file.read_ahead([0], [5])
    assert file.pread(5, 0) == b"first"


@pytest.mark.parametrize("error", [None, errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("taken", [2, 1 << 20])
def test_a_copy_is_whole_whether_the_kernel_does_it_or_not(file: LocalFile, error: int | None, taken: int):
    file.pwrite([b"0123456789" * 3], 0)
    target = LocalVfs().open(f"{file.path}.copy", create=True)
    real = os.copy_file_range
    copied = failing(error) if error else lambda a, b, n, i, o: real(a, b, min(n, taken), i, o)
    with patch.object(os, "copy_file_range", copied):
        target.copy_from(file, 20, 5)
        assert content(target) == bytes(5) + b"5678901234" * 2
        with pytest.raises(OSError, match="shorter"):
            target.copy_from(file, 100, 0)
    with patch.object(os, "copy_file_range", failing(errno.ENOSPC)), pytest.raises(WriteFailed):
        target.copy_from(file, 5, 0)
    target.close()


# -- spare descriptors ---------------------------------------------------------------------------------------------


class Table:
    """A process that has `free` descriptors left, itself or as the machine has."""

    def __init__(self, free: int, error: int) -> None:
        self.free = free
        self.error = error
        self.open, self.close = os.open, os.close

    def opening(self, *arguments: Any, **options: Any) -> int:
        if not self.free:
            raise OSError(self.error, "Too many open files")
        fd = self.open(*arguments, **options)
        self.free -= 1
        return fd

    def closing(self, fd: int) -> None:
        self.close(fd)
        self.free += 1


@contextmanager
def descriptors(free: int, error: int = errno.EMFILE) -> Iterator[Table]:
    table = Table(free, error)
    with patch.object(os, "open", table.opening), patch.object(os, "close", table.closing):
        yield table


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE])
def test_files_open_with_spares_while_no_descriptors_are_left_and_spares_come_back(folder: str, error: int):
    with descriptors(4, error) as table:
        spares = SpareDescriptors(3)
        vfs = LocalVfs(spares)
        table.free = 0  # connections took the rest
        file = vfs.open(f"{folder}/file", create=True)
        vfs.sync_dir(folder)
        assert vfs.list_dir(folder) == ["file"]
        assert stat.S_IMODE(os.stat(f"{folder}/file").st_mode) == 0o600
        assert len(spares) < 3
        held = [vfs.open(f"{folder}/file") for _ in range(table.free + len(spares))]
        with pytest.raises(OSError, match="Too many open files"):
            vfs.open(f"{folder}/file")
        for each in (file, *held):
            each.close()
        table.free += 1  # a connection ends
        vfs.open(f"{folder}/file").close()
        assert len(spares) == 3
        spares.close()
        assert len(spares) == 0


def test_a_connection_that_takes_what_was_given_up_gets_one_and_the_file_the_next(folder: str):
    with descriptors(9) as table:
        spares = SpareDescriptors(3)
        table.free = 0
        real_closing = table.closing
        stolen: list[int] = []

        def closing(fd: int) -> None:
            real_closing(fd)
            if not stolen:
                stolen.append(fd)
                table.free = 0

        with patch.object(os, "close", closing):
            LocalVfs(spares).open(f"{folder}/file", create=True).close()
        assert stolen
        spares.close()


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EIO, errno.EACCES])
def test_spares_are_kept_for_want_of_descriptors(folder: str, error: int):
    spares = SpareDescriptors(2)
    with patch.object(os, "open", failing(error)), pytest.raises(OSError, match=os.strerror(error)):
        LocalVfs(spares).open(f"{folder}/file", create=True)
    assert len(spares) == 2
    spares.close()
