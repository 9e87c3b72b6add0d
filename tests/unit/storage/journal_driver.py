"""A journal that is opened, filled and read back: what the journal's tests share."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import Any

from broker.runtime.vfs import Vfs
from broker.storage.journal import Journal
from broker.testing.mem_vfs import MemVfs
from tests.unit.storage.held_executor import HeldExecutor

FOLDER = "data/journal"


async def turns(count: int = 20) -> None:
    """Let the loop do whatever it can do now."""
    for _ in range(count):
        await asyncio.sleep(0)


def make_vfs() -> MemVfs:
    vfs = MemVfs()
    vfs.make_dir("data")
    vfs.sync_dir("/")
    return vfs


def open_journal(vfs: Vfs, needed: tuple[int, int] = (1, 0), folder: str = FOLDER, **options: Any) -> Journal:
    options.setdefault("executor", HeldExecutor())
    return Journal.open(vfs, folder, needed_from_lsn=needed[0], needed_to_lsn=needed[1], **options)


@asynccontextmanager
async def running(journal: Journal) -> Any:
    task = asyncio.create_task(journal.run())
    try:
        yield journal
        await journal.close()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def keep_lsn(lsn: int) -> int:
    return lsn


def body(lsn: int) -> bytes:
    return b"%06d" % lsn * (1 + lsn % 5)


async def append(journal: Journal, count: int) -> None:
    """Append `count` records, each a group of its own, with the bodies that `check` expects."""
    for _ in range(count):
        lsn = journal.next_lsn
        assert await journal.submit(2, [body(lsn)], keep_lsn) == lsn


def lsns(journal: Journal, from_lsn: int = 1) -> list[int]:
    """Replay, check every body, return the lsns."""
    records = [(lsn, kind, bytes(data)) for lsn, kind, data in journal.replay(from_lsn)]
    assert records == [(lsn, 2, body(lsn)) for lsn, _, _ in records]
    return [lsn for lsn, _, _ in records]


async def write(vfs: MemVfs, count: int, **options: Any) -> None:
    """A journal with `count` records, closed."""
    async with running(open_journal(vfs, **options)) as journal:
        await append(journal, count)


def names(vfs: Vfs, folder: str = FOLDER) -> list[str]:
    return vfs.list_dir(folder)


def segments(vfs: Vfs) -> list[str]:
    return [name for name in names(vfs) if not name.startswith("spare")]


def replace(vfs: MemVfs, path: str, data: bytes) -> None:
    """Give a file other content, durably."""
    if vfs.exists(path):
        vfs.remove(path)
    file = vfs.open(path, create=True)
    file.pwrite([data], 0)
    file.sync()
    vfs.sync_dir(FOLDER)
