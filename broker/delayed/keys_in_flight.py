"""Schedule keys of batches on their way to the disk.

Whether one of a batch's hashes may be among them, the table of the keys in memory says, which has them from their
submission on (`recent_keys`): one look and one insertion serve both.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import numpy as np

from broker.model import Position, UInt64Column, is_among


class _Batch(NamedTuple):
    hashes: UInt64Column
    durable: asyncio.Future[None]


class KeysInFlight:
    """Hashes of batches, each from its submission until `durable` is done, when its record is applied."""

    def __init__(self) -> None:
        self._batches: dict[Position, _Batch] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return how many hashes are in flight."""
        return self._count

    def of_batch(self, first: Position) -> UInt64Column | None:
        """Return the hashes of the batch whose new messages begin at a position; None: it is not in flight."""
        batch = self._batches.get(first)
        return None if batch is None else batch.hashes

    def add(self, first: Position, hashes: UInt64Column, durable: asyncio.Future[None]) -> None:
        """`first`: where the new messages of the batch begin."""
        self._batches[first] = _Batch(hashes, durable)
        self._count += len(hashes)
        durable.add_done_callback(lambda _: self._landed(first))

    def of(self, hashes: UInt64Column) -> asyncio.Future[None] | None:
        """Return what makes a batch durable that has one of some hashes; None: no batch has."""
        if not len(hashes) or not self._count:
            return None
        # In all batches at once: a key of a message that waits passes the filter each time, and hundreds may be in
        # flight.
        rows = np.flatnonzero(is_among(self.hashes(), hashes))
        if not len(rows):
            return None
        batches = list(self._batches.values())
        ends = np.cumsum([len(batch.hashes) for batch in batches])
        return batches[int(np.searchsorted(ends, rows[0], side="right"))].durable

    def hashes(self) -> UInt64Column:
        """Return those of all batches."""
        return np.concatenate([np.empty(0, np.uint64), *[batch.hashes for batch in self._batches.values()]])

    def _landed(self, first: Position) -> None:
        self._count -= len(self._batches.pop(first).hashes)
