"""Histograms of fixed size, of how late and how long, and a probe of the event loop's lag."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from broker.model import Int64Column
from broker.runtime.clock import Clock

LATENESS_BOUNDS_MS = (
    1,
    2,
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    1_000,
    2_000,
    5_000,
    10_000,
    60_000,
    300_000,
    3_600_000,
)
DURATION_BOUNDS_SECONDS = (
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    60.0,
)

_LATENESS_BOUNDS = np.array(LATENESS_BOUNDS_MS, dtype=np.int64)
_LATENESS_BOUNDS_SECONDS = tuple(bound / 1000 for bound in LATENESS_BOUNDS_MS)


@dataclass(frozen=True, slots=True)
class HistogramStats:
    """A snapshot. `counts[i]` is what lay at or below `bounds_seconds[i]` and above the bound before it;
    `counts[-1]` is what lay above them all. The sum of `counts` is the number of observations."""

    bounds_seconds: tuple[float, ...]
    counts: tuple[int, ...]
    sum_seconds: float
    max_seconds: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Upper bounds as Prometheus writes them, and how many observations lay at or below each."""
        bounds = (*map(str, self.bounds_seconds), "+Inf")
        return list(zip(bounds, accumulate(self.counts), strict=True))

    def plus(self, other: HistogramStats) -> HistogramStats:
        """The observations of both; the bounds are the same."""
        return HistogramStats(
            self.bounds_seconds,
            tuple(map(sum, zip(self.counts, other.counts, strict=True))),
            self.sum_seconds + other.sum_seconds,
            max(self.max_seconds, other.max_seconds),
        )


class LatenessHistogram:
    """From due time to hand-out, of many messages at a time.

    There is one for each subscription, and most are idle: the buckets are made on first use.
    """

    __slots__ = ("_counts", "_max_ms", "_sum_ms")

    def __init__(self) -> None:
        self._counts: Int64Column | None = None
        self._sum_ms = 0
        self._max_ms = 0

    def observe_many(self, lateness_ms: Int64Column) -> None:
        """Count a batch. What came before its time, where delays are not honoured, counts as 0."""
        if not len(lateness_ms):
            return
        late_ms = np.maximum(lateness_ms, 0)
        counts = np.bincount(
            np.searchsorted(_LATENESS_BOUNDS, late_ms), minlength=len(LATENESS_BOUNDS_MS) + 1
        )
        self._counts = counts if self._counts is None else self._counts + counts
        self._sum_ms += int(late_ms.sum())
        self._max_ms = max(self._max_ms, int(late_ms.max()))

    def stats(self) -> HistogramStats:
        counts = (
            (0,) * (len(LATENESS_BOUNDS_MS) + 1) if self._counts is None else tuple(self._counts.tolist())
        )
        return HistogramStats(_LATENESS_BOUNDS_SECONDS, counts, self._sum_ms / 1000, self._max_ms / 1000)


class DurationHistogram:
    """Durations, one at a time: syncs, checkpoints, the loop's lag."""

    __slots__ = ("_counts", "_max_seconds", "_sum_seconds")

    def __init__(self) -> None:
        self._counts = [0] * (len(DURATION_BOUNDS_SECONDS) + 1)
        self._sum_seconds = 0.0
        self._max_seconds = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(DURATION_BOUNDS_SECONDS, seconds)] += 1
        self._sum_seconds += seconds
        self._max_seconds = max(self._max_seconds, seconds)

    def stats(self) -> HistogramStats:
        return HistogramStats(
            DURATION_BOUNDS_SECONDS, tuple(self._counts), self._sum_seconds, self._max_seconds
        )


CLOCK_STEP_MS = 100
"""A wall clock that went so much faster or slower than the monotonic one between two looks was set, not slewed."""


class LoopLagProbe:
    """Measures how much later than asked the event loop calls back: what every delivery waits besides.

    `stepped` is told how many milliseconds the wall clock jumped, when it did.
    """

    def __init__(
        self,
        clock: Clock,
        histogram: DurationHistogram,
        *,
        interval_ms: int = 250,
        stepped: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._histogram = histogram
        self._interval_ms = interval_ms
        self._stepped = stepped

    async def run(self) -> None:
        """Measure until cancelled."""
        least_ms, most_ms = self._wall_less_monotonic_ms()
        while True:
            asked_ns = self._clock.monotonic_ns() + self._interval_ms * 1_000_000
            await asyncio.sleep(self._interval_ms / 1000)
            # A loop rounds its timers to its own resolution, so it may also be a little early.
            self._histogram.observe(max(0, self._clock.monotonic_ns() - asked_ns) / 1e9)
            least_before_ms, most_before_ms = least_ms, most_ms
            least_ms, most_ms = self._wall_less_monotonic_ms()
            step_ms = max(0, least_ms - most_before_ms) or min(0, most_ms - least_before_ms)
            if abs(step_ms) >= CLOCK_STEP_MS:
                self._stepped(step_ms)

    def _wall_less_monotonic_ms(self) -> tuple[int, int]:
        """Return the least and the most that it can be: a busy machine may stop this process between two looks."""
        before_ms = self._clock.monotonic_ns() // 1_000_000
        now_ms = self._clock.now_ms()
        return now_ms - self._clock.monotonic_ns() // 1_000_000, now_ms - before_ms
