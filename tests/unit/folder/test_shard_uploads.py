"""Backups of several shards in a store: what is removed leaves nothing, whenever its parts may go."""

from __future__ import annotations

import pytest

from broker.cluster.base_plan import HOUR_MS, REST_MS
from broker.errors import Refused, Unavailable
from broker.folder.shard_folders import shard_folder, write_shards
from broker.folder.shard_uploads import ShardedBackup, ShardUploads
from broker.storage.backup_marker import Backup, backup_name, encode_marker
from broker.testing.data_folder import FolderWriter
from broker.testing.mem_vfs import MemVfs
from tests.fake_store import FakeStore

SHARDS = 2


class Hands:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.ms = 1_750_000_000_000

    def now_ms(self) -> int:
        return self.ms

    def monotonic_ns(self) -> int:
        return 5


class Scene:
    def __init__(self) -> None:
        self.clock = Hands()
        self.store = FakeStore(self.clock.now_ms)
        self.uploads = ShardUploads(self.store, self.clock)
        self._lsn = 0

    async def upload(self) -> ShardedBackup:
        """Upload another backup, an hour after the one before."""
        self.clock.ms += HOUR_MS
        self._lsn += 1
        vfs, name = MemVfs(), backup_name(self.clock.ms, "")
        vfs.make_dir("b")
        vfs.make_dir("b/shards")
        for folder in ("b", *(shard_folder("b", number) for number in range(SHARDS))):
            if folder != "b":
                with FolderWriter(folder, vfs):
                    pass
            marker = Backup(name, "", "one", self.clock.ms, self._lsn, 0, 1, 1, 1, 1)
            file = vfs.open(f"{folder}/backup.json", create=True)
            file.pwrite([encode_marker(marker)], 0)
            file.close()
        write_shards(vfs, "b", SHARDS)
        return await self.uploads.upload(vfs, "b")

    def parts(self) -> list[int]:
        return [len(self.store.names(f"parts/{number}/bases")) for number in range(SHARDS)]


async def test_parts_that_may_not_go_with_their_backup_go_with_a_later_call() -> None:
    scene = Scene()
    made = [await scene.upload() for _ in range(4)]
    assert await scene.uploads.prune("one", 2, 0) == [made[1].name, made[0].name]
    assert [each.name for each in await scene.uploads.backups()] == [made[2].name, made[3].name]
    assert scene.parts() == [4, 4], "an upload under way may build on them"
    with pytest.raises(Refused, match="two newest"):
        await scene.uploads.remove(made[2].name)
    scene.clock.ms += REST_MS
    assert await scene.uploads.prune("one", 2, 0) == []
    assert scene.parts() == [2, 2]


async def test_parts_of_an_upload_that_was_killed_go_once_nobody_can_need_them() -> None:
    scene = Scene()
    await scene.upload()
    scene.store.fail = lambda kind, name, number: (
        Unavailable("killed") if kind == "create" and name.startswith("backups/") else None
    )
    with pytest.raises(Unavailable):
        await scene.upload()
    scene.store.fail = lambda kind, name, number: None
    kept = [await scene.upload() for _ in range(2)]
    assert scene.parts() == [4, 4]
    scene.clock.ms += REST_MS
    await scene.uploads.prune("one", 2, 0)
    assert [each.name for each in await scene.uploads.backups()] == [each.name for each in kept]
    assert scene.parts() == [2, 2]
