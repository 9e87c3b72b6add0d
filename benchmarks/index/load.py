"""Fills an index as the broker's pump does, and says what that cost."""

from __future__ import annotations

import asyncio
import ctypes
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.client.control import check, phase, say
from benchmarks.index.engine import Engine, memory_bytes
from benchmarks.index.entries import BATCH, NOW_MS, Block, blocks, note_minute
from benchmarks.index.files import disk_bytes
from broker.delayed.bucket_tracker import BucketTracker
from broker.delayed.tracker import ENTRY_AFTER_ALL, Frontier
from broker.model import ROW, START, Position
from broker.runs.tally import Tally
from broker.runtime.supervise import YieldBudget

_UNSEALED_MAX = 100_000
"""Entries that may wait for a seal before the loop waits for it, twice what a seal takes. `add` alone is so fast that
without a limit its throughput would be memory that fills, and a few seals of millions."""
_PROGRESS = 10_000_000
_ALONE = 3_000_000


async def load(task: dict[str, Any]) -> dict[str, Any]:
    """Index `count` entries, seal and merge them, wait `wait_seconds`, and say what is held then."""
    count, folder = task["count"], Path(task["folder"])
    engine = Engine(folder)
    check(await engine.upkeep.restore(), "an empty index cannot be restored")
    filler = Filler(engine, task["delay"], count, task["ledger_entries"])
    background = [asyncio.create_task(engine.checkpoint_always()), asyncio.create_task(engine.probe_lag())]
    await asyncio.sleep(0.1)
    empty = memory_bytes()
    await phase("measuring")
    begin, cpu = time.perf_counter(), time.process_time()
    await filler.run()
    filled = time.perf_counter()
    await engine.settle(filler.end)
    settled, cpu = time.perf_counter(), time.process_time() - cpu
    await phase("measured")
    for each in background:
        each.cancel()
        with suppress(asyncio.CancelledError):
            await each
    await asyncio.sleep(task["wait_seconds"])
    loaded, tracker = memory_bytes(), engine.tracker
    check(tracker.count() == count, f"{tracker.count()} entries are held, {count} were added")
    ctypes.CDLL(None).malloc_trim(0)
    trimmed = memory_bytes()  # without what the allocator holds free
    file_bytes, block_bytes = disk_bytes(engine.buckets_folder)
    counters, stats = tracker.buckets.counters, tracker.stats()
    sealed_bytes, merged_bytes = engine.storage.sealed_bytes(), engine.storage.merged_bytes()
    return {
        "count": count,
        "rate": count / (filled - begin),
        "settled_rate": count / (settled - begin),
        "add_beside_rate": count / filler.add_seconds,
        "add_rate": _add_alone(engine, task["delay"], min(count, _ALONE)),
        "cpu_seconds": cpu,
        "settled_s": settled - begin,
        "seal_seconds": engine.seconds["seal"],
        "merge_seconds": engine.seconds["merge"],
        "lag_max_ms": engine.lag_max_ms,
        "unsealed_max": filler.unsealed_max,
        "empty_mb": empty["VmRSS"] / 1e6,
        "added_mb": (loaded["VmRSS"] - empty["VmRSS"]) / 1e6,
        "added_anon_mb": (loaded["RssAnon"] - empty["RssAnon"]) / 1e6,
        "added_file_mb": (loaded["RssFile"] - empty["RssFile"]) / 1e6,
        "trimmed_mb": (trimmed["VmRSS"] - empty["VmRSS"]) / 1e6,
        "peak_mb": (loaded["VmHWM"] - empty["VmRSS"]) / 1e6,
        "index_mb": stats.memory_bytes / 1e6,
        "disk_mb": block_bytes / 1e6,
        "bytes_per_message": block_bytes / count,
        "file_bytes_per_message": file_bytes / count,
        "sealed_bytes_per_message": sealed_bytes / count,
        "times_bytes": 8,
        "rows_bytes": ROW.itemsize,
        "merge_ratio": merged_bytes / sealed_bytes,
        "merged_entries_ratio": counters.merged_entries / count,
        "seals": counters.seals,
        "entries_per_seal": counters.sealed_entries / counters.seals,
        "merges": counters.merges,
        "buckets": stats.bucket_count,
        "minute": [filler.minute.count, filler.minute.checksum],
    }


class Filler:
    """Adds blocks of entries, in batches; every block is one step of the pump."""

    def __init__(self, engine: Engine, delay: str, count: int, ledger_entries: int) -> None:
        self.minute = Tally()  # of what is due within the first minute
        self.add_seconds = 0.0
        self.unsealed_max = 0
        self.end = START
        self._engine = engine
        self._blocks = blocks(delay, count, ledger_entries)
        self._count = count
        self._added = 0

    async def run(self) -> None:
        engine, tracker = self._engine, self._engine.tracker
        budget = YieldBudget(engine.clock)
        begin = time.perf_counter()
        for block in self._blocks:
            self._add(tracker, block)
            now_ms = engine.clock.now_ms()
            engine.upkeep.look(now_ms)
            while tracker.needs_load(now_ms):
                await engine.upkeep.load(now_ms)
            check(tracker.take_due(now_ms, 65_536) is None, "an entry is early")
            await budget.spent()
            while self._unsealed() > _UNSEALED_MAX:
                await asyncio.sleep(0.002)
                engine.upkeep.look(now_ms)
            engine.check_failures()
            if self._added % _PROGRESS < len(block.times):
                self._say_progress(time.perf_counter() - begin)

    def _add(self, tracker: BucketTracker, block: Block) -> None:
        begin = time.perf_counter()
        _add_block(tracker, block)
        self.add_seconds += time.perf_counter() - begin
        self.end = Position(block.ledger_id, int(block.entry_ids[-1]) + 1)
        tracker.buckets.passed(self.end)
        self._added += len(block.times)
        note_minute(self.minute, block)

    def _unsealed(self) -> int:
        unsealed = self._added - self._engine.tracker.buckets.counters.sealed_entries
        self.unsealed_max = max(self.unsealed_max, unsealed)
        return unsealed

    def _say_progress(self, seconds: float) -> None:
        stats, engine = self._engine.tracker.stats(), self._engine
        say(
            {
                "progress": f"{self._added:,} of {self._count:,} entries, {self._added / seconds:,.0f}/s, "
                f"{stats.bucket_count} buckets, {stats.disk_bytes / 1e6:,.0f} MB on disk, "
                f"{memory_bytes()['VmRSS'] / 1e6:.0f} MB resident, "
                f"merged {engine.tracker.buckets.counters.merged_entries / self._added:.2f} times"
            }
        )


def _add_block(tracker: BucketTracker, block: Block) -> None:
    for first in range(0, len(block.times), BATCH):
        rows = slice(first, first + BATCH)
        tracker.add(block.ledger_id, block.entry_ids[rows], block.times[rows])


def _add_alone(engine: Engine, delay: str, count: int) -> float:
    """Entries a second of `add` with nothing beside it; what it fills is thrown away a million at a time."""
    seconds, ledger_entries = 0.0, 1_000_000
    for block in blocks(delay, count, ledger_entries):
        if not block.entry_ids[0]:
            frontier = Frontier(NOW_MS, *ENTRY_AFTER_ALL)
            tracker = BucketTracker(engine.storage, frontier)
        begin = time.perf_counter()
        _add_block(tracker, block)
        seconds += time.perf_counter() - begin
    return count / seconds
