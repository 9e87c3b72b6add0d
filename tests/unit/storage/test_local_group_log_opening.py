"""The local log of groups: what opening it finds, mends and refuses."""

from __future__ import annotations

import errno
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import Corrupt
from broker.runtime.vfs import WriteFailed
from broker.storage.dump import dump_segment as dump
from broker.storage.segment import encode_header
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import CrashPolicy
from tests.unit.storage.group_log_driver import (
    FOLDER,
    append,
    groups,
    lsns,
    make_vfs,
    open_log,
    opened,
    replace,
    segments,
    write,
)

# Opening


async def test_an_opened_journal_goes_on_where_the_last_group_ended() -> None:
    vfs = make_vfs()
    for count in (3, 2, 4):
        async with opened(open_log(vfs)) as log:
            await append(log, count)
    assert lsns(open_log(vfs, (1, 9))) == list(range(1, 10))
    assert segments(vfs) == [f"{1:016x}.seg"]


@pytest.mark.slow
@pytest.mark.parametrize("spares", [False, True])
async def test_a_group_whose_sync_failed_is_durable_once_another_life_went_on_after_it(spares: bool) -> None:
    vfs = make_vfs()
    if spares:
        await write(vfs, 9, segment_bytes=1)
        async with opened(open_log(vfs, (10, 9))) as log:
            await log.trim(9)
            await append(log, 3)
    else:
        await write(vfs, 12)
    needed = (9, 8)
    with pytest.raises(WriteFailed):
        async with opened(open_log(vfs, needed)) as log:
            await append(log, 1)
            vfs.faults.add(Fault("sync", f"{FOLDER}/*"))
            await append(log, 1)
    vfs.faults.clear()
    begun_at = vfs.op_count
    async with opened(open_log(vfs, needed)) as log:
        assert log.next_index == 15, "what is in memory is found"
        opened_at = vfs.op_count
        await append(log, 2)
    for state in vfs.crash_states(first=begun_at, seeds=(0, 1)):
        found = lsns(open_log(state.vfs, needed), 9)
        owed = 16 if state.at == vfs.op_count else 14 if state.at >= opened_at else 13
        assert found == list(range(9, 9 + len(found)))
        assert found[-1] >= owed, state


