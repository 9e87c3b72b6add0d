"""The journal over a log in an object store: what it answers is there, and who is fenced fails for good."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.cluster.object_group_log import ObjectGroupLog
from broker.cluster.shard_log import OwnedLog
from broker.errors import Fenced, StorageFailed
from broker.storage.group_log import records_from
from broker.storage.journal import Journal
from broker.storage.record_types import RecordType
from tests.unit.cluster.faulty_store import CreateFault, FaultyStore
from tests.unit.cluster.object_logs import SHARD, create_log, object_store, open_object_log

TYPE = RecordType.PRODUCED


@pytest.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FaultyStore]:
    async with object_store("file", tmp_path, monkeypatch) as objects:
        faulty = FaultyStore(objects)
        await create_log(faulty, SHARD)
        yield faulty


@contextlib.asynccontextmanager
async def running(log: ObjectGroupLog) -> AsyncIterator[Journal]:
    journal = Journal(log)
    task = asyncio.create_task(journal.run())
    try:
        yield journal
    finally:
        await journal.close()
        await task


async def stored(store: FaultyStore) -> dict[int, bytes]:
    log = await open_object_log(store, "reader")
    return {lsn: bytes(body) for lsn, _, body in records_from(log.read(1), 1)}


@pytest.mark.slow
async def test_what_is_answered_is_in_the_store_whatever_was_lost_on_the_way(store: FaultyStore) -> None:
    rng = random.Random(1)
    log = await open_object_log(store, "a")
    await log.take_over(2, epoch=1)
    store.create_faults.extend(rng.choice([None, None, *CreateFault]) for _ in range(60))
    answered: dict[int, bytes] = {}
    applied: list[int] = []

    async def submit(journal: Journal, body: bytes) -> None:
        def apply(lsn: int) -> int:
            applied.append(lsn)
            return lsn

        answered[await journal.submit(TYPE, [body], apply)] = body

    async with running(log) as journal:
        for burst in range(20):
            await asyncio.gather(*(submit(journal, b"%d.%d" % (burst, number)) for number in range(7)))
        blank = await journal.submit(RecordType.LOG_BLANK, [], lambda lsn: lsn)
        assert blank == log.next_index - 1, "a heartbeat is a record, too"
    assert applied == sorted(answered) and len(answered) == 140
    store.create_faults.clear()
    await store.arrive()
    assert await stored(store) == answered


async def test_an_owner_that_was_given_up_while_its_store_was_away_ends_without_resigning(
    store: FaultyStore,
) -> None:
    log = await open_object_log(store, "a")
    await log.take_over(2, epoch=1)
    owned = OwnedLog(log, SHARD, ceiling_ms=0)
    owned.resigns_to = "b"
    await log.close()
    await owned.close()
    assert (await open_object_log(store, "b")).next_index == 3


async def test_a_journal_that_is_fenced_fails_for_good_and_tells_who_waits(store: FaultyStore) -> None:
    log, other = await open_object_log(store, "a"), await open_object_log(store, "b")
    await log.take_over(2, epoch=1)
    await other.follow()
    applied: list[int] = []
    async with running(log) as journal:
        await journal.submit(TYPE, [b"before"], applied.append)
        await other.follow()
        await other.take_over(4, epoch=2)
        waiting = [journal.submit(TYPE, [b"after"], applied.append) for _ in range(3)]
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(outcome, StorageFailed) for outcome in outcomes)
        assert isinstance(journal.failed and journal.failed.__cause__, Fenced)
        with pytest.raises(StorageFailed):
            journal.submit(TYPE, [b"never"], applied.append)
    assert applied == [3] and await stored(store) == {3: b"before"}


async def test_a_journal_begins_where_the_one_before_ended(store: FaultyStore) -> None:
    for epoch in range(1, 4):
        log = await open_object_log(store, f"node-{epoch}")
        await log.take_over(log.next_index, epoch)
        async with running(log) as journal:
            assert [bytes(body) for _, _, body in journal.replay(1)] == [
                b"%d" % number for number in range(1, epoch)
            ]
            await journal.submit(TYPE, [b"%d" % epoch], lambda lsn: None)
    assert list((await stored(store)).values()) == [b"1", b"2", b"3"]
