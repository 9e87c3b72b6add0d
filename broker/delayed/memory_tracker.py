"""The delayed index of the `memory` policy: roaring bitmaps by tick, exact times for what is due soon.

    far    tick number -> ledger -> BitMap      a tick is `tick_ms` wide; exact times are not kept
    loaded (deliver_at_ms, ledger, entry)       sorted columns, exact

Neighbours that share a due time cost far less than a byte each in the far part; delays that scatter over
weeks cost hundreds of bytes, and belong into the `bucket` tracker. Ticks alone would deliver late by up to a
tick, so `load` reads the exact effective times of the next ticks and moves their entries to the loaded rows before they
are due.

Invariants (TRACKER-1 to TRACKER-4 stand in `tracker`):
  MEMORY-1  Every loaded entry's tick < `_loaded_end` <= every far tick; the frontier's tick < `_loaded_end`. So what
      is loaded can be taken without a look at far (TRACKER-1), and what is added at or before the frontier is
      loaded at once (TRACKER-2).
  MEMORY-2  A far tick stays whole in far until all of its times were read. A reader that fails, or a load that is
      cancelled, loses nothing.
  MEMORY-3  An entry added to a tick that was read in part is read again: the time read before may be its old one.

TRACKER-3 goes before TRACKER-2: after the clock stepped back, an entry at or before the frontier waits until it is due.
Nothing here survives a crash; the caller adds the rows after the frontier again.
"""

from __future__ import annotations

import asyncio
import heapq
from array import array
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
from pyroaring import BitMap

from broker.delayed.bucket_histogram import histogram_of
from broker.delayed.due_rows import NO_DUE_ROWS, ROW_BYTES, DueRows, Key, concatenate, stable_order
from broker.delayed.loaded_rows import LoadedRows
from broker.delayed.scan import UnreadSegments, sorted_in_memory
from broker.delayed.tracker import Frontier, Histogram, TimesReader, TrackerStats
from broker.model import Int64Column, UInt32Column, distinct_values, ids_of, is_among
from broker.observe.logs import get_logger
from broker.storage.salvage import UNREADABLE_TIME, times_around_damage

log = get_logger(__name__)

LOAD_BITMAPS_MAX = 4_096
"""Bitmaps one `load` looks at: scattered entries make many, and each costs microseconds."""

_TICK_BYTES = 400  # of a far tick beside its bitmaps, about: objects, dict, heap
_BITMAP_BYTES = 180  # of a bitmap beside its entries, about
_STATS_SAMPLE = 256
_NEVER_MS = 1 << 62


class _Tick:
    """The far entries of a tick. `read` and `parts`: what was read of one too large for one load (MEMORY-2)."""

    __slots__ = ("count", "ledgers", "parts", "read")

    def __init__(self) -> None:
        self.ledgers: dict[int, BitMap] = {}
        self.count = 0
        self.read: dict[int, BitMap] | None = None
        self.parts: list[DueRows] = []

    def unread(self, ledger_id: int) -> UInt32Column:
        """The ledger's entries whose times were not read yet, rising."""
        entries = self.ledgers[ledger_id]
        if self.read is not None and ledger_id in self.read:
            entries = entries - self.read[ledger_id]
        return np.frombuffer(entries.to_array(), dtype=np.uint32)

    def forget_read(self, ledger_id: int, entry_ids: BitMap) -> None:
        if self.read is not None and ledger_id in self.read:
            self.read[ledger_id] -= entry_ids


@dataclass(frozen=True, slots=True)
class _Slice:
    """Entries of one ledger, filed under one tick, whose times a load reads."""

    tick: int
    ledger_id: int
    entry_ids: UInt32Column


@dataclass(frozen=True, slots=True)
class _LoadPlan:
    """Slices in (tick, ledger, entry) order. All ticks are read to their end but `partial`, the last one."""

    slices: list[_Slice]
    complete: list[int]
    partial: int | None


