"""The journal: group commit and failure, on a log in memory."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from broker.errors import Fenced, OutOfRange, StorageFailed, Unavailable
from broker.runtime.patience import Patience
from broker.runtime.steps import StepThread
from broker.runtime.vfs import WriteFailed
from broker.storage.frame import Part, framed_bytes
from broker.storage.group_log import NewRecord, StoredGroup
from broker.storage.journal import Journal
from broker.storage.local_group_log import LocalGroupLog
from broker.testing.mem_vfs import MemVfs
from broker.testing.memory_group_log import AppendFault, MemoryGroupLog
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.unit.storage.group_log_driver import turns


@asynccontextmanager
async def running(journal: Journal) -> AsyncIterator[Journal]:
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


def lsns(log: MemoryGroupLog) -> list[int]:
    """Whatever another broker would replay."""
    return [lsn for lsn, _, _ in Journal(MemoryGroupLog(log.groups)).replay(1)]


async def test_records_come_back_in_order() -> None:
    log = MemoryGroupLog()
    async with running(Journal(log)) as journal:
        parts: list[Part] = [b"a", memoryview(b"bc")]
        futures = [journal.submit(kind, parts, keep_lsn) for kind in (2, 9, 255)]
        assert await asyncio.gather(*futures) == [1, 2, 3]
        assert (journal.next_lsn, journal.durable_lsn, journal.pending_bytes) == (4, 3, 0)
    journal = Journal(MemoryGroupLog(log.groups))
    assert [(lsn, kind, bytes(data)) for lsn, kind, data in journal.replay(2)] == [
        (2, 9, b"abc"),
        (3, 255, b"abc"),
    ]
    assert (journal.next_lsn, journal.durable_lsn) == (4, 3)


async def test_all_is_applied_in_order_before_anybody_is_told() -> None:
    log = MemoryGroupLog(hold=True)
    seen: list[str] = []
    async with running(Journal(log)) as journal:

        def apply(lsn: int) -> None:
            assert not any(future.done() for future in futures)
            seen.append(f"applied {lsn}")

        def tell(number: int, _: asyncio.Future[None]) -> None:
            seen.append(f"told {number}")

        futures = [journal.submit(2, [b"x"], apply) for _ in range(3)]
        for number, future in enumerate(futures):
            future.add_done_callback(partial(tell, number))
        await turns()
        assert seen == []
        log.work()
        await turns()
        log.hold = False
    assert seen == ["applied 1", "applied 2", "applied 3", "told 0", "told 1", "told 2"]


async def test_a_group_gathers_while_the_one_before_is_written() -> None:
    log = MemoryGroupLog(hold=True)
    journal = Journal(log, group_bytes_max=100)
    async with running(journal):
        futures = [journal.submit(2, [b"x" * 12], keep_lsn)]
        await turns()
        futures += [journal.submit(2, [b"x" * 40], keep_lsn) for _ in range(3)]
        await turns()
        assert log.waiting_count == 1  # JOURNAL-3: one group at a time
        assert (journal.next_lsn, journal.durable_lsn) == (2, 0)
        for durable in (1, 2, 3, 4):  # 40 + 12 bytes twice are more than 100 with their padding
            log.work()
            await turns()
            assert journal.durable_lsn == durable
        log.hold = False
    assert [future.result() for future in futures] == [1, 2, 3, 4]
    assert list(log.groups) == [1, 2, 3, 4]
    assert journal.stats().groups == 4


async def test_a_cancelled_future_changes_nothing() -> None:
    log = MemoryGroupLog()
    applied: list[int] = []
    async with running(Journal(log)) as journal:
        journal.submit(2, [b"1"], applied.append).cancel()
        assert await journal.submit(2, [b"2"], keep_lsn) == 2
    assert applied == [1]
    assert lsns(log) == [1, 2]


async def test_a_bug_in_apply_stops_the_journal() -> None:
    log = MemoryGroupLog(hold=True)
    failures: list[StorageFailed] = []
    applied: list[int] = []
    journal = Journal(log, on_failed=failures.append)
    run = asyncio.create_task(journal.run())

    def fail(lsn: int) -> None:
        raise KeyError("bug")

    group = [journal.submit(2, [b"x"], apply) for apply in (keep_lsn, fail, applied.append)]
    await turns()
    later = journal.submit(2, [b"x"], applied.append)
    log.work()
    await turns()
    await run
    assert group[0].result() == 1
    assert isinstance(group[1].exception(), KeyError)
    for future in (group[2], later):
        assert isinstance(future.exception(), StorageFailed)
    assert applied == []
    assert failures == [journal.failed]
    assert isinstance(failures[0].__cause__, KeyError)
    with pytest.raises(StorageFailed):
        journal.submit(2, [b"x"], keep_lsn)
    log.hold = False
    log.work()
    await journal.close()


async def test_a_group_of_which_nothing_was_stored_is_appended_again() -> None:
    repeated: list[int] = []
    log = MemoryGroupLog()
    async with running(Journal(log, patience=Patience(lambda: repeated.append(1)))) as journal:
        log.faults += [AppendFault.NOTHING_STORED] * 2
        assert await journal.submit(2, [b"x"], keep_lsn) == 1
        assert len(repeated) == 2 and journal.failed is None
    assert lsns(log) == [1]


async def test_what_waits_for_the_log_ends_with_the_failure_of_another_file() -> None:
    log = MemoryGroupLog()
    journal = Journal(log)
    run = asyncio.create_task(journal.run())
    log.faults += [AppendFault.NOTHING_STORED] * 1_000
    doomed = journal.submit(2, [b"x"], keep_lsn)
    while len(log.faults) == 1_000:
        await asyncio.sleep(0)
    journal.fail("A ledger could not be written", OSError(errno.EIO, "Input/output error"))
    with pytest.raises(StorageFailed):
        await doomed
    await run
    assert log.groups == {}


async def test_a_group_that_becomes_durable_after_writing_has_ended_is_nobodys() -> None:
    log, reported = MemoryGroupLog(hold=True), list[StorageFailed]()
    journal = Journal(log, on_failed=reported.append)
    run = asyncio.create_task(journal.run())
    doomed = journal.submit(2, [b"x"], keep_lsn)
    await turns()
    journal.fail("A ledger could not be written", OSError(errno.EIO, "Input/output error"))
    log.work()
    await run
    assert isinstance(doomed.exception(), StorageFailed)
    assert journal.durable_lsn == 0 and reported == []


FAILURES = {
    "nothing is known, and nothing is stored": (AppendFault.LOST, WriteFailed),
    "nothing is known, and all is stored": (AppendFault.ANSWER_LOST, WriteFailed),
    "somebody else's group is there": (None, Fenced),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_after_a_failure_nobody_is_answered_and_nothing_is_written(name: str) -> None:
    fault, cause = FAILURES[name]
    failures: list[StorageFailed] = []
    applied: list[int] = []
    log = MemoryGroupLog()
    journal = Journal(log, on_failed=failures.append)
    run = asyncio.create_task(journal.run())
    await asyncio.gather(*[journal.submit(2, [b"x"], keep_lsn) for _ in range(2)])
    log.hold = True
    doomed = [journal.submit(2, [b"x"], applied.append)]
    await turns()
    doomed += [journal.submit(2, [b"x"], applied.append) for _ in range(2)]
    if fault is not None:
        log.faults.append(fault)
    else:
        rival = MemoryGroupLog(log.groups)
        await rival.append(3, [(2, [b"y"], 1)])
    log.work()
    await turns()
    await run  # the failure is reported, not raised
    written = dict(log.groups)
    for future in doomed:
        error = future.exception()
        assert isinstance(error, StorageFailed)
        assert isinstance(error.__cause__, cause)
    for _ in range(2):
        with pytest.raises(StorageFailed):
            journal.submit(2, [b"x"], applied.append)
    with pytest.raises(StorageFailed):
        await journal.wait_room()
    await turns()
    assert applied == [] and log.waiting_count == 0
    assert failures == [journal.failed]
    assert (log.groups, journal.durable_lsn, journal.pending_bytes) == (written, 2, 0)
    await journal.close()
    assert lsns(log)[:2] == [1, 2]


async def test_a_cancelled_run_fails_who_waits_and_reports_nothing() -> None:
    log = MemoryGroupLog(hold=True)
    failures: list[StorageFailed] = []
    journal = Journal(log, on_failed=failures.append)
    run = asyncio.create_task(journal.run())
    await turns()
    futures = [journal.submit(2, [b"x"], keep_lsn)]
    await turns()
    futures.append(journal.submit(2, [b"x"], keep_lsn))
    run.cancel()
    await turns()
    assert run.cancelled()
    assert all(isinstance(future.exception(), StorageFailed) for future in futures)
    assert failures == []
    log.hold = False
    log.work()
    await journal.close()


async def test_close_writes_what_is_queued_and_refuses_more() -> None:
    log = MemoryGroupLog()
    journal = Journal(log)
    run = asyncio.create_task(journal.run())
    futures = [journal.submit(2, [b"x"], keep_lsn) for _ in range(2)]
    await journal.close()
    await run
    assert [future.result() for future in futures] == [1, 2]
    with pytest.raises(Unavailable):
        journal.submit(2, [b"x"], keep_lsn)
    with pytest.raises(Unavailable):
        await journal.wait_room()
    assert log.closed and lsns(log) == [1, 2]


async def test_close_of_a_journal_that_never_ran_writes_too() -> None:
    log = MemoryGroupLog()
    journal = Journal(log)
    future = journal.submit(2, [b"x"], keep_lsn)
    await journal.close()
    assert future.result() == 1
    assert lsns(log) == [1]


async def test_a_cancelled_close_can_be_repeated() -> None:
    log = MemoryGroupLog(hold=True)
    journal = Journal(log)
    run = asyncio.create_task(journal.run())
    future = journal.submit(2, [b"x"], keep_lsn)
    await turns()
    closing = asyncio.create_task(journal.close())
    await turns()
    closing.cancel()
    await turns()
    log.hold = False
    log.work()
    await journal.close()
    await run
    assert future.result() == 1


async def test_wait_room_holds_back_until_a_group_is_durable() -> None:
    log = MemoryGroupLog(hold=True)
    async with running(Journal(log, pending_bytes_max=100)) as journal:
        await journal.wait_room()
        journal.submit(2, [bytes(100)], keep_lsn)
        assert journal.pending_bytes == 112

        async def produce() -> None:
            await journal.wait_room()
            assert journal.pending_bytes < 100
            journal.submit(2, [bytes(100)], keep_lsn)

        producers = [asyncio.create_task(produce()) for _ in range(3)]
        for done_count in (0, 1, 2):
            await turns()
            assert [task.done() for task in producers].count(True) == done_count
            log.work()
        log.hold = False
        await asyncio.gather(*producers)


@pytest.mark.parametrize("over", [0, 1])
async def test_limits_of_bytes_are_reached_by_their_last_byte(over: int) -> None:
    log = MemoryGroupLog(hold=True)
    pending = 2 * framed_bytes(20)
    options: dict[str, Any] = {"group_bytes_max": pending - over, "pending_bytes_max": pending + over}
    async with running(Journal(log, **options)) as journal:
        for _ in range(2):
            journal.submit(2, [bytes(20)], keep_lsn)
        waiter = asyncio.create_task(journal.wait_room())
        await turns()
        assert waiter.done() is bool(over), "there is room only below pending_bytes_max"
        log.work()
        await turns()
        assert journal.durable_lsn == 2 - over, "two records are exactly group_bytes_max"
        log.hold = False
        log.work()
        await waiter


async def test_wait_room_ends_with_a_failure() -> None:
    log = MemoryGroupLog(hold=True)
    journal = Journal(log, pending_bytes_max=1)
    run = asyncio.create_task(journal.run())
    doomed = journal.submit(2, [b"x"], keep_lsn)
    waiter = asyncio.create_task(journal.wait_room())
    await turns()
    log.faults.append(AppendFault.LOST)
    log.work()
    with pytest.raises(StorageFailed):
        await waiter
    await run
    assert isinstance(doomed.exception(), StorageFailed)


async def test_limits_of_a_record() -> None:
    async with running(Journal(MemoryGroupLog(), record_bytes_max=10, group_bytes_max=1)) as journal:
        with pytest.raises(OutOfRange, match="10"):
            journal.submit(2, [bytes(6), bytes(5)], keep_lsn)
        assert journal.pending_bytes == 0
        assert await journal.submit(2, [bytes(10)], keep_lsn) == 1  # over the group's limit, but alone
        assert await journal.submit(2, [], keep_lsn) == 2


async def test_stats_count_and_syncs_are_observed() -> None:
    observed: list[float] = []
    log = MemoryGroupLog()
    async with running(Journal(log, observe_sync=observed.append)) as journal:
        for _ in range(3):
            await journal.submit(2, [b"x"], keep_lsn)
        stats = journal.stats()
        assert (stats.groups, stats.records, stats.pending_bytes) == (3, 3, 0)
        assert stats.bytes == stats.stored_bytes == journal.appended_bytes > 0
        assert len(observed) == 3
        await journal.trim(3)
        assert journal.stats().stored_bytes == len(log.groups[3]) < stats.bytes


def test_groups_of_a_log_that_costs_money_begin_a_gap_apart_and_a_lone_record_does_not_wait() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        log = MemoryGroupLog()
        begun: list[float] = []
        append = log.append

        def note(index: int, records: Sequence[NewRecord]) -> asyncio.Future[StoredGroup]:
            begun.append(loop.time())
            return append(index, records)

        log.append = note  # type: ignore[method-assign]
        async with running(Journal(log, group_gap_ms=50, group_bytes_max=1000)) as journal:
            await asyncio.sleep(1)
            await journal.submit(2, [b"alone"], keep_lsn)
            assert begun == [pytest.approx(1.0)]
            for _ in range(100):
                journal.submit(2, [b"many"], keep_lsn)
                await asyncio.sleep(0.002)
            await journal.submit(2, [b"last"], keep_lsn)
            assert all(later - earlier >= 0.0499 for earlier, later in pairwise(begun))
            assert 5 <= len(begun) <= 7
            await asyncio.sleep(1)
            at = loop.time()
            journal.submit(2, [b"small"], keep_lsn)
            await asyncio.sleep(0.001)
            await asyncio.gather(*(journal.submit(2, [bytes(600)], keep_lsn) for _ in range(3)))
            assert loop.time() - at < 0.11, "a full group does not wait"
            journal.submit(2, [b"at the end"], keep_lsn)

    run_sim(scenario, seed=1)


async def test_those_who_wait_for_a_large_group_are_told_some_at_a_time() -> None:
    """After all of it is applied; what else is due in the loop has its turns in between."""
    log = MemoryGroupLog(hold=True)
    applied: list[int] = []
    async with running(Journal(log)) as journal:
        futures = [journal.submit(2, [b"x"], applied.append) for _ in range(30)]
        await turns()
        log.work()
        told = [0]
        while told[-1] < len(futures):
            await asyncio.sleep(0)
            told.append(sum(future.done() for future in futures))
            assert len(applied) == (30 if told[-1] else len(applied))
        log.hold = False
    assert max(after - before for before, after in pairwise(told)) <= 10


async def test_a_failure_while_a_group_is_told_leaves_its_answers() -> None:
    log = MemoryGroupLog(hold=True)
    async with running(Journal(log)) as journal:
        futures = [journal.submit(2, [b"x"], keep_lsn) for _ in range(30)]
        await turns()
        log.work()
        while not futures[0].done():
            await asyncio.sleep(0)
        assert not futures[-1].done()
        journal.fail("another file could not be written", OSError())
        await turns()
        log.hold = False
    assert [future.result() for future in futures] == list(range(1, 31))


# -- a record that comes alone ---------------------------------------------------------------------------------


@asynccontextmanager
async def at_rest(log: MemoryGroupLog, **options: Any) -> AsyncIterator[Journal]:
    """A journal whose `run` sleeps."""
    async with running(Journal(log, **options)) as journal:
        await turns()
        yield journal


async def test_a_record_that_comes_alone_is_appended_at_once() -> None:
    log = MemoryGroupLog(hold=True)
    async with at_rest(log) as journal:
        for lsn in (1, 2, 3):
            future = journal.submit(2, [b"x"], keep_lsn)
            assert log.waiting_count == 1, "no round of the loop comes before"
            log.work()
            assert await future == lsn == journal.durable_lsn
        log.hold = False
    assert lsns(log) == [1, 2, 3]


async def test_where_records_come_together_the_first_one_waits_for_those_of_its_round() -> None:
    log = MemoryGroupLog(hold=True)
    async with at_rest(log) as journal:
        futures = [journal.submit(2, [b"x"], keep_lsn) for _ in range(3)]
        log.work()  # the first one, alone
        await turns()
        log.work()
        assert await asyncio.gather(*futures) == [1, 2, 3]
        for _ in range(2):
            journal.submit(2, [b"x"], keep_lsn)
        assert log.waiting_count == 0
        await turns()
        log.hold = False
        log.work()
    assert list(log.groups) == [1, 2, 4]


async def test_what_comes_while_a_record_is_stored_alone_is_the_next_group() -> None:
    log = MemoryGroupLog(hold=True)
    told: list[int] = []
    async with at_rest(log) as journal:
        futures = [journal.submit(2, [b"x"], keep_lsn)]
        log.work()  # it is stored, and the loop has not heard of it yet
        futures += [journal.submit(2, [b"x"], keep_lsn) for _ in range(2)]
        for future in futures:
            future.add_done_callback(lambda done: told.append(done.result()))
        await turns()
        log.hold = False
        log.work()
        await asyncio.gather(*futures)
    assert told == [1, 2, 3]
    assert list(log.groups) == [1, 2]


async def test_an_apply_that_submits_gets_its_own_group() -> None:
    log = MemoryGroupLog()
    later: list[asyncio.Future[int]] = []
    async with at_rest(log) as journal:

        def apply(lsn: int) -> int:
            later.append(journal.submit(2, [b"y"], keep_lsn))
            return lsn

        assert await journal.submit(2, [b"x"], apply) == 1
        assert await later[0] == 2
    assert list(log.groups) == [1, 2]


async def test_a_record_alone_of_which_nothing_was_stored_is_appended_again() -> None:
    log = MemoryGroupLog()
    log.faults += [AppendFault.NOTHING_STORED] * 2
    async with at_rest(log) as journal:
        futures = [journal.submit(2, [b"x"], keep_lsn)]
        await turns()
        futures.append(journal.submit(2, [b"x"], keep_lsn))
        assert await asyncio.gather(*futures) == [1, 2]
    assert list(log.groups) == [1, 2]


@pytest.mark.parametrize("name", FAILURES)
async def test_after_the_failure_of_a_record_alone_nothing_is_answered(name: str) -> None:
    fault, cause = FAILURES[name]
    failures: list[StorageFailed] = []
    applied: list[int] = []
    log = MemoryGroupLog(hold=True)
    async with at_rest(log, on_failed=failures.append) as journal:
        doomed = journal.submit(2, [b"x"], applied.append)
        if fault is not None:
            log.faults.append(fault)
        else:
            await MemoryGroupLog(log.groups).append(1, [(2, [b"y"], 1)])
        log.work()
        await turns()
        error = doomed.exception()
        assert isinstance(error, StorageFailed) and isinstance(error.__cause__, cause)
        assert applied == [] and failures == [journal.failed]
        with pytest.raises(StorageFailed):
            journal.submit(2, [b"x"], applied.append)


async def test_a_record_alone_that_becomes_durable_after_writing_has_ended_is_nobodys() -> None:
    log = MemoryGroupLog(hold=True)
    applied: list[int] = []
    async with at_rest(log) as journal:
        doomed = journal.submit(2, [b"x"], applied.append)
        journal.fail("A ledger could not be written", OSError(errno.EIO, "Input/output error"))
        log.work()
        await turns()
        assert isinstance(doomed.exception(), StorageFailed)
        assert applied == [] and journal.durable_lsn == 0


async def test_close_waits_for_a_record_alone() -> None:
    log = MemoryGroupLog(hold=True)
    async with at_rest(log) as journal:
        future = journal.submit(2, [b"x"], keep_lsn)
        closing = asyncio.create_task(journal.close())
        await turns()
        assert not closing.done() and not log.closed
        log.work()
        await closing
        assert future.result() == 1 and log.closed


async def test_a_run_that_is_cancelled_fails_a_record_alone() -> None:
    log = MemoryGroupLog(hold=True)
    journal = Journal(log)
    run = asyncio.create_task(journal.run())
    await turns()
    doomed = journal.submit(2, [b"x"], keep_lsn)
    run.cancel()
    await asyncio.wait([run])
    log.work()
    await turns()
    assert isinstance(doomed.exception(), StorageFailed) and journal.durable_lsn == 0
    await journal.close()


async def test_a_bug_in_the_apply_of_a_record_alone_stops_the_journal() -> None:
    failures: list[StorageFailed] = []
    journal = Journal(MemoryGroupLog(), on_failed=failures.append)
    run = asyncio.create_task(journal.run())
    await turns()

    def fail(lsn: int) -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        await journal.submit(2, [b"x"], fail)
    await run
    assert failures == [journal.failed] and isinstance(failures[0].__cause__, KeyError)


@pytest.mark.parametrize("when", ["appending", "settling"])
async def test_whoever_runs_the_journal_is_told_of_a_bug_with_a_record_alone(when: str) -> None:
    log = MemoryGroupLog()

    def fail(*_: Any) -> Any:
        raise KeyError("bug")

    journal = Journal(log, observe_sync=fail if when == "settling" else None)
    run = asyncio.create_task(journal.run())
    await turns()
    if when == "appending":
        log.append = fail  # type: ignore[method-assign, assignment]
    doomed = journal.submit(2, [b"x"], keep_lsn)
    with pytest.raises(KeyError):
        await run
    assert journal.failed is not None
    assert when == "settling" or isinstance(doomed.exception(), StorageFailed)


async def test_what_is_applied_has_the_context_of_the_journal_and_not_of_who_submits() -> None:
    var: ContextVar[str] = ContextVar("var", default="the journal's")
    async with at_rest(MemoryGroupLog()) as journal:
        var.set("the caller's")
        assert await journal.submit(2, [b"x"], lambda _: var.get()) == "the journal's"


async def test_a_record_alone_is_told_as_soon_as_the_loop_hears_of_it() -> None:
    """In a thread of its own: the journal settles before whoever else waits for the step has a turn."""
    thread = StepThread("journal-of-a-test")
    vfs = MemVfs()
    log = LocalGroupLog(vfs, "journal", executor=thread)
    log.open(1, 0)
    seen: list[str] = []
    appended: list[asyncio.Future[StoredGroup]] = []
    append = log.append

    def note(index: int, records: Sequence[NewRecord]) -> asyncio.Future[StoredGroup]:
        appended.append(append(index, records))
        appended[-1].add_done_callback(lambda _: seen.append("callback"))
        return appended[-1]

    log.append = note  # type: ignore[method-assign]
    async with running(Journal(log)) as journal:
        await turns()
        await journal.submit(2, [b"x"], lambda _: seen.append("applied"))
    assert seen == ["applied", "callback"]
    thread.shutdown()
