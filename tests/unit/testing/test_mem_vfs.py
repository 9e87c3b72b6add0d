"""Crashes of a `MemVfs`: what they may leave, and what not; the promises MEMVFS-1 to MEMVFS-6."""

from __future__ import annotations

import errno
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.runtime.vfs import LocalVfs, Vfs, replace_file
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import SECTOR_BYTES, CrashPolicy, MemVfs

KEEP, LOSE = CrashPolicy.KEEP_ALL, CrashPolicy.LOSE_UNSYNCED
NO_NAMES, NO_DATA = CrashPolicy.NAMES_LOST_DATA_KEPT, CrashPolicy.NAMES_KEPT_DATA_LOST
TORN, ZEROED = CrashPolicy.TORN, CrashPolicy.ZEROED

Step = Callable[[MemVfs], None]


def write(path: str, data: bytes, *, offset: int = 0, sync: bool = False, create: bool = False) -> Step:
    def step(vfs: MemVfs) -> None:
        file = vfs.open(path, create=create)
        file.pwrite([data], offset)
        if sync:
            file.sync()
        file.close()

    return step


def truncate(path: str, length: int) -> Step:
    return lambda vfs: vfs.open(path).truncate(length)


def rename(source: str, target: str) -> Step:
    return lambda vfs: vfs.rename(source, target)


def remove(path: str) -> Step:
    return lambda vfs: vfs.remove(path)


def make_dir(path: str) -> Step:
    return lambda vfs: vfs.make_dir(path)


def sync_dir(path: str) -> Step:
    return lambda vfs: vfs.sync_dir(path)


def settled() -> MemVfs:
    """A directory `d` with two durable files."""
    vfs = MemVfs()
    vfs.make_dir("/d")
    vfs.sync_dir("/")
    for name in ("a", "b"):
        write(f"/d/{name}", b"old " + name.encode(), create=True, sync=True)(vfs)
    vfs.sync_dir("/d")
    return vfs


OLD = {"d/a": b"old a", "d/b": b"old b"}

CASES: dict[str, tuple[list[Step], CrashPolicy, dict[str, bytes]]] = {
    "nothing happened": ([], LOSE, OLD),
    "file without dir sync vanishes": ([write("/d/n", b"new", create=True, sync=True)], LOSE, OLD),
    "file without dir sync vanishes though data is kept": (
        [write("/d/n", b"new", create=True, sync=True)],
        NO_NAMES,
        OLD,
    ),
    "file without dir sync may stay": (
        [write("/d/n", b"new", create=True, sync=True)],
        NO_DATA,
        OLD | {"d/n": b"new"},
    ),
    "name without data is an empty file": (
        [write("/d/n", b"new", create=True), sync_dir("/d")],
        LOSE,
        OLD | {"d/n": b""},
    ),
    "unsynced overwrite is undone": ([write("/d/a", b"NEW")], LOSE, OLD),
    "unsynced overwrite may stay": ([write("/d/a", b"NEW")], KEEP, OLD | {"d/a": b"NEW a"}),
    "data kept though names are lost": ([write("/d/a", b"NEW")], NO_NAMES, OLD | {"d/a": b"NEW a"}),
    "synced prefix survives an append": ([write("/d/a", b"tail", offset=5)], LOSE, OLD),
    "unsynced append may be zeros": (
        [write("/d/a", b"tail", offset=5)],
        ZEROED,
        OLD | {"d/a": b"old a\0\0\0\0"},
    ),
    "unsynced truncate is undone": ([truncate("/d/a", 0)], LOSE, OLD),
    "unsynced truncate may stay": ([truncate("/d/a", 3)], NO_NAMES, OLD | {"d/a": b"old"}),
    "truncate grows with zeros": ([truncate("/d/a", 7)], KEEP, OLD | {"d/a": b"old a\0\0"}),
    "rename without dir sync may be undone": ([rename("/d/a", "/d/b")], LOSE, OLD),
    "rename without dir sync may stay": ([rename("/d/a", "/d/b")], NO_DATA, {"d/b": b"old a"}),
    "rename before the data's sync leaves an empty file": (
        [write("/d/n", b"new", create=True), rename("/d/n", "/d/a"), sync_dir("/d")],
        LOSE,
        OLD | {"d/a": b""},
    ),
    "synced rename stays": (
        [rename("/d/a", "/d/c"), sync_dir("/d")],
        LOSE,
        {"d/b": b"old b", "d/c": b"old a"},
    ),
    "removal without dir sync is undone": ([remove("/d/a")], LOSE, OLD),
    "synced removal stays": ([remove("/d/a"), sync_dir("/d")], LOSE, {"d/b": b"old b"}),
    "removal after an unsynced write brings back the old bytes": (
        [write("/d/a", b"NEW"), remove("/d/a")],
        LOSE,
        OLD,
    ),
    "directory without its parent's sync takes its files along": (
        [make_dir("/d/e"), write("/d/e/x", b"x", create=True, sync=True), sync_dir("/d/e")],
        LOSE,
        OLD,
    ),
    "directory with both syncs keeps its files": (
        [make_dir("/d/e"), write("/d/e/x", b"x", create=True, sync=True), sync_dir("/d/e"), sync_dir("/d")],
        LOSE,
        OLD | {"d/e/x": b"x"},
    ),
    "renamed directory takes its files along": (
        [make_dir("/d/e"), write("/d/e/x", b"x", create=True), rename("/d/e", "/d/f")],
        KEEP,
        OLD | {"d/f/x": b"x"},
    ),
    "between directories each name needs its own sync": (
        [make_dir("/d/e"), sync_dir("/d"), rename("/d/a", "/d/e/a"), sync_dir("/d/e")],
        LOSE,
        OLD | {"d/e/a": b"old a"},
    ),
}


