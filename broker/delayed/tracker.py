"""Protocol of a delayed index.

A tracker says *when to look*, nothing more: who is owed a message is decided from rows and cursors. It may
therefore be rebuilt at any time and may hold entries that were settled or moved meanwhile.

One task owns a tracker (the topic's index pump); nobody else calls it.
Invariants:
  TRACKER-1  `take_due` yields each (deliver_at_ms, position) added once, in that order. The greatest pair taken is
      the *frontier*; it goes back by `clear` only.
  TRACKER-2  An entry added at or before the frontier is yielded by the next `take_due`, whatever its time.
  TRACKER-3  `take_due(now)` yields nothing whose deliver_at_ms is above `now`.
  TRACKER-4  `next_due_ms` is never later than the earliest deliver_at_ms held, loaded or not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from broker.delayed.due_rows import DueRows, Key
from broker.delayed.scan import UnreadSegments
from broker.model import Int64Column, UInt32Column


class Frontier(NamedTuple):
    """The greatest (time, position) taken so far; everything up to it has been handed out."""

    deliver_at_ms: int
    ledger_id: int
    entry_id: int


ENTRY_AFTER_ALL = (1 << 62, 1 << 62)
"""The position part of a frontier that covers every entry of its millisecond."""


@dataclass(frozen=True, slots=True)
class HistogramBar:
    """Pending entries with `start_ms <= deliver_at_ms < start_ms + width_ms`."""

    start_ms: int
    count: int


@dataclass(frozen=True, slots=True)
class Histogram:
    """Entries held, by due time; nothing was read for it."""

    bars: Sequence[HistogramBar]  # of those that hold any, rising
    before: int  # due before the first bar may begin
    after: int
    is_exact: bool
    """True unless a piece with known borders alone lies in several bars, or something counts that is gone."""


@dataclass(frozen=True, slots=True)
class TrackerStats:
    """A snapshot; `memory_bytes` is an estimate of what the index holds in memory."""

    count: int
    loaded_count: int
    bucket_count: int
    memory_bytes: int
    disk_bytes: int
    next_due_ms: int | None
    last_due_ms: int | None


TimesReader = Callable[[int, UInt32Column], Awaitable[Int64Column]]
"""(ledger_id, entry_ids rising) -> effective deliver_at_ms, aligned; 0 for an entry that is cancelled or gone."""


class DelayedDeliveryTracker(Protocol):
    """An index of positions by due time."""

    @property
    def frontier(self) -> Frontier: ...

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is held, and nothing waits to be written or removed."""

    def add(self, ledger_id: int, entry_ids: UInt32Column, deliver_at_ms: Int64Column) -> None:
        """Index entries of one ledger; `entry_ids` rises, the times are in any order."""

    def remove(self, ledger_id: int, entry_ids: UInt32Column, deliver_at_ms: Int64Column) -> None:
        """Entries (ids rising) were cancelled, or moved away from these times: they neither count nor are taken."""

    def needs_load(self, now_ms: int) -> bool:
        """Return whether `load` should run before the next `take_due`."""

    async def load(self, now_ms: int) -> None:
        """Bring into memory what is due at or soon after `now_ms`. One bounded step; call while `needs_load`."""

    def take_due(self, now_ms: int, limit: int) -> DueRows | None:
        """Take at most `limit` due entries; None if nothing is due (or its times are not loaded yet)."""

    def next_due_ms(self) -> int | None:
        """Return the time to ask again, in milliseconds since the epoch; None if nothing is pending."""

    async def contains(self, ledger_id: int, entry_id: int) -> bool:
        """Return whether the entry is held and not yet taken (for audit and tests, not for delivery)."""

    def count(self) -> int:
        """Entries held and not yet taken."""

    def histogram(self, start_ms: int, end_ms: int, width_ms: int, floor_ms: int = 0) -> Histogram:
        """Pending by due time, in bars from `start_ms` up to `end_ms`; what is due before `floor_ms` is left out.

        The caller bounds the number of bars.
        """

    def parts_between(self, start: Key, end: Key, limit: int) -> tuple[DueRows, list[UnreadSegments]]:
        """For `scan`: what is in memory, perhaps beyond the range too, and what may have to be read for `limit` rows.

        Held only.
        """

    def discard_ledger(self, ledger_id: int) -> None:
        """Forget a ledger that was deleted."""

    def clear(self, frontier: Frontier | None = None) -> None:
        """Forget everything but the frontier, which becomes the one that is given, if any."""

    def stats(self) -> TrackerStats: ...
