"""CreateBackup, ListBackups, DeleteBackup and restore, from client to files and back to a client."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner

import postdate
from broker import cli
from broker.errors import Fenced
from broker.folder.recovery import open_manifests
from broker.jobs.verify import verify_data_dir
from broker.runtime.vfs import LocalVfs
from broker.storage.layout import Layout
from postdate_api.v1 import admin_pb2
from tests.wire.conftest import LIMIT_SECONDS, Message, Serve, Wire, ids_of, refused, within

TINY = {
    "min_index_count": 20,
    "max_buckets": 2,
    "max_segment_entries": 5,
    "segment_time_step_ms": 100,
    "seal_after_ms": 50,
    "checkpoint_interval_ms": 50,
    "ledger_max_entries": 50,
    "batch_messages_max": 50,
    "backup_keep_count": 3,
}


async def create(wire: Wire, label: str = "", request_id: str = "") -> admin_pb2.Backup:
    request = admin_pb2.CreateBackupRequest(label=label, request_id=request_id)
    return (await within(wire.admin.CreateBackup(request))).backup


async def names(wire: Wire) -> list[str]:
    answer = await within(wire.admin.ListBackups(admin_pb2.ListBackupsRequest()))
    return [each.name for each in answer.backups]


def hashes(folder: str) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and path.name != "lock"
    }


def restore(backup: str, target: Path) -> None:
    result = CliRunner().invoke(cli.main, ["restore", backup, "--data-dir", str(target)])
    assert result.exit_code == 0, result.output


async def test_a_backup_of_a_broker_at_work_never_changes_and_starts_a_broker_that_goes_on_from_it(
    serve: Serve, tmp_path: Path
):
    wire = await serve(**TINY)
    await wire.subscribe("t", initial_position=2)
    stored: list[tuple[int, int]] = []

    async def work() -> None:
        while True:
            stored.extend(
                await wire.produce(
                    "t", *(Message(payload=b".", deliver_after_ms=3_600_000) for _ in range(20))
                )
            )

    task = asyncio.ensure_future(work())
    async with asyncio.timeout(LIMIT_SECONDS):
        while len(stored) < 500:
            await asyncio.sleep(0.01)
    before = set(stored)
    backup = await create(wire, "at-work")
    after = set(stored)
    first = hashes(backup.path)
    assert first
    async with asyncio.timeout(LIMIT_SECONDS):
        while len(stored) < len(after) + 1_000:  # rolls, seals, merges and checkpoints
            await asyncio.sleep(0.01)
    task.cancel()
    assert hashes(backup.path) == first
    report = await asyncio.to_thread(verify_data_dir, LocalVfs(), backup.path)
    assert (report.problems, report.notes) == ([], [])
    assert 0 < backup.copied_bytes < backup.bytes
    assert backup.topics == 1
    with pytest.raises(Fenced) as caught:
        open_manifests(LocalVfs(), Layout(backup.path), 0)
    assert caught.value.reason == "DATA_DIR_IS_BACKUP"

    await asyncio.to_thread(restore, backup.path, tmp_path / "restored")
    again = await serve(data_dir=str(tmp_path / "restored"), **TINY)
    stats = await again.stats("t")
    assert len(before) <= stats.scheduled_messages <= len(after) + 20
    (fresh,) = await again.produce("t", b"now")
    stream = await again.subscribe("t")
    assert ids_of(await stream.deliveries(1)) == [fresh]
    assert hashes(backup.path) == first


async def test_backups_are_listed_deleted_and_pruned(wire: Wire, serve: Serve):
    wire = await serve(**TINY)
    made = [await create(wire, label) for label in ("a", "", "c")]
    assert await names(wire) == [each.name for each in made]
    assert [each.label for each in made] == ["a", "", "c"]
    assert made[0].name.endswith("Z-a") and made[0].path.endswith(f"/backups/{made[0].name}")
    assert made[0].lsn == 0 and made[0].topics == 0
    answer = await within(wire.admin.ListBackups(admin_pb2.ListBackupsRequest(page_size=2)))
    assert list(answer.backups) == made[:2]
    request = admin_pb2.ListBackupsRequest(page_size=2, page_token=answer.next_page_token)
    rest = await within(wire.admin.ListBackups(request))
    assert list(rest.backups) == made[2:] and not rest.next_page_token
    await within(wire.admin.DeleteBackup(admin_pb2.DeleteBackupRequest(name=made[1].name)))
    made += [await create(wire), await create(wire)]
    assert await names(wire) == [each.name for each in made[2:]]


async def test_a_repeat_gets_the_first_backup(wire: Wire):
    first, second = await asyncio.gather(create(wire, "x", "id"), create(wire, "x", "id"))
    assert first == second
    assert await names(wire) == [first.name]
    request = admin_pb2.DeleteBackupRequest(name=first.name, request_id="id")
    assert await within(wire.admin.DeleteBackup(request)) == await within(wire.admin.DeleteBackup(request))


@pytest.mark.parametrize("label", ["a/b", "..", ".hidden", "x" * 65, "é", "a b", "a.partial"])
async def test_a_label_that_is_none_is_refused(wire: Wire, label: str):
    refusal = await refused(wire.admin.CreateBackup(admin_pb2.CreateBackupRequest(label=label)))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_LABEL")
    assert refusal.fields == ("label",)


async def test_one_at_a_time(wire: Wire):
    await wire.produce("t", *[b"x" * 1000] * 50)
    answers = await asyncio.gather(
        *(wire.admin.CreateBackup(admin_pb2.CreateBackupRequest()) for _ in range(2)), return_exceptions=True
    )
    refusals = [each for each in answers if isinstance(each, grpc.aio.AioRpcError)]
    assert len(refusals) == 1
    assert refusals[0].code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "one at a time" in str(refusals[0].details())


@pytest.mark.parametrize("name", ["", "lock", "../d", "20261121T205812345Z"])
async def test_what_is_no_backup_is_not_deleted(wire: Wire, name: str):
    refusal = await refused(wire.admin.DeleteBackup(admin_pb2.DeleteBackupRequest(name=name)))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "BACKUP_NOT_FOUND")


async def test_another_folder_can_be_named(serve: Serve, tmp_path: Path):
    wire = await serve(backup_dir=str(tmp_path / "elsewhere"))
    backup = await create(wire)
    assert backup.path == str(tmp_path / "elsewhere" / backup.name)
    assert (tmp_path / "elsewhere" / backup.name / "backup.json").is_file()


@pytest.fixture
def other_file_system(tmp_path: Path) -> Iterator[Path]:
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK) or folder.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system at hand")
    with tempfile.TemporaryDirectory(dir=folder) as found:
        yield Path(found)


async def test_on_another_file_system_all_is_copied_there_and_back(
    serve: Serve, tmp_path: Path, other_file_system: Path
):
    wire = await serve(backup_dir=str(other_file_system), **TINY)
    for _ in range(6):
        await wire.produce("t", *(Message(payload=b".", deliver_after_ms=3_600_000) for _ in range(20)))
    backup = await create(wire)
    assert backup.copied_bytes == backup.bytes > 0
    report = await asyncio.to_thread(verify_data_dir, LocalVfs(), backup.path)
    assert (report.problems, report.notes) == ([], [])
    await asyncio.to_thread(restore, backup.path, tmp_path / "restored")
    again = await serve(data_dir=str(tmp_path / "restored"), **TINY)
    assert (await again.stats("t")).scheduled_messages == 120


async def test_the_sdk_and_the_commands_make_list_and_delete(wire: Wire, tmp_path: Path):
    async with postdate.connect(wire.server.grpc_address) as client:
        made = await client.backups.create("sdk")
        assert [each async for each in client.backups.list()] == [made]
        assert made.label == "sdk" and made.bytes >= made.copied_bytes > 0
        with pytest.raises(postdate.NotFound):
            await client.backups.delete("20261121T205812345Z")

    async def command(*arguments: str) -> str:
        result = await asyncio.to_thread(
            CliRunner().invoke, cli.main, ["backup", *arguments, "--address", wire.server.grpc_address]
        )
        assert result.exit_code == 0, result.output
        return result.stdout

    path = (await command("create", "cli")).strip()
    assert path.endswith("Z-cli")
    listed = json.loads(await command("list", "--output", "json"))
    assert [each["label"] for each in listed] == ["sdk", "cli"]
    assert len((await command("list")).splitlines()) == 2
    assert "-sdk" in (first := await command("list", "--limit", "1")) and len(first.splitlines()) == 1
    await command("delete", made.name)
    await asyncio.to_thread(restore, path, tmp_path / "r")
    again = await asyncio.to_thread(
        CliRunner().invoke, cli.main, ["restore", path, "--data-dir", str(tmp_path / "r")]
    )
    assert again.exit_code == 1 and "not empty" in again.output
    none = CliRunner().invoke(cli.main, ["restore", str(tmp_path), "--data-dir", str(tmp_path / "r2")])
    assert none.exit_code == 1 and "not a complete backup" in none.output
    refused_ = await asyncio.to_thread(
        CliRunner().invoke, cli.main, ["backup", "delete", "x", "--address", wire.server.grpc_address]
    )
    assert refused_.exit_code == 1 and "does not exist" in refused_.output


async def test_metrics_tell_of_the_last_one_also_after_a_restart(serve: Serve, tmp_path: Path):
    wire = await serve(data_dir=str(tmp_path / "d"))
    backup = await create(wire)
    counters = wire.server.broker.counters
    assert (counters.backups, counters.backup_last_ms) == (1, backup.create_time_ms)
    await wire.stop()
    again = await serve(data_dir=str(tmp_path / "d"))
    async with asyncio.timeout(LIMIT_SECONDS):
        while not again.server.broker.counters.backup_last_ms:
            await asyncio.sleep(0.005)
    assert again.server.broker.counters.backup_last_ms == backup.create_time_ms


def test_links_and_copies_of_real_files(tmp_path: Path):
    vfs = LocalVfs()
    content = bytes(range(256)) * 20_000
    (tmp_path / "a").write_bytes(content)
    vfs.link(str(tmp_path / "a"), str(tmp_path / "b"))
    assert (tmp_path / "b").samefile(tmp_path / "a")
    with pytest.raises(FileExistsError):
        vfs.link(str(tmp_path / "a"), str(tmp_path / "b"))
    for name in ("c", "/dev/shm/postdate-test-copy"):
        target = str(tmp_path / name)
        Path(target).unlink(missing_ok=True)
        with closing(vfs.open(str(tmp_path / "a"))) as source, closing(vfs.open(target, create=True)) as copy:
            copy.copy_from(source, 1_000_003, 0)
            copy.copy_from(source, 2_000_000, 1_000_003)
            with pytest.raises(OSError, match="shorter"):
                copy.copy_from(source, 10, len(content) - 5)
        assert Path(target).read_bytes()[:3_000_003] == content[:3_000_003]
        Path(target).unlink()
