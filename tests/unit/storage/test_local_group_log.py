"""The local log of groups: rolling, dropping, failing and crashing."""

from __future__ import annotations

import asyncio
import errno
import random
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from broker.runtime.vfs import LocalVfs, WriteFailed
from broker.storage.segment import Group, encode_header
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from tests.unit.storage.group_log_driver import (
    FOLDER,
    append,
    append_group,
    lsns,
    make_vfs,
    names,
    open_log,
    opened,
    replace,
    segments,
    turns,
)

# Failing


FAULTS = {
    "write": Fault("write", "*/journal/*"),
    "short write": Fault("write", "*/journal/*", after_bytes=5),
    "sync, once": Fault("sync", "*/journal/*"),
    "roll: header": Fault("write", "*/spare*"),
    "roll: header sync": Fault("sync", "*/spare*"),
    "roll: sync of the folder": Fault("sync_dir", "*/journal"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_what_was_answered_before_a_failed_write_is_there_after_a_crash(name: str) -> None:
    vfs = make_vfs()
    fault = FAULTS[name]
    async with opened(open_log(vfs, segment_bytes=1 if name.startswith("roll") else 1 << 20)) as log:
        await append(log, 2)
        vfs.faults.add(Fault(fault.kind, fault.glob, after_bytes=fault.after_bytes))
        with pytest.raises(WriteFailed):
            await append(log, 1)
        assert log.next_index == 3
    written = vfs.op_count
    for state in vfs.crash_states(first=written, last=written, seeds=range(5)):
        assert lsns(open_log(state.vfs, (1, 2)))[:2] == [1, 2]


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize(
    ("kind", "glob"),
    [("create", "*/spare*"), ("open", "*/spare*"), ("rename", "*/spare*"), ("open_dir", "*/journal")],
)
async def test_a_roll_that_failed_before_its_group_was_written_is_begun_again(
    kind: str, glob: str, error: int
) -> None:
    vfs = make_vfs()
    handles: list[Any] = []
    open_file = vfs.open

    def open_and_note(path: str, *, create: bool = False) -> Any:
        handles.append(open_file(path, create=create))
        return handles[-1]

    vfs.open = open_and_note  # type: ignore[method-assign]
    async with opened(open_log(vfs, segment_bytes=1, spare_segments_max=9)) as log:
        await append(log, 3)
        if kind == "open":
            await log.trim(3)  # two segments wait as spares
        fault = vfs.faults.add(Fault(kind, glob, error=error))
        with pytest.raises(OSError, match="Errno") as caught:
            await append(log, 1)
        assert fault.hit_count == 1 and not isinstance(caught.value, WriteFailed)
        await append(log, 2)
        spares = [name for name in vfs.list_dir(f"{FOLDER}") if name.startswith("spare")]
        assert len(spares) == log.segments.counts()[1], "a spare was forgotten"
    assert handles and all(file._closed for file in handles), "a descriptor was forgotten"
    assert lsns(open_log(vfs, (4, 5)), 4) == [4, 5]


# Rolling and dropping


async def test_a_full_segment_is_followed_by_a_recycled_one() -> None:
    vfs = make_vfs()
    async with opened(open_log(vfs, segment_bytes=200, spare_segments_max=2)) as log:
        await append(log, 40)
        old = vfs.snapshot()[f"{FOLDER}/{segments(vfs)[-2]}"]
        await log.trim(41)
        assert [name[:6] for name in names(vfs)[1:]] == ["spare-", "spare-"]
        await append(log, 5)
        taken = vfs.snapshot()[f"{FOLDER}/{segments(vfs)[1]}"]
        assert len(taken) >= len(old) - 64  # the bytes of the former life are still there
    assert lsns(open_log(vfs, (41, 45)), 41) == [41, 42, 43, 44, 45]


@pytest.mark.parametrize(("lsn", "left"), [(0, 6), (1, 6), (2, 5), (4, 3), (6, 1), (7, 1), (99, 1)])
async def test_drop_below_keeps_what_is_needed_and_the_active_segment(lsn: int, left: int) -> None:
    vfs = make_vfs()
    async with opened(open_log(vfs, segment_bytes=1, spare_segments_max=3)) as log:
        await append(log, 6)
        await log.trim(lsn)
        assert log.segments.counts()[0] == len(segments(vfs)) == left
        assert log.segments.counts()[1] == len(names(vfs)) - left == min(6 - left, 3)
        await append(log, 1)
    assert lsns(open_log(vfs, (min(lsn, 6) or 1, 7)), 6) == [6, 7]


@pytest.mark.parametrize("kind", ["remove", "rename"])
async def test_what_a_failed_drop_left_is_dropped_by_the_next(kind: str) -> None:
    vfs = make_vfs()
    async with opened(open_log(vfs, segment_bytes=1, spare_segments_max=2)) as log:
        await append(log, 6)
        vfs.faults.add(Fault(kind, error=errno.EIO))
        with pytest.raises(OSError, match="Input/output"):
            await log.trim(6)
        assert log.segments.counts()[0] == len(segments(vfs)) > 1
        await log.trim(6)
        assert log.segments.counts() == (len(segments(vfs)), 2) == (1, 2)


async def test_no_spare_takes_the_name_of_one_that_was_found() -> None:
    vfs = make_vfs()
    vfs.make_dir(FOLDER)
    for number in range(3):
        replace(vfs, f"{FOLDER}/spare-{number:03d}.seg", b"?")
    async with opened(open_log(vfs, segment_bytes=1)) as log:
        await append(log, 2)  # takes two of them
        await log.trim(2)
        assert len(names(vfs)) - len(segments(vfs)) == log.segments.counts()[1] == 2


async def test_names_that_a_crash_brings_back_do_no_harm() -> None:
    vfs = make_vfs()
    async with opened(open_log(vfs, segment_bytes=1)) as log:
        await append(log, 6)
        await log.trim(6)
        await append(log, 2)  # takes spares
    for lsn in (1, 2, 4):  # with a hole at 3 and 5, and contents of other lives
        replace(vfs, f"{FOLDER}/{lsn:016x}.seg", encode_header(77) + b"?" * 50)
    async with opened(open_log(vfs, (6, 8))) as log:
        assert lsns(log, 6) == [6, 7, 8]
        await log.trim(8)
        assert segments(vfs) == [f"{8:016x}.seg"]


@pytest.mark.slow
async def test_every_crash_keeps_what_was_answered_and_opens() -> None:
    """P1, JOURNAL-1 to JOURNAL-4: cut at every operation, in every way, through rolls, drops and recycled files."""
    vfs = make_vfs()
    start, rng = vfs.op_count, random.Random(5)
    answered, needed_from = [(start, 0)], [(start, 1)]
    async with opened(open_log(vfs, segment_bytes=300, spare_segments_max=2)) as log:
        for _ in range(40):
            await append_group(log, rng.randint(1, 3))
            answered.append((vfs.op_count, log.next_index - 1))
            if rng.random() < 0.3:
                needed_from.append((vfs.op_count, log.next_index - 2))
                await log.trim(needed_from[-1][1])
            if rng.random() < 0.2:
                needed_from.append((vfs.op_count, log.next_index))
                await log.shrink(log.next_index)
    assert any("spare" in op.path for op in vfs.ops if op.kind == "rename")
    checked = 0
    for state in vfs.crash_states(first=start, seeds=range(5)):
        needed = last_at(needed_from, state.at), last_at(answered, state.at)
        check_recovery(state.vfs, needed, deep=rng.random() < 0.1)
        checked += 1
    assert checked > 300


def last_at(history: list[tuple[int, int]], at: int) -> int:
    return max((value for when, value in history if when <= at), default=1)


def _segments(vfs: MemVfs) -> dict[str, bytes]:
    return {path: data for path, data in vfs.snapshot().items() if "spare" not in path}


def check_recovery(vfs: MemVfs, needed: tuple[int, int], *, deep: bool) -> None:
    begin = vfs.op_count
    found = lsns(open_log(vfs, needed), needed[0])
    assert found == list(range(needed[0], needed[0] + len(found)))
    assert needed[0] + len(found) > needed[1]
    if deep:  # a crash of the recovery, at any point, is recovered to the same, or the unanswered end is gone
        for state in vfs.crash_states(first=begin):
            again = lsns(open_log(state.vfs, needed), needed[0])
            assert again == found[: len(again)]
            assert needed[0] + len(again) > needed[1]
    # Once opened, what was replayed is durable: recovering a recovery changes nothing.
    lost = vfs.crashed(vfs.op_count, CrashPolicy.LOSE_UNSYNCED)
    assert lsns(open_log(lost, needed), needed[0]) == found
    assert _segments(lost) == _segments(vfs)  # what opened again may have taken a spare


# Shrinking


def roll_steps(vfs: MemVfs, first: int) -> list[tuple[str, str]]:
    return [(op.kind, op.path.rpartition("/")[2][:5]) for op in vfs.ops[first:]]


async def test_at_rest_one_small_segment_is_left_and_the_log_goes_on_in_it() -> None:
    vfs = make_vfs()
    async with opened(open_log(vfs, segment_bytes=200, spare_segments_max=2)) as log:
        await append(log, 40)
        await log.trim(40)
        assert len(names(vfs)) == 3 and log.stored_bytes > 400
        await log.shrink(41)
        assert names(vfs) == [f"{41:016x}.seg"]
        assert vfs.snapshot()[f"{FOLDER}/{41:016x}.seg"] == encode_header(41)
        assert log.stored_bytes == len(encode_header(41))
        first = vfs.op_count
        await log.shrink(41)
        assert vfs.op_count == first, "it was small"
        await append(log, 5)
        assert lsns(log, 41) == [41, 42, 43, 44, 45]
    assert lsns(open_log(vfs, (41, 45)), 41) == [41, 42, 43, 44, 45]


async def test_what_is_dropped_at_rest_goes_after_the_next_segment_is_there_for_good() -> None:
    vfs = make_vfs()
    async with opened(open_log(vfs, segment_bytes=1, spare_segments_max=2)) as log:
        await append(log, 3)
        await log.trim(3)
        first = vfs.op_count
        await log.shrink(4)
    assert roll_steps(vfs, first) == [
        ("remove", "spare"),
        ("remove", "spare"),
        ("create", "spare"),
        ("write", "spare"),
        ("sync", "spare"),
        ("rename", "spare"),
        ("sync_dir", "journ"),
        ("remove", "00000"),
    ]


async def test_a_recycled_file_with_little_in_it_goes_too() -> None:
    vfs = make_vfs()
    async with opened(open_log(vfs, segment_bytes=1 << 20, spare_segments_max=1)) as log:
        replace(vfs, f"{FOLDER}/spare-001.seg", bytes(1 << 20))
    async with opened(open_log(vfs, segment_bytes=1 << 20, spare_segments_max=1)) as log:
        await log.append(1, [(2, [bytes(1 << 20)], 1 << 20)])
        await append(log, 1)
        assert segments(vfs) == [f"{1:016x}.seg", f"{2:016x}.seg"] and log.segments.counts()[1] == 0
        await log.shrink(3)
        assert names(vfs) == [f"{3:016x}.seg"]


async def test_what_was_appended_meanwhile_stays_where_it_is() -> None:
    vfs = make_vfs()
    async with opened(open_log(vfs, segment_bytes=1)) as log:
        await append(log, 3)
        below = log.next_index
        await append(log, 1)
        await log.shrink(below)
        assert segments(vfs) == [f"{4:016x}.seg"] and lsns(log, 4) == [4]


async def test_a_little_segment_is_not_worth_another() -> None:
    vfs = make_vfs()
    async with opened(open_log(vfs, segment_bytes=1 << 20)) as log:
        await append(log, 3)
        first = vfs.op_count
        await log.shrink(4)
        assert vfs.op_count == first


async def test_a_full_disk_is_left_alone_at_rest() -> None:
    """A header that cannot be written would end writing, of a broker that has nothing to write."""
    vfs = make_vfs()
    async with opened(open_log(vfs, segment_bytes=1)) as log:
        await append(log, 3)
        await log.trim(4)
        vfs.capacity_bytes = 1 << 10
        await log.shrink(4)
        assert names(vfs) == [f"{3:016x}.seg"], "the spares are gone"
        vfs.capacity_bytes = None
        await append(log, 1)
    assert lsns(open_log(vfs, (3, 4)), 3) == [3, 4]


@pytest.mark.parametrize(
    ("kind", "glob"),
    [("create", "*/spare*"), ("rename", "*/spare*"), ("open_dir", "*/journal")],
)
async def test_a_shrink_that_failed_is_done_by_the_next_append(kind: str, glob: str) -> None:
    """A name of the next segment may be there: a group in the segment before it would be lost after a crash."""
    vfs = make_vfs()
    async with opened(open_log(vfs, segment_bytes=1 << 10)) as log:
        await append(log, 3)
        fault = vfs.faults.add(Fault(kind, glob, error=errno.EMFILE))
        with pytest.raises(OSError, match="Errno") as caught:
            await log.shrink(4)
        assert fault.hit_count == 1 and not isinstance(caught.value, WriteFailed)
        await append(log, 2)
        assert log.segments.last() == 4
    for policy in CrashPolicy:
        lost = vfs.crashed(vfs.op_count, policy, random.Random(1))
        assert lsns(open_log(lost, (4, 5)), 4) == [4, 5]


@pytest.mark.parametrize(
    ("kind", "glob"), [("write", "*/spare*"), ("sync", "*/spare*"), ("sync_dir", "*/journal")]
)
async def test_after_a_shrink_in_doubt_nothing_is_appended(kind: str, glob: str) -> None:
    vfs = make_vfs()
    async with opened(open_log(vfs, segment_bytes=1 << 10)) as log:
        await append(log, 3)
        vfs.faults.add(Fault(kind, glob))
        shrinking = asyncio.ensure_future(log.shrink(4))
        await turns()
        for _ in range(2):
            with pytest.raises(WriteFailed):
                await append(log, 1)
        with pytest.raises(WriteFailed):
            await shrinking
    for state in vfs.crash_states(first=vfs.op_count, last=vfs.op_count):
        assert lsns(open_log(state.vfs, (1, 3)))[:3] == [1, 2, 3]


async def test_spares_that_cannot_be_removed_stay_known() -> None:
    vfs = make_vfs()
    async with opened(open_log(vfs, segment_bytes=1)) as log:
        await append(log, 4)
        await log.trim(5)
        vfs.faults.add(Fault("remove", "*/spare*", error=errno.EIO))
        with pytest.raises(OSError, match="Input/output"):
            await log.shrink(5)
        assert sum(log.segments.counts()) == len(names(vfs))
        await log.shrink(5)
        assert names(vfs) == [f"{5:016x}.seg"]


@pytest.mark.slow
async def test_shrinking_is_safe_beside_appending_and_reading(tmp_path: Path) -> None:
    vfs, folder = LocalVfs(), str(tmp_path / "journal")
    with ThreadPoolExecutor(1) as executor, ThreadPoolExecutor(1) as upkeep:
        options: dict[str, Any] = {"executor": executor, "upkeep_executor": upkeep, "spare_segments_max": 2}
        async with opened(open_log(vfs, folder=folder, segment_bytes=200, **options)) as log:
            for _ in range(200):
                lsn = log.next_index
                shrinking = asyncio.ensure_future(log.shrink(lsn))
                await append(log, 1)
                await shrinking
                assert lsns(log, lsn) == [lsn]
    assert lsns(open_log(vfs, (200, 200), folder), 200) == [200]


# The steps


async def test_each_step_of_the_roll_leaves_what_the_docstring_says() -> None:
    vfs = make_vfs()
    async with opened(open_log(vfs, segment_bytes=1)) as log:
        await append(log, 3)
        await log.trim(3)
        first = vfs.op_count
        await append(log, 1)
        steps = roll_steps(vfs, first)
    header, group = [("write", "spare"), ("sync", "spare")], [("write", "spare"), ("sync", "spare")]
    lengthened = (
        "truncate",
        "spare",
    )  # the spare was a segment that had no room for more than its first group
    assert steps == [
        *header,
        ("rename", "spare"),
        ("sync_dir", "journ"),
        lengthened,
        *group,
    ]  # an open file keeps its path


@pytest.mark.slow
async def test_trimming_and_reading_are_safe_beside_appending(tmp_path: Path) -> None:
    vfs, folder = LocalVfs(), str(tmp_path / "journal")
    with ThreadPoolExecutor(1) as executor, ThreadPoolExecutor(1) as upkeep:
        options: dict[str, Any] = {"executor": executor, "upkeep_executor": upkeep, "spare_segments_max": 2}
        async with opened(open_log(vfs, folder=folder, segment_bytes=200, **options)) as log:
            for _ in range(200):
                lsn = log.next_index
                trimming = asyncio.ensure_future(log.trim(lsn - 1))
                reading = asyncio.get_running_loop().run_in_executor(None, lsns, log, max(lsn - 1, 1))
                await append(log, 1)
                await trimming
                assert (await reading)[: lsn > 1] == [lsn - 1][: lsn > 1]
            await log.trim(200)
            assert sum(log.segments.counts()) == len(names(vfs, folder))
    assert lsns(open_log(vfs, (200, 200), folder), 200) == [200]


async def test_reading_opens_one_segment_at_a_time(tmp_path: Path) -> None:
    folder = str(tmp_path / "journal")
    async with opened(open_log(LocalVfs(), folder=folder, segment_bytes=100)) as log:
        await append(log, 30)
    groups: Iterator[Group] = open_log(LocalVfs(), (1, 30), folder).read(1)
    assert next(groups).first_lsn == 1
    (tmp_path / "journal" / f"{1:016x}.seg").unlink()
    assert [group.first_lsn for group in groups] == list(range(2, 31))


async def test_a_sync_has_no_new_length_to_make_durable_but_now_and_then() -> None:
    vfs = make_vfs()
    async with opened(open_log(vfs)) as log:
        first = vfs.op_count
        for _ in range(100):
            await append(log, 1)
        kinds = [op.kind for op in vfs.ops[first:]]
    assert kinds == ["truncate", *["write", "sync"] * 100]


async def test_a_file_is_lengthened_within_its_segment_and_never_cut() -> None:
    vfs = make_vfs()
    async with opened(open_log(vfs, segment_bytes=400)) as log:
        await append(log, 20)
    lengths = [op.offset for op in vfs.ops if op.kind == "truncate"]
    assert lengths and all(400 <= length < 550 for length in lengths)


async def test_a_file_that_cannot_be_lengthened_is_written_as_long_as_its_writes_succeed() -> None:
    vfs = make_vfs()
    async with opened(open_log(vfs, segment_bytes=400)) as log:
        failing = vfs.faults.add(Fault("truncate", "*/journal/*", error=errno.EFBIG, onward=True))
        await append(log, 3)
        assert failing.hit_count == 1, "not tried again with each group"
        while log.segments.last() == 1:
            await append(log, 1)
        assert failing.hit_count == 2, "tried again with the next segment"
        vfs.faults.add(Fault("write", "*/journal/*", error=errno.EFBIG))
        written = log.next_index
        with pytest.raises(WriteFailed):
            await append(log, 1)
        assert log.next_index == written
    lost = vfs.crashed(vfs.op_count, CrashPolicy.LOSE_UNSYNCED)
    assert lsns(open_log(lost, (1, written - 1))) == list(range(1, written))


async def test_groups_go_on_up_to_a_limit_of_file_sizes(tmp_path: Path) -> None:
    folder = str(tmp_path / "journal")
    async with opened(open_log(LocalVfs(), folder=folder)) as log:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
        try:
            await append(log, 20)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert lsns(open_log(LocalVfs(), (1, 20), folder)) == list(range(1, 21))


async def test_a_start_that_cannot_cut_the_journal_fails_and_the_next_one_succeeds() -> None:
    vfs = make_vfs()
    async with opened(open_log(vfs)) as log:
        await append(log, 3)
    vfs.faults.add(Fault("truncate", "*/journal/*"))
    with pytest.raises(WriteFailed):
        open_log(vfs, (1, 3))
    assert lsns(open_log(vfs, (1, 3))) == [1, 2, 3]