@pytest.mark.parametrize(("steps", "policy", "left"), CASES.values(), ids=CASES.keys())
def test_crash_leaves(steps: list[Step], policy: CrashPolicy, left: dict[str, bytes]) -> None:
    vfs = settled()
    for step in steps:
        step(vfs)
    assert vfs.crashed(vfs.op_count, policy).snapshot() == left


def test_sync_that_has_not_returned_counts_as_not_done() -> None:
    vfs = settled()
    write("/d/a", b"NEW", sync=True)(vfs)
    done = vfs.op_count
    assert vfs.ops[-1].kind == "sync"
    assert vfs.crashed(done - 1, LOSE).snapshot() == OLD
    assert vfs.crashed(done, LOSE).snapshot()["d/a"] == b"NEW a"


def test_states_are_built_in_any_order_and_of_any_moment() -> None:
    vfs = settled()
    write("/d/a", b"NEW", sync=True)(vfs)
    forward = [vfs.crashed(at, KEEP).snapshot() for at in range(vfs.op_count + 1)]
    backward = [vfs.crashed(at, KEEP).snapshot() for at in reversed(range(vfs.op_count + 1))]
    assert forward == backward[::-1]
    assert forward[0] == {}
    assert forward[-1] == vfs.snapshot()


def test_torn_write_keeps_whole_sectors_and_the_synced_prefix() -> None:
    vfs = settled()
    prefix = b"p" * 700
    write("/d/a", prefix, sync=True)(vfs)
    write("/d/a", b"n" * 3000, offset=700)(vfs)
    new = vfs.snapshot()["d/a"]
    partial = 0
    for seed in range(200):
        torn = vfs.crashed(vfs.op_count, TORN, random.Random(seed)).snapshot()["d/a"]
        assert torn[:700] == prefix
        assert 700 <= len(torn) <= len(new)
        edges = [700, *range(1024, len(torn), SECTOR_BYTES), len(torn)]
        for low, high in itertools.pairwise(edges):
            assert torn[low:high] in (new[low:high], bytes(high - low))
        partial += torn not in (prefix, new)
    assert partial > 100


def test_torn_sector_never_holds_a_later_write_without_an_earlier_one() -> None:
    vfs = settled()
    write("/d/a", b"12345", sync=True)(vfs)
    write("/d/a", b"A")(vfs)
    write("/d/a", b"B", offset=4)(vfs)
    states = {vfs.crashed(vfs.op_count, TORN, random.Random(seed)).snapshot()["d/a"] for seed in range(200)}
    assert states == {b"12345", b"A2345", b"A234B", b"\x00234\x00"}


def test_torn_length_takes_every_value_of_a_small_append() -> None:
    vfs = settled()
    write("/d/a", b"tail", offset=5)(vfs)
    states = (vfs.crashed(vfs.op_count, TORN, random.Random(seed)).snapshot()["d/a"] for seed in range(300))
    assert {len(state) for state in states} == {5, 6, 7, 8, 9}


@pytest.mark.parametrize("policy", CrashPolicy)
def test_same_seed_same_state(policy: CrashPolicy) -> None:
    vfs = settled()
    for step in (
        write("/d/a", bytes(range(250)) * 40),
        write("/d/n", b"new", create=True),
        rename("/d/n", "/d/b"),
    ):
        step(vfs)
    at = vfs.op_count
    states = [vfs.crashed(at, policy, random.Random(7)).snapshot() for _ in range(3)]
    assert states[0] == states[1] == states[2]


