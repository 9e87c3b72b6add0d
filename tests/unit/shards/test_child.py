"""Processes of shards: started again when they end, and not after they were to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from broker.shards.child import ShardChild, started_ahead

SECONDS = 20.0
NOTING = "import os, sys; open(sys.argv[1], 'a').write('x')"


async def until_started(child: ShardChild, times: int) -> None:
    async with asyncio.timeout(SECONDS):
        while child.starts < times or not child.pid:
            await asyncio.sleep(0.005)


def written(path: Path) -> str:
    return path.read_text() if path.exists() else ""


async def until_written(path: Path, text: str) -> None:
    async with asyncio.timeout(SECONDS):
        while written(path) != text:
            await asyncio.sleep(0.005)


async def test_a_process_that_ends_is_started_again_with_growing_pauses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    pauses: list[float] = []

    async def note(waiting: asyncio.Future[bool], timeout: float) -> bool:
        pauses.append(timeout)
        waiting.close()  # type: ignore[attr-defined]
        if len(pauses) == 8:
            child.stop()
        return False

    monkeypatch.setattr(asyncio, "wait_for", note)
    child = ShardChild(0, [sys.executable, "-c", NOTING, str(tmp_path / "starts")], os.environ)
    async with asyncio.timeout(SECONDS):
        await child.run()
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert (tmp_path / "starts").read_text() == "x" * 8
    assert child.pid == 0


WAITING = """
import os, sys
print("loaded", file=open(sys.argv[1], "a"))
print(os.read(0, 1) == b"b", file=open(sys.argv[1], "a"))
os.read(0, 1)
os.kill(os.getpid(), 15)
"""


async def test_a_process_that_was_started_ahead_begins_when_it_is_run(tmp_path: Path):
    path = tmp_path / "lines"
    async with started_ahead([[sys.executable, "-c", WAITING, str(path)]], os.environ) as [child]:
        pid = child.pid
        await until_written(path, "loaded\n")
        running = asyncio.create_task(child.run())
        await until_written(path, "loaded\nTrue\n")
        assert (child.pid, child.starts) in {(pid, 1), (0, 1)}
        child.stop()
        async with asyncio.timeout(SECONDS):
            await running


async def test_processes_that_were_started_ahead_end_where_nobody_runs_them(tmp_path: Path):
    path = tmp_path / "lines"
    with pytest.raises(ZeroDivisionError):
        async with started_ahead([[sys.executable, "-c", WAITING, str(path)]] * 2, os.environ) as children:
            pids = [child.pid for child in children]
            raise ZeroDivisionError
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert "True" not in written(path)


async def test_a_process_that_cannot_be_started_ahead_is_tried_again():
    async with started_ahead([["/nowhere/at/all"]], os.environ) as [child]:
        assert (child.pid, child.starts) == (0, 0)


async def test_a_process_that_is_told_to_stop_is_not_started_again():
    child = ShardChild(0, ["sleep", "100"], os.environ)
    running = asyncio.create_task(child.run())
    await until_started(child, 1)
    child.stop()
    async with asyncio.timeout(SECONDS):
        await running
    assert child.starts == 1


async def test_a_process_that_does_not_hear_is_killed():
    child = ShardChild(0, ["sleep", "100"], os.environ)
    running = asyncio.create_task(child.run())
    await until_started(child, 1)
    child.send(signal.SIGSTOP)
    child.stop()
    child.kill()
    async with asyncio.timeout(SECONDS):
        await running
    assert (child.starts, child.pid) == (1, 0)


async def test_a_command_that_is_not_there_is_tried_again(caplog: pytest.LogCaptureFixture):
    child = ShardChild(0, ["/nowhere/at/all"], os.environ)
    running = asyncio.create_task(child.run())
    async with asyncio.timeout(SECONDS):
        while not caplog.records:
            await asyncio.sleep(0.005)
    child.stop()
    async with asyncio.timeout(SECONDS):
        await running
    assert child.starts == 0
