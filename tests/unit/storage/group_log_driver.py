"""A local log of groups that is opened, filled and read back: what the tests of its files share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from broker.runtime.vfs import Vfs
from broker.storage.dump import dump_segment
from broker.storage.group_log import GroupLog, records_from
from broker.storage.local_group_log import LocalGroupLog
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


def open_log(
    vfs: Vfs, needed: tuple[int, int] = (1, 0), folder: str = FOLDER, **options: Any
) -> LocalGroupLog:
    options.setdefault("executor", HeldExecutor())
    options.setdefault("upkeep_executor", HeldExecutor())
    log = LocalGroupLog(vfs, folder, **options)
    log.open(*needed)
    return log


@asynccontextmanager
async def opened(log: LocalGroupLog) -> AsyncIterator[LocalGroupLog]:
    try:
        yield log
    finally:
        await log.close()


def body(lsn: int) -> bytes:
    return b"%06d" % lsn * (1 + lsn % 5)


async def append_group(log: GroupLog, count: int) -> None:
    """Append one group with the bodies that `lsns` expects."""
    bodies = [body(lsn) for lsn in range(log.next_index, log.next_index + count)]
    await log.append(log.next_index, [(2, [each], len(each)) for each in bodies])


async def append(log: GroupLog, count: int) -> None:
    """Append `count` records, each a group of its own."""
    for _ in range(count):
        await append_group(log, 1)


def lsns(log: GroupLog, from_lsn: int = 1) -> list[int]:
    """Read, check every body, return the lsns."""
    records = [(lsn, kind, bytes(data)) for lsn, kind, data in records_from(log.read(from_lsn), from_lsn)]
    assert records == [(lsn, 2, body(lsn)) for lsn, _, _ in records]
    return [lsn for lsn, _, _ in records]


async def write(vfs: MemVfs, count: int, **options: Any) -> None:
    """A log with `count` records, closed."""
    async with opened(open_log(vfs, **options)) as log:
        await append(log, count)


def groups(vfs: MemVfs, path: str) -> bytes:
    """A segment's header and groups, without the zeros that its file was lengthened by."""
    ends = [int(line["offset"]) for line in dump_segment(vfs, path) if line["kind"] == "end"]
    return vfs.snapshot()[path][: ends[-1]]


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
