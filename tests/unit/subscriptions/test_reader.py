"""The read position: who is delivered by position follows from the row and two numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from broker.model import START, Int64Column, Position
from broker.subscriptions import reader as reader_module
from broker.subscriptions.reader import Reader


class Log:
    """Times by ledger, 0 for what is not DELAYED. A cold log has nothing in memory and waits for its gate."""

    def __init__(self, times: dict[int, list[int]], *, cold: bool = False) -> None:
        self.times = times
        self.cold = cold
        self.gate = asyncio.Event()
        self.gate.set()
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

    def times_nowait(self, ledger_id: int, first: int, count: int) -> Int64Column | None:
        return None if self.cold else self._column(ledger_id, first, count)

    async def read_times(self, ledger_id: int, first: int, count: int) -> Int64Column:
        times = self._column(ledger_id, first, count)  # the file thread reads at once, and tells later
        await self.gate.wait()
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

    scan_rows, reader_module._SCAN_ROWS = reader_module._SCAN_ROWS, scan_rows
    try:
        asyncio.run(run())
    finally:
        reader_module._SCAN_ROWS = scan_rows
