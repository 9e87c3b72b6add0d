"""Seals and merges: the work in a thread, in steps.

A seal filters and sorts what was added in runs of at most RUN_ROWS rows; a merge decodes its sources' segments one by
one. Both make one sorted stream of several runs (`merging.MergeRuns`), which a `SnapshotBuilder` cuts into segments and
encodes. A step works on one run or on a few segments, and the thread lets go of the interpreter in between, so
the event loop never waits for more than a step. Memory is bounded by the frozen bucket, or by one segment of each
source (in a job: a few).

Invariants:
  WRITER-1  A row is left out only if it lies at or before the frontier noted at the start, if it is not current under
      the amendments of then, or if it is there twice. What is left out because of amendments may become current again
      only by being added again.
  WRITER-2  Rows are in order, each once; the spans of the result hold all of them.
  WRITER-3  Before a merged bucket is handed back, it is read back whole, and holds the count and checksum of the rows
      that were kept of the sources. Both are taken of decoded segments: those read, before the merge touched them,
      and those written, after they were on disk.
  WRITER-4  Nobody has been told of the file yet: a writer that fails leaves nothing, or a file for the tracker to
      remove.
  WRITER-5  One thread at a time works on a seal or merge, also when it is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, cast

import numpy as np

from broker.delayed.due_rows import DueRows, Key, concatenate, key_after, rows_before
from broker.delayed.sealed_bucket import SealedBucket
from broker.delayed.stale import LeftOut, is_current
from broker.errors import Corrupt
from broker.model import Int64Column, Position, UInt32Column
from broker.runs.merging import MergeRuns
from broker.runs.tally import Tally
from broker.runtime.steps import run_step
from broker.storage.amendments import Amendments
from broker.storage.bucket_builder import SnapshotBuilder
from broker.storage.bucket_files import (
    BucketStorage,
    SnapshotFileWriter,
    SnapshotReader,
    create_bucket,
    save_bucket,
)
from broker.storage.bucket_snapshot import (
    BucketMetadata,
    LedgerSpan,
    merge_spans,
)

T = TypeVar("T")

RUN_ROWS = 65_536
_KEY_BITS = 63
_STEP_ROWS = 8_192
_CHECKED_SEGMENTS = 8  # read back at a time


@dataclass(frozen=True, slots=True)
class SegmentLimits:
    """Sizes at which segments are cut."""

    time_step_ms: int
    entries_max: int

    def builder(self, spans: Sequence[LedgerSpan]) -> SnapshotBuilder:
        return SnapshotBuilder(spans, time_step_ms=self.time_step_ms, max_entries=self.entries_max)


@dataclass(frozen=True, slots=True)
class NotNeeded:
    """State at the start of a seal or merge that lets rows be left out (WRITER-1)."""

    frontier: Key
    amendments: dict[int, Amendments]
    left_out: list[DueRows] = field(default_factory=list)
    """Gathers the rows after the frontier that the amendments made stale."""
    doubles: list[DueRows] = field(default_factory=list)
    """Gathers the rows that were there once more."""


@dataclass(frozen=True, slots=True)
class NewBucket:
    """Id of a new bucket, and the range of the log that it covers."""

    bucket_id: int
    start: Position
    end: Position


class BucketWriter:
    """Writes new buckets; the tracker decides what, and puts them to use."""

    def __init__(
        self,
        storage: BucketStorage,
        executor: Executor | None,
        *,
        into: BucketStorage | None = None,
        segments_fed: int = 1,
    ) -> None:
        """`into`: where new buckets go, if not to their sources. `segments_fed`: a merge takes so many of a source at
        once, which costs memory and longer steps, and saves a third of the time of twenty sources.
        """
        self._storage = storage
        self._into = into or storage
        self._executor = executor
        self._segments_fed = segments_fed

    async def seal(
        self, new: NewBucket, blocks: Sequence[DueRows], not_needed: NotNeeded, limits: SegmentLimits
    ) -> BucketMetadata | None:
        """Write a bucket of rows in the order of arrival; None if none has to be kept.

        Raises OSError, PostdateError.
        """
        runs: list[DueRows] = []
        for group in _groups(blocks):
            kept = await self._in_thread(partial(_kept_of, group, not_needed))
            if len(kept):
                runs.append(kept)
        if not runs:
            return None
        builder = limits.builder(await self._in_thread(lambda: _spans_of(runs)))
        doubles = not_needed.doubles
        rows = [await self._in_thread(partial(_sorted_rows, run, builder, doubles)) for run in runs]
        segments = await self._in_thread(lambda: _encode_runs(builder, rows, doubles))
        metadata = builder.metadata(self._storage.topic_id, new.bucket_id, new.start, new.end)
        return await self._in_thread(
            lambda: save_bucket(self._into, new.bucket_id, metadata, builder.bitmaps, segments)
        )

    async def merge(
        self, new: NewBucket, sources: Sequence[SealedBucket], not_needed: NotNeeded, limits: SegmentLimits
    ) -> BucketMetadata | None:
        """Write one bucket of several; None if no row has to be kept. Raises OSError, PostdateError."""
        builder = limits.builder(merge_spans(source.metadata.spans for source in sources))
        work = _Merge(sources, not_needed, builder, self._segments_fed)
        try:
            await self._in_thread(lambda: work.open(self._storage, self._into, new.bucket_id))
            while not work.is_done:
                await self._in_thread(work.step)
            if not builder.tally.count:
                return None
            metadata = await self._in_thread(lambda: work.finish(new))
        finally:
            await self._in_thread(work.close)
        await self._check(metadata, work.kept)
        return metadata

    async def left_out(self, not_needed: NotNeeded, frontier: Key, loaded_end: Key) -> LeftOut:
        """Return what was left out, as the event loop needs it."""
        return await self._in_thread(
            lambda: LeftOut(not_needed.left_out, not_needed.doubles, frontier, loaded_end)
        )

    async def _check(self, written: BucketMetadata, kept: Tally) -> None:
        """Read a bucket back; raises Corrupt if anything is not as it should be (WRITER-3)."""
        read_back = await self._read_back(written.bucket_id)
        if not read_back == kept == Tally(written.count, written.checksum):
            raise Corrupt(
                "A merged bucket does not hold the entries of its sources", path=str(written.bucket_id)
            )

    async def _read_back(self, bucket_id: int) -> Tally:
        """Count and checksum a bucket's decoded segments; raises Corrupt."""
        bucket = SealedBucket(await self._into.read(bucket_id, SnapshotReader.read_metadata))
        tally = Tally()
        for first in range(0, bucket.segment_count, _CHECKED_SEGMENTS):
            end = min(first + _CHECKED_SEGMENTS, bucket.segment_count)
            read = partial(SnapshotReader.read_segments, metadata=bucket.metadata, first=first, end=end)
            segments = await self._into.read(bucket_id, read)
            await self._in_thread(partial(_add_segments, tally, bucket, first, segments))
        if tally != Tally(bucket.metadata.count, bucket.metadata.checksum):
            raise Corrupt("A merged bucket counts other entries than it holds", path=str(bucket_id))
        return tally

    async def check(self, steps: Generator[None, None, T], rest: float) -> T:
        """Run a check in steps; after each it waits `rest` times as long as that took."""

        def step() -> StopIteration | None:
            try:
                next(steps)
            except StopIteration as end:
                return end
            return None

        try:
            while True:
                began_ns = time.perf_counter_ns()
                if (end := await self._in_thread(step)) is not None:
                    return cast("T", end.value)
                await asyncio.sleep(rest * (time.perf_counter_ns() - began_ns) / 1e9)
        finally:
            await self._in_thread(steps.close)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await run_step(self._executor, work)  # WRITER-5


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a bucket in the making, aligned: times, and ordinals of the result, which order as positions do."""

    times: Int64Column
    ordinals: Int64Column

    def __len__(self) -> int:
        return len(self.times)

    def part(self, rows: slice) -> Rows:
        return Rows(self.times[rows], self.ordinals[rows])

    def key(self, row: int) -> tuple[int, int]:
        return int(self.times[row]), int(self.ordinals[row])

    def count_through(self, key: tuple[int, int]) -> int:
        """Return how many of the sorted rows lie at or before a key."""
        time, ordinal = key
        low, high = np.searchsorted(self.times, (time, time + 1))
        return int(low + np.searchsorted(self.ordinals[low:high], ordinal, side="right"))


NO_ROWS = Rows(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def join_rows(parts: Sequence[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    return Rows(
        np.concatenate([NO_ROWS.times, *(part.times for part in parts)]),
        np.concatenate([NO_ROWS.ordinals, *(part.ordinals for part in parts)]),
    )


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows in order, each once; and the copies that were dropped."""

    rows: Rows
    doubles: Rows | None = None


