"""Ledgers with packed rows, for tests."""

from __future__ import annotations

from broker.runtime.vfs import Vfs
from broker.storage.blocks import LedgerCapture
from broker.storage.packed_writer import pack_rows


def pack(vfs: Vfs, folder: str, capture: LedgerCapture) -> LedgerCapture:
    """Pack the rows of a sealed ledger, in a file beside them."""
    steps = pack_rows(vfs, folder, capture)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            packed: LedgerCapture = end.value
            return packed
