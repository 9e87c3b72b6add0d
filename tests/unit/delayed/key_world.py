"""A topic's rows with schedule keys, and the lookup over them: what tests of schedule keys share."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from broker.delayed.key_cache import KeyCache
from broker.delayed.schedule_keys import KeyImage, KeyLimits, ScheduleKeys
from broker.model import START, Position, UInt32Column, UInt64Column
from broker.storage.key_filter import BoolColumn, Probe
from broker.storage.key_run_files import key_storage
from broker.testing.mem_vfs import MemVfs
from tests.run_files import run_ids
from tests.unit.storage.held_executor import HeldExecutor
from tests.unit.storage.key_entries import FOLDER, TOPIC_ID, disk
from tests.unit.storage.key_entries import storage_of as storage_over

LIMITS = KeyLimits(seal_count=4, seal_after_ms=60_000, max_runs=3)
LEDGER_ENTRIES = 50


def column(hashes: Iterable[int]) -> UInt64Column:
    return np.array(list(hashes), dtype=np.uint64)


@dataclass
class Log:
    """The rows of a topic, and which messages are pending. The model: one dict and one set."""

    hash_of: dict[Position, int] = field(default_factory=dict)  # 0: no key
    pending: set[Position] = field(default_factory=set)
    end: Position = Position(1, 0)

    def append(self, hashes: Iterable[int]) -> list[tuple[Position, int]]:
        rows = []
        for value in hashes:
            if self.end.entry_id == LEDGER_ENTRIES:
                self.end = Position(self.end.ledger_id + 1, 0)
            rows.append((self.end, value))
            self.hash_of[self.end] = value
            if value:
                self.pending.add(self.end)
            self.end = Position(self.end.ledger_id, self.end.entry_id + 1)
        return rows

    def rows_from(self, position: Position) -> list[tuple[Position, int]]:
        return [(row, value) for row, value in self.hash_of.items() if row >= position]

    def owed(self, value: int) -> list[Position]:
        """Return the pending entries with a hash, newest first."""
        return sorted((row for row in self.pending if self.hash_of[row] == value), reverse=True)

    async def still_pending(self, ledger_id: int, entry_ids: UInt32Column) -> BoolColumn:
        assert (np.diff(entry_ids.astype(np.int64)) > 0).all(), "entry ids rise"
        rows = (Position(ledger_id, entry_id) for entry_id in entry_ids.tolist())
        return np.fromiter((row in self.pending for row in rows), np.bool_, len(entry_ids))


class Topic:
    """A log, a disk, and the lookup as of the last restart."""

    def __init__(
        self,
        *,
        vfs: MemVfs | None = None,
        log: Log | None = None,
        image: KeyImage | None = None,
        executor: Executor | None = None,
        cache_bytes: int = 1 << 20,
        limits: KeyLimits = LIMITS,
    ) -> None:
        self.vfs = vfs or disk()
        self.log = log or Log()
        self.manifest = image or KeyImage()
        self.executor = executor or HeldExecutor()
        self.limits = limits
        self.cache_bytes = cache_bytes
        self.now_ms = 1_000_000
        self.open()

    def open(self) -> None:
        """A new process, as the manifest says."""
        self.cache = KeyCache(self.cache_bytes)
        self.storage = key_storage(self.vfs, FOLDER, TOPIC_ID, self.executor)
        self.keys = ScheduleKeys(
            self.storage,
            self.cache,
            self.log.still_pending,
            self.manifest,
            now_ms=lambda: self.now_ms,
            executor=self.executor,
            limits=self.limits,
        )

    async def started(self) -> Topic:
        """Recovery: remove what nobody names, take up the runs, add the rows after them."""
        plain = storage_over(self.vfs)
        for run_id in run_ids(self.vfs, FOLDER):
            if run_id not in self.manifest.run_ids:
                await plain.delete(run_id)
        await self.keys.restore()
        self.add_from(self.manifest.keys_through)
        return self

    def produce(self, hashes: Iterable[int]) -> list[Position]:
        rows = self.log.append(hashes)
        self._add(rows)
        return [row for row, _ in rows]

    def add_from(self, position: Position) -> None:
        self._add(self.log.rows_from(position))

    def rebuild(self) -> None:
        self.keys.clear()
        self.add_from(START)

    def cancel(self, rows: Iterable[Position]) -> None:
        """They are not pending any more, and the lookup is told."""
        for row in rows:
            self.log.pending.discard(row)
            value = self.log.hash_of[row]
            if value:
                self.keys.discard(row.ledger_id, np.array([row.entry_id], np.uint32), column([value]))

    def fall_due(self, rows: Iterable[Position]) -> None:
        """They are not pending any more, and nobody says so."""
        self.log.pending.difference_update(rows)

    async def checkpoint(self) -> None:
        self.manifest = self.keys.image()
        await self.keys.remove_deleted(self.manifest)

    async def check(self, values: Iterable[int]) -> None:
        """Check that all pending entries are found and nothing that never was, newest first (KEYS-1 to KEYS-3)."""
        wanted = list(values)
        found = await self.keys.find(column(wanted))
        mask = self.keys.maybe(Probe(column(wanted)))  # no await after `find`, so both speak of one moment
        self.check_found(wanted, found)
        for value, may in zip(wanted, mask.tolist(), strict=True):
            assert may or not self.log.owed(value), f"{value} is owed, and may not be there"

    def check_found(self, wanted: Iterable[int], found: dict[int, list[Position]]) -> None:
        assert found.keys() <= set(wanted)
        for value in wanted:
            rows = found.get(value, [])
            missing = set(self.log.owed(value)) - set(rows)
            assert not missing, f"{value} is not found at {missing}"
            assert all(self.log.hash_of.get(row) == value for row in rows), f"{value} was never at {rows}"
            assert rows == sorted(set(rows), reverse=True)

    @property
    def values(self) -> list[int]:
        """Every hash that was ever there."""
        return sorted(set(self.log.hash_of.values()) - {0})

    @property
    def files(self) -> set[str]:
        return set(self.vfs.snapshot())

    def _add(self, rows: list[tuple[Position, int]]) -> None:
        for ledger_id, group in groupby(rows, key=lambda pair: pair[0].ledger_id):
            here = [(row.entry_id, value) for row, value in group if value]
            entry_ids = np.array([entry_id for entry_id, _ in here], dtype=np.uint32)
            self.keys.add(ledger_id, entry_ids, column(value for _, value in here))
        if rows:
            last = rows[-1][0]
            self.keys.passed(Position(last.ledger_id, last.entry_id + 1))