def sort_rows(rows: Rows) -> SortedRows:
    if len(rows) < 2:
        return SortedRows(rows)
    lowest, bits = int(rows.times.min()), int(rows.ordinals.max()).bit_length()
    if (int(rows.times.max()) - lowest).bit_length() + bits <= _KEY_BITS:
        # Both in one number: sorting numbers is five times faster than sorting indexes of them.
        keys = ((rows.times - lowest) << bits) | rows.ordinals
        keys.sort()
        times, ordinals = (keys >> bits) + lowest, keys & ((1 << bits) - 1)
    else:
        order = np.lexsort((rows.ordinals, rows.times))
        times, ordinals = rows.times[order], rows.ordinals[order]
    is_new = np.ones(len(times), dtype=np.bool_)
    is_new[1:] = (times[1:] != times[:-1]) | (ordinals[1:] != ordinals[:-1])
    if is_new.all():
        return SortedRows(Rows(times, ordinals))
    is_double = ~is_new
    return SortedRows(Rows(times[is_new], ordinals[is_new]), Rows(times[is_double], ordinals[is_double]))


def merged_rows(runs: MergeRuns[Rows]) -> SortedRows:
    """The next rows of several runs."""
    parts = runs.step()
    return SortedRows(parts[0]) if len(parts) == 1 else sort_rows(join_rows(parts))


