"""The power goes, or the process, while a backup of several shards is put together: it is whole, or none."""

from __future__ import annotations

import random

import pytest

from broker.folder.shard_backups import ShardBackups
from broker.folder.shard_folders import read_shards, shard_folder
from broker.runtime.vfs import read_file
from broker.storage.backup_marker import Backup
from broker.testing.mem_vfs import CrashPolicy, MemVfs

NAME = "20261123T120000000Z"
MADE = Backup(NAME, "", "broker", 1_795_435_200_000, 0, 1, 1, 1, 1, 1)
SHARDS = 3


def made() -> tuple[MemVfs, int]:
    """Return a disk on which a backup was put together, and when that began."""
    vfs = MemVfs()
    backups = ShardBackups(vfs, "b")
    with backups.hold():
        parts = []
        for number in range(SHARDS):
            vfs.make_dir(shard_folder("b", number))
            parts.append(f"{shard_folder('b', number)}/{number}")
            vfs.make_dir(parts[-1])
            file = vfs.open(f"{parts[-1]}/part", create=True)
            file.pwrite([b"%d" % number], 0)
            file.sync()
            file.close()
            vfs.sync_dir(parts[-1])
            vfs.sync_dir(shard_folder("b", number))
        vfs.sync_dir("b")
        begun = vfs.op_count
        backups.assemble(MADE, parts)
    return vfs, begun


@pytest.mark.parametrize("policy", CrashPolicy)
def test_a_backup_that_is_listed_is_whole(policy: CrashPolicy) -> None:
    vfs, begun = made()
    listed = []
    for at in range(begun, vfs.op_count + 1):
        found = vfs.crashed(at, policy, random.Random(at))
        backups = ShardBackups(found, "b")
        listed.append(backups.list() == [MADE])
        if listed[-1]:
            assert read_shards(found, backups.path(NAME)) == SHARDS
            for number in range(SHARDS):
                assert read_file(found, f"{shard_folder(backups.path(NAME), number)}/part") == b"%d" % number
        else:
            assert backups.list() == []
        with backups.hold():
            assert not [name for name in found.list_dir("b") if name.endswith(".partial")]
    assert not listed[0] and listed[-1]


def test_half_a_deletion_leaves_no_backup() -> None:
    vfs, _ = made()
    begun = vfs.op_count
    ShardBackups(vfs, "b").delete(NAME)
    for at in range(begun + 1, vfs.op_count + 1):
        found = vfs.crashed(at, CrashPolicy.KEEP_ALL)
        backups = ShardBackups(found, "b")
        assert backups.list() == []
        with backups.hold():
            assert not [name for name in found.list_dir("b") if name.startswith(NAME)]


def test_what_a_killed_deletion_left_goes_once_it_is_durably_no_backup() -> None:
    vfs, _ = made()
    ShardBackups(vfs, "b").delete(NAME)
    renamed_at = next(
        at for at, op in enumerate(vfs.ops, 1) if op.kind == "rename" and op.path == f"b/{NAME}"
    )
    killed = vfs.killed(renamed_at)
    with ShardBackups(killed, "b").hold():
        pass
    for at in range(killed.op_count + 1):
        for seed in range(8):
            found = killed.crashed(at, CrashPolicy.MIXED, random.Random(f"{at}/{seed}"))
            for backup in ShardBackups(found, "b").list():
                for number in range(SHARDS):
                    folder = shard_folder(ShardBackups(found, "b").path(backup.name), number)
                    assert read_file(found, f"{folder}/part") == b"%d" % number


def test_backups_that_are_too_many_go_the_oldest_first() -> None:
    vfs, _ = made()
    backups = ShardBackups(vfs, "b")
    assert backups.prune("broker", MADE.create_time_ms, 1, 0) == []
    newer = Backup(*[f"{NAME}-x", "x", "broker", MADE.create_time_ms + 1, 0, 1, 1, 1, 1, 1])
    backups.assemble(newer, [])
    assert backups.prune("another", MADE.create_time_ms, 1, 0) == []
    assert backups.prune("broker", MADE.create_time_ms, 1, 0) == [NAME]
    assert backups.list() == [newer]
