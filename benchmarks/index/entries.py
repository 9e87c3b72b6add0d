"""The entries of an index-only row: drawn with a fixed seed, in blocks, so that a billion of them take no memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from broker.model import Int64Column, UInt32Column
from broker.runs.tally import Tally

NOW_MS = 1_800_000_000_000
"""The clock of these rows stands still here while they load."""

BATCH = 1_000
BLOCK = 65 * BATCH  # about what a step of the broker's pump adds
MINUTE_MS = 60_000
_MONTH_MS = 30 * 86_400_000
_HOUR_MS = 3_600_000
_BATCH_PAUSE_MS = 10
_SEED = 7


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one ledger in the order of arrival."""

    ledger_id: int
    entry_ids: UInt32Column
    times: Int64Column


def blocks(delay: str, count: int, ledger_entries: int) -> Iterator[Block]:
    """`count` entries in blocks, none of which crosses the end of a ledger.

    `random`: delays uniform over 30 days. `uniform`: an hour for all, batches of 1,000 that arrive 10 ms apart.
    `steady`: an hour for all, single messages, 1,000 a second at random moments.
    """
    rng = np.random.default_rng(_SEED)
    arrived_ms = 0.0
    ledger_id, first = 1, 0
    all_ids = np.arange(ledger_entries, dtype=np.uint32)
    while count:
        rows = min(BLOCK, count, ledger_entries - first)
        if delay == "random":
            times = NOW_MS + rng.integers(1_000, _MONTH_MS, rows)
        elif delay == "uniform":
            times = NOW_MS + _HOUR_MS + int(arrived_ms) + np.arange(rows) // BATCH * _BATCH_PAUSE_MS
            arrived_ms += -(-rows // BATCH) * _BATCH_PAUSE_MS
        else:
            gaps = arrived_ms + rng.exponential(1.0, rows).cumsum()
            arrived_ms = float(gaps[-1])
            times = NOW_MS + _HOUR_MS + gaps.astype(np.int64)
        yield Block(ledger_id, all_ids[first : first + rows], times)
        count -= rows
        first += rows
        if first == ledger_entries:
            ledger_id, first = ledger_id + 1, 0


def note_minute(minute: Tally, block: Block) -> None:
    at = np.flatnonzero(block.times <= NOW_MS + MINUTE_MS)
    if len(at):
        ledger_ids = np.full(len(at), block.ledger_id, dtype=np.int64)
        minute.add(block.times[at], ledger_ids, block.entry_ids[at])
