"""A tracker, its upkeep and its threads as the broker puts them together, and a stand-in for its checkpoints."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.client.control import check
from benchmarks.index.entries import NOW_MS
from benchmarks.index.files import CountingStorage
from broker.delayed.bucket_tracker import BucketTracker
from broker.delayed.bucket_upkeep import BucketUpkeep
from broker.delayed.bucket_values import BucketImage
from broker.delayed.segment_cache import SegmentCache
from broker.delayed.tracker import ENTRY_AFTER_ALL, Frontier
from broker.model import START, Position
from broker.runtime.process_upkeep import THREAD_SWITCH_SECONDS

_LOOKED_BYTES = 8 << 20  # the broker's
_CHECKPOINT_SECONDS = 1.0
_LAG_SECONDS = 0.005


class StandingClock:
    """The wall clock stands still; the other one runs."""

    def __init__(self) -> None:
        self.at_ms = NOW_MS

    def now_ms(self) -> int:
        return self.at_ms

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()


class Engine:
    """See the module's description. Used within a running loop."""

    def __init__(self, folder: Path, found: BucketImage | None = None) -> None:
        self._folder = folder
        self.buckets_folder = folder / "buckets"
        self.buckets_folder.mkdir(parents=True, exist_ok=True)
        self.clock = StandingClock()
        self.storage = CountingStorage(self.buckets_folder, ThreadPoolExecutor(1))
        frontier = Frontier(NOW_MS, *ENTRY_AFTER_ALL)
        self.tracker = BucketTracker(
            self.storage, frontier, executor=ThreadPoolExecutor(1), looked=SegmentCache(_LOOKED_BYTES)
        )
        self.upkeep = BucketUpkeep(
            self.tracker,
            self.storage,
            found or BucketImage((), START, 0, NOW_MS, 1, ()),
            spawn=self._spawn,
            prepare_folders=_nothing,
            changed=lambda: None,
            clock=self.clock,
            note=self._note,
        )
        self.seconds = {"seal": 0.0, "merge": 0.0, "load": 0.0}
        self.lag_max_ms = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: list[str] = []

    @property
    def is_busy(self) -> bool:
        """Return whether a seal or a merge is under way."""
        self.check_failures()
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            task.result()
        return bool(self._tasks)

    def check_failures(self) -> None:
        check(not self._failures, f"failed: {self._failures[:1]}")

    async def settle(self, end: Position) -> None:
        """Seal what is left before `end`, and merge until nothing is left to merge."""
        while True:
            self.upkeep.look(self.clock.now_ms())
            if self.is_busy:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            elif self.tracker.buckets.image().indexed_through != end:
                check(await self.tracker.buckets.seal(), "the last seal failed")
            elif not self.tracker.buckets.needs_merge(self.clock.now_ms()):
                break
        await self.checkpoint()

    async def checkpoint(self) -> None:
        """Make the image durable, and remove what it does not name any more."""
        image = self.upkeep.image()
        await asyncio.get_running_loop().run_in_executor(None, write_image, self._folder, image)
        await self.upkeep.remove_deleted(image)

    async def checkpoint_always(self) -> None:
        while True:
            await asyncio.sleep(_CHECKPOINT_SECONDS)
            await self.checkpoint()

    async def probe_lag(self) -> None:
        """Measure how much later than asked the loop calls back."""
        while True:
            asked = time.perf_counter() + _LAG_SECONDS
            await asyncio.sleep(_LAG_SECONDS)
            self.lag_max_ms = max(self.lag_max_ms, (time.perf_counter() - asked) * 1000)

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        return task

    def _note(self, operation: str, seconds: float, *, failed: bool) -> None:
        self.seconds[operation] += seconds
        if failed:
            self._failures.append(operation)


def prepare_process() -> None:
    """As a broker does before its threads begin."""
    sys.setswitchinterval(THREAD_SWITCH_SECONDS)


def write_image(folder: Path, image: BucketImage) -> None:
    path = folder / "image.json"
    with open(path.with_suffix(".new"), "w") as file:
        json.dump(asdict(image), file)
        file.flush()
        os.fdatasync(file.fileno())
    path.with_suffix(".new").replace(path)


def read_image(folder: Path) -> BucketImage:
    found = json.loads((folder / "image.json").read_text())
    position = Position(*found.pop("indexed_through"))
    bucket_ids, deleted_ids = tuple(found.pop("bucket_ids")), tuple(found.pop("deleted_ids"))
    return BucketImage(indexed_through=position, bucket_ids=bucket_ids, deleted_ids=deleted_ids, **found)


def memory_bytes() -> dict[str, int]:
    """Resident memory of this process, now and at most."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM", "RssAnon", "RssFile"):
            found[name] = int(value.split()[0]) * 1024
    return found


async def _nothing() -> None:
    pass
