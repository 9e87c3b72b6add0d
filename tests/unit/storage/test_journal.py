"""The journal: group commit, failure, rolling and dropping."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from broker.errors import OutOfRange, StorageFailed, Unavailable
from broker.runtime.patience import Patience
from broker.runtime.vfs import LocalVfs, Vfs
from broker.storage.frame import framed_bytes
from broker.storage.segment import encode_header
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from tests.unit.storage.held_executor import HeldExecutor
from tests.unit.storage.journal_driver import (
    FOLDER,
    append,
    body,
    keep_lsn,
    lsns,
    make_vfs,
    names,
    open_journal,
    replace,
    running,
    segments,
    turns,
)


async def test_records_come_back_in_order() -> None:
    vfs = make_vfs()
    async with running(open_journal(vfs)) as journal:
        parts = [b"a", memoryview(b"bc")]
        futures = [journal.submit(kind, parts, keep_lsn) for kind in (2, 9, 255)]
        assert await asyncio.gather(*futures) == [1, 2, 3]
        assert (journal.next_lsn, journal.durable_lsn, journal.pending_bytes) == (4, 3, 0)
    journal = open_journal(vfs, (1, 3))
    assert [(lsn, kind, bytes(data)) for lsn, kind, data in journal.replay(2)] == [
        (2, 9, b"abc"),
        (3, 255, b"abc"),
    ]
    assert (journal.next_lsn, journal.durable_lsn) == (4, 3)


async def test_all_is_applied_in_order_before_anybody_is_told() -> None:
    executor = HeldExecutor(hold=True)
    seen: list[str] = []
    async with running(open_journal(make_vfs(), executor=executor)) as journal:

        def apply(lsn: int) -> None:
            assert not any(future.done() for future in futures)
            seen.append(f"applied {lsn}")

        futures = [journal.submit(2, [b"x"], apply) for _ in range(3)]
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, number=number: seen.append(f"told {number}"))
        await turns()
        assert seen == []
        executor.work()
        await turns()
        executor.hold = False
    assert seen == ["applied 1", "applied 2", "applied 3", "told 0", "told 1", "told 2"]


async def test_a_group_gathers_while_the_one_before_is_written() -> None:
    executor = HeldExecutor(hold=True)
    vfs = make_vfs()
    journal = open_journal(vfs, executor=executor, group_bytes_max=100)
    async with running(journal):
        futures = [journal.submit(2, [body(1)], keep_lsn)]
        await turns()
        futures += [journal.submit(2, [b"x" * 40], keep_lsn) for _ in range(3)]
        await turns()
        assert executor.waiting_count == 1  # S3: one group at a time
        assert (journal.next_lsn, journal.durable_lsn) == (2, 0)
        for durable in (1, 2, 3, 4):  # 40 + 12 bytes twice are more than 100 with their padding
            executor.work()
            await turns()
            assert journal.durable_lsn == durable
        executor.hold = False
    assert [future.result() for future in futures] == [1, 2, 3, 4]
    kinds = [op.kind for op in vfs.ops if op.path.endswith(".seg") and op.kind in ("write", "sync")]
    assert kinds == ["write", "sync"] * 5  # the header, then four groups
    assert journal.stats().groups == 4


async def test_a_cancelled_future_changes_nothing() -> None:
    vfs = make_vfs()
    applied: list[int] = []
    async with running(open_journal(vfs)) as journal:
        journal.submit(2, [body(1)], applied.append).cancel()
        assert await journal.submit(2, [body(2)], keep_lsn) == 2
    assert applied == [1]
    assert lsns(open_journal(vfs, (1, 2))) == [1, 2]


async def test_a_bug_in_apply_stops_the_journal() -> None:
    executor = HeldExecutor(hold=True)
    failures: list[StorageFailed] = []
    applied: list[int] = []
    journal = open_journal(make_vfs(), executor=executor, on_failed=failures.append)
    run = asyncio.create_task(journal.run())

    def fail(lsn: int) -> None:
        raise KeyError("bug")

    group = [journal.submit(2, [b"x"], apply) for apply in (keep_lsn, fail, applied.append)]
    await turns()
    later = journal.submit(2, [b"x"], applied.append)
    executor.work()
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
    executor.hold = False
    executor.work()
    await journal.close()


FAULTS = {
    "write": Fault("write", "*/journal/*"),
    "short write": Fault("write", "*/journal/*", after_bytes=5),
    "sync, once": Fault("sync", "*/journal/*"),
    "roll: header": Fault("write", "*/spare*"),
    "roll: header sync": Fault("sync", "*/spare*"),
    "roll: sync of the folder": Fault("sync_dir", "*/journal"),
}


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize(
    ("kind", "glob"),
    [("create", "*/spare*"), ("open", "*/spare*"), ("rename", "*/spare*"), ("open_dir", "*/journal")],
)
async def test_a_roll_that_failed_before_its_group_was_written_is_begun_again(
    kind: str, glob: str, error: int
) -> None:
    vfs = make_vfs()
    opened: list[Any] = []
    open_file = vfs.open

    def open_and_note(path: str, *, create: bool = False) -> Any:
        opened.append(open_file(path, create=create))
        return opened[-1]

    vfs.open = open_and_note  # type: ignore[method-assign]
    repeated: list[int] = []
    patience = Patience(lambda: repeated.append(1))
    async with running(
        open_journal(vfs, segment_bytes=1, spare_segments_max=9, patience=patience)
    ) as journal:
        await append(journal, 3)
        if kind == "open":
            journal.drop_below(3)  # two segments wait as spares
        fault = vfs.faults.add(Fault(kind, glob, error=error))
        await append(journal, 2)
        assert fault.hit_count == len(repeated) == 1
        assert journal.failed is None
        spares = [name for name in vfs.list_dir(f"{FOLDER}") if name.startswith("spare")]
        assert len(spares) == journal.stats().spares, "a spare was forgotten"
    assert opened and all(file._closed for file in opened), "a descriptor was forgotten"
    assert [lsn for lsn, _, _ in open_journal(vfs, (4, 5)).replay(4)] == [4, 5]


async def test_what_waits_for_a_file_ends_with_the_failure_of_another() -> None:
    vfs = make_vfs()
    journal = open_journal(vfs, segment_bytes=1)
    run = asyncio.create_task(journal.run())
    await append(journal, 2)
    vfs.faults.add(Fault("create", "*/spare*", error=errno.EMFILE, onward=True))
    doomed = journal.submit(2, [b"x"], keep_lsn)
    while not vfs.faults.faults[0].hit_count:
        await asyncio.sleep(0)
    journal.fail("A ledger could not be written", OSError(errno.EIO, "Input/output error"))
    with pytest.raises(StorageFailed):
        await doomed
    await run


async def test_a_group_that_becomes_durable_after_writing_has_ended_is_nobodys() -> None:
    executor, reported = HeldExecutor(hold=True), list[StorageFailed]()
    journal = open_journal(make_vfs(), executor=executor, on_failed=reported.append)
    run = asyncio.create_task(journal.run())
    doomed = journal.submit(2, [b"x"], keep_lsn)
    await turns()
    journal.fail("A ledger could not be written", OSError(errno.EIO, "Input/output error"))
    executor.work()
    await run
    assert isinstance(doomed.exception(), StorageFailed)
    assert journal.durable_lsn == 0 and reported == []


@pytest.mark.parametrize("name", FAULTS)
async def test_after_a_failure_nobody_is_answered_and_nothing_is_written(name: str) -> None:
    vfs = make_vfs()
    failures: list[StorageFailed] = []
    applied: list[int] = []
    segment_bytes = 1 if name.startswith("roll") else 1 << 20
    executor = HeldExecutor()
    journal = open_journal(vfs, executor=executor, segment_bytes=segment_bytes, on_failed=failures.append)
    run = asyncio.create_task(journal.run())
    await append(journal, 2)
    executor.hold = True
    doomed = [journal.submit(2, [b"x"], applied.append)]
    await turns()
    doomed += [journal.submit(2, [b"x"], applied.append) for _ in range(2)]
    vfs.faults.add(Fault(**{slot: getattr(FAULTS[name], slot) for slot in ("kind", "glob", "after_bytes")}))
    executor.work()
    await turns()
    await run  # the failure is reported, not raised
    written = vfs.op_count
    executor.hold = False
    for future in doomed:
        error = future.exception()
        assert isinstance(error, StorageFailed)
        assert isinstance(error.__cause__, OSError)
    for _ in range(2):
        with pytest.raises(StorageFailed):
            journal.submit(2, [b"x"], applied.append)
    with pytest.raises(StorageFailed):
        await journal.wait_room()
    await turns()
    assert applied == []
    assert failures == [journal.failed]
    assert (vfs.op_count, journal.durable_lsn, journal.pending_bytes) == (written, 2, 0)
    await journal.close()
    for state in vfs.crash_states(first=written, last=written, seeds=range(5)):
        assert lsns_at_least(state.vfs, 2)


def lsns_at_least(vfs: Vfs, answered: int) -> bool:
    journal = open_journal(vfs, (1, answered))
    return [lsn for lsn, _, _ in journal.replay(1)][:answered] == list(range(1, answered + 1))


async def test_a_cancelled_run_fails_who_waits_and_reports_nothing() -> None:
    executor = HeldExecutor(hold=True)
    failures: list[StorageFailed] = []
    journal = open_journal(make_vfs(), executor=executor, on_failed=failures.append)
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
    executor.hold = False
    executor.work()
    await journal.close()


async def test_close_writes_what_is_queued_and_refuses_more() -> None:
    vfs = make_vfs()
    journal = open_journal(vfs)
    run = asyncio.create_task(journal.run())
    futures = [journal.submit(2, [body(lsn)], keep_lsn) for lsn in (1, 2)]
    await journal.close()
    await run
    assert [future.result() for future in futures] == [1, 2]
    with pytest.raises(Unavailable):
        journal.submit(2, [b"x"], keep_lsn)
    with pytest.raises(Unavailable):
        await journal.wait_room()
    assert lsns(open_journal(vfs, (1, 2))) == [1, 2]


async def test_close_of_a_journal_that_never_ran_writes_too() -> None:
    vfs = make_vfs()
    journal = open_journal(vfs)
    future = journal.submit(2, [body(1)], keep_lsn)
    await journal.close()
    assert future.result() == 1
    assert lsns(open_journal(vfs, (1, 1))) == [1]


async def test_a_cancelled_close_can_be_repeated() -> None:
    executor = HeldExecutor(hold=True)
    journal = open_journal(make_vfs(), executor=executor)
    run = asyncio.create_task(journal.run())
    future = journal.submit(2, [b"x"], keep_lsn)
    await turns()
    closing = asyncio.create_task(journal.close())
    await turns()
    closing.cancel()
    await turns()
    executor.hold = False
    executor.work()
    await journal.close()
    await run
    assert future.result() == 1


async def test_wait_room_holds_back_until_a_group_is_durable() -> None:
    executor = HeldExecutor(hold=True)
    async with running(open_journal(make_vfs(), executor=executor, pending_bytes_max=100)) as journal:
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
            executor.work()
        executor.hold = False
        await asyncio.gather(*producers)


@pytest.mark.parametrize("over", [0, 1])
async def test_limits_of_bytes_are_reached_by_their_last_byte(over: int) -> None:
    executor = HeldExecutor(hold=True)
    pending = 2 * framed_bytes(20)
    options: dict[str, Any] = {
        "executor": executor,
        "group_bytes_max": pending - over,
        "pending_bytes_max": pending + over,
    }
    async with running(open_journal(make_vfs(), **options)) as journal:
        await turns()
        for _ in range(2):
            journal.submit(2, [bytes(20)], keep_lsn)
        waiter = asyncio.create_task(journal.wait_room())
        await turns()
        assert waiter.done() is bool(over), "there is room only below pending_bytes_max"
        executor.work()
        await turns()
        assert journal.durable_lsn == 2 - over, "two records are exactly group_bytes_max"
        executor.hold = False
        executor.work()
        await waiter


async def test_wait_room_ends_with_a_failure() -> None:
    vfs, executor = make_vfs(), HeldExecutor(hold=True)
    journal = open_journal(vfs, executor=executor, pending_bytes_max=1)
    run = asyncio.create_task(journal.run())
    doomed = journal.submit(2, [b"x"], keep_lsn)
    waiter = asyncio.create_task(journal.wait_room())
    await turns()
    vfs.faults.add(Fault("sync"))
    executor.work()
    with pytest.raises(StorageFailed):
        await waiter
    await run
    assert isinstance(doomed.exception(), StorageFailed)


async def test_limits_of_a_record() -> None:
    async with running(open_journal(make_vfs(), record_bytes_max=10, group_bytes_max=1)) as journal:
        with pytest.raises(OutOfRange, match="10"):
            journal.submit(2, [bytes(6), bytes(5)], keep_lsn)
        assert journal.pending_bytes == 0
        assert await journal.submit(2, [bytes(10)], keep_lsn) == 1  # over the group's limit, but alone
        assert await journal.submit(2, [], keep_lsn) == 2


async def test_stats_count_and_syncs_are_observed() -> None:
    observed: list[float] = []
    vfs = make_vfs()
    async with running(open_journal(vfs, segment_bytes=1, observe_sync=observed.append)) as journal:
        await append(journal, 3)
        journal.drop_below(3)
        stats = journal.stats()
        assert (stats.groups, stats.records, stats.durable_lsn) == (3, 3, 3)
        assert (stats.segments, stats.spares) == (1, 2)
        assert stats.bytes == journal.appended_bytes > 0
        assert stats.sync_seconds == sum(observed)
        assert stats.sync_seconds_last == observed[-1]


# Rolling and dropping


async def test_a_full_segment_is_followed_by_a_recycled_one() -> None:
    vfs = make_vfs()
    async with running(open_journal(vfs, segment_bytes=200, spare_segments_max=2)) as journal:
        await append(journal, 40)
        old = vfs.snapshot()[f"{FOLDER}/{segments(vfs)[-2]}"]
        journal.drop_below(41)
        assert [name[:6] for name in names(vfs)[1:]] == ["spare-", "spare-"]
        await append(journal, 5)
        taken = vfs.snapshot()[f"{FOLDER}/{segments(vfs)[1]}"]
        assert len(taken) >= len(old) - 64  # the bytes of the former life are still there
    assert lsns(open_journal(vfs, (41, 45)), 41) == [41, 42, 43, 44, 45]


@pytest.mark.parametrize(("lsn", "left"), [(0, 6), (1, 6), (2, 5), (4, 3), (6, 1), (7, 1), (99, 1)])
async def test_drop_below_keeps_what_is_needed_and_the_active_segment(lsn: int, left: int) -> None:
    vfs = make_vfs()
    async with running(open_journal(vfs, segment_bytes=1, spare_segments_max=3)) as journal:
        await append(journal, 6)
        journal.drop_below(lsn)
        assert journal.stats().segments == len(segments(vfs)) == left
        assert journal.stats().spares == len(names(vfs)) - left == min(6 - left, 3)
        await append(journal, 1)
    assert lsns(open_journal(vfs, (min(lsn, 6) or 1, 7)), 6) == [6, 7]


@pytest.mark.parametrize("kind", ["remove", "rename"])
async def test_what_a_failed_drop_left_is_dropped_by_the_next(kind: str) -> None:
    vfs = make_vfs()
    async with running(open_journal(vfs, segment_bytes=1, spare_segments_max=2)) as journal:
        await append(journal, 6)
        vfs.faults.add(Fault(kind, error=errno.EIO))
        with pytest.raises(OSError, match="Input/output"):
            journal.drop_below(6)
        assert journal.stats().segments == len(segments(vfs)) > 1
        journal.drop_below(6)
        assert (journal.stats().segments, journal.stats().spares) == (len(segments(vfs)), 2) == (1, 2)


async def test_no_spare_takes_the_name_of_one_that_was_found() -> None:
    vfs = make_vfs()
    vfs.make_dir(FOLDER)
    for number in range(3):
        replace(vfs, f"{FOLDER}/spare-{number:03d}.seg", b"?")
    async with running(open_journal(vfs, segment_bytes=1)) as journal:
        await append(journal, 2)  # takes two of them
        journal.drop_below(2)
        assert len(names(vfs)) - len(segments(vfs)) == journal.stats().spares == 2


async def test_names_that_a_crash_brings_back_do_no_harm() -> None:
    vfs = make_vfs()
    async with running(open_journal(vfs, segment_bytes=1)) as journal:
        await append(journal, 6)
        journal.drop_below(6)
        await append(journal, 2)  # takes spares
    for lsn in (1, 2, 4):  # with a hole at 3 and 5, and contents of other lives
        replace(vfs, f"{FOLDER}/{lsn:016x}.seg", encode_header(77) + b"?" * 50)
    async with running(open_journal(vfs, (6, 8))) as journal:
        assert lsns(journal, 6) == [6, 7, 8]
        journal.drop_below(8)
        assert segments(vfs) == [f"{8:016x}.seg"]


async def test_every_crash_keeps_what_was_answered_and_opens() -> None:
    """P1, S1..S4: cut at every operation, in every way, through rolls, drops and recycled files."""
    vfs = make_vfs()
    start, rng = vfs.op_count, random.Random(5)
    answered, needed_from = [(start, 0)], [(start, 1)]
    async with running(open_journal(vfs, segment_bytes=300, spare_segments_max=2)) as journal:
        for _ in range(40):
            first = journal.next_lsn
            group = [journal.submit(2, [body(first + i)], keep_lsn) for i in range(rng.randint(1, 3))]
            await asyncio.gather(*group)
            answered.append((vfs.op_count, journal.durable_lsn))
            if rng.random() < 0.3:
                needed_from.append((vfs.op_count, journal.durable_lsn - 1))
                journal.drop_below(needed_from[-1][1])
    assert any("spare" in op.path for op in vfs.ops if op.kind == "rename")
    checked = 0
    for state in vfs.crash_states(first=start, seeds=range(5)):
        needed = last_at(needed_from, state.at), last_at(answered, state.at)
        check_recovery(state.vfs, needed, deep=rng.random() < 0.1)
        checked += 1
    assert checked > 300


def last_at(history: list[tuple[int, int]], at: int) -> int:
    return max((value for when, value in history if when <= at), default=1)


def check_recovery(vfs: MemVfs, needed: tuple[int, int], *, deep: bool) -> None:
    begin = vfs.op_count
    found = lsns(open_journal(vfs, needed), needed[0])
    assert found == list(range(needed[0], needed[0] + len(found)))
    assert needed[0] + len(found) > needed[1]
    if deep:  # a crash of the recovery, at any point, is recovered to the same, or the unanswered end is gone
        for state in vfs.crash_states(first=begin):
            again = lsns(open_journal(state.vfs, needed), needed[0])
            assert again == found[: len(again)]
            assert needed[0] + len(again) > needed[1]
    # Once opened, what was replayed is durable: recovering a recovery changes nothing.
    lost = vfs.crashed(vfs.op_count, CrashPolicy.LOSE_UNSYNCED)
    assert lsns(open_journal(lost, needed), needed[0]) == found
    assert lost.snapshot() == vfs.snapshot()


async def test_each_step_of_the_roll_leaves_what_the_docstring_says() -> None:
    vfs = make_vfs()
    async with running(open_journal(vfs, segment_bytes=1)) as journal:
        await append(journal, 3)
        journal.drop_below(3)
        first = vfs.op_count
        await append(journal, 1)
        steps = [(op.kind, op.path.rpartition("/")[2][:5]) for op in vfs.ops[first:]]
    header, group = [("write", "spare"), ("sync", "spare")], [("write", "spare"), ("sync", "spare")]
    assert steps == [
        *header,
        ("rename", "spare"),
        ("sync_dir", "journ"),
        *group,
    ]  # an open file keeps its path


async def test_dropping_is_safe_beside_appending(tmp_path: Path) -> None:
    vfs, folder = LocalVfs(), str(tmp_path / "journal")
    with ThreadPoolExecutor(1) as executor:
        journal = open_journal(vfs, folder=folder, segment_bytes=200, executor=executor, spare_segments_max=2)
        async with running(journal):
            for _ in range(200):
                lsn = journal.next_lsn
                dropping = asyncio.get_running_loop().run_in_executor(None, journal.drop_below, lsn - 1)
                assert await journal.submit(2, [body(lsn)], keep_lsn) == lsn
                await dropping
            journal.drop_below(200)
            stats = journal.stats()
            assert stats.segments + stats.spares == len(names(vfs, folder))
    reopened = open_journal(vfs, (200, 200), folder)
    assert lsns(reopened, 200) == [200]


def test_replay_reads_one_segment_at_a_time(tmp_path: Path) -> None:
    async def fill() -> None:
        async with running(open_journal(LocalVfs(), folder=folder, segment_bytes=100)) as journal:
            await append(journal, 30)

    folder = str(tmp_path / "journal")
    asyncio.run(fill())
    replay: Iterator[tuple[int, int, memoryview]] = open_journal(LocalVfs(), (1, 30), folder).replay(1)
    assert next(replay)[0] == 1
    (tmp_path / "journal" / f"{1:016x}.seg").unlink()
    assert [lsn for lsn, _, _ in replay] == list(range(2, 31))
