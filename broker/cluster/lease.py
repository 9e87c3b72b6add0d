"""The owner's lease: its own appends, as far as they were answered.

  CLUSTER-7  A change is answered only after its group was stored by this owner, and every group before it was applied.
             That is so whoever owns the shard by then: the completion of a record needs no lease.
  CLUSTER-9  The lease holds until `begin + 0.9 * owner_lease_ms`, where `begin` is when the first attempt of the last
             answered append began: on CLOCK_BOOTTIME and on the wall clock, whichever says earlier.
  CLUSTER-10  What is not the completion of a record is said only while it holds, looked at last, with no `await` after.
  CLUSTER-11  Nothing is handed out whose effective time is after the `until_ms` of the last answered group.

A standby counts from when it read a group, which is after the owner had begun to append it. So it takes over after
the owner knows that it may have.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from broker.errors import Unavailable
from broker.runtime.clock import Clock, SystemClock

LEASE_PART = 0.9
"""Part of the lease that an owner relies on: the rest is for clocks that do not run alike."""


class LeaseClock(Clock, Protocol):
    """A clock that can also tell how long the machine slept."""

    def boottime_ns(self) -> int:
        """Nanoseconds from an arbitrary start; they count while the machine is suspended, too."""


class SystemLeaseClock(SystemClock):
    """The machine's clocks."""

    def boottime_ns(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Moment(NamedTuple):
    """The readings of both clocks at one moment."""

    boottime_ns: int
    wall_ms: int


def read_moment(clock: LeaseClock) -> Moment:
    return Moment(clock.boottime_ns(), clock.now_ms())


def elapsed_ms(begin: Moment, now: Moment) -> float:
    """Return the time since a moment, on whichever clock it is longer."""
    return max((now.boottime_ns - begin.boottime_ns) / 1e6, now.wall_ms - begin.wall_ms)


def lease_holds(begin: Moment, now: Moment, owner_lease_ms: int) -> bool:
    """Return whether an owner whose last answered append began then may take itself for the owner now (CLUSTER-9)."""
    return elapsed_ms(begin, now) < owner_lease_ms * LEASE_PART


class OwnerLease:
    """The lease of one owner: its `Ownership` (`runtime/ownership.py`)."""

    def __init__(self, clock: LeaseClock, owner_lease_ms: int) -> None:
        self._clock = clock
        self.owner_lease_ms = owner_lease_ms
        self._begin: Moment | None = None  # of the last answered append
        self._until_ms = 0
        self._watchers: list[Callable[[], None]] = []

    @property
    def until_ms(self) -> int:
        """The greatest effective time that may be handed out; 0 before the first append was answered (CLUSTER-11)."""
        return self._until_ms

    def begin(self) -> Moment:
        """Return the moment before the first attempt of an append."""
        return read_moment(self._clock)

    def until_after(self, begin: Moment) -> int:
        """Return the `until_ms` of a group whose append begins at a moment."""
        return begin.wall_ms + self.owner_lease_ms

    def extend(self, begin: Moment) -> None:
        """Note that the append that began at a moment was answered."""
        was_held = self.holds()
        self._begin = begin
        self._until_ms = self.until_after(begin)
        if not was_held:
            for regained in self._watchers:
                regained()

    def end(self) -> None:
        """Note that another one owns the shard, or that this one has resigned."""
        self._begin = None

    def holds(self) -> bool:
        return self._begin is not None and lease_holds(
            self._begin, read_moment(self._clock), self.owner_lease_ms
        )

    def watch(self, regained: Callable[[], None]) -> None:
        """Have a function called when an append is answered after the lease had run out."""
        self._watchers.append(regained)

    def left_ms(self) -> float:
        """Return how long it will hold; 0 if it does not."""
        if self._begin is None:
            return 0.0
        return max(self.owner_lease_ms * LEASE_PART - elapsed_ms(self._begin, read_moment(self._clock)), 0.0)

    def check(self) -> None:
        """Raise Unavailable unless the lease holds (CLUSTER-10)."""
        if not self.holds():
            raise Unavailable(
                "The owner lease has expired because the object store has not answered; another node may own the "
                "shard",
                reason="ENGINE_UNREACHABLE",
            )
