"""The local log of groups: the files of the journal's folder.

    <folder>/%016x.seg      a segment, named by its first_lsn; `segment.py` has layout and JOURNAL-1 to JOURNAL-4
    <folder>/spare-NNN.seg  a file that waits to become one: a dropped segment, or one being made

Roll. A segment that has passed `segment_bytes` is complete (JOURNAL-4), as the sync of its last group has returned.
The next one is made in these steps, and a crash leaves:
  1 take a spare, or create one            a spare, whatever its bytes; spares are never read
  2 write the new header into it and sync  a spare with a new, torn or old header
  3 rename it to its segment name          the spare or an empty segment; its header is durable already
  4 sync the folder                        an empty segment, the journal's last
  5 write and sync the first group         a torn group, or a good one
The other order (rename first) would let a crash leave a segment name over the header of a former life. Such a
file is still taken for a cut roll, if it is the last and holds no group (`segment.is_cut_roll`), and removed.

Dropping renames or removes whole segments below an lsn that no manifest needs any more. A crash can bring
back any of those names, with holes between them. So opening starts at the last segment that begins at or
before the lsn that is needed, and never looks at what lies below.

Opening, where the last group is in no manifest: that group may be in memory alone, by a sync that failed in a life
before, and no later sync would write it. So its segment's groups are copied to a spare, which is synced and renamed
over the segment; a crash leaves the one file or the other, and an answered group is durable in both. A disk without
room for the copy leaves it out, and the log says so.

Shrinking, while nobody appends: the spares are removed, a large active segment in which nothing is needed is followed
by a new one in the steps of a roll, and dropped then. So at rest the folder holds one small segment, and the groups
that come go where those of a new journal do. Once that roll has begun no group goes into the segment before, as the
name of the new one may be there: a roll that failed is begun again by the next append, one in doubt ends writing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple

from broker.errors import Corrupt, Fenced
from broker.observe.logs import get_logger
from broker.runtime.clock import Clock, SystemClock
from broker.runtime.steps import StepThread, begin_step, run_step
from broker.runtime.vfs import File, Vfs, WriteFailed, list_if_there, read_file
from broker.settings import KIB, MIB
from broker.storage.frame import encode_group
from broker.storage.group_log import NewRecord, StoredGroup
from broker.storage.segment import (
    ADVICE,
    HEADER_BYTES,
    Group,
    SegmentEnd,
    check_header,
    encode_header,
    find_end,
    is_cut_roll,
    replay,
    torn_bytes,
)

log = get_logger(__name__)

_GROWTH_BYTES = 256 * KIB
"""Bytes by which a new segment's file is lengthened ahead of its groups: a sync has no new length to make durable then.

