"""Looks at what is pending: pages of messages and counts, over an index and ledgers that were just filled."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from benchmarks.client.control import check, phase
from benchmarks.index.engine import Engine
from benchmarks.index.entries import NOW_MS, blocks
from benchmarks.index.files import TOPIC_ID
from benchmarks.index.load import Filler
from broker.model import FLAG_DELAYED, ROW
from broker.runtime.foreground import Foreground
from broker.runtime.vfs import LocalVfs
from broker.storage.blocks import LedgerName
from broker.storage.ledger import Ledger
from broker.storage.ledger_files import OpenFiles
from broker.storage.log import TopicLog
from broker.storage.records import Produced
from broker.topics.schedule_values import DueRange
from broker.topics.scheduled import ScheduledLook

_PAGE = 1_000
_PLACES = 5_000
_HOUR_MS = 3_600_000
_PAYLOAD = b"p" * 100
_KEY = b"order-1234567"


class _Index:
    """Stands for the pump of a topic in which everything is indexed."""

    def __init__(self, engine: Engine) -> None:
        self.tracker = engine.tracker
        self.upkeep = engine.upkeep
        self.rebuilds = 0
        self.is_exact = True

    async def caught_up(self) -> None:
        pass

    async def wait_built(self) -> None:
        pass


async def look(task: dict[str, Any]) -> dict[str, Any]:
    """Fill an index and ledgers with `count` entries, then look at them again and again."""
    folder, count, ledger_entries = Path(task["folder"]), task["count"], task["ledger_entries"]
    engine = Engine(folder)
    check(await engine.upkeep.restore(), "an empty index cannot be restored")
    filler = Filler(engine, task["delay"], count, ledger_entries)
    await filler.run()
    await engine.settle(filler.end)
    with ThreadPoolExecutor(1) as writes, ThreadPoolExecutor(2) as reads:
        log = await _fill_log(folder, task, writes, reads)
        index = _Index(engine)
        seen = ScheduledLook(
            log, lambda: index, engine.clock, lambda position, _: False, Foreground(lambda: False)
        )
        lag = asyncio.create_task(engine.probe_lag())
        await phase("measuring")
        figures = await _pages(seen, task["pages"])
        figures |= await _counts(seen, count, task["pages"])
        figures["pages_lag_ms"], engine.lag_max_ms = engine.lag_max_ms, 0.0
        begin = time.perf_counter()
        check(await seen.count_matching(DueRange(), "") == count, "other entries match")
        figures["matching_s"] = time.perf_counter() - begin
        figures["matching_lag_ms"] = engine.lag_max_ms
        await phase("measured")
        lag.cancel()
        with suppress(asyncio.CancelledError):
            await lag
    return {"count": count, "buckets": engine.tracker.stats().bucket_count, **figures}


async def _pages(seen: ScheduledLook, pages: int) -> dict[str, float]:
    """One page after the other, from the first that is due; places without messages; and pages of one key."""
    everything, key_prefix = DueRange(), _KEY[:5].decode()
    page_ms, cpu_ms, keyed_ms, places_ms = [], [], [], []
    at, last = None, (0, 0, 0)
    for _ in range(pages):
        begin, cpu = time.perf_counter(), time.process_time()
        page = await seen.page(everything, "", at, _PAGE)
        page_ms.append((time.perf_counter() - begin) * 1e3)
        cpu_ms.append((time.process_time() - cpu) * 1e3)
        keys = [(each.deliver_at_ms, *each.position) for each in page.scheduled]
        check(len(keys) == _PAGE and keys == sorted(keys) and keys[0] > last, "a page is out of order")
        at, last = page.next, keys[-1]
        begin = time.perf_counter()
        page = await seen.page(everything, key_prefix, at, _PAGE)
        keyed_ms.append((time.perf_counter() - begin) * 1e3)
        check(len(page.scheduled) == _PAGE, "messages do not match")
        begin = time.perf_counter()
        places = (await seen.next_matching(everything, "", at or last, _PLACES, None)).entries
        places_ms.append((time.perf_counter() - begin) * 1e3)
        check(len(places) == _PLACES, "places are missing")
    return {
        "page_ms": float(np.median(page_ms)),
        "page_cpu_ms": float(np.median(cpu_ms)),
        "page_first_ms": page_ms[0],
        "page_max_ms": max(page_ms[1:], default=0.0),
        "keyed_page_ms": float(np.median(keyed_ms)),
        "places_ms": float(np.median(places_ms)),
    }


async def _counts(seen: ScheduledLook, count: int, times: int) -> dict[str, float]:
    counts_ms = []
    for _ in range(times):
        begin = time.perf_counter()
        counts = await seen.count(DueRange(NOW_MS), _HOUR_MS)
        counts_ms.append((time.perf_counter() - begin) * 1e3)
        check(sum(messages for _, messages in counts.bars) == count, "the bars do not add up")
    return {"count_ms": float(np.median(counts_ms)), "count_max_ms": max(counts_ms), "bars": len(counts.bars)}


async def _fill_log(
    folder: Path, task: dict[str, Any], writes: ThreadPoolExecutor, reads: ThreadPoolExecutor
) -> TopicLog:
    """Ledgers with the rows that the index knows of; every message is the same."""
    ledgers = folder / "ledgers"
    ledgers.mkdir()
    open_files = OpenFiles(LocalVfs())

    def open_ledger(ledger_id: int) -> Ledger:
        return Ledger(LedgerName(str(ledgers), TOPIC_ID, ledger_id, 0), open_files, writes, reads)

    log = TopicLog(open_ledger)
    body = b"\x0a" + bytes([len(_PAYLOAD)]) + _PAYLOAD + b"\x32" + bytes([len(_KEY)]) + _KEY
    frame = b"\x12" + bytes([len(body)]) + body
    for block in blocks(task["delay"], task["count"], task["ledger_entries"]):
        rows = np.zeros(len(block.times), dtype=ROW)
        rows["publish_time_ms"], rows["schedule_hash"], rows["flags"] = NOW_MS, 7, FLAG_DELAYED
        rows["length"], rows["crc"] = len(frame), google_crc32c.value(frame)
        rows["offset"] = block.entry_ids.astype(np.int64) * len(frame)
        first = int(block.entry_ids[0])
        frames = frame * len(rows)
        log.append(Produced(TOPIC_ID, block.ledger_id, first, NOW_MS, block.times, rows, frames))
        last = log.last
        assert last is not None
        await last.flush()
    return log
