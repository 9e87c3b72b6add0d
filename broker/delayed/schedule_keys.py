"""Lookup of schedule keys: from a key's hash to positions.

Entries come from the rows, in the order of the log; what was added last is in memory, the rest in sorted runs on
disk. Runs merge in tiers, as buckets do. What a seal or merge leaves out is remembered elsewhere (`settled_keys`). The
lookup only says where to look: it may name entries that are due,
cancelled or gone, and entries of another key with the same hash. The caller decides which are pending, and reads the
key. So it may be built again from the rows at any time.

Belongs to the event loop; threads read and write runs.

Invariants:
  KEYS-1  Every entry that was added and is pending is found: in memory, or in a run. Both change in one step without
      await, and the files of a run stay until a manifest that does not name it is durable.
  KEYS-2  `find` leaves out nothing of KEYS-1 at the moment it returns: what was added or moved while it read is in it.
  KEYS-3  `maybe` is False only where `find` would find nothing, and no batch in flight has the hash. A filter that is
      not in memory makes it True.
  KEYS-4  `keys_through` is the end of what is in runs, or of what was added if nothing is left in memory.
  KEYS-5  After `clear` nothing that was under way changes anything.
  KEYS-6  A seal or merge that fails leaves everything as it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from broker.delayed.key_cache import KeyCache
from broker.delayed.key_runs import KeyRun, KeyRuns
from broker.delayed.key_writer import KeyWriter, Standings
from broker.delayed.keys_in_flight import KeysInFlight
from broker.delayed.recent_keys import RecentKeys
from broker.delayed.settled_keys import SettledKeys
from broker.errors import PostdateError
from broker.model import (
    START,
    Entries,
    Int64Column,
    Position,
    UInt32Column,
    UInt64Column,
    distinct_values,
    ids_of,
)
from broker.observe.logs import get_logger
from broker.runs.gathered import Gathered
from broker.runs.merging import plan_merge
from broker.runs.upkeep import RunCounters, RunFiles, RunWork, counters_of
from broker.storage.key_filter import BoolColumn, KeyFilter, Probe
from broker.storage.key_run import KeyColumns, KeyRunHeader, KeyRunKind, join_keys
from broker.storage.key_run_files import KeyRunReader, KeyStorage

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Thresholds of seals, and the number of runs to keep; may be replaced at any time."""

    seal_count: int = 50_000  # entries that are sealed together, and the unit of the size classes
    seal_after_ms: int = 60_000  # a seal at the latest when the first entry has waited so long
    max_runs: int = 64
    settled_keep_ms: int = 0  # how long settled keys are remembered; 0: not at all
    settled_max: int = 1_000_000  # rows that are remembered of a topic


@dataclass(frozen=True, slots=True)
class KeyImage:
    """Key runs in a manifest, all of one moment."""

    run_ids: tuple[
        int, ...
    ] = ()  # in the order in which they were written, or their sources were; settled ones last
    next_run_id: int = 1
    keys_through: Position = START  # rows from here on are to be added again
    deleted_ids: tuple[int, ...] = ()
    """Not in the manifest: files to remove once one with this image is durable."""
    settled_version: int = 0
    """Not in the manifest: what was remembered when this was taken; see `SettledKeys.version`."""


@dataclass(frozen=True, slots=True)
class KeyStats:
    """Statistics of one topic. `entries` counts what is due, cancelled or gone until a merge leaves it out; runs
    and bytes also those of settled keys."""

    runs: int
    entries: int
    disk_bytes: int
    memory_bytes: int
    settled: int = 0  # entries that are remembered


