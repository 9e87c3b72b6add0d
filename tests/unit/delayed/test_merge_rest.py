"""A merge that rests: what it is for is measured by the benchmark `compact-live`."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from broker.delayed.bucket_writer import BucketWriter, NewBucket, NotNeeded, SegmentLimits
from broker.delayed.near import Columns
from broker.delayed.sealed_bucket import SealedBucket
from broker.model import Position
from broker.runtime.steps import InThisThread
from broker.testing.mem_vfs import MemVfs
from tests.unit.delayed.gated_buckets import TOPIC_ID, new_storage

COUNT, PER_SEGMENT, STEP_NS = 4_000, 100, 5_000_000


@pytest.mark.parametrize("rest", [0.0, 3.0])
async def test_after_each_step_it_waits_as_many_times_as_long(monkeypatch: pytest.MonkeyPatch, rest: float):
    slept: list[float] = []
    now_ns = 0

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    def perf_counter_ns() -> int:
        nonlocal now_ns
        now_ns += STEP_NS
        return now_ns

    executor = InThisThread()
    storage = new_storage(MemVfs(), executor)
    limits = SegmentLimits(1_000, PER_SEGMENT)
    writer = BucketWriter(storage, executor, rest=rest)
    not_needed = NotNeeded((0, 0, 0), {})
    sources = []
    for number in (1, 2):
        ids = np.arange(COUNT, dtype=np.uint32)
        rows = Columns(ids.astype(np.int64) * 10 + number, np.full(COUNT, number, dtype=np.int64), ids)
        new = NewBucket(TOPIC_ID, number, Position(number, 0), Position(number, COUNT))
        metadata = await writer.seal(new, [rows], not_needed, limits)
        assert metadata is not None
        sources.append(SealedBucket(metadata))
    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter_ns", perf_counter_ns)
    merged = await writer.merge(
        NewBucket(TOPIC_ID, 3, Position(1, 0), Position(2, COUNT)), sources, not_needed, limits
    )
    assert merged is not None and merged.count == 2 * COUNT
    if rest:
        assert len(slept) >= COUNT // PER_SEGMENT
        assert min(slept) >= rest * STEP_NS / 1e9
    else:
        assert slept == []
