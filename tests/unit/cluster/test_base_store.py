"""Bases in a store: whole or not there, whatever fails and whoever is killed; and no more is stored than changed."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from broker.cluster import base_store, patient_store
from broker.cluster.base_manifest import Base, decode_manifest, encode_manifest
from broker.cluster.base_plan import HOUR_MS, REST_MS, UPLOAD_MS
from broker.cluster.base_store import IN_FLIGHT, BaseCut, BaseStore
from broker.cluster.object_store import StoreFailed, StoreRefused
from broker.errors import Corrupt, MissingFile, NotFound, Refused, Unavailable
from broker.runtime.steps import InThisThread
from broker.runtime.vfs import Buffer
from broker.storage.layout import Layout
from broker.testing.data_folder import NOW_MS, FolderWriter, StoredLedger, StoredSubscription
from broker.testing.mem_vfs import MemFile, MemVfs
from tests.depth import at_depth
from tests.fake_store import FakeStore, Hands

CHUNK = 1_000
BACKUP = Layout("data")
SEALED, LAST = 3, 4  # ledgers of the topic


class Scene:
    """A store, a folder to upload, and a clock."""

    def __init__(self, store: FakeStore | None = None) -> None:
        self.clock = Hands()
        self.store = store or FakeStore(self.clock.now_ms)
        self.bases = BaseStore(self.store, self.clock, InThisThread(), chunk_bytes=CHUNK)
        self.vfs = a_folder()

    async def upload(self, lsn: int = 100, broker_id: str = "one", tag: str = "t") -> Base:
        cut = BaseCut(tag, "", broker_id, 5, lsn, 1)
        return await self.bases.upload(self.vfs, BACKUP, cut)

    async def download(self, base: Base) -> dict[str, bytes]:
        target = MemVfs()
        target.make_dir("to")
        manifest = await self.bases.read_manifest(base.name)
        await self.bases.download(target, manifest, manifest.files.keys(), "to")
        return files_of(target, "to")


def a_folder(*, rows: int = 300, step: int = 1, shift: int = 0, asked: int = 0) -> MemVfs:
    vfs = MemVfs()
    times = np.arange(NOW_MS, NOW_MS + rows * step, step) + shift
    with FolderWriter("data", vfs) as folder:
        ledgers = [StoredLedger(number, times, asked=times + asked) for number in range(1, LAST + 1)]
        folder.add_topic("t", ledgers, [StoredSubscription("s")], ledgers_per_bucket=2)
    put(vfs, "data/topics/empty", b"")
    put(vfs, "data/lock", b"")
    return vfs


def put(vfs: MemVfs, path: str, body: bytes) -> None:
    file = vfs.open(path, create=not vfs.exists(path))
    file.truncate(0)
    file.pwrite([body], 0)
    file.close()


def files_of(vfs: MemVfs, folder: str) -> dict[str, bytes]:
    start = len(folder) + 1
    return {path[start:]: body for path, body in vfs.snapshot().items() if not path.endswith("/lock")}


def ledger_path(number: int, kind: str) -> str:
    return f"topics/1/ledgers/{number}.0.{kind}"


async def test_a_base_is_downloaded_as_it_was_uploaded() -> None:
    scene = Scene()
    told: list[int] = []
    base = await scene.bases.upload(scene.vfs, BACKUP, BaseCut("t-a", "a", "one", 5, 100, 1), told.append)
    files = files_of(scene.vfs, "data")
    assert await scene.download(base) == files
    assert base == Base(
        "0000000000000064-t-a", "a", "one", 5, 100, 1, len(files), base.bytes, base.uploaded_bytes
    )
    assert base.bytes == sum(map(len, files.values())) == sum(told)
    assert base.uploaded_bytes <= base.bytes
    assert [stored.base for stored in await scene.bases.bases()] == [base]
    for name in scene.store.names("chunks"):
        body = scene.store.objects_by_name[f"chunks/{name}"][0]
        assert len(body) <= CHUNK and hashlib.sha256(body).hexdigest() == name[:64]
    assert not scene.store.names("probe")


async def test_a_base_that_is_there_is_not_stored_again() -> None:
    scene = Scene()
    base = await scene.upload()
    names = set(scene.store.objects_by_name)
    assert await scene.upload() == base
    assert set(scene.store.objects_by_name) == names
    with pytest.raises(StoreRefused, match="another program writes"):
        await scene.upload(broker_id="two")
    scene.store.change(f"bases/{base.name}", lambda body: body[:-5] + flip(body[-5:]))
    with pytest.raises(Corrupt, match="damaged"):
        await scene.upload()


async def test_the_manifest_comes_last() -> None:
    scene = Scene()
    base = await scene.upload()
    created = [name for kind, name in scene.store.calls if kind == "create"]
    assert created[-1] == f"bases/{base.name}" and len(created) > 10
    assert len(scene.store.stored("bases")) == 1


async def test_the_second_base_stores_and_reads_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    first = await scene.upload()
    before = set(scene.store.names("chunks"))
    put(scene.vfs, "data/alive", b"changed")
    read: Counter[str] = Counter()
    opened = scene.vfs.open

    def note_opened(path: str, *, create: bool = False) -> MemFile:
        file = opened(path, create=create)
        monkeypatch.setattr(file, "pread", lambda length, offset: note_read(path, file, length, offset))
        return file

    def note_read(path: str, file: MemFile, length: int, offset: int) -> bytes:
        block = MemFile.pread(file, length, offset)
        read[path.removeprefix("data/")] += len(block)
        return block

    monkeypatch.setattr(scene.vfs, "open", note_opened)
    second = await scene.upload(101)
    assert second.uploaded_bytes == len(b"changed") < first.uploaded_bytes
    assert len(scene.store.names("chunks") - before) == 1
    sizes = {path: len(body) for path, body in files_of(scene.vfs, "data").items()}
    for number in range(1, LAST):
        assert read[ledger_path(number, "data")] == 0
        assert max(read[ledger_path(number, kind)] for kind in ("times", "rows")) < 100, "the footers"
    for path in (ledger_path(LAST, "data"), "alive", "broker.manifest", "topics/1/manifest"):
        assert read[path] >= sizes[path]
    assert await scene.download(second) == files_of(scene.vfs, "data")
    assert "alive" not in await scene.download(first)


@pytest.mark.parametrize(
    ("other", "kinds"),
    [
        ({"step": 7}, ("data", "times", "rows")),
        ({"asked": 5}, ("data", "rows")),
        ({"shift": 5, "asked": -5}, ("times",)),
    ],
)
async def test_another_file_of_the_same_name_and_size_is_not_taken_for_the_first_one(
    other: dict[str, int], kinds: tuple[str, ...]
) -> None:
    scene = Scene()
    await scene.upload()
    first = files_of(scene.vfs, "data")
    scene.vfs = a_folder(**other)  # the disk of a machine that was set back: same ids, other messages
    second = files_of(scene.vfs, "data")
    for path in (ledger_path(SEALED, kind) for kind in kinds):
        assert len(first[path]) == len(second[path]) and first[path] != second[path]
    assert await scene.download(await scene.upload(101)) == second


async def test_nothing_of_another_broker_is_taken_unread() -> None:
    scene = Scene()
    await scene.upload(lsn=999)
    other = await scene.upload(lsn=3, broker_id="two")
    assert other.uploaded_bytes == 0, "the bytes are the same, and young"
    assert await scene.download(other) == files_of(scene.vfs, "data")


async def test_a_chunk_that_somebody_took_away_is_stored_again() -> None:
    scene = Scene()
    first = await scene.upload()
    scene.clock.ms += 2 * REST_MS
    lost = scene.store.objects_by_name.pop(f"chunks/{await a_chunk(scene, first, ledger_path(1, 'data'))}")
    second = await scene.upload(101)
    assert second.uploaded_bytes == len(lost[0])
    assert await scene.download(second) == files_of(scene.vfs, "data")
    with pytest.raises(MissingFile, match=r"chunk of topics/1/ledgers/1.0.data is missing"):
        await scene.download(first)


async def a_chunk(scene: Scene, base: Base, path: str) -> str:
    return (await scene.bases.read_manifest(base.name)).files[path].chunks[0]


@pytest.mark.slow
async def test_a_damaged_chunk_is_refused_with_its_name() -> None:
    scene = Scene()
    base = await scene.upload()
    names = {f"chunks/{name}" for name in scene.store.names("chunks")}
    for name, damage in itertools.product(
        sorted(names)[::7], (flip, lambda body: body[:-1], lambda body: body + b"x")
    ):
        kept = scene.store.objects_by_name[name]
        scene.store.change(name, damage)
        with pytest.raises(Corrupt, match="is damaged") as caught:
            await scene.download(base)
        assert caught.value.path == name
        scene.store.objects_by_name[name] = kept
    assert await scene.download(base)


def flip(body: bytes) -> bytes:
    return bytes([body[0] ^ 1]) + body[1:]


async def test_without_its_manifest_there_is_no_base_and_a_damaged_one_is_no_parent() -> None:
    scene = Scene()
    first = await scene.upload()
    scene.store.change(f"bases/{first.name}", lambda body: body[:-5] + flip(body[-5:]))
    with pytest.raises(Corrupt, match="manifest of a base is damaged"):
        await scene.bases.read_manifest(first.name)
    scene.clock.ms += REST_MS
    second = await scene.upload(101)
    assert second.uploaded_bytes == first.uploaded_bytes, "what lies there could go at any time"
    assert await scene.download(second)
    with pytest.raises(Corrupt):  # it could name any chunk
        await scene.bases.sweep()
    scene.store.change(f"bases/{first.name}", lambda body: b"{}")
    assert [stored.base.name for stored in await scene.bases.bases()] == [second.name]
    with pytest.raises(NotFound, match="no base '00-x'"):
        await scene.bases.read_manifest("00-x")


class Killed(BaseException):
    pass


async def count_calls() -> int:
    scene = Scene()
    await scene.upload()
    return len(scene.store.calls)


@pytest.mark.slow
@pytest.mark.parametrize("carried_out", [False, True])
async def test_an_upload_that_is_killed_at_any_call_leaves_no_half_base_and_the_next_one_goes_on(
    carried_out: bool,
) -> None:
    total = await count_calls()
    for at in range(1, total + 1, at_depth(change=5, deep=1)):
        scene = Scene()
        kill = lambda kind, name, number, at=at: Killed() if number == at else None  # noqa: E731
        setattr(scene.store, "fail_after" if carried_out else "fail", kill)
        outcome = await asyncio.gather(scene.upload(), return_exceptions=True)
        scene.store.fail = scene.store.fail_after = lambda kind, name, number: None
        whole = [stored.base for stored in await scene.bases.bases()]
        for base in whole:
            assert await scene.download(base) == files_of(scene.vfs, "data")
        assert whole or isinstance(outcome[0], BaseException)
        stored = {name[:64] for name in scene.store.names("chunks")}
        second = await scene.upload(101)
        assert await scene.download(second) == files_of(scene.vfs, "data")
        again = [name[:64] for name in scene.store.names("chunks")]
        assert len(again) == len(set(again)), "what was there is not stored again"
        assert stored <= set(again)


@pytest.mark.slow
async def test_an_upload_may_be_cancelled_at_every_await() -> None:
    for turns in range(0, 400, 3):
        scene = Scene()
        task = asyncio.ensure_future(scene.upload())
        for _ in range(turns):
            await asyncio.sleep(0)
        was_done = task.done()
        task.cancel()
        outcome = await asyncio.gather(task, return_exceptions=True)
        assert len(asyncio.all_tasks()) == 1, "a worker was left behind"
        for stored in await scene.bases.bases():
            assert await scene.download(stored.base) == files_of(scene.vfs, "data")
        if was_done:
            assert isinstance(outcome[0], Base)
            return
    pytest.fail("the upload never ended")


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient_store, "FIRST_PAUSE_SECONDS", 0)


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("carried_out", [False, True])
async def test_calls_that_fail_in_passing_are_repeated(carried_out: bool) -> None:
    scene = Scene()
    met: set[tuple[str, str]] = set()

    def fail_once(kind: str, name: str, number: int) -> BaseException | None:
        if (kind, name) in met:
            return None
        met.add((kind, name))
        return StoreFailed("away")

    setattr(scene.store, "fail_after" if carried_out else "fail", fail_once)
    base = await scene.upload()
    assert await scene.download(base) == files_of(scene.vfs, "data")
    assert len(met) > 20


@pytest.mark.usefixtures("no_pauses")
async def test_a_store_that_stays_away_is_given_up_after_some_attempts() -> None:
    scene = Scene()
    scene.store.fail = lambda kind, name, number: StoreFailed("away") if name.startswith("chunks/") else None
    with pytest.raises(StoreFailed, match="away"):
        await scene.upload()
    names = [name for kind, name in scene.store.calls if kind == "create" and name.startswith("chunks/")]
    assert max(names.count(name) for name in names) == patient_store.ATTEMPTS


async def test_what_an_operator_must_mend_is_told_at_once_and_before_anything_is_stored() -> None:
    scene = Scene()
    scene.store.fail = lambda kind, name, number: StoreRefused("no rights") if kind == "create" else None
    with pytest.raises(StoreRefused, match="no rights"):
        await scene.upload()
    assert [kind for kind, _ in scene.store.calls] == ["create"]


@pytest.mark.usefixtures("no_pauses")
async def test_a_store_that_says_exists_of_what_it_did_not_store_is_asked_again() -> None:
    scene = Scene()
    lied: set[str] = set()

    def lie_once(kind: str, name: str, number: int) -> BaseException | None:
        if kind != "create" or name in lied:
            return None
        lied.add(name)
        return FileExistsError(name)

    scene.store.fail = lie_once
    assert await scene.download(await scene.upload()) == files_of(scene.vfs, "data")


async def test_no_more_than_so_many_chunks_are_in_memory_at_once() -> None:
    class Slow(FakeStore):
        under_way = most = 0

        async def create(self, name: str, body: Buffer) -> None:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            await asyncio.sleep(0)
            await super().create(name, body)
            self.under_way -= 1

    slow = Slow()
    scene = Scene(slow)
    await scene.upload()
    assert slow.most == IN_FLIGHT


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "least", "most"), [(1, 25, 32), (3_000, IN_FLIGHT, 2 * IN_FLIGHT)])
async def test_small_files_come_many_at_once_and_large_ones_within_the_room(
    rows: int, least: int, most: int
) -> None:
    class Slow(FakeStore):
        under_way: Counter[str]
        most_bytes = most_files = 0

        async def read_range(self, name: str, start: int, length: int) -> bytes:
            body = await super().read_range(name, start, length)
            if name.startswith("chunks/"):
                self.under_way[name] += len(body)
                self.most_bytes = max(self.most_bytes, self.under_way.total())
                self.most_files = max(self.most_files, sum(count > 0 for count in self.under_way.values()))
                await asyncio.sleep(0.005)
                self.under_way[name] -= len(body)
            return body

    slow = Slow()
    slow.under_way = Counter()
    scene = Scene(slow)
    for number in range(40):
        put(scene.vfs, f"data/topics/1/extra{number}", bytes([number]) * rows)
    base = await scene.upload()
    assert await scene.download(base) == files_of(scene.vfs, "data")
    assert slow.most_bytes <= IN_FLIGHT * CHUNK
    assert least <= slow.most_files <= most


@pytest.mark.parametrize("is_last", [False, True])
async def test_an_upload_that_takes_too_long_names_nothing(is_last: bool) -> None:
    done = Scene()
    await done.upload()
    late_from = len(done.store.stored("chunks")) if is_last else 3
    scene = Scene()

    def late(kind: str, name: str, number: int) -> None:
        if kind == "create" and len(scene.store.stored("chunks")) == late_from:
            scene.clock.ms += UPLOAD_MS + 1

    scene.store.fail = late
    with pytest.raises(Unavailable, match="stopped after six hours"):
        await scene.upload()
    assert not scene.store.stored("bases")
    assert len(scene.store.stored("chunks")) <= late_from + IN_FLIGHT


@pytest.mark.slow
async def test_the_two_newest_bases_stay_and_old_ones_go_with_their_chunks() -> None:
    scene = Scene()
    made = []
    for lsn in (100, 101, 102):
        put(scene.vfs, "data/alive", b"%d" % lsn)
        made.append(await scene.upload(lsn))
        scene.clock.ms += HOUR_MS
    own = {base.name: await a_chunk(scene, base, "alive") for base in made}
    for base in made:
        with pytest.raises(Refused, match="cannot be deleted yet: a broker's two newest") as caught:
            await scene.bases.remove(base.name)
        assert caught.value.reason == "BACKUP_KEPT"
    assert await scene.bases.prune("one", 1, 0) == []
    scene.clock.ms += REST_MS
    assert await scene.bases.prune("two", 1, 0) == []
    assert await scene.bases.prune("one", 3, 0) == []
    assert await scene.bases.prune("one", 0, 50 * HOUR_MS) == []
    assert await scene.bases.prune("one", 0, HOUR_MS) == [made[0].name]
    assert own[made[0].name] not in scene.store.names("chunks")
    for base in made[1:]:
        assert own[base.name] in scene.store.names("chunks")
        assert await scene.download(base)
    with pytest.raises(NotFound):
        await scene.bases.remove(made[0].name)
    made.append(await scene.upload(103))
    scene.clock.ms += REST_MS
    await scene.bases.remove(made[1].name)
    assert [stored.base for stored in await scene.bases.bases()] == made[2:]
    assert {name[:64] for name in scene.store.names("chunks")} == set(digests(scene, made[2:]))


def digests(scene: Scene, bases: list[Base]) -> Iterator[str]:
    for base in bases:
        manifest = decode_manifest(scene.store.objects_by_name[f"bases/{base.name}"][0], "x")
        yield from (name[:64] for name in manifest.chunk_names())


async def test_what_a_killed_upload_left_is_swept_a_day_later() -> None:
    scene = Scene()
    scene.store.fail = lambda kind, name, number: (
        Killed() if name.startswith("bases/") and kind == "create" else None
    )
    await asyncio.gather(scene.upload(), return_exceptions=True)
    scene.store.fail = lambda kind, name, number: None
    scene.store.objects_by_name["probe/0a"] = b"", scene.clock.ms
    left = scene.store.names("chunks")
    scene.clock.ms += REST_MS - 1
    assert await scene.bases.sweep() == 0
    scene.clock.ms += 1
    assert await scene.bases.sweep() == len(left) > 10
    assert not scene.store.objects_by_name


async def test_manifests_are_read_only_while_chunks_are_in_question_and_headers_once() -> None:
    scene = Scene()
    made = []
    for lsn in range(100, 106):
        put(scene.vfs, "data/alive", b"%d" % lsn)
        made.append(await scene.upload(lsn))
        scene.clock.ms += HOUR_MS
    await scene.bases.bases()

    def manifests_read() -> list[str]:
        return [
            name for kind, name in scene.store.calls if kind == "read_range" and name.startswith("bases/")
        ]

    scene.store.calls.clear()
    assert await scene.bases.prune("one", 2, 0) == []
    assert manifests_read() == [], "no chunk is old enough to go"
    scene.clock.ms += REST_MS - 6 * HOUR_MS
    assert await scene.bases.sweep() == 0
    assert manifests_read() == [f"bases/{base.name}" for base in (made[-1], made[0])], (
        "the first base's own chunk is old now, and the others are the newest one's too"
    )


async def test_a_folder_that_is_not_whole_is_not_uploaded() -> None:
    scene = Scene()
    put(scene.vfs, "data/unfinished", b"")
    with pytest.raises(NotFound, match="is incomplete"):
        await scene.upload()


async def test_a_store_that_keeps_other_bytes_than_it_was_given_is_told() -> None:
    class Liar(FakeStore):
        async def create(self, name: str, body: Buffer) -> None:
            await super().create(name, flip(bytes(body)) if name.startswith("bases/") else body)

    scene = Scene(Liar())
    with pytest.raises(Unavailable, match="other content at bases/"):
        await scene.upload()


@pytest.mark.parametrize("keep", [lambda body: None, lambda body: body[:-1]])
async def test_a_store_that_keeps_less_than_it_says_gets_no_manifest(
    keep: Callable[[bytes], bytes | None],
) -> None:
    class Liar(FakeStore):
        count = 0

        async def create(self, name: str, body: Buffer) -> None:
            self.count += name.startswith("chunks/")
            kept = keep(bytes(body)) if self.count == 7 else body
            if kept is not None:
                await super().create(name, kept)

    scene = Scene(Liar())
    with pytest.raises(Unavailable, match=r"does not return chunks/.* as it was stored"):
        await scene.upload()
    assert not scene.store.names("bases")


async def test_a_manifest_that_the_store_keeps_otherwise_is_told() -> None:
    scene = Scene()
    scene.store.objects_by_name["bases/0000000000000064-t"] = b"something else", 0
    with pytest.raises(StoreRefused, match="14 bytes instead of"):
        await scene.upload()


async def test_only_what_a_broker_made_is_uploaded_and_restored_and_the_base_can_be_read() -> None:
    scene = Scene()
    files = files_of(scene.vfs, "data")
    scene.vfs.make_dir("data/notes")
    scene.vfs.make_dir("data/topics/lost+found")
    for foreign in (
        "data/.DS_Store",
        "data/notes/mine",
        "data/topics/1/my notes",
        "data/topics/1/.nfs01",
        "data/topics/x",
    ):
        put(scene.vfs, foreign, b"mine")
    base = await scene.upload()
    assert await scene.download(base) == files | {"topics/x": b"mine"}, "what might be a broker's goes along"


async def test_a_backup_with_an_impossible_name_is_refused_before_anything_is_stored() -> None:
    scene = Scene()
    for tag in ("../../x", "a/b", "", "x" * 97, "\u00e4"):
        with pytest.raises(Corrupt, match="Invalid backup name"):
            await scene.upload(tag=tag)
    assert not scene.store.names("chunks")


@pytest.mark.slow
async def test_two_uploads_of_one_backup_at_once_both_end_with_the_base_that_is_there() -> None:
    for turns in range(0, 300, 7):
        scene = Scene()
        first = asyncio.ensure_future(scene.upload())
        for _ in range(turns):
            await asyncio.sleep(0)
        second = await scene.upload()
        assert await first == second, turns
        assert [stored.base for stored in await scene.bases.bases()] == [second]
        assert await scene.download(second) == files_of(scene.vfs, "data")


async def test_an_upload_that_slept_while_it_stored_its_manifest_takes_it_back() -> None:
    scene = Scene()

    def sleep(kind: str, name: str, number: int) -> None:
        if kind == "create" and name.startswith("bases/"):
            scene.clock.ms += UPLOAD_MS + 1

    scene.store.fail = sleep
    with pytest.raises(Unavailable, match="stopped after six hours"):
        await scene.upload()
    assert not scene.store.names("bases")


async def test_a_base_whose_header_is_damaged_is_told_and_can_be_deleted() -> None:
    scene = Scene()
    kept = await scene.upload()
    scene.clock.ms += REST_MS
    orphans = await scene.bases.upload(a_folder(step=3), BACKUP, BaseCut("t", "", "two", 5, 7, 1))
    scene.clock.ms += REST_MS
    for body in (b"", b"{}\n", scene.store.objects_by_name[f"bases/{orphans.name}"][0][5:]):
        scene.store.objects_by_name[f"bases/{orphans.name}"] = body, 0
        assert [stored.base for stored in await scene.bases.bases()] == [kept]
        with pytest.raises(Corrupt, match=rf"No chunks are removed .*backup delete 'URL#{orphans.name}'"):
            await scene.bases.sweep()
    await scene.bases.remove(orphans.name)
    assert scene.store.names("bases") == {kept.name}
    assert {name[:64] for name in scene.store.names("chunks")} == set(digests(scene, [kept]))
    with pytest.raises(NotFound):
        await scene.bases.remove(orphans.name)


async def test_a_base_of_another_version_is_not_taken_for_a_damaged_one() -> None:
    scene = Scene()
    base = await scene.upload()
    name = f"bases/{base.name}"
    scene.store.change(name, lambda body: body.replace(b'"version":1', b'"version":2', 1))
    assert await scene.bases.bases() == []
    with pytest.raises(Corrupt, match="Use the version of the broker"):
        await scene.bases.remove(base.name)
    assert name in scene.store.objects_by_name


async def test_no_more_of_an_object_is_read_than_it_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(FakeStore):
        most = 0

        async def read(self, name: str) -> bytes:
            raise AssertionError("it may be of any length")

        async def read_range(self, name: str, start: int, length: int) -> bytes:
            body = await super().read_range(name, start, length)
            self.most = max(self.most, len(body))
            return body

    store = Counting()
    scene = Scene(store)
    base = await scene.upload()
    for name in scene.store.names("chunks"):
        scene.store.change(f"chunks/{name}", lambda body: body + bytes(50 * CHUNK))
    store.most = 0
    manifest = await scene.bases.read_manifest(base.name)
    with pytest.raises(Corrupt, match="is damaged"):
        await scene.bases.read_file(manifest, "topics/1/manifest")
    monkeypatch.setattr(base_store, "MANIFEST_BYTES_MAX", 5_000)
    scene.store.change(f"bases/{base.name}", lambda body: body + bytes(50 * CHUNK))
    with pytest.raises(Corrupt, match="exceeds the maximum size"):
        await scene.bases.read_manifest(base.name)
    assert store.most <= max(5_001, len(encode_manifest(manifest)))


async def test_a_chunk_of_another_length_than_the_manifest_says_is_refused() -> None:
    scene = Scene()
    base = await scene.upload()
    manifest = await scene.bases.read_manifest(base.name)
    file = manifest.files["topics/1/manifest"]
    for size in (file.size - 1, file.size + 1):
        other = replace(manifest, files={file.path: replace(file, size=size)})
        with pytest.raises(Corrupt, match="is damaged"):
            await scene.bases.read_file(other, file.path)


@pytest.mark.slow
async def test_pieces_of_another_size_are_cut_anew() -> None:
    scene = Scene()
    await scene.upload()
    other = BaseStore(scene.store, scene.clock, InThisThread(), chunk_bytes=CHUNK // 2)
    base = await other.upload(scene.vfs, BACKUP, BaseCut("t", "", "one", 5, 101, 1))
    assert await scene.download(base) == files_of(scene.vfs, "data")


@pytest.mark.slow
async def test_a_sealed_file_that_became_longer_is_read_again() -> None:
    scene = Scene()
    await scene.upload()
    bucket = next(path for path in files_of(scene.vfs, "data") if path.endswith(".bucket"))
    long = scene.vfs.snapshot()[f"data/{bucket}"].ljust(70_000, b"x")  # beyond the part that its seal is of
    put(scene.vfs, f"data/{bucket}", long)
    await scene.upload(101)
    put(scene.vfs, f"data/{bucket}", long + b"more")
    assert (await scene.download(await scene.upload(102)))[bucket] == long + b"more"
