"""Shows what is pending of one topic: single messages, pages in due order, counts by due time. Changes nothing.

What waits is found in the index and compared, once nothing is awaited any more, with amendments and frontier: so an
answer holds what was waiting at the moment it was given. The index is exact in its times, so no row is read to find
out what is due when; rows and frames are read of what is shown, or may match a key.

    caught_up -> scan a range of the index -> leave out what is stale -> read frames, match keys -> look again

Pages follow one another by place, (due time, position): what stays pending at its place is shown exactly once,
whatever comes, goes, is sealed or is merged between them. What was moved behind the place of the next page is shown
again, what was moved before it is not. Files that a look may read stay until it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Protocol

import numpy as np

from broker.delayed.bucket_upkeep import BucketUpkeep
from broker.delayed.due_rows import NO_DUE_ROWS, DueRows, Key, concatenate, count_before
from broker.delayed.scan import scan
from broker.delayed.tracker import DelayedDeliveryTracker
from broker.errors import Corrupt, InvalidRequest, NotFound, Unavailable
from broker.model import (
    CANCELLED_MS,
    ROW,
    Array,
    Int64Column,
    Position,
    RowColumn,
    UInt32Column,
    distinct_values,
)
from broker.runtime.clock import Clock
from broker.runtime.foreground import Foreground
from broker.runtime.supervise import YieldBudget
from broker.storage.amendments import Amendments
from broker.storage.log import TopicLog
from broker.storage.salvage import read_around_damage
from broker.topics.schedule_frames import schedule_key_of
from broker.topics.schedule_values import (
    DueRange,
    Scheduled,
    ScheduledColumns,
    ScheduledCounts,
    ScheduledPage,
    ScheduledState,
)

BARS_MAX = 10_000
PAGE_BYTES_MAX = 16 << 20
"""Frames that are read for one page; one at least."""
LOOKED_MAX = 20_000
"""Entries that are looked at for one page, about: those that are stale, or have another key, count too."""

_UNASKED_BYTES = 1 << 20
_PREFIX_SCAN = 4_096
_PREFIX_READ = 512
"""Frames that are read in one go: the more, the nearer they lie to one another in the files."""
_MATCHED = 64
"""Frames that are matched before others are looked at."""
_SLICE_MS = 0.5
"""Time of the loop that is taken at once by what goes through very many messages."""
_LEDGERS_AT_ONCE = 256
"""Ledgers that the read thread is asked for in one go: others wait for it meanwhile."""
_COUNT_STEP = 32_768
_INDEXED_SECONDS_MAX = 10.0
_REBUILDS_MAX = 3


class LookedIndex(Protocol):
    """A topic's index pump as a view of its schedule needs it."""

    @property
    def tracker(self) -> DelayedDeliveryTracker: ...

    @property
    def upkeep(self) -> BucketUpkeep | None: ...

    @property
    def rebuilds(self) -> int: ...

    @property
    def is_exact(self) -> bool:
        """Return whether the counts of the index are exact: finding stale rows takes a moment after a start."""

    async def caught_up(self) -> None:
        """Return once every row appended, and every change applied, before the call is in the index."""

    async def wait_built(self) -> None: ...


@dataclass(frozen=True, slots=True)
class NextMatching:
    """The next messages that match a filter, in due order."""

    entries: DueRows
    examined: int  # also those that do not match
    end: Key | None  # from where the rest is; None: there is none


