"""Pauses before the next attempt: exponentially longer, with jitter."""

from __future__ import annotations

import random
from datetime import timedelta


class Backoff:
    """The waits between attempts that fail in a row.

    Each wait is between one half and the whole of its step, so that clients which lost the same
    broker in the same instant do not come back in the same instant.
    """

    def __init__(self, rng: random.Random, *, first_s: float = 0.05, longest_s: float = 2.0) -> None:
        self._rng = rng
        self._first_s = first_s
        self._longest_s = longest_s
        self._failures = 0

    def succeeded(self) -> None:
        self._failures = 0

    def next_s(self, advised: timedelta | None = None) -> float:
        """Seconds to wait now; never less than what the broker advised."""
        step_s = min(self._longest_s, self._first_s * 2.0 ** min(self._failures, 30))
        self._failures += 1
        wait_s = step_s * self._rng.uniform(0.5, 1.0)
        return max(wait_s, advised.total_seconds()) if advised is not None else wait_s

    def next_within(self, left_s: float, advised: timedelta | None = None) -> float | None:
        """As `next_s`, cut so that the last attempt comes when the time is up; None once it is.

        None too if the broker advised to wait for longer than that: no attempt before would go well.
        """
        wait_s = self.next_s(advised)
        if left_s <= 0 or (advised is not None and advised.total_seconds() > left_s):
            return None
        return min(wait_s, left_s)
