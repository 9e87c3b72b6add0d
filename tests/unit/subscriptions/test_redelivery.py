"""Entries to be sent again: owed under which time, queued, and in which order they go out."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from broker.model import ENTRY_ID_MAX, Entries, Position, bitmap_of, count_entries
from broker.storage.manifest import CursorImage, decode_cursor, encode_cursor
from broker.subscriptions import entry_time_runs, entry_times, redelivery
from broker.subscriptions.redelivery import RedeliveryQueue
from tests.depth import at_depth
from tests.harness import entries_of

positions = st.builds(Position, st.integers(1, 3), st.sampled_from([*range(12), 1 << 16, ENTRY_ID_MAX]))
sets = st.frozensets(positions, max_size=8)
times = st.integers(0, 6)


def positions_in(some: Entries) -> set[Position]:
    return {Position(ledger_id, entry_id) for ledger_id, bitmap in some.items() for entry_id in bitmap}


def owed(waiting: RedeliveryQueue) -> dict[Position, int]:
    """Entries that a checkpoint would write; asserts that it is what a start would read."""
    image = CursorImage(1, 1, {}, {}, waiting.capture().by_ledger())
    assert decode_cursor(encode_cursor(image), "") == image
    return {
        Position(ledger_id, entry_id): time_ms
        for ledger_id, each in image.waiting.items()
        for entry_id, time_ms in zip(each.entries, each.column.tolist(), strict=True)
    }


def drain(waiting: RedeliveryQueue, now_ms: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    while (taken := waiting.take(now_ms, 100)) is not None:
        found += [(taken[0], entry_id) for entry_id in taken[1].tolist()]
    return found


class Plain:
    """The same with dicts."""

    def __init__(self) -> None:
        self.owed: dict[Position, int] = {}
        self.queued: dict[Position, int] = {}  # the time for which it waits; 0 once that has come
        self.since: dict[Position, int] = {}  # of what is queued, the time it waits for or has waited for

    def put(self, time_ms: int, some: frozenset[Position]) -> None:
        self.forget(some)
        self.owed |= dict.fromkeys(some, time_ms)
        self._queue(time_ms, some)

    def push(self, time_ms: int, some: frozenset[Position]) -> None:
        fresh = some - self.queued.keys()
        self._queue(time_ms, fresh)
        if not time_ms:
            self.since |= {each: self.owed[each] for each in fresh if self.owed.get(each)}

    def settle(self, some: frozenset[Position]) -> None:
        self.forget(some)
        self.owed = {each: time_ms for each, time_ms in self.owed.items() if each not in some}

    def forget(self, some: frozenset[Position]) -> None:
        self.queued = {each: time_ms for each, time_ms in self.queued.items() if each not in some}
        self.since = {each: time_ms for each, time_ms in self.since.items() if each not in some}

    def start(self) -> None:
        self.queued, self.since = {}, {}
        for each, time_ms in self.owed.items():
            self._queue(time_ms, frozenset([each]))

    def look(self, now_ms: int) -> None:
        self.queued = {each: 0 if time_ms <= now_ms else time_ms for each, time_ms in self.queued.items()}

    def take(self, now_ms: int, limit: int) -> list[Position]:
        self.look(now_ms)
        ready = sorted(each for each, time_ms in self.queued.items() if not time_ms)
        taken = [each for each in ready if each.ledger_id == ready[0].ledger_id][:limit]
        self.forget(frozenset(taken))
        return taken

    def _queue(self, time_ms: int, some: frozenset[Position]) -> None:
        self.queued |= dict.fromkeys(some, time_ms)
        if time_ms:
            self.since |= dict.fromkeys(some, time_ms)


class Both:
    """The same steps with both, and everything that can be asked compared."""

    def __init__(self) -> None:
        self.waiting = RedeliveryQueue()
        self.plain = Plain()

    def step(self, step: str, some: frozenset[Position], now_ms: int, limit: int) -> None:
        waiting, plain = self.waiting, self.plain
        if step in ("put", "push"):
            getattr(waiting, step)(now_ms, entries_of(some))
            getattr(plain, step)(now_ms, some)
        elif step in ("settle", "forget"):
            getattr(waiting, step)(entries_of(some))
            getattr(plain, step)(some)
        elif step == "take":
            taken = waiting.take(now_ms, limit)
            found = [] if taken is None else [Position(taken[0], each) for each in taken[1].tolist()]
            assert found == plain.take(now_ms, limit)
        elif step == "count":
            assert waiting.count_after(now_ms) == sum(each > now_ms for each in plain.queued.values())
            plain.look(now_ms)
        elif step == "since":
            first_ms = min(plain.since.values(), default=now_ms + 1)
            assert waiting.ready_since_ms(now_ms) == (first_ms if first_ms <= now_ms else None)
        elif step == "start":
            waiting.queue_owed()
            plain.start()
        elif step == "restart":
            self.waiting = RedeliveryQueue(waiting.capture().by_ledger())
            plain.start()
        elif step == "clear":
            waiting.clear()
            plain.queued, plain.since = {}, {}

    def compare(self) -> None:
        waiting, plain = self.waiting, self.plain
        assert waiting.next_ms() == min(plain.queued.values(), default=None)
        assert positions_in(waiting.queued) == plain.queued.keys() and all(waiting.queued.values())
        assert owed(waiting) == plain.owed
        told = {
            Position(ledger_id, entry_id): time_ms
            for ledger_id, bitmap in waiting.queued.items()
            for entry_id, time_ms in waiting.not_before_ms(ledger_id, bitmap).items()
        }
        timed = {each: time_ms for each, time_ms in plain.queued.items() if time_ms}
        assert {each: told[each] for each in timed} == timed


STEPS = [
    "put",
    "put",
    "push",
    "take",
    "take",
    "settle",
    "forget",
    "count",
    "since",
    "start",
    "restart",
    "clear",
]
steps_of = st.lists(st.tuples(st.sampled_from(STEPS), sets, times, st.integers(1, 4)), max_size=40)


@pytest.fixture
def blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Blocks of a few rows, so that a few entries make runs and merges."""

    def choose(rows: int) -> None:
        for module in (entry_time_runs, entry_times):
            monkeypatch.setattr(module, "BLOCK_ROWS", rows)
        monkeypatch.setattr(entry_times, "_DEAD_ROWS", rows)

    return choose


