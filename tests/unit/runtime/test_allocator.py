"""Memory that was freed goes back to the system: once for all who asked, and for certain."""

from __future__ import annotations

import asyncio
import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest

from broker.runtime import allocator
from broker.runtime.allocator import RestTrim, Trimmer, trim_heap
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim

MIB = 1 << 20
BLOCK_BYTES = 64 << 10  # of the heap: larger ones have pages of their own, which go back when they are freed
BLOCKS = 64 * MIB // BLOCK_BYTES


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def test_what_lies_free_below_what_is_in_use_goes_back_to_the_system():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    blocks = [libc.malloc(BLOCK_BYTES) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    for block in blocks[:-1]:
        libc.free(block)
    kept = resident_bytes()
    trim_heap()
    given_back = kept - resident_bytes()
    libc.free(blocks[-1])
    assert given_back > BLOCKS * BLOCK_BYTES * 3 // 4


def test_a_heap_is_trimmed_once_for_all_who_asked_meanwhile(monkeypatch: pytest.MonkeyPatch):
    trimmed_at: list[float] = []

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        monkeypatch.setattr(allocator, "trim_heap", lambda: trimmed_at.append(loop.time()))
        trimmer = Trimmer(2.0)
        begin = loop.time()
        for _ in range(3):
            trimmer.ask()
            await asyncio.sleep(0.5)
        assert trimmed_at == []
        await asyncio.sleep(2.0)
        [first] = trimmed_at
        assert 2.0 <= first - begin < 3.0
        trimmer.ask()
        await asyncio.sleep(3.0)
        assert len(trimmed_at) == 2
        await asyncio.sleep(12.0)
        [_, second, again] = trimmed_at  # what libraries free late is given back too
        assert 8.0 <= again - second < 9.0

    run_sim(scenario, 1)


def test_a_loop_whose_threads_have_ended_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(allocator, "trim_heap", lambda: pytest.fail("trimmed"))

    async def ends_first() -> None:
        loop = asyncio.get_running_loop()
        failures: list[object] = []
        loop.set_exception_handler(lambda _, context: failures.append(context))
        Trimmer(0.0).ask()
        await loop.shutdown_default_executor()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert failures == []

    asyncio.run(ends_first())


def trims(*shares: float) -> list[int]:
    """Numbers of the looks, five seconds apart, after which the heap is trimmed."""
    trim = RestTrim()
    return [number for number, share in enumerate(shares) if trim.is_due(5 * share, 5.0)]


def test_a_heap_is_trimmed_once_a_process_rests_after_work_for_two_looks():
    assert trims(1.0, 0.05, 0.05, 0.0, 0.0) == [2]
    assert trims(1.0, 0.05, 1.0, 0.05, 0.05) == [4]


def test_work_that_takes_little_at_a_time_counts():
    assert trims(*[0.2] * 3, 0.0, 0.0) == [4]


def test_a_process_that_did_little_is_left_alone():
    assert trims(0.2, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0) == []


def test_a_heap_is_not_trimmed_under_load():
    assert trims(1.8, 0.3, 0.3, 0.3, 0.3) == []


def test_memory_goes_back_while_a_process_rests(monkeypatch: pytest.MonkeyPatch):
    trimmed_at: list[float] = []
    cpu = iter((5.0, 5.0, 5.0, 5.0, 5.0))  # seconds: busy until the first look, then at rest

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        monkeypatch.setattr(allocator, "trim_heap", lambda: trimmed_at.append(loop.time()))
        monkeypatch.setattr(allocator, "time", SimpleNamespace(process_time=lambda: next(cpu)))
        begin = loop.time()
        task = asyncio.ensure_future(RestTrim().run())
        await asyncio.sleep(24.0)
        task.cancel()
        [trimmed] = trimmed_at
        assert 15.0 <= trimmed - begin < 16.0

    run_sim(scenario, 1)


def test_a_process_that_can_begin_no_thread_asks_again(monkeypatch: pytest.MonkeyPatch):
    refused_at: list[float] = []

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        def refuse(*_: object) -> None:
            refused_at.append(loop.time())
            raise RuntimeError("can't start new thread")

        cpu = iter([5.0] * 13)
        monkeypatch.setattr(loop, "run_in_executor", refuse)
        monkeypatch.setattr(allocator, "time", SimpleNamespace(process_time=lambda: next(cpu)))
        task = asyncio.ensure_future(RestTrim().run())
        await asyncio.sleep(24.0)
        assert not task.done()
        task.cancel()
        assert len(refused_at) == 2

    run_sim(scenario, 1)
