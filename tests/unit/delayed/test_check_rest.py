"""A check that rests: what it is for is measured by the benchmark `compact-live`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator

import pytest

from broker.delayed.bucket_writer import BucketWriter
from broker.runtime.steps import InThisThread
from broker.testing.mem_vfs import MemVfs
from tests.unit.delayed.gated_buckets import new_storage

STEPS, STEP_NS, REST = 40, 5_000_000, 3.0


async def test_after_each_step_it_waits_as_many_times_as_long(monkeypatch: pytest.MonkeyPatch):
    slept: list[float] = []
    now_ns = 0
    is_closed = False

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    def perf_counter_ns() -> int:
        nonlocal now_ns
        now_ns += STEP_NS
        return now_ns

    def steps() -> Generator[None, None, int]:
        nonlocal is_closed
        try:
            for _ in range(STEPS):
                yield
            return 7
        finally:
            is_closed = True

    executor = InThisThread()
    writer = BucketWriter(new_storage(MemVfs(), executor), executor)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter_ns", perf_counter_ns)
    assert await writer.check(steps(), REST) == 7
    assert is_closed
    assert len(slept) == STEPS
    assert min(slept) >= REST * STEP_NS / 1e9