@pytest.mark.slow
@pytest.mark.parametrize("block_rows", [1, 3, entry_time_runs.BLOCK_ROWS])
def test_it_gives_what_plain_dicts_would(block_rows: int, blocks_of_rows: Callable[[int], None]):
    blocks_of_rows(block_rows)

    @given(steps=steps_of)
    def check(steps: list[tuple[str, frozenset[Position], int, int]]) -> None:
        both = Both()
        for step in steps:
            both.step(*step)
            both.compare()

    check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(at_depth(change=1, deep=3)))
def test_many_entries_in_many_runs_are_what_plain_dicts_would_hold(
    seed: int, blocks_of_rows: Callable[[int], None]
):
    blocks_of_rows(16)
    rng, both, now_ms = random.Random(seed), Both(), 100_000
    chosen = ["put"] * 12 + ["push"] * 3 + ["take"] * 20 + ["settle", "forget", "count", "since"] * 2
    for number in range(at_depth(change=500, deep=1_500)):
        now_ms += rng.choice([0, 1, 5, 20, -30])
        step = rng.choice(chosen) if rng.random() < 0.98 else rng.choice(["start", "restart", "clear"])
        first = rng.randrange(500)
        ids = range(first, first + rng.choice([1, 3, 60]), rng.choice([1, 2]))
        some = frozenset(Position(rng.randint(1, 3), entry_id) for entry_id in ids)
        at_ms = now_ms + rng.choice([-1, 0, 3, 500, rng.randrange(2_000)])
        if step in ("put", "push"):
            both.step(step, some, rng.choice([0, at_ms, at_ms, at_ms]), 1)
        else:
            both.step(step, some, now_ms, rng.choice([1, 10, 100]))
        if not number % 10:
            both.compare()
    both.compare()
    assert both.plain.owed


