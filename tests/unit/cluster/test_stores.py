"""Promises of object stores, kept by each of them; and how their URLs are read."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from broker.cluster.file_store import FileStore
from broker.cluster.object_store import ObjectStore, StoreFailed, StoreRefused
from broker.cluster.remote_store import LIST_PATIENCE, READ_PATIENCE, AttemptTime, RemoteStore
from broker.cluster.stores import is_store_url, open_store
from broker.runtime.steps import InThisThread
from broker.settings import ConfigError
from broker.testing.fault_plan import Fault
from broker.testing.mem_vfs import CrashPolicy, MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.s3_server import BUCKET, CREDENTIALS, SERVERS, need_server, s3_server, store_url
from tests.unit.cluster.object_logs import STORES, object_store


@pytest.fixture(params=STORES)
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ObjectStore]:
    async with object_store(request.param, tmp_path, monkeypatch) as store:
        yield store


async def names(store: ObjectStore, folder: str, after: str = "") -> list[str]:
    return sorted([info.name async for info in store.objects(folder, after=after)])


async def test_an_object_is_read_as_it_was_stored(store: ObjectStore) -> None:
    for name, body in {"a/one": b"first", "a/b/none": b"", "two": bytes(range(256)) * 9}.items():
        await store.create(name, memoryview(body))
        assert await store.read(name) == body
        info = await store.info(name)
        assert (info.name, info.bytes) == (name, len(body)) and info.modified_ms > 1_700_000_000_000
    assert await store.read_range("two", 250, 10) == bytes(range(250, 256)) + bytes(range(4))
    assert await store.read_range("a/one", 3, 100) == b"st", "less at the end"
    for name, start, length in (("a/one", 5, 1), ("a/one", 500, 10), ("a/one", 0, 0), ("a/b/none", 0, 10)):
        assert await store.read_range(name, start, length) == b"", "and nothing behind it"


async def test_a_name_is_given_once(store: ObjectStore) -> None:
    await store.create("log/1", b"first")
    for body in (b"another", b"first"):
        with pytest.raises(FileExistsError):
            await store.create("log/1", body)
    assert await store.read("log/1") == b"first"


@pytest.mark.slow
async def test_of_many_who_create_a_name_one_wins(store: ObjectStore) -> None:
    for number in range(10):
        outcomes = await asyncio.gather(
            *(store.create(f"race/{number}", b"%d" % writer) for writer in range(16)), return_exceptions=True
        )
        winners = [writer for writer, outcome in enumerate(outcomes) if outcome is None]
        assert len(winners) == 1, outcomes
        assert await store.read(f"race/{number}") == b"%d" % winners[0]


async def test_what_is_not_there_is_told(store: ObjectStore) -> None:
    for call in (store.read("no/such"), store.read_range("no/such", 0, 1), store.info("no/such")):
        with pytest.raises(FileNotFoundError):
            await call
    await store.remove("no/such")
    assert await names(store, "no") == []


async def test_a_removed_name_is_free(store: ObjectStore) -> None:
    await store.create("x/1", b"old")
    await store.remove("x/1")
    assert await names(store, "x") == []
    await store.create("x/1", b"new")
    assert await store.read("x/1") == b"new"


async def test_folders_are_listed_whole_and_from_a_name_on(store: ObjectStore) -> None:
    expected = [f"log/{number:016x}" for number in range(1, 30)]
    for name in [*expected, "logs/1", "log/deeper/1"]:
        await store.create(name, b"x")
    assert await names(store, "log") == [*expected, "log/deeper/1"]
    assert await names(store, "log", after=expected[24]) == [*expected[25:], "log/deeper/1"]
    assert await names(store, "") == [*expected, "log/deeper/1", "logs/1"]
    assert {info.bytes async for info in store.objects("log")} == {1}


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a/../b", ".hidden", "a b", "ä"])
async def test_a_name_that_some_store_would_change_is_refused(store: ObjectStore, name: str) -> None:
    with pytest.raises(ValueError, match="Not a name"):
        await store.create(name, b"")


@pytest.mark.parametrize("server", SERVERS)
async def test_a_bucket_that_is_not_there_is_told_apart_from_an_object(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    async with s3_server(need_server(server), tmp_path) as port:
        store = open_store(store_url(port).replace(BUCKET, "no-such-bucket"))
        for call in (store.create("a", b""), store.read("a"), store.read_range("a", 0, 1)):
            with pytest.raises(StoreRefused, match=r"no such bucket|the bucket does not exist"):
                await call
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        stranger = open_store(store_url(port))
        with pytest.raises(StoreRefused, match="permission denied to create a: "):
            await stranger.create("a", b"")


async def test_a_server_that_does_not_answer_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    server = await asyncio.start_server(lambda reader, writer: asyncio.sleep(60), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    store = open_store(store_url(port), AttemptTime(0.05, 0))
    with pytest.raises(StoreFailed, match="timeout on an attempt to create a"):
        await store.create("a", b"")
    server.close()
    with pytest.raises(StoreFailed, match=r"timeout on an attempt to read a|could not read a"):
        await store.read("a")


def make_root() -> MemVfs:
    vfs = MemVfs()
    vfs.make_dir("root")
    vfs.sync_dir("/")
    return vfs


def open_folder(vfs: MemVfs) -> FileStore:
    return FileStore("root", vfs=vfs, executor=InThisThread(), modified_ms=lambda path: 0)


def test_a_store_that_is_slow_for_all_is_read_all_the_same() -> None:
    """Its answers take longer than an attempt may: reads are given more time, and creates are not."""
    errors = pytest.importorskip("obstore").exceptions

    class SlowLibrary:
        exceptions = errors
        seconds = 1.5
        list_seconds = 0.1

        async def head_async(self, store: object, name: str) -> object:
            await asyncio.sleep(self.seconds)
            return {"path": name, "size": 1, "last_modified": datetime.now(UTC)}

        async def put_async(self, store: object, name: str, body: bytes, mode: str) -> None:
            await asyncio.sleep(self.seconds)

        async def list(self, store: object, *_: object, **options: object) -> AsyncIterator[list[object]]:
            await asyncio.sleep(self.list_seconds)
            yield []

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        library = SlowLibrary()
        slow = RemoteStore(library, None, "s3://slow", AttemptTime(1, 0))

        async def one_read() -> bool:
            with contextlib.suppress(StoreFailed):
                await slow.info("a")
                return True
            return False

        assert [await one_read() for _ in range(4)] == [False, True, True, True]
        for _ in range(3):
            with pytest.raises(StoreFailed, match="timeout on an attempt to create"):
                await slow.create("a", b"")
        library.seconds = 0.1
        assert await one_read()
        library.list_seconds = 5  # a large folder, in a store that reads quickly

        async def one_list() -> bool:
            assert await one_read()
            with contextlib.suppress(StoreFailed):
                return [info async for info in slow.objects("log")] == []
            return False

        assert [await one_list() for _ in range(5)] == [False, False, False, True, True]
        library.list_seconds = 100
        assert not any([await one_list() for _ in range(3)])
        begin = loop.time()
        assert not await one_list()
        assert loop.time() - begin == pytest.approx(0.1 + LIST_PATIENCE), "no more than so long for one page"
        library.seconds = 100
        begin = loop.time()
        assert not any([await one_read() for _ in range(4)])
        assert loop.time() - begin == pytest.approx(3 + 2 * READ_PATIENCE), "no more than so long for one"

    run_sim(scenario, seed=1)


async def test_an_object_in_a_folder_outlives_a_crash_once_it_was_answered() -> None:
    vfs = make_root()
    store, begin = open_folder(vfs), vfs.op_count
    marks = []
    for number in range(3):
        await store.create(f"a/{number % 2}/{number}", b"body %d" % number)
        marks.append(vfs.op_count)
    for at in range(begin, vfs.op_count + 1):
        after = open_folder(vfs.crashed(at, CrashPolicy.LOSE_UNSYNCED))
        for number, mark in enumerate(marks):
            try:
                body = await after.read(f"a/{number % 2}/{number}")
            except FileNotFoundError:
                assert mark > at, "what was answered is there"
            else:
                assert body == b"body %d" % number, "a name has all its bytes"


async def test_a_name_that_was_not_synced_is_synced_before_it_is_told() -> None:
    vfs = make_root()
    await open_folder(vfs).create("a/0", b"")
    store = open_folder(vfs)
    vfs.faults.add(Fault("open_dir", "root/a", nth=1))
    with pytest.raises(OSError, match="Errno 5"):
        await store.create("a/1", b"mine")
    lost = open_folder(vfs.crashed(vfs.op_count, CrashPolicy.LOSE_UNSYNCED))
    assert await names(lost, "") == ["a/0"]
    with pytest.raises(FileExistsError):
        await store.create("a/1", b"mine")
    after = open_folder(vfs.crashed(vfs.op_count, CrashPolicy.LOSE_UNSYNCED))
    assert await after.read("a/1") == b"mine"


async def test_a_store_whose_folder_could_not_be_synced_is_given_up() -> None:
    vfs = make_root()
    store = open_folder(vfs)
    await store.create("a/0", b"")
    vfs.faults.add(Fault("sync_dir", "root/a"))
    with pytest.raises(StoreFailed):
        await store.create("a/1", b"")
    for name in ("a/1", "a/2"):
        with pytest.raises(StoreRefused, match="could not be synced"):
            await store.create(name, b"")


async def test_a_full_disk_leaves_no_object_and_may_pass() -> None:
    vfs = make_root()
    store = open_folder(vfs)
    vfs.faults.add(Fault("write", "*.new-*", error=errno.ENOSPC))
    with pytest.raises(StoreFailed):
        await store.create("a/1", b"body")
    assert await names(store, "") == []
    await store.create("a/1", b"body")
    assert await names(store, "") == ["a/1"]


async def test_what_others_put_into_the_folder_of_a_store_is_no_object(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    await store.create("a/1", b"body")
    (tmp_path / "outside").write_bytes(b"x")
    for foreign in ("my notes", "x (copy)", ".DS_Store"):
        (tmp_path / "a" / foreign).write_bytes(b"x")
    (tmp_path / "a" / "lost and found").mkdir()
    (tmp_path / "a" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "a" / "nowhere").symlink_to(tmp_path / "none")
    assert await names(store, "a") == ["a/1"]


async def test_what_those_left_who_were_killed_in_a_create_is_removed_a_day_later() -> None:
    vfs, day_ms = make_root(), 86_400_000
    now_ms, modified = 10 * day_ms, dict[str, int]()

    def opened() -> FileStore:
        read = lambda path: modified.get(path, now_ms)  # noqa: E731
        return FileStore("root", vfs=vfs, executor=InThisThread(), modified_ms=read)

    await opened().create("a/1", b"body")
    for name, age_ms in {"old": day_ms, "young": day_ms - 1}.items():
        path = f"root/a/.new-{name}"
        vfs.open(path, create=True).close()
        modified[path] = now_ms - age_ms
    modified["root/a/1"] = 0
    store = opened()
    assert await names(store, "a") == ["a/1"]
    await store.create("a/2", b"body")
    assert vfs.list_dir("root/a") == [".new-young", "1", "2"]
    modified.clear()
    now_ms += day_ms
    modified["root/a/.new-young"] = 0
    await store.create("a/3", b"body")
    assert ".new-young" in vfs.list_dir("root/a"), "a process looks once"


async def test_a_folder_that_is_not_there_is_no_empty_store(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/not/mounted")
    for call in (store.create("a", b""), store.read("a"), names(store, "")):
        with pytest.raises(StoreRefused, match="does not exist"):
            await call


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://host/x", "the URL of an object store must begin with"),
        ("s3:///prefix", "the bucket is missing"),
        ("s3://key:word@bucket/x", "remove the credentials from the URL"),
        ("s3://bucket/x?endpiont=http://h", "unknown option 'endpiont'; known options: endpoint, region"),
        ("file://host/path", "without a host"),
        ("memory://?endpoint=x", "unknown option 'endpoint'; known options: none"),
        ("file://key:word@host/path", "without a host"),
        ("s3://[key:word@bucket/x", "Not the URL of an object store"),
        ("s3://bucket:9000/x", "a bucket has no port; name a server with"),
        ("s3://bucket/x#name", "the part after # names a backup"),
        ("file:///a#b", "the part after # names a backup"),
        ("s3://bucket/x?endpoint=http://key:word@host", "remove the credentials from the endpoint"),
        ("s3://bucket/x?endpoint=host:9000", "an endpoint must be http://host:port"),
        ("s3://bucket/x?endpoint=http://", "an endpoint must be http://host:port"),
        ("s3://bucket/x?endpoint=http://host:port", "an endpoint must be http://host:port"),
        ("gs://bucket/x?endpoint=http://[word", "an endpoint must be http://host:port"),
    ],
)
def test_a_wrong_url_is_refused_with_its_reason(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        open_store(url)
    assert "word" not in str(caught.value)


def test_a_store_is_told_by_its_url_and_a_path_is_none() -> None:
    pytest.importorskip("obstore")
    assert open_store("s3://bucket/a/b?endpoint=http://127.0.0.1:1&region=eu-1").url == "s3://bucket/a/b"
    assert open_store("file:///a%20b/").url == "file:///a b"
    assert is_store_url("s3://b") and not is_store_url("./data") and not is_store_url("C:\\data")


@pytest.mark.slow
def test_the_library_is_imported_only_for_a_store_that_needs_it(tmp_path: Path) -> None:
    script = """
import sys
sys.modules["obstore"] = None  # as if it were not installed
import broker.cluster.stores as stores
stores.open_store("file:///tmp")
try:
    stores.open_store("s3://bucket")
except stores.ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "s3://bucket: needs the package obstore: pip install 'postdate[cluster]'\n"