class MemoryTracker:
    """A `DelayedDeliveryTracker` that keeps everything in memory and is rebuilt after a restart."""

    def __init__(
        self,
        times_reader: TimesReader,
        frontier: Frontier,
        *,
        tick_ms: int = 1_000,
        lead_ms: int | None = None,
        load_entries_max: int = 65_536,
    ) -> None:
        """`lead_ms`: how long before its start a tick is loaded; by default a tick and a second."""
        assert tick_ms > 0
        assert load_entries_max > 0
        self._times_reader = times_reader
        self._frontier = frontier
        self._tick_ms = tick_ms
        self._lead_ms = tick_ms + 1_000 if lead_ms is None else lead_ms
        self._load_entries_max = load_entries_max
        self._loaded = LoadedRows()
        self._loaded_end = frontier.deliver_at_ms // tick_ms + 1
        self._far: dict[int, _Tick] = {}
        self._far_count = 0
        self._far_greatest: dict[int, int] = {}  # of each ledger, the greatest entry id that was ever filed
        self._far_heap: list[int] = []  # holds every far tick; may hold gone ones and repeat itself
        self._far_last = 0  # the greatest far tick, while there is one
        self._loading = False
        self._removed: list[DueRows] = []  # while a load is under way

    @property
    def frontier(self) -> Frontier:
        return self._frontier

    @property
    def is_idle(self) -> bool:
        return not self.count()

    def add(self, ledger_id: int, entry_ids: UInt32Column, deliver_at_ms: Int64Column) -> None:
        assert not self._loading, "one task owns a tracker"
        if not len(entry_ids):
            return
        ticks = deliver_at_ms // self._tick_ms
        lowest, highest = int(ticks.min()), int(ticks.max())
        if lowest < self._loaded_end:
            is_loaded = ticks < self._loaded_end
            times = deliver_at_ms[is_loaded]
            self._loaded.add(
                DueRows(times, np.full(len(times), ledger_id, dtype=np.int64), entry_ids[is_loaded])
            )
            if highest < self._loaded_end:
                return
            entry_ids, ticks = entry_ids[~is_loaded], ticks[~is_loaded]
        self._file(ledger_id, entry_ids, ticks)

    def remove(self, ledger_id: int, entry_ids: UInt32Column, deliver_at_ms: Int64Column) -> None:
        if not len(entry_ids):
            return
        rows = DueRows(deliver_at_ms, np.full(len(entry_ids), ledger_id, dtype=np.int64), entry_ids)
        if self._loading:  # what is being read may be read under its old time
            self._removed.append(rows)
            return
        ticks = deliver_at_ms // self._tick_ms
        self._loaded.remove(rows.part(ticks < self._loaded_end))
        for number in distinct_values(ticks[ticks >= self._loaded_end]).tolist():
            self._unfile(ledger_id, BitMap(array("I", entry_ids[ticks == number].tobytes())), number)
        self._far_last = max(self._far, default=0)

    def needs_load(self, now_ms: int) -> bool:
        self._move_near_end(now_ms)
        tick = self._first_far_tick()
        if tick is None or tick > self._last_tick_to_load(now_ms):
            return False
        # After the clock leapt forward, a day may be due at once: what is loaded drains before more is
        # loaded, or all of it would be in memory. Order holds, for the loaded rows lie before far (MEMORY-1).
        first_due_ms = self._loaded.first_due_ms()
        is_draining = first_due_ms is not None and first_due_ms <= now_ms
        return not (is_draining and self._loaded.count() >= self._load_entries_max)

    async def load(self, now_ms: int) -> None:
        self._move_near_end(now_ms)
        plan = self._plan_load(self._last_tick_to_load(now_ms))
        if not plan.slices and not plan.complete:
            return
        self._loading = True
        try:
            times = await self._read_times(plan.slices)
            starts = np.repeat(
                np.array([part.tick for part in plan.slices], dtype=np.int64) * self._tick_ms,
                [len(part.entry_ids) for part in plan.slices],
            )
            # Of what cannot be read the tick is known. Whoever is told then looks at the rows before anything is sent.
            self._apply_load(plan, np.where(times == UNREADABLE_TIME, starts, times))
        finally:
            self._loading = False
            removed, self._removed = self._removed, []
            for rows in removed:
                self.remove(int(rows.ledger_ids[0]), rows.entry_ids, rows.deliver_at_ms)
        self._move_near_end(now_ms)
        await asyncio.sleep(0)  # a reader that answers from memory never lets others run

    def take_due(self, now_ms: int, limit: int) -> DueRows | None:
        chunk = self._loaded.take(now_ms, limit)
        if chunk is not None:
            last = Frontier(int(chunk.deliver_at_ms[-1]), int(chunk.ledger_ids[-1]), int(chunk.entry_ids[-1]))
            self._frontier = max(self._frontier, last)  # what was late lies before it
        return chunk

    def next_due_ms(self) -> int | None:
        """The earliest loaded time, else the start of a far tick: who wakes there loads and asks again."""
        loaded_ms, tick = self._loaded.first_due_ms(), self._first_far_tick()
        if loaded_ms is not None:
            return loaded_ms  # the loaded rows lie before far (MEMORY-1)
        return None if tick is None else tick * self._tick_ms

    async def contains(self, ledger_id: int, entry_id: int) -> bool:
        """See the protocol. Looks through everything."""
        return self._loaded.contains(ledger_id, entry_id) or any(
            ledger_id in tick.ledgers and entry_id in tick.ledgers[ledger_id] for tick in self._far.values()
        )

    def count(self) -> int:
        return self._loaded.count() + self._far_count

    def histogram(self, start_ms: int, end_ms: int, width_ms: int, floor_ms: int = 0) -> Histogram:
        """See the protocol. The entries of a far tick count as spread evenly over it."""
        numbers = np.fromiter(self._far, dtype=np.int64, count=len(self._far))
        counts = np.fromiter(
            (tick.count for tick in self._far.values()), dtype=np.int64, count=len(self._far)
        )
        ticks = (numbers * self._tick_ms, (numbers + 1) * self._tick_ms - 1, counts)
        loaded = self._loaded.times_between(floor_ms, _NEVER_MS)
        limits = {"floor_ms": floor_ms, "start_ms": start_ms, "end_ms": end_ms, "width_ms": width_ms}
        return histogram_of([loaded], [ticks], loaded[:0], **limits)

    def parts_between(self, start: Key, end: Key, limit: int) -> tuple[DueRows, list[UnreadSegments]]:
        """See the protocol. A far tick is a segment: its exact times are read."""
        first, last = start[0] // self._tick_ms, end[0] // self._tick_ms
        ticks = [(number, tick) for number, tick in self._far.items() if first <= number <= last]
        numbers = np.array([number for number, _ in ticks], dtype=np.int64)
        unread = UnreadSegments(
            _keys_at(numbers * self._tick_ms),
            _keys_at((numbers + 1) * self._tick_ms),
            np.array([tick.count for _, tick in ticks], dtype=np.int64),
            partial(self._read_tick, [number for number, _ in ticks]),
        )
        return NO_DUE_ROWS, [sorted_in_memory(self._loaded.blocks_between(start, end)), unread]

    async def _read_tick(self, numbers: list[int], which: int) -> DueRows:
        number = numbers[which]
        tick = self._far.get(number)
        if tick is None:  # loaded meanwhile; what was taken since is not pending any more
            return self._loaded.rows_between(
                (number * self._tick_ms, 0, 0), ((number + 1) * self._tick_ms, 0, 0)
            )
        slices = [
            _Slice(number, ledger_id, ids_of(tick.ledgers[ledger_id])) for ledger_id in sorted(tick.ledgers)
        ]
        times = await self._read_times(slices)
        lengths = [len(part.entry_ids) for part in slices]
        columns = DueRows(
            times,
            np.repeat(np.array([part.ledger_id for part in slices], dtype=np.int64), lengths),
            np.concatenate([part.entry_ids for part in slices]),
        )
        return columns.part(times // self._tick_ms == number)

    def discard_ledger(self, ledger_id: int) -> None:
        """See the protocol. Visits every tick: ledgers are deleted seldom, and once nothing is pending."""
        self._loaded.discard_ledger(ledger_id)
        for number, tick in list(self._far.items()):
            entry_ids = tick.ledgers.pop(ledger_id, None)
            if entry_ids is None:
                continue
            self._far_count -= len(entry_ids)
            tick.count -= len(entry_ids)
            tick.parts = [part.part(part.ledger_ids != ledger_id) for part in tick.parts]
            if not tick.ledgers:
                del self._far[number]
        self._far_last = max(self._far, default=0)

    def clear(self, frontier: Frontier | None = None) -> None:
        self._frontier = frontier or self._frontier
        self._loaded_end = self._frontier.deliver_at_ms // self._tick_ms + 1
        self._loaded.clear()
        self._far.clear()
        self._far_heap.clear()
        self._far_count = self._far_last = 0

    def stats(self) -> TrackerStats:
        last_due_ms = self._loaded.last_due_ms()
        if self._far:
            last_due_ms = (self._far_last + 1) * self._tick_ms - 1  # at the latest
        return TrackerStats(
            count=self.count(),
            loaded_count=self._loaded.count(),
            bucket_count=len(self._far),
            memory_bytes=self._loaded.memory_bytes() + self._far_memory_bytes(),
            disk_bytes=0,
            next_due_ms=self.next_due_ms(),
            last_due_ms=last_due_ms,
        )

    def _file(self, ledger_id: int, entry_ids: UInt32Column, ticks: Int64Column) -> None:
        """Add entries to far, one bitmap operation for each tick."""
        steps = np.flatnonzero(ticks[1:] != ticks[:-1]) + 1
        if len(steps) and np.any(ticks[1:] < ticks[:-1]):
            order = stable_order(ticks)
            entry_ids, ticks = entry_ids[order], ticks[order]
            steps = np.flatnonzero(ticks[1:] != ticks[:-1]) + 1
        ends = [*steps.tolist(), len(ticks)]
        # Rows arrive in order, so nearly always no entry can be there already, and none needs to be counted twice.
        is_new = int(entry_ids.min()) > self._far_greatest.get(ledger_id, -1)
        self._far_greatest[ledger_id] = max(self._far_greatest.get(ledger_id, -1), int(entry_ids.max()))
        # Through array.array: a bitmap takes a NumPy array element by element.
        packed = array("I", entry_ids.astype(np.uint32, copy=False).tobytes())
        start = 0
        for number, end in zip(ticks[[0, *ends[:-1]]].tolist(), ends, strict=True):
            tick = self._far.get(number)
            if tick is None:
                tick = self._far[number] = _Tick()
                heapq.heappush(self._far_heap, number)
            group = packed[start:end]
            entries = tick.ledgers.get(ledger_id)
            if entries is None:
                tick.ledgers[ledger_id] = BitMap(group)
                added = end - start
            elif is_new:
                entries.update(group)
                added = end - start
            else:
                before = len(entries)
                entries.update(group)
                added = len(entries) - before
            if tick.read is not None:
                tick.forget_read(ledger_id, BitMap(group))  # MEMORY-3
            tick.count += added
            self._far_count += added
            start = end
        self._far_last = max(self._far_last, int(ticks[-1]))

    def _unfile(self, ledger_id: int, entries: BitMap, number: int) -> None:
        """Take entries of one ledger out of a far tick."""
        tick = self._far.get(number)
        held = tick.ledgers.get(ledger_id) if tick is not None else None
        if tick is None or held is None:
            return
        before = len(held)
        held -= entries
        self._far_count -= before - len(held)
        tick.count -= before - len(held)
        ids = ids_of(entries)
        tick.parts = [
            part.part((part.ledger_ids != ledger_id) | ~is_among(part.entry_ids, ids)) for part in tick.parts
        ]
        tick.forget_read(ledger_id, entries)
        if not held:
            del tick.ledgers[ledger_id]
        if not tick.ledgers:
            del self._far[number]

    def _first_far_tick(self) -> int | None:
        heap = self._far_heap
        while heap and heap[0] not in self._far:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _last_tick_to_load(self, now_ms: int) -> int:
        return (now_ms + self._lead_ms) // self._tick_ms

    def _move_near_end(self, now_ms: int) -> None:
        """Let the loaded rows reach as far as a load would, without one where far holds nothing.

        It also goes back with the clock, as far as MEMORY-1 allows, or a clock that leapt forward once by mistake
        would have everything added at full width for as long as it leapt.
        """
        end = self._last_tick_to_load(now_ms) + 1
        first_far = self._first_far_tick()
        if first_far is not None:
            end = min(end, first_far)
        last_ms = self._loaded.last_due_ms()
        if last_ms is not None:
            end = max(end, last_ms // self._tick_ms + 1)
        self._loaded_end = max(end, self._frontier.deliver_at_ms // self._tick_ms + 1)

    def _plan_load(self, last_tick: int) -> _LoadPlan:
        """Choose the next entries in (tick, ledger, entry) order, as many as one load may read."""
        slices: list[_Slice] = []
        complete: list[int] = []
        partial: int | None = None
        room = self._load_entries_max
        while room and partial is None and len(slices) < LOAD_BITMAPS_MAX:
            number = self._first_far_tick()
            if number is None or number > last_tick:
                break
            while self._far_heap and self._far_heap[0] == number:
                heapq.heappop(self._far_heap)
            tick = self._far[number]
            for ledger_id in sorted(tick.ledgers):
                entry_ids = tick.unread(ledger_id)
                if len(entry_ids) > room:
                    partial, entry_ids = number, entry_ids[:room]
                if len(entry_ids):
                    slices.append(_Slice(number, ledger_id, entry_ids))
                    room -= len(entry_ids)
                if partial is not None:
                    break
            else:
                complete.append(number)
        # Until their times are read, the ticks belong to far (MEMORY-2).
        for number in complete if partial is None else [*complete, partial]:
            heapq.heappush(self._far_heap, number)
        return _LoadPlan(slices, complete, partial)

    async def _read_times(self, slices: list[_Slice]) -> Int64Column:
        """The effective times of all slices, one after the other, or UNREADABLE_TIME; one question a ledger."""
        of_ledger: dict[int, list[int]] = {}
        for index, part in enumerate(slices):
            of_ledger.setdefault(part.ledger_id, []).append(index)
        nothing: Int64Column = np.empty(0, dtype=np.int64)
        times = [nothing] * len(slices)
        for ledger_id, indexes in of_ledger.items():
            if len(indexes) == 1:
                times[indexes[0]] = await self._read_around_damage(ledger_id, slices[indexes[0]].entry_ids)
                continue
            # An entry that was moved is filed twice, and is asked for once.
            entry_ids = distinct_values(np.concatenate([slices[index].entry_ids for index in indexes]))
            readable_times = await self._read_around_damage(ledger_id, entry_ids)
            for index in indexes:
                times[index] = readable_times[np.searchsorted(entry_ids, slices[index].entry_ids)]
        return np.concatenate([nothing, *times])

    async def _read_around_damage(self, ledger_id: int, entry_ids: UInt32Column) -> Int64Column:
        times, damage = await times_around_damage(self._times_reader, ledger_id, entry_ids)
        if damage is not None:
            log.error("Delivery times of messages cannot be read", ledger_id=ledger_id, error=str(damage))
        return times

    def _apply_load(self, plan: _LoadPlan, times: Int64Column) -> None:
        """Move what was read to the loaded rows; what is not in its tick any more is stale and dropped."""
        lengths = [len(part.entry_ids) for part in plan.slices]
        assert len(times) == sum(lengths)
        filed = np.repeat(np.array([part.tick for part in plan.slices], dtype=np.int64), lengths)
        columns = DueRows(
            times,
            np.repeat(np.array([part.ledger_id for part in plan.slices], dtype=np.int64), lengths),
            np.concatenate([np.empty(0, dtype=np.uint32), *(part.entry_ids for part in plan.slices)]),
        )
        kept = times // self._tick_ms == filed
        columns, filed = columns.part(kept), filed[kept]
        rest = len(columns) if plan.partial is None else int(np.searchsorted(filed, plan.partial))
        moved = [columns.part(slice(0, rest))]
        for number in plan.complete:
            tick = self._far.pop(number)
            self._far_count -= tick.count
            moved.extend(tick.parts)
        self._loaded.add(concatenate(moved))
        if plan.partial is not None:
            self._keep_read(self._far[plan.partial], plan, columns.part(slice(rest, None)))

    def _keep_read(self, tick: _Tick, plan: _LoadPlan, columns: DueRows) -> None:
        """Note what was read of a tick that is not read to its end: none of it may be taken yet (TRACKER-1)."""
        tick.parts.append(columns)
        tick.read = {} if tick.read is None else tick.read
        for part in plan.slices:
            if part.tick == plan.partial:
                read = tick.read.setdefault(part.ledger_id, BitMap())
                read.update(array("I", part.entry_ids.tobytes()))

    def _far_memory_bytes(self) -> int:
        """An estimate from a few ticks: looking at every bitmap would hold up the loop."""
        sample = list(islice(self._far.values(), _STATS_SAMPLE))
        if not sample:
            return 0
        sampled = 0
        for tick in sample:
            sampled += _TICK_BYTES + sum(ROW_BYTES * len(part) for part in tick.parts)
            for entries in tick.ledgers.values():
                statistics = entries.get_statistics()
                sampled += _BITMAP_BYTES + statistics["n_containers"] * 32
                sampled += statistics["n_bytes_array_containers"] + statistics["n_bytes_run_containers"]
                sampled += statistics["n_bytes_bitset_containers"]
        return sampled * len(self._far) // len(sample)


def _keys_at(times: Int64Column) -> DueRows:
    """The least keys of some times."""
    return DueRows(times, np.zeros(len(times), dtype=np.int64), np.zeros(len(times), dtype=np.uint32))
