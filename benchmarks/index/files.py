"""The local storage of snapshots, counting what seals and merges write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path

from broker.runs.storage import RunStorage, RunWriter
from broker.runtime.vfs import Buffer, LocalFile, LocalVfs
from broker.storage.bucket_files import BUCKETS, SnapshotReader

TOPIC_ID = 1


class _CountingFile(LocalFile):
    """Takes over the descriptor of another file."""

    def __init__(self, file: LocalFile, written: dict[str, int]) -> None:
        super().__init__(file.path, os.dup(file._fd))
        file.close()
        self._written = written

    def pwrite(self, parts: Sequence[Buffer], offset: int) -> None:
        super().pwrite(parts, offset)
        more = sum(len(part) for part in parts)
        self._written[self.path] = self._written.get(self.path, 0) + more


class CountingVfs(LocalVfs):
    """Local files, and the bytes written to each."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, int] = {}

    def open(self, path: str, *, create: bool = False) -> LocalFile:
        file = super().open(path, create=create)
        return _CountingFile(file, self.written) if create else file


class CountingStorage(RunStorage[SnapshotReader]):
    """A merge leaves whole blocks for metadata that it does not know yet: that tells it from a seal."""

    def __init__(self, folder: Path, executor: Executor) -> None:
        self._counting = CountingVfs()
        super().__init__(self._counting, str(folder), TOPIC_ID, BUCKETS, executor)
        self._sealed: set[str] = set()

    def create(self, run_id: int, begins_at: int) -> RunWriter:
        if begins_at % 4096:
            self._sealed.add(self.path(run_id))
        return super().create(run_id, begins_at)

    def sealed_bytes(self) -> int:
        return sum(self._counting.written.get(path, 0) for path in self._sealed)

    def merged_bytes(self) -> int:
        return sum(self._counting.written.values()) - self.sealed_bytes()


def disk_bytes(folder: Path) -> tuple[int, int]:
    """Of the files in a folder: their sizes, and the blocks that they take."""
    found = [entry.stat() for entry in os.scandir(folder) if entry.is_file()]
    return sum(each.st_size for each in found), sum(each.st_blocks * 512 for each in found)
