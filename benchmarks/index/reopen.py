"""Opens an index that another process left behind, and takes what is due in its first minute."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.client.control import check
from benchmarks.index.engine import Engine, memory_bytes, read_image
from benchmarks.index.entries import MINUTE_MS, NOW_MS
from broker.delayed.due_rows import DueRows
from broker.runs.tally import Tally

_DUE_ENTRIES = 65_536


async def reopen(task: dict[str, Any]) -> dict[str, Any]:
    """`started` is the monotonic time just before this process began; `minute` what has to come."""
    folder = Path(task["folder"])
    began = time.monotonic()
    engine = Engine(folder, read_image(folder))
    check(await engine.upkeep.restore(), "the buckets cannot be used")
    restored = time.monotonic()
    tracker, minute = engine.tracker, Tally()
    check(tracker.count() == task["count"], f"{tracker.count()} entries are held, expected {task['count']}")
    now_ms, first_at, last_ms, loads = NOW_MS + MINUTE_MS, 0.0, 0, 0
    while True:
        while tracker.needs_load(now_ms):
            await engine.upkeep.load(now_ms)
            loads += 1
        chunk = tracker.take_due(now_ms, _DUE_ENTRIES)
        if chunk is None:
            break
        first_at = first_at or time.monotonic()
        last_ms = _check_order(chunk, last_ms)
        minute.add(chunk.deliver_at_ms, chunk.ledger_ids, chunk.entry_ids)
    ended = time.monotonic()
    count, checksum = task["minute"]
    check(
        (minute.count, minute.checksum) == (count, checksum),
        f"{minute.count} entries came in the first minute, expected {count}, or they were others",
    )
    return {
        "first_s": (first_at or ended) - task["started"],
        "began_s": began - task["started"],
        "restore_s": restored - began,
        "minute_s": ended - task["started"],
        "minute_count": minute.count,
        "loads": loads,
        "resident_mb": memory_bytes()["VmRSS"] / 1e6,
    }


def _check_order(chunk: DueRows, last_ms: int) -> int:
    check(int(chunk.deliver_at_ms[0]) >= last_ms, "chunks are out of order")
    check(not np.any(np.diff(chunk.deliver_at_ms) < 0), "a chunk is out of order")
    return int(chunk.deliver_at_ms[-1])
