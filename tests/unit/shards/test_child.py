"""Processes of shards: started again when they end, and not after they were to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from broker.shards.child import ShardChild

SECONDS = 20.0
NOTING = "import os, sys; open(sys.argv[1], 'a').write('x')"


async def until_started(child: ShardChild, times: int) -> None:
    async with asyncio.timeout(SECONDS):
        while child.starts < times or not child.pid:
            await asyncio.sleep(0.005)


@pytest.mark.slow
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
