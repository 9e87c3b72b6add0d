"""Segments made of groups that were stored elsewhere: a journal as any other, and durable."""

from __future__ import annotations

import pytest

from broker.storage.frame import Record
from broker.storage.group_log import records_from
from broker.storage.local_group_log import LocalGroupLog
from broker.storage.segment import Group
from broker.storage.segment_writer import SegmentWriter
from broker.testing.mem_vfs import CrashPolicy, MemVfs

FOLDER = "data/journal"


def write(groups: list[Group], first_lsn: int, segment_bytes: int) -> MemVfs:
    vfs = MemVfs()
    for folder in ("data", FOLDER):
        vfs.make_dir(folder)
    vfs.sync_dir("/")
    vfs.sync_dir("data")
    writer = SegmentWriter(vfs, FOLDER, segment_bytes=segment_bytes)
    for group in groups:
        writer.add(group)
    if not groups:
        writer.begin(first_lsn)
    writer.close()
    vfs.sync_dir(FOLDER)
    return vfs.crashed(vfs.op_count, CrashPolicy.LOSE_UNSYNCED)


@pytest.mark.parametrize(("count", "segments"), [(0, 1), (1, 1), (40, 4)])
def test_a_journal_of_given_groups_is_opened_and_read_after_a_crash(count: int, segments: int) -> None:
    bodies = [b"%d" % number * 20 for number in range(3 * count)]
    groups = [
        Group(
            7 + 3 * number,
            0,
            0,
            [Record(2, 0, 0, 0, memoryview(body)) for body in bodies[3 * number : 3 * number + 3]],
        )
        for number in range(count)
    ]
    vfs = write(groups, 7, 2_000)
    log = LocalGroupLog(vfs, FOLDER)
    log.open(7, 6)
    assert log.next_index == 7 + 3 * count
    assert [bytes(body) for _, _, body in records_from(log.read(7), 7)] == bodies
    assert len(vfs.list_dir(FOLDER)) == segments
