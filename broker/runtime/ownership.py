"""Ownership of the state that a broker tells of: where another process may take it over, it ends.

Whatever is told that is not the completion of a record is looked at last: whether the state is still owned, with no
`await` between that look and the frame that leaves. These are all the places: answers and refusals of calls
(`rpc/calls.py`), answers on produce streams (`rpc/producer.py`), frames to consumers (`rpc/session.py`), batches for
Receive (`rpc/consumer.py`), pages (`web/site.py`). Dispatchers look too, so that they read nothing in vain.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

from broker.errors import Unavailable
from broker.runtime.clock import Clock


class Ownership(Protocol):
    """The right to tell of a broker's state."""

    @property
    def until_ms(self) -> int:
        """The greatest effective time that may be handed out."""

    def holds(self) -> bool:
        """Return whether the state is owned at this moment."""

    def check(self) -> None:
        """Raise Unavailable, reason ENGINE_UNREACHABLE, unless it is."""

    def watch(self, regained: Callable[[], None]) -> None:
        """Have a function called whenever it holds again."""


class AlwaysOwner:
    """Ownership of a broker whose folder is nobody else's: the lock says so."""

    until_ms = sys.maxsize

    def holds(self) -> bool:
        return True

    def check(self) -> None:
        pass

    def watch(self, regained: Callable[[], None]) -> None:
        """Nothing is lost, so nothing is regained."""


class CappedClock:
    """A clock whose wall time stops where hand-outs must."""

    def __init__(self, clock: Clock, ownership: Ownership) -> None:
        self._clock = clock
        self._ownership = ownership
        self.monotonic_ns = clock.monotonic_ns

    def now_ms(self) -> int:
        return min(self._clock.now_ms(), self._ownership.until_ms)


def hand_out_clock(clock: Clock, ownership: Ownership) -> Clock:
    """Return the clock by which messages are handed out."""
    return clock if isinstance(ownership, AlwaysOwner) else CappedClock(clock, ownership)


def ownership_lost(ownership: Ownership) -> Unavailable | None:
    """Return what is said in the place of an answer, if the state is not owned now."""
    try:
        ownership.check()
    except Unavailable as lost:
        return lost
    return None
