"""The copy of a part of a journal: any part, in whatever pieces it is read, whatever follows what is durable."""

from __future__ import annotations

import random

import pytest

from broker.errors import Corrupt
from broker.storage import journal_copy
from broker.storage.group_log import records_from
from broker.storage.journal_copy import JournalCopy
from broker.storage.local_group_log import LocalGroupLog
from broker.testing.mem_vfs import MemVfs
from tests.unit.storage.held_executor import HeldExecutor

GROUPS = [1, 3, 2, 5, 1, 4, 2, 2]
LAST = sum(GROUPS)
PRODUCED = 2


def body(lsn: int) -> bytes:
    return b"%d " % lsn * random.Random(lsn).choice((1, 5, 40, 300))


async def journal(segment_bytes: int = 2_000) -> MemVfs:
    """A journal of some groups over several segments."""
    vfs = MemVfs()
    vfs.make_dir("d")
    log = open_log(vfs, "d/journal", 1, 0, segment_bytes)
    lsn = 1
    for count in GROUPS:
        bodies = [body(each) for each in range(lsn, lsn + count)]
        await log.append(lsn, [(PRODUCED, [each], len(each)) for each in bodies])
        lsn += count
    await log.close()
    return vfs


def open_log(vfs: MemVfs, folder: str, from_lsn: int, to_lsn: int, segment_bytes: int) -> LocalGroupLog:
    thread = HeldExecutor()
    log = LocalGroupLog(vfs, folder, segment_bytes=segment_bytes, spare_segments_max=0, executor=thread)
    log.open(from_lsn, to_lsn)
    return log


async def copied(
    vfs: MemVfs, from_lsn: int, to_lsn: int, segment_bytes: int = 1_000
) -> list[tuple[int, bytes]]:
    """Make a copy and read it as a broker does."""
    vfs.make_dir("copy")
    copy = JournalCopy(vfs, "d/journal", "copy", from_lsn, to_lsn, segment_bytes)
    written = sum(copy.steps())
    assert copy.record_types == ({PRODUCED} if from_lsn <= to_lsn else set())
    assert written >= sum(len(body(lsn)) for lsn in range(from_lsn, to_lsn + 1))
    log = open_log(vfs, "copy", from_lsn, to_lsn, segment_bytes)
    assert log.next_index == to_lsn + 1
    found = [(lsn, bytes(each)) for lsn, _, each in records_from(log.read(from_lsn), from_lsn)]
    await log.close()
    copy.remove()
    assert vfs.list_dir("copy") == []
    return found


@pytest.mark.slow
@pytest.mark.parametrize("read_bytes", [16, 100, 4_096])
async def test_every_part_that_ends_with_a_group_is_copied_exactly(monkeypatch, read_bytes):
    monkeypatch.setattr(journal_copy, "_READ_BYTES", read_bytes)
    vfs = await journal()
    assert len(vfs.list_dir("d/journal")) > 2
    ends = [sum(GROUPS[:count]) for count in range(1, len(GROUPS) + 1)]
    for to_lsn in ends:
        for from_lsn in range(1, to_lsn + 2):
            expected = [(lsn, body(lsn)) for lsn in range(from_lsn, to_lsn + 1)]
            assert await copied(vfs, from_lsn, to_lsn) == expected


async def test_what_follows_is_not_read():
    vfs = await journal(segment_bytes=1 << 20)
    (name,) = vfs.list_dir("d/journal")
    file = vfs.open(f"d/journal/{name}")
    file.pwrite([b"\xff" * 5_000], file.size())  # a group on its way, or a former life
    assert len(await copied(vfs, 2, LAST)) == LAST - 1


async def test_a_record_that_is_missing_is_corrupt():
    vfs = await journal()
    with pytest.raises(Corrupt, match=f"no lsn {LAST + 1}"):
        await copied(vfs, 2, LAST + 1)
    damaged = vfs.open(f"d/journal/{vfs.list_dir('d/journal')[1]}")
    damaged.pwrite([b"\xff"], 100)
    vfs.make_dir("copy")
    copy = JournalCopy(vfs, "d/journal", "copy", 1, LAST, 1_000)
    copy.remove()
    with pytest.raises(Corrupt, match="has no lsn"):
        list(copy.steps())
