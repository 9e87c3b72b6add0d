"""Reading the files of a base where they lie."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.cluster import base_vfs
from broker.cluster.base_store import BaseCut, BaseStore
from broker.cluster.base_vfs import BaseVfs, BlockReader, open_base_vfs, pin_base, process_reader
from broker.cluster.stores import open_store
from broker.errors import Corrupt, MissingFile, NotFound
from broker.runtime.clock import SystemClock
from broker.runtime.steps import InThisThread
from broker.storage.layout import Layout
from broker.testing.mem_vfs import MemVfs
from tests.fake_store import FakeStore

ROOT = "s3://bucket/prefix#base"
CHUNK, BLOCK = 1_000, 96  # the last block of a chunk is a short one
SIZES = {
    "journal/none": 0,
    "journal/small": 5,
    "alive": CHUNK,
    "topics/long": 10 * CHUNK + 7,
    "topics/inner/x": CHUNK - 1,
}


class CountingStore(FakeStore):
    """Counts the bytes of chunks that are read from it."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched_bytes = 0

    async def read(self, name: str) -> bytes:
        return self._counted(name, await super().read(name))

    async def read_range(self, name: str, start: int, length: int) -> bytes:
        return self._counted(name, await super().read_range(name, start, length))

    def _counted(self, name: str, body: bytes) -> bytes:
        self.fetched_bytes += len(body) if name.startswith("chunks/") else 0
        return body


class Scene:
    def __init__(self, reader: BlockReader) -> None:
        self.store = CountingStore()
        rng = random.Random(1)
        self.files = {path: rng.randbytes(size) for path, size in SIZES.items()}
        vfs = MemVfs()
        for folder in ("data", "data/journal", "data/topics", "data/topics/inner"):
            vfs.make_dir(folder)
        for path, body in self.files.items():
            vfs.open(f"data/{path}", create=True).pwrite([body], 0)
        bases = BaseStore(self.store, SystemClock(), InThisThread(), chunk_bytes=CHUNK)

        async def make() -> BaseVfs:
            base = await bases.upload(vfs, Layout("data"), BaseCut("t", "", "one", 5, 1, 0))
            return BaseVfs(bases, await bases.read_manifest(base.name), ROOT, reader)

        self.vfs = asyncio.run(make())

    def read(self, path: str, length: int, offset: int) -> bytes:
        return self.vfs.open(f"{ROOT}/{path}").pread(length, offset)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(base_vfs, "BLOCK_BYTES", BLOCK)
    reader = BlockReader()
    yield Scene(reader)
    reader.close()


def test_any_part_of_any_file_is_what_it_was(scene: Scene) -> None:
    rng = random.Random(2)
    for path, body in scene.files.items():
        file = scene.vfs.open(f"{ROOT}/{path}")
        assert file.size() == len(body) and file.pread(len(body) + 9, 0) == body
        for _ in range(200):
            offset, length = rng.randrange(len(body) + 20), rng.choice((0, 1, 7, BLOCK, CHUNK, 3 * CHUNK))
            assert file.pread(length, offset) == body[offset : offset + length], (path, offset, length)


def test_a_part_of_a_file_costs_a_part_of_it(scene: Scene) -> None:
    length, at = 50, 5 * CHUNK + 2 * BLOCK + 10
    assert scene.read("topics/long", length, at) == scene.files["topics/long"][at : at + length]
    assert scene.store.fetched_bytes == BLOCK
    assert scene.read("topics/long", length, at) == scene.files["topics/long"][at : at + length]
    assert scene.store.fetched_bytes == BLOCK, "it was kept"
    scene.vfs.forget()
    scene.read("topics/long", length, at)
    assert scene.store.fetched_bytes == 2 * BLOCK


def test_who_reads_a_file_from_the_front_gets_ever_more_at_once(scene: Scene) -> None:
    body = scene.files["topics/long"]
    scene.store.calls.clear()
    for offset in range(0, len(body), 10):
        assert scene.read("topics/long", 10, offset) == body[offset : offset + 10]
    assert len(scene.store.calls) < 25, "each ends with its chunk"
    assert scene.store.fetched_bytes == len(body)


def test_what_is_kept_is_bounded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_vfs, "_CACHED", 3)
    scene.read("topics/long", 10 * CHUNK, 0)
    fetched = scene.store.fetched_bytes
    scene.read("topics/long", 1, 0)
    assert scene.store.fetched_bytes > fetched


