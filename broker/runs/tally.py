"""Count and order-free checksum of rows: what a run is held against that was written, merged or read. Pure.

A row is a number (a due time or the hash of a key) and a position. The checksum is the sum modulo 2**64 of a hash of
each row: the same in any order, and additive over parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from broker.model import Int64Column, UInt32Column

_NUMBER_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_LEDGER_FACTOR = np.uint64(0xD1B54A32D192ED03)
_ENTRY_FACTOR = np.uint64(0x8CB92BA72F3D8DD7)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_END = 1 << 64

Numbers = npt.NDArray[np.int64] | npt.NDArray[np.uint64]


@dataclass(slots=True)
class Tally:
    """See the module's description."""

    count: int = 0
    checksum: int = 0

    def add(self, numbers: Numbers, ledger_ids: Int64Column, entry_ids: UInt32Column) -> None:
        self.count += len(numbers)
        self.checksum = (self.checksum + rows_checksum(numbers, ledger_ids, entry_ids)) % _END

    def remove(self, numbers: Numbers, ledger_ids: Int64Column, entry_ids: UInt32Column) -> None:
        self.count -= len(numbers)
        self.checksum = (self.checksum - rows_checksum(numbers, ledger_ids, entry_ids)) % _END


def rows_checksum(numbers: Numbers, ledger_ids: Int64Column, entry_ids: UInt32Column) -> int:
    """Return the checksum of rows, given as aligned columns."""
    mixed = numbers.astype(np.uint64)
    mixed *= _NUMBER_FACTOR
    mixed += ledger_ids.astype(np.uint64) * _LEDGER_FACTOR
    mixed += entry_ids.astype(np.uint64) * _ENTRY_FACTOR
    mixed ^= mixed >> np.uint64(30)  # the finish of splitmix64
    mixed *= _MIX_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return int(mixed.sum(dtype=np.uint64))
