"""The journal: group commit, failure, rolling and recovery."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import Corrupt, OutOfRange, StorageFailed, Unavailable
from broker.runtime.vfs import LocalVfs, Vfs
from broker.storage.dump import dump_segment as dump
from broker.storage.journal import Journal
from broker.storage.segment import encode_header
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import CrashPolicy, MemVfs

FOLDER = "data/journal"


class HeldExecutor(Executor):
    """A file thread that works when told; unless `hold` is set, at once."""

    def __init__(self, hold: bool = False) -> None:
        self.hold = hold
        self._calls: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.append((future, lambda: fn(*args, **kwargs)))
        if not self.hold:
            self.work()
        return future

    def work(self) -> None:
        """Make all calls that wait."""
        calls, self._calls = self._calls, []
        for future, call in calls:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)

    @property
    def waiting_count(self) -> int:
        return len(self._calls)


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
    "roll: create": Fault("create", "*/journal/*"),
    "roll: header": Fault("write", "*/spare*"),
    "roll: header sync": Fault("sync", "*/spare*"),
    "roll: rename": Fault("rename", "*/spare*"),
    "roll: sync of the folder": Fault("sync_dir", "*/journal"),
}


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


# Opening


async def test_an_opened_journal_goes_on_where_the_last_group_ended() -> None:
    vfs = make_vfs()
    for count in (3, 2, 4):
        async with running(open_journal(vfs)) as journal:
            await append(journal, count)
    assert lsns(open_journal(vfs, (1, 9))) == list(range(1, 10))
    assert segments(vfs) == [f"{1:016x}.seg"]


@pytest.mark.parametrize(
    ("needed", "accepted"),
    [((1, 0), True), ((4, 9), True), ((10, 9), True), ((4, 10), False), ((11, 5), False)],
)
async def test_a_journal_must_reach_what_the_manifests_hold(needed: tuple[int, int], accepted: bool) -> None:
    vfs = make_vfs()
    await write(vfs, 9, segment_bytes=150)
    before = vfs.snapshot()
    if accepted:
        assert lsns(open_journal(vfs, needed), needed[0]) == list(range(needed[0], 10))
    else:
        with pytest.raises(Corrupt, match="ends before lsn 10"):
            open_journal(vfs, needed)
    assert vfs.snapshot() == before


@pytest.mark.parametrize("needed", [(1, 1), (2, 1), (2, 0)])
async def test_a_journal_that_is_gone_is_not_a_new_one(needed: tuple[int, int]) -> None:
    vfs = make_vfs()
    with pytest.raises(Corrupt, match="begins after"):
        open_journal(vfs, needed)
    assert not vfs.exists(FOLDER)


async def test_a_journal_that_begins_too_late_is_damage() -> None:
    vfs = make_vfs()
    await write(vfs, 5, segment_bytes=1)
    vfs.remove(f"{FOLDER}/{1:016x}.seg")
    with pytest.raises(Corrupt, match="begins after lsn 1"):
        open_journal(vfs)
    assert lsns(open_journal(vfs, (2, 5)), 2) == [2, 3, 4, 5]


async def test_a_missing_segment_is_damage() -> None:
    vfs = make_vfs()
    await write(vfs, 5, segment_bytes=1)
    vfs.remove(f"{FOLDER}/{3:016x}.seg")
    with pytest.raises(Corrupt, match="lsn 4 comes next"):
        lsns(open_journal(vfs))
    assert lsns(open_journal(vfs, (4, 5)), 4) == [4, 5]  # below what is needed, holes are no matter


async def test_overlapping_segments_are_damage() -> None:
    vfs, other = make_vfs(), make_vfs()
    await write(vfs, 5, segment_bytes=1)
    await write(other, 3)
    replace(vfs, f"{FOLDER}/{1:016x}.seg", other.snapshot()[f"{FOLDER}/{1:016x}.seg"])
    with pytest.raises(Corrupt, match="lsn 2 comes next"):
        lsns(open_journal(vfs))


@pytest.mark.parametrize("change", ["cut", "flip", "header", "name"])
async def test_only_the_last_segment_may_have_a_tail(change: str) -> None:
    vfs = make_vfs()
    await write(vfs, 6, segment_bytes=150)
    path = f"{FOLDER}/{segments(vfs)[0]}"
    data = bytearray(vfs.snapshot()[path])
    match change:
        case "cut":
            del data[-1:]
        case "flip":
            data[-20] ^= 1
        case "header":
            data[17] ^= 1
        case "name":
            data[:24] = encode_header(2)
    replace(vfs, path, bytes(data))
    with pytest.raises(Corrupt) as raised:
        lsns(open_journal(vfs))
    assert raised.value.path == path


async def test_a_torn_tail_is_cut_and_cutting_it_twice_changes_nothing() -> None:
    vfs = make_vfs()
    await write(vfs, 3)
    path = f"{FOLDER}/{1:016x}.seg"
    whole = vfs.snapshot()[path]
    (end,) = {int(line["group"]) for line in dump(vfs, path) if line.get("lsn") == 3}
    replace(vfs, path, whole[:-9])
    assert lsns(open_journal(vfs, (1, 2))) == [1, 2]
    cut = vfs.snapshot()[path]
    assert cut == whole[:end]
    async with running(open_journal(vfs, (1, 2))) as journal:
        assert vfs.snapshot()[path] == cut
        await append(journal, 1)
    assert vfs.snapshot()[path] == whole
    with pytest.raises(Corrupt, match="ends before lsn 4"):
        open_journal(vfs, (1, 4))


async def test_damage_before_a_good_group_is_refused_and_left_as_it_is() -> None:
    vfs = make_vfs()
    await write(vfs, 3)
    path = f"{FOLDER}/{1:016x}.seg"
    data = bytearray(vfs.snapshot()[path])
    data[40] ^= 4
    replace(vfs, path, bytes(data))
    with pytest.raises(Corrupt, match="is damaged") as raised:
        open_journal(vfs)
    assert (raised.value.path, raised.value.offset) == (path, 24)
    assert vfs.snapshot()[path] == bytes(data)


CUT_ROLLS = {
    "empty": b"",
    "short header": encode_header(4)[:20],
    "zeros": bytes(4096),
    "former life": encode_header(1) + bytes(100),
}


@pytest.mark.parametrize("content", CUT_ROLLS.values(), ids=CUT_ROLLS.keys())
async def test_a_cut_roll_is_removed_if_it_is_the_last(content: bytes) -> None:
    vfs = make_vfs()
    await write(vfs, 3)
    path = f"{FOLDER}/{4:016x}.seg"
    replace(vfs, path, content)
    async with running(open_journal(vfs, (4, 3), segment_bytes=1)) as journal:
        assert not vfs.exists(path)
        await append(journal, 1)  # rolls to that name again
    assert lsns(open_journal(vfs, (1, 4))) == [1, 2, 3, 4]
    replace(vfs, f"{FOLDER}/{2:016x}.seg", content)
    with pytest.raises(Corrupt):
        lsns(open_journal(vfs))


async def test_a_cut_first_segment_is_a_new_journal() -> None:
    vfs = make_vfs()
    vfs.make_dir(FOLDER)
    replace(vfs, f"{FOLDER}/{1:016x}.seg", b"")
    async with running(open_journal(vfs)) as journal:
        await append(journal, 1)
    assert lsns(open_journal(vfs, (1, 1))) == [1]


async def test_a_newer_segment_is_refused_even_if_it_is_the_last() -> None:
    vfs = make_vfs()
    await write(vfs, 3)
    replace(vfs, f"{FOLDER}/{4:016x}.seg", b"PDJ1\2")
    with pytest.raises(Corrupt, match="version 2"):
        open_journal(vfs)
    assert vfs.exists(f"{FOLDER}/{4:016x}.seg")


async def test_a_group_that_a_killed_broker_left_is_synced_before_it_is_replayed() -> None:
    # It is there to be read, but its sync never returned. If recovery acted on it and the power then went,
    # the journal would end below a manifest.
    vfs, other = make_vfs(), make_vfs()
    await write(vfs, 1)
    await write(other, 2)
    path = f"{FOLDER}/{1:016x}.seg"
    vfs.open(path).pwrite([other.snapshot()[path]], 0)
    assert lsns(open_journal(vfs)) == [1, 2]
    assert lsns(open_journal(vfs.crashed(vfs.op_count, CrashPolicy.LOSE_UNSYNCED))) == [1, 2]


async def test_a_roll_that_a_killed_broker_left_is_named_durably_before_its_first_group() -> None:
    vfs = make_vfs()
    await write(vfs, 3)
    file = vfs.open(f"{FOLDER}/spare-000.seg", create=True)
    file.pwrite([encode_header(4)], 0)
    file.sync()
    vfs.rename(f"{FOLDER}/spare-000.seg", f"{FOLDER}/{4:016x}.seg")
    async with running(open_journal(vfs)) as journal:
        await append(journal, 1)
    assert lsns(open_journal(vfs.crashed(vfs.op_count, CrashPolicy.LOSE_UNSYNCED))) == [1, 2, 3, 4]


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.integers(1, 2**64 - 1), st.integers(0, 3))
def test_any_file_opens_or_is_corrupt(data: bytes, first_lsn: int, with_header: int) -> None:
    vfs = make_vfs()
    vfs.make_dir(FOLDER)
    header = encode_header(first_lsn) if with_header else b""
    replace(vfs, f"{FOLDER}/{first_lsn:016x}.seg", header + data)
    list(dump(vfs, f"{FOLDER}/{first_lsn:016x}.seg"))
    with suppress(Corrupt):
        list(open_journal(vfs).replay(1))
    with suppress(Corrupt):
        list(open_journal(vfs, (first_lsn, first_lsn - 1)).replay(first_lsn))


async def test_dump_gives_json_lines() -> None:
    vfs = make_vfs()
    await write(vfs, 2)
    lines = [json.loads(json.dumps(line)) for line in dump(vfs, f"{FOLDER}/{1:016x}.seg")]
    assert [line["lsn"] for line in lines if line["kind"] == "record"] == [1, 2]
    assert lines[-1]["damaged"] is False


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
