"""A topic's log: its ledgers in arrival order, as one sequence of positions.

Loop-owned. `append` and `seal` follow records; nothing here decides.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap, BitMap64

from broker.errors import NotFound
from broker.model import (
    CANCELLED_MS,
    START,
    Entries,
    Int64Column,
    Position,
    RowColumn,
    UInt32Column,
    common_entries,
    distinct_values,
    members,
    merge_entries,
    remove_entries,
)
from broker.storage.amendments import GONE, NONE, Amendments
from broker.storage.ledger import Ledger, Messages
from broker.storage.records import Produced

_T = TypeVar("_T")

_RUNS_MAX = 256
_FRAME_BYTES_GUESS = 256


class DroppedLedger(NamedTuple):
    """A ledger that is gone from the log, and whose files are not gone yet."""

    ledger: Ledger
    amendments_file: str  # in `ledgers/`; empty: none
    successor: Ledger | None = None
    """Its replacement: another generation, or the same one with its rows packed."""


class LogChanges(NamedTuple):
    """Changes of a log since the last capture."""

    dirty: dict[int, Ledger]
    amended: set[int]  # ledgers with other amendments
    dropped: list[DroppedLedger]


class UndelayedRuns:
    """Ranges of positions in which all entries lie that are not DELAYED, from `floor` on (LOG-2).

    At most `_RUNS_MAX` of them: the oldest give way, and nothing is known of what lies before the floor.
    """

    def __init__(self) -> None:
        self.floor = START
        self._runs: deque[tuple[Position, Position]] = deque()  # first and end

    def append(self, record: Produced) -> None:
        """A batch was stored, some of whose entries are not DELAYED."""
        undelayed = np.flatnonzero(record.times == 0)
        first = Position(record.ledger_id, record.first_entry_id + int(undelayed[0]))
        end = Position(record.ledger_id, record.first_entry_id + int(undelayed[-1]) + 1)
        if self._runs and self._runs[-1][1] == first:
            self._runs[-1] = (self._runs[-1][0], end)
            return
        self._runs.append((first, end))
        if len(self._runs) > _RUNS_MAX:
            self.floor = self._runs.popleft()[1]

    def drop(self, ledger_id: int) -> None:
        self._runs = deque(run for run in self._runs if run[0].ledger_id != ledger_id)

    def next(self, position: Position) -> Position | None:
        """Return where the next such entry may be, at or after `position`; None if there is none."""
        if position < self.floor:
            return position
        for first, end in self._runs:
            if end > position:
                return max(first, position)
        return None


class RecordsUnderWay:
    """Entries and ledgers that records name which are on their way to the journal: from `submit` to `apply`."""

    def __init__(self) -> None:
        self.changing: Entries = {}
        """Entries that are being cancelled or moved: nobody is sent them, and no other record changes them."""
        self.going: set[int] = set()
        """Ledgers that are being let go: nothing in them is changed any more."""
        self._released: list[asyncio.Future[None]] = []

    def hold(self, entries: Entries) -> None:
        """A record that cancels or moves entries was submitted."""
        merge_entries(self.changing, entries)

    def release(self, entries: Entries) -> None:
        """That record was applied."""
        remove_entries(self.changing, entries)
        released, self._released = self._released, []
        for waiter in released:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_unchanged(self, entries: Entries) -> None:
        """Return once no record is on its way that cancels or moves one of some entries."""
        while common_entries(entries, self.changing):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._released.append(waiter)
            await waiter


class LogAmendments(Mapping[int, Amendments]):
    """Amendments of the ledgers of a log, and effective times: the one place where amendments meet rows."""

    def __init__(self) -> None:
        self._by_ledger: dict[int, Amendments] = {}
        self.dirty: set[int] = set()
        """Ledgers with other amendments than when they were captured last."""
        self.version = 0
        """Rises with each amendment: times that were read before it may be others by now."""

    def __getitem__(self, ledger_id: int) -> Amendments:
        return self._by_ledger[ledger_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_ledger)

    def __len__(self) -> int:
        return len(self._by_ledger)

    def restore(self, by_ledger: dict[int, Amendments]) -> None:
        self._by_ledger = by_ledger

    def cancel(self, ledger_id: int, entries: BitMap) -> None:
        self.put(ledger_id, self._by_ledger.get(ledger_id, NONE).cancel(entries))

    def move(self, ledger_id: int, entry_ids: UInt32Column, deliver_at_ms: Int64Column, lsn: int) -> None:
        """Entries (ids rising) of a ledger that is there are due at other times."""
        self.put(ledger_id, self._by_ledger.get(ledger_id, NONE).move(entry_ids, deliver_at_ms, lsn))

    def put(self, ledger_id: int, amendments: Amendments) -> None:
        """Set all amendments of a ledger."""
        self._by_ledger[ledger_id] = amendments
        self.dirty.add(ledger_id)
        self.version += 1

    def drop(self, ledger_id: int) -> None:
        self._by_ledger.pop(ledger_id, None)
        self.dirty.discard(ledger_id)

    @property
    def cancelled_count(self) -> int:
        """Return how many entries of the ledgers that are there were cancelled."""
        return sum(len(amendments.cancelled) for amendments in self._by_ledger.values())

    def effective_now(self, ledger_id: int, entry_ids: UInt32Column, times: Int64Column) -> Int64Column:
        """Effective times that were read some time ago, as they are by now. Ids in any order."""
        return self.effective(ledger_id, lambda: entry_ids, times)

    def effective(
        self, ledger_id: int, entry_ids: Callable[[], UInt32Column], times: Int64Column
    ) -> Int64Column:
        """The effective times of rows."""
        amendments = self._by_ledger.get(ledger_id)
        if amendments is None:
            return times
        effective = amendments.effective(entry_ids(), times)
        effective[(effective == 0) & (times != 0)] = CANCELLED_MS  # 0 would mean: not delayed
        if amendments.left_out:  # also of what was not delayed, for as long as the files have it
            effective[members(entry_ids(), amendments.left_out)] = CANCELLED_MS
        return effective


class TopicLog:
    """The ledgers of one topic.

    Invariants:
      LOG-1  Ledger ids rise; only the last ledger takes entries, all others are sealed. So is the last one, if those
          after it were dropped.
      LOG-2  No entry from the floor of `UndelayedRuns` on that is not DELAYED lies outside of them.
      LOG-3  `end` never moves back: positions of ledgers that were dropped stay before it.
      LOG-4  A dropped ledger's files stay until a manifest is durable that does not name it, and while `keep_files`.
    """

    def __init__(self, open_ledger: Callable[[int], Ledger], live_ids: BitMap64 | None = None) -> None:
        """`live_ids` holds the ids of all ledgers of all topics; shared, and kept up to date by each."""
        self._open_ledger = open_ledger
        self._live_ids = BitMap64() if live_ids is None else live_ids
        self._ledgers: dict[int, Ledger] = {}
        self._order: list[int] = []
        self._undelayed = UndelayedRuns()
        self.amendments = LogAmendments()
        self.dirty: dict[int, Ledger] = {}
        """Ledgers changed since they were captured last."""
        self.dropped: list[DroppedLedger] = []
        """Their files wait to be removed (LOG-4)."""
        self._gone_end = Position(0, 0)  # of the last ledger that was dropped from the end
        self._keepers = 0
        self.under_way = RecordsUnderWay()

    def restore(
        self, ledgers: list[Ledger], amendments: dict[int, Amendments], gone_end: Position = START
    ) -> None:
        """Take in the ledgers that the manifest names, and what was cancelled or moved of them.

        `gone_end` is where the log ended, if its last ledger is gone.
        """
        self.amendments.restore(amendments)
        self._gone_end = gone_end
        self._order = [ledger.name.ledger_id for ledger in ledgers]
        self._ledgers = {ledger.name.ledger_id: ledger for ledger in ledgers}
        self._undelayed.floor = self.end
        self._live_ids.update(self._order)

    # -- changes: called by the topic's apply ----------------------------------------------------------------

    def append(self, record: Produced) -> None:
        """Store a batch. A ledger id that is new seals the ledger before it."""
        ledger = self._ledgers.get(record.ledger_id)
        if ledger is None:
            if self._order:
                last = self._ledgers[self._order[-1]]
                if not last.sealed:
                    last.seal()
                    self.dirty[last.name.ledger_id] = last
            ledger = self._open_ledger(record.ledger_id)
            self._ledgers[record.ledger_id] = ledger
            self._order.append(record.ledger_id)
            self._live_ids.add(record.ledger_id)
        if record.due.row_count < len(record.times):
            self._undelayed.append(record)
        ledger.append(record.first_entry_id, record.times, record.rows, bytes(record.frames))
        self.dirty[ledger.name.ledger_id] = ledger

    def cancel(self, entries: Entries) -> None:
        """Entries are cancelled; those of ledgers that are gone are nobody's."""
        for ledger_id, bitmap in entries.items():
            if ledger_id in self._ledgers:
                self.amendments.cancel(ledger_id, bitmap)

    def drop(self, ledger_id: int, amendments_file: str = "") -> None:
        """Forget a ledger. A checkpoint removes its files (LOG-4)."""
        ledger = self._ledgers.pop(ledger_id)
        if ledger_id == self._order[-1]:
            self._gone_end = max(self._gone_end, Position(ledger_id, ledger.entry_count))
        del self._order[bisect_right(self._order, ledger_id) - 1]
        self._undelayed.drop(ledger_id)
        self.dirty.pop(ledger_id, None)
        self.amendments.drop(ledger_id)
        self._live_ids.discard(ledger_id)
        self.dropped.append(DroppedLedger(ledger, amendments_file))

    def swap(self, ledger: Ledger, amendments: Amendments) -> None:
        """Another generation of a sealed ledger takes its place. A checkpoint removes the old files (LOG-4)."""
        self.put_files(ledger)
        self.amendments.put(ledger.name.ledger_id, amendments)

    def put_files(self, ledger: Ledger) -> None:
        """A sealed ledger is read from other files from now on. A checkpoint syncs their folder, as that of a ledger
        which has changed, before its manifest names them; then it removes the old ones (LOG-4)."""
        ledger_id = ledger.name.ledger_id
        old = self._ledgers[ledger_id]
        assert old.sealed and old.entry_count == ledger.entry_count, "another length"
        self._ledgers[ledger_id] = ledger
        self.dirty[ledger_id] = ledger
        self.dropped.append(DroppedLedger(old, "", ledger))

    def was_dropped(self, ledger_id: int) -> bool:
        """Return whether an id was given to a ledger that is gone now, of this topic or another one."""
        return 0 < ledger_id <= self.end.ledger_id and ledger_id not in self._live_ids

    def forget_all(self) -> None:
        """The topic is deleted."""
        for ledger_id in self._order:
            self._live_ids.discard(ledger_id)

    def take_changes(self) -> LogChanges:
        """Return what changed since this was called last, for a checkpoint to write."""
        changes = LogChanges(self.dirty, self.amendments.dirty, self.dropped)
        self.dirty, self.amendments.dirty, self.dropped = {}, set(), []
        return changes

    def take_back(self, dropped: Sequence[DroppedLedger]) -> None:
        """Keep ledgers for the next `take_changes`: their files are still there."""
        self.dropped += dropped

    # -- files of dropped ledgers ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def keep_files(self) -> Iterator[None]:
        """Within this, every ledger that is there now can be read, dropped or not."""
        self._keepers += 1
        try:
            yield
        finally:
            self._keepers -= 1

    @property
    def keeps_files(self) -> bool:
        return self._keepers > 0

    # -- facts -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Ledger]:
        return (self._ledgers[ledger_id] for ledger_id in self._order)

    @property
    def begin(self) -> Position:
        """The first position; `end` if there are no entries."""
        return Position(self._order[0], 0) if self._order else self.end

    @property
    def end(self) -> Position:
        """The position after the last entry that there ever was."""
        if not self._order or self._gone_end.ledger_id > self._order[-1]:
            return self._gone_end
        return Position(self._order[-1], self._ledgers[self._order[-1]].entry_count)

    @property
    def gone_end(self) -> Position:
        """Return where the log ended, if its last ledger is gone; else START."""
        end = self.end
        return START if end.ledger_id in self._ledgers else end

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

    def find(self, ledger_id: int) -> Ledger | None:
        return self._ledgers.get(ledger_id)

    def entry_count(self, ledger_id: int) -> int | None:
        ledger = self._ledgers.get(ledger_id)
        return None if ledger is None else ledger.entry_count

    def next_ledger_id(self, ledger_id: int) -> int | None:
        at = bisect_right(self._order, ledger_id)
        return self._order[at] if at < len(self._order) else None

    def count_from(self, position: Position) -> int:
        """Return how many entries there are at or after a position."""
        count = 0
        for ledger_id in reversed(self._order):
            if ledger_id < position.ledger_id:
                break
            below = position.entry_id if ledger_id == position.ledger_id else 0
            count += self._ledgers[ledger_id].entry_count - below
        return count

    def amendments_of(self, ledger_id: int) -> Amendments | None:
        """Return the amendments of a ledger, None if it has none. Nothing of a dropped ledger is current."""
        if ledger_id not in self._ledgers:
            return GONE
        return self.amendments.get(ledger_id)

    def next_undelayed(self, position: Position) -> Position | None:
        """Return where the next entry that is not DELAYED may be, at or after `position`; None if there is none."""
        return self._undelayed.next(position)

    # -- reads -----------------------------------------------------------------------------------------------

    def times_nowait(self, ledger_id: int, first: int, count: int) -> Int64Column | None:
        times = self._ledger(ledger_id).times_nowait(first, count)
        return times if times is None else self.amendments.effective(ledger_id, _range(first, count), times)

    async def read_times(self, ledger_id: int, first: int, count: int) -> Int64Column:
        times = await self._reading(ledger_id, lambda ledger: ledger.read_times(first, count))
        return self.amendments.effective(ledger_id, _range(first, count), times)

    async def times_of(self, ledger_id: int, entry_ids: UInt32Column) -> Int64Column:
        """Effective times of some entries, ids rising. 0 where the row is not DELAYED."""
        times = await self._reading(ledger_id, lambda ledger: ledger.times_of(entry_ids))
        return self.amendments.effective(ledger_id, lambda: entry_ids, times)

    async def read_rows(self, ledger_id: int, first: int, count: int) -> RowColumn:
        """Rows of consecutive entries, as they were stored."""
        return await self._reading(ledger_id, lambda ledger: ledger.read_rows(first, count))

    async def read(
        self, ledger_id: int, entry_ids: UInt32Column, bytes_max: int
    ) -> tuple[Int64Column, RowColumn, list[bytes]]:
        """Effective times and rows of entries (ids rising), and the frames of as many as fit into `bytes_max`."""
        columns = await self._reading(ledger_id, lambda ledger: ledger.read(entry_ids, bytes_max))
        times = self.amendments.effective(ledger_id, lambda: entry_ids, columns.times)
        return times, with_expiry_moved(columns.rows, columns.times, times), columns.frames

    async def read_messages(
        self, parts: Sequence[tuple[int, UInt32Column]], bytes_max: int
    ) -> list[Messages | None]:
        """Of each part, a ledger and rising entry ids, the messages; None if the ledger is gone.

        Frames come as long as something is left of `bytes_max`. All is read in one go, in the read thread: where
        messages lie scattered over hundreds of ledgers, a hop for each would cost more than reading them.
        """
        read_parts: list[Messages | None] = [None] * len(parts)
        left = [at for at, (ledger_id, _) in enumerate(parts) if ledger_id in self._ledgers]
        while left:
            ledgers = [self._ledgers[parts[at][0]] for at in left]
            readers = [
                ledger.message_reader(parts[at][1], bytes_max)
                for at, ledger in zip(left, ledgers, strict=True)
            ]
            read = await ledgers[0].in_read_thread(partial(_read_all, readers, bytes_max))
            again = []
            for at, ledger, messages in zip(left, ledgers, read, strict=True):
                read_parts[at] = messages
                now = self._ledgers.get(parts[at][0])
                if messages is None and now is not None and now is not ledger:
                    again.append(at)  # its files went, as another generation took its place
            left = again
        return read_parts

    def is_current(
        self, ledger_ids: Int64Column, entry_ids: UInt32Column, times: Int64Column
    ) -> npt.NDArray[np.bool_]:
        """Mask the `times` of the index that may be effective times. Those of dropped ledgers are not."""
        current = np.ones(len(ledger_ids), dtype=np.bool_)
        for ledger_id in distinct_values(ledger_ids).tolist():
            amendments = self.amendments_of(ledger_id)
            if amendments is not None:
                rows = np.flatnonzero(ledger_ids == ledger_id)
                current[rows] = amendments.is_current(entry_ids[rows], times[rows])
        return current

    async def _reading(self, ledger_id: int, read: Callable[[Ledger], Awaitable[_T]]) -> _T:
        """Read from a ledger, whatever generation it has by then."""
        while True:
            ledger = self._ledger(ledger_id)
            try:
                return await read(ledger)
            except NotFound:
                if self._ledgers.get(ledger_id) is ledger:
                    raise
                # Its files went, as another generation took its place: what is left of it is there.

    def _ledger(self, ledger_id: int) -> Ledger:
        ledger = self._ledgers.get(ledger_id)
        if ledger is None:
            raise NotFound(f"Ledger {ledger_id} was deleted")
        return ledger


def _read_all(readers: Sequence[Callable[[int], Messages]], bytes_max: int) -> list[Messages | None]:
    """Blocks."""
    read_parts: list[Messages | None] = []
    for read in readers:
        try:
            messages = read(max(bytes_max, 1))
        except NotFound:
            read_parts.append(None)
            continue
        # One frame comes in any case, and hundreds of ledgers may have large ones.
        read_parts.append(messages if bytes_max > 0 else (messages[0], []))
        bytes_max -= sum(map(len, messages[1]))
    return read_parts


def with_expiry_moved(rows: RowColumn, times: Int64Column, effective: Int64Column) -> RowColumn:
    """Rows whose time to live counts from their effective time, as P3 wants it."""
    if effective is times:
        return rows
    moved = (effective != times) & (effective < CANCELLED_MS) & (rows["expire_at_ms"] != 0)
    if not moved.any():
        return rows
    rows = rows.copy()
    rows["expire_at_ms"][moved] += (effective - times)[moved]
    return rows


def _range(first: int, count: int) -> Callable[[], UInt32Column]:
    return lambda: np.arange(first, first + count, dtype=np.uint32)
