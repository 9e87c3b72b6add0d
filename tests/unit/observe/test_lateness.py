"""Histograms count every observation once, and the probe measures only lag."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from broker.observe.lateness import (
    CLOCK_STEP_MS,
    DURATION_BOUNDS_SECONDS,
    LATENESS_BOUNDS_MS,
    DurationHistogram,
    LatenessHistogram,
    LoopLagProbe,
)
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim


@given(st.lists(st.lists(st.integers(-(10**9), 10**12))))
def test_lateness_is_counted_once_in_the_first_bucket_that_holds_it(batches: list[list[int]]) -> None:
    histogram = LatenessHistogram()
    for batch in batches:
        histogram.observe_many(np.array(batch, dtype=np.int64))
    late_ms = [max(0, one) for batch in batches for one in batch]
    stats = histogram.stats()
    edges = [-1, *LATENESS_BOUNDS_MS, 10**18]
    assert list(stats.counts) == [sum(low < one <= high for one in late_ms) for low, high in pairwise(edges)]
    assert stats.count == len(late_ms)
    assert stats.sum_seconds == sum(late_ms) / 1000
    assert stats.max_seconds == max(late_ms, default=0) / 1000
    assert stats.bounds_seconds[0] == 0.001
    assert stats.bounds_seconds[-1] == 3600


def test_a_snapshot_does_not_change_afterwards() -> None:
    histogram = LatenessHistogram()
    histogram.observe_many(np.array([5]))
    before = histogram.stats()
    histogram.observe_many(np.array([5, 6]))
    assert (before.count, histogram.stats().count) == (1, 3)


def test_durations_are_counted_at_or_below_their_bound() -> None:
    histogram = DurationHistogram()
    for seconds in (0.0, *DURATION_BOUNDS_SECONDS, 61.0):
        histogram.observe(seconds)
    stats = histogram.stats()
    assert stats.counts == (2, *(1,) * len(DURATION_BOUNDS_SECONDS))
    assert stats.max_seconds == 61
    assert stats.sum_seconds == sum(DURATION_BOUNDS_SECONDS) + 61


def test_the_probe_measures_how_late_the_loop_calls_back_whatever_the_wall_clock_does() -> None:
    class BlockedClock:
        """As if something had held the loop: monotonic time has moved and no callback ran."""

        def __init__(self, inner: SimClock) -> None:
            self.inner = inner
            self.blocked_ns = 0

        def now_ms(self) -> int:
            return self.inner.now_ms()

        def monotonic_ns(self) -> int:
            return self.inner.monotonic_ns() + self.blocked_ns

    async def scenario(loop: SimLoop, clock: SimClock) -> tuple[float, int]:
        blocked = BlockedClock(clock)
        histogram = DurationHistogram()
        probe = asyncio.create_task(LoopLagProbe(blocked, histogram, interval_ms=100).run())
        await asyncio.sleep(1.01)
        assert histogram.stats().sum_seconds == 0
        blocked.blocked_ns += 70_000_000
        clock.step(-3_600_000)
        await asyncio.sleep(1)
        probe.cancel()
        return histogram.stats().sum_seconds, histogram.stats().count

    assert run_sim(scenario, 1) == (0.07, 20)


def test_the_probe_tells_of_a_clock_that_was_set() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> list[int]:
        steps: list[int] = []
        probe = asyncio.create_task(LoopLagProbe(clock, DurationHistogram(), stepped=steps.append).run())
        await asyncio.sleep(1)
        for step_ms in (-3_600_000, 250, CLOCK_STEP_MS - 1):  # the last one may be a clock that is slewed
            clock.step(step_ms)
            await asyncio.sleep(1)
        probe.cancel()
        return steps

    assert run_sim(scenario, 1) == [-3_600_000, 250]


def test_a_process_that_is_stopped_between_two_looks_at_clocks_is_no_clock_that_was_set() -> None:
    class StoppedClock:
        """Clock of a process that a busy machine stops before it looks again."""

        def __init__(self, inner: SimClock) -> None:
            self.inner = inner
            self.stopped_ms = 0
            self.stops: Iterator[int] = iter(())

        def _stop(self) -> None:
            self.stopped_ms += next(self.stops, 0)

        def now_ms(self) -> int:
            self._stop()
            return self.inner.now_ms() + self.stopped_ms

        def monotonic_ns(self) -> int:
            self._stop()
            return self.inner.monotonic_ns() + self.stopped_ms * 1_000_000

    async def scenario(loop: SimLoop, clock: SimClock) -> list[int]:
        steps: list[int] = []
        stopped = StoppedClock(clock)
        probe = asyncio.create_task(LoopLagProbe(stopped, DurationHistogram(), stepped=steps.append).run())
        await asyncio.sleep(1.01)
        for before in range(6):
            stopped.stops = iter([0] * before + [CLOCK_STEP_MS])
            await asyncio.sleep(1)
        probe.cancel()
        return steps

    assert run_sim(scenario, 1) == []
