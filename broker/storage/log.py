"""A topic's log: its ledgers in arrival order, as one sequence of positions.

Loop-owned. `append` and `seal` follow records; nothing here decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from broker.errors import NotFound
from broker.model import CANCELLED_MS, Int64Column, Position, RowColumn, UInt32Column
from broker.storage.amendments import Amendments
from broker.storage.ledger import Ledger
from broker.storage.records import Produced

_RUNS_MAX = 256
_FRAME_BYTES_GUESS = 256


class TopicLog:
    """The ledgers of one topic.

    Invariants:
      G1  Ledger ids rise; only the last ledger takes entries, all others are sealed.
      G2  Every entry that is not DELAYED, from `_runs_floor` on, lies in one of `_runs`.
    """

    def __init__(self, open_ledger: Callable[[int], Ledger]) -> None:
        self._open_ledger = open_ledger
        self._ledgers: dict[int, Ledger] = {}
        self._order: list[int] = []
        self._runs: deque[tuple[Position, Position]] = (
            deque()
        )  # [first, end) holds entries that are not DELAYED
        self._runs_floor = Position(0, 0)
        self.amendments: dict[int, Amendments] = {}
        self.dirty: dict[int, Ledger] = {}
        """Ledgers changed since they were captured last."""

    def restore(self, ledgers: list[Ledger], amendments: dict[int, Amendments]) -> None:
        """Take in the ledgers that the manifest names, and what was cancelled or moved of them."""
        self.amendments = amendments
        self._order = [ledger.name.ledger_id for ledger in ledgers]
        self._ledgers = {ledger.name.ledger_id: ledger for ledger in ledgers}
        self._runs_floor = self.end

    # -- changes: called by the topic's apply ----------------------------------------------------------------

    def append(self, record: Produced) -> None:
        """Store a batch. A ledger id that is new seals the ledger before it."""
        ledger = self._ledgers.get(record.ledger_id)
        if ledger is None:
            if self._order:
                last = self._ledgers[self._order[-1]]
                last.seal()
                self.dirty[last.name.ledger_id] = last
            ledger = self._open_ledger(record.ledger_id)
            self._ledgers[record.ledger_id] = ledger
            self._order.append(record.ledger_id)
        if not record.times.all():
            self._note_undelayed(record)
        ledger.append(record.first_entry_id, record.times, record.rows, bytes(record.frames))
        self.dirty[ledger.name.ledger_id] = ledger

    def drop(self, ledger_id: int) -> Ledger:
        """Forget a ledger; the caller deletes its files."""
        self._order.remove(ledger_id)
        self.dirty.pop(ledger_id, None)
        return self._ledgers.pop(ledger_id)

    # -- facts -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Ledger]:
        return (self._ledgers[ledger_id] for ledger_id in self._order)

    @property
    def begin(self) -> Position:
        """The first position; `end` if there are no entries."""
        return Position(self._order[0], 0) if self._order else Position(0, 0)

    @property
    def end(self) -> Position:
        """The position after the last entry."""
        if not self._order:
            return Position(0, 0)
        return Position(self._order[-1], self._ledgers[self._order[-1]].entry_count)

    @property
    def last(self) -> Ledger | None:
        return self._ledgers[self._order[-1]] if self._order else None

    @property
    def ledger_count(self) -> int:
        return len(self._order)

    @property
    def entry_total(self) -> int:
        return sum(ledger.entry_count for ledger in self)

    @property
    def data_bytes(self) -> int:
        return sum(ledger.data_bytes for ledger in self)

    @property
    def unwritten_bytes(self) -> int:
        return sum(ledger.unwritten_bytes for ledger in self.dirty.values())

    @property
    def frame_bytes_average(self) -> int:
        last = self.last
        return (
            max(1, last.data_bytes // last.entry_count) if last and last.entry_count else _FRAME_BYTES_GUESS
        )

    def entry_count(self, ledger_id: int) -> int | None:
        ledger = self._ledgers.get(ledger_id)
        return None if ledger is None else ledger.entry_count

    def next_ledger_id(self, ledger_id: int) -> int | None:
        return next((i for i in self._order if i > ledger_id), None)

    def count_from(self, position: Position) -> int:
        """How many entries there are at or after a position."""
        count = 0
        for ledger_id in reversed(self._order):
            if ledger_id < position.ledger_id:
                break
            below = position.entry_id if ledger_id == position.ledger_id else 0
            count += self._ledgers[ledger_id].entry_count - below
        return count

    def next_undelayed(self, position: Position) -> Position | None:
        """Where the next entry that is not DELAYED may be, at or after `position`; None if there is none."""
        if position < self._runs_floor:
            return position
        for first, end in self._runs:
            if end > position:
                return max(first, position)
        return None

    # -- reads -----------------------------------------------------------------------------------------------

    def times_nowait(self, ledger_id: int, first: int, count: int) -> Int64Column | None:
        times = self._ledger(ledger_id).times_nowait(first, count)
        return times if times is None else self._effective(ledger_id, _range(first, count), times)

    async def read_times(self, ledger_id: int, first: int, count: int) -> Int64Column:
        times = await self._ledger(ledger_id).read_times(first, count)
        return self._effective(ledger_id, _range(first, count), times)

    async def times_of(self, ledger_id: int, entry_ids: UInt32Column) -> Int64Column:
        """Effective times of some entries, ids rising. 0 where the row is not DELAYED."""
        times = await self._ledger(ledger_id).times_of(entry_ids)
        return self._effective(ledger_id, lambda: entry_ids, times)

    async def read(
        self, ledger_id: int, entry_ids: UInt32Column, bytes_max: int
    ) -> tuple[Int64Column, RowColumn, list[bytes]]:
        """Effective times and rows of entries (ids rising), and the frames of as many as fit into `bytes_max`."""
        columns = await self._ledger(ledger_id).read(entry_ids, bytes_max)
        times = self._effective(ledger_id, lambda: entry_ids, columns.times)
        return times, columns.rows, columns.frames

    def _effective(
        self, ledger_id: int, entry_ids: Callable[[], UInt32Column], times: Int64Column
    ) -> Int64Column:
        """The effective times of rows: the one place where amendments meet rows (architecture, section 4)."""
        amendments = self.amendments.get(ledger_id)
        if amendments is None:
            return times
        effective = amendments.effective(entry_ids(), times)
        effective[(effective == 0) & (times != 0)] = CANCELLED_MS  # 0 would mean: not delayed
        return effective

    def _ledger(self, ledger_id: int) -> Ledger:
        ledger = self._ledgers.get(ledger_id)
        if ledger is None:
            raise NotFound(f"Ledger {ledger_id} is not there any more")
        return ledger

    def _note_undelayed(self, record: Produced) -> None:
        undelayed = np.flatnonzero(record.times == 0)
        first = Position(record.ledger_id, record.first_entry_id + int(undelayed[0]))
        end = Position(record.ledger_id, record.first_entry_id + int(undelayed[-1]) + 1)
        if self._runs and self._runs[-1][1] == first:
            self._runs[-1] = (self._runs[-1][0], end)
            return
        self._runs.append((first, end))
        if len(self._runs) > _RUNS_MAX:
            self._runs_floor = self._runs.popleft()[1]


def _range(first: int, count: int) -> Callable[[], UInt32Column]:
    return lambda: np.arange(first, first + count, dtype=np.uint32)
