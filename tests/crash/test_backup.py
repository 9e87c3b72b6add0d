"""Backups and restores: what they hold, whatever goes on meanwhile; and a crash at each of their operations."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest

from broker.config import BrokerConfig
from broker.errors import Corrupt, Fenced, LimitReached, NotFound, PostdateError, Refused, Unavailable
from broker.folder import backup as backup_module
from broker.folder import tree_copy
from broker.folder.backup import read_marker
from broker.folder.restore import Restore
from broker.storage.backup_marker import Backup
from broker.storage.manifest import decode_broker
from broker.storage.record_types import RecordType
from broker.storage.records import Record
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from broker.topics.schedule_values import Cancel, Move
from tests.crash.history import Model, Recorder, crash_config, fold, observe, play
from tests.depth import at_depth, sampled
from tests.harness import Node, Outgoing
from tests.moving import moves

BACKUPS = "data/backups"
RESTORED = "restored"
POLICIES = (CrashPolicy.KEEP_ALL, CrashPolicy.LOSE_UNSYNCED, CrashPolicy.MIXED)


@dataclass(slots=True)
class Made:
    """A backup, the records that it must hold, and the bytes of its files when it was complete."""

    backup: Backup
    records: list[Record]
    files: dict[str, bytes]


class BackedUp(Recorder):
    """A history during which one backup follows the other."""

    def __init__(self, vfs: MemVfs, clock: SimClock, config: BrokerConfig) -> None:
        super().__init__(vfs, clock, config)
        self.made: list[Made] = []
        self.refused: list[PostdateError] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.checkpoints = False  # whether one follows the other too

    def open(self) -> Node:
        node = Recorder.open(self)
        self.tasks.append(asyncio.get_running_loop().create_task(self._back_up(node)))
        if self.checkpoints:
            self.tasks.append(asyncio.get_running_loop().create_task(self._checkpoint(node)))
        return node

    def kill(self, node: Node) -> None:
        for task in self.tasks:
            task.cancel()
        super().kill(node)

    async def _checkpoint(self, node: Node) -> None:
        while not node.broker._draining:
            await node.checkpoint()
            await asyncio.sleep(0.001)

    async def _back_up(self, node: Node) -> None:
        number = 0
        while True:
            number += 1
            try:
                backup = await node.broker.backups.create(f"n{number}")
            except PostdateError as error:
                self.refused.append(error)
                return
            records = [each.record for each in self.lives[-1].submitted[: backup.lsn]]
            self.made.append(Made(backup, records, files_of(self.vfs, f"{BACKUPS}/{backup.name}")))
            await asyncio.sleep(0.05)


def files_of(vfs: MemVfs, folder: str) -> dict[str, bytes]:
    return {path: data for path, data in vfs.snapshot().items() if path.startswith(f"{folder}/")}


def restore(vfs: MemVfs, name: str, target: str = RESTORED) -> None:
    for _ in Restore(vfs, f"{BACKUPS}/{name}", target, "another-id", 0).steps():
        pass


async def observe_folder(vfs: MemVfs, clock: SimClock, folder: str) -> Model:
    """Recover a broker from a folder and return what it finds."""
    node = Node(vfs, clock, crash_config(data_dir=folder))
    node.open(start=False)
    try:
        return await observe(node)
    finally:
        node.abandon()
        node.broker._lock.close()  # type: ignore[union-attr]


def recorded(seed: int, links: str = "all", **changes: object) -> BackedUp:
    async def scenario(_: SimLoop, clock: SimClock) -> BackedUp:
        recorder = BackedUp(MemVfs(), clock, crash_config(backup_keep_count=0, **changes))
        recorder.checkpoints = seed >= 4
        if links != "all":
            glob = "*" if links == "none" else "data/backup.pins/*"
            recorder.vfs.faults.add(Fault("link", glob, error=errno.EXDEV, onward=True))
        await play(recorder)
        for task in recorder.tasks:
            task.cancel()
        await asyncio.wait(recorder.tasks)
        return recorder

    return run_sim(scenario, seed)


@pytest.mark.parametrize(
    ("seed", "links"),
    [(1, "all"), (2, "none"), (3, "pins"), (4, "all"), (5, "none"), (6, "pins")][
        : at_depth(change=3, deep=6)
    ],
)
def test_a_backup_under_load_holds_exactly_what_was_applied_at_its_lsn_and_never_changes(seed, links):
    recorder = recorded(seed, links)

    async def check(_: SimLoop, clock: SimClock) -> None:
        assert len(recorder.made) > 5
        assert len({made.backup.lsn for made in recorder.made}) > 3
        for number, made in enumerate(recorder.made):
            assert files_of(recorder.vfs, f"{BACKUPS}/{made.backup.name}") == made.files
            restore(recorder.vfs, made.backup.name, f"{RESTORED}{number}")
            found = await observe_folder(recorder.vfs, clock, f"{RESTORED}{number}")
            assert found == fold(made.records), made.backup
            assert files_of(recorder.vfs, f"{BACKUPS}/{made.backup.name}") == made.files, (
                "a restore changed it"
            )

    run_sim(check, 1)
    linked = [made.backup.copied_bytes < made.backup.bytes for made in recorder.made]
    assert any(linked) == (links == "all")


@pytest.mark.parametrize("seed", range(1, at_depth(change=2, deep=4)))
def test_checkpoints_and_records_that_never_end_leave_each_backup_at_one_lsn(monkeypatch, seed):
    monkeypatch.setattr(tree_copy, "_STEP_FILES", 4)

    async def scenario(_: SimLoop, clock: SimClock) -> BackedUp:
        recorder = BackedUp(MemVfs(), clock, crash_config(backup_keep_count=0))
        recorder.checkpoints = True
        node = recorder.open()

        async def produce(topic: str) -> None:
            while len(recorder.made) < 2:
                await node.produce(topic, [message(1), message(2, 60_000)])
                await asyncio.sleep(0.004)

        await asyncio.gather(produce("a"), produce("b"))
        for task in recorder.tasks:
            task.cancel()
        await node.stop()
        return recorder

    recorder = run_sim(scenario, seed)

    async def check(_: SimLoop, clock: SimClock) -> None:
        for number, made in enumerate(recorder.made):
            restore(recorder.vfs, made.backup.name, f"{RESTORED}{number}")
            found = await observe_folder(recorder.vfs, clock, f"{RESTORED}{number}")
            assert found == fold(made.records), made.backup

    run_sim(check, 1)


@pytest.mark.parametrize("seed", range(1, at_depth(change=4, deep=6)))
def test_what_a_killed_life_left_of_a_backup_is_removed(seed):
    recorder = recorded(seed)

    async def check(_: SimLoop, clock: SimClock) -> None:
        node = Node(recorder.vfs, clock, crash_config(backup_keep_count=0)).open()
        await tidied(node)
        names = set(recorder.vfs.list_dir(BACKUPS)) - {"lock"}
        assert {made.backup.name for made in recorder.made} <= names
        assert {each.name for each in await node.broker.backups.list()} == names
        assert not recorder.vfs.exists("data/backup.pins")
        await node.stop()

    run_sim(check, seed)


# -- a crash at each operation ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Scene:
    """A disk on which one backup was made and restored, and what must be found there."""

    vfs: MemVfs
    now_us: int
    backup: Backup
    model: Model
    from_op: int  # of the backup
    made_op: int
    restored_op: int


@cache
def scene() -> Scene:
    async def scenario(_: SimLoop, clock: SimClock) -> Scene:
        recorder = Recorder(MemVfs(), clock, crash_config())
        node = recorder.open()
        await node.create_subscription("orders", "a")
        for first in range(0, 12, 3):
            await node.produce("orders", [message(first + each, 500 * each) for each in range(3)])
        inbox = await node.subscribe("orders", "a")
        await inbox.ack([each.position for each in await inbox.wait(4)][:2])
        await node.checkpoint()
        await node.produce("audit", [message(20)])
        from_op = recorder.vfs.op_count
        more = asyncio.ensure_future(node.produce("orders", [message(21, 60_000), message(22)]))
        backup = await node.broker.backups.create("nightly")
        await more
        made_op = recorder.vfs.op_count
        records = [each.record for each in recorder.lives[-1].submitted[: backup.lsn]]
        await node.stop()
        stopped_op = recorder.vfs.op_count
        restore(recorder.vfs, backup.name)
        assert stopped_op > made_op
        now_us = clock.now_ms() * 1000
        return Scene(recorder.vfs, now_us, backup, fold(records), from_op, made_op, recorder.vfs.op_count)

    return run_sim(scenario, 3)


async def tidied(node: Node) -> None:
    """Check that the remains of an earlier life are gone."""
    while "backups of an earlier life" in node.broker.supervisor.names():
        await asyncio.sleep(0.001)


def message(number: int, after_ms: int = 0) -> Outgoing:
    return Outgoing(f"message {number}".encode(), deliver_after_ms=after_ms)


def states(first: int, last: int) -> Iterator[tuple[int, CrashPolicy, MemVfs]]:
    """The states of some operations, the first and the last among them: (operation, policy, disk)."""
    for at in sorted({first, *sampled(range(first, last), at_depth(change=16, deep=1)), last}):
        for policy in POLICIES:
            yield at, policy, scene().vfs.crashed(at, policy, random.Random(at))


@contextlib.contextmanager
def told(at: int, policy: CrashPolicy) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        op = scene().vfs.ops[at - 1]
        error.add_note(f"crash at {at} ({policy}), after {op.kind} {op.path}")
        raise


def test_a_crash_during_a_backup_leaves_a_whole_one_or_none():
    found = 0
    scene()  # not within another loop

    async def check(_: SimLoop, clock: SimClock) -> None:
        nonlocal found
        for at, policy, vfs in states(scene().from_op, scene().made_op):
            with told(at, policy):
                names = vfs.list_dir(BACKUPS) if vfs.exists(BACKUPS) else []
                for name in names:
                    if name != "lock" and vfs.list_dir(f"{BACKUPS}/{name}"):
                        opened = scene().vfs.crashed(at, policy, random.Random(at))
                        with pytest.raises((Corrupt, Fenced)):
                            Node(opened, clock, crash_config(data_dir=f"{BACKUPS}/{name}")).open(start=False)
                if at == scene().made_op:
                    assert scene().backup.name in names, "it was answered"
                if scene().backup.name in names:
                    found += 1
                    assert read_marker(vfs, f"{BACKUPS}/{scene().backup.name}") == scene().backup
                    restore(vfs, scene().backup.name)
                    assert await observe_folder(vfs, clock, RESTORED) == scene().model
                node = Node(vfs, clock, crash_config()).open()
                await tidied(node)
                assert not node.failures
                assert [each.name for each in await node.broker.backups.list()] == [
                    name for name in names if name == scene().backup.name
                ]
                assert not [name for name in vfs.list_dir("data") if name == "backup.pins"]
                assert not vfs.exists(BACKUPS) or not [
                    n for n in vfs.list_dir(BACKUPS) if n.endswith("partial")
                ]
                await node.stop()

    run_sim(check, 1)
    assert found


def test_what_a_killed_deletion_left_goes_once_it_is_durably_no_backup():
    scene()  # not within another loop

    async def check(_: SimLoop, clock: SimClock) -> None:
        name = scene().backup.name
        vfs = scene().vfs.killed(scene().made_op)
        node = Node(vfs, clock, crash_config()).open()
        await tidied(node)
        await node.broker.backups.delete(name)
        node.abandon()
        renamed_at = next(
            at for at, op in enumerate(vfs.ops, 1) if (op.kind, op.path) == ("rename", f"{BACKUPS}/{name}")
        )
        killed = vfs.killed(renamed_at)
        node = Node(killed, clock, crash_config()).open()
        await tidied(node)
        node.abandon()
        for at in sampled(range(killed.op_count + 1), at_depth(change=2, deep=1)):
            for seed in range(4):
                found = killed.crashed(at, CrashPolicy.MIXED, random.Random(f"{at}/{seed}"))
                if name in found.list_dir(BACKUPS):
                    restore(found, name)
                    assert await observe_folder(found, clock, RESTORED) == scene().model

    run_sim(check, seed=1, start_ms=scene().now_us // 1000)


def test_a_crash_during_a_restore_leaves_what_refuses_to_start_or_all_of_it():
    outcomes = {"nothing": 0, "refused": 0, "whole": 0}
    scene()

    async def check(_: SimLoop, clock: SimClock) -> None:
        for at, policy, vfs in states(scene().made_op, scene().restored_op):
            with told(at, policy):
                names = set(vfs.list_dir(RESTORED)) - {"lock"} if vfs.exists(RESTORED) else set()
                if not names:
                    outcomes["nothing"] += 1
                    restore(vfs, scene().backup.name)
                    continue
                try:
                    opened = scene().vfs.crashed(at, policy, random.Random(at))
                    assert await observe_folder(opened, clock, RESTORED) == scene().model
                    outcomes["whole"] += 1
                    with pytest.raises(Refused, match="not empty"):
                        restore(vfs, scene().backup.name)
                except Fenced as error:
                    outcomes["refused"] += error.reason == "COPY_UNFINISHED"
                    restore(vfs, scene().backup.name)  # begins anew
                assert await observe_folder(vfs, clock, RESTORED) == scene().model

    run_sim(check, 1)
    assert all(outcomes.values()), outcomes
    final = scene().vfs.crashed(scene().restored_op, CrashPolicy.LOSE_UNSYNCED)
    assert final.exists(f"{RESTORED}/broker.manifest"), "a restore that returned is durable"


# -- one after the other ------------------------------------------------------------------------------------------------


def with_node(scenario, **changes):
    async def run(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, crash_config(**changes)).open()
        await node.create_subscription("orders", "a")
        for first in range(0, 12, 3):
            await node.produce("orders", [message(first + each, 500 * each) for each in range(3)])
        await scenario(node)
        await node.stop()
        assert not node.failures

    run_sim(run, 1)


def test_one_at_a_time():
    async def scenario(node: Node) -> None:
        first = asyncio.ensure_future(node.broker.backups.create("first"))
        await asyncio.sleep(0)
        with pytest.raises(Refused) as caught:
            await node.broker.backups.create("second")
        assert caught.value.reason == "BACKUP_RUNNING"
        with pytest.raises(Refused):
            await node.broker.backups.delete("20261121T205812345Z")
        await first
        # Another broker that shares the folder.
        lock = node.vfs.lock(f"{BACKUPS}/lock")
        with pytest.raises(Refused) as caught:
            await node.broker.backups.create("third")
        assert caught.value.reason == "BACKUP_RUNNING"
        lock.close()
        await node.broker.backups.create("fourth")
        assert [each.label for each in await node.broker.backups.list()] == ["first", "fourth"]

    with_node(scenario)


def test_a_caller_who_goes_away_does_not_stop_it():
    async def scenario(node: Node) -> None:
        call = asyncio.ensure_future(node.broker.backups.create("asked"))
        await asyncio.sleep(0)
        call.cancel()
        while not (found := await node.broker.backups.list()):
            await asyncio.sleep(0.001)
        assert found[0].label == "asked"

    with_node(scenario)


def test_a_broker_that_stops_gives_a_backup_up_and_writes_its_checkpoint():
    async def scenario(node: Node) -> None:
        call = asyncio.ensure_future(node.broker.backups.create("late"))
        while not node.vfs.exists("data/backup.pins"):
            await asyncio.sleep(0.0001)
        await node.stop()
        with pytest.raises(Unavailable) as caught:
            await call
        assert caught.value.reason == "DRAINING"
        again = Node(node.vfs, node.clock, node.config).open()
        assert not list(again.broker.journal.replay(again.broker.journal.durable_lsn + 1))
        assert not again.vfs.exists("data/backup.pins")
        await tidied(again)
        assert [name for name in again.vfs.list_dir(BACKUPS) if name != "lock"] == []
        await again.stop()

    with_node_stopped(scenario)


def with_node_stopped(scenario):
    async def run(_: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, crash_config()).open()
        await node.produce("orders", [message(1)])
        await scenario(node)

    run_sim(run, 1)


def test_a_disk_that_fails_fails_the_backup_only():
    async def scenario(node: Node) -> None:
        for kind, glob in (
            ("write", f"{BACKUPS}/*"),
            ("sync", f"{BACKUPS}/*"),
            ("link", "*"),
            ("create", f"{BACKUPS}/*data"),
            ("rename", f"{BACKUPS}/*"),
            ("read", "data/backup.pins/*"),
        ):
            fault = node.vfs.faults.add(Fault(kind, glob))
            with moves(node.broker, "postdate_backup_failures"), pytest.raises(Unavailable) as caught:
                await node.broker.backups.create(kind)
            assert caught.value.reason == "BACKUP_FAILED"
            assert fault.hit_count == 1
            assert node.vfs.list_dir(BACKUPS) == ["lock"]
            assert not node.vfs.exists("data/backup.pins")
            await node.produce("orders", [message(1)])
        assert node.broker.counters.backup_failures == 6
        node.vfs.faults.clear()
        await node.broker.backups.create("well")
        assert node.broker.counters.backups == 1

    with_node(scenario)


def test_the_reserve_of_the_disk_is_left_free():
    async def scenario(node: Node) -> None:
        used_bytes = sum(len(data.rstrip(b"\0")) for data in node.vfs.snapshot().values())
        node.vfs.capacity_bytes = used_bytes + 91_000
        with pytest.raises(LimitReached) as caught:
            await node.broker.backups.create("too-much")
        assert caught.value.reason == "DISK_RESERVE_REACHED"
        assert node.vfs.list_dir(BACKUPS) == ["lock"]
        node.vfs.capacity_bytes = None
        await node.broker.backups.create("fits")

    with_node(scenario, disk_reserve_bytes=90_000)


def test_a_journal_end_that_names_files_no_manifest_names_is_left_to_another_checkpoint(monkeypatch):
    monkeypatch.setattr(backup_module, "_NAMING_FILES", frozenset({int(RecordType.PRODUCED)}))

    async def scenario(node: Node) -> None:
        before = node.broker.counters.checkpoints
        more = asyncio.ensure_future(produce_until(node, before + 2))
        backup = await node.broker.backups.create("")
        await more
        assert node.broker.counters.checkpoints > before + 1
        path = f"{BACKUPS}/{backup.name}/broker.manifest"
        assert decode_broker(files_of(node.vfs, BACKUPS)[path], path).checkpoint_lsn == backup.lsn
        monkeypatch.setattr(backup_module, "_CHECKPOINTS_MAX", 0)  # they come again and again
        with pytest.raises(Unavailable) as caught:
            await node.broker.backups.create("")
        assert caught.value.reason == "BACKUP_FAILED"
        assert len(await node.broker.backups.list()) == 1

    with_node(scenario)


async def produce_until(node: Node, checkpoints: int) -> None:
    while node.broker.counters.checkpoints < checkpoints:
        await node.produce("orders", [message(1)])


def test_old_backups_go_after_a_new_one_is_complete():
    async def scenario(node: Node) -> None:
        for number in range(5):
            await node.broker.backups.create(f"n{number}")
            await asyncio.sleep(1)
        assert [each.label for each in await node.broker.backups.list()] == ["n2", "n3", "n4"]
        await asyncio.sleep(3600)
        await node.broker.backups.create("last")
        assert [each.label for each in await node.broker.backups.list()] == ["last"]

    with_node(scenario, backup_keep_count=3, backup_max_age_ms=60_000)


def test_a_backup_is_deleted_and_what_is_no_backup_is_not():
    async def scenario(node: Node) -> None:
        backup = await node.broker.backups.create("")
        for name in (
            "",
            "lock",
            "../topics",
            f"{backup.name}/topics",
            f"{backup.name}-other",
            backup.name + ".partial",
        ):
            with pytest.raises(NotFound) as caught:
                await node.broker.backups.delete(name)
            assert caught.value.reason == "BACKUP_NOT_FOUND"
        await node.broker.backups.delete(backup.name)
        assert node.vfs.list_dir(BACKUPS) == ["lock"]

    with_node(scenario)


def test_a_restored_broker_delivers_what_was_owed_and_has_an_id_of_its_own():
    async def scenario(node: Node) -> None:
        inbox = await node.subscribe("orders", "a")
        first = await inbox.wait(4)
        await inbox.ack([each.position for each in first])
        backup = await node.broker.backups.create("")
        later = await inbox.wait(8)
        await inbox.ack([each.position for each in later])
        restore(node.vfs, backup.name)
        again = Node(node.vfs, node.clock, replace(node.config, data_dir=RESTORED)).open()
        assert again.broker.broker_id == "another-id"
        found = await (await again.subscribe("orders", "a")).wait(8)
        assert {each.position for each in found} == {each.position for each in later}
        await again.produce("orders", [message(99)])
        await again.stop()

    with_node(scenario)


def test_schedule_keys_cancels_and_moves_are_in_a_backup_and_those_after_it_are_not():
    async def scenario(node: Node) -> None:
        later_ms = node.clock.now_ms() + 3_600_000
        for first in range(0, 20, 4):
            batch = [
                Outgoing(b".", deliver_at_ms=later_ms, schedule_key=f"k{first + each}") for each in range(4)
            ]
            await node.produce("keyed", batch)
        await asyncio.sleep(30)  # sealed
        await node.checkpoint()
        schedule = node.topic("keyed").schedule
        await schedule.change(["k3"], Cancel(), dry_run=False)
        await schedule.change(["k4"], Move(deliver_at_ms=later_ms + 1_000), dry_run=False)
        backup = await node.broker.backups.create("")
        names = files_of(node.vfs, f"{BACKUPS}/{backup.name}")
        assert {name.rpartition(".")[2] for name in names} >= {"keys", "amend", "bucket", "data"}
        await schedule.change(["k5"], Cancel(), dry_run=False)
        await node.checkpoint()
        restore(node.vfs, backup.name)
        assert files_of(node.vfs, f"{BACKUPS}/{backup.name}") == names
        again = Node(node.vfs, node.clock, replace(node.config, data_dir=RESTORED)).open()
        restored = again.topic("keyed").schedule
        with pytest.raises(NotFound):
            await restored.get("k3")
        assert (await restored.get("k4")).deliver_at_ms == later_ms + 1_000
        assert (await restored.get("k5")).deliver_at_ms == later_ms
        await again.stop()

    with_node(scenario)


def test_a_backup_that_lacks_a_file_is_not_restored():
    async def scenario(node: Node) -> None:
        backup = await node.broker.backups.create("")
        folder = f"{BACKUPS}/{backup.name}"
        victims = [
            path for path in files_of(node.vfs, folder) if "/ledgers/" in path or path.endswith("/manifest")
        ]
        assert victims
        for number, path in enumerate(victims):
            node.vfs.rename(path, "aside")
            with pytest.raises((Corrupt, FileNotFoundError)):
                restore(node.vfs, backup.name, f"{RESTORED}{number}")
            with pytest.raises(Fenced):
                Node(node.vfs, node.clock, crash_config(data_dir=f"{RESTORED}{number}")).open(start=False)
            node.vfs.rename("aside", path)
        node.vfs.remove(f"{folder}/backup.json")
        with pytest.raises(NotFound):
            restore(node.vfs, backup.name)

    with_node(scenario)
