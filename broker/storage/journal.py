"""The journal: the one durable log, as a folder of segments, with group commit.

    <folder>/%016x.seg      a segment, named by its first_lsn; layout in `segment.py`, whose S1..S4 hold here
    <folder>/spare-NNN.seg  a file that waits to become one: a dropped segment, or one being made

`Journal` runs on the event loop and decides: it gathers what is submitted, gives out lsns, calls `apply` and
completes futures. `_Files` blocks, runs in the file thread and writes one group at a time. While one group is
written and synced, the next gathers; it is written only after the sync returned (S3).

Roll. A segment that has passed `segment_bytes` is complete (S4), as the sync of its last group has returned.
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
"""

from __future__ import annotations

import asyncio
import re
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from broker.errors import Corrupt, OutOfRange, StorageFailed, Unavailable
from broker.runtime.clock import Clock, SystemClock
from broker.runtime.vfs import Buffer, File, Vfs
from broker.storage.frame import (
    LENGTH_MAX,
    RECORD_TYPE_FIRST,
    RECORD_TYPE_LAST,
    Part,
    byte_parts,
    encode_group,
    framed_bytes,
)
from broker.storage.segment import (
    ADVICE,
    HEADER_BYTES,
    Line,
    SegmentEnd,
    check_header,
    describe,
    encode_header,
    find_end,
    is_cut_roll,
    replay,
)

T = TypeVar("T")

MIB = 1 << 20

_SEGMENT_NAME = re.compile(r"([0-9a-f]{16})\.seg")
_SPARE_NAME = re.compile(r"spare-([0-9]{3,})\.seg")


@dataclass(frozen=True, slots=True)
class JournalStats:
    """What the journal has done since it was opened, and what it holds now."""

    groups: int
    records: int
    bytes: int
    sync_seconds: float
    sync_seconds_last: float
    segments: int
    spares: int
    pending_bytes: int
    durable_lsn: int


class _Submitted(NamedTuple):
    """A record on its way to the disk."""

    record_type: int
    parts: list[Buffer]
    body_bytes: int
    apply: Callable[[int], Any]
    future: asyncio.Future[Any]


class _Group(NamedTuple):
    """The records of one group commit."""

    first_lsn: int
    records: list[_Submitted]
    framed_bytes: int


class _Written(NamedTuple):
    """What it took to make a group durable."""

    bytes: int
    sync_seconds: float


