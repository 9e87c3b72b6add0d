"""Which entries were stored with a schedule key: a lookup from its hash to positions.

Entries come from the rows, in the order of the log; what was added last is in memory, the rest in sorted runs on
disk. Runs merge in tiers, as buckets do. The lookup only says where to look: it may name entries that are due,
cancelled or gone, and entries of another key with the same hash. The caller decides which are pending, and reads the
key. So it may be built again from the rows at any time.

Belongs to the event loop; threads read and write runs.

Invariants:
  L1  Every entry that was added and is pending is found: in memory, or in a run. Both change in one step without
      await, and the files of a run stay until a manifest that does not name it is durable.
  L2  `find` leaves out nothing of L1 at the moment it returns: what was added or moved while it read is in it.
  L3  `maybe` is False only where `find` would find nothing. A filter that is not in memory makes it True.
  L4  `keys_through` is the end of what is in runs, or of what was added if nothing is left in memory.
  L5  After `clear` nothing that was under way changes anything.
  L6  A seal or merge that fails leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import numpy as np

from broker.delayed.bucket_values import Retry
from broker.delayed.key_cache import KeyCache
from broker.delayed.key_writer import KeyWriter, StillPending
from broker.delayed.merging import plan_merge
from broker.delayed.recent_keys import RecentKeys
from broker.errors import PostdateError
from broker.model import START, Entries, Int64Column, Position, UInt32Column, UInt64Column, ids_of
from broker.observe.logs import get_logger
from broker.storage.key_filter import BoolColumn, KeyFilter, Probe
from broker.storage.key_run import NO_KEYS, Fences, KeyColumns, KeyRunHeader, join_keys
from broker.storage.key_run_files import KeyRunStorage

log = get_logger(__name__)

_FIND_BLOCKS = 64  # read in one call of a thread, so that others have their turn
_RUN_BYTES = 600  # of a run's own objects, about


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """When to seal, and how many runs to keep; may be replaced at any time."""

    seal_count: int = 50_000  # entries that are sealed together, and the unit of the size classes
    seal_after_ms: int = 60_000  # a seal at the latest when the first entry has waited so long
    max_runs: int = 64


@dataclass(frozen=True, slots=True)
class KeyImage:
    """What a manifest says about the runs, all of one moment."""

    run_ids: tuple[int, ...] = ()  # in the order in which they were written, or their sources were
    next_run_id: int = 1
    keys_through: Position = START  # rows from here on are to be added again
    deleted_ids: tuple[int, ...] = ()
    """Not in the manifest: files to remove once one with this image is durable."""


@dataclass(frozen=True, slots=True)
class KeyStats:
    """What there is of one topic. `entries` counts what is due, cancelled or gone until a merge leaves it out."""

    runs: int
    entries: int
    disk_bytes: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class KeyCounters:
    """What was done since the start; only ever rises."""

    seals: int = 0
    merges: int = 0
    seal_failures: int = 0
    merge_failures: int = 0
    block_reads: int = 0
    filter_reads: int = 0


class _Run:
    """A run in use."""

    def __init__(self, header: KeyRunHeader) -> None:
        self.header = header
        self.run_id = header.run_id
        self.is_merging = False
        self.is_gone = False
        self.unfiltered_bytes = 0  # of the blocks that were read for want of the filter

    @property
    def block_bytes(self) -> int:
        """Of one block on average."""
        return self.header.filter_at // self.header.block_count


class ScheduleKeys:
    """See the module's description. One for each topic; `cache` is shared by all."""

    def __init__(
        self,
        storage: KeyRunStorage,
        cache: KeyCache,
        still_pending: StillPending,
        found: KeyImage,
        *,
        topic_id: int,
        executor: Executor | None = None,
        limits: KeyLimits | None = None,
    ) -> None:
        """`found`: what the manifest says; `restore` takes it up. `executor`: where runs are written."""
        self.limits = limits or KeyLimits()
        self.counters = KeyCounters()
        self._storage = storage
        self._cache = cache
        self._writer = KeyWriter(storage, executor, still_pending)
        self._found: KeyImage | None = found
        self._topic_id = topic_id
        self._recent = RecentKeys()
        self._frozen: RecentKeys | None = None
        self._runs: list[_Run] = []
        self._mark = START  # the position up to which everything was added
        self._sealed_mark = START  # up to which everything is in runs
        self._next_run_id = found.next_run_id
        self._deleted_ids: list[int] = []
        self._generation = 0
        self._recent_since_ms: int | None = None
        self._seal_retry, self._merge_retry = Retry(), Retry()
        self._is_sealing = self._is_merging = False

    # What the topic needs.

    def add(self, ledger_id: int, entry_ids: UInt32Column, hashes: UInt64Column) -> None:
        """Rows with a key were stored, or are read again. No hash is 0. What is added twice is found once."""
        if len(hashes):
            self._recent.add(hashes, _column(ledger_id, len(hashes)), entry_ids)

    def discard(self, ledger_id: int, entry_ids: UInt32Column, hashes: UInt64Column) -> None:
        """Entries were cancelled or replaced: not found any more, as far as they are still in memory."""
        for recent in self._in_memory():
            recent.discard(hashes, _column(ledger_id, len(hashes)), entry_ids)

    def discard_among(self, hashes: UInt64Column, cancelled: Entries) -> None:
        """Of the entries with some hashes, those in a set were replaced; as `discard`."""
        for ledger_id, bitmap in cancelled.items():
            for recent in self._in_memory():
                recent.discard(hashes, _column(ledger_id, len(bitmap)), ids_of(bitmap))

    def passed(self, position: Position) -> None:
        """Every row before `position` was added. While rows are added again after `clear`, their reader alone knows:
        new rows are added as ever, but what lies before them may still be missing."""
        self._mark = position

    def maybe(self, hashes: UInt64Column) -> BoolColumn:
        """For each hash whether an entry may have it; False is certain (L3). Reads nothing."""
        assert self._found is None, "not restored yet"
        mask = np.zeros(len(hashes), dtype=np.bool_)
        if not len(hashes):
            return mask
        for recent in self._in_memory():
            mask |= recent.maybe(hashes)
        if self._runs:
            probe = Probe(hashes)
            for run in self._runs:
                key_filter = self._cache.filter_of(self._topic_id, run.run_id)
                if key_filter is None:
                    mask[:] = True
                    break
                mask |= key_filter.maybe(probe)
        return mask

    async def find(self, hashes: UInt64Column) -> dict[int, list[Position]]:
        """The entries with one of some hashes, newest first; hashes without any are left out (L2).

        Raises Corrupt if a run is damaged (`clear`, and build it again), Unavailable if the disk does not read.
        """
        assert self._found is None, "not restored yet"
        wanted = Probe(np.unique(hashes))
        found = [NO_KEYS]
        looked: set[int] = set()
        while runs := [run for run in self._runs if run.run_id not in looked]:
            for run in runs:
                looked.add(run.run_id)
                found.append(await self._look(run, wanted))
        # No await from here on: what was sealed or merged meanwhile was looked at as well.
        return _collected(join_keys([*found, *(recent.find(wanted.hashes) for recent in self._in_memory())]))

    def stats(self) -> KeyStats:
        memory = self._in_memory()
        cached = sum(self._cache.bytes_of(self._topic_id, run.run_id) for run in self._runs)
        return KeyStats(
            runs=len(self._runs),
            entries=sum(run.header.count for run in self._runs) + sum(map(len, memory)),
            disk_bytes=sum(run.header.file_bytes for run in self._runs),
            memory_bytes=cached
            + _RUN_BYTES * len(self._runs)
            + sum(recent.memory_bytes() for recent in memory),
        )

    # What recovery and the checkpoint need besides.

    async def restore(self) -> None:
        """Take up the runs that the manifest names.

        Raises Corrupt or Unavailable if one of them cannot be used, and none is then: it is as after `clear`, and
        the rows have to be added again from the first one on.
        """
        found = self._found
        assert found is not None and not self._runs
        self._next_run_id = max(found.next_run_id, *(run_id + 1 for run_id in found.run_ids), 1)
        try:
            headers = [await self._storage.read_header(run_id) for run_id in found.run_ids]
        except (OSError, PostdateError) as error:
            log.error("Schedule keys cannot be looked up: build them again from the rows", error=str(error))
            self.clear()
            raise
        self._found = None
        self._runs = [_Run(header) for header in headers]
        self._sealed_mark = found.keys_through
        self._mark = max(self._mark, found.keys_through)

    def clear(self) -> None:
        """Forget everything (L5). Until the rows are added again, what is not found may be there nevertheless."""
        self._generation += 1
        if self._found is not None:
            self._deleted_ids += self._found.run_ids
            self._found = None
        self._recent, self._frozen, self._recent_since_ms = RecentKeys(), None, None
        for run in self._runs:
            self._delete(run)
        self._runs = []
        self._mark = self._sealed_mark = START

    def image(self) -> KeyImage:
        """What the next manifest says; see `remove_deleted`."""
        if self._found is not None:  # a checkpoint of this time must not forget the runs
            return self._found
        nothing_to_seal = self._frozen is None and not len(self._recent)
        return KeyImage(
            run_ids=tuple(run.run_id for run in self._runs),
            next_run_id=self._next_run_id,
            keys_through=self._mark if nothing_to_seal else self._sealed_mark,  # L4
            deleted_ids=tuple(self._deleted_ids),
        )

    @property
    def has_deleted(self) -> bool:
        """Whether files wait for a manifest that does not name them."""
        return bool(self._deleted_ids)

    async def remove_deleted(self, image: KeyImage) -> None:
        """Remove the files that `image` did not name, now that a manifest with it is durable (L1).

        One that cannot be removed is tried again with the next image.
        """
        for run_id in image.deleted_ids:
            try:
                await self._storage.delete(run_id)
            except (OSError, PostdateError) as error:
                log.warning("A key run could not be removed", run_id=run_id, error=str(error))
            else:
                self._deleted_ids = [other for other in self._deleted_ids if other != run_id]

    def drop_ledgers_before(self, ledger_id: int) -> None:
        """There are no earlier ledgers any more: runs that name no later one go, without a merge."""
        for run in self._runs:
            if run.header.last_ledger_id < ledger_id and not run.is_merging:
                self._delete(run)
        self._runs = [run for run in self._runs if not run.is_gone]

    @property
    def unsealed_count(self) -> int:
        """Entries that are in memory only."""
        return sum(map(len, self._in_memory()))

    def needs_seal(self, now_ms: int) -> bool:
        if not len(self._recent) or self._is_sealing:
            return False
        if self._recent_since_ms is None or self._recent_since_ms > now_ms:
            self._recent_since_ms = now_ms
        if not self._seal_retry.is_ready(now_ms):
            return False
        is_old = now_ms - self._recent_since_ms >= self.limits.seal_after_ms
        return is_old or len(self._recent) >= self.limits.seal_count

    async def seal(self) -> bool:
        """Write what is in memory to a run; False if that failed, and everything is as it was (L6)."""
        if self._is_sealing or not len(self._recent):
            return True
        frozen, mark, generation = self._recent, self._mark, self._generation
        self._recent, self._frozen, self._recent_since_ms = RecentKeys(), frozen, None
        self._is_sealing = True
        run_id = self._take_run_id()
        is_used = False
        try:
            header = await self._writer.seal(run_id, frozen.rows())
            key_filter = await self._filter_to_keep([], header)
            if generation == self._generation:  # no await from here on (L1, L5)
                self._frozen, self._sealed_mark = None, mark
                self._replace([], header, key_filter)
                is_used = True
                self._seal_retry.succeeded()
                self._count(seals=1)
        except (OSError, PostdateError) as error:
            self._seal_retry.failed()
            self._count(seal_failures=1)
            log.error("Schedule keys could not be sealed and stay in memory", error=str(error))
            return False
        finally:
            self._is_sealing = False
            if self._frozen is frozen:
                added = self._recent.rows()
                frozen.add(added.hashes, added.ledger_ids, added.entry_ids)
                self._recent, self._frozen = frozen, None
            if not is_used:
                self._deleted_ids.append(run_id)
        return True

    def needs_merge(self, now_ms: int) -> bool:
        return not self._is_merging and self._merge_retry.is_ready(now_ms) and bool(self._plan_merge())

    async def merge(self) -> bool:
        """Make one run of several, as planned now; False if that failed, and the sources are as they were (L6)."""
        sources = self._plan_merge()
        if self._is_merging or not sources:
            return True
        generation = self._generation
        self._is_merging = True
        for run in sources:
            run.is_merging = True
        run_id = self._take_run_id()
        is_used = False
        try:
            header = await self._writer.merge(run_id, [run.header for run in sources])
            key_filter = await self._filter_to_keep(sources, header)
            if generation == self._generation:  # no await from here on (L1, L5)
                self._replace(sources, header, key_filter)
                is_used = True
                self._merge_retry.succeeded()
                self._count(merges=1)
        except (OSError, PostdateError) as error:
            self._merge_retry.failed()
            self._count(merge_failures=1)
            log.error("Key runs could not be merged and stay as they are", error=str(error))
            return False
        finally:
            self._is_merging = False
            for run in sources:
                run.is_merging = False
            if not is_used:
                self._deleted_ids.append(run_id)
        return True

    # How it looks.

    def _in_memory(self) -> list[RecentKeys]:
        return [self._recent] if self._frozen is None else [self._recent, self._frozen]

    async def _look(self, run: _Run, wanted: Probe) -> KeyColumns:
        """The entries of one run with some rising hashes; none if the run went meanwhile."""
        try:
            hashes = await self._passing(run, wanted)
            if not len(hashes):
                return NO_KEYS
            fences = await self._fences_of(run)
            blocks = fences.blocks_of(hashes)
            self._count(block_reads=len(blocks))
            found = [
                await self._storage.find(run.header, fences, blocks[at : at + _FIND_BLOCKS], hashes)
                for at in range(0, len(blocks), _FIND_BLOCKS)
            ]
            return join_keys([NO_KEYS, *found])
        except (OSError, PostdateError):
            if run.is_gone:  # its file was removed; what took its place is looked at next
                return NO_KEYS
            raise

    async def _passing(self, run: _Run, wanted: Probe) -> UInt64Column:
        """The hashes that may be in a run."""
        key_filter = self._cache.filter_of(self._topic_id, run.run_id)
        if key_filter is None:
            # It is read again once the blocks read for want of it weigh as much as it does: more filters than the
            # cache can hold then cost at most twice what they must.
            run.unfiltered_bytes += len(wanted.hashes) * run.block_bytes
            filter_bytes = run.header.filter_bytes
            if run.unfiltered_bytes < filter_bytes or not self._cache.takes(filter_bytes):
                return wanted.hashes
            run.unfiltered_bytes = 0
            self._count(filter_reads=1)
            key_filter = await self._storage.read_filter(run.header)
            self._keep(run, key_filter)
        return wanted.hashes[key_filter.maybe(wanted)]

    async def _fences_of(self, run: _Run) -> Fences:
        fences = self._cache.fences_of(self._topic_id, run.run_id)
        if fences is None:
            fences = await self._storage.read_fences(run.header)
            self._keep(run, fences)
        return fences

    def _keep(self, run: _Run, part: KeyFilter | Fences) -> None:
        if not run.is_gone:
            self._cache.put(self._topic_id, run.run_id, part)

    # How runs come and go.

    def _replace(
        self, sources: Sequence[_Run], header: KeyRunHeader | None, key_filter: KeyFilter | None
    ) -> None:
        """Put a new run in the place of its sources, or after all others if it has none."""
        at = self._runs.index(sources[0]) if sources else len(self._runs)
        assert self._runs[at : at + len(sources)] == list(sources)
        new = [] if header is None else [_Run(header)]
        self._runs[at : at + len(sources)] = new
        for source in sources:
            self._delete(source)
        for run in new:
            if key_filter is not None:
                self._keep(run, key_filter)

    async def _filter_to_keep(self, sources: Sequence[_Run], header: KeyRunHeader | None) -> KeyFilter | None:
        """The filter of a new run, unless those of its sources are not in use: a lookup should not wait for it."""
        in_use = not sources or any(self._cache.filter_of(self._topic_id, run.run_id) for run in sources)
        if header is None or not in_use or not self._cache.takes(header.filter_bytes):
            return None
        return await self._storage.read_filter(header)

    def _plan_merge(self) -> list[_Run]:
        plan = plan_merge(
            [run.header.count for run in self._runs],
            max_buckets=max(self.limits.max_runs, 1),
            min_index_count=max(self.limits.seal_count, 1),
        )
        return [] if plan is None else self._runs[plan.start : plan.end]

    def _delete(self, run: _Run) -> None:
        run.is_gone = True
        self._cache.drop(self._topic_id, run.run_id)
        self._deleted_ids.append(run.run_id)

    def _take_run_id(self) -> int:
        self._next_run_id += 1
        return self._next_run_id - 1

    def _count(self, **more: int) -> None:
        counters = self.counters
        self.counters = replace(
            counters, **{name: getattr(counters, name) + count for name, count in more.items()}
        )


def _column(ledger_id: int, count: int) -> Int64Column:
    return np.full(count, ledger_id, dtype=np.int64)


def _collected(keys: KeyColumns) -> dict[int, list[Position]]:
    """By hash, newest first, each once."""
    positions: dict[int, set[Position]] = {}
    rows = zip(keys.hashes.tolist(), keys.ledger_ids.tolist(), keys.entry_ids.tolist(), strict=True)
    for value, ledger_id, entry_id in rows:
        positions.setdefault(value, set()).add(Position(ledger_id, entry_id))
    return {value: sorted(held, reverse=True) for value, held in positions.items()}
