"""A ledger beside a model of it, and what else the ledger's tests share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from concurrent.futures import Executor

import google_crc32c
import numpy as np

from broker.model import FLAG_DELAYED, ROW, EntryColumns, Int64Column, RowColumn, UInt32Column
from broker.runtime.vfs import Vfs
from broker.storage.blocks import LedgerCapture, LedgerName
from broker.storage.ledger import Ledger
from broker.storage.ledger_files import OpenFiles, cut_ledger
from broker.testing.mem_vfs import MemVfs
from tests.unit.storage.held_executor import HeldExecutor

FOLDER = "ledgers"
NAME = LedgerName(FOLDER, topic_id=3, ledger_id=11, generation=0)


class Book:
    """A ledger beside the plainest model of one: lists of times, rows and frames."""

    def __init__(
        self,
        vfs: Vfs,
        folder: str = FOLDER,
        *,
        executor: Executor | None = None,
        read_executor: Executor | None = None,
        open_ledgers: int = 256,
    ) -> None:
        self.vfs = vfs
        self.executor = executor or HeldExecutor()
        self.read_executor = read_executor or HeldExecutor()
        self.open_files = OpenFiles(vfs, open_ledgers)
        self.name = NAME._replace(folder=folder)
        self.ledger = Ledger(self.name, self.open_files, self.executor, self.read_executor)
        self.times: list[int] = []
        self.rows: list[tuple[int, ...]] = []
        self.frames: list[bytes] = []
        self._random = random.Random(5)

    def append(self, count: int, *, size: int | None = None) -> None:
        times, rows, frames = batch_of(self._random, count, self.ledger.data_bytes, size)
        self.ledger.append(self.ledger.entry_count, times, rows, b"".join(frames))
        self.times += times.tolist()
        self.rows += rows.tolist()
        self.frames += frames

    def reopen(self, capture: LedgerCapture, vfs: Vfs | None = None) -> None:
        """Reopen the ledger that a manifest names, as a restart does."""
        self.vfs = vfs or self.vfs
        self.open_files = OpenFiles(self.vfs)
        cut_ledger(self.vfs, self.name.folder, capture)
        self.ledger = Ledger.restore(
            capture, self.name.folder, self.open_files, self.executor, self.read_executor
        )
        for column in (self.times, self.rows, self.frames):
            del column[capture.entry_count :]

    async def check(self, *entry_ids: int) -> None:
        """Read some entries, by default all, in every way, and compare."""
        wanted = ids(entry_ids or range(len(self.frames)))
        self.compare(await self.ledger.read(wanted), wanted.tolist())
        assert (await self.ledger.times_of(wanted)).tolist() == [self.times[i] for i in wanted.tolist()]
        if len(wanted):
            first, end = int(wanted[0]), int(wanted[-1]) + 1
            assert (await self.ledger.read_times(first, end - first)).tolist() == self.times[first:end]
            assert (await self.ledger.read_rows(first, end - first)).tolist() == self.rows[first:end]

    def compare(self, entries: EntryColumns, wanted: Sequence[int]) -> None:
        assert entries.ledger_id == NAME.ledger_id
        assert entries.entry_ids.tolist() == list(wanted)
        assert entries.times.dtype == np.int64
        assert entries.times.tolist() == [self.times[i] for i in wanted]
        assert entries.rows.dtype == ROW
        assert entries.rows.tolist() == [self.rows[i] for i in wanted]
        assert entries.frames == [self.frames[i] for i in wanted]


def batch_of(
    rng: random.Random, count: int, offset: int, size: int | None = None
) -> tuple[Int64Column, RowColumn, list[bytes]]:
    frames = []
    for _ in range(count):
        length = rng.randrange(100) if size is None else size
        frames.append(b"\x12" + bytes([length]) + rng.randbytes(length))
    times = np.array(
        [rng.choice([0, 1_800_000_000_000 + rng.randrange(1000)]) for _ in range(count)], np.int64
    )
    rows = np.zeros(count, ROW)
    rows["publish_time_ms"] = 1_700_000_000_000 + np.arange(count)
    rows["length"] = list(map(len, frames))
    rows["offset"] = offset + np.cumsum(rows["length"]) - rows["length"]
    rows["crc"] = list(map(google_crc32c.value, frames))
    rows["flags"] = np.where(times > 0, FLAG_DELAYED, 0)
    return times, rows, frames


def ids(entry_ids: Sequence[int]) -> UInt32Column:
    return np.array(entry_ids, np.uint32)


def new_vfs() -> MemVfs:
    vfs = MemVfs()
    vfs.make_dir(FOLDER)
    vfs.sync_dir(".")
    return vfs


def flip_byte(vfs: Vfs, path: str, offset: int) -> None:
    file = vfs.open(path)
    file.pwrite([bytes([file.pread(1, offset)[0] ^ 0x40])], offset)
    file.close()


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def persisted(*counts: int, sealed: bool = False) -> tuple[Book, LedgerCapture]:
    book = Book(new_vfs())
    for count in counts:
        book.append(count)
    if sealed:
        book.ledger.seal()
    capture = book.ledger.capture()
    await book.ledger.persist(capture)
    book.vfs.sync_dir(FOLDER)
    return book, capture
