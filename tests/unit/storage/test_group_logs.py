"""The promises of a log of groups, kept by each implementation."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Protocol

import pytest

from broker.errors import Corrupt, Fenced
from broker.runtime.vfs import WriteFailed
from broker.storage.group_log import GroupLog
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import CrashPolicy
from broker.testing.memory_group_log import AppendFault, MemoryGroupLog
from tests.unit.storage.group_log_driver import append, append_group, lsns, make_vfs, open_log, turns
from tests.unit.storage.held_executor import HeldExecutor


class Store(Protocol):
    """A place for a log, with the faults of its kind."""

    def open(self) -> GroupLog:
        """Open the log that is there, as after a crash that lost all that may be lost."""

    def hold(self) -> None:
        """From now on appends wait for `work`."""

    def work(self) -> None: ...

    def fail_next(self, *, in_doubt: bool) -> None:
        """The next append fails; `in_doubt` of what is stored."""


class LocalStore:
    """A folder in memory, with a segment for each 200 bytes."""

    def __init__(self) -> None:
        self._vfs = make_vfs()
        self._executor = HeldExecutor()
        self._opened: list[int] = []

    def open(self) -> GroupLog:
        self._vfs = self._vfs.crashed(self._vfs.op_count, CrashPolicy.LOSE_UNSYNCED)
        return open_log(self._vfs, segment_bytes=200, executor=self._executor)

    def hold(self) -> None:
        self._executor.hold = True

    def work(self) -> None:
        self._executor.work()

    def fail_next(self, *, in_doubt: bool) -> None:
        if in_doubt:
            self._vfs.faults.add(Fault("sync", "*/journal/*"))
        else:
            self._vfs.faults.add(Fault("create", "*/spare*", error=errno.EMFILE))


class MemoryStore:
    """A dictionary of groups."""

    def __init__(self) -> None:
        self._log = MemoryGroupLog()

    def open(self) -> GroupLog:
        self._log = MemoryGroupLog(self._log.groups)
        return self._log

    def hold(self) -> None:
        self._log.hold = True

    def work(self) -> None:
        self._log.work()

    def fail_next(self, *, in_doubt: bool) -> None:
        self._log.faults.append(AppendFault.LOST if in_doubt else AppendFault.NOTHING_STORED)


@pytest.fixture(params=[LocalStore, MemoryStore])
def store(request: pytest.FixtureRequest) -> Store:
    made: Callable[[], Store] = request.param
    return made()


async def test_groups_are_read_from_any_index(store: Store) -> None:
    log = store.open()
    assert (log.next_index, list(log.read(1))) == (1, [])
    for count in (1, 3, 2):
        await append_group(log, count)
    assert log.next_index == 7 and log.stored_bytes > 0
    firsts = [1, 2, 2, 2, 5, 5]
    for index in range(1, 7):
        groups = list(log.read(index))
        assert groups[0].first_lsn == firsts[index - 1], "the group that holds the index comes first"
        assert [group.first_lsn for group in groups] == sorted({*firsts[index - 1 :]})
        assert lsns(log, index) == list(range(index, 7))
    assert list(log.read(7)) == []


async def test_what_was_answered_survives_a_crash_and_the_next_index_with_it(store: Store) -> None:
    log = store.open()
    for count in (2, 1, 4, 4, 4):
        await append_group(log, count)
        log = store.open()
        assert lsns(log) == list(range(1, log.next_index))
    assert log.next_index == 16


async def test_an_index_gets_one_group(store: Store) -> None:
    log = store.open()
    await append_group(log, 3)
    for index in (
        1,
        2,
        3,
        5,
    ):  # one that is taken, in the middle of a group, or beyond the first that is free
        with pytest.raises(Fenced):
            await log.append(index, [(2, [b"another"], 7)])
    await append(log, 1)
    assert lsns(store.open()) == [1, 2, 3, 4]


async def test_an_append_that_stored_nothing_can_be_repeated(store: Store) -> None:
    log = store.open()
    store.fail_next(in_doubt=False)
    with pytest.raises(OSError, match=r"Errno|Nothing") as caught:
        await append(log, 20)  # in files, the one that begins a segment
    assert not isinstance(caught.value, WriteFailed)
    index = log.next_index
    await append(log, 1)
    assert lsns(store.open()) == list(range(1, index + 1))


async def test_an_append_in_doubt_takes_nothing_along(store: Store) -> None:
    log = store.open()
    await append(log, 2)
    store.fail_next(in_doubt=True)
    with pytest.raises(WriteFailed):
        await append(log, 1)
    assert lsns(store.open())[:2] == [1, 2]


async def test_nothing_is_read_before_it_is_durable(store: Store) -> None:
    log = store.open()
    await append(log, 1)
    store.hold()
    appending = asyncio.ensure_future(append(log, 1))
    await turns()
    assert (log.next_index, lsns(log)) == (2, [1])
    store.work()
    await appending
    assert lsns(log) == [1, 2]


async def test_the_tail_waits_for_its_group_and_no_longer_than_asked(store: Store) -> None:
    log = store.open()
    assert await log.tail(1, wait_ms=1) is None
    tailing = [asyncio.ensure_future(log.tail(index, wait_ms=60_000)) for index in (1, 3, 2)]
    await turns()
    for _ in range(2):
        await append_group(log, 2)
    first, third, second = await asyncio.gather(*tailing)
    assert first is not None and second is not None and third is not None
    assert (first.first_lsn, second.first_lsn, third.first_lsn) == (1, 1, 3)
    there = await log.tail(4, wait_ms=0)
    assert there is not None and there.first_lsn == 3
    assert await log.tail(5, wait_ms=0) is None


async def test_trimming_keeps_what_is_needed_and_the_next_index(store: Store) -> None:
    log = store.open()
    for _ in range(10):
        await append_group(log, 3)
    whole = log.stored_bytes
    await log.trim(1)
    assert lsns(log) == list(range(1, 31))
    await log.trim(14)
    assert lsns(log, 14) == list(range(14, 31)), "a group that begins before the index is needed, too"
    await log.trim(31)
    assert log.next_index == 31 and list(log.read(31)) == []
    assert 0 < log.stored_bytes <= whole
    with pytest.raises(Corrupt):
        list(log.read(1))
    await append_group(log, 1)
    assert lsns(log, 31) == [31]


async def test_a_cancelled_append_is_stored_or_not_and_does_no_harm(store: Store) -> None:
    log = store.open()
    await append(log, 1)
    store.hold()
    appending = log.append(2, [(2, [b"perhaps"], 7)])
    await turns()
    appending.cancel()
    store.work()
    await turns()
    assert [group.first_lsn for group in store.open().read(1)] in ([1], [1, 2])


async def test_close_waits_for_the_append_in_flight(store: Store) -> None:
    log = store.open()
    appending = log.append(1, [(2, [b"last"], 4)])
    await asyncio.gather(appending, log.close())
    assert [group.first_lsn for group in store.open().read(1)] == [1]
