"""kill -9 of a broker that makes one backup after the other: what it was answered is whole, and starts a broker."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc

from postdate_api.v1 import admin_pb2, admin_pb2_grpc
from tests.depth import at_depth
from tests.process.conftest import ROOT, SMALL, BrokerProcess, Start
from tests.process.load import Load, run_for
from tests.process.test_crash import settle, verify

ROUNDS = at_depth(change=1, deep=6)


async def back_up(broker: BrokerProcess, made: list[Any]) -> None:
    """Make backups until the broker is gone."""
    admin = admin_pb2_grpc.AdminServiceStub(broker.channel)
    try:
        while True:
            answer = await admin.CreateBackup(admin_pb2.CreateBackupRequest(label="kill"))
            made.append(answer.backup)
    except grpc.aio.AioRpcError:
        return


def command(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "broker.cli", *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'clients/python'}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


async def test_kill_9_during_backups(start: Start, tmp_path: Path):
    load = Load(seed=6)
    made: list[Any] = []
    settings = {**SMALL, "data_dir": str(tmp_path / "d"), "backup_keep_count": "0"}
    for _ in range(ROUNDS):
        load.begin_life()
        broker = await (await start(**settings)).serving()
        backups = asyncio.ensure_future(back_up(broker, made))
        so_far = len(made)
        tasks = await run_for(broker, load, 0)
        async with asyncio.timeout(20):
            while len(made) == so_far:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.4 * load.rng.random())  # somewhere in the next one
        await broker.kill()
        await asyncio.gather(*tasks, backups)
    assert len(made) >= ROUNDS
    load.begin_life()
    broker = await (await start(**settings)).serving()
    await settle(load, broker)
    assert not load.violations, load.violations[:5]
    folder = tmp_path / "d" / "backups"
    async with asyncio.timeout(20):
        while any(each.name.endswith(".partial") for each in folder.iterdir()):
            await asyncio.sleep(0.01)
    await broker.kill()
    assert not (tmp_path / "d" / "backup.pins").exists()
    names = {each.name for each in folder.iterdir() if each.is_dir()}
    assert {each.name for each in made} <= names
    for name in sorted({made[0].name, max(names)}):  # perhaps nobody was answered for the last one
        verify(folder / name)
        target = tmp_path / f"restored-{name}"
        command("restore", str(folder / name), "--data-dir", str(target))
        again = await (await start(**{**settings, "data_dir": str(target)})).serving()
        await again.kill()
        verify(target)