class _Merge:
    """A merge between its steps. Every method blocks."""

    def __init__(
        self,
        sources: Sequence[SealedBucket],
        not_needed: NotNeeded,
        builder: SnapshotBuilder,
        segments_fed: int,
    ) -> None:
        self.kept = Tally()
        self._segments_fed = segments_fed
        self._sources = sources
        self._not_needed = not_needed
        self._builder = builder
        self._topic_id = sources[0].metadata.topic_id
        self._runs = MergeRuns(len(sources), NO_ROWS)
        self._next = [source.first_segment_from(key_after(not_needed.frontier)) for source in sources]
        self._readers = contextlib.ExitStack()
        self._reader_of: list[SnapshotReader] = []
        self._writer: SnapshotFileWriter | None = None

    @property
    def is_done(self) -> bool:
        return self._runs.is_done

    def open(self, storage: BucketStorage, into: BucketStorage, bucket_id: int) -> None:
        for run, source in enumerate(self._sources):
            reader = storage.open_reader(source.bucket_id)
            self._reader_of.append(self._readers.enter_context(contextlib.closing(reader)))
            if self._next[run] == source.segment_count:
                self._runs.feed(run, NO_ROWS, is_last=True)
        reserve = self._builder.reserve_bytes(sum(source.metadata.count for source in self._sources))
        self._writer = create_bucket(into, bucket_id, reserve)

    def step(self) -> None:
        """Read the segments that are wanted, and write those that are complete then."""
        assert self._writer is not None
        for run in self._runs.wanted():
            self._feed(run)
        if self._runs.wanted() or self._runs.is_done:  # what was read held nothing to keep
            return
        taken = merged_rows(self._runs)
        if taken.doubles is not None:
            doubles = _columns(taken.doubles, self._builder)
            self.kept.remove(*doubles.columns)
            self._not_needed.doubles.append(doubles)
        for segment in self._builder.add(taken.rows.times, taken.rows.ordinals):
            self._writer.append(segment)

    def finish(self, new: NewBucket) -> BucketMetadata:
        assert self._writer is not None
        for segment in self._builder.end():
            self._writer.append(segment)
        metadata = self._builder.metadata(self._topic_id, new.bucket_id, new.start, new.end)
        return self._writer.finish(metadata, self._builder.bitmaps)

    def close(self) -> None:
        self._readers.close()
        if self._writer is not None:
            self._writer.abort()  # nothing after `finish`

    def _feed(self, run: int) -> None:
        source, first = self._sources[run], self._next[run]
        end = min(first + self._segments_fed, source.segment_count)
        segments = self._reader_of[run].read_segments(source.metadata, first, end)
        parts: list[Rows] = []
        for segment, data in enumerate(segments, first):
            columns = kept_rows(source.decode(segment, data), self._not_needed)
            self.kept.add(*columns.columns)
            ordinals = self._builder.ordinals.to_ordinals(columns.ledger_ids, columns.entry_ids)
            parts.append(Rows(columns.deliver_at_ms, ordinals))
            _let_go()
        self._next[run] = end
        self._runs.feed(run, join_rows(parts), is_last=end == source.segment_count)