def test_folders_are_those_of_the_files(scene: Scene) -> None:
    assert scene.vfs.list_dir(ROOT) == ["alive", "journal", "topics"]
    assert scene.vfs.list_dir(f"{ROOT}/topics") == ["inner", "long"]
    assert scene.vfs.list_dir(f"{ROOT}/topics/inner") == ["x"]
    for path in ("", "/topics", "/topics/inner/x", "/journal/none"):
        assert scene.vfs.exists(ROOT + path)
    assert not scene.vfs.exists(f"{ROOT}/other")
    for path, error in {"other": FileNotFoundError, "alive": NotADirectoryError}.items():
        with pytest.raises(error):
            scene.vfs.list_dir(f"{ROOT}/{path}")
    for path, error in {"other": FileNotFoundError, "topics": IsADirectoryError}.items():
        with pytest.raises(error):
            scene.vfs.open(f"{ROOT}/{path}")


def test_nothing_is_written(scene: Scene) -> None:
    vfs, file = scene.vfs, scene.vfs.open(f"{ROOT}/journal/small")
    for change in (
        lambda: vfs.open(f"{ROOT}/new", create=True),
        lambda: vfs.make_dir("x"),
        lambda: vfs.remove_dir("x"),
        lambda: vfs.rename("x", "y"),
        lambda: vfs.link("x", "y"),
        lambda: vfs.remove("x"),
        lambda: vfs.sync_dir("x"),
        lambda: file.pwrite([b"x"], 0),
        lambda: file.copy_from(file, 1, 0),
        lambda: file.truncate(0),
        file.sync,
    ):
        with pytest.raises(PermissionError):
            change()
    lock = vfs.lock(f"{ROOT}/lock")
    assert lock is not None and lock.size() == 0 and file.pread_nowait(1, 0) is None


def test_a_chunk_that_is_missing_or_short_or_damaged_is_told(scene: Scene) -> None:
    (name,) = {
        name
        for name in scene.store.names("chunks")
        if len(scene.store.objects_by_name[f"chunks/{name}"][0]) == 5
    }
    kept = scene.store.objects_by_name.pop(f"chunks/{name}")
    with pytest.raises(MissingFile, match="chunk of journal/small is missing"):
        scene.read("journal/small", 1, 0)
    for body in (b"short"[:3], b"other"):
        scene.store.objects_by_name[f"chunks/{name}"] = body, 0
        with pytest.raises(Corrupt, match=r"chunk of journal/small .* is damaged"):
            scene.read("journal/small", 1, 0)
    scene.store.objects_by_name[f"chunks/{name}"] = kept
    assert scene.read("journal/small", 1, 0)
    for name in scene.store.names("chunks"):
        scene.store.change(f"chunks/{name}", lambda body: body[:10])
    with pytest.raises(Corrupt, match=r"chunk of topics/long .* is damaged"):
        scene.read("topics/long", 10, CHUNK + BLOCK)


def store_bases(url: str, count: int) -> list[str]:
    """Store bases with the lsn 1, 2, ..., in each of which `alive` holds its own; return their URLs."""
    vfs = MemVfs()
    for folder in ("data", "data/topics"):
        vfs.make_dir(folder)
    alive = vfs.open("data/alive", create=True)
    bases = BaseStore(open_store(url), SystemClock())
    names = []
    for lsn in range(1, count + 1):
        alive.pwrite([f"lsn {lsn:4}".encode()], 0)
        names.append(asyncio.run(bases.upload(vfs, Layout("data"), BaseCut("t", "", "one", 5, lsn, 0))).name)
    return [f"{url}#{name}" for name in names]


def read_alive(base: str) -> bytes:
    return open_base_vfs(base).open(f"{base}/alive").pread(9, 0)


def test_a_base_is_opened_by_url(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    with pytest.raises(NotFound, match="has no base"):
        pin_base(url)
    first, newest = store_bases(url, 2)
    assert (first, newest) == (f"{url}#0000000000000001-t", f"{url}#0000000000000002-t")
    assert pin_base(url) == newest and pin_base(first) == first
    assert read_alive(first) == b"lsn    1" and read_alive(newest) == b"lsn    2"
    assert open_base_vfs(first) is open_base_vfs(first)
    with pytest.raises(NotFound, match="no base 'x'"):
        pin_base(f"{url}#x")


@pytest.mark.slow
def test_bases_that_a_process_reads_share_one_loop_and_the_memory_for_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_vfs, "_CACHED", 3)
    base, *others = store_bases(f"file://{tmp_path}", 6)
    read_alive(base)
    files = len(os.listdir("/proc/self/fd"))
    for number, other in enumerate(others, 2):
        assert read_alive(other) == b"lsn %4d" % number
    assert len(os.listdir("/proc/self/fd")) == files
    assert [root for root, _, _ in process_reader().blocks] == others[-3:]
    assert read_alive(base) == b"lsn    1"
