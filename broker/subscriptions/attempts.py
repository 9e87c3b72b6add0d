"""Attempts: how often entries were sent and came back. `redelivery.py` has the times. Pure: no file, no clock."""

from __future__ import annotations

import numpy as np
from pyroaring import BitMap

from broker.model import Entries, Position, UInt32Column, members


class Attempts:
    """Counts of how often each entry was sent and came back.

    The counts are kept as binary digits: bit k of every entry's count is one bitmap per ledger. A thousand
    entries that come back together cost a few bitmap operations, and what never came back costs nothing.
    """

    __slots__ = ("digits",)

    def __init__(self, digits: dict[int, list[BitMap]] | None = None) -> None:
        self.digits: dict[int, list[BitMap]] = digits if digits is not None else {}

    def add(self, entries: Entries) -> None:
        """Count one more for each entry."""
        for ledger_id, bitmap in entries.items():
            digits = self.digits.setdefault(ledger_id, [])
            carry = bitmap
            for digit in digits:
                both = digit & carry
                digit ^= carry  # noqa: PLW2901 - in place: a copy costs what all the others have counted
                carry = both
                if not carry:
                    break
            if carry:
                digits.append(carry.copy())

    def forget(self, entries: Entries) -> None:
        """Drop the counts of entries that are done."""
        for ledger_id, bitmap in entries.items():
            digits = self.digits.get(ledger_id)
            if digits is None:
                continue
            for digit in digits:
                digit -= bitmap  # noqa: PLW2901 - in place
            while digits and not digits[-1]:
                digits.pop()
            if not digits:
                del self.digits[ledger_id]

    def clear(self) -> None:
        self.digits.clear()

    def count(self, position: Position) -> int:
        """The count of one entry."""
        digits = self.digits.get(position.ledger_id, ())
        return sum((position.entry_id in digit) << k for k, digit in enumerate(digits))

    def counts(self, ledger_id: int, entry_ids: UInt32Column) -> UInt32Column:
        """The count of each entry, aligned."""
        counts = np.zeros(len(entry_ids), dtype=np.uint32)
        for k, digit in enumerate(self.digits.get(ledger_id, ())):
            counts += members(entry_ids, digit).astype(np.uint32) << np.uint32(k)
        return counts
