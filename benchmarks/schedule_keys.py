"""The lookup of schedule keys at scale: what a look, a batch and a message cost. In process, on local files.

    python -m benchmarks.schedule_keys --count 10000000 --folder /tmp/keys

Keys are random and all pending, in batches of 1,000, as the largest producers send them. They are added as fast as
they are sealed, with the merges that come of it; then looked for one by one and in batches, before and after a
restart. `_cpu` is the process's own time: on a machine that does other work as well, the other figures say more of
that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.arguments import at_least_one, writable_folder
from broker.delayed.key_cache import KeyCache
from broker.delayed.schedule_keys import KeyImage, ScheduleKeys
from broker.model import Position, UInt32Column, UInt64Column
from broker.runtime.vfs import LocalVfs
from broker.storage.key_filter import BoolColumn, Probe
from broker.storage.key_run_files import key_storage

BATCH = 1_000
LEDGER_ENTRIES = 1_000_000
TOPIC_ID = 1

Figures = dict[str, float]
Times = tuple[float, float]


async def _all_pending(ledger_id: int, entry_ids: UInt32Column) -> BoolColumn:
    return np.ones(len(entry_ids), dtype=np.bool_)


class Bench:
    """A lookup of `count` keys in a folder."""

    def __init__(self, folder: str, count: int, cache_bytes: int) -> None:
        self.folder = folder
        self.count = count
        self.rng = np.random.default_rng(7)
        self.figures: Figures = {}
        self._cache_bytes = cache_bytes
        self._reads = ThreadPoolExecutor(2)
        self._writes = ThreadPoolExecutor(1)
        self._samples: list[UInt64Column] = []

    def open(self, image: KeyImage) -> ScheduleKeys:
        runs = key_storage(LocalVfs(), self.folder, TOPIC_ID, self._reads)
        cache = KeyCache(self._cache_bytes)
        return ScheduleKeys(runs, cache, _all_pending, image, now_ms=lambda: 1, executor=self._writes)

    def close(self) -> None:
        self._reads.shutdown()
        self._writes.shutdown()

    async def run(self) -> Figures:
        keys = self.open(KeyImage())
        await keys.restore()
        await self._fill(keys)
        await self._look(keys, "")
        keys = self.open(keys.image())
        started = time.perf_counter()
        await keys.restore()
        self.figures["restore_ms"] = (time.perf_counter() - started) * 1e3
        started = time.perf_counter()
        await keys.find(self._new())
        self.figures["first_batch_after_restart_ms"] = (time.perf_counter() - started) * 1e3
        await self._look(keys, "restarted_")
        return self.figures

    async def _fill(self, keys: ScheduleKeys) -> None:
        adds: list[Times] = []
        merge: asyncio.Task[bool] | None = None
        merge_seconds = seal_seconds = 0.0
        started = time.perf_counter()
        for first in range(0, self.count, BATCH):
            ledger_id, entry_id = first // LEDGER_ENTRIES + 1, first % LEDGER_ENTRIES
            hashes = self._new()
            if first % (100 * BATCH) == 0:
                self._samples.append(hashes)
            entry_ids = np.arange(entry_id, entry_id + BATCH, dtype=np.uint32)
            at = Stopwatch()
            keys.add(ledger_id, entry_ids, hashes)
            adds.append(at.passed())
            keys.passed(Position(ledger_id, entry_id + BATCH))
            if keys.needs_seal(0):
                at = Stopwatch()
                await keys.seal()
                seal_seconds += at.passed()[0]
            if (merge is None or merge.done()) and keys.needs_merge(0):
                merge = asyncio.create_task(keys.merge())
            if first % (50 * BATCH) == 0:
                await keys.remove_deleted(keys.image())
        while keys.needs_merge(0) or merge is not None:
            at = Stopwatch()
            await (merge if merge is not None else keys.merge())
            merge_seconds += at.passed()[0]
            merge = None
        await keys.remove_deleted(keys.image())
        stats = keys.stats()
        self.figures |= {
            "fill_keys_per_second": self.count / (time.perf_counter() - started),
            "seal_ms": seal_seconds / max(keys.counters.seals, 1) * 1e3,
            "seals": keys.counters.seals,
            "merges": keys.counters.merges,
            "failures": keys.counters.seal_failures + keys.counters.merge_failures,
            "last_merges_seconds": merge_seconds,
            "runs": stats.runs,
            "disk_bytes_per_key": stats.disk_bytes / self.count,
            "folder_bytes_per_key": self._folder_bytes() / self.count,
            "memory_bytes": stats.memory_bytes,
        }
        self._note("add_1000", adds)

    async def _look(self, keys: ScheduleKeys, name: str) -> None:
        looks: list[Times] = []
        for _ in range(500):
            hashes = self._new()
            at = Stopwatch()
            keys.maybe(Probe(hashes))
            looks.append(at.passed())
        self._note(f"{name}maybe_1000_new", looks)
        known = np.concatenate(self._samples)
        finds: list[Times] = []
        for value in self.rng.choice(known, 3_000):
            one = np.array([value], dtype=np.uint64)
            at = Stopwatch()
            found = await keys.find(one)
            finds.append(at.passed())
            assert int(value) in found
        self._note(f"{name}find_one", finds)
        before, passed = keys.lookup.block_reads, 0
        misses: list[Times] = []
        for _ in range(100):
            hashes = self._new()
            at = Stopwatch()
            hashes = hashes[keys.maybe(Probe(hashes))]
            await keys.find(hashes)
            misses.append(at.passed())
            passed += len(hashes)
        self._note(f"{name}check_1000_new", misses)
        self.figures[f"{name}false_positives_per_1000"] = passed / 100
        self.figures[f"{name}blocks_read_per_1000"] = (keys.lookup.block_reads - before) / 100
        hits: list[Times] = []
        for sample in self._samples[:50]:
            at = Stopwatch()
            assert len(await keys.find(sample)) == BATCH
            hits.append(at.passed())
        self._note(f"{name}find_1000_known", hits)

    def _folder_bytes(self) -> int:
        return sum(path.stat().st_size for path in Path(self.folder).iterdir())

    def _new(self) -> UInt64Column:
        return self.rng.integers(1, 1 << 64, BATCH, dtype=np.uint64)

    def _note(self, name: str, times: list[Times]) -> None:
        for kind, seconds in zip(("", "_cpu"), zip(*times, strict=True), strict=True):
            for part in (50, 99):
                self.figures[f"{name}{kind}_p{part}_ms"] = float(np.percentile(seconds, part)) * 1e3


class Stopwatch:
    """Runs from the moment it is made."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def passed(self) -> Times:
        """Seconds that passed, and those that this process worked."""
        return time.perf_counter() - self._began[0], time.process_time() - self._began[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=at_least_one, default=10_000_000)
    parser.add_argument("--cache-mib", type=at_least_one, default=256)
    parser.add_argument(
        "--folder", type=writable_folder, help="where to make a folder for the runs, removed at the end"
    )
    arguments = parser.parse_args()
    folder = tempfile.mkdtemp(dir=arguments.folder)
    bench = Bench(folder, arguments.count, arguments.cache_mib << 20)
    try:
        figures = asyncio.run(bench.run())
    finally:
        bench.close()
        shutil.rmtree(folder)
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}, indent=1))


if __name__ == "__main__":
    main()