def test_mixed_crash_keeps_names_in_order_and_everything_synced() -> None:
    vfs = settled()
    for number in range(5):
        write(f"/d/{number}", b"x", create=True, sync=True)(vfs)
    states = set()
    for seed in range(100):
        left = vfs.crashed(vfs.op_count, CrashPolicy.MIXED, random.Random(seed)).snapshot()
        made = [path for path in left if path not in OLD]
        assert made == [f"d/{number}" for number in range(len(made))]
        assert all(left[path] == b"x" for path in made)
        assert {path: left[path] for path in OLD} == OLD
        states.add(len(made))
    assert states == set(range(6))


def test_replace_file_is_atomic_in_every_crash_state() -> None:
    old, new = b"o" * 1500, b"n" * 4000
    vfs = MemVfs()
    vfs.make_dir("/d")
    vfs.sync_dir("/")
    replace_file(vfs, "/d/manifest", [old])
    begun = vfs.op_count
    replace_file(vfs, "/d/manifest", [new[:1000], new[1000:]])
    done = vfs.op_count
    seen: set[bytes] = set()
    for state in vfs.crash_states(first=begun, seeds=range(20)):
        left = state.vfs.snapshot()
        assert left["d/manifest"] in ((old, new) if state.at < done else (new,)), state
        assert set(left) <= {"d/manifest", "d/manifest.new"}
        seen.add(left["d/manifest"])
        # What the crash left can be replaced again, and crashes again as well as the first.
        replace_file(state.vfs, "/d/manifest", [b"third"])
        assert state.vfs.crashed(state.vfs.op_count, LOSE).snapshot() == {"d/manifest": b"third"}
    assert seen == {old, new}


def test_crash_states_of_one_moment_differ() -> None:
    vfs = settled()
    assert [state.policy for state in vfs.crash_states(first=vfs.op_count)] == [KEEP]
    write("/d/n", b"new", create=True)(vfs)
    states = [state.vfs.snapshot() for state in vfs.crash_states(first=vfs.op_count, seeds=range(50))]
    assert len({tuple(state.items()) for state in states}) == len(states)
    assert OLD in states
    assert OLD | {"d/n": b"\0\0\0"} in states


def test_crashed_copy_is_its_own_file_system() -> None:
    vfs = settled()
    assert vfs.lock("/d/lock") is not None
    vfs.faults.add(Fault("write", onward=True))
    copy = vfs.crashed(vfs.op_count, KEEP)
    assert copy.lock("/d/lock") is not None
    write("/d/a", b"NEW")(copy)
    assert vfs.snapshot()["d/a"] == b"old a"
    assert copy.crashed(0, LOSE).snapshot()["d/a"] == b"old a"


def test_trim_keeps_what_was_pending() -> None:
    vfs = settled()
    gone = vfs.open("/d/b")
    vfs.remove("/d/b")
    vfs.sync_dir("/d")
    write("/d/a", b"NEW")(vfs)
    at = vfs.op_count
    vfs.trim()
    assert (vfs.op_count, len(vfs.ops)) == (at, 0)
    gone.pwrite([b"to nobody"], 0)
    gone.sync()
    assert vfs.crashed(at, LOSE).snapshot() == {"d/a": b"old a"}
    assert vfs.crashed(at, KEEP).snapshot() == {"d/a": b"NEW a"}
    with pytest.raises(IndexError):
        vfs.crashed(at - 1, KEEP)


def test_lock_is_held_until_closed() -> None:
    vfs = MemVfs()
    held = vfs.lock("/lock")
    assert held is not None
    assert vfs.lock("lock") is None
    held.close()
    assert vfs.lock("/lock") is not None


def test_failed_sync_makes_nothing_durable_and_no_later_one_does() -> None:
    vfs = settled()
    fault = vfs.faults.add(Fault("sync", "/d/a", nth=2))
    file = vfs.open("/d/a")
    file.sync()
    file.pwrite([b"NEW"], 0)
    with pytest.raises(OSError, match="a") as failure:
        file.sync()
    assert (failure.value.errno, fault.hit_count) == (errno.EIO, 1)
    file.sync()
    assert file.pread(9, 0) == b"NEW a"
    assert vfs.crashed(vfs.op_count, LOSE).snapshot() == OLD


