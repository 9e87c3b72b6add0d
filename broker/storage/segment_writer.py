"""A journal made of groups that were stored elsewhere: the segments of a restored data directory.

Nobody reads them before all is written, so nothing is synced group by group. Blocks.
"""

from __future__ import annotations

from broker.runtime.vfs import File, Vfs
from broker.settings import MIB
from broker.storage.frame import encode_group
from broker.storage.group_log import NewRecord
from broker.storage.segment import HEADER_BYTES, Group, encode_header


class SegmentWriter:
    """Writes groups that follow each other into a folder without segments."""

    def __init__(self, vfs: Vfs, folder: str, *, segment_bytes: int = 64 * MIB) -> None:
        self._vfs = vfs
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._file: File | None = None
        self._first_lsn = 0
        self._end = 0

    def begin(self, first_lsn: int) -> None:
        """Begin a segment. A journal has one, also if no group follows."""
        self.close()
        self._file = self._vfs.open(f"{self._folder}/{first_lsn:016x}.seg", create=True)
        self._file.pwrite([encode_header(first_lsn)], 0)
        self._first_lsn, self._end = first_lsn, HEADER_BYTES

    def add(self, group: Group) -> None:
        if self._file is None or self._end >= self._segment_bytes:
            self.begin(group.first_lsn)
        assert self._file is not None
        records: list[NewRecord] = [
            (record.type, (record.body,), len(record.body)) for record in group.records
        ]
        parts, length = encode_group(self._first_lsn, self._end, records)
        self._file.pwrite(parts, self._end)
        self._end += length

    def close(self) -> None:
        """Make durable what was written, but for the names of the segments."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.sync()
            finally:
                file.close()
