"""Backups in an object store: what a base holds, and a crash at each operation of a restore from it."""

from __future__ import annotations

import asyncio
import random
from functools import cache

import pytest

from broker.cluster.base_manifest import Base
from broker.cluster.base_store import BaseStore
from broker.cluster.file_store import FileStore
from broker.errors import Corrupt, Fenced, LimitReached, Refused
from broker.folder.bases import restore_base, upload_backup
from broker.folder.recovery import open_manifests
from broker.jobs.verify import verify_data_dir
from broker.node import shard_bases
from broker.node.shard_bases import needs_seed
from broker.runtime.steps import InThisThread
from broker.storage.layout import Layout
from broker.storage.manifest import decode_broker
from broker.testing.mem_vfs import CrashPolicy, CrashState, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.crash.history import fold
from tests.crash.test_backup import BACKUPS, RESTORED, BackedUp, Made, observe_folder, recorded
from tests.depth import at_depth, sampled
from tests.harness import DATA_DIR

CHUNK_BYTES = 512
POLICIES = (CrashPolicy.KEEP_ALL, CrashPolicy.LOSE_UNSYNCED, CrashPolicy.MIXED)


def in_store(vfs: MemVfs, clock: SimClock) -> BaseStore:
    """Bases in the folder `store` of a file system in memory."""
    if not vfs.exists("store"):
        vfs.make_dir("store")
    here = InThisThread()
    store = FileStore("store", vfs=vfs, executor=here, modified_ms=lambda path: clock.now_ms())
    return BaseStore(store, clock, here, chunk_bytes=CHUNK_BYTES)


async def upload(recorder: BackedUp, bases: BaseStore, made: Made) -> Base:
    return await upload_backup(bases, recorder.vfs, f"{BACKUPS}/{made.backup.name}", executor=InThisThread())


async def restore(bases: BaseStore, base: Base, vfs: MemVfs, target: str = RESTORED) -> None:
    await restore_base(bases, base, vfs, target, "another-id", executor=InThisThread())


def test_what_a_killed_removal_of_a_folder_left_goes_once_its_root_is_durably_gone():
    """A node gives up a folder that is behind, to begin with a base; another process goes on with that."""
    whole = history().vfs.snapshot()
    vfs = history().vfs.crashed(history().vfs.op_count, CrashPolicy.KEEP_ALL)
    shard_bases._remove_folder(vfs, DATA_DIR)
    removed_at = next(at for at, op in enumerate(vfs.ops, 1) if op.path == f"{DATA_DIR}/broker.manifest")
    killed = vfs.killed(removed_at)
    shard_bases._remove_folder(killed, DATA_DIR)
    for at in sampled(range(killed.op_count + 1), at_depth(change=5, deep=1)):
        for seed in range(4):
            found = killed.crashed(at, CrashPolicy.MIXED, random.Random(f"{at}/{seed}"))
            assert needs_seed(found, DATA_DIR) or found.snapshot() == whole


@cache
def history() -> BackedUp:
    return recorded(seed=1)


@pytest.mark.parametrize("seed", range(1, at_depth(change=2, deep=20)))
def test_each_base_holds_exactly_what_was_applied_at_its_lsn_and_stores_only_what_changed(seed: int) -> None:
    recorder = recorded(seed)

    async def check(_: SimLoop, clock: SimClock) -> None:
        bases = in_store(MemVfs(), clock)
        uploaded = [await upload(recorder, bases, made) for made in recorder.made]
        assert len({base.lsn for base in uploaded}) > 3
        target = MemVfs()
        for number, (base, made) in enumerate(zip(uploaded, recorder.made, strict=True)):
            folder = f"{RESTORED}{number}"
            await restore(bases, base, target, folder)
            assert verify_data_dir(target, folder).problems == []
            assert await observe_folder(target, clock, folder) == fold(made.records), base
        assert sum(base.uploaded_bytes for base in uploaded[1:]) < 0.6 * sum(
            base.bytes for base in uploaded[1:]
        )

    run_sim(check, 1)


def some_of(disk: MemVfs) -> list[CrashState]:
    """Return states of a disk for a change, on each day others, and always the last one; all of them for a deep run."""
    states = list(disk.crash_states(policies=POLICIES))
    return [*sampled(states, at_depth(change=24, deep=1)), states[-1]]