class Journal:
    """Makes records durable, many with one sync, and applies them in lsn order.

    A submitted record is queued, then in the group being written, then durable. `apply` runs only then, and
    every `apply` of a group before anybody is told. After a failure the journal is `failed` for good: nothing
    is written any more, because after a failed sync nobody knows what is on disk, and a sync that succeeds
    later would vouch for bytes that the system has dropped. Whoever waits gets `StorageFailed`, which leaves
    open whether the record is on disk; the next recovery settles that.
    """

    def __init__(
        self,
        files: _Files,
        *,
        record_bytes_max: int,
        group_bytes_max: int,
        pending_bytes_max: int,
        executor: Executor | None,
        on_failed: Callable[[StorageFailed], None] | None,
        observe_sync: Callable[[float], None] | None,
    ) -> None:
        assert 0 < record_bytes_max <= LENGTH_MAX
        self._files = files
        self._record_bytes_max = record_bytes_max
        self._group_bytes_max = group_bytes_max
        self._pending_bytes_max = pending_bytes_max
        self._executor = executor
        self._on_failed = on_failed
        self._observe_sync = observe_sync
        self._queue: deque[_Submitted] = deque()
        self._taken: deque[_Group] = deque()  # being written, or durable and not settled; two at most
        self._submitted: asyncio.Future[None] | None = None  # what `run` waits for while the queue is empty
        self._room: list[asyncio.Future[None]] = []
        self._started = False
        self._stopped = asyncio.Event()
        self._closing = False
        self._failed: StorageFailed | None = None
        self._next_lsn = files.next_lsn
        self._durable_lsn = files.next_lsn - 1
        self._pending_bytes = 0
        self._groups = 0
        self._appended_bytes = 0
        self._sync_seconds = 0.0
        self._sync_seconds_last = 0.0

    @classmethod
    def open(
        cls,
        vfs: Vfs,
        folder: str,
        *,
        needed_from_lsn: int,
        needed_to_lsn: int,
        segment_bytes: int = 64 * MIB,
        spare_segments_max: int = 4,
        record_bytes_max: int = 64 * MIB,
        group_bytes_max: int = 8 * MIB,
        pending_bytes_max: int = 64 * MIB,
        executor: Executor | None = None,
        clock: Clock | None = None,
        on_failed: Callable[[StorageFailed], None] | None = None,
        observe_sync: Callable[[float], None] | None = None,
    ) -> Journal:
        """Open the journal, or make it if none is needed yet (from 1 to 0); cuts a torn tail. Blocks.

        `needed_from_lsn` is the first lsn that a manifest does not hold, `needed_to_lsn` the last that one
        does. A journal that begins later or ends earlier is damage, not a tail, and raises Corrupt.
        """
        files = _Files(vfs, folder, segment_bytes, spare_segments_max, clock or SystemClock())
        files.open(needed_from_lsn, needed_to_lsn)
        return cls(
            files,
            record_bytes_max=record_bytes_max,
            group_bytes_max=group_bytes_max,
            pending_bytes_max=pending_bytes_max,
            executor=executor,
            on_failed=on_failed,
            observe_sync=observe_sync,
        )

    @property
    def next_lsn(self) -> int:
        """The lsn of the first record that no group has taken yet."""
        return self._next_lsn

    @property
    def durable_lsn(self) -> int:
        """The lsn of the last record that no crash can take back; what is applied, except within `apply`."""
        return self._durable_lsn

    @property
    def pending_bytes(self) -> int:
        """What is queued or being written, framed."""
        return self._pending_bytes

    @property
    def appended_bytes(self) -> int:
        """All that became durable since opening; a checkpoint remembers it and compares."""
        return self._appended_bytes

    @property
    def failed(self) -> StorageFailed | None:
        return self._failed

    def stats(self) -> JournalStats:
        segments, spares = self._files.counts()
        return JournalStats(
            groups=self._groups,
            records=self._durable_lsn - self._files.recovered_lsn,
            bytes=self._appended_bytes,
            sync_seconds=self._sync_seconds,
            sync_seconds_last=self._sync_seconds_last,
            segments=segments,
            spares=spares,
            pending_bytes=self._pending_bytes,
            durable_lsn=self._durable_lsn,
        )

    def replay(self, from_lsn: int) -> Iterator[tuple[int, int, memoryview]]:
        """Every durable (lsn, type, body) from `from_lsn` on. Blocks; for recovery, before `run` starts."""
        return self._files.replay(from_lsn)

    def drop_below(self, lsn: int) -> None:
        """Give up segments that hold only records below `lsn`. Blocks; any thread but one at a time.

        Call it only when the manifests that do without these records are durable.
        """
        self._files.drop_below(lsn)

    def submit(self, record_type: int, parts: Sequence[Part], apply: Callable[[int], T]) -> asyncio.Future[T]:
        """Queue one record; its future completes once the record is durable and applied.

        `apply(lsn)` runs on the loop, in lsn order, and gives the future its result. Cancelling the future
        changes nothing else. Buffers must not change until then.
        """
        self._check_open()
        assert RECORD_TYPE_FIRST <= record_type <= RECORD_TYPE_LAST
        buffers, body_bytes = byte_parts(parts)
        if body_bytes > self._record_bytes_max:
            raise OutOfRange(
                f"A record of {body_bytes} bytes is over the journal's limit of {self._record_bytes_max}",
                limit=self._record_bytes_max,
            )
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.append(_Submitted(record_type, buffers, body_bytes, apply, future))
        self._pending_bytes += framed_bytes(body_bytes)
        self._wake_run()
        return future

    async def wait_room(self) -> None:
        """Wait until there is room for a record; raises StorageFailed if there will never be."""
        while self._pending_bytes >= self._pending_bytes_max and self._failed is None:
            # Whoever is woken looks again, because those woken before it have submitted meanwhile.
            waiter = asyncio.get_running_loop().create_future()
            self._room.append(waiter)
            await waiter
        self._check_open()

    async def run(self) -> None:
        """Write groups until `close` or a failure; a failure is told to `on_failed`. Runs once."""
        if self._started:  # `close` came before the first step of our task, and writes what is queued
            return
        self._started = True
        try:
            await self._write_groups()
        except OSError as error:
            self._fail(f"The journal could not be written: {error}", error)
        except asyncio.CancelledError as error:
            # Nobody would write what is queued, and a group may be half written: its outcome is unknown.
            self._fail("The journal was stopped before this record was durable", error, report=False)
            raise
        except BaseException as error:
            self._fail("The journal stopped on a bug", error)
            raise
        finally:
            self._stopped.set()

    async def close(self) -> None:
        """Write what is queued, then close the files. Later submits are refused."""
        self._closing = True
        self._wake_run()
        await self.run()
        await self._stopped.wait()
        await asyncio.get_running_loop().run_in_executor(self._executor, self._files.close)

    async def _write_groups(self) -> None:
        while await self._wait_queued():
            write: asyncio.Future[_Written] | None = self._start_write()
            while write is not None:
                write = self._finish_write(await write)

    async def _wait_queued(self) -> bool:
        """Wait for a record; False if none will come."""
        if not self._queue and not self._closing and self._failed is None:
            self._submitted = asyncio.get_running_loop().create_future()
            await self._submitted
        return bool(self._queue)

    def _wake_run(self) -> None:
        if self._submitted is not None and not self._submitted.done():
            self._submitted.set_result(None)

    def _start_write(self) -> asyncio.Future[_Written]:
        group = self._take_group()
        self._taken.append(group)
        return asyncio.get_running_loop().run_in_executor(self._executor, self._files.append, group)

    def _take_group(self) -> _Group:
        """All that is queued, up to `group_bytes_max`, and one record at least."""
        queue, group_bytes = self._queue, 0
        records: list[_Submitted] = []
        while queue and (
            not records or group_bytes + framed_bytes(queue[0].body_bytes) <= self._group_bytes_max
        ):
            group_bytes += framed_bytes(queue[0].body_bytes)
            records.append(queue.popleft())
        group = _Group(self._next_lsn, records, group_bytes)
        self._next_lsn += len(records)
        return group

    def _finish_write(self, written: _Written) -> asyncio.Future[_Written] | None:
        """Settle the group whose sync has returned; returns the write of the next group, if there is one."""
        durable = self._taken[0]
        # What has gathered goes to the disk first, so that the disk works while we apply.
        write = self._start_write() if self._queue else None
        self._durable_lsn = durable.first_lsn + len(durable.records) - 1
        self._pending_bytes -= durable.framed_bytes
        self._groups += 1
        self._appended_bytes += written.bytes
        self._sync_seconds += written.sync_seconds
        self._sync_seconds_last = written.sync_seconds
        self._settle(durable)
        if self._failed is not None:
            return None
        self._taken.popleft()
        self._wake_room()
        if self._observe_sync is not None:
            self._observe_sync(written.sync_seconds)
        return write

    def _settle(self, group: _Group) -> None:
        """Apply a durable group, all of it; only then tell anybody."""
        results: list[Any] = []
        bug: Exception | None = None
        for lsn, submitted in enumerate(group.records, group.first_lsn):
            # Whatever goes wrong in here, memory no longer agrees with the log: the record is durable and
            # cannot be refused any more. So nothing may be applied after it, and the broker must recover.
            try:
                results.append(submitted.apply(lsn))
            except Exception as error:
                bug = error
                break
        for submitted, result in zip(group.records, results, strict=False):
            if not submitted.future.done():  # cancelled: the record stands all the same
                submitted.future.set_result(result)
        if bug is not None:
            _set_exception(group.records[len(results)].future, bug)
            self._fail(f"The journal stopped: a durable record could not be applied: {bug!r}", bug)

    def _fail(self, message: str, cause: BaseException | None, *, report: bool = True) -> None:
        """Stop for good and tell everybody who waits."""
        if self._failed is not None:
            return
        failure = StorageFailed(message)
        failure.__cause__ = cause
        self._failed = failure
        waiting = [*chain.from_iterable(group.records for group in self._taken), *self._queue]
        self._taken.clear()
        self._queue.clear()
        self._pending_bytes = 0
        for submitted in waiting:
            _set_exception(submitted.future, self._refusal())
        self._wake_room()
        if report and self._on_failed is not None:
            self._on_failed(failure)

    def _wake_room(self) -> None:
        if self._room and self._pending_bytes < self._pending_bytes_max:
            waiters, self._room = self._room, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _check_open(self) -> None:
        if self._failed is not None:
            raise self._refusal()
        if self._closing:
            raise Unavailable("The journal is closed")

    def _refusal(self) -> StorageFailed:
        # One instance each: an exception raised in many tasks would gather all their tracebacks.
        assert self._failed is not None
        refusal = StorageFailed(self._failed.message)
        refusal.__cause__ = self._failed.__cause__
        return refusal


