"""Leases for the tests of compaction on engines: what a job gets, without the desk that gave it."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

from broker.jobs.compact import CompactRequest, Tell, TopicResult, run_compact
from broker.jobs.compact_offline import open_offline
from broker.jobs.compact_plan import CompactLimits
from broker.jobs.engine import Engine
from broker.jobs.rewrite import BUCKETS, REWRITE, RewriteResult, RewriteUnit
from broker.runtime.clock import SystemClock
from broker.runtime.vfs import LocalVfs
from tests.jobs.folders import write_pinned_folder

EAGER = CompactLimits(live_ratio_max=0.9, reclaim_bytes_min=0)


@dataclass(frozen=True, slots=True)
class Leased:
    """A folder of a broker that went away, and what a job was to do there."""

    data_dir: Path
    inputs: Path
    ledger_ids: tuple[int, ...]

    def copy(self, name: str) -> Path:
        """The folder of one more lease about the same."""
        folder = self.data_dir / "staging" / name
        folder.mkdir(parents=True)
        shutil.copy(self.inputs, folder / "inputs")
        return folder

    def units(self, folder: Path) -> list[RewriteUnit]:
        ids = (*self.ledger_ids, BUCKETS)
        return [RewriteUnit(str(self.data_dir), str(folder), ledger_id, 10) for ledger_id in ids]


def lease_all(path: Path) -> Leased:
    """A topic that is worth compacting, all of it leased."""
    write_pinned_folder(path / "data")

    async def begin() -> tuple[int, ...]:
        async with open_offline(LocalVfs(), SystemClock(), str(path / "data")) as desk:
            found = await desk.candidates("orders-0")
            ledger_ids = tuple(each.ledger_id for each in found.ledgers)
            lease = await desk.begin("orders-0", ledger_ids, [each.bucket_id for each in found.buckets])
            shutil.copy(path / "data" / lease.folder / "inputs", path / "inputs")
            return ledger_ids

    return Leased(path / "data", path / "inputs", asyncio.run(begin()))


def run_all(engine: Engine, units: list[RewriteUnit]) -> list[RewriteResult]:
    engine.start()
    try:
        results = [each for some in engine.run(REWRITE, units, lambda done, total: None) for each in some]
    finally:
        engine.stop()
    return sorted(results, key=lambda each: each.ledger_id)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def compact_offline(data_dir: Path, engine: Engine) -> list[TopicResult]:
    """A whole run."""

    async def run() -> list[TopicResult]:
        async with open_offline(LocalVfs(), SystemClock(), str(data_dir)) as desk:
            return await run_compact(desk, engine, CompactRequest(apply=True, limits=EAGER), Tell())

    return asyncio.run(run())
