"""One journal segment: a file of consecutive groups. Pure; `local_group_log.py` does the input and output.

    | header | record ... COMMIT | record ... COMMIT | ...
    header  magic 4 "PDJ1", version 1, zero 3, first_lsn 8, crc32c 4 over the 16 bytes before, zero 4
    record  see `frame.py`

One group of records is one group commit. A record's lsn is its ordinal number, from the header's first_lsn; a
COMMIT takes none. After the last group comes the end of the file, or zeros that it was lengthened by, or what
a recycled file held in its former life; neither verifies, as that one's first_lsn was another.

Invariants:
  JOURNAL-1  Bytes below the end of the last durable group never change, so reading them needs no lock.
  JOURNAL-2  That end moves only after the sync returns, and only to the end of a group.
  JOURNAL-3  At most one group, the last, is not yet durable.
  JOURNAL-4  A segment that has a successor is complete and is never written again.

After a crash the last group may be torn, in any of its records: disks reorder. It is the only one (JOURNAL-3) and
nobody was answered for it (JOURNAL-2), so recovery drops it whole, and says so. A bad group before a good one is
damage: a COMMIT that verifies and whose group starts later proves that the bad group had been synced. The bad group's
own COMMIT does not, for the disk may have taken it before the rest; so damage of the last group of all looks as a
crash does.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import google_crc32c
import numpy as np

from broker.errors import Corrupt
from broker.storage.frame import (
    ALIGNMENT,
    COMMIT,
    COMMIT_BODY_BYTES,
    COMMIT_BYTES,
    RECORD_OVERHEAD_BYTES,
    Record,
    decode_commit,
    decode_record,
    group_crc,
)

MAGIC = b"PDJ1"
VERSION = 1
HEADER_BYTES = 24

_HEADER = struct.Struct("<4sB3xQ")
_HEADER_TAIL = struct.Struct("<II")
_COMMIT_WORD = COMMIT_BODY_BYTES | COMMIT << 32  # the first 8 bytes of every COMMIT record

Line = dict[str, int | str | bool]

ADVICE = "Restore a backup, or see with `postdate-broker dump` what can still be read"


class Group(NamedTuple):
    """A group whose every record and COMMIT verify."""

    first_lsn: int
    start: int
    end: int
    records: list[Record]


class SegmentEnd(NamedTuple):
    """End of a segment's groups, and the lsn that comes next."""

    offset: int
    next_lsn: int


def encode_header(first_lsn: int) -> bytes:
    head = _HEADER.pack(MAGIC, VERSION, first_lsn)
    return head + _HEADER_TAIL.pack(google_crc32c.value(head), 0)


def decode_header(data: bytes, path: str) -> int:
    """The first_lsn of a segment; raises Corrupt for anything but a whole header of this version."""
    if _is_newer(data):
        raise Corrupt(
            f"The journal segment has version {data[4]}; this broker reads up to version {VERSION}",
            path=path,
            offset=4,
            advice="Start the version of the broker that wrote it, or a later one.",
        )
    if len(data) < HEADER_BYTES:
        raise Corrupt("The journal segment is shorter than its header", path=path, offset=0, advice=ADVICE)
    first_lsn = int(_HEADER.unpack_from(data)[2])
    if data[:HEADER_BYTES] != encode_header(first_lsn) or first_lsn == 0:
        raise Corrupt("The header of the journal segment is damaged", path=path, offset=0, advice=ADVICE)
    return first_lsn


def check_header(data: bytes, first_lsn: int, path: str) -> None:
    """Raise Corrupt unless the header is whole and the file's name tells the same first_lsn."""
    if decode_header(data, path) != first_lsn:
        raise Corrupt("The header of the segment disagrees with its name", path=path, offset=0, advice=ADVICE)


def is_cut_roll(data: bytes, first_lsn: int) -> bool:
    """Return whether the journal's last file, named by `first_lsn`, is only a roll that a crash cut.

    Its header was never synced, so the file holds no group of this life: it is short, empty, or still
    carries the header of its former life. A group that verifies under this name tells damage from that.
    """
    if _is_newer(data) or data[:HEADER_BYTES] == encode_header(first_lsn):
        return False
    return find_commit(data, first_lsn, group_start_min=HEADER_BYTES) is None


def scan(data: bytes, first_lsn: int) -> Iterator[Group]:
    """The groups of a segment up to the first that does not verify. Accepts any bytes."""
    view = memoryview(data)
    start, lsn = HEADER_BYTES, first_lsn
    while (group := read_group(view, first_lsn, start, lsn)) is not None:
        yield group
        start, lsn = group.end, lsn + len(group.records)


def find_end(data: bytes, first_lsn: int, path: str) -> SegmentEnd:
    """Return where the last segment ends. What follows is a torn group, or former life; raises Corrupt if damage."""
    check_header(data, first_lsn, path)
    end = SegmentEnd(HEADER_BYTES, first_lsn)
    for group in scan(data, first_lsn):
        end = SegmentEnd(group.end, group.first_lsn + len(group.records))
    # A group was written only after the previous one's sync had returned (JOURNAL-3). So a COMMIT of a group that
    # starts beyond the bad one proves that the bad one was durable, and perhaps answered. The bad group's
    # own COMMIT proves nothing: disks reorder within a group.
    later = find_commit(data, first_lsn, group_start_min=end.offset + 1)
    if later is not None:
        raise Corrupt(
            f"A group of the journal is damaged: the group committed at offset {later} was written after it",
            path=path,
            offset=end.offset,
            advice=ADVICE,
        )
    return end