def _add_segments(tally: Tally, bucket: SealedBucket, first: int, segments: Sequence[bytes]) -> None:
    for segment, data in enumerate(segments, first):
        tally.add(*bucket.decode(segment, data).columns)
        _let_go()


def _groups(blocks: Sequence[DueRows]) -> Iterator[list[DueRows]]:
    """Neighbouring blocks, at most RUN_ROWS rows at a time; a block has fewer."""
    group: list[DueRows] = []
    rows = 0
    for block in blocks:
        if group and rows + len(block) > RUN_ROWS:
            yield group
            group, rows = [], 0
        group.append(block)
        rows += len(block)
    if group:
        yield group


def _kept_of(group: Sequence[DueRows], not_needed: NotNeeded) -> DueRows:
    return kept_rows(concatenate(group), not_needed)


def kept_rows(columns: DueRows, not_needed: NotNeeded) -> DueRows:
    """The rows that have to be kept (WRITER-1)."""
    start = key_after(not_needed.frontier)
    # Mostly nothing is left out, and to see that costs less than a copy.
    if len(columns) and int(columns.deliver_at_ms.min()) <= start[0]:
        columns = columns.part(~rows_before(columns, start))
    if not_needed.amendments and len(columns):
        current = is_current(columns, not_needed.amendments.get)
        if not current.all():
            not_needed.left_out.append(columns.part(~current))
            columns = columns.part(current)
    return columns


def _spans_of(runs: Sequence[DueRows]) -> tuple[LedgerSpan, ...]:
    """The spans that hold all rows."""
    return merge_spans(
        [LedgerSpan(ledger_id, int(entries.min()), int(entries.max()) + 1)]
        for run in runs
        for ledger_id, entries in entries_by_ledger(run.ledger_ids, run.entry_ids)
    )


def entries_by_ledger(ledger_ids: Int64Column, entry_ids: UInt32Column) -> Iterator[tuple[int, UInt32Column]]:
    """The entries of each ledger."""
    lowest = int(ledger_ids.min())
    if lowest == int(ledger_ids.max()):
        yield lowest, entry_ids
        return
    order = np.argsort(ledger_ids)
    sorted_ids, entry_ids = ledger_ids[order], entry_ids[order]
    starts = np.flatnonzero(sorted_ids[1:] != sorted_ids[:-1]) + 1
    ids = sorted_ids[np.concatenate(([0], starts))].tolist()
    yield from zip(ids, np.split(entry_ids, starts), strict=True)


def _sorted_rows(run: DueRows, builder: SnapshotBuilder, doubles: list[DueRows]) -> Rows:
    ordinals = builder.ordinals.to_ordinals(run.ledger_ids, run.entry_ids)
    taken = sort_rows(Rows(run.deliver_at_ms, ordinals))
    if taken.doubles is not None:
        doubles.append(_columns(taken.doubles, builder))
    return taken.rows


def _columns(rows: Rows, builder: SnapshotBuilder) -> DueRows:
    return DueRows(rows.times, *builder.ordinals.to_positions(rows.ordinals))


def _encode_runs(builder: SnapshotBuilder, runs: Sequence[Rows], doubles: list[DueRows]) -> list[bytes]:
    """All segments of some sorted runs."""
    segments: list[bytes] = []
    merged = MergeRuns(len(runs), NO_ROWS)
    following = [0] * len(runs)
    while not merged.is_done:
        for run in merged.wanted():
            end = following[run] + _STEP_ROWS
            merged.feed(run, runs[run].part(slice(following[run], end)), is_last=end >= len(runs[run]))
            following[run] = end
        taken = merged_rows(merged)
        if taken.doubles is not None:
            doubles.append(_columns(taken.doubles, builder))
        segments += builder.add(taken.rows.times, taken.rows.ordinals)
        _let_go()
    return segments + builder.end()


_WORK_NS = 1_000_000


class _Turn(threading.local):
    """Time at which this thread last let others work."""

    ended_ns = 0


_turn = _Turn()


def _let_go() -> None:
    """Let the event loop have the interpreter, if it waits for it: after a millisecond of work, as giving up the core
    may cost a tenth of that. In the main thread, as in a job's process, nobody waits, and on a busy machine giving way
    took a third of the time."""
    if threading.current_thread() is threading.main_thread():
        return
    now_ns = time.perf_counter_ns()
    if now_ns - _turn.ended_ns >= _WORK_NS:
        time.sleep(0)
        _turn.ended_ns = time.perf_counter_ns()
