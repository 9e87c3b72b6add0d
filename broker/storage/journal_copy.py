"""A copy of a part of a journal that goes on being written: the records from one lsn to another.

The copy is a journal of its own, which begins with the first of them and ends with the last, group by group. Bytes
below the end of the last durable group never change (JOURNAL-1), so nothing is locked; segments that hold the records
must not be dropped meanwhile. Everything blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from broker.errors import Corrupt
from broker.runtime.vfs import File, Vfs
from broker.storage.frame import encode_group
from broker.storage.local_group_log import SEGMENT_NAME
from broker.storage.segment import ADVICE, HEADER_BYTES, Group, check_header, encode_header, read_group

_READ_BYTES = 1 << 20


class JournalCopy:
    """A copy of what is durable of the journal in folder `source`, made in the empty folder `target`.

    With `to_lsn` before `from_lsn` it is a journal without records that begins at `from_lsn`.
    """

    def __init__(
        self, vfs: Vfs, source: str, target: str, from_lsn: int, to_lsn: int, segment_bytes: int
    ) -> None:
        self._vfs = vfs
        self._source = source
        self._target = target
        self._from_lsn = from_lsn
        self._to_lsn = to_lsn
        self._segment_bytes = segment_bytes
        self.record_types: set[int] = set()
        """Of the records copied so far."""

    def steps(self) -> Iterator[int]:
        """Make it, durably; yields the bytes that each step wrote."""
        writer = _Writer(self._vfs, self._target, self._from_lsn, self._segment_bytes)
        try:
            for group in self._groups():
                self.record_types.update(record.type for record in group.records)
                yield writer.write(group, self._from_lsn)
            writer.finish()
            yield HEADER_BYTES
        finally:
            writer.close()
        self._vfs.sync_dir(self._target)

    def remove(self) -> None:
        """Take back what `steps` made."""
        for name in self._vfs.list_dir(self._target):
            self._vfs.remove(f"{self._target}/{name}")

    def _groups(self) -> Iterator[Group]:
        if self._from_lsn > self._to_lsn:
            return
        names = self._vfs.list_dir(self._source)
        segments = sorted(int(match[1], 16) for match in map(SEGMENT_NAME.fullmatch, names) if match)
        first = max(bisect_right(segments, self._from_lsn) - 1, 0)
        next_lsn, path = self._from_lsn, self._source
        for first_lsn in segments[first : bisect_right(segments, self._to_lsn)]:
            path = f"{self._source}/{first_lsn:016x}.seg"
            for group in _scan(self._vfs, path, first_lsn):
                if group.first_lsn > next_lsn:
                    break
                if group.first_lsn + len(group.records) > next_lsn:
                    next_lsn = group.first_lsn + len(group.records)
                    yield group
                if next_lsn > self._to_lsn:  # what follows may be a group that is just being written
                    return
        raise Corrupt(
            f"The journal has no lsn {next_lsn}, which lies before the durable lsn {self._to_lsn}",
            path=path,
            advice=ADVICE,
        )


def _scan(vfs: Vfs, path: str, first_lsn: int) -> Iterator[Group]:
    """The groups of a segment up to the first that does not verify, as `segment.scan`.

    A segment is large, and giving back memory of its size holds up all threads: it is read in pieces.
    """
    file = vfs.open(path)
    try:
        check_header(file.pread(HEADER_BYTES, 0), first_lsn, path)
        start, lsn, length = HEADER_BYTES, first_lsn, _READ_BYTES
        at, view = start, memoryview(file.pread(length, start))
        while True:
            group = read_group(view, first_lsn, start, lsn, at)
            if group is not None:
                yield group
                start, lsn = group.end, lsn + len(group.records)
            elif at + len(view) >= file.size():
                return
            else:  # perhaps the group goes on behind what was read
                length = 2 * length if at == start else _READ_BYTES
                at, view = start, memoryview(file.pread(length, start))
    finally:
        file.close()


class _Writer:
    """Writes segments. Each is synced before the next one is made."""

    def __init__(self, vfs: Vfs, folder: str, first_lsn: int, segment_bytes: int) -> None:
        self._vfs = vfs
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._first_lsn = first_lsn
        self._end = HEADER_BYTES
        self._file = self._make(first_lsn)

    def write(self, group: Group, from_lsn: int) -> int:
        """Append the records of a group from an lsn on."""
        if self._end >= self._segment_bytes:
            self.finish()
            self._file.close()
            self._first_lsn, self._end = group.first_lsn, HEADER_BYTES
            self._file = self._make(group.first_lsn)
        records = group.records[max(0, from_lsn - group.first_lsn) :]
        parts, length = encode_group(
            self._first_lsn, self._end, ((record.type, [record.body], len(record.body)) for record in records)
        )
        self._file.pwrite(parts, self._end)
        self._end += length
        return length

    def finish(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _make(self, first_lsn: int) -> File:
        file = self._vfs.open(f"{self._folder}/{first_lsn:016x}.seg", create=True)
        file.pwrite([encode_header(first_lsn)], 0)
        return file
