"""A `Clock` on virtual time. Only tests move its wall clock; nothing moves the other but time itself."""

from __future__ import annotations

from typing import Protocol

START_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z


class VirtualTime(Protocol):
    """Source of the time that the clock reads: microseconds since the loop began. They never go back."""

    def now_us(self) -> int: ...


class SimClock:
    """Wall time is virtual time plus an offset that tests step in both directions.

    A step moves no timer: timers follow the monotonic clock, as they do outside. So what must notice a step
    has to look again by itself (P2).
    """

    def __init__(self, time: VirtualTime, start_ms: int = START_MS) -> None:
        self._time = time
        self._offset_ms = start_ms

    def now_ms(self) -> int:
        return self._time.now_us() // 1000 + self._offset_ms

    def monotonic_ns(self) -> int:
        return self._time.now_us() * 1000

    def step(self, ms: int) -> None:
        """Move the wall clock by `ms`, forward or back."""
        self._offset_ms += ms
