"""Schedule keys that nobody holds any more, remembered for a while: what became of the last message that had each.

Rows come from seals and merges of the lookup, which leave out what does not wait, and from ledgers before they go. They
are written at once, to runs of their own, which merge among themselves and expire whole. Nobody asks them before the
lookup has found nothing that waits, so that a message that holds a key comes before all that is remembered, and storing
messages with keys never looks here.

What is remembered of a message whose ledger is there says only where to look; its row, amendments and subscriptions say
what became of it. When the ledger is gone, what is remembered is the answer, for the hash of the key: of two keys with
one hash either may be answered for the other. That takes about 2**64 remembered keys, or somebody who makes them; and
a message that waits is still never hidden.

    rows -> memory -> run of what was delivered, run of what was cancelled -> merged within a slot -> expired

Belongs to the event loop; threads read and write runs.

Invariants:
  SETTLED-1  A row that was remembered is found, in memory or in a run, until its run expires or goes for the limit:
      both change in one step without await.
  SETTLED-2  A row is remembered for the whole time from when it was first written, and for at most a fourth longer: a
      merged run counts from its youngest rows, and merges stay within a slot, a fourth of that time.
  SETTLED-3  Rows beyond the limit go run by run, the oldest first; a merge makes none of more than a fourth of the
      limit.
  SETTLED-4  What fails here costs what is remembered, and nothing else: an error is logged, not raised, but for a
      disk that does not read when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from broker.delayed.key_runs import KeyRun, KeyRuns
from broker.delayed.key_writer import KeyWriter
from broker.errors import Corrupt
from broker.model import Position, UInt64Column, distinct_values, is_among
from broker.observe.logs import get_logger
from broker.runs.merging import plan_merge
from broker.runs.upkeep import Retry, RunWork
from broker.storage.key_filter import Probe
from broker.storage.key_run import (
    NO_KEYS,
    KeyColumns,
    KeyRunHeader,
    KeyRunKind,
    Stamp,
    join_keys,
)

log = get_logger(__name__)

SLOTS = 4
"""Runs are merged with those of their slot: so many of them are the time for which keys are remembered."""
_MERGED_SHARE = 8  # a run of so much of the limit is merged no more
_SLOT_RUNS_MAX = 8  # of a kind, in the slot that is not over
_FLUSH_ROWS = 50_000
_KINDS = (KeyRunKind.DELIVERED, KeyRunKind.CANCELLED)


class SettledKeys:
    """See the module's description. One for each topic."""

    def __init__(
        self,
        lookup: KeyRuns,
        executor: Executor | None,
        now_ms: Callable[[], int],
        *,
        keep_ms: int,
        rows_max: int,
    ) -> None:
        """`keep_ms`: how long a key is remembered; 0: not at all. `rows_max`: how many rows, at most."""
        self.keep_ms = keep_ms
        self.rows_max = rows_max
        self._lookup = lookup
        self._now_ms = now_ms
        self._writer = KeyWriter(lookup.storage, executor)
        self._runs: list[KeyRun] = []  # by `settled_ms`
        self._rows = dict.fromkeys(_KINDS, NO_KEYS)  # in no run yet
        self._writing: list[tuple[KeyRunKind, KeyColumns]] = []
        self.version = 0
        """Another one: there is a run that an image before it did not name."""
        self._retry, files = Retry(), lookup.files
        self._writes = RunWork(files, "Settled schedule keys could not be written", self._retry)
        self._merges = RunWork(
            files, "Settled schedule keys could not be merged and stay as they are", self._retry
        )

    @property
    def remembers(self) -> bool:
        return self.keep_ms > 0 and self.rows_max > 0

    @property
    def count(self) -> int:
        """Rows that are remembered; a key may have several until they are merged."""
        in_memory = sum(map(len, self._rows.values())) + sum(len(rows) for _, rows in self._writing)
        return in_memory + sum(run.header.count for run in self._runs)

    @property
    def runs(self) -> Sequence[KeyRun]:
        return self._runs

    def memory_bytes(self) -> int:
        rows = [*self._rows.values(), *(keys for _, keys in self._writing)]
        held = sum(keys.hashes.nbytes + keys.ledger_ids.nbytes + keys.entry_ids.nbytes for keys in rows)
        return held + self._lookup.memory_bytes(self._runs)

    def restore(self, headers: Sequence[KeyRunHeader]) -> None:
        """Take up runs that the manifest names."""
        self._add(headers)
        self.expire()

    async def note(self, kind: KeyRunKind, rows: KeyColumns) -> None:
        """Remember rows, sorted; those in no run yet are lost in a crash."""
        if not self.remembers or not len(rows):
            return
        self._rows[kind] = join_keys([self._rows[kind], rows])
        if len(self._rows[kind]) >= _FLUSH_ROWS:
            await self.flush()

    async def flush(self) -> bool:
        """Write what is in memory to runs, which the next manifest may name; False if that failed."""
        if not self._retry.is_ready(self._now_ms()):
            for kind in _KINDS:  # the disk does not write: what there is no room for is forgotten (SETTLED-4)
                self._rows[kind] = self._rows[kind].part(slice(-_FLUSH_ROWS, None))
            return False
        for kind in _KINDS:
            rows, self._rows[kind] = self._rows[kind], NO_KEYS
            if not len(rows):
                continue
            part = kind, rows
            with self._writes.attempt() as attempt:
                self._writing.append(part)
                try:
                    stamp = Stamp(kind, max(1, self._now_ms()))
                    header = await self._writer.seal(attempt.run_id, rows, stamp)
                    self._add([header] if header else [])
                    self._writes.succeeded(len(rows))
                    attempt.is_used = header is not None
                finally:
                    self._writing = [writing for writing in self._writing if writing is not part]
            if attempt.has_failed:
                self._rows[kind] = join_keys([rows, self._rows[kind]])
                return False
        self.expire()
        return True

    async def find(self, hashes: UInt64Column) -> dict[int, dict[Position, bool]]:
        """Return the remembered entries of some hashes, and whether each was cancelled.

        Raises Unavailable if the disk does not read.
        """
        self.expire()
        wanted = Probe(distinct_values(hashes))
        in_runs = await self._lookup.look_all(lambda: self._runs, wanted, self._look)
        # No await from here on: what was written or merged meanwhile was looked at as well (SETTLED-1).
        parts = [(run.header.stamp.kind, keys) for run, keys in in_runs]
        for kind, rows in [*self._rows.items(), *self._writing]:
            parts.append((kind, rows.part(is_among(rows.hashes, wanted.hashes))))
        ends_by_hash: dict[int, dict[Position, bool]] = {}
        for kind, keys in parts:
            columns = keys.hashes.tolist(), keys.ledger_ids.tolist(), keys.entry_ids.tolist()
            for value, ledger_id, entry_id in zip(*columns, strict=True):
                ends = ends_by_hash.setdefault(value, {})
                position = Position(ledger_id, entry_id)
                # It was due first and cancelled then: the last word of the two, whichever was written last.
                ends[position] = ends.get(position, False) or kind is KeyRunKind.CANCELLED
        return ends_by_hash

    def next_expiry_ms(self) -> int | None:
        """Return the time at which the oldest run expires; None if there is none."""
        return self._runs[0].header.stamp.settled_ms + self.keep_ms if self._runs else None

    def expire(self) -> bool:
        """Forget runs that are too old, or too many; whether there were any."""
        now_ms = self._now_ms()
        left = [run for run in self._runs if self._is_remembered(run, now_ms)]
        total = self.count - sum(run.header.count for run in self._runs)
        kept: list[KeyRun] = []
        for run in reversed(left):  # SETTLED-3
            total += run.header.count
            if total > self.rows_max and kept:
                break
            kept.append(run)
        gone = [run for run in self._runs if run not in kept]
        for run in gone:
            self._lookup.delete(run)
        self._runs = kept[::-1]
        return bool(gone)

    def needs_merge(self) -> bool:
        return self._merges.is_ready(self._now_ms()) and bool(self._plan_merge())

    async def merge(self) -> bool:
        """Make one run of several of a slot; False if that failed, and they are as they were."""
        sources = self._plan_merge()
        if self._merges.is_running or not sources:
            return True
        stamp = max(run.header.stamp for run in sources)  # of one kind: the youngest (SETTLED-2)
        with self._merges.attempt() as attempt:
            header = await self._writer.merge(attempt.run_id, [run.header for run in sources], stamp)
            # No await from here on (SETTLED-1). What expired meanwhile is older than the slot, so that all did, or
            # none.
            if header is not None and all(run in self._runs for run in sources):
                self._runs = [run for run in self._runs if run not in sources]
                for run in sources:
                    self._lookup.delete(run)
                self._add([header])
                attempt.is_used = True
            self._merges.succeeded(0 if header is None else header.count)
        return not attempt.has_failed

    async def _look(self, run: KeyRun, wanted: Probe) -> KeyColumns:
        try:
            return await self._lookup.look(run, wanted)
        except Corrupt as error:
            log.error(
                "A file of settled schedule keys is damaged; its keys can no longer be looked up",
                error=str(error),
            )
            self._lookup.delete(run)
            self._runs = [other for other in self._runs if other is not run]
            return NO_KEYS

    def _add(self, headers: Sequence[KeyRunHeader]) -> None:
        self.version += bool(headers)
        self._runs = sorted([*self._runs, *map(KeyRun, headers)], key=lambda run: run.header.stamp.settled_ms)

    def _is_remembered(self, run: KeyRun, now_ms: int) -> bool:
        # What a wrong clock wrote ahead by more than keys are remembered would outlive its time.
        return abs(now_ms - run.header.stamp.settled_ms) < self.keep_ms

    def _plan_merge(self) -> list[KeyRun]:
        slot_ms = max(1, self.keep_ms // SLOTS)
        slot_now = self._now_ms() // slot_ms
        most = self.rows_max // _MERGED_SHARE
        groups: dict[tuple[KeyRunKind, int], list[KeyRun]] = {}
        for run in self._runs:
            if run.header.count < most:
                groups.setdefault((run.header.stamp.kind, run.header.stamp.settled_ms // slot_ms), []).append(
                    run
                )
        for (_, slot), runs in groups.items():
            plan = plan_merge(
                [run.header.count for run in runs],
                runs_max=_SLOT_RUNS_MAX if slot == slot_now else 1,
                unit=_FLUSH_ROWS,
            )
            if plan is not None:
                chosen: list[KeyRun] = []
                count = 0
                for run in runs[plan.start : plan.end]:
                    count += run.header.count
                    if count > most and len(chosen) > 1:
                        break
                    chosen.append(run)
                return chosen
        return []
