"""Recurring schedules as values: when they recur, what they store, how far they have come. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from broker.model import START, Position

INTERVAL_MS_MIN = 1_000
TIMES_MAX = 1_000
TIME_BYTES = 40
"""Memory of one time of a list: an integer and its place."""


class OverdueRuns(IntEnum):
    """Occurrences that are stored of those that were missed."""

    ALL = 1
    ONE = 2  # the last one
    NONE = 3


@dataclass(frozen=True, slots=True)
class RecurringRule:
    """Times of a schedule: exactly one of the three."""

    cron: str = ""
    interval_ms: int = 0
    times_ms: tuple[int, ...] = ()  # rising
    zone: str = "UTC"  # of a cron; IANA


@dataclass(frozen=True, slots=True)
class Definition:
    """A schedule as an operator puts it."""

    rule: RecurringRule
    message: bytes  # the wire form of a message without times and schedule key
    start_ms: int = 0  # no occurrence before it; an interval counts from it
    end_ms: int = 0  # no occurrence from it on; 0: never
    jitter_ms: int = 0
    overdue: OverdueRuns = OverdueRuns.ALL
    paused: bool = False

    @property
    def byte_count(self) -> int:
        """Memory that it takes, about, of what may be long."""
        return len(self.message) + len(self.rule.cron) + TIME_BYTES * len(self.rule.times_ms)


@dataclass(frozen=True, slots=True)
class RecurringProgress:
    """Place that a schedule has come to."""

    after_ms: int  # every occurrence up to it was dealt with before the one that is stored ahead
    ahead_ms: int = 0  # the occurrence that is stored ahead; 0: none is
    deliver_at_ms: int = 0  # its time with its jitter
    position: Position = START  # its message; START: it was not delayed any more when it was stored

    @property
    def through_ms(self) -> int:
        """Every occurrence up to it was dealt with."""
        return self.ahead_ms or self.after_ms
