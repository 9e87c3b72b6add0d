"""The read position: who is delivered by position follows from the row and two numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import Corrupt
from broker.model import START, Int64Column, Position
from broker.storage.amendments import GONE, Amendments
from broker.subscriptions import reader as reader_module
from broker.subscriptions.reader import Reader
from broker.testing.mem_vfs import MemVfs
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from tests.harness import Node, Outgoing, small_config


class Log:
    """Times by ledger, 0 for what is not DELAYED. A cold log has nothing in memory and waits for its gate."""

    def __init__(self, times: dict[int, list[int]], *, cold: bool = False) -> None:
        self.times = times
        self.cold = cold
        self.gate = asyncio.Event()
        self.gate.set()
        self.amended = frozenset[int]()
        self.damaged: set[tuple[int, int]] = set()
        self.reads: list[tuple[int, int, int]] = []

    @property
    def end(self) -> Position:
        last = max(self.times, default=0)
        return Position(last, len(self.times[last])) if last else START

    def entry_count(self, ledger_id: int) -> int | None:
        return len(self.times[ledger_id]) if ledger_id in self.times else None

    def next_ledger_id(self, ledger_id: int) -> int | None:
        return min((i for i in self.times if i > ledger_id), default=None)

    def positions(self) -> list[tuple[Position, int]]:
        return [(Position(i, e), t) for i in sorted(self.times) for e, t in enumerate(self.times[i])]

    def next_undelayed(self, position: Position) -> Position | None:
        return next((p for p, time in self.positions() if p >= position and time == 0), None)

    def amendments_of(self, ledger_id: int) -> Amendments | None:
        return GONE if ledger_id in self.amended else None

    def times_nowait(self, ledger_id: int, first: int, count: int) -> Int64Column | None:
        return None if self.cold else self._column(ledger_id, first, count)

    async def read_times(self, ledger_id: int, first: int, count: int) -> Int64Column:
        times = self._column(ledger_id, first, count)  # the file thread reads at once, and tells later
        await self.gate.wait()
        if any((ledger_id, entry_id) in self.damaged for entry_id in range(first, first + count)):
            raise Corrupt("a block is damaged")
        return times

    def _column(self, ledger_id: int, first: int, count: int) -> Int64Column:
        assert count > 0 and first + count <= len(self.times[ledger_id])
        self.reads.append((ledger_id, first, count))
        return np.array(self.times[ledger_id][first : first + count], dtype=np.int64)


async def read_all(reader: Reader, limit: int = 1000) -> list[Position]:
    found: list[Position] = []
    for _ in range(1000):
        if (taken := reader.take(limit)) is not None:
            assert 0 < len(taken[1]) <= limit
            found += [Position(taken[0], entry_id) for entry_id in taken[1].tolist()]
        elif reader.is_behind:
            await reader.fill()
        else:
            return found
    raise AssertionError("the reader never reaches the end")


def positions(*some: tuple[int, int]) -> list[Position]:
    return [Position(*each) for each in some]


async def test_without_catch_up_only_what_is_not_delayed_comes():
    reader = Reader(Log({1: [0, 50, 0], 3: [50, 0]}), honors_delay=True)
    reader.begin(START, START, 0)
    assert await read_all(reader) == positions((1, 0), (1, 2), (3, 1))


async def test_catch_up_brings_what_is_due_before_its_end():
    reader = Reader(Log({1: [50, 60, 51], 3: [50, 50, 0]}), honors_delay=True)
    reader.begin(START, Position(3, 1), 51)
    assert await read_all(reader) == positions((1, 0), (1, 2), (3, 0), (3, 2))


async def test_a_subscription_that_ignores_delays_reads_every_row():
    reader = Reader(Log({1: [50, 60], 3: [0]}), honors_delay=False)
    reader.begin(Position(1, 1), START, 0)
    assert await read_all(reader) == positions((1, 1), (3, 0))


async def test_delayed_rows_behind_catch_up_are_not_looked_at():
    log = Log({1: [50] * 1000, 2: [*[50] * 1000, 0]})
    reader = Reader(log, honors_delay=True)
    reader.begin(START, START, 0)
    assert await read_all(reader) == positions((2, 1000))
    assert log.reads == [(2, 1000, 1)]


async def test_what_arrives_is_read_once_it_is_there():
    log = Log({1: [0]})
    reader = Reader(log, honors_delay=True)
    reader.begin(START, START, 0)
    assert await read_all(reader) == positions((1, 0))
    assert not reader.is_behind
    log.times[1] += [70, 0]
    log.times[2] = [0]
    assert await read_all(reader) == positions((1, 2), (2, 0))


async def test_an_empty_log_leaves_nothing_to_do():
    reader = Reader(Log({}), honors_delay=False)
    reader.begin(START, START, 0)
    assert not reader.is_behind
    assert (reader.take(1), bool(reader._found)) == (None, False)


async def test_a_deleted_ledger_is_stepped_over():
    log = Log({1: [0, 0], 2: [0], 3: [0]})
    reader = Reader(log, honors_delay=False)
    reader.begin(Position(1, 1), START, 0)
    del log.times[1], log.times[2]
    assert await read_all(reader) == positions((3, 0))


async def test_a_start_over_during_a_fill_drops_what_that_one_brings():
    log = Log({1: [0] * 5}, cold=True)
    log.gate.clear()
    reader = Reader(log, honors_delay=True)
    reader.begin(START, START, 0)
    fill = asyncio.create_task(reader.fill())
    await asyncio.sleep(0)
    reader.begin(Position(1, 3), START, 0)
    log.gate.set()
    await fill
    assert (reader.position, bool(reader._found)) == ((1, 3), False)
    assert await read_all(reader) == positions((1, 3), (1, 4))


async def test_a_start_over_drops_what_was_found():
    reader = Reader(Log({1: [0] * 3}), honors_delay=True)
    reader.begin(Position(1, 0), START, 0)
    await reader.fill()
    assert reader._found
    reader.begin(Position(1, 2), START, 0)
    assert await read_all(reader) == positions((1, 2))


async def test_a_fill_is_one_bounded_step(monkeypatch):
    monkeypatch.setattr(reader_module, "_SCAN_ROWS", 4)
    log = Log({1: [0] * 10})
    reader = Reader(log, honors_delay=True)
    reader.begin(START, START, 0)
    assert len(await read_all(reader)) == 10
    assert log.reads == [(1, 0, 4), (1, 4, 4), (1, 8, 2)]


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_SCAN_ROWS", 4)
    monkeypatch.setattr(reader_module, "_EMPTY_SCAN_ROWS_MAX", 16)


LATER = 50
"""A time after every catch-up of these tests."""


@pytest.mark.usefixtures("small_steps")
async def test_steps_that_find_nothing_grow_up_to_a_bound_and_not_where_rows_are_amended():
    log = Log({1: [LATER] * 60, 2: [LATER] * 10})
    log.amended = frozenset({2})
    reader = Reader(log, honors_delay=True)
    reader.begin(START, Position(2, 10), 1)
    assert await read_all(reader) == []
    assert [count for _, _, count in log.reads] == [4, 8, 16, 16, 16, 4, 4, 2]


@pytest.mark.usefixtures("small_steps")
async def test_no_more_is_kept_of_a_grown_step_than_of_another_and_the_next_one_is_small():
    log = Log({1: [LATER] * 12 + [0] * 20})
    reader = Reader(log, honors_delay=True)
    reader.begin(START, Position(1, 32), 1)
    kept = []
    found: list[Position] = []
    while reader.is_behind:
        await reader.fill()
        kept.append(sum(len(ids) for _, ids in reader._found))
        if (taken := reader.take(100)) is not None:
            assert taken[1].base is None or len(taken[1].base) <= 4
            found += [Position(taken[0], entry_id) for entry_id in taken[1].tolist()]
    assert found == [Position(1, entry_id) for entry_id in range(12, 32)]
    assert max(kept) == 4
    assert log.reads[2:5] == [(1, 12, 16), (1, 16, 4), (1, 20, 4)]


@pytest.mark.usefixtures("small_steps")
async def test_no_more_is_stepped_over_for_damage_in_a_grown_step_than_in_another():
    log = Log({1: [LATER] * 30}, cold=True)
    log.damaged = {(1, 18)}
    reader = Reader(log, honors_delay=True)
    reader.begin(START, Position(1, 30), 1)
    stepped_over: list[int] = []
    while reader.is_behind:
        try:
            await reader.fill()
        except Corrupt:
            stepped_over += reader.step_over()[1].tolist()
    assert stepped_over == [16, 17, 18, 19]


@given(
    counts=st.lists(
        st.tuples(st.booleans(), st.lists(st.sampled_from([0, 0, 5, 6, 7, 8]), max_size=8)), max_size=5
    ),
    begin=st.tuples(st.integers(0, 5), st.integers(0, 8)),
    catchup_end=st.tuples(st.integers(0, 6), st.integers(0, 8)),
    catchup_ms=st.integers(4, 9),
    honors_delay=st.booleans(),
    cold=st.booleans(),
    limit=st.integers(1, 9),
    scan_rows=st.sampled_from([1, 3, 100]),
    empty_scan_rows=st.sampled_from([1, 4, 100]),
)
def test_who_is_delivered_by_position_is_what_the_rule_says(
    counts: Sequence[tuple[bool, list[int]]],
    begin: tuple[int, int],
    catchup_end: tuple[int, int],
    catchup_ms: int,
    honors_delay: bool,
    cold: bool,
    limit: int,
    scan_rows: int,
    empty_scan_rows: int,
):
    async def run() -> None:
        log = Log({i: times for i, (there, times) in enumerate(counts, 1) if there}, cold=cold)
        reader = Reader(log, honors_delay=honors_delay)
        reader.begin(Position(*begin), Position(*catchup_end), catchup_ms)
        wanted = [
            position
            for position, time in log.positions()
            if position >= begin
            and (not honors_delay or time == 0 or (position < catchup_end and time <= catchup_ms))
        ]
        assert await read_all(reader, limit) == wanted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_module, "_SCAN_ROWS", scan_rows)
        patch.setattr(reader_module, "_EMPTY_SCAN_ROWS_MAX", empty_scan_rows)
        asyncio.run(run())


def test_what_was_found_is_not_kept_once_nobody_is_there():
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        node = Node(MemVfs(), clock, small_config()).open()
        slow = await node.subscribe("orders", "billing", permits=1)
        await node.produce("orders", [Outgoing(b"%d" % i) for i in range(10)])
        await slow.wait(1)
        assert slow.subscription.reader._found
        slow.detach()
        await asyncio.sleep(1)
        assert not slow.subscription.reader._found
        next_one = await node.subscribe("orders", "billing")
        await next_one.wait(10)
        await node.stop()

    run_sim(scenario, 1)