@pytest.mark.slow
def test_what_is_owed_does_not_depend_on_what_was_handed_out():
    rng, one, other = random.Random(5), RedeliveryQueue(), RedeliveryQueue()
    for now_ms in range(1, 300):
        some = {rng.randint(1, 2): BitMap(rng.sample(range(200), 5))}
        for each in (one, other):
            each.put(now_ms + 20, some)
        while one.take(now_ms, 3) is not None:
            one.push(rng.choice([0, now_ms + 5]), {1: BitMap(rng.sample(range(200), 2))})
        done = {1: BitMap([rng.randrange(200)])}
        for each in (one, other):
            each.settle(done)
        one.forget({2: BitMap([rng.randrange(200)])})
    assert owed(one) == owed(other) != {}
    assert one.capture().by_ledger() == other.capture().by_ledger()
    one.queue_owed()
    other.queue_owed()
    assert drain(one, 1_000) == drain(other, 1_000) != []
    assert entry_times._Gathering() == entry_times._NONE_GATHERED  # all of them share it


def test_nothing_of_the_callers_sets_is_kept():
    waiting, mine = RedeliveryQueue(), {1: BitMap([1])}
    waiting.put(5, mine)
    waiting.push(6, {1: (pushed := BitMap([7]))})
    mine[1].add(2)
    pushed.add(8)
    assert owed(waiting) == {(1, 1): 5}
    assert drain(waiting, 9) == [(1, 1), (1, 7)]


def test_what_was_captured_stays_as_it_was(blocks_of_rows: Callable[[int], None]):
    blocks_of_rows(2)
    waiting = RedeliveryQueue()
    for entry_id in range(50):
        waiting.put(100 - entry_id, {1: BitMap([entry_id])})
    capture = waiting.capture()
    for entry_id in range(40):
        waiting.settle({1: BitMap([entry_id])})
        waiting.put(500, {1: BitMap([60 + entry_id, 45])})
    (times,) = capture.by_ledger().values()
    assert (times.entries, times.column.tolist()) == (BitMap(range(50)), list(range(100, 50, -1)))


def test_an_entry_is_queued_once():
    waiting = RedeliveryQueue()
    waiting.push(5, {1: BitMap([1, 2])})
    waiting.push(1, {1: BitMap([2, 3])})
    assert drain(waiting, 1) == [(1, 3)]
    assert drain(waiting, 5) == [(1, 1), (1, 2)]
    assert drain(waiting, 9) == []


def test_a_record_moves_what_is_queued():
    # A replay puts what came back twice, without the hand-out between.
    waiting = RedeliveryQueue()
    waiting.put(5, {1: BitMap([1])})
    waiting.put(9, {1: BitMap([1])})
    assert (waiting.take(8, 9), waiting.next_ms()) == (None, 9)
    waiting.put(0, {1: BitMap([1])})
    assert drain(waiting, 1) == [(1, 1)]
    assert (waiting.next_ms(), owed(waiting)) == (None, {(1, 1): 0})


def test_a_limit_splits_and_the_rest_stays_ready():
    waiting = RedeliveryQueue()
    waiting.push(5, {1: BitMap(range(5))})
    waiting.push(6, {1: BitMap([9])})
    assert waiting.take(4, 2) is None
    taken = waiting.take(6, 2)
    assert taken is not None and taken[1].tolist() == [0, 1]
    assert (waiting.next_ms(), waiting.queued) == (0, {1: BitMap([2, 3, 4, 9])})
    assert drain(waiting, 6) == [(1, 2), (1, 3), (1, 4), (1, 9)]


def test_nothing_of_a_cleared_queue_comes_back():
    waiting = RedeliveryQueue()
    waiting.put(1, {1: BitMap([1])})
    waiting.push(2, {1: BitMap([2])})
    waiting.clear()
    assert (waiting.next_ms(), waiting.take(9, 9)) == (None, None)
    waiting.push(7, {1: BitMap([1])})  # not under the time that it had before
    assert (waiting.take(6, 9), waiting.next_ms()) == (None, 7)


def test_what_came_back_at_different_times_goes_in_the_order_of_the_log():
    waiting = RedeliveryQueue()
    waiting.put(1, {2: BitMap([0])})
    waiting.put(2, {1: BitMap([5, 6])})
    waiting.push(3, {1: BitMap([0, 1])})
    assert drain(waiting, 3) == [(1, 0), (1, 1), (1, 5), (1, 6), (2, 0)]


