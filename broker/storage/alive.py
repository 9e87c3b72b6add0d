"""The file `alive`: until when a broker was surely there, and which absences it has not dealt with yet.

    file     magic 4 "PDAL", version 1, zero 3, alive_ms 8, absence_count 4, absences, crc 4 of everything before it
    absence  left_ms 8, back_ms 8
Integers are little-endian; times are milliseconds since the Unix epoch. An absence is (left_ms, back_ms]: what came due
in it came due while no broker was there. Absences are listed from the start of a life until all messages of theirs
were looked at, so that a crash in between begins again with the same ones.

The file is there while a topic does something else with overdue messages than deliver them. It is synced when it is
made, when its absences change and now and then, not whenever the time is noted: after a power cut it may hold an
earlier time, or be none of ours, and then the root's `last_alive_ms` counts. It is the one file of which damage is
not fatal.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from broker.errors import Corrupt
from broker.model import TIME_MS_MAX, Int64Column
from broker.runtime.vfs import Vfs, replace_file

MAGIC = b"PDAL"
VERSION = 1
ABSENCES_MAX = 64

_HEAD = struct.Struct("<4sB3sqI")
_ABSENCE = struct.Struct("<qq")
_CRC = struct.Struct("<I")
_BYTES_MAX = _HEAD.size + ABSENCES_MAX * _ABSENCE.size + _CRC.size


class Absence(NamedTuple):
    """From when to when no broker was there: (left_ms, back_ms]."""

    left_ms: int
    back_ms: int


@dataclass(frozen=True, slots=True)
class Alive:
    """Content of the file."""

    alive_ms: int
    absences: tuple[Absence, ...] = ()


def within(times: Int64Column, absences: tuple[Absence, ...]) -> npt.NDArray[np.bool_]:
    """For each time, whether it lies in one of the absences."""
    missed = np.zeros(len(times), dtype=np.bool_)
    for left_ms, back_ms in absences:
        missed |= (times > left_ms) & (times <= back_ms)
    return missed


def encode_alive(alive: Alive) -> bytes:
    assert len(alive.absences) <= ABSENCES_MAX
    head = _HEAD.pack(MAGIC, VERSION, bytes(3), alive.alive_ms, len(alive.absences))
    content = b"".join((head, *(_ABSENCE.pack(*absence) for absence in alive.absences)))
    return content + _CRC.pack(google_crc32c.value(content))


def decode_alive(data: bytes, path: str) -> Alive:
    """Raises Corrupt for anything that `encode_alive` does not write."""
    if not _HEAD.size + _CRC.size <= len(data) <= _BYTES_MAX:
        raise Corrupt(f"The file has {len(data)} bytes", path=path, offset=0)
    content, crc = data[: -_CRC.size], data[-_CRC.size :]
    magic, version, zero, alive_ms, count = _HEAD.unpack_from(content)
    if (magic, version, zero) != (MAGIC, VERSION, bytes(3)):
        raise Corrupt("The header of the file is invalid", path=path, offset=0)
    if len(content) != _HEAD.size + count * _ABSENCE.size or _CRC.pack(google_crc32c.value(content)) != crc:
        raise Corrupt("The file is incomplete, or its checksum does not match", path=path, offset=0)
    absences = tuple(map(Absence._make, _ABSENCE.iter_unpack(content[_HEAD.size :])))
    times = [alive_ms, *(time_ms for absence in absences for time_ms in absence)]
    if not all(0 <= time_ms <= TIME_MS_MAX for time_ms in times):
        raise Corrupt("A time in the file is out of range", path=path, offset=0)
    return Alive(alive_ms, absences)


def read_alive(vfs: Vfs, path: str) -> Alive | None:
    """Read the file; None if it does not exist. Blocks; raises Corrupt."""
    if not vfs.exists(path):
        return None
    file = vfs.open(path)
    try:
        return decode_alive(file.pread(_BYTES_MAX + 1, 0), path)
    finally:
        file.close()


def write_alive(vfs: Vfs, path: str, alive: Alive, *, durable: bool) -> None:
    """Replace the file; unless it is to be durable, a power cut may leave anything of it. Blocks."""
    if durable:
        replace_file(vfs, path, [encode_alive(alive)])
        return
    aside = path + ".new"
    if vfs.exists(aside):
        vfs.remove(aside)
    file = vfs.open(aside, create=True)
    try:
        file.pwrite([encode_alive(alive)], 0)
    finally:
        file.close()
    vfs.rename(aside, path)


def remove_alive(vfs: Vfs, path: str) -> None:
    """Remove the file. Blocks."""
    if vfs.exists(path):
        vfs.remove(path)
        vfs.sync_dir(path.rpartition("/")[0] or ".")
