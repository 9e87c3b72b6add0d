"""Records and groups of the journal as bytes. Pure: no file, no clock, no loop.

    record  length 4, type 1, zero 3, crc32c 4, body `length`, zeros up to the next multiple of 8
    group   1..n records, then a COMMIT (type 1) with body: group_start 8, count 4, crc32c 4

Integers are little-endian and offsets count from the start of the file. A record's crc32c covers the
segment's first_lsn, the record's offset, length, type and body, so bytes of a recycled file's former life
never pass. The crc32c in a COMMIT covers the 4-byte crcs of its group's records, one after the other: a disk
that lost one of them and kept the rest is found out, which one checksum per record cannot do.

Type 0 is never a record, so zeros never are one. Decoding allocates nothing: a length is believed only as far
as the bytes reach, and a body is a view of them. That is why no limit of the configuration is applied here: a
limit that an operator lowers must not turn what was stored under the old one into damage.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from broker.runtime.vfs import Buffer

COMMIT = 1
RECORD_TYPE_FIRST = 2  # the smallest type that a caller may give
RECORD_TYPE_LAST = 255
ALIGNMENT = 8
RECORD_OVERHEAD_BYTES = 12
COMMIT_BODY_BYTES = 16
COMMIT_BYTES = 32
LENGTH_MAX = 2**32 - 1

Part = Buffer | npt.NDArray[Any]

_RECORD = struct.Struct("<II")  # length; type and its three zeros; the crc follows
_CRC = struct.Struct("<I")
_SEED = struct.Struct("<QQIB")  # what a record's crc covers besides its body
_COMMIT_BODY = struct.Struct("<QII")
_ZEROS = [bytes(count) for count in range(ALIGNMENT)]

# Parts below this are copied into one buffer: a copy of a few KiB costs less than one more entry in the
# vector of a write. Larger ones are passed through as they are.
_COPY_BYTES_MAX = 4096


class Record(NamedTuple):
    """One record that was read and verified."""

    type: int
    offset: int
    end: int
    crc: int
    body: memoryview


class Commit(NamedTuple):
    """The body of a COMMIT record."""

    group_start: int
    record_count: int
    crc: int


def framed_bytes(body_bytes: int) -> int:
    """Return the size of a record in the file, padding included."""
    return (RECORD_OVERHEAD_BYTES + body_bytes + ALIGNMENT - 1) & -ALIGNMENT


def byte_parts(parts: Iterable[Part]) -> tuple[list[Buffer], int]:
    """The parts as buffers of single bytes, and their total length. Nothing is copied.

    Raises TypeError for an array that is not contiguous.
    """
    flat: list[Buffer] = []
    length = 0
    for part in parts:
        if isinstance(part, bytes):
            flat.append(part)
            length += len(part)
        elif (view := part.data if isinstance(part, np.ndarray) else memoryview(part)).nbytes:
            flat.append(view.cast("B"))
            length += view.nbytes
    return flat, length


def encode_group(
    first_lsn: int, offset: int, records: Iterable[tuple[int, Sequence[Buffer], int]]
) -> tuple[list[Buffer], int]:
    """Frame (type, parts, body_bytes) records and their COMMIT for `offset`.

    Returns what to write, and its length, a multiple of 8. Parts are buffers of bytes, as of `byte_parts`.
    """
    group = _GroupParts()
    crcs: list[bytes] = []
    end = offset
    for record_type, parts, length in records:
        assert RECORD_TYPE_FIRST <= record_type <= RECORD_TYPE_LAST
        crcs.append(group.add(first_lsn, end, record_type, parts, length))
        end += framed_bytes(length)
    body = _COMMIT_BODY.pack(offset, len(crcs), google_crc32c.value(b"".join(crcs)))
    group.add(first_lsn, end, COMMIT, (body,), COMMIT_BODY_BYTES)
    return group.finish(), end + COMMIT_BYTES - offset


class _GroupParts:
    """Gathers the bytes of a group: small parts copied together, large ones passed through."""

    def __init__(self) -> None:
        self._done: list[Buffer] = []
        self._small: list[Buffer] = []

    def add(
        self, first_lsn: int, offset: int, record_type: int, parts: Sequence[Buffer], length: int
    ) -> bytes:
        """Add one record; returns its crc as it stands in the file."""
        crc = _CRC.pack(_checksum(first_lsn, offset, record_type, length, parts))
        small = self._small
        small.append(_RECORD.pack(length, record_type))
        small.append(crc)
        for part in parts:
            if len(part) > _COPY_BYTES_MAX:
                self._flush()
                self._done.append(part)
            else:
                self._small.append(part)
        self._small.append(_ZEROS[-(RECORD_OVERHEAD_BYTES + length) % ALIGNMENT])
        return crc

    def finish(self) -> list[Buffer]:
        self._flush()
        return self._done

    def _flush(self) -> None:
        if self._small:
            self._done.append(b"".join(self._small))
            self._small = []


def decode_record(view: memoryview, first_lsn: int, offset: int, view_offset: int = 0) -> Record | None:
    """The record at `offset`, or None if none verifies there. Accepts any bytes.

    Offsets are those of the segment, of which the view begins at `view_offset`.
    """
    at = offset - view_offset
    body_start = at + RECORD_OVERHEAD_BYTES
    if body_start > len(view):
        return None
    length, type_and_zeros = _RECORD.unpack_from(view, at)
    body_end = body_start + length
    end = at + framed_bytes(length)
    if not COMMIT <= type_and_zeros <= RECORD_TYPE_LAST or end > len(view):
        return None
    body = view[body_start:body_end]
    (crc,) = _CRC.unpack_from(view, at + _RECORD.size)
    if crc != _checksum(first_lsn, offset, type_and_zeros, length, (body,)):
        return None
    # The crc does not cover the padding, but a changed byte is damage wherever it lies.
    if view[body_end:end] != _ZEROS[end - body_end]:
        return None
    return Record(type_and_zeros, offset, view_offset + end, crc, body)


def decode_commit(record: Record) -> Commit | None:
    """The COMMIT in a verified record; None if it is another record or could close no group."""
    if record.type != COMMIT or len(record.body) != COMMIT_BODY_BYTES:
        return None
    commit = Commit(*_COMMIT_BODY.unpack(record.body))
    return commit if commit.record_count and commit.group_start < record.offset else None


def group_crc(crcs: Iterable[int]) -> int:
    """Return the checksum that a COMMIT holds over its group's records."""
    return int(google_crc32c.value(b"".join(_CRC.pack(crc) for crc in crcs)))


def _checksum(first_lsn: int, offset: int, record_type: int, length: int, parts: Sequence[Buffer]) -> int:
    crc: int = google_crc32c.value(_SEED.pack(first_lsn, offset, length, record_type))
    for part in parts:
        # `extend` refuses a bytearray or a memoryview, but takes an array that shares its bytes.
        crc = google_crc32c.extend(crc, part if isinstance(part, bytes) else np.frombuffer(part, np.uint8))
    return crc
