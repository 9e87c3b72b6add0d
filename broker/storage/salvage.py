"""Reading around damage: a read that fails is repeated in halves until what cannot be read stands alone.

That is little work for little damage. With much of it, halves fail as their wholes did: after `HALVINGS_MAX` reads that
failed, the rest is read one by one, and rows behind one damaged checksum are given up together.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from broker.errors import Corrupt, DamagedMessage, MissingFile
from broker.model import ROW, Int64Column, RowColumn, UInt32Column
from broker.storage.blocks import BLOCK_ROWS

NO_FRAME = b"none"
"""Stands where there is no frame to show. A frame is never empty, and none begins like this."""

UNREADABLE_TIME = -1
"""Stands where a time cannot be read. Effective times are never negative."""

HALVINGS_MAX = 64
"""Enough to find ten damaged messages among thousands. So no more than eight times the frames that were asked for are
read, with no more than four reads for each and these."""

_Mask = npt.NDArray[np.bool_]


class DamagedLog(Protocol):
    """A log as reading around damage needs it."""

    async def times_of(self, ledger_id: int, entry_ids: UInt32Column) -> Int64Column: ...

    async def read_rows(self, ledger_id: int, first: int, count: int) -> RowColumn: ...

    async def read(
        self, ledger_id: int, entry_ids: UInt32Column, bytes_max: int
    ) -> tuple[Int64Column, RowColumn, list[bytes]]: ...


@dataclass(slots=True)
class Salvaged:
    """Entries as far as they can be read; `frames` are of the first ones, as many as the bytes allowed."""

    times: Int64Column
    rows: RowColumn
    frames: list[bytes]
    damaged: _Mask  # the frame is not what was written; times and rows are
    unreadable: _Mask  # times or rows are not: nothing is known of these entries
    cause: Corrupt | None = None  # the first damage that was met


async def read_around_damage(
    log: DamagedLog, ledger_id: int, entry_ids: UInt32Column, bytes_max: int
) -> Salvaged:
    """As `log.read`, which has raised Corrupt just now: the same once more, around what is damaged.

    Raises NotFound as that does, and Corrupt if a file is missing.
    """
    count = len(entry_ids)
    nothing = np.zeros(count, dtype=np.bool_)
    salvaged = Salvaged(np.zeros(count, np.int64), np.zeros(count, ROW), [], nothing, nothing.copy())
    bytes_left, is_full = bytes_max, False
    halvings_left = HALVINGS_MAX
    parts = [(0, count)]
    while parts:
        first, end = parts.pop()
        part = entry_ids[first:end]
        try:
            salvaged.times[first:end], salvaged.rows[first:end], frames = await log.read(
                ledger_id, part, max(1, bytes_left)
            )
        except MissingFile:
            raise
        except Corrupt as damage:
            is_whole = not isinstance(damage, DamagedMessage) and await _is_unreadable(log, ledger_id, part)
            if end - first > 1 and not is_whole:
                middle = (first + end) // 2
                halves = [(middle, end), (first, middle)]
                parts += halves if halvings_left else [(at, at + 1) for at in range(end - 1, first - 1, -1)]
                halvings_left = max(0, halvings_left - 1)
                continue
            salvaged.cause = salvaged.cause or damage
            frames = [NO_FRAME] * (end - first)
            if isinstance(damage, DamagedMessage):
                salvaged.damaged[first] = True
                salvaged.times[first] = (await log.times_of(ledger_id, part))[0]
                salvaged.rows[first] = (await log.read_rows(ledger_id, int(part[0]), 1))[0]
            else:
                salvaged.unreadable[first:end] = True
        if not is_full:  # beyond the bytes, rows are wanted and frames are not
            salvaged.frames += frames
            bytes_left -= sum(map(len, frames))
            is_full = len(frames) < end - first or bytes_left <= 0
    return salvaged


async def _is_unreadable(log: DamagedLog, ledger_id: int, entry_ids: UInt32Column) -> bool:
    """Return whether neither the first nor the last of some entries can be read, nor any other
    checksum lies in between; they could not be read together."""
    first, last = int(entry_ids[0]), int(entry_ids[-1])
    if last // BLOCK_ROWS != first // BLOCK_ROWS:
        return False
    for entry_id in {first, last}:
        try:
            await log.times_of(ledger_id, np.array([entry_id], dtype=np.uint32))
            await log.read_rows(ledger_id, entry_id, 1)
        except MissingFile:
            raise
        except Corrupt:
            continue
        return False
    return True


def by_block(entry_ids: UInt32Column) -> list[UInt32Column]:
    """Rising ids of a ledger, parted by the checksums that vouch for their times and rows."""
    return np.split(entry_ids, np.flatnonzero(np.diff(entry_ids // BLOCK_ROWS)) + 1)


async def times_around_damage(
    read: Callable[[int, UInt32Column], Awaitable[Int64Column]], ledger_id: int, entry_ids: UInt32Column
) -> tuple[Int64Column, Corrupt | None]:
    """Read times of rising ids: UNREADABLE_TIME in each damaged block, and the last damage met."""
    try:
        return await read(ledger_id, entry_ids), None
    except Corrupt as error:
        parts, damage = by_block(entry_ids), error
    times = [np.full(len(part), UNREADABLE_TIME, dtype=np.int64) for part in parts]
    for at, part in enumerate(parts if len(parts) > 1 else []):
        try:
            times[at] = await read(ledger_id, part)
        except Corrupt as error:
            damage = error
    return np.concatenate(times), damage


async def read_what_is_whole(
    log: DamagedLog, ledger_id: int, entry_ids: UInt32Column, bytes_max: int
) -> tuple[Int64Column, RowColumn, list[bytes]]:
    """As `log.read`, with NO_FRAME for each message that is damaged, or of which nothing is known."""
    try:
        return await log.read(ledger_id, entry_ids, bytes_max)
    except Corrupt:
        salvaged = await read_around_damage(log, ledger_id, entry_ids, bytes_max)
        return salvaged.times, salvaged.rows, salvaged.frames


async def read_marking_damage(
    log: DamagedLog, ledger_id: int, entry_ids: UInt32Column, bytes_max: int
) -> tuple[Int64Column, RowColumn, list[bytes]]:
    """As `log.read`, with NO_FRAME for each message that is damaged. Raises Corrupt if times or rows are."""
    try:
        return await log.read(ledger_id, entry_ids, bytes_max)
    except Corrupt:
        salvaged = await read_around_damage(log, ledger_id, entry_ids, bytes_max)
        if salvaged.unreadable.any():
            raise
        return salvaged.times, salvaged.rows, salvaged.frames
