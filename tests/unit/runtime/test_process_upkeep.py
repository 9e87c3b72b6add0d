"""Upkeep of a process: as long as it serves, and its end is told."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys

import pytest

from broker.runtime.cycles import CycleCollection
from broker.runtime.process_upkeep import THREAD_SWITCH_SECONDS, with_upkeep

TASKS = {"cycle collection", "trim of the heap"}


def running() -> set[str]:
    return {task.get_name() for task in asyncio.all_tasks()} & TASKS


async def serve_until_asked() -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    try:
        await stop.wait()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
    return 0


async def test_it_lasts_as_long_as_what_serves() -> None:
    callbacks, thresholds, switch_seconds = [*gc.callbacks], gc.get_threshold(), sys.getswitchinterval()

    async def serve() -> int:
        await asyncio.sleep(0)
        assert running() == TASKS
        assert gc.callbacks != callbacks
        assert sys.getswitchinterval() == pytest.approx(THREAD_SWITCH_SECONDS)
        return 3

    assert await with_upkeep(serve()) == 3
    assert not running()
    assert gc.callbacks == callbacks
    assert gc.get_threshold() == thresholds
    assert sys.getswitchinterval() == switch_seconds


async def test_it_ends_with_what_cannot_serve() -> None:
    async def serve() -> int:
        raise OSError("no port")

    with pytest.raises(OSError, match="no port"):
        await with_upkeep(serve())
    assert not running()


@pytest.mark.parametrize("error", [MemoryError("none"), None], ids=["fails", "returns"])
async def test_without_it_the_process_is_asked_to_stop_and_its_status_tells(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    async def run(_: CycleCollection) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(CycleCollection, "run", run)

    async with asyncio.timeout(10):
        assert await with_upkeep(serve_until_asked()) == 1