def torn_bytes(data: bytes, first_lsn: int, end: int) -> int:
    """Bytes of the group that follows the last good one and is not whole, as far as its records or its COMMIT verify.

    Most often 0, also where the file goes on: what a recycled file held in its former life does not verify.
    """
    view = memoryview(data)
    offset = end
    while (record := decode_record(view, first_lsn, offset)) is not None:
        offset = record.end
    commit = find_commit(data, first_lsn, group_start_min=end)  # its own: a later one would have been damage
    return max(offset, 0 if commit is None else commit + COMMIT_BYTES) - end


def replay(data: bytes, first_lsn: int, next_lsn: int, path: str) -> Iterator[Group]:
    """The groups of a segment that is known to end before `next_lsn`; raises Corrupt if it does not (JOURNAL-4)."""
    check_header(data, first_lsn, path)
    end = SegmentEnd(HEADER_BYTES, first_lsn)
    for group in scan(data, first_lsn):
        end = SegmentEnd(group.end, group.first_lsn + len(group.records))
        if end.next_lsn > next_lsn:
            break
        yield group
    if end.next_lsn != next_lsn:
        raise Corrupt(
            f"The journal segment leads to lsn {end.next_lsn}, but lsn {next_lsn} comes next",
            path=path,
            offset=end.offset,
            advice=ADVICE,
        )


def find_commit(data: bytes, first_lsn: int, *, group_start_min: int) -> int | None:
    """The offset of the first COMMIT that verifies and whose group starts at `group_start_min` or later."""
    words = np.frombuffer(data, "<u8", len(data) // ALIGNMENT)
    skipped = group_start_min // ALIGNMENT
    candidates = (np.flatnonzero(words[skipped:] == _COMMIT_WORD) + skipped) * ALIGNMENT
    candidates = candidates[candidates <= len(data) - COMMIT_BYTES]
    # A client may send a payload full of lookalikes; their group_start weeds out nearly all of them here.
    halves = np.frombuffer(data, "<u4", len(data) // 4)
    at = (candidates + RECORD_OVERHEAD_BYTES) // 4
    starts = halves[at].astype(np.uint64) | halves[at + 1].astype(np.uint64) << np.uint64(32)
    plausible = (starts >= group_start_min) & (starts < candidates.astype(np.uint64))
    view = memoryview(data)
    for offset in candidates[plausible].tolist():
        record = decode_record(view, first_lsn, offset)
        if record is not None and decode_commit(record) is not None:
            return int(offset)
    return None


def describe(data: bytes, first_lsn: int, path: str) -> Iterator[Line]:
    """A segment as JSON-able lines, whatever its bytes are; `first_lsn` is the one in its name."""
    header: Line = {"kind": "header", "path": path, "file_bytes": len(data)}
    try:
        first_lsn = decode_header(data, path)
        yield header | {"first_lsn": first_lsn, "version": VERSION, "ok": True}
    except Corrupt as error:
        yield header | {"first_lsn": first_lsn, "ok": False, "error": error.message}
    end = SegmentEnd(HEADER_BYTES, first_lsn)
    for group in scan(data, first_lsn):
        for lsn, record in enumerate(group.records, group.first_lsn):
            yield _line(record, lsn, group.start, committed=True)
        yield {"kind": "commit", "group": group.start, "count": len(group.records), "end": group.end}
        end = SegmentEnd(group.end, group.first_lsn + len(group.records))
    yield from _describe_rest(data, first_lsn, end)


def _describe_rest(data: bytes, first_lsn: int, end: SegmentEnd) -> Iterator[Line]:
    """Describe the bytes after the last good group (torn, bad, zeros, former content), and judge them."""
    view = memoryview(data)
    offset, lsn = end
    while (record := decode_record(view, first_lsn, offset)) is not None and record.type != COMMIT:
        yield _line(record, lsn, end.offset, committed=False)
        offset, lsn = record.end, lsn + 1
    if offset + RECORD_OVERHEAD_BYTES <= len(data) and record is None:
        length, record_type = struct.unpack_from("<IB", data, offset)
        yield {"kind": "rest", "offset": offset, "type": record_type, "length": length, "crc_ok": False}
    later = find_commit(data, first_lsn, group_start_min=end.offset + 1)
    verdict: Line = {"kind": "end", "offset": end.offset, "next_lsn": end.next_lsn}
    yield verdict | ({"damaged": False} if later is None else {"damaged": True, "later_commit": later})


def _line(record: Record, lsn: int, group: int, *, committed: bool) -> Line:
    return {
        "kind": "record",
        "lsn": lsn,
        "offset": record.offset,
        "type": record.type,
        "length": len(record.body),
        "crc_ok": True,
        "group": group,
        "committed": committed,
    }


def read_group(view: memoryview, first_lsn: int, start: int, lsn: int, view_offset: int = 0) -> Group | None:
    """The group at `start`, if it is whole and verifies; the view begins at `view_offset` of the segment."""
    records: list[Record] = []
    offset = start
    while (record := decode_record(view, first_lsn, offset, view_offset)) is not None:
        if record.type == COMMIT:
            commit = decode_commit(record)
            expected = (start, len(records), group_crc(record.crc for record in records))
            return Group(lsn, start, record.end, records) if commit == expected else None
        records.append(record)
        offset = record.end
    return None


def _is_newer(data: bytes) -> bool:
    return data[:4] == MAGIC and len(data) > 4 and data[4] > VERSION