This takes no blocks, so the sync of a group that begins a new block waits for the file system's own journal as before;
what gains are groups that fit into a block that is there, as those of single messages do."""

_SHRINK_SHARE = 64
"""Share of a full segment that makes an active one worth a roll when nobody appends."""

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})

SEGMENT_NAME = re.compile(r"([0-9a-f]{16})\.seg")
SPARE_NAME = re.compile(r"spare-([0-9]{3,})\.seg")


class FoundJournal(NamedTuple):
    """The state of a folder before it is opened. The last segment may be longer than its groups."""

    next_lsn: int
    end_offset: int
    file_bytes: int
    torn_bytes: int  # of a last group that is not whole, as far as it can be told from a former life
    cut_roll: str | None  # the last file, if a crash cut its making
    is_new: bool  # nothing is there, and nothing is needed


class SegmentFolder:
    """The segments and spares of a folder. Every method blocks and may be called from any thread.

    `_lock` guards the lists, and is never held during a file operation. `drop_below` takes what it works on out of the
    list first, and never takes the active segment, which is the last; it is called by one thread at a time.
    """

    def __init__(self, vfs: Vfs, folder: str) -> None:
        self._vfs = vfs
        self.path = folder
        self._lock = threading.Lock()
        self._segments: list[int] = []  # by first_lsn
        self._spares: list[str] = []
        self._spare_number = -1  # no name is given twice, so no spare can replace another

    def examine(self, needed_from_lsn: int, needed_to_lsn: int) -> FoundJournal:
        """List the folder and check what opening relies on, without a change; `read` can be called then."""
        self._list()
        last, cut_roll = self._read_last(), None
        if self._segments and is_cut_roll(last, self._segments[-1]):
            cut_roll = self.segment_path(self._segments.pop())
            last = self._read_last()
        is_new = not self._segments and needed_from_lsn == 1 and needed_to_lsn == 0
        end = SegmentEnd(0, 1) if is_new else self._check(last, needed_from_lsn, needed_to_lsn)
        torn = torn_bytes(last, self._segments[-1], end.offset) if self._segments else 0
        return FoundJournal(end.next_lsn, end.offset, len(last), torn, cut_roll, is_new)

    def read(self, from_lsn: int, next_lsn: int) -> Iterator[Group]:
        """The groups from the one that holds `from_lsn` on, of a journal that goes on with `next_lsn`."""
        if from_lsn >= next_lsn:
            return
        with self._lock:
            segments = self._segments[self._find(from_lsn) : bisect_right(self._segments, next_lsn - 1)]
        for first_lsn, end in zip(segments, [*segments[1:], next_lsn], strict=True):
            for group in replay(self._read(first_lsn), first_lsn, end, self.segment_path(first_lsn)):
                group_end = group.first_lsn + len(group.records)
                if group_end > from_lsn:
                    yield group
                if group_end == next_lsn:  # what follows may be a group that is just being written
                    return

    def last(self) -> int:
        """The first lsn of the active segment."""
        with self._lock:
            return self._segments[-1]

    def add(self, first_lsn: int) -> None:
        """Note a new segment, which is the active one from now on."""
        with self._lock:
            self._segments.append(first_lsn)

    def take_spare(self) -> tuple[str, bool]:
        """A path for a new segment's file, and whether the file is there."""
        with self._lock:
            if self._spares:
                return self._spares.pop(), True
        return self._new_spare_path(), False

    def keep_spare(self, path: str) -> None:
        """Put back a spare that became no segment, if its file was made and not renamed."""
        if self._vfs.exists(path):
            with self._lock:
                self._spares.append(path)

    def drop_below(self, lsn: int, spares_max: int) -> None:
        """Give up segments that hold only records below `lsn`; some of them become spares."""
        with self._lock:
            count = max(bisect_right(self._segments, lsn) - 1, 0)  # the one that holds `lsn` stays
            dropped, self._segments = self._segments[:count], self._segments[count:]
            kept = min(max(spares_max - len(self._spares), 0), count)
        # No sync of our own. A crash brings back at most names of segments that nobody needs, and opening
        # never looks at those. A roll syncs the folder before such a file gets a new life's first group.
        try:
            while len(dropped) > kept:
                self._vfs.remove(self.segment_path(dropped[-1]))
                dropped.pop()
            while dropped:
                spare = self._new_spare_path()
                self._vfs.rename(self.segment_path(dropped[-1]), spare)
                dropped.pop()
                with self._lock:
                    self._spares.append(spare)
        finally:
            if dropped:  # an operation failed, and will be tried again: what is left must be known then
                with self._lock:
                    self._segments[:0] = dropped

    def drop_spares(self) -> None:
        """Remove the spares. A crash can bring them back, as spares."""
        while self.counts()[1]:
            path, _ = self.take_spare()
            try:
                self._vfs.remove(path)
            except OSError:
                self.keep_spare(path)
                raise

    def counts(self) -> tuple[int, int]:
        """The number of segments and of spares."""
        with self._lock:
            return len(self._segments), len(self._spares)

    def segment_path(self, first_lsn: int) -> str:
        return f"{self.path}/{first_lsn:016x}.seg"

    def _list(self) -> None:
        names = list_if_there(self._vfs, self.path)
        self._segments = sorted(int(match[1], 16) for match in map(SEGMENT_NAME.fullmatch, names) if match)
        spares = [match for match in map(SPARE_NAME.fullmatch, names) if match]
        self._spares = [f"{self.path}/{match[0]}" for match in spares]
        self._spare_number = max((int(match[1]) for match in spares), default=-1)

    def _check(self, last: bytes, needed_from_lsn: int, needed_to_lsn: int) -> SegmentEnd:
        """Check the headers from `needed_from_lsn` on and the whole last segment; returns where it ends.

        The groups of the others are checked by `read`, which has to read them anyway.
        """
        needed = self._segments[self._find(needed_from_lsn) :]
        for first_lsn in needed[:-1]:
            check_header(self._read(first_lsn, HEADER_BYTES), first_lsn, self.segment_path(first_lsn))
        end = find_end(last, needed[-1], self.segment_path(needed[-1]))
        needed_to_lsn = max(needed_to_lsn, needed_from_lsn - 1)
        if end.next_lsn <= needed_to_lsn:
            raise Corrupt(
                f"The journal ends before lsn {end.next_lsn}, but the manifests hold lsn {needed_to_lsn}",
                path=self.segment_path(needed[-1]),
                offset=end.offset,
                advice=ADVICE,
            )
        return end

    def _find(self, lsn: int) -> int:
        """The place in the list of the segment that holds `lsn`, or will."""
        place = bisect_right(self._segments, lsn) - 1
        if place < 0:
            raise Corrupt(
                f"The journal begins after lsn {lsn}, which is needed", path=self.path, advice=ADVICE
            )
        return place

    def _read_last(self) -> bytes:
        return self._read(self._segments[-1]) if self._segments else b""

    def _read(self, first_lsn: int, length_max: int | None = None) -> bytes:
        return read_file(self._vfs, self.segment_path(first_lsn), length_max)

    def _new_spare_path(self) -> str:
        with self._lock:
            self._spare_number += 1
            return f"{self.path}/spare-{self._spare_number:03d}.seg"


