"""Rises of counters in the last hour, minute by minute: what pages tell rates from. Pure: callers pass the minute in.

What never rose since the start takes nothing; anything else half a kibibyte a counter.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

MINUTES = 60


@dataclass(frozen=True, slots=True)
class HourOfCounter:
    """Rises of one counter, the oldest minute first; fewer than sixty where they were not counted for an hour yet."""

    minutes: Sequence[int]

    @property
    def total(self) -> int:
        return sum(self.minutes)

    @property
    def most(self) -> int:
        """Of one minute."""
        return max(self.minutes, default=0)

    @property
    def rate(self) -> float:
        """A second, on average."""
        return self.total / (60 * len(self.minutes)) if self.minutes else 0.0


class _Rises:
    """Ring of the minutes of a few counters."""

    __slots__ = ("counted", "minute", "rings", "was_seen")

    def __init__(self, counters: int, minute: int) -> None:
        self.counted = (0,) * counters
        self.minute = minute
        self.rings = [array("Q", bytes(8 * MINUTES)) for _ in range(counters)]
        self.was_seen = True

    def go_to(self, minute: int) -> None:
        for passed in range(self.minute + 1, min(minute, self.minute + MINUTES) + 1):
            for ring in self.rings:
                ring[passed % MINUTES] = 0
        self.minute = max(self.minute, minute)


class LastHour:
    """Rises of the counters of topics and subscriptions, by whatever names them.

    Invariant:
      HOUR-1  A ring holds the minutes up to the one that was noted last, at most sixty; all others of it are zero.
    """

    def __init__(self, minute: int) -> None:
        """`minute`: of now, when every counter is zero."""
        self._first = minute
        self._minute = minute
        self._by_name: dict[Hashable, _Rises] = {}

    def note(self, name: Hashable, counters: tuple[int, ...], minute: int) -> None:
        """Counters stand so by now: what they rose by since they were noted last belongs to this minute."""
        self._minute = max(self._minute, minute)
        rises = self._by_name.get(name)
        if rises is None:
            if not any(counters):
                return
            rises = self._by_name[name] = _Rises(len(counters), minute)
        rises.go_to(minute)
        for ring, before, now in zip(rises.rings, rises.counted, counters, strict=True):
            ring[minute % MINUTES] += now - before if now >= before else now  # it began anew
        rises.counted = counters
        rises.was_seen = True

    def forget_unseen(self) -> None:
        """Forget what was not noted since this was called last: topics and subscriptions that are gone."""
        self._by_name = {name: rises for name, rises in self._by_name.items() if rises.was_seen}
        for rises in self._by_name.values():
            rises.was_seen = False

    def of(self, name: Hashable, counters: int) -> list[HourOfCounter]:
        """Return the last hour of the counters of a name, up to when all were noted last."""
        length = min(self._minute - self._first, MINUTES)
        minutes = [minute % MINUTES for minute in range(self._minute - length + 1, self._minute + 1)]
        rises = self._by_name.get(name)
        if rises is None:
            return [HourOfCounter((0,) * length)] * counters
        rises.go_to(self._minute)
        return [HourOfCounter([ring[place] for place in minutes]) for ring in rises.rings]
