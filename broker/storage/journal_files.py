"""The journal's folder: which files there are, which one is written, what opening finds and mends.

    <folder>/%016x.seg      a segment, named by its first_lsn; layout in `segment.py`, whose S1..S4 hold here
    <folder>/spare-NNN.seg  a file that waits to become one: a dropped segment, or one being made

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

import contextlib
import re
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from broker.errors import Corrupt
from broker.observe.logs import get_logger
from broker.runtime.clock import Clock
from broker.runtime.vfs import Buffer, File, Vfs, list_if_there
from broker.storage.frame import encode_group
from broker.storage.segment import (
    ADVICE,
    HEADER_BYTES,
    SegmentEnd,
    check_header,
    encode_header,
    find_end,
    is_cut_roll,
    replay,
    torn_bytes,
)

log = get_logger(__name__)

SEGMENT_NAME = re.compile(r"([0-9a-f]{16})\.seg")
SPARE_NAME = re.compile(r"spare-([0-9]{3,})\.seg")


class WrittenGroup(NamedTuple):
    """What it took to make a group durable."""

    bytes: int
    sync_seconds: float


class FoundJournal(NamedTuple):
    """What a look at the folder found. The last segment may be longer than its groups."""

    end_offset: int
    file_bytes: int
    torn_bytes: int  # of a last group that is not whole, as far as it can be told from a former life
    cut_roll: str | None  # the last file, if a crash cut its making
    is_new: bool  # nothing is there, and nothing is needed


class JournalFiles:
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
        found = self.examine(needed_from_lsn, needed_to_lsn)
        # All checks are behind us; only now anything changes, so a folder that is refused stays as it was.
        self._vfs.make_dir(self._folder)
        self._vfs.sync_dir(self._folder.rpartition("/")[0] or ".")
        if (
            found.cut_roll is not None
        ):  # gone for good with the next sync of the folder, which is before any roll
            self._vfs.remove(found.cut_roll)
        if found.is_new:
            self._roll(first_lsn=1)
        else:
            if found.torn_bytes:
                log.warning(
                    "The last group of the journal is not whole and is dropped: a crash cut it before anybody was "
                    "answered, or it was damaged since",
                    path=self._path(self._segments[-1]),
                    offset=found.end_offset,
                    bytes=found.torn_bytes,
                )
            self._resume(found.end_offset, found.file_bytes)

    def examine(self, needed_from_lsn: int, needed_to_lsn: int) -> FoundJournal:
        """List the folder and check what opening relies on, without a change; `replay` can read it then."""
        self._list()
        last, cut_roll = self._read_last(), None
        if self._segments and is_cut_roll(last, self._segments[-1]):
            cut_roll = self._path(self._segments.pop())
            last = self._read_last()
        is_new = not self._segments and needed_from_lsn == 1 and needed_to_lsn == 0
        end = SegmentEnd(0, 1) if is_new else self._check(last, needed_from_lsn, needed_to_lsn)
        self.next_lsn, self.recovered_lsn = end.next_lsn, end.next_lsn - 1
        torn = torn_bytes(last, self._segments[-1], end.offset) if self._segments else 0
        return FoundJournal(end.offset, len(last), torn, cut_roll, is_new)

    def replay(self, from_lsn: int) -> Iterator[tuple[int, int, memoryview]]:
        segments = self._segments[self._find(from_lsn) :]
        for first_lsn, next_lsn in zip(segments, [*segments[1:], self.recovered_lsn + 1], strict=True):
            for group in replay(self._read(first_lsn), first_lsn, next_lsn, self._path(first_lsn)):
                for lsn, record in enumerate(group.records, group.first_lsn):
                    if lsn >= from_lsn:
                        yield lsn, record.type, record.body

    def append(self, first_lsn: int, records: Iterable[tuple[int, Sequence[Buffer], int]]) -> WrittenGroup:
        """Write one group, as (type, parts, body_bytes), and sync it; before that, roll if the segment is full."""
        with self._writing:
            if self._end >= self._segment_bytes and first_lsn > self._first_lsn:
                self._roll(first_lsn)
            assert self._file is not None
            parts, length = encode_group(self._first_lsn, self._end, records)
            self._file.pwrite(parts, self._end)
            started_ns = self._clock.monotonic_ns()
            self._file.sync()
            self._end += length
            return WrittenGroup(length, (self._clock.monotonic_ns() - started_ns) / 1e9)

    def drop_below(self, lsn: int) -> None:
        with self._lock:
            count = max(bisect_right(self._segments, lsn) - 1, 0)  # the one that holds `lsn` stays
            dropped, self._segments = self._segments[:count], self._segments[count:]
            kept = min(max(self._spare_segments_max - len(self._spares), 0), count)
        # No sync of our own. A crash brings back at most names of segments that nobody needs, and opening
        # never looks at those. A roll syncs the folder before such a file gets a new life's first group.
        try:
            while len(dropped) > kept:
                self._vfs.remove(self._path(dropped[-1]))
                dropped.pop()
            while dropped:
                spare = self._spare_path()
                self._vfs.rename(self._path(dropped[-1]), spare)
                dropped.pop()
                with self._lock:
                    self._spares.append(spare)
        finally:
            if dropped:  # an operation failed, and will be tried again: what is left must be known then
                with self._lock:
                    self._segments[:0] = dropped

    def counts(self) -> tuple[int, int]:
        """Return how many segments and spares there are."""
        with self._lock:
            return len(self._segments), len(self._spares)

    def close(self) -> None:
        with self._writing:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _list(self) -> None:
        names = list_if_there(self._vfs, self._folder)
        self._segments = sorted(int(match[1], 16) for match in map(SEGMENT_NAME.fullmatch, names) if match)
        spares = [match for match in map(SPARE_NAME.fullmatch, names) if match]
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
        with contextlib.ExitStack() as undo:
            # What fails without a write lost is tried again: the spare is needed then, and the descriptor is not.
            undo.callback(self._keep_spare, path)
            file = self._vfs.open(path, create=spare is None)
            undo.callback(file.close)
            file.pwrite([encode_header(first_lsn)], 0)
            file.sync()
            self._vfs.rename(path, self._path(first_lsn))
            self._vfs.sync_dir(self._folder)
            undo.pop_all()
        if self._file is not None:
            self._file.close()
        self._file, self._first_lsn, self._end = file, first_lsn, HEADER_BYTES
        with self._lock:
            self._segments.append(first_lsn)

    def _keep_spare(self, path: str) -> None:
        if self._vfs.exists(path):  # not made, or renamed already
            with self._lock:
                self._spares.append(path)

    def _read_last(self) -> bytes:
        return self._read(self._segments[-1]) if self._segments else b""

    def _read(self, first_lsn: int, length_max: int | None = None) -> bytes:
        return read_file(self._vfs, self._path(first_lsn), length_max)

    def _path(self, first_lsn: int) -> str:
        return f"{self._folder}/{first_lsn:016x}.seg"

    def _spare_path(self) -> str:
        with self._lock:
            self._spare_number += 1
            return f"{self._folder}/spare-{self._spare_number:03d}.seg"


def read_file(vfs: Vfs, path: str, length_max: int | None = None) -> bytes:
    file = vfs.open(path)
    try:
        return file.pread(file.size() if length_max is None else length_max, 0)
    finally:
        file.close()