class LocalGroupLog:
    """A log of groups in the files of a folder.

    `_store` and `_begin_anew` run in the thread for appends. They own the active segment and its end; `_writing` keeps
    the next call out while a cancelled one may still run. Reads and removals have another thread: an append never
    waits for them.
    """

    def __init__(
        self,
        vfs: Vfs,
        folder: str,
        *,
        segment_bytes: int = 64 * MIB,
        spare_segments_max: int = 4,
        clock: Clock | None = None,
        executor: StepThread | Executor | None = None,
        upkeep_executor: Executor | None = None,
    ) -> None:
        self._vfs = vfs
        self.segments = SegmentFolder(vfs, folder)
        self._segment_bytes = segment_bytes
        self._spare_segments_max = spare_segments_max
        self._clock = clock or SystemClock()
        self._executor = executor
        self._upkeep_executor = upkeep_executor
        self._writing = threading.Lock()
        self._file: File | None = None
        self._first_lsn = 0  # of the active segment
        self._end = 0  # of its durable groups
        self._file_bytes = 0  # length of the active segment's file, or less; no group needs it
        self._is_lengthened = True  # False once that failed, until the next segment
        self._is_left = False  # the active segment, for a next one: it gets no group any more
        self._in_doubt: WriteFailed | None = None  # of a roll that no append waited for
        self._next_index = 1
        self._tails: set[Callable[[], object]] = set()  # each wakes one

    def open(self, needed_from_lsn: int, needed_to_lsn: int) -> None:
        """Open the log, or make it if none is needed yet (from 1 to 0); cuts a torn tail. Blocks.

        `needed_from_lsn` is the first lsn that a manifest does not hold, `needed_to_lsn` the last that one
        does. A log that begins later or ends earlier is damage, not a tail, and raises Corrupt.
        """
        examined = self.segments.examine(needed_from_lsn, needed_to_lsn)
        # All checks are behind us; only now anything changes, so a folder that is refused stays as it was.
        folder = self.segments.path
        self._vfs.make_dir(folder)
        self._vfs.sync_dir(folder.rpartition("/")[0] or ".")
        if examined.cut_roll is not None:
            # Gone for good with the next sync of the folder, which is before any roll.
            self._vfs.remove(examined.cut_roll)
        self._next_index = examined.next_lsn
        if examined.is_new:
            self._roll(first_lsn=1)
        else:
            if examined.torn_bytes:
                log.warning(
                    "Discarded an incomplete group at the end of the journal: a crash interrupted its write before it "
                    "was acknowledged, or it was damaged since",
                    path=self.segments.segment_path(self.segments.last()),
                    offset=examined.end_offset,
                    bytes=examined.torn_bytes,
                )
            file_bytes, needed_next_lsn = examined.file_bytes, max(needed_from_lsn, needed_to_lsn + 1)
            if examined.end_offset > HEADER_BYTES and examined.next_lsn > needed_next_lsn:
                file_bytes = examined.end_offset if self._renew(examined.end_offset) else file_bytes
            self._resume(examined.end_offset, file_bytes)

    @property
    def next_index(self) -> int:
        return self._next_index

    @property
    def stored_bytes(self) -> int:
        return (sum(self.segments.counts()) - 1) * self._segment_bytes + self._end

    def append(self, index: int, records: Sequence[NewRecord]) -> asyncio.Future[StoredGroup]:
        return begin_step(self._executor, self._store, index, records)

    def read(self, index: int) -> Iterator[Group]:
        return self.segments.read(index, self._next_index)

    async def tail(self, index: int, wait_ms: int) -> Group | None:
        loop, grown = asyncio.get_running_loop(), asyncio.Event()
        tail = partial(loop.call_soon_threadsafe, grown.set)
        self._tails.add(tail)  # before we look, or a group that is stored meanwhile would wake nobody
        try:
            async with asyncio.timeout(wait_ms / 1e3):
                while self._next_index <= index:
                    grown.clear()
                    await grown.wait()
        except TimeoutError:
            pass
        finally:
            self._tails.discard(tail)
        return await run_step(self._upkeep_executor, lambda: next(self.read(index), None))

    async def trim(self, below: int) -> None:
        """Whole segments go, so some groups below may stay."""
        await run_step(
            self._upkeep_executor, lambda: self.segments.drop_below(below, self._spare_segments_max)
        )

    async def shrink(self, below: int) -> None:
        await run_step(self._upkeep_executor, self.segments.drop_spares)
        await begin_step(self._executor, self._begin_anew, below)
        await run_step(self._upkeep_executor, lambda: self.segments.drop_below(below, 0))

    async def close(self) -> None:
        await begin_step(self._executor, self._close)

    def _store(self, index: int, records: Sequence[NewRecord]) -> StoredGroup:
        """Write one group and sync it; before that, roll if the segment is full."""
        with self._writing:
            if index != self._next_index:
                raise Fenced(
                    f"The journal goes on with lsn {self._next_index}, not with {index}",
                    reason="JOURNAL_FENCED",
                )
            if self._in_doubt is not None:
                raise self._in_doubt
            if (self._is_left or self._end >= self._segment_bytes) and index > self._first_lsn:
                self._roll(index)
            assert self._file is not None
            parts, length = encode_group(self._first_lsn, self._end, records)
            self._lengthen(self._end + length)
            started_ns = self._clock.monotonic_ns()
            self._file.pwrite_synced(parts, self._end)
            self._end += length
            self._next_index = index + len(records)
            for wake in tuple(self._tails):
                wake()
            return StoredGroup(length, (self._clock.monotonic_ns() - started_ns) / 1e9)

    def _lengthen(self, end: int) -> None:
        """Make the file longer ahead of a group that ends there; what lies beyond the groups verifies as nothing.

        That fails near a limit of file sizes, for example. No byte of a group is in doubt then: its write decides.
        """
        assert self._file is not None
        if end <= self._file_bytes or not self._is_lengthened:
            return
        length = max(end, min(end + _GROWTH_BYTES, self._segment_bytes))
        try:
            self._file.truncate(length)
        except WriteFailed as error:
            self._is_lengthened = False
            log.warning("A journal file could not be preallocated", error=error)
        else:
            self._file_bytes = length

    def _begin_anew(self, below: int) -> None:
        """Leave a large segment that ends before `below` for a new one."""
        with self._writing:
            taken_bytes = max(self._end, self._file_bytes - _GROWTH_BYTES)
            if self._file is None or not self._first_lsn < below == self._next_index:
                return
            if taken_bytes < self._segment_bytes // _SHRINK_SHARE and not self._is_left:
                return
            if self._vfs.free_bytes(self.segments.path) < _GROWTH_BYTES:
                return  # a header that finds no room would end writing
            self._is_left = True
            try:
                self._roll(below)
            except WriteFailed as error:  # an append may be next in the thread, before anybody was told
                self._in_doubt = error
                raise

    def _close(self) -> None:
        with self._writing:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _renew(self, end: int) -> bool:
        """Put the groups of the last segment, which end there, into a file whose sync tells the truth.

        Returns False where the disk has no room for it: a broker that makes room must be able to start.
        """
        path, is_there = self.segments.take_spare()
        segment_path = self.segments.segment_path(self.segments.last())
        try:
            with contextlib.ExitStack() as files:
                source = self._vfs.open(segment_path)
                files.callback(source.close)
                file = self._vfs.open(path, create=not is_there)
                files.callback(file.close)
                for offset in range(0, end, MIB):
                    # By way of memory: a copy within the file system may take what is on the disk.
                    file.pwrite([source.pread(min(MIB, end - offset), offset)], offset)
                if file.size() > end:
                    file.truncate(end)
                file.sync()
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            if self._vfs.exists(path):
                self._vfs.remove(path)
            log.warning(
                "The end of the journal could not be written again, as the disk has no room. If the broker stopped "
                "because a write or a sync failed, restart the machine before anything is produced",
                path=segment_path,
                error=error,
            )
            return False
        self._vfs.rename(path, segment_path)
        return True

    def _resume(self, end: int, file_bytes: int) -> None:
        """Cut what follows the last good group of the last segment, and go on writing there."""
        self._first_lsn, self._end = self.segments.last(), end
        self._file = self._vfs.open(self.segments.segment_path(self._first_lsn))
        if file_bytes > end:
            self._file.truncate(end)
        self._file_bytes = end
        # Both syncs are needed even if nothing was cut. A broker that was killed, without a crash of the
        # machine, can leave a group or a name that we see and may act on, but that is not on disk yet.
        self._file.sync()
        self._vfs.sync_dir(self.segments.path)

    def _roll(self, first_lsn: int) -> None:
        """Begin a new segment, in the order that the head of this module explains."""
        path, is_there = self.segments.take_spare()
        with contextlib.ExitStack() as undo:
            # What fails without a write lost is tried again: the spare is needed then, and the descriptor is not.
            undo.callback(self.segments.keep_spare, path)
            file = self._vfs.open(path, create=not is_there)
            undo.callback(file.close)
            file.pwrite([encode_header(first_lsn)], 0)
            file.sync()
            file_bytes = file.size()
            self._vfs.rename(path, self.segments.segment_path(first_lsn))
            self._vfs.sync_dir(self.segments.path)
            undo.pop_all()
        if self._file is not None:
            self._file.close()
        self._file, self._first_lsn, self._end = file, first_lsn, HEADER_BYTES
        self._file_bytes, self._is_lengthened, self._is_left = file_bytes, True, False
        self.segments.add(first_lsn)