def test_a_crash_at_each_operation_of_a_restore_leaves_what_no_broker_starts_from_or_all_of_it() -> None:
    recorder = history()
    made = recorder.made[-1]

    async def check(_: SimLoop, clock: SimClock) -> None:
        bases = in_store(MemVfs(), clock)
        base = await upload(recorder, bases, made)
        target = MemVfs()
        await restore(bases, base, target)
        expected, outcomes = fold(made.records), {"whole": 0, "again": 0}
        for state in some_of(target):
            layout = Layout(RESTORED)
            if state.vfs.exists(layout.manifest) and not state.vfs.exists(layout.unfinished):
                outcomes["whole"] += 1
            else:
                if state.vfs.exists(layout.root) and state.vfs.list_dir(layout.root) not in ([], ["lock"]):
                    with pytest.raises(Fenced) as caught:
                        open_manifests(state.vfs, layout, 0)
                    assert caught.value.reason == "COPY_UNFINISHED"
                await restore(bases, base, state.vfs)
                outcomes["again"] += 1
            root = decode_broker(state.vfs.snapshot()[layout.manifest], layout.manifest)
            assert root.broker_id == "another-id"
            assert await observe_folder(state.vfs, clock, RESTORED) == expected, state[:3]
        assert min(outcomes.values()) > 0

    run_sim(check, 1)


def test_a_crash_at_each_operation_of_an_upload_to_a_folder_leaves_no_base_or_a_whole_one() -> None:
    recorder = history()
    made = recorder.made[-1]

    async def check(_: SimLoop, clock: SimClock) -> None:
        disk = MemVfs()
        await upload(recorder, in_store(disk, clock), made)
        expected, outcomes = fold(made.records), {"none": 0, "whole": 0}
        seen: set[frozenset[tuple[str, bytes]]] = set()
        for state in some_of(disk):
            if not state.vfs.exists("store"):
                continue
            tree = frozenset(
                (path, body) for path, body in state.vfs.snapshot().items() if "/.new-" not in path
            )
            if tree in seen:
                continue
            seen.add(tree)
            bases = in_store(state.vfs, clock)
            left = [stored.base for stored in await bases.bases()]
            outcomes["whole" if left else "none"] += 1
            if not left:
                left = [await upload(recorder, bases, made)]
            target = MemVfs()
            await restore(bases, left[0], target)
            assert await observe_folder(target, clock, RESTORED) == expected, state[:3]
        assert min(outcomes.values()) > 0

    run_sim(check, 1)


def test_a_restore_is_refused_where_it_would_destroy_or_not_fit() -> None:
    recorder = history()

    async def check(_: SimLoop, clock: SimClock) -> None:
        bases = in_store(MemVfs(), clock)
        base = await upload(recorder, bases, recorder.made[-1])
        target = MemVfs()
        target.make_dir(RESTORED)
        target.open(f"{RESTORED}/mine", create=True).close()
        with pytest.raises(Refused, match="not empty"):
            await restore(bases, base, target)
        assert target.list_dir(RESTORED) == ["mine"]
        small = MemVfs(capacity_bytes=base.bytes // 2)
        with pytest.raises(LimitReached, match="nearly full"):
            await restore(bases, base, small)
        assert small.list_dir(RESTORED) == ["journal", "lock", "topics", "unfinished"]

    run_sim(check, 1)


def test_a_flipped_byte_of_any_object_that_a_restore_needs_is_told_with_its_name() -> None:
    recorder = history()
    made = recorder.made[-1]

    async def check(_: SimLoop, clock: SimClock) -> None:
        disk = MemVfs()
        base = await upload(recorder, in_store(disk, clock), made)
        manifest = await in_store(disk, clock).read_manifest(base.name)
        unused = {f"store/chunks/{name}" for name in manifest.files["backup.json"].chunks}
        objects = sorted(disk.snapshot().keys() - unused)
        assert len(objects) > 10
        for path in objects:
            broken = disk.crashed(disk.op_count, CrashPolicy.KEEP_ALL)
            file = broken.open(path)
            at = file.size() // 2
            file.pwrite([bytes([file.pread(1, at)[0] ^ 4])], at)
            with pytest.raises(Corrupt) as caught:
                await restore(in_store(broken, clock), base, MemVfs())
            assert path.removeprefix("store/") in str(caught.value)

    run_sim(check, 1)


def test_a_restore_that_is_cancelled_lets_go_of_the_folder() -> None:
    recorder = history()

    async def check(_: SimLoop, clock: SimClock) -> None:
        bases = in_store(MemVfs(), clock)
        base = await upload(recorder, bases, recorder.made[-1])
        target = MemVfs()
        for turns in range(1, 200, 10):
            task = asyncio.ensure_future(restore(bases, base, target, f"{RESTORED}{turns}"))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled():
                break
            await restore(bases, base, target, f"{RESTORED}{turns}")

    run_sim(check, 1)