@pytest.mark.parametrize("operation", ["write", "sync"])
async def test_a_disk_without_room_for_the_last_groups_again_lets_the_journal_open(
    operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    vfs = make_vfs()
    await write(vfs, 12)
    names = vfs.snapshot().keys()
    vfs.faults.add(Fault(operation, "*/spare-*", error=errno.ENOSPC))
    async with opened(open_log(vfs, (9, 8))) as log:
        assert lsns(log, 9) == list(range(9, 13))
        assert vfs.snapshot().keys() == names
        await append(log, 1)
    assert "no room" in caplog.text
    assert "restart the machine" in caplog.text


async def test_a_disk_that_fails_under_the_last_groups_again_ends_the_start() -> None:
    vfs = make_vfs()
    await write(vfs, 12)
    vfs.faults.add(Fault("sync", "*/spare-*"))
    with pytest.raises(WriteFailed):
        open_log(vfs, (9, 8))


async def test_a_journal_that_the_manifests_hold_is_not_written_again() -> None:
    vfs = make_vfs()
    await write(vfs, 9)
    begun_at = vfs.op_count
    open_log(vfs, (10, 9))
    assert {op.kind for op in vfs.ops[begun_at:]} <= {"truncate", "sync", "sync_dir"}


@pytest.mark.parametrize(
    ("needed", "accepted"),
    [((1, 0), True), ((4, 9), True), ((10, 9), True), ((4, 10), False), ((11, 5), False)],
)
async def test_a_journal_must_reach_what_the_manifests_hold(needed: tuple[int, int], accepted: bool) -> None:
    vfs = make_vfs()
    await write(vfs, 9, segment_bytes=150)
    before = vfs.snapshot()
    if accepted:
        assert lsns(open_log(vfs, needed), needed[0]) == list(range(needed[0], 10))
        (last,) = (path for path, data in before.items() if vfs.snapshot()[path] != data)
        before[last] = groups(vfs, last)
    else:
        with pytest.raises(Corrupt, match="ends before lsn 10"):
            open_log(vfs, needed)
    assert vfs.snapshot() == before


@pytest.mark.parametrize("needed", [(1, 1), (2, 1), (2, 0)])
async def test_a_journal_that_is_gone_is_not_a_new_one(needed: tuple[int, int]) -> None:
    vfs = make_vfs()
    with pytest.raises(Corrupt, match="begins after"):
        open_log(vfs, needed)
    assert not vfs.exists(FOLDER)


async def test_a_journal_that_begins_too_late_is_damage() -> None:
    vfs = make_vfs()
    await write(vfs, 5, segment_bytes=1)
    vfs.remove(f"{FOLDER}/{1:016x}.seg")
    with pytest.raises(Corrupt, match="begins after lsn 1"):
        open_log(vfs)
    assert lsns(open_log(vfs, (2, 5)), 2) == [2, 3, 4, 5]


async def test_a_missing_segment_is_damage() -> None:
    vfs = make_vfs()
    await write(vfs, 5, segment_bytes=1)
    vfs.remove(f"{FOLDER}/{3:016x}.seg")
    with pytest.raises(Corrupt, match="lsn 4 comes next"):
        lsns(open_log(vfs))
    assert lsns(open_log(vfs, (4, 5)), 4) == [4, 5]  # below what is needed, holes are no matter


async def test_overlapping_segments_are_damage() -> None:
    vfs, other = make_vfs(), make_vfs()
    await write(vfs, 5, segment_bytes=1)
    await write(other, 3)
    replace(vfs, f"{FOLDER}/{1:016x}.seg", other.snapshot()[f"{FOLDER}/{1:016x}.seg"])
    with pytest.raises(Corrupt, match="lsn 2 comes next"):
        lsns(open_log(vfs))


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
        lsns(open_log(vfs))
    assert raised.value.path == path


async def test_a_torn_tail_is_cut_and_cutting_it_twice_changes_nothing() -> None:
    vfs = make_vfs()
    await write(vfs, 3)
    path = f"{FOLDER}/{1:016x}.seg"
    whole = groups(vfs, path)
    (end,) = {int(line["group"]) for line in dump(vfs, path) if line.get("lsn") == 3}
    replace(vfs, path, whole[:-9])
    assert lsns(open_log(vfs, (1, 2))) == [1, 2]
    cut = vfs.snapshot()[path]
    assert cut == whole[:end]
    async with opened(open_log(vfs, (1, 2))) as log:
        assert vfs.snapshot()[path] == cut
        await append(log, 1)
    assert groups(vfs, path) == whole
    with pytest.raises(Corrupt, match="ends before lsn 4"):
        open_log(vfs, (1, 4))


async def test_a_last_group_that_is_not_whole_is_dropped_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    vfs = make_vfs()
    await write(vfs, 3)
    path = f"{FOLDER}/{1:016x}.seg"
    data = bytearray(groups(vfs, path))
    (end,) = {int(line["group"]) for line in dump(vfs, path) if line.get("lsn") == 3}
    open_log(vfs)
    assert caplog.records == []
    data[end + 14] ^= 4  # its COMMIT is whole
    replace(vfs, path, bytes(data))
    assert lsns(open_log(vfs)) == [1, 2]
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert "Discarded an incomplete group at the end of the journal" in warning.getMessage()
    assert vars(warning)["fields"] == {"path": path, "offset": end, "bytes": len(data) - end}


async def test_damage_before_a_good_group_is_refused_and_left_as_it_is() -> None:
    vfs = make_vfs()
    await write(vfs, 3)
    path = f"{FOLDER}/{1:016x}.seg"
    data = bytearray(vfs.snapshot()[path])
    data[40] ^= 4
    replace(vfs, path, bytes(data))
    with pytest.raises(Corrupt, match="is damaged") as raised:
        open_log(vfs)
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
    async with opened(open_log(vfs, (4, 3), segment_bytes=1)) as log:
        assert not vfs.exists(path)
        await append(log, 1)  # rolls to that name again
    assert lsns(open_log(vfs, (1, 4))) == [1, 2, 3, 4]
    replace(vfs, f"{FOLDER}/{2:016x}.seg", content)
    with pytest.raises(Corrupt):
        lsns(open_log(vfs))


async def test_a_cut_first_segment_is_a_new_journal() -> None:
    vfs = make_vfs()
    vfs.make_dir(FOLDER)
    replace(vfs, f"{FOLDER}/{1:016x}.seg", b"")
    async with opened(open_log(vfs)) as log:
        await append(log, 1)
    assert lsns(open_log(vfs, (1, 1))) == [1]


async def test_a_newer_segment_is_refused_even_if_it_is_the_last() -> None:
    vfs = make_vfs()
    await write(vfs, 3)
    replace(vfs, f"{FOLDER}/{4:016x}.seg", b"PDJ1\2")
    with pytest.raises(Corrupt, match="version 2"):
        open_log(vfs)
    assert vfs.exists(f"{FOLDER}/{4:016x}.seg")


async def test_a_group_that_a_killed_broker_left_is_synced_before_it_is_replayed() -> None:
    # It is there to be read, but its sync never returned. If recovery acted on it and the power then went,
    # the journal would end below a manifest.
    vfs, other = make_vfs(), make_vfs()
    await write(vfs, 1)
    await write(other, 2)
    path = f"{FOLDER}/{1:016x}.seg"
    vfs.open(path).pwrite([other.snapshot()[path]], 0)
    assert lsns(open_log(vfs)) == [1, 2]
    assert lsns(open_log(vfs.crashed(vfs.op_count, CrashPolicy.LOSE_UNSYNCED))) == [1, 2]


async def test_a_roll_that_a_killed_broker_left_is_named_durably_before_its_first_group() -> None:
    vfs = make_vfs()
    await write(vfs, 3)
    file = vfs.open(f"{FOLDER}/spare-000.seg", create=True)
    file.pwrite([encode_header(4)], 0)
    file.sync()
    vfs.rename(f"{FOLDER}/spare-000.seg", f"{FOLDER}/{4:016x}.seg")
    async with opened(open_log(vfs)) as log:
        await append(log, 1)
    assert lsns(open_log(vfs.crashed(vfs.op_count, CrashPolicy.LOSE_UNSYNCED))) == [1, 2, 3, 4]


@given(st.binary(max_size=300), st.integers(1, 2**64 - 1), st.integers(0, 3))
def test_any_file_opens_or_is_corrupt(data: bytes, first_lsn: int, with_header: int) -> None:
    vfs = make_vfs()
    vfs.make_dir(FOLDER)
    header = encode_header(first_lsn) if with_header else b""
    replace(vfs, f"{FOLDER}/{first_lsn:016x}.seg", header + data)
    list(dump(vfs, f"{FOLDER}/{first_lsn:016x}.seg"))
    with suppress(Corrupt):
        list(open_log(vfs).read(1))
    with suppress(Corrupt):
        list(open_log(vfs, (first_lsn, first_lsn - 1)).read(first_lsn))


async def test_dump_gives_json_lines() -> None:
    vfs = make_vfs()
    await write(vfs, 2)
    lines = [json.loads(json.dumps(line)) for line in dump(vfs, f"{FOLDER}/{1:016x}.seg")]
    assert [line["lsn"] for line in lines if line["kind"] == "record"] == [1, 2]
    assert lines[-1]["damaged"] is False
