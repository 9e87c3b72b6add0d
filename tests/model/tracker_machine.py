"""Delayed trackers against a sorted list.

The model knows the effective time of every stored entry, and the set of (time, position) that were added and
not taken. Of those the *live* ones, whose time is still the effective one, must come exactly as TRACKER-1 to TRACKER-4 say;
the others are stale, and a tracker may yield them (in order, once) or drop them whenever it likes.

`bucket_machine` adds what only the tracker with buckets does: seals, merges, failures, crashes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.delayed.due_rows import DueRows
from broker.delayed.tracker import ENTRY_AFTER_ALL, DelayedDeliveryTracker, Frontier, TimesReader
from broker.model import Int64Column, UInt32Column

START_MS = 1_700_000_000_000
HOUR = 3_600_000
DAY = 24 * HOUR
LEDGERS = (1, 2, 5)

T = TypeVar("T")
Row = tuple[int, int, int]
Factory = Callable[[TimesReader, Frontier], DelayedDeliveryTracker]

# Few distinct times, many of them on tick borders, so that entries meet.
OFFSETS_MS = st.one_of(
    st.integers(-3, 3),
    st.integers(-20, 20).map(lambda tenth: tenth * 100),
    st.builds(lambda tick, ms: tick * 1_000 + ms, st.integers(-3, 12), st.integers(-1, 1)),
    st.sampled_from([HOUR, HOUR + 1, DAY, -DAY]),
)
STEPS_MS = st.one_of(
    st.integers(0, 5), st.integers(0, 3_000), st.sampled_from([1_000, 10_000, HOUR, DAY, 2 * DAY])
)
LIMITS = st.sampled_from([1, 2, 3, 7, 1_000])


class TrackerMachine(RuleBasedStateMachine):
    """One tracker and one pump, on a clock that steps both ways."""

    factory: ClassVar[Factory]

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now_ms = START_MS
        self.effective: dict[tuple[int, int], int] = {}
        self.discarded_positions: set[tuple[int, int]] = set()
        self.held: set[Row] = set()
        self.indexed: set[tuple[int, int]] = set()  # what was added since the last clear
        self.tracker = self.factory(self.read_times, Frontier(START_MS, *ENTRY_AFTER_ALL))
        self.frontier = self.tracker.frontier

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    async def read_times(self, ledger_id: int, entry_ids: UInt32Column) -> Int64Column:
        assert np.all(entry_ids[1:] > entry_ids[:-1])
        times = [self.effective.get((ledger_id, entry_id), 0) for entry_id in entry_ids.tolist()]
        return np.array(times, dtype=np.int64)

    def is_live(self, row: Row) -> bool:
        return self.effective.get(row[1:]) == row[0]

    def uncertain(self) -> int:
        """Count the entries that may be counted though they are held no more, or twice."""
        return 0

    def changed(self, position: tuple[int, int]) -> None:
        """The effective time of an entry is about to change."""

    def added_again(self, count: int) -> None:
        """Rows were added that the tracker holds."""

    def discarded(self, ledger_id: int) -> None:
        """A ledger was deleted."""

    def cleared(self) -> None:
        """The tracker was told to forget everything."""

    def live(self) -> list[Row]:
        return sorted(row for row in self.held if self.is_live(row))

    def add_rows(self, ledger_id: int, entries: dict[int, int]) -> None:
        entry_ids = sorted(entries)
        times = [entries[entry_id] for entry_id in entry_ids]
        self.tracker.add(ledger_id, np.array(entry_ids, dtype=np.uint32), np.array(times, dtype=np.int64))
        self.held |= {(entries[entry_id], ledger_id, entry_id) for entry_id in entry_ids}
        self.indexed |= {(ledger_id, entry_id) for entry_id in entry_ids}

    def entry_from(self, number: int) -> tuple[int, int]:
        return sorted(self.effective)[number % len(self.effective)]

    @rule(ledger_id=st.sampled_from(LEDGERS), offsets=st.lists(OFFSETS_MS, min_size=1, max_size=12))
    def store(self, ledger_id: int, offsets: list[int]) -> None:
        first = 1 + max((entry for ledger, entry in self.effective if ledger == ledger_id), default=-1)
        entries = {first + index: self.now_ms + offset for index, offset in enumerate(offsets)}
        self.effective |= {(ledger_id, entry_id): time for entry_id, time in entries.items()}
        self.add_rows(ledger_id, entries)

    @rule(ledger_id=st.sampled_from(LEDGERS), offset=OFFSETS_MS, count=st.integers(5, 40))
    def store_herd(self, ledger_id: int, offset: int, count: int) -> None:
        self.store(ledger_id, [offset] * count)

    @precondition(lambda self: self.effective)
    @rule(number=st.integers(0, 999), offset=OFFSETS_MS)
    def move(self, number: int, offset: int) -> None:
        ledger_id, entry_id = self.entry_from(number)
        if (ledger_id, entry_id) in self.discarded_positions:
            return
        self.amend((ledger_id, entry_id), self.now_ms + offset)
        self.add_rows(ledger_id, {entry_id: self.now_ms + offset})

    @precondition(lambda self: self.effective)
    @rule(number=st.integers(0, 999))
    def cancel(self, number: int) -> None:
        self.amend(self.entry_from(number), 0)

    def amend(self, position: tuple[int, int], deliver_at_ms: int) -> None:
        """Change the log, then tell the tracker which row is out of date, as the pump does of what it has indexed."""
        (ledger_id, entry_id), old_ms = position, self.effective[position]
        self.changed(position)
        self.effective[position] = deliver_at_ms
        if old_ms and position in self.indexed:
            self.tracker.remove(ledger_id, np.array([entry_id], dtype=np.uint32), np.array([old_ms]))

    @precondition(lambda self: self.effective)
    @rule(ledger_id=st.sampled_from(LEDGERS))
    def add_again(self, ledger_id: int) -> None:
        pending = {entry: time for time, ledger, entry in self.live() if ledger == ledger_id}
        if pending:
            self.add_rows(ledger_id, pending)
            self.added_again(len(pending))

    @rule(step_ms=STEPS_MS)
    def clock_forward(self, step_ms: int) -> None:
        self.now_ms += step_ms

    @rule(step_ms=STEPS_MS)
    def clock_back(self, step_ms: int) -> None:
        self.now_ms -= step_ms

    @rule()
    def clock_to_next_due(self) -> None:
        self.now_ms = max(self.now_ms, self.tracker.next_due_ms() or 0)

    @rule()
    def load_once(self) -> None:
        if self.tracker.needs_load(self.now_ms):
            self.run(self.tracker.load(self.now_ms))

    @rule(limit=LIMITS)
    def take_without_load(self, limit: int) -> None:
        self.check_taken(self.tracker.take_due(self.now_ms, limit), limit, is_loaded=False)

    @rule(limit=LIMITS)
    def take(self, limit: int) -> None:
        self.load_all()
        self.check_taken(self.tracker.take_due(self.now_ms, limit), limit, is_loaded=True)

    @rule(ledger_id=st.sampled_from(LEDGERS))
    def discard_ledger(self, ledger_id: int) -> None:
        self.tracker.discard_ledger(ledger_id)
        self.held = {row for row in self.held if row[1] != ledger_id}
        # Its ids stay used, as a ledger's number is never given again; its entries are gone.
        gone = {position for position in self.effective if position[0] == ledger_id}
        self.effective |= dict.fromkeys(gone, 0)
        self.discarded_positions |= gone
        self.discarded(ledger_id)

    @rule(is_rebuilt=st.booleans())
    def clear(self, is_rebuilt: bool) -> None:
        pending = self.live()
        self.tracker.clear()
        self.held, self.indexed = set(), set()
        assert self.tracker.count() == 0
        assert self.tracker.next_due_ms() is None
        self.cleared()
        if is_rebuilt:
            for ledger_id in LEDGERS:
                entries = {entry: time for time, ledger, entry in pending if ledger == ledger_id}
                if entries:
                    self.add_rows(ledger_id, entries)

    @invariant()
    def frontier_never_goes_back_t1(self) -> None:
        assert self.tracker.frontier == self.frontier

    @invariant()
    def next_due_is_armed_t4(self) -> None:
        live, due = self.live(), self.tracker.next_due_ms()
        if live:
            assert due is not None
            assert due <= live[0][0]
        if not self.held and not self.uncertain():
            assert due is None

    @invariant()
    def counts_agree(self) -> None:
        live, count = self.live(), self.tracker.count()
        # What was late lies in memory before the frontier, and counts until it is taken.
        late = sum(row <= self.frontier for row in self.held if not self.is_live(row))
        assert len(live) <= count <= len(live) + late + self.uncertain(), (len(live), count, late)
        bars = self.tracker.histogram(START_MS - 99 * DAY, START_MS + 9_999 * DAY, HOUR).bars
        assert sum(bar.count for bar in bars) == count
        assert all(bar.count > 0 for bar in bars)
        if live:
            assert self.run(self.tracker.contains(*live[0][1:]))
            assert self.run(self.tracker.contains(*live[-1][1:]))
        positions = {row[1:] for row in self.held}
        for position in list(self.effective)[:3]:
            assert position in positions or not self.run(self.tracker.contains(*position))

    def load_all(self) -> None:
        steps = 0
        while self.tracker.needs_load(self.now_ms):
            self.run(self.tracker.load(self.now_ms))
            steps += 1
            assert steps < 10_000, "load makes no progress"

    def check_taken(self, chunk: DueRows | None, limit: int, *, is_loaded: bool) -> None:
        due = [row for row in self.live() if row[0] <= self.now_ms]
        taken: list[Row] = []
        if chunk is not None:
            columns = (chunk.deliver_at_ms.tolist(), chunk.ledger_ids.tolist(), chunk.entry_ids.tolist())
            taken = list(zip(*columns, strict=True))
            assert 0 < len(taken) <= limit
            assert taken == sorted(set(taken))  # TRACKER-1: in order, once
            assert self.held.issuperset(taken)  # TRACKER-1: not again
            assert taken[-1][0] <= self.now_ms  # TRACKER-3
        live = [row for row in taken if self.is_live(row)]
        assert live == due[: len(live)]  # TRACKER-1, TRACKER-2: no gap, and what was late comes first
        self.held.difference_update(taken)
        passable = self.may_pass(
            {row for row in self.held if row[0] <= self.now_ms and not self.is_live(row)}
        )
        is_all = chunk is None or len(taken) + len(passable) + self.uncertain() < limit
        if is_loaded and is_all and not self.tracker.needs_load(self.now_ms):
            assert live == due
        self.follow_frontier(Frontier(*taken[-1]) if taken else self.frontier, passable)

    def follow_frontier(self, last: Frontier, passable: set[Row]) -> None:
        """It lies where the last entry was taken, or where one was passed by that is stale."""
        before, self.frontier = self.frontier, self.tracker.frontier
        assert self.frontier == max(before, last) or (
            self.frontier > max(before, last) and self.frontier in passable
        )
        if self.frontier > before:
            gone = {row for row in self.held if row <= self.frontier}
            assert not any(self.is_live(row) for row in gone)  # TRACKER-2: nothing is left behind
            self.held -= gone

    def may_pass(self, stale: set[Row]) -> set[Row]:
        """Return the rows that a tracker which knows stale rows may skip. Others take everything."""
        return set()

    def teardown(self) -> None:
        """Everything is delivered in the end, by waking only when told."""
        for _ in range(100_000):
            due = self.tracker.next_due_ms()
            if due is None:
                break
            self.now_ms = max(self.now_ms, due)
            self.take(1_000)
            self.frontier_never_goes_back_t1()
        assert self.live() == []
        assert self.tracker.count() == 0
        self.loop.close()