def test_what_is_due_stays_so_when_the_clock_steps_back_and_what_is_not_waits():
    waiting = RedeliveryQueue()
    waiting.put(100, {1: BitMap([1, 2])})
    assert waiting.count_after(100) == 0
    waiting.put(60, {1: BitMap([3])})
    assert (waiting.count_after(50), drain(waiting, 50)) == (1, [(1, 1), (1, 2)])
    assert (waiting.next_ms(), drain(waiting, 60)) == (60, [(1, 3)])


def test_a_herd_that_is_due_at_once_goes_out_piece_by_piece(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(redelivery, "_DUE_ROWS", entry_time_runs.BLOCK_ROWS)
    waiting, count = RedeliveryQueue(), 5 * entry_time_runs.BLOCK_ROWS
    ids = np.random.default_rng(1).permutation(count).astype(np.uint32)
    for start in range(0, count, entry_time_runs.BLOCK_ROWS):
        waiting.put(100, {1: bitmap_of(ids[start : start + entry_time_runs.BLOCK_ROWS])})
    waiting.put(900, {1: BitMap([count])})
    herd = RedeliveryQueue(waiting.capture().by_ledger())  # one run, and only its end is not due
    taken = []
    while (part := herd.take(100, 1_000)) is not None:
        taken += part[1].tolist()
    assert sorted(taken) == list(range(count)) and herd.next_ms() == 900
    again = RedeliveryQueue(waiting.capture().by_ledger())
    assert again.count_after(100) == 1  # exact, however much is due


def bytes_held(waiting: RedeliveryQueue, traced: int) -> float:
    """Bytes that NumPy and Python allocated, as traced, and the sets, which nobody traces, by their stored size."""
    times = waiting._owed
    found = [waiting.queued, waiting._ready, times.waits, times._gathering.held, times._gathering.named]
    found += [run.held for run in times._runs]
    return traced + sum(len(bitmap.serialize()) for some in found for bitmap in some.values())


@pytest.mark.slow
def test_an_entry_costs_two_dozen_bytes_and_nothing_when_it_is_done():
    count, step = at_depth(change=50_000, deep=200_000), 500
    rng = np.random.default_rng(1)
    ids = rng.permutation(count * 4)[:count].astype(np.uint32)  # one entry in four waits
    times = rng.integers(1, 86_400_000, count // step).tolist()  # and hardly two for the same time
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        waiting = RedeliveryQueue()
        for start, time_ms in zip(range(0, count, step), times, strict=True):
            waiting.put(time_ms, {i: bitmap_of(ids[start + i - 1 : start + step : 2]) for i in (1, 2)})
        now, peak = (traced - before for traced in tracemalloc.get_traced_memory())
        assert count_entries(waiting.queued) == count
        assert bytes_held(waiting, now) / count < 24
        assert bytes_held(waiting, peak) / count < 36  # while runs are merged
        for start in range(0, count * 9 // 10, step):
            waiting.settle({i: bitmap_of(ids[start + i - 1 : start + step : 2]) for i in (1, 2)})
        now, _ = (traced - before for traced in tracemalloc.get_traced_memory())
        assert len(owed(waiting)) == count_entries(waiting.queued) == count // 10
        assert bytes_held(waiting, now) < 2 * 24 * count // 10 + 200_000  # rows that are dead are gone
    finally:
        tracemalloc.stop()


def test_what_may_go_at_once_is_what_waited_for_no_time():
    waiting = RedeliveryQueue()
    waiting.put(0, some_of(1, 2))
    waiting.put(50, some_of(3, 4))
    waiting.push(0, some_of(5))
    waiting.push(70, some_of(6))
    for _ in range(2):
        assert waiting.count_after(100) == 0
        assert waiting.at_once() == some_of(1, 2, 5)
        assert waiting.ready_among(some_of(2, 3, 9)) == some_of(2, 3)
        taken = waiting.take(100, 3)
        assert taken is not None
        waiting.push(0, {taken[0]: bitmap_of(taken[1])})  # put back: it has waited as long as before
    waiting.queue_owed()
    assert waiting.count_after(100) == 0
    assert waiting.at_once() == some_of(1, 2)


def some_of(*entry_ids: int) -> Entries:
    return {1: BitMap(entry_ids)}