def _set_exception(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        # Not everybody waits for their future. `on_failed` has told of the failure, once; without this line
        # asyncio would log it again for each of them.
        future.exception()


def dump(vfs: Vfs, path: str) -> Iterator[Line]:
    """A segment as JSON-able lines, also a damaged one; needs no running broker and changes nothing."""
    match = _SEGMENT_NAME.fullmatch(path.rpartition("/")[2])
    yield from describe(_read_file(vfs, path), int(match[1], 16) if match else 0, path)


class _Files:
    """The files of the journal. Every method blocks.

    `append` owns the active segment and its end; no other method touches them, and `_writing` keeps the next
    call out while a cancelled one may still run. `_segments` and `_spares` are shared with `drop_below`, in
    another thread; `_lock` guards them and is never held during a file operation. `drop_below` takes what it
    works on out of the list first, and never takes the active segment.
    """

    def __init__(
        self, vfs: Vfs, folder: str, segment_bytes: int, spare_segments_max: int, clock: Clock
    ) -> None:
        self._vfs = vfs
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._spare_segments_max = spare_segments_max
        self._clock = clock
        self._writing = threading.Lock()
        self._file: File | None = None
        self._first_lsn = 0
        self._end = 0
        self._lock = threading.Lock()
        self._segments: list[int] = []  # by first_lsn; the last is the active one
        self._spares: list[str] = []
        self._spare_number = -1  # no name is given twice, so no spare can replace another
        self.next_lsn = 1
        self.recovered_lsn = 0

    def open(self, needed_from_lsn: int, needed_to_lsn: int) -> None:
        self._list()
        last, cut_roll = self._read_last(), None
        if self._segments and is_cut_roll(last, self._segments[-1]):
            cut_roll = self._path(self._segments.pop())
            last = self._read_last()
        is_new = not self._segments and needed_from_lsn == 1 and needed_to_lsn == 0
        end = SegmentEnd(0, 1) if is_new else self._check(last, needed_from_lsn, needed_to_lsn)
        # All checks are behind us; only now anything changes, so a folder that is refused stays as it was.
        self._vfs.make_dir(self._folder)
        self._vfs.sync_dir(self._folder.rpartition("/")[0] or ".")
        if cut_roll is not None:  # gone for good with the next sync of the folder, which is before any roll
            self._vfs.remove(cut_roll)
        self.next_lsn, self.recovered_lsn = end.next_lsn, end.next_lsn - 1
        if is_new:
            self._roll(first_lsn=1)
        else:
            self._resume(end.offset, len(last))

    def replay(self, from_lsn: int) -> Iterator[tuple[int, int, memoryview]]:
        segments = self._segments[self._find(from_lsn) :]
        for first_lsn, next_lsn in zip(segments, [*segments[1:], self.recovered_lsn + 1], strict=True):
            for group in replay(self._read(first_lsn), first_lsn, next_lsn, self._path(first_lsn)):
                for lsn, record in enumerate(group.records, group.first_lsn):
                    if lsn >= from_lsn:
                        yield lsn, record.type, record.body

    def append(self, group: _Group) -> _Written:
        """Write one group and sync it; before that, roll if the segment is full."""
        with self._writing:
            if self._end >= self._segment_bytes and group.first_lsn > self._first_lsn:
                self._roll(group.first_lsn)
            assert self._file is not None
            records = [(record.record_type, record.parts, record.body_bytes) for record in group.records]
            parts, length = encode_group(self._first_lsn, self._end, records)
            self._file.pwrite(parts, self._end)
            started_ns = self._clock.monotonic_ns()
            self._file.sync()
            self._end += length
            return _Written(length, (self._clock.monotonic_ns() - started_ns) / 1e9)

    def drop_below(self, lsn: int) -> None:
        with self._lock:
            count = max(bisect_right(self._segments, lsn) - 1, 0)  # the one that holds `lsn` stays
            dropped, self._segments = self._segments[:count], self._segments[count:]
            kept = min(max(self._spare_segments_max - len(self._spares), 0), count)
        # No sync of our own. A crash brings back at most names of segments that nobody needs, and opening
        # never looks at those. A roll syncs the folder before such a file gets a new life's first group.
        for first_lsn in dropped[kept:]:
            self._vfs.remove(self._path(first_lsn))
        for first_lsn in dropped[:kept]:
            spare = self._spare_path()
            self._vfs.rename(self._path(first_lsn), spare)
            with self._lock:
                self._spares.append(spare)

    def counts(self) -> tuple[int, int]:
        """How many segments and spares there are."""
        with self._lock:
            return len(self._segments), len(self._spares)

    def close(self) -> None:
        with self._writing:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _list(self) -> None:
        names = self._vfs.list_dir(self._folder) if self._vfs.exists(self._folder) else []
        self._segments = sorted(int(match[1], 16) for match in map(_SEGMENT_NAME.fullmatch, names) if match)
        spares = [match for match in map(_SPARE_NAME.fullmatch, names) if match]
        self._spares = [f"{self._folder}/{match[0]}" for match in spares]
        self._spare_number = max((int(match[1]) for match in spares), default=-1)

    def _check(self, last: bytes, needed_from_lsn: int, needed_to_lsn: int) -> SegmentEnd:
        """Check the headers from `needed_from_lsn` on and the whole last segment; returns where it ends.

        The groups of the others are checked by `replay`, which has to read them anyway.
        """
        needed = self._segments[self._find(needed_from_lsn) :]
        for first_lsn in needed[:-1]:
            check_header(self._read(first_lsn, HEADER_BYTES), first_lsn, self._path(first_lsn))
        end = find_end(last, needed[-1], self._path(needed[-1]))
        needed_to_lsn = max(needed_to_lsn, needed_from_lsn - 1)
        if end.next_lsn <= needed_to_lsn:
            raise Corrupt(
                f"The journal ends before lsn {end.next_lsn}, but the manifests hold lsn {needed_to_lsn}",
                path=self._path(needed[-1]),
                offset=end.offset,
                advice=ADVICE,
            )
        return end

    def _find(self, lsn: int) -> int:
        """The index of the segment that holds `lsn`, or will."""
        index = bisect_right(self._segments, lsn) - 1
        if index < 0:
            raise Corrupt(
                f"The journal begins after lsn {lsn}, which is needed", path=self._folder, advice=ADVICE
            )
        return index

    def _resume(self, end: int, file_bytes: int) -> None:
        """Cut what follows the last good group of the last segment, and go on writing there."""
        self._first_lsn, self._end = self._segments[-1], end
        self._file = self._vfs.open(self._path(self._first_lsn))
        if file_bytes > end:
            self._file.truncate(end)
        # Both syncs are needed even if nothing was cut. A broker that was killed, without a crash of the
        # machine, can leave a group or a name that we see and may act on, but that is not on disk yet.
        self._file.sync()
        self._vfs.sync_dir(self._folder)

    def _roll(self, first_lsn: int) -> None:
        """Begin a new segment, in the order that the head of this module explains."""
        with self._lock:
            spare = self._spares.pop() if self._spares else None
        path = spare or self._spare_path()
        file = self._vfs.open(path, create=spare is None)
        file.pwrite([encode_header(first_lsn)], 0)
        file.sync()
        self._vfs.rename(path, self._path(first_lsn))
        self._vfs.sync_dir(self._folder)
        if self._file is not None:
            self._file.close()
        self._file, self._first_lsn, self._end = file, first_lsn, HEADER_BYTES
        with self._lock:
            self._segments.append(first_lsn)

    def _read_last(self) -> bytes:
        return self._read(self._segments[-1]) if self._segments else b""

    def _read(self, first_lsn: int, length_max: int | None = None) -> bytes:
        return _read_file(self._vfs, self._path(first_lsn), length_max)

    def _path(self, first_lsn: int) -> str:
        return f"{self._folder}/{first_lsn:016x}.seg"

    def _spare_path(self) -> str:
        with self._lock:
            self._spare_number += 1
            return f"{self._folder}/spare-{self._spare_number:03d}.seg"


def _read_file(vfs: Vfs, path: str, length_max: int | None = None) -> bytes:
    file = vfs.open(path)
    try:
        return file.pread(file.size() if length_max is None else length_max, 0)
    finally:
        file.close()