def test_after_a_failed_sync_only_what_is_written_again_becomes_durable() -> None:
    vfs = MemVfs()
    write("/a", b"0123456789", create=True, sync=True)(vfs)
    vfs.sync_dir("/")
    fault = vfs.faults.add(Fault("sync", "/a"))
    file = vfs.open("/a")
    file.pwrite([b"abcdefghij"], 5)
    with pytest.raises(OSError, match="/a"):
        file.sync()
    assert fault.hit_count == 1
    again = vfs.open("/a")  # as another process does
    again.truncate(12)
    again.pwrite([b"XY"], 7)
    again.sync()
    again.sync()
    assert vfs.snapshot() == {"a": b"01234abXYefg"}
    assert vfs.crashed(vfs.op_count, LOSE).snapshot() == {"a": b"0123456XY9\0\0"}
    assert vfs.crashed(vfs.op_count, KEEP).snapshot() == vfs.snapshot()
    again.truncate(3)
    again.sync()
    for policy in CrashPolicy:
        assert vfs.crashed(vfs.op_count, policy).snapshot() == {"a": b"012"}


def test_after_a_kill_what_was_not_durable_is_shown_and_may_still_be_lost() -> None:
    vfs = settled()
    before = vfs.snapshot()
    write("/new", b"new", create=True)(vfs)
    file = vfs.open("/new")
    file.sync()
    vfs.rename("/new", "/named")
    at = vfs.op_count
    file.pwrite([b"later"], 0)
    next_one = vfs.killed(at)
    assert next_one.snapshot() == {**before, "named": b"new"}
    assert next_one.op_count == 0
    assert next_one.crashed(0, LOSE).snapshot() == before
    write("/other", b"of the next one", create=True)(next_one)
    assert next_one.crashed(next_one.op_count, LOSE).snapshot() == before
    next_one.sync_dir("/")
    assert next_one.crashed(next_one.op_count, LOSE).snapshot() == {**before, "named": b"new", "other": b""}
    assert vfs.snapshot() == {**before, "named": b"later"}


def test_fault_from_then_on_hits_only_its_files() -> None:
    vfs = settled()
    vfs.faults.add(Fault("write", "*/b", error=errno.ENOSPC, onward=True))
    write("/d/a", b"fine")(vfs)
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            write("/d/b", b"refused")(vfs)
    vfs.faults.clear()
    write("/d/b", b"taken")(vfs)


def test_short_write_leaves_its_first_bytes() -> None:
    vfs = settled()
    vfs.faults.add(Fault("write", after_bytes=3))
    with pytest.raises(OSError, match="d/a"):
        write("/d/a", b"NEW TAIL")(vfs)
    assert vfs.snapshot()["d/a"] == b"NEW a"


def test_full_file_system_takes_what_fits_and_recovers() -> None:
    vfs = MemVfs(capacity_bytes=10)
    file = vfs.open("f", create=True)
    file.pwrite([b"12345678"], 0)
    assert vfs.free_bytes(".") == 2
    with pytest.raises(OSError, match="No space"):
        file.pwrite([b"abcd"], 8)
    assert (vfs.free_bytes("."), file.size()) == (0, 10)
    file.pwrite([b"over"], 0)  # what is there already needs no more space
    file.truncate(11)  # what is longer and not written takes no space
    assert vfs.free_bytes(".") == 0
    with pytest.raises(OSError, match="No space"):
        file.pwrite([b"x"], 10)
    file.truncate(4)
    assert vfs.free_bytes(".") == 6
    vfs.capacity_bytes = 100
    file.pwrite([b"x" * 50], 4)


def test_zeros_that_were_written_take_space_and_those_of_a_new_length_take_none() -> None:
    vfs = MemVfs(capacity_bytes=100)
    file = vfs.open("f", create=True)
    file.pwrite([bytes(10)], 0)
    file.truncate(50)
    assert vfs.free_bytes(".") == 90
    file.sync()
    vfs.sync_dir("/")
    file.pwrite([bytes(10)], 10)
    file.truncate(15)
    assert vfs.free_bytes(".") == 85
    assert vfs.crashed(vfs.op_count, KEEP).free_bytes(".") == 85
    file.sync()
    again = vfs.crashed(vfs.op_count, LOSE)
    assert again.crashed(again.op_count, LOSE).free_bytes(".") == 85


def _open_missing(vfs: Vfs) -> None:
    vfs.open("/d/x")