class ScheduledLook:
    """See the module's description. Holds no state of its own."""

    def __init__(
        self,
        log: TopicLog,
        index: Callable[[], LookedIndex],
        clock: Clock,
        is_due: Callable[[Position, int], bool],
        foreground: Foreground,
    ) -> None:
        """`is_due`: whether a message of this time, which has come, can still be held back from everybody."""
        self._foreground = foreground
        self._log = log
        self._index = index
        self._clock = clock
        self._is_due = is_due

    async def get(self, position: Position) -> Scheduled | None:
        """A pending message; None for what is not pending."""
        ledger_id, entry_id = position
        with self._keep_files():
            if entry_id >= (self._log.entry_count(ledger_id) or 0):
                return None
            times, rows, frames = await self._log.read(ledger_id, np.array([entry_id], dtype=np.uint32), 1)
        time = int(times[0])
        if not 0 < time < CANCELLED_MS or self._log.entry_count(ledger_id) is None:
            return None
        is_waiting = time > self._frontier_ms
        if not is_waiting and not self._is_due(position, time):
            return None
        entry = DueRows(times, np.array([ledger_id], dtype=np.int64), np.array([entry_id], dtype=np.uint32))
        state = ScheduledState.WAITING if is_waiting else ScheduledState.DUE
        return self._shown(_Messages(entry, rows, [frames[0]]), state)[0]

    async def page(self, due: DueRange, key_prefix: str, start: Key | None, limit: int) -> ScheduledPage:
        """The next waiting messages in due order: at most `limit`, fewer if they are large or hard to find."""
        gathered: list[_Messages] = []
        with self._keep_files():
            end = await self._gather(gathered, _Filter(due, key_prefix), start, limit)
        kept = [messages.at(self._is_waiting(messages.entries)) for messages in gathered]
        return ScheduledPage(self._shown(_joined(kept), ScheduledState.WAITING), end)

    async def next_matching(
        self, due: DueRange, key_prefix: str, start: Key, limit: int, changed_through_lsn: int | None
    ) -> NextMatching:
        """As `page`, the places alone, and how far they go; what a record after that lsn moved is left out."""
        wanted = _Filter(due, key_prefix, changed_through_lsn)
        budget = YieldBudget(self._clock, _SLICE_MS, foreground=self._foreground)
        found: list[DueRows] = []
        room, looked, scanned, bytes_left = limit, 0, 0, PAGE_BYTES_MAX
        at: Key | None = start
        with self._keep_files():
            await self.caught_up()
            while at is not None and room > 0 and scanned < LOOKED_MAX and bytes_left > 0:
                # Not as few as there is room for: of what was moved already none is kept, and a scan costs as much.
                step = _PREFIX_SCAN if key_prefix else limit
                entries, at = await self._scan(wanted, at, step)
                scanned += step
                await budget.spent()
                while len(entries) and room > 0 and bytes_left > 0:
                    step = min(len(entries), _PREFIX_READ if key_prefix else room)
                    part, entries = entries.part(slice(0, step)), entries.part(slice(step, None))
                    if key_prefix:
                        messages, step = await self._read(part, wanted, budget, bytes_left)
                        bytes_left -= messages.read_bytes
                        read, part = part, messages.entries
                        if len(part) > room:
                            step, part = count_before(read, part.key(room)), part.part(slice(0, room))
                        entries = concatenate([read.part(slice(step, None)), entries])
                    found.append(part)
                    looked += step
                    room -= len(part)
                    await budget.spent()
                if len(entries):
                    at = entries.key(0)
        matching = concatenate([NO_DUE_ROWS, *found])
        kept = self._is_waiting(matching, changed_through_lsn)
        return NextMatching(matching.part(kept), looked, at)

    async def count_matching(self, due: DueRange, key_prefix: str) -> int:
        """Count the waiting messages that match, one by one; where a prefix is given, all of the range are read."""
        count = 0
        at: Key | None = (0, 0, 0)
        while at is not None:
            next_ = await self.next_matching(due, key_prefix, at, LOOKED_MAX, None)
            count, at = count + len(next_.entries), next_.end
        return count

    async def count(self, due: DueRange, width_ms: int) -> ScheduledCounts:
        """Waiting messages by due time, from what the index holds in memory: no segment is read.

        `width_ms` 0 means one bar. Bars begin at multiples of the width from the range's start on; a range may be
        open, for only those bars are counted that lie where messages are due.
        """
        await self.caught_up()
        index = self._index()
        tracker = index.tracker
        floor_ms = self._frontier_ms + 1
        first_ms, last_ms = tracker.next_due_ms(), tracker.stats().last_due_ms
        if first_ms is None or last_ms is None:
            return ScheduledCounts((), 0, 0, is_exact=True)
        width_ms = width_ms or max(due.end_ms - due.start_ms, 1)
        skipped = max(max(first_ms, floor_ms) - due.start_ms, 0) // width_ms
        start_ms = due.start_ms + skipped * width_ms
        end_ms = min(due.end_ms, last_ms + 1)
        bar_count = -(-(end_ms - start_ms) // width_ms)
        if bar_count > BARS_MAX:
            raise InvalidRequest(
                f"The range has {bar_count} bars of {width_ms} ms; the limit is {BARS_MAX}",
                field="width_ms",
                reason="TOO_MANY_BARS",
                limit=BARS_MAX,
            )
        if bar_count <= 0:  # nothing is due in the range: what is left is where its borders lie
            start_ms, end_ms = due.start_ms, due.start_ms
        histogram = tracker.histogram(start_ms, end_ms, width_ms, floor_ms)
        bars = tuple((bar.start_ms, bar.count) for bar in histogram.bars)
        return ScheduledCounts(bars, histogram.before, histogram.after, histogram.is_exact and index.is_exact)

    async def times(self, due: DueRange, limit: int) -> Int64Column | None:
        """The due times of what waits in a range, rising; None if these are more than `limit`.

        Exact where `count` is not. Reads segments of the index, and no messages.
        """
        wanted = _Filter(due, "")
        budget = YieldBudget(self._clock)
        columns = [NO_DUE_ROWS.deliver_at_ms]
        at: Key | None = None
        with self._keep_files():
            await self.caught_up()
            while True:
                entries, at = await self._scan(wanted, at, _COUNT_STEP)
                columns.append(entries.deliver_at_ms)
                limit -= len(entries)
                if limit < 0:
                    return None
                if at is None:
                    return np.concatenate(columns)
                await budget.spent()

    async def caught_up(self) -> None:
        """Return once the index has what is durable now; Unavailable if that takes long."""
        try:
            async with asyncio.timeout(_INDEXED_SECONDS_MAX):
                await self._index().caught_up()
                await self._index().wait_built()
        except TimeoutError:
            raise _not_built() from None

    # -- going through the index -----------------------------------------------------------------------------

    async def _gather(
        self, gathered: list[_Messages], wanted: _Filter, start: Key | None, limit: int
    ) -> Key | None:
        """Find at most `limit` messages, with their frames; where to go on."""
        await self.caught_up()
        budget = YieldBudget(self._clock)
        at, looked, room, step, bytes_left = start, 0, limit, limit, PAGE_BYTES_MAX
        while True:
            entries, at = await self._scan(wanted, at, step)
            looked += step
            if not wanted.key_prefix and len(entries) > room:
                entries, at = entries.part(slice(0, room)), entries.key(room)
            if len(entries):
                messages, done = await self._read(entries, wanted, budget, bytes_left)
                bytes_left -= messages.read_bytes
                gathered.append(messages.at(slice(0, room)))
                if len(messages.entries) > room:
                    return messages.entries.key(room)
                room -= len(messages.entries)
                if done < len(entries):
                    return entries.key(done)
            if at is None or not room or bytes_left <= 0 or looked >= LOOKED_MAX:
                return at
            step = min(2 * step, LOOKED_MAX - looked)

    async def _scan(self, wanted: _Filter, start: Key | None, limit: int) -> tuple[DueRows, Key | None]:
        """The waiting ones of the next `limit` entries of the index, and where it goes on."""
        index = self._index()
        for _ in range(_REBUILDS_MAX):
            await index.wait_built()
            due, floor = wanted.due, self._frontier_ms + 1
            begin: Key = max((due.start_ms, 0, 0), (floor, 0, 0), start or (0, 0, 0))
            end: Key = (due.end_ms, 0, 0)
            if begin >= end:
                return NO_DUE_ROWS, None
            rebuilds = index.rebuilds
            page = await scan(*index.tracker.parts_between(begin, end, limit), begin, end, limit)
            if index.rebuilds == rebuilds:  # or what was to be read may have been forgotten before it was
                kept = self._is_waiting(page.entries, wanted.lsn)
                return page.entries.part(kept), None if page.is_last else page.end
        raise _not_built()

    async def _read(
        self, entries: DueRows, wanted: _Filter, budget: YieldBudget, bytes_max: int
    ) -> tuple[_Messages, int]:
        """Read the first entries, at least one and as many as the bytes allow; returns matches and number read."""
        rows: RowColumn = np.zeros(len(entries), dtype=ROW)
        frames: list[bytes | None] = [None] * len(entries)
        # Of large messages rows come first: where a key is wanted, the frames of those without any are not read.
        first_bytes = min(bytes_max, _UNASKED_BYTES) if wanted.key_prefix else bytes_max
        await self._read_frames(entries, np.arange(len(entries)), rows, frames, first_bytes)
        lengths = rows["length"].astype(np.int64)
        if wanted.key_prefix:
            lengths[rows["schedule_hash"] == 0] = 0
        done = max(1, int(lengths.cumsum().searchsorted(bytes_max, "right")))
        missing = [place for place in np.flatnonzero(lengths[:done]).tolist() if frames[place] is None]
        if missing:
            places = np.array(missing, dtype=np.intp)
            await self._read_frames(entries, places, rows, frames, int(lengths[places].sum()))
        kept = self._is_waiting(entries.part(slice(0, done)), wanted.lsn)
        kept &= lengths[:done] > 0
        if wanted.key_prefix:
            await _match(kept, frames, wanted.key_prefix, budget)
        places = np.flatnonzero(kept)
        some = [frame for place in places.tolist() if (frame := frames[place]) is not None]
        return _Messages(entries.part(places), rows[places], some, int(lengths[:done].sum())), done

    async def _read_frames(
        self, entries: DueRows, places: Array, rows: RowColumn, frames: list[bytes | None], bytes_max: int
    ) -> None:
        """Read the rows at some places of `entries`, and their frames as long as there are bytes left."""
        order = places[np.lexsort((entries.entry_ids[places], entries.ledger_ids[places]))]
        ledger_ids = entries.ledger_ids[order]
        begins = np.flatnonzero(np.concatenate(([True], ledger_ids[1:] != ledger_ids[:-1])))
        parts = np.split(order, begins[1:])
        named = [(int(entries.ledger_ids[part[0]]), entries.entry_ids[part]) for part in parts]
        for first in range(0, len(parts), _LEDGERS_AT_ONCE):
            some = named[first : first + _LEDGERS_AT_ONCE]
            try:
                read_parts = await self._log.read_messages(some, bytes_max)
            except Corrupt:
                read_parts = [await self._read_around(*ledger_entries, bytes_max) for ledger_entries in some]
            for part, messages in zip(parts[first:], read_parts, strict=False):
                if messages is None:  # the ledger is gone: nothing of it is pending
                    continue
                rows[part], part_frames = messages
                for place, frame in zip(part.tolist(), part_frames, strict=False):
                    frames[place] = frame
                    bytes_max -= len(frame)

    async def _read_around(
        self, ledger_id: int, entry_ids: UInt32Column, bytes_max: int
    ) -> tuple[RowColumn, list[bytes]] | None:
        """Of one ledger, what is whole; a row without a length stands for what is not, and is not shown."""
        try:
            salvaged = await read_around_damage(self._log, ledger_id, entry_ids, bytes_max)
        except NotFound:
            return None
        salvaged.rows[salvaged.damaged | salvaged.unreadable] = 0
        return salvaged.rows, salvaged.frames

    # -- what must not be awaited between --------------------------------------------------------------------

    @property
    def _frontier_ms(self) -> int:
        return self._index().tracker.frontier.deliver_at_ms

    def _is_waiting(self, entries: DueRows, lsn: int | None = None) -> Array:
        """Return which entries of the index wait now, and were not moved by a record after `lsn`."""
        kept: Array = self._log.is_current(entries.ledger_ids, entries.entry_ids, entries.deliver_at_ms)
        kept &= entries.deliver_at_ms > self._frontier_ms
        if lsn is not None:
            for rows, amendments in self._amended(entries):
                kept[rows] &= amendments.lsns_of(entries.entry_ids[rows]) <= lsn
        return kept

    def _shown(self, messages: _Messages, state: ScheduledState) -> ScheduledColumns:
        entries, rows = messages.entries, messages.rows
        revisions = np.zeros(len(entries), dtype=np.uint32)
        for at, amendments in self._amended(entries):
            revisions[at] = amendments.revisions_of(entries.entry_ids[at])
        return ScheduledColumns(
            entries, rows["publish_time_ms"], rows["schedule_hash"], revisions, state, messages.frames
        )

    def _amended(self, entries: DueRows) -> Iterator[tuple[Array, Amendments]]:
        """Of each ledger that has amendments, the rows of its entries."""
        if not self._log.amendments:
            return
        for ledger_id in distinct_values(entries.ledger_ids).tolist():
            amendments = self._log.amendments.get(ledger_id)
            if amendments is not None:
                yield np.flatnonzero(entries.ledger_ids == ledger_id), amendments

    # -- around a look ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _keep_files(self) -> Iterator[None]:
        """Ledgers and snapshots that are there now can be read, dropped or merged meanwhile."""
        upkeep = self._index().upkeep
        with self._log.keep_files(), upkeep.keep_files() if upkeep is not None else contextlib.nullcontext():
            yield


@dataclass(frozen=True, slots=True)
class _Filter:
    """Filter of messages."""

    due: DueRange
    key_prefix: str
    lsn: int | None = None
    """Lsn: messages that a later record moved are left out; None: they are not."""


@dataclass(frozen=True, slots=True)
class _Messages:
    """Fields of some entries, aligned, in due order."""

    entries: DueRows
    rows: RowColumn
    frames: Sequence[bytes]
    read_bytes: int = 0
    """Of frames, also of those that did not match."""

    def at(self, places: slice | Array) -> _Messages:
        frames = self.frames[places] if isinstance(places, slice) else list(compress(self.frames, places))
        return _Messages(self.entries.part(places), self.rows[places], frames, self.read_bytes)


def _joined(parts: Sequence[_Messages]) -> _Messages:
    if len(parts) == 1:
        return parts[0]
    return _Messages(
        concatenate([NO_DUE_ROWS, *(part.entries for part in parts)]),
        np.concatenate([np.empty(0, dtype=ROW), *(part.rows for part in parts)]),
        list(chain.from_iterable(part.frames for part in parts)),
    )


async def _match(kept: Array, frames: Sequence[bytes | None], key_prefix: str, budget: YieldBudget) -> None:
    """Of the frames that are kept, keep those whose schedule key begins so."""
    prefix = key_prefix.encode()
    for number, place in enumerate(np.flatnonzero(kept).tolist(), 1):
        frame = frames[place]
        # Most of those that do not match hold the bytes nowhere, which is seen in a thirtieth of the time.
        kept[place] = frame is not None and prefix in frame and schedule_key_of(frame).startswith(key_prefix)
        if not number % _MATCHED:
            await budget.spent()


def _not_built() -> Unavailable:
    return Unavailable("The index of the topic is being built: try again", reason="INDEX_NOT_BUILT")
