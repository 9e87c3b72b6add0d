"""Tokens that gather at a rate. Pure: callers pass the monotonic clock's time in.

Invariants:
  TOKEN-1  In no span of time are more tokens there to take than the burst, one, and what the rate makes of the span.
  TOKEN-2  No fraction of a token is lost, also where whoever takes them comes late.
"""

from __future__ import annotations

_TOKEN = 10**18
"""A token in units of the bucket: a rate in tokens per second, times 10^9, is units per nanosecond."""


class TokenBucket:
    """Tokens of one rate. Whoever takes more than there are owes them: none are there until that is made up for."""

    __slots__ = ("_burst", "_level", "_rate", "_settled_ns")

    def __init__(self) -> None:
        self._rate = 0  # units per nanosecond
        self._burst = 0
        self._level = 0  # units
        self._settled_ns = 0

    @property
    def has_rate(self) -> bool:
        return self._rate > 0

    def adopt(self, per_second: float, burst: int, now_ns: int) -> None:
        """Count by this rate and this burst from now on; a bucket that had no rate is full."""
        rate = max(1, round(per_second * 1e9)) if per_second else 0
        if (rate, burst) == (self._rate, self._burst):
            return
        if self._rate:
            self._settle(now_ns)
            self._level = min(self._level, burst * _TOKEN)
        else:
            self._level, self._settled_ns = burst * _TOKEN, now_ns
        self._rate, self._burst = rate, burst

    def count(self, now_ns: int) -> int:
        """Whole tokens that are there; below 0 where some are owed."""
        self._settle(now_ns)
        return self._level // _TOKEN

    def gathered_in(self, span_ns: int) -> int:
        """Whole tokens that the rate makes of a span of time."""
        return self._rate * span_ns // _TOKEN

    def wait_ns(self, count: int, now_ns: int) -> int:
        """Nanoseconds until so many tokens are there, no more than the burst; 0 if they are."""
        self._settle(now_ns)
        missing = count * _TOKEN - self._level
        return -(-missing // self._rate) if missing > 0 else 0

    def take(self, count: int, now_ns: int) -> None:
        """Take so many; below 0: give back."""
        self._settle(now_ns)
        self._level -= count * _TOKEN

    def _settle(self, now_ns: int) -> None:
        elapsed_ns = max(0, now_ns - self._settled_ns)
        self._level = min(self._level + elapsed_ns * self._rate, _capacity(self._burst))
        self._settled_ns += elapsed_ns


def _capacity(burst: int) -> int:
    """Units that a bucket holds: with a fraction of a token more than the burst, which a late look would lose."""
    return burst * _TOKEN + _TOKEN - 1