class ScheduleKeys:
    """See the module's description. One for each topic; `cache` is shared by all."""

    def __init__(
        self,
        storage: KeyStorage,
        cache: KeyCache,
        standings: Standings,
        image: KeyImage,
        *,
        now_ms: Callable[[], int],
        executor: Executor | None = None,
        limits: KeyLimits | None = None,
    ) -> None:
        """`image`: what the manifest says; `restore` takes it up. `executor`: where runs are written."""
        self.limits = limits or KeyLimits()
        self._files = RunFiles(storage, image.next_run_id)
        self._seals = RunWork(self._files, "Schedule keys could not be sealed and stay in memory")
        self._merges = RunWork(self._files, "Key runs could not be merged and stay as they are")
        self.lookup = KeyRuns(self._files, cache)
        self.settled = SettledKeys(
            self.lookup,
            executor,
            now_ms,
            keep_ms=self.limits.settled_keep_ms,
            rows_max=self.limits.settled_max,
        )
        note = self.settled.note if self.settled.remembers else None
        self._writer = KeyWriter(storage, executor, standings, note)
        self._image: KeyImage | None = image
        self.in_flight = KeysInFlight()
        self._memory = Gathered(partial(RecentKeys, self.in_flight), START)  # its marks are positions
        self._runs: list[KeyRun] = []
        self._generation = 0

    @property
    def counters(self) -> RunCounters:
        return counters_of(self._seals, self._merges)

    # What the topic needs.

    def expect(self, first: Position, wanted: Probe, durable: asyncio.Future[None]) -> None:
        """A batch with some hashes is submitted, whose rows are added before `durable` is done. Its new messages begin
        at `first`."""
        self._memory.recent.expect(wanted)
        self.in_flight.add(first, wanted.hashes, durable)

    def in_flight_with(self, hashes: UInt64Column) -> asyncio.Future[None] | None:
        """Return what makes a batch durable that is in flight with one of some hashes; None: no batch is."""
        if not len(hashes):  # nearly always so
            return None
        return self.in_flight.of(hashes[self._memory.recent.maybe(Probe(hashes))])

    def add(
        self, ledger_id: int, entry_ids: UInt32Column, hashes: UInt64Column, *, is_expected: bool = False
    ) -> None:
        """Rows with a key were stored, or are read again. No hash is 0. What is added twice is found once.

        `is_expected`: they are of a batch in flight.
        """
        if len(hashes):
            rows = hashes, _column(ledger_id, len(hashes)), entry_ids
            self._memory.recent.add(*rows, is_expected=is_expected)

    def discard(self, ledger_id: int, entry_ids: UInt32Column, hashes: UInt64Column) -> None:
        """Entries were cancelled or replaced: not found any more, as far as they are still in memory."""
        for recent in self._memory.parts():
            recent.discard(hashes, _column(ledger_id, len(hashes)), entry_ids)

    def discard_among(self, hashes: UInt64Column, cancelled: Entries) -> None:
        """Of the entries with some hashes, those in a set were replaced; as `discard`."""
        for ledger_id, bitmap in cancelled.items():
            for recent in self._memory.parts():
                recent.discard(hashes, _column(ledger_id, len(bitmap)), ids_of(bitmap))

    def passed(self, position: Position) -> None:
        """Every row before `position` was added. While rows are added again after `clear`, their reader alone knows:
        new rows are added as ever, but what lies before them may still be missing."""
        self._memory.mark = position

    def maybe(self, wanted: Probe) -> BoolColumn:
        """For each hash whether an entry or a batch in flight may have it; False is certain (KEYS-3). Reads nothing."""
        assert self._image is None, "not restored yet"
        mask = np.zeros(len(wanted.hashes), dtype=np.bool_)
        for recent in self._memory.parts():
            mask |= recent.maybe(wanted)
        for run in self._runs:
            key_filter = self.lookup.cache.filter_of(self.lookup.topic_id, run.run_id)
            if key_filter is None:
                mask[:] = True
                break
            mask |= key_filter.maybe(wanted)
        return mask

    async def find(self, hashes: UInt64Column) -> dict[int, list[Position]]:
        """The entries with one of some hashes, newest first; hashes without any are left out (KEYS-2).

        Raises Corrupt if a run is damaged (`clear`, and build it again), Unavailable if the disk does not read.
        """
        assert self._image is None, "not restored yet"
        wanted = Probe(distinct_values(hashes))
        in_runs = await self.lookup.look_all(lambda: self._runs, wanted, self.lookup.look)
        # No await from here on: what was sealed or merged meanwhile was looked at as well.
        in_memory = [recent.find(wanted.hashes) for recent in self._memory.parts()]
        return _collected(join_keys([*(keys for _, keys in in_runs), *in_memory]))

    def stats(self) -> KeyStats:
        memory = self._memory.parts()
        runs = [*self._runs, *self.settled.runs]
        return KeyStats(
            runs=len(runs),
            entries=sum(run.header.count for run in self._runs) + sum(map(len, memory)),
            disk_bytes=sum(run.header.file_bytes for run in runs),
            memory_bytes=self.lookup.memory_bytes(self._runs)
            + self.settled.memory_bytes()
            + sum(recent.memory_bytes() for recent in memory),
            settled=self.settled.count,
        )

    # What recovery and the checkpoint need besides.

    async def restore(self) -> None:
        """Take up the runs that the manifest names.

        Raises Corrupt or Unavailable if one of them cannot be used. But for settled keys none is then: it is as after
        `clear`, and the rows have to be added again from the first one on.
        """
        image = self._image
        assert image is not None and not self._runs
        self._files.restore(image.run_ids, image.next_run_id)
        headers: list[KeyRunHeader] = []
        failure: OSError | PostdateError | None = None
        for run_id in image.run_ids:
            try:
                headers.append(await self._files.storage.read(run_id, KeyRunReader.read_header))
            except (OSError, PostdateError) as error:
                failure = failure or error
        settled = [header for header in headers if header.stamp.kind is not KeyRunKind.HOLDERS]
        if failure is not None:
            log.error(
                "Schedule keys cannot be looked up; rebuilding them from the ledgers", error=str(failure)
            )
            kept = {header.run_id for header in settled}
            self._image = replace(
                image, run_ids=tuple(run_id for run_id in image.run_ids if run_id not in kept)
            )
            self.clear()
            self.settled.restore(settled)
            raise failure
        self._image = None
        self._runs = [KeyRun(header) for header in headers if header.stamp.kind is KeyRunKind.HOLDERS]
        self.settled.restore(settled)
        passed = self._memory.mark
        self._memory.restore(image.keys_through)
        self._memory.mark = max(passed, image.keys_through)

    def clear(self) -> None:
        """Forget everything but settled keys (KEYS-5). Until the rows are added again, what is not found may be there
        nevertheless."""
        self._generation += 1
        if self._image is not None:
            self._files.delete(self._image.run_ids)
            self._image = None
        self._memory.clear()
        for run in self._runs:
            self.lookup.delete(run)
        self._runs = []

    def image(self) -> KeyImage:
        """Return the image for the next manifest; see `remove_deleted`."""
        if self._image is not None:  # a checkpoint of this time must not forget the runs
            return self._image
        return KeyImage(
            run_ids=tuple(run.run_id for run in [*self._runs, *self.settled.runs]),
            next_run_id=self._files.next_id,
            keys_through=self._memory.durable_mark,  # KEYS-4
            deleted_ids=tuple(self._files.deleted_ids),
            settled_version=self.settled.version,
        )

    @property
    def has_deleted(self) -> bool:
        """Return whether files wait for a manifest that does not name them."""
        return bool(self._files.deleted_ids)

    async def remove_deleted(self, image: KeyImage) -> None:
        """Remove the files that `image` did not name, now that a manifest with it is durable (KEYS-1)."""
        await self._files.remove_deleted(image.deleted_ids)

    def drop_ledgers_before(self, ledger_id: int) -> None:
        """There are no earlier ledgers any more: runs that name no later one go, without a merge."""
        for run in self._runs:
            if run.header.last_ledger_id < ledger_id and not run.is_merging:
                self.lookup.delete(run)
        self._runs = [run for run in self._runs if not run.is_gone]

    @property
    def unsealed_count(self) -> int:
        """Entries that are in memory only."""
        return self._memory.count

    def needs_seal(self, now_ms: int) -> bool:
        count = len(self._memory.recent)
        if not count or self._seals.is_running:
            return False
        waited_ms = self._memory.waited_ms(now_ms)
        if not self._seals.is_ready(now_ms):
            return False
        return waited_ms >= self.limits.seal_after_ms or count >= self.limits.seal_count

    async def seal(self) -> bool:
        """Write what is in memory to a run; False if that failed, and everything is as it was (KEYS-6)."""
        memory, generation = self._memory, self._generation
        if self._seals.is_running or not len(memory.recent):
            return True
        mark = memory.mark
        with self._seals.attempt() as attempt, memory.freeze() as frozen:
            header = await self._writer.seal(attempt.run_id, frozen.rows())
            await self.settled.flush()
            key_filter = await self._filter_to_keep([], header)
            if generation == self._generation:  # no await from here on (KEYS-1, KEYS-5)
                memory.sealed(mark)
                self._replace([], header, key_filter)
                self._seals.succeeded(0 if header is None else header.count)
                attempt.is_used = header is not None
        return not attempt.has_failed

    def needs_merge(self, now_ms: int) -> bool:
        return self._merges.is_ready(now_ms) and bool(self._plan_merge())

    async def merge(self) -> bool:
        """Make one run of several, as planned now; False if that failed, and the sources are as they were (KEYS-6)."""
        sources = self._plan_merge()
        if self._merges.is_running or not sources:
            return True
        generation = self._generation
        with self._merges.attempt() as attempt:
            for run in sources:
                run.is_merging = True
            try:
                header = await self._writer.merge(attempt.run_id, [run.header for run in sources])
                await self.settled.flush()
                key_filter = await self._filter_to_keep(sources, header)
                if generation == self._generation:  # no await from here on (KEYS-1, KEYS-5)
                    self._replace(sources, header, key_filter)
                    self._merges.succeeded(0 if header is None else header.count)
                    attempt.is_used = header is not None
            finally:
                for run in sources:
                    run.is_merging = False
        return not attempt.has_failed

    def close(self) -> None:
        """Look nothing up any more: the topic is not served."""
        self.lookup.close()

    # How runs come and go.

    def _replace(
        self, sources: Sequence[KeyRun], header: KeyRunHeader | None, key_filter: KeyFilter | None
    ) -> None:
        """Put a new run in the place of its sources, or after all others if it has none."""
        at = self._runs.index(sources[0]) if sources else len(self._runs)
        assert self._runs[at : at + len(sources)] == list(sources)
        new = [] if header is None else [KeyRun(header)]
        self._runs[at : at + len(sources)] = new
        for source in sources:
            self.lookup.delete(source)
        for run in new:
            if key_filter is not None:
                self.lookup.keep(run, key_filter)

    async def _filter_to_keep(
        self, sources: Sequence[KeyRun], header: KeyRunHeader | None
    ) -> KeyFilter | None:
        """The filter of a new run, unless those of its sources are not in use: a lookup should not wait for it."""
        in_use = not sources or any(
            self.lookup.cache.filter_of(self.lookup.topic_id, run.run_id) for run in sources
        )
        if header is None or not in_use or not self.lookup.cache.takes(header.filter_bytes):
            return None
        return await self._files.storage.read(header.run_id, lambda reader: reader.read_filter(header))

    def _plan_merge(self) -> list[KeyRun]:
        plan = plan_merge(
            [run.header.count for run in self._runs],
            runs_max=max(self.limits.max_runs, 1),
            unit=max(self.limits.seal_count, 1),
        )
        return [] if plan is None else self._runs[plan.start : plan.end]


def _column(ledger_id: int, count: int) -> Int64Column:
    return np.full(count, ledger_id, dtype=np.int64)


def _collected(keys: KeyColumns) -> dict[int, list[Position]]:
    """By hash, newest first, each once."""
    positions: dict[int, set[Position]] = {}
    rows = zip(keys.hashes.tolist(), keys.ledger_ids.tolist(), keys.entry_ids.tolist(), strict=True)
    for value, ledger_id, entry_id in rows:
        positions.setdefault(value, set()).add(Position(ledger_id, entry_id))
    return {value: sorted(held, reverse=True) for value, held in positions.items()}
