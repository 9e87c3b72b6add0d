"""The promises of a log of groups, kept by each implementation."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

import pytest

from broker.cluster.object_store import ObjectStore
from broker.errors import Corrupt, Fenced
from broker.runtime.vfs import WriteFailed
from broker.storage.group_log import GroupLog
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import CrashPolicy
from broker.testing.memory_group_log import AppendFault, MemoryGroupLog
from tests.unit.cluster.faulty_store import FaultyStore
from tests.unit.cluster.object_logs import SHARD, create_log, object_store, open_object_log
from tests.unit.storage.group_log_driver import append, append_group, lsns, make_vfs, open_log, turns
from tests.unit.storage.held_executor import HeldExecutor


class Store(Protocol):
    """A place for a log, with the faults of its kind."""

    first: int
    """The first index that is free in a new log."""

    async def open(self) -> GroupLog:
        """Open the log that is there, as after a crash that lost all that may be lost."""

    def hold(self) -> None:
        """From now on appends wait for `work`."""

    def work(self) -> None: ...


class FailingStore(Store, Protocol):
    """A place whose log gives up an append that failed. One in an object store repeats it."""

    def fail_next(self, *, in_doubt: bool) -> None:
        """The next append fails; `in_doubt` of what is stored."""


class LocalStore:
    """A folder in memory, with a segment for each 200 bytes."""

    first = 1

    def __init__(self) -> None:
        self._vfs = make_vfs()
        self._executor = HeldExecutor()
        self._opened: list[int] = []

    async def open(self) -> GroupLog:
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

    first = 1

    def __init__(self) -> None:
        self._log = MemoryGroupLog()

    async def open(self) -> GroupLog:
        self._log = MemoryGroupLog(self._log.groups)
        return self._log

    def hold(self) -> None:
        self._log.hold = True

    def work(self) -> None:
        self._log.work()

    def fail_next(self, *, in_doubt: bool) -> None:
        self._log.faults.append(AppendFault.LOST if in_doubt else AppendFault.NOTHING_STORED)


class LogInObjectStore:
    """A log in an object store, whose first group is there."""

    first = 2

    def __init__(self, store: ObjectStore) -> None:
        self._store = FaultyStore(store)

    async def open(self) -> GroupLog:
        with contextlib.suppress(FileExistsError):
            await create_log(self._store, SHARD)
        return await open_object_log(self._store)

    def hold(self) -> None:
        self._store.hold()

    def work(self) -> None:
        self._store.work()


@pytest.fixture(
    params=[
        "local",
        "memory",
        "object memory",
        "object file",
        "object versitygw",
        pytest.param("object minio", marks=pytest.mark.deep),
    ]
)
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Store]:
    match request.param.split():
        case ["local"]:
            yield LocalStore()
        case ["memory"]:
            yield MemoryStore()
        case ["object", kind]:
            async with object_store(kind, tmp_path, monkeypatch) as objects:
                yield LogInObjectStore(objects)


@pytest.fixture(params=[LocalStore, MemoryStore])
def failing_store(request: pytest.FixtureRequest) -> FailingStore:
    made: Callable[[], FailingStore] = request.param
    return made()


async def test_groups_are_read_from_any_index(store: Store) -> None:
    log, first = await store.open(), store.first
    assert (log.next_index, list(log.read(first))) == (first, [])
    for count in (1, 3, 2):
        await append_group(log, count)
    assert log.next_index == first + 6 and log.stored_bytes > 0
    firsts = [first + group for group in (0, 1, 1, 1, 4, 4)]
    for place, index in enumerate(range(first, first + 6)):
        groups = list(log.read(index))
        assert groups[0].first_lsn == firsts[place], "the group that holds the index comes first"
        assert [group.first_lsn for group in groups] == sorted({*firsts[place:]})
        assert lsns(log, index) == list(range(index, first + 6))
    assert list(log.read(first + 6)) == []


@pytest.mark.slow
async def test_what_was_answered_survives_a_crash_and_the_next_index_with_it(store: Store) -> None:
    log = await store.open()
    for count in (2, 1, 4, 4, 4):
        await append_group(log, count)
        log = await store.open()
        assert lsns(log) == list(range(store.first, log.next_index))
    assert log.next_index == store.first + 15


async def test_an_index_gets_one_group(store: Store) -> None:
    log, first = await store.open(), store.first
    await append_group(log, 3)
    # One that is taken, in the middle of a group, or beyond the first that is free.
    for index in (first, first + 1, first + 2, first + 4):
        with pytest.raises(Fenced) as caught:
            await log.append(index, [(2, [b"another"], 7)])
        assert caught.value.reason == "JOURNAL_FENCED"
    await append(log, 1)
    assert lsns(await store.open()) == list(range(first, first + 4))


async def test_an_append_that_stored_nothing_can_be_repeated(failing_store: FailingStore) -> None:
    log = await failing_store.open()
    failing_store.fail_next(in_doubt=False)
    with pytest.raises(OSError, match=r"Errno|Nothing") as caught:
        await append(log, 20)  # in files, the one that begins a segment
    assert not isinstance(caught.value, WriteFailed)
    index = log.next_index
    await append(log, 1)
    assert lsns(await failing_store.open()) == list(range(1, index + 1))


async def test_an_append_in_doubt_takes_nothing_along(failing_store: FailingStore) -> None:
    log = await failing_store.open()
    await append(log, 2)
    failing_store.fail_next(in_doubt=True)
    with pytest.raises(WriteFailed):
        await append(log, 1)
    assert lsns(await failing_store.open())[:2] == [1, 2]


async def test_nothing_is_read_before_it_is_durable(store: Store) -> None:
    log, first = await store.open(), store.first
    await append(log, 1)
    store.hold()
    appending = asyncio.ensure_future(append(log, 1))
    await turns()
    assert (log.next_index, lsns(log)) == (first + 1, [first])
    store.work()
    await appending
    assert lsns(log) == [first, first + 1]


async def test_the_tail_waits_for_its_group_and_no_longer_than_asked(store: Store) -> None:
    log, first = await store.open(), store.first
    assert await log.tail(first, wait_ms=1) is None
    tailing = [
        asyncio.ensure_future(log.tail(index, wait_ms=60_000)) for index in (first, first + 2, first + 1)
    ]
    await turns()
    for _ in range(2):
        await append_group(log, 2)
    groups = await asyncio.gather(*tailing)
    assert [group and group.first_lsn for group in groups] == [first, first + 2, first]
    there = await log.tail(first + 3, wait_ms=0)
    assert there is not None and there.first_lsn == first + 2
    assert await log.tail(first + 4, wait_ms=0) is None


async def test_trimming_keeps_what_is_needed_and_the_next_index(store: Store) -> None:
    log, first = await store.open(), store.first
    for _ in range(10):
        await append_group(log, 3)
    whole, end = log.stored_bytes, first + 30
    await log.trim(first)
    assert lsns(log) == list(range(first, end))
    await log.trim(first + 13)
    assert lsns(log, first + 13) == list(range(first + 13, end)), (
        "a group that begins before it is needed, too"
    )
    await log.trim(end)
    assert log.next_index == end and list(log.read(end)) == []
    assert 0 < log.stored_bytes <= whole
    with pytest.raises(Corrupt):
        list(log.read(first))
    await append_group(log, 1)
    assert lsns(log, end) == [end]


async def test_shrinking_keeps_what_is_needed_and_the_next_index(store: Store) -> None:
    log, first = await store.open(), store.first
    for _ in range(10):
        await append_group(log, 3)
    end = first + 30
    await log.shrink(end - 1)
    assert lsns(log, end - 1) == [end - 1]
    await log.shrink(end)
    assert log.next_index == end and list(log.read(end)) == []
    await append_group(log, 1)
    assert lsns(log, end) == [end]


async def test_a_cancelled_append_is_stored_or_not_and_does_no_harm(store: Store) -> None:
    log, first = await store.open(), store.first
    await append(log, 1)
    store.hold()
    appending = log.append(first + 1, [(2, [b"perhaps"], 7)])
    await turns()
    appending.cancel()
    store.work()
    await turns()
    groups = [group.first_lsn for group in (await store.open()).read(first)]
    assert groups in ([first], [first, first + 1])


async def test_close_waits_for_the_append_in_flight(store: Store) -> None:
    log, first = await store.open(), store.first
    appending = log.append(first, [(2, [b"last"], 4)])
    await asyncio.gather(appending, log.close())
    assert [group.first_lsn for group in (await store.open()).read(first)] == [first]
