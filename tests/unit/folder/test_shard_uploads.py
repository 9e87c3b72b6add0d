"""Backups of several shards in a store: what is removed leaves nothing, whenever its parts may go."""

from __future__ import annotations

import json

import google_crc32c
import pytest

from broker.cluster.base_plan import HOUR_MS, REST_MS
from broker.cluster.base_store import BaseCut, BaseStore
from broker.errors import Corrupt, NotFound, Refused, Unavailable
from broker.folder.shard_folders import shard_folder, write_shards
from broker.folder.shard_uploads import ShardUploads
from broker.folder.uploaded_shards import ShardedBackup, decode_backup, encode_backup, part_urls
from broker.storage.backup_marker import Backup, backup_name, encode_marker
from broker.storage.layout import Layout
from broker.testing.data_folder import FolderWriter
from broker.testing.mem_vfs import MemVfs
from tests.fake_store import FakeStore, Hands

SHARDS = 2


class Scene:
    def __init__(self) -> None:
        self.clock = Hands()
        self.store = FakeStore(self.clock.now_ms)
        self.uploads = ShardUploads(self.store, self.clock)
        self._lsn = 0

    async def upload(self, broker_id: str = "one") -> ShardedBackup:
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
            marker = Backup(name, "", broker_id, self.clock.ms, self._lsn, 0, 1, 1, 1, 1)
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


async def test_the_newest_backup_is_meant_unless_that_could_be_of_another_broker() -> None:
    scene = Scene()
    assert await scene.uploads.choose("") is None, "whoever asked says that there is no base"
    first, second = await scene.upload(), await scene.upload()
    assert await scene.uploads.choose("") == second
    assert await scene.uploads.choose(first.name) == first
    assert await scene.uploads.choose("0000000000000001-t") is None, "the name of a base"
    with pytest.raises(NotFound, match="has no backup"):
        await scene.uploads.choose(f"{first.name}-other")
    other = await scene.upload("two")
    with pytest.raises(NotFound, match=f"2 brokers: name one of them.*{second.name}, {other.name}"):
        await scene.uploads.choose("")


async def test_backups_of_several_shards_beside_those_of_one_are_told_apart_by_name() -> None:
    scene = Scene()
    vfs = MemVfs()
    with FolderWriter("data", vfs):
        pass
    base = await BaseStore(scene.store, scene.clock).upload(
        vfs, Layout("data"), BaseCut("t", "", "before it had shards", 5, 9, 0)
    )
    backup = await scene.upload()
    with pytest.raises(NotFound, match=f"2 brokers: name one of them.*{base.name}, {backup.name}"):
        await scene.uploads.choose("")
    assert await scene.uploads.choose(base.name) is None
    assert await scene.uploads.choose(backup.name) == backup


def test_parts_have_urls_like_the_store() -> None:
    backup = ShardedBackup("n", "", "one", 1, 0, 0, 0, ("01-n", "02-n"))
    for store, parts in {
        "file:///mnt/b": ["file:///mnt/b/parts/0#01-n", "file:///mnt/b/parts/1#02-n"],
        "s3://bucket/": ["s3://bucket/parts/0#01-n", "s3://bucket/parts/1#02-n"],
        "s3://b/p%23?endpoint=http://h:9": [
            "s3://b/p%23/parts/0?endpoint=http://h:9#01-n",
            "s3://b/p%23/parts/1?endpoint=http://h:9#02-n",
        ],
    }.items():
        assert part_urls(store, backup) == parts


@pytest.mark.parametrize("bases", [[], [1], ["../../elsewhere"], "0000000000000001-t", None])
def test_a_backup_that_names_no_bases_is_damaged(bases: object) -> None:
    content = json.loads(encode_backup(ShardedBackup("n", "", "one", 1, 0, 0, 0, ())))
    del content["crc32c"]
    content["bases"] = bases
    plain = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    content["crc32c"] = int(google_crc32c.value(plain))
    with pytest.raises(Corrupt, match="is damaged"):
        decode_backup(json.dumps(content).encode(), "n")


async def test_a_damaged_backup_is_left_out_and_can_be_removed_and_until_then_no_part_goes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene()
    made = [await scene.upload() for _ in range(4)]
    scene.store.change(f"backups/{made[1].name}", lambda body: body[:-9])
    left = [each.name for each in await scene.uploads.backups()]
    assert left == [made[0].name, made[2].name, made[3].name] and "A backup cannot be used" in caplog.text
    with pytest.raises(Corrupt, match="is damaged"):
        await scene.uploads.choose("")
    named = await scene.uploads.choose(made[2].name)
    assert named is not None and named.name == made[2].name
    scene.clock.ms += 2 * REST_MS
    with pytest.raises(
        Corrupt, match=f"{made[1].name}.* Use another backup. No parts of backups are removed"
    ):
        await scene.uploads.prune("one", 2, 0)
    assert scene.parts() == [4, 4]
    await scene.uploads.remove(made[1].name)
    assert [each.name for each in await scene.uploads.backups()] == [made[2].name, made[3].name]
    assert scene.parts() == [2, 2]


async def test_a_backup_of_a_later_version_is_not_removed_as_a_damaged_one() -> None:
    scene = Scene()
    made = await scene.upload()

    def later(body: bytes) -> bytes:
        content = json.loads(body) | {"version": 2}
        del content["crc32c"]
        plain = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        return json.dumps(content | {"crc32c": int(google_crc32c.value(plain))}).encode()

    scene.store.change(f"backups/{made.name}", later)
    with pytest.raises(Corrupt, match="version 2"):
        await scene.uploads.remove(made.name)
    assert scene.store.names("backups") == {made.name}
