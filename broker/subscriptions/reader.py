"""The read position: delivers in arrival order what no chunk will bring.

Which rows those are is a function of the row and two numbers, `catchup_end` and `catchup_ms`, and of nothing
that the index holds: rows that are not DELAYED, and DELAYED rows before `catchup_end` whose effective time is
at most `catchup_ms`. A subscription that ignores delays reads every row.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from broker.errors import Corrupt, NotFound
from broker.model import Int64Column, Position, UInt32Column
from broker.storage.amendments import Amendments
from broker.subscriptions.cursor import LedgerSpans

_SCAN_ROWS = 16_384
"""Rows looked at in one step, and the most that are kept of it: 128 KiB of times."""
_EMPTY_SCAN_ROWS_MAX = 131_072
"""The same after steps that found nothing, each of which looks at twice as many as the one before."""


class ReadableLog(LedgerSpans, Protocol):
    """Part of a topic's log that the reader asks."""

    @property
    def end(self) -> Position:
        """The position after the last entry."""

    def next_undelayed(self, position: Position) -> Position | None:
        """Return where the next entry that is not DELAYED may be, at or after `position`; None if there is none."""

    def amendments_of(self, ledger_id: int) -> Amendments | None:
        """Return what was cancelled or moved of a ledger; None: nothing."""

    def times_nowait(self, ledger_id: int, first: int, count: int) -> Int64Column | None:
        """Times of consecutive entries if they are in memory."""

    async def read_times(self, ledger_id: int, first: int, count: int) -> Int64Column:
        """Times of consecutive entries."""


class Reader:
    """The read position of one subscription, and what it found but has not handed out.

    Only the subscription's dispatcher calls `fill` and `take`. `begin` may be called at any time, also while a
    `fill` waits for the file thread: what that one brings is then dropped.
    """

    __slots__ = (
        "_found",
        "_log",
        "_run",
        "_scan_rows",
        "catchup_end",
        "catchup_ms",
        "honors_delay",
        "position",
    )

    def __init__(self, log: ReadableLog, *, honors_delay: bool) -> None:
        self._log = log
        self.honors_delay = honors_delay
        self.position = Position(0, 0)
        self.catchup_end = Position(0, 0)
        self.catchup_ms = 0
        self._found: list[tuple[int, UInt32Column]] = []  # (ledger_id, entry ids), next one last
        self._run = 0
        self._scan_rows = _SCAN_ROWS

    def begin(self, position: Position, catchup_end: Position, catchup_ms: int) -> None:
        """Start over at `position`, in catch-up up to `catchup_end`."""
        self.position = position
        self.catchup_end = catchup_end
        self.catchup_ms = catchup_ms
        self._found.clear()
        self._run += 1
        self._scan_rows = _SCAN_ROWS

    @property
    def is_behind(self) -> bool:
        """Return whether `fill` may find something."""
        if self._found or self.position >= self._log.end:
            return False
        if not self.honors_delay or self.position < self.catchup_end:
            return True
        return self._log.next_undelayed(self.position) is not None

    async def fill(self) -> None:
        """Look at the next rows; one bounded step. Call while `is_behind`. After Corrupt, `step_over` goes on."""
        if self.honors_delay and self.position >= self.catchup_end:
            # Everything up to there is DELAYED and comes in chunks: millions of rows need no look.
            self.position = self._log.next_undelayed(self.position) or self.position
        if self._step_over_ledgers():
            return
        ledger_id, first = self.position
        # The effective times of amended rows are found on the loop, in a millisecond for so many.
        rows = self._scan_rows if self._log.amendments_of(ledger_id) is None else _SCAN_ROWS
        count = min(rows, (self._log.entry_count(ledger_id) or 0) - first)
        run = self._run
        times = self._log.times_nowait(ledger_id, first, count)
        if times is None:
            try:
                times = await self._log.read_times(ledger_id, first, count)
            except NotFound:
                return  # dropped meanwhile, and therefore settled: the next step goes on behind it
            except Corrupt:
                if run != self._run:
                    return
                if count > _SCAN_ROWS:  # what is whole is chosen from, and `step_over` is for a few
                    self._scan_rows = _SCAN_ROWS
                    return
                raise
            if run != self._run:  # the subscription started over while the file thread was reading
                return
        ids = self._choose(ledger_id, first, times)
        end = first + count
        if len(ids) > _SCAN_ROWS:
            ids = ids[:_SCAN_ROWS].copy()  # or all of them would be kept
            end = int(ids[-1]) + 1
        self.position = Position(ledger_id, end)
        if len(ids):
            self._found.append((ledger_id, ids))
            self._scan_rows = _SCAN_ROWS
        else:
            self._scan_rows = min(2 * self._scan_rows, _EMPTY_SCAN_ROWS_MAX)

    def step_over(self) -> tuple[int, UInt32Column]:
        """Go on behind the rows that `fill` could not read; which these are."""
        ledger_id, first = self.position
        count = min(_SCAN_ROWS, (self._log.entry_count(ledger_id) or 0) - first)
        self.position = Position(ledger_id, first + count)
        return ledger_id, np.arange(first, first + count, dtype=np.uint32)

    def take(self, limit: int) -> tuple[int, UInt32Column] | None:
        """Take at most `limit` entries of one ledger; None if `fill` has found none."""
        if not self._found:
            return None
        ledger_id, ids = self._found.pop()
        if len(ids) > limit:
            self._found.append((ledger_id, ids[limit:]))
        return ledger_id, ids[:limit]

    def _step_over_ledgers(self) -> bool:
        """Move to the next ledger at the end of one, or where one was deleted; whether anything moved."""
        ledger_id, entry_id = self.position
        count = self._log.entry_count(ledger_id)
        if count is not None and entry_id < count:
            return False
        following = self._log.next_ledger_id(ledger_id)
        # Behind the last ledger lies nothing, even if the log once went further.
        self.position = Position(following, 0) if following is not None else self._log.end
        return True

    def _choose(self, ledger_id: int, first: int, times: Int64Column) -> UInt32Column:
        if not self.honors_delay:
            return np.arange(first, first + len(times), dtype=np.uint32)
        chosen = times == 0
        if self.catchup_end > (ledger_id, first):
            caught = times <= self.catchup_ms
            if self.catchup_end.ledger_id == ledger_id:
                caught[self.catchup_end.entry_id - first :] = False
            chosen |= caught
        return (np.flatnonzero(chosen) + first).astype(np.uint32)
