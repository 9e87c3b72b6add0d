"""Hashes that were seen: which of a batch of others are among them? In memory.

Looking for many that are not there is what has to be fast. A table with one byte for each of some bits of a hash lets
one in sixteen of them through; those are searched for in parts of sorted hashes, which are joined with parts of their
size as they come. A set of numbers costs several times as much, for want of the processor's cache.
"""

from __future__ import annotations

import numpy as np

from broker.model import Int64Column, UInt64Column
from broker.storage.key_filter import BoolColumn

_TABLE_BYTES = 16  # for each hash, at least
_TABLE_BYTES_MIN = 1 << 8
_TABLE_BYTES_MAX = 1 << 26
_NO_TABLE = np.zeros(1, dtype=np.bool_)


class SeenHashes:
    """See the module's description."""

    def __init__(self) -> None:
        self._count = 0
        self._parts: list[UInt64Column] = []  # sorted; the later ones are the smaller ones
        self._table = _NO_TABLE

    def __len__(self) -> int:
        """Return how often one was added."""
        return self._count

    def add(self, hashes: UInt64Column) -> None:
        """At least one; not kept: a copy is."""
        self._count += len(hashes)
        part = np.sort(hashes)
        while self._parts and len(self._parts[-1]) <= 2 * len(part):
            part = np.sort(np.concatenate((self._parts.pop(), part)))
        self._parts.append(part)
        wanted = self._count * _TABLE_BYTES
        if wanted <= len(self._table) or len(self._table) == _TABLE_BYTES_MAX:
            self._note(hashes)
            return
        size = min(max(_TABLE_BYTES_MIN, 1 << wanted.bit_length()), _TABLE_BYTES_MAX)
        self._table = np.zeros(size, dtype=np.bool_)
        for part in self._parts:
            self._note(part)

    def has(self, hashes: UInt64Column) -> BoolColumn:
        """Return which of some hashes were added."""
        mask: BoolColumn = self._table[self._slots(hashes)]
        at = np.flatnonzero(mask)
        if len(at):
            asked = hashes[at]
            is_seen = np.zeros(len(at), dtype=np.bool_)
            for part in self._parts:
                places = np.minimum(np.searchsorted(part, asked), len(part) - 1)
                is_seen |= part[places] == asked
            mask[at] = is_seen
        return mask

    def memory_bytes(self) -> int:
        return sum(part.nbytes for part in (self._table, *self._parts))

    def _note(self, hashes: UInt64Column) -> None:
        self._table[self._slots(hashes)] = True

    def _slots(self, hashes: UInt64Column) -> Int64Column:
        # As numbers with a sign: others cost an index several times as much.
        slots: Int64Column = (hashes & np.uint64(len(self._table) - 1)).view(np.int64)
        return slots