ERRORS: dict[str, tuple[Callable[[Vfs], object], type[OSError]]] = {
    "open what is absent": (_open_missing, FileNotFoundError),
    "open below what is absent": (lambda vfs: vfs.open("/x/y", create=True), FileNotFoundError),
    "open below a file": (lambda vfs: vfs.open("/d/a/y"), NotADirectoryError),
    "open a directory": (lambda vfs: vfs.open("/d"), IsADirectoryError),
    "create what is there": (lambda vfs: vfs.open("/d/a", create=True), FileExistsError),
    "remove what is absent": (lambda vfs: vfs.remove("/d/x"), FileNotFoundError),
    "rename what is absent": (lambda vfs: vfs.rename("/d/x", "/d/y"), FileNotFoundError),
    "rename over a directory": (lambda vfs: vfs.rename("/d/a", "/d"), IsADirectoryError),
    "list what is absent": (lambda vfs: vfs.list_dir("/x"), FileNotFoundError),
    "list a file": (lambda vfs: vfs.list_dir("/d/a"), NotADirectoryError),
    "make below what is absent": (lambda vfs: vfs.make_dir("/x/y"), FileNotFoundError),
    "remove a full directory": (lambda vfs: vfs.remove_dir("/d"), OSError),
    "sync what is absent": (lambda vfs: vfs.sync_dir("/x"), FileNotFoundError),
}


@pytest.mark.parametrize(("act", "error"), ERRORS.values(), ids=ERRORS.keys())
def test_refused_operation_changes_nothing(act: Callable[[Vfs], object], error: type[OSError]) -> None:
    vfs = settled()
    before = (vfs.op_count, vfs.snapshot())
    with pytest.raises(error):
        act(vfs)
    assert (vfs.op_count, vfs.snapshot()) == before


def test_file_outlives_its_name_but_not_its_close() -> None:
    vfs = settled()
    file = vfs.open("/d/a")
    vfs.remove("/d/a")
    assert not vfs.exists("/d/a")
    assert file.pread(100, 4) == b"a"
    file.close()
    with pytest.raises(OSError, match="descriptor"):
        file.pread(1, 0)


def test_make_dir_and_list_dir() -> None:
    vfs = settled()
    vfs.make_dir("/d")
    vfs.make_dir("d/e/")
    assert vfs.list_dir("./d") == ["a", "b", "e"]
    vfs.remove_dir("/d/e")
    assert vfs.list_dir("/") == ["d"]


def _do_something(vfs: Vfs, root: str, rng: random.Random) -> object:
    """One random operation and what came of it."""
    paths = [f"{root}{directory}/{name}" for directory in ("", "/p", "/q") for name in ("a", "b", "p", "q")]
    path, other = rng.choice(paths), rng.choice(paths)
    kinds = ("create", "write", "write", "truncate", "read", "rename", "remove", "make_dir", "remove_dir")
    (kind,) = rng.choices(kinds, weights=(8, 4, 4, 2, 2, 3, 1, 3, 1))
    offset, data = rng.randrange(1500), rng.randbytes(rng.randrange(1, 1500))
    try:
        if kind in ("create", "write", "truncate", "read"):
            file = vfs.open(path, create=kind == "create")
            try:
                if kind == "write":
                    file.pwrite([data[:9], data[9:]], offset)
                elif kind == "truncate":
                    file.truncate(offset)
                return file.pread(1000, offset), file.size()
            finally:
                file.close()
        if kind == "rename":
            vfs.rename(path, other)
        else:
            {"remove": vfs.remove, "make_dir": vfs.make_dir, "remove_dir": vfs.remove_dir}[kind](path)
        return [vfs.list_dir(root), vfs.exists(path)]
    except OSError as error:
        # Both refuse to put a file in the place of a directory above it, but Linux gives another number.
        return kind, error.errno if error.errno not in (errno.EISDIR, errno.ENOTEMPTY) else "in the way"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_random_history_looks_as_on_a_real_file_system(seed: int, tmp_path: Path) -> None:
    memory = MemVfs()
    root = str(tmp_path)
    for depth in range(1, len(tmp_path.parts)):
        memory.make_dir("/".join(tmp_path.parts[1 : depth + 1]))
    snapshots = {memory.op_count: memory.snapshot()}
    for step in range(600):
        expected = _do_something(LocalVfs(), root, random.Random(f"{seed}/{step}"))
        assert _do_something(memory, root, random.Random(f"{seed}/{step}")) == expected, step
        snapshots[memory.op_count] = memory.snapshot()
    assert len(snapshots) > 50
    for at, snapshot in snapshots.items():
        assert memory.crashed(at, KEEP).snapshot() == snapshot
