"""Time. Everything that asks what time it is asks a `Clock`, so that tests can step it in both directions."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Two clocks that must not be mixed: one says *when* it is, the other *how long* something took."""

    def now_ms(self) -> int:
        """Wall clock, milliseconds since the Unix epoch, UTC. Compare it with `deliver_at_ms`; it can jump."""

    def monotonic_ns(self) -> int:
        """Nanoseconds from an arbitrary start; never jumps, never stored."""


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()


def iso_time(time_ms: int) -> str:
    """Return a wall time as RFC 3339 has it, in UTC, to the millisecond."""
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
