"""Reads around damage: few for little damage, and a bounded number however much there is."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Set

import numpy as np
import pytest

from broker.errors import Corrupt, DamagedMessage
from broker.model import ROW, Int64Column, RowColumn, UInt32Column
from broker.storage.blocks import BLOCK_ROWS
from broker.storage.salvage import HALVINGS_MAX, NO_FRAME, Salvaged, read_around_damage
from tests.depth import deep_but

COUNT = 8 * BLOCK_ROWS
"""As many as a window of the dispatcher holds."""


class CountingLog:
    """A log of frames and of checksums over blocks of rows, some of them damaged; counts what it is asked."""

    def __init__(self, frames: set[int], blocks: set[int]) -> None:
        self.frames, self.blocks = frames, blocks
        self.reads = self.frames_read = 0

    def _check(self, entry_ids: UInt32Column) -> None:
        if self.blocks.intersection((entry_ids // BLOCK_ROWS).tolist()):
            raise Corrupt("rows of a ledger are damaged", path="rows")

    async def times_of(self, ledger_id: int, entry_ids: UInt32Column) -> Int64Column:
        self.reads += 1
        self._check(entry_ids)
        return entry_ids.astype(np.int64)

    async def read_rows(self, ledger_id: int, first: int, count: int) -> RowColumn:
        self.reads += 1
        self._check(np.arange(first, first + count, dtype=np.uint32))
        return np.zeros(count, ROW)

    async def read(
        self, ledger_id: int, entry_ids: UInt32Column, bytes_max: int
    ) -> tuple[Int64Column, RowColumn, list[bytes]]:
        self.reads += 1
        self._check(entry_ids)
        self.frames_read += len(entry_ids)
        if self.frames.intersection(entry_ids.tolist()):
            raise DamagedMessage("a stored message is damaged", path="data")
        return entry_ids.astype(np.int64), np.zeros(len(entry_ids), ROW), [b"frame"] * len(entry_ids)


def salvage(log: CountingLog, count: int = COUNT) -> Salvaged:
    found = asyncio.run(read_around_damage(log, 1, np.arange(count, dtype=np.uint32), 1 << 40))
    blocks = np.isin(np.arange(count) // BLOCK_ROWS, list(log.blocks))
    frames = np.isin(np.arange(count), list(log.frames)) & ~blocks
    assert (found.unreadable == blocks).all()
    assert (found.damaged == frames).all()
    assert [frame == NO_FRAME for frame in found.frames] == (blocks | frames).tolist()
    return found


FRAMES: dict[str, Callable[[int], bool]] = {
    "all": lambda n: True,
    "every second": lambda n: n % 2 == 0,
    "every seventh": lambda n: n % 7 == 3,
    "the first of each block": lambda n: n % BLOCK_ROWS == 0,
    "the first thousands": lambda n: n < 4000,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("frames", "blocks"),
    deep_but(
        zip(FRAMES, itertools.cycle((frozenset(), frozenset({1, 6})))),
        itertools.product(FRAMES, map(frozenset, ((), {0}, {1, 6}, range(8)))),
    ),
)
def test_hostile_damage_costs_a_bounded_amount(frames: str, blocks: Set[int]):
    """Damaged frames, and blocks of rows whose checksums are damaged."""
    log = CountingLog({n for n in range(COUNT) if FRAMES[frames](n)}, set(blocks))
    salvage(log)
    damaged = len(log.frames)
    assert log.reads <= COUNT + 2 * damaged + 6 * HALVINGS_MAX
    assert log.frames_read <= 8 * COUNT


def test_rows_behind_one_damaged_checksum_cost_a_few_reads():
    log = CountingLog(set(), {3})
    salvage(log)
    assert log.reads < 40


def test_one_damaged_message_costs_a_few_reads():
    log = CountingLog({COUNT // 3}, set())
    salvage(log)
    assert log.reads < 40
