"""The index feed on a log of its own: what it may leave for later, and what not."""

from __future__ import annotations

import asyncio

import numpy as np

from broker.delayed.due_rows import DueRows
from broker.delayed.index_pump import IndexPump
from broker.delayed.memory_tracker import MemoryTracker
from broker.delayed.tracker import ENTRY_AFTER_ALL, Frontier
from broker.model import DueSpan, Int64Column, Position, UInt32Column
from broker.storage.amendments import Amendments
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim


class SlowLog:
    """Ledgers of one row each, whose times are read from a disk that answers when it is told to."""

    def __init__(self) -> None:
        self.times: list[int] = []  # of ledgers 1, 2, 3 and so on
        self.answers: dict[int, asyncio.Event] = {}

    def append(self, time_ms: int) -> int:
        self.times.append(time_ms)
        self.answers[len(self.times)] = asyncio.Event()
        return len(self.times)

    @property
    def begin(self) -> Position:
        return Position(1, 0)

    @property
    def end(self) -> Position:
        return Position(len(self.times), 1) if self.times else Position(0, 0)

    @property
    def amendments(self) -> dict[int, Amendments]:
        return {}

    def entry_count(self, ledger_id: int) -> int | None:
        return 1 if 0 < ledger_id <= len(self.times) else None

    def next_ledger_id(self, ledger_id: int) -> int | None:
        return ledger_id + 1 if ledger_id < len(self.times) else None

    def times_nowait(self, ledger_id: int, first: int, count: int) -> Int64Column | None:
        return None

    async def read_times(self, ledger_id: int, first: int, count: int) -> Int64Column:
        await self.answers[ledger_id].wait()
        return np.array([self.times[ledger_id - 1]], dtype=np.int64)


def test_rows_that_can_wait_do_not_hold_up_one_that_is_due_soon_and_lies_before_them():
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        log = SlowLog()
        came: dict[int, int] = {}

        def on_due(chunk: DueRows) -> None:
            came.update((ledger_id, clock.now_ms()) for ledger_id in chunk.ledger_ids.tolist())

        async def times_of(ledger_id: int, entry_ids: UInt32Column) -> Int64Column:
            return np.full(len(entry_ids), log.times[ledger_id - 1], dtype=np.int64)

        tracker = MemoryTracker(times_of, Frontier(clock.now_ms(), *ENTRY_AFTER_ALL), tick_ms=1)
        pump = IndexPump(
            log,
            tracker,
            clock=clock,
            clock_recheck_ms=60_000,
            due_entries=10,
            on_due=on_due,
            on_rebuild=lambda: None,
        )
        running = asyncio.create_task(pump.run())
        due_ms = clock.now_ms() + 100
        for _ in range(3):
            pump.appended(DueSpan(1, log.times[log.append(due_ms) - 1], due_ms))
        await asyncio.sleep(0.01)
        log.answers[1].set()
        await asyncio.sleep(0.01)  # it is at the second ledger now
        log.append(0)
        pump.appended_undelayed()
        for answer in log.answers.values():
            answer.set()
        await asyncio.sleep(1)
        assert came == dict.fromkeys((1, 2, 3), due_ms)
        running.cancel()

    run_sim(scenario, seed=1)


def test_what_is_due_does_not_wait_for_a_load_of_what_is_due_later():
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        log = SlowLog()
        came: list[int] = []
        loading = asyncio.Event()

        async def times_of(ledger_id: int, entry_ids: UInt32Column) -> Int64Column:
            return np.full(len(entry_ids), log.times[ledger_id - 1], dtype=np.int64)

        due_ms = clock.now_ms() + 1_000

        class SlowTracker(MemoryTracker):
            """From the moment when the message is due, more is to be read, from a disk that does not answer."""

            def needs_load(self, now_ms: int) -> bool:
                return now_ms >= due_ms or super().needs_load(now_ms)

            async def load(self, now_ms: int) -> None:
                if now_ms >= due_ms:
                    loading.set()
                    await asyncio.Event().wait()
                await super().load(now_ms)

        pump = IndexPump(
            log,
            SlowTracker(times_of, Frontier(clock.now_ms(), *ENTRY_AFTER_ALL), tick_ms=1),
            clock=clock,
            clock_recheck_ms=60_000,
            due_entries=10,
            on_due=lambda chunk: came.extend([clock.now_ms()] * len(chunk)),
            on_rebuild=lambda: None,
        )
        running = asyncio.create_task(pump.run())
        log.answers[log.append(due_ms)].set()
        pump.appended(DueSpan(1, due_ms, due_ms))
        await loading.wait()
        assert came == [due_ms]
        running.cancel()

    run_sim(scenario, seed=1)
