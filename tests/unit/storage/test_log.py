"""A topic's log as ledgers come and go: positions keep their order, and files their time (LOG-1 to LOG-4)."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from google_crc32c import value

from broker.errors import NotFound
from broker.model import ROW, START, Position, UInt32Column
from broker.storage.amendments import NONE
from broker.storage.blocks import LedgerName
from broker.storage.ledger import Ledger
from broker.storage.ledger_files import OpenFiles
from broker.storage.log import TopicLog
from broker.storage.records import Produced
from broker.testing.mem_vfs import MemVfs

EXECUTOR = ThreadPoolExecutor(1)


def make_log(read_executor: ThreadPoolExecutor = EXECUTOR) -> TopicLog:
    vfs = MemVfs()
    vfs.make_dir("ledgers")
    open_files = OpenFiles(vfs)
    return TopicLog(
        lambda ledger_id: Ledger(LedgerName("ledgers", 1, ledger_id, 0), open_files, EXECUTOR, read_executor)
    )


def append(log: TopicLog, ledger_id: int, count: int, due_ms: int = 0) -> None:
    first = log.entry_count(ledger_id) or 0
    rows = np.zeros(count, dtype=ROW)
    rows["length"] = 2
    rows["offset"] = 2 * np.arange(first, first + count)
    rows["crc"] = value(b"xy")
    times = np.full(count, due_ms, dtype=np.int64)
    log.append(Produced(1, ledger_id, first, 5, times, rows, b"xy" * count))


def column(*entry_ids: int) -> UInt32Column:
    return np.array(entry_ids, dtype=np.uint32)


@pytest.fixture
def log() -> TopicLog:
    """Four ledgers, of 3, 2, 4 and 1 entries."""
    made = make_log()
    for ledger_id, count in ((2, 3), (5, 2), (7, 4), (9, 1)):
        append(made, ledger_id, count)
    return made


def ids(log: TopicLog) -> list[int]:
    return [ledger.name.ledger_id for ledger in log]


@pytest.mark.parametrize(
    ("dropped", "left", "begin", "end", "gone_end"),
    [
        ([], [2, 5, 7, 9], (2, 0), (9, 1), START),
        ([2], [5, 7, 9], (5, 0), (9, 1), START),
        ([5, 7], [2, 9], (2, 0), (9, 1), START),
        ([9], [2, 5, 7], (2, 0), (9, 1), (9, 1)),
        ([9, 7], [2, 5], (2, 0), (9, 1), (9, 1)),
        ([7, 9], [2, 5], (2, 0), (9, 1), (9, 1)),
        ([2, 5, 7, 9], [], (9, 1), (9, 1), (9, 1)),
    ],
)
def test_the_end_never_moves_back(
    log: TopicLog,
    dropped: list[int],
    left: list[int],
    begin: Position,
    end: Position,
    gone_end: Position,
):
    for ledger_id in dropped:
        log.drop(ledger_id)
    assert (ids(log), log.begin, log.end, log.gone_end) == (left, begin, end, gone_end)
    restored = make_log()
    restored.restore(list(log), {}, log.gone_end)
    assert (ids(restored), restored.end, restored.gone_end) == (left, end, gone_end)
    append(log, 12, 2)
    assert (ids(log), log.end, log.gone_end) == ([*left, 12], (12, 2), START)
    assert all(ledger.sealed for ledger in list(log)[:-1])


def test_what_is_gone_is_not_counted_and_not_found(log: TopicLog):
    log.drop(5)
    assert log.entry_total == 8
    assert (log.entry_count(5), log.next_ledger_id(2), log.next_ledger_id(5)) == (None, 7, 7)
    assert log.next_ledger_id(9) is None
    assert log.count_from(Position(5, 1)) == 5
    assert log.count_from(START) == 8
    with pytest.raises(NotFound):
        log.times_nowait(5, 0, 1)


def test_a_ledger_that_was_dropped_is_no_more_dirty_and_waits_for_its_files_to_go(log: TopicLog):
    log.drop(7, "7.a1.amend")
    assert sorted(log.dirty) == [2, 5, 9]
    (dropped,) = log.dropped
    assert (dropped.ledger.name.ledger_id, dropped.amendments_file) == (7, "7.a1.amend")


def test_a_sealed_last_ledger_is_not_dirty_again_when_the_log_goes_on(log: TopicLog):
    log.drop(9)
    log.dirty = {}
    append(log, 12, 1)
    assert list(log.dirty) == [12]


def test_undelayed_entries_are_found_behind_ledgers_that_went():
    log = make_log()
    for ledger_id in (1, 2, 3, 4):
        append(log, ledger_id, 2, due_ms=0 if ledger_id % 2 else 50)
    log.drop(1)
    assert log.next_undelayed(START) == Position(3, 0)
    log.drop(3)
    assert log.next_undelayed(START) is None


def test_no_undelayed_entry_is_stepped_over_where_there_are_more_ranges_than_are_remembered():
    log, count = make_log(), 600
    for _ in range(count // 2):
        append(log, 1, 1)
        append(log, 1, 1, due_ms=50)
    for entry_id in range(count):
        next_undelayed = entry_id + entry_id % 2
        expected = Position(1, next_undelayed) if next_undelayed < count else None
        # Where nothing is remembered, each position may be one.
        assert log.next_undelayed(Position(1, entry_id)) in (expected, Position(1, entry_id))
    assert log.next_undelayed(Position(1, count - 11)) == Position(1, count - 10)


def test_who_reads_keeps_files():
    log = make_log()
    assert not log.keeps_files
    with log.keep_files(), log.keep_files():
        assert log.keeps_files
    assert not log.keeps_files


class CountingExecutor(ThreadPoolExecutor):
    def __init__(self) -> None:
        super().__init__(1)
        self.calls = 0

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().submit(*args, **kwargs)


async def test_messages_of_many_ledgers_are_read_in_one_go():
    reads = CountingExecutor()
    log = make_log(reads)
    for ledger_id, count in ((2, 3), (5, 40), (7, 4)):
        append(log, ledger_id, count)
    for ledger in log:
        await ledger.flush()
    append(log, 7, 2)  # these are in memory alone
    wanted = [(2, column(0, 2)), (3, column(0)), (5, column(*range(1, 40, 2))), (7, column(3, 5))]
    found = await log.read_messages(wanted, 1 << 20)
    assert reads.calls == 1
    assert found[1] is None  # there is no such ledger
    for (ledger_id, entry_ids), messages in zip(wanted, found, strict=True):
        if messages is not None:
            _, rows, frames = await log.read(ledger_id, entry_ids, 1 << 20)
            assert messages[0].tolist() == rows.tolist()
            assert messages[1] == frames


@pytest.mark.parametrize(
    ("bytes_max", "counts"), [(0, [0, 0, 0]), (1, [1, 0, 0]), (3, [1, 1, 0]), (5, [2, 1, 0]), (99, [3, 2, 4])]
)
async def test_messages_come_with_frames_while_bytes_are_left(
    log: TopicLog, bytes_max: int, counts: list[int]
):
    for ledger in log:
        await ledger.flush()
    parts = [(2, column(0, 1, 2)), (5, column(0, 1)), (7, column(0, 1, 2, 3))]
    found = await log.read_messages(parts, bytes_max)
    assert [len(messages[0]) for messages in found if messages] == [3, 2, 4]
    assert [len(messages[1]) for messages in found if messages] == counts


async def test_messages_of_a_generation_that_went_are_read_from_its_successor(log: TopicLog):
    for ledger in log:
        await ledger.flush()
    old = next(iter(log))
    files = EXECUTOR.submit(old._storage.delete, MemVfs())
    new = Ledger(LedgerName("ledgers", 1, 2, 1), OpenFiles(MemVfs()), EXECUTOR)
    rows = np.zeros(3, dtype=ROW)
    rows["length"], rows["offset"] = 2, [0, 2, 4]
    new.append(0, np.zeros(3, dtype=np.int64), rows, b"abcdef")
    files.result()
    reading = asyncio.ensure_future(log.read_messages([(2, column(0, 2)), (5, column(1))], 99))
    await asyncio.sleep(0)
    log.swap(new, NONE)
    found = await reading
    assert [messages and messages[1] for messages in found] == [[b"ab", b"ef"], [b"xy"]]
    log.drop(2)
    assert (await log.read_messages([(2, column(0))], 99)) == [None]
