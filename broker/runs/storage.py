"""Files of sorted runs: a folder of them, by id, each written once and never changed.

A run is written under its final name, which nobody has been told yet. When `finish` returns, file and name are durable
and a manifest may name it. An id is given to one run only.

What a crash leaves: a file that no manifest names, with any bytes. Recovery removes it. A missing, cut or damaged file
that a manifest names raises `Corrupt`; a disk that does not work raises `Unavailable`, and a writer that raised it is
to be aborted. Nothing else keeps what an aborted writer had been given, so whoever seals or merges
keeps the rows until `finish` returned.

Writers and readers block and belong in a file thread; one thread at a time uses one. `RunStorage.read` runs a reader
there. What a run holds is its kind's affair: `storage.bucket_files`, `storage.key_run_files`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from broker.errors import Corrupt, MissingFile, WrongSize
from broker.runtime.disk_errors import disk_errors
from broker.runtime.vfs import File, Vfs

WRITE_BYTES = 1 << 20
"""Bytes to which appended parts are gathered before they are written, about."""


class Closing(Protocol):
    """A reader, as far as its storage knows it."""

    def close(self) -> None: ...


Reader = TypeVar("Reader", bound=Closing)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunKind(Generic[Reader]):
    """Content of the files of a folder."""

    noun: str  # in messages
    suffix: str
    advice: str  # for whoever finds one damaged
    reader: Callable[[RunFile], Reader]

    def open(self, vfs: Vfs, path: str, topic_id: int, run_id: int) -> Reader:
        """Blocks. Raises Corrupt, Unavailable."""
        try:
            with disk_errors(f"a {self.noun}", "opened", path):
                file = vfs.open(path)
        except FileNotFoundError as error:
            raise MissingFile(f"A {self.noun} is missing", path=path, advice=self.advice) from error
        return self.reader(RunFile(file, topic_id, run_id, self.noun, self.advice))


class RunStorage(Generic[Reader]):
    """The runs of one kind of one topic."""

    def __init__(
        self, vfs: Vfs, folder: str, topic_id: int, kind: RunKind[Reader], executor: Executor | None = None
    ) -> None:
        """`executor`: where runs are read and removed; who writes one has a thread of its own."""
        self.topic_id = topic_id
        self._vfs = vfs
        self._folder = folder
        self._kind = kind
        self._executor = executor

    def path(self, run_id: int) -> str:
        return f"{self._folder}/{run_id}.{self._kind.suffix}"

    def create(self, run_id: int, begins_at: int) -> RunWriter:
        """Begin a file, whose first `begins_at` bytes are written last. Blocks.

        Raises Unavailable; FileExistsError for an id that was given before.
        """
        return RunWriter(self._vfs, self.path(run_id), self._kind.noun, begins_at)

    def open_reader(self, run_id: int) -> Reader:
        """Blocks. Raises Corrupt, Unavailable."""
        return self._kind.open(self._vfs, self.path(run_id), self.topic_id, run_id)

    async def open(self, run_id: int) -> Reader:
        """Open a run in a thread, for somebody who closes it. Raises Corrupt, Unavailable."""
        return await self._run(lambda: self.open_reader(run_id))

    async def read(self, run_id: int, call: Callable[[Reader], T]) -> T:
        """Open a run and ask something of its reader, in a thread."""

        def run() -> T:
            with contextlib.closing(self.open_reader(run_id)) as reader:
                return call(reader)

        return await self._run(run)

    async def delete(self, run_id: int) -> None:
        """Remove a run, if there is one. Durable only later: what comes back after a crash is named by nobody."""
        await self._run(lambda: self._delete(run_id))

    def _delete(self, run_id: int) -> None:
        path = self.path(run_id)
        with disk_errors(f"a {self._kind.noun}", "removed", path), contextlib.suppress(FileNotFoundError):
            self._vfs.remove(path)

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)


class RunWriter:
    """The file of a run in the making; every call blocks. Ends with `finish` or `abort`. Raises Unavailable."""

    def __init__(self, vfs: Vfs, path: str, noun: str, begins_at: int) -> None:
        self.path = path
        self.end = begins_at
        """Offset of the next bytes that are written."""
        self._vfs = vfs
        self._noun = noun
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._file: File | None = None
        with disk_errors(f"a {noun}", "created", path):
            self._file = vfs.open(path, create=True)

    def append(self, data: bytes) -> None:
        """Write what follows, soon."""
        self._gathered.append(data)
        self._gathered_bytes += len(data)
        if self._gathered_bytes >= WRITE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was appended: it can be read back then."""
        with disk_errors(f"a {self._noun}", "written", self.path):
            self._open_file.pwrite(self._gathered, self.end)
        self.end += self._gathered_bytes
        self._gathered, self._gathered_bytes = [], 0

    def pread(self, length: int, offset: int) -> bytes:
        """Read back what was flushed."""
        with disk_errors(f"a {self._noun}", "read", self.path):
            return self._open_file.pread(length, offset)

    def finish(self, beginning: bytes) -> None:
        """Write the first bytes; returns once file and name are durable."""
        self.flush()
        file = self._open_file
        with disk_errors(f"a {self._noun}", "written", self.path):
            file.pwrite([beginning], 0)
            file.sync()
            # The manifest must never name a file that a crash can take back.
            self._vfs.sync_dir(self.path.rpartition("/")[0])
            file.close()
        self._file = None

    def abort(self) -> None:
        """Remove the file, as far as the disk lets; does nothing after `finish` returned, or a second time."""
        file, self._file = self._file, None
        self._gathered = []
        if file is not None:
            # What cannot be removed now is removed by recovery: no manifest names it.
            with contextlib.suppress(OSError):
                file.close()
            with contextlib.suppress(OSError):
                self._vfs.remove(self.path)

    @property
    def _open_file(self) -> File:
        assert self._file is not None
        return self._file


class RunFile:
    """The file of a run, open for reading; every call blocks. Raises Corrupt, Unavailable."""

    def __init__(self, file: File, topic_id: int, run_id: int, noun: str, advice: str) -> None:
        self.path = file.path
        self._file = file
        self._ids = topic_id, run_id
        self._noun = noun
        self._advice = advice

    def pread(self, length: int, offset: int) -> bytes:
        """At most `length` bytes; fewer only at the end of the file."""
        with disk_errors(f"a {self._noun}", "read", self.path):
            return self._file.pread(length, offset)

    def pread_nowait(self, length: int, offset: int) -> bytes | None:
        """As `pread`, for the event loop: None unless all of it is in memory."""
        return self._file.pread_nowait(length, offset)

    def check(self, topic_id: int, run_id: int, file_bytes: int, offset: int) -> None:
        """Raises Corrupt unless it is the run that its name says, and has this size; `offset` of the ids."""
        if (topic_id, run_id) != self._ids:
            what = f"A {self._noun} of topic and run {topic_id, run_id} lies in the place of {self._ids}"
            raise Corrupt(what, path=self.path, offset=offset, advice=self._advice)
        with disk_errors(f"a {self._noun}", "read", self.path):
            size = self._file.size()
        if size != file_bytes:
            what = f"A {self._noun} has {size} bytes where there are {file_bytes}"
            raise WrongSize(what, path=self.path, offset=min(size, file_bytes), advice=self._advice)

    def close(self) -> None:
        self._file.close()
