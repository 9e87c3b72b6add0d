"""Backups in an object store, from the commands to a client of the restored broker."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from broker import cli
from broker.cluster import patient_store
from broker.cluster.base_manifest import ChunkPlace, decode_manifest
from broker.cluster.base_store import BaseStore
from broker.cluster.base_vfs import open_base_vfs, pin_base
from broker.jobs.audit import AuditRequest, run_audit
from broker.jobs.engine import InlineEngine
from broker.jobs.values import Level
from broker.jobs.work import Line
from tests.s3_server import BUCKET, CREDENTIALS, need_server, s3_server, store_url
from tests.wire.conftest import LIMIT_SECONDS, Message, Serve, Wire, ids_of

TINY = {
    "min_index_count": 20,
    "max_buckets": 2,
    "max_segment_entries": 5,
    "segment_time_step_ms": 100,
    "seal_after_ms": 50,
    "checkpoint_interval_ms": 50,
    "ledger_max_entries": 50,
    "batch_messages_max": 50,
}


@pytest.fixture(params=["file", "s3"])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[str]:
    """The URL of an empty store."""
    if request.param == "file":
        (tmp_path / "store").mkdir()
        yield f"file://{tmp_path}/store"
        return
    pytest.importorskip("obstore")
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    async with s3_server(need_server(), tmp_path / "s3") as port:
        yield store_url(port, "a/prefix")


async def invoke(*arguments: str, wire: Wire | None = None) -> Result:
    address = [] if wire is None else ["--address", wire.server.grpc_address]
    return await asyncio.to_thread(CliRunner().invoke, cli.main, [*arguments, *address])


async def command(*arguments: str, wire: Wire | None = None) -> str:
    result = await invoke(*arguments, wire=wire)
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


async def refusal(*arguments: str, wire: Wire | None = None) -> str:
    result = await invoke(*arguments, wire=wire)
    assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.output
    return result.output


async def audit(folder: str, level: Level) -> Line:
    request = AuditRequest(folder, level)
    return await asyncio.to_thread(run_audit, request, InlineEngine(1))


class Producing:
    """A producer at work, and what it was answered."""

    def __init__(self, wire: Wire) -> None:
        self.stored: list[tuple[int, int]] = []
        self._task = asyncio.ensure_future(self._work(wire))

    async def _work(self, wire: Wire) -> None:
        while True:
            messages = [Message(payload=b"x" * 500, deliver_after_ms=3_600_000) for _ in range(20)]
            self.stored.extend(await wire.produce("t", *messages))

    async def until(self, count: int) -> None:
        async with asyncio.timeout(LIMIT_SECONDS):
            while len(self.stored) < count:
                assert not self._task.done(), self._task
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_a_broker_at_work_is_backed_up_audited_in_place_and_restored(
    store: str, serve: Serve, tmp_path: Path
) -> None:
    wire = await serve(**TINY)
    await wire.subscribe("t", initial_position=2)
    producing = Producing(wire)
    await producing.until(1_000)
    answered = len(producing.stored)
    first = await command("backup", "create", store, "nightly", wire=wire)
    after = len(producing.stored)
    assert first.startswith(f"{store}#") and first.endswith("Z-nightly")
    assert await command("backup", "list", wire=wire) == "", "the folder on this machine is gone"
    await producing.until(after + 500)
    keep_one = ("--keep", "1", "--keep-days", "1")
    second = await command("backup", "create", store, *keep_one, wire=wire)
    await producing.stop()
    for url in (first, second):
        assert "two newest bases are kept" in await refusal("backup", "delete", url)

    bases = json.loads(await command("backup", "list", store, "--output", "json"))
    assert [base["url"] for base in bases] == [first, second]
    assert bases[0]["label"] == "nightly" and bases[0]["lsn"] < bases[1]["lsn"]
    grown_bytes = bases[1]["bytes"] - bases[0]["bytes"]
    assert bases[1]["uploaded_bytes"] - grown_bytes < 0.5 * bases[0]["bytes"], "most of the first was there"
    assert f"1 topic  {bases[1]['bytes']} bytes" in await command("backup", "list", store)

    for folder, level in ((first, Level.DEEP), (store, Level.QUICK)):
        report = await audit(folder, level)
        assert (report["outcome"], report["folder_kind"]) == ("clean", "base"), report["findings"]
        assert report["folder"] == (first if folder == first else second)
        assert report["totals"]["pending"] >= answered
    assert "0 problems" in await command("verify", second)

    for to, words in {"2100-01-01T00:00:00Z": second, "1": "none of them is as old as 1970-"}.items():
        told = await refusal("restore", store, "--to", to, "--data-dir", str(tmp_path / "to"))
        assert "contains no cluster" in told and words in told
    for number, backup in enumerate((first, store)):
        await command("restore", backup, "--data-dir", str(tmp_path / f"restored{number}"))
    again = await serve(data_dir=str(tmp_path / "restored0"), **TINY)
    stats = await again.stats("t")
    assert answered <= stats.scheduled_messages <= after + 20
    (fresh,) = await again.produce("t", b"now")
    stream = await again.subscribe("t")
    assert ids_of(await stream.deliveries(1)) == [fresh]
    newest = await serve(data_dir=str(tmp_path / "restored1"), **TINY)
    assert (await newest.stats("t")).scheduled_messages > after


async def test_a_quick_audit_reads_a_part_of_a_base(
    store: str, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = await serve(**TINY)
    for _ in range(40):
        await wire.produce("t", *[Message(payload=b"x" * 30_000, deliver_after_ms=3_600_000)] * 10)
    await command("backup", "create", store, wire=wire)
    base_bytes = await asyncio.to_thread(lambda: open_base_vfs(pin_base(store)).base.bytes)
    fetched_bytes = 0
    read_part = BaseStore.read_part

    async def count(bases: BaseStore, path: str, place: ChunkPlace, start: int, length: int) -> bytes:
        nonlocal fetched_bytes
        fetched_bytes += length
        return await read_part(bases, path, place, start, length)

    monkeypatch.setattr(BaseStore, "read_part", count)
    await audit(store, Level.QUICK)
    assert 0 < fetched_bytes < base_bytes / 10


async def test_a_backup_that_is_there_is_uploaded_without_a_broker(
    store: str, serve: Serve, tmp_path: Path
) -> None:
    wire = await serve(**TINY)
    await wire.produce("t", *[b"x"] * 30)
    folder = await command("backup", "create", "label", wire=wire)
    await wire.stop()
    url = await command("backup", "upload", store, folder)
    assert url.startswith(f"{store}#") and url.endswith(folder.rpartition("/")[2])
    assert await command("backup", "upload", store, folder) == url, "it is there"
    assert "0 problems" in await command("verify", folder), "it stays"
    assert "does not exist on this machine" in await refusal(
        "backup", "upload", store, str(tmp_path / "none")
    )
    assert "not a complete backup" in await refusal("backup", "upload", store, str(tmp_path))


async def test_what_is_wrong_is_told_before_anything_is_made(
    wire: Wire, serve: Serve, tmp_path: Path
) -> None:
    wire = await serve(**TINY)
    missing = f"file://{tmp_path}/none"
    assert "does not exist" in await refusal("backup", "create", missing, wire=wire)
    for arguments, words in {
        ("create", "ftp://x"): "must begin with s3://",
        ("create", "s3://a:b@bucket"): "remove the credentials from the URL",
        ("create", "not-a-url", "label"): "STORE is missing",
        ("create", "memory://", "label"): "for tests only",
        ("create", "s3://[bucket"): "Not the URL",
        ("create", f"file://{tmp_path}#name"): "the part after # names a backup",
        ("create", "label", "--keep", "3"): "STORE is missing",
        ("delete", missing): "name the backup",
    }.items():
        assert words in await refusal("backup", *arguments, wire=wire)
    assert "for tests only" in await refusal("backup", "upload", "memory://", str(tmp_path))
    assert await command("backup", "list", wire=wire) == ""
    for arguments in (("restore", missing, "--data-dir", str(tmp_path / "r")), ("verify", missing)):
        assert "does not exist" in await refusal(*arguments)
    assert "the bucket is missing" in await refusal("verify", "s3://")
    (tmp_path / "none").mkdir()
    assert "has no base" in await refusal("restore", missing, "--data-dir", str(tmp_path / "r"))
    assert not (tmp_path / "r").exists()


async def test_a_bucket_rights_and_a_store_that_are_not_there_are_told_before_anything_is_made(
    wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setattr(patient_store, "FIRST_PAUSE_SECONDS", 0)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    async with s3_server(need_server(), tmp_path / "s3") as port:
        url = store_url(port)
        for action, words in {"create": "the bucket does not exist", "list": "no such bucket"}.items():
            nowhere = url.replace(BUCKET, "no-such-bucket")
            assert words in await refusal("backup", action, nowhere, wire=wire)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        for arguments in (("create", url), ("list", url), ("delete", f"{url}#x")):
            assert "permission denied" in await refusal("backup", *arguments, wire=wire)
    told = await refusal("backup", "create", url, wire=wire)
    assert url.partition("?")[0].rstrip("/") in told and "could not create probe/" in told
    assert await command("backup", "list", wire=wire) == ""


async def test_a_store_that_goes_away_leaves_the_folder_to_be_uploaded_later(
    wire: Wire, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = await serve(**TINY)
    await wire.produce("t", *[b"x"] * 50)
    (tmp_path / "store").mkdir()
    store = f"file://{tmp_path}/store"
    monkeypatch.setattr(patient_store, "FIRST_PAUSE_SECONDS", 0)
    upload = cli._upload

    def upload_without_store(bases: BaseStore, store: str, folder: str) -> None:
        shutil.rmtree(tmp_path / "store")
        upload(bases, store, folder)

    monkeypatch.setattr(cli, "_upload", upload_without_store)
    assert "does not exist" in await refusal("backup", "create", store, wire=wire)
    (line,) = (await command("backup", "list", wire=wire)).splitlines()
    monkeypatch.undo()
    (tmp_path / "store").mkdir()
    await command("backup", "upload", store, line.split()[-1])


async def test_damage_is_told_by_name_and_half_a_base_is_none(
    wire: Wire, serve: Serve, tmp_path: Path
) -> None:
    wire = await serve(**TINY)
    await wire.produce("t", *[b"x" * 1000] * 50)
    (tmp_path / "store").mkdir()
    store = f"file://{tmp_path}/store"
    url = await command("backup", "create", store, wire=wire)
    path = tmp_path / "store" / "bases" / url.partition("#")[2]
    manifest = decode_manifest(path.read_bytes(), "x")
    name = manifest.files["topics/1/ledgers/1.0.data"].chunks[0]
    chunk = tmp_path / "store" / "chunks" / name
    body = chunk.read_bytes()
    chunk.write_bytes(body[:100] + bytes([body[100] ^ 1]) + body[101:])
    told = await refusal("restore", store, "--data-dir", str(tmp_path / "r"))
    assert "topics/1/ledgers/1.0.data" in told and f"chunks/{name}" in told and "damaged" in told
    assert (tmp_path / "r" / "unfinished").exists()
    chunk.unlink()
    assert f"chunks/{name}" in await refusal("restore", store, "--data-dir", str(tmp_path / "r"))
    report = await audit(store, Level.DEEP)
    assert report["outcome"] != "clean" and any(name in finding["what"] for finding in report["findings"])
    path.unlink()
    assert await command("backup", "list", store) == ""
    assert "no base" in await refusal("restore", url, "--data-dir", str(tmp_path / "r"))
    assert "the two newest" not in await refusal("backup", "delete", url)
