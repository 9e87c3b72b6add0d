"""Check of a generation that a job wrote, against its ledger. Blocks; memory is bounded.

A job is not trusted: its files are read whole, and every row is compared with the ledger that it was made of.
"""

from __future__ import annotations

import contextlib

import numpy as np
from pyroaring import BitMap

from broker.errors import Corrupt
from broker.model import CANCELLED_MS, ids_of
from broker.runtime.vfs import Vfs
from broker.storage.amendments import NONE
from broker.storage.blocks import BLOCK_ROWS, LedgerCapture
from broker.storage.compacted import CompactedLedger
from broker.storage.ledger_check import verify_ledger
from broker.storage.ledger_files import open_checked
from broker.storage.log import with_expiry_moved
from broker.storage.sparse_files import read_present
from broker.storage.sparse_writer import GenerationSource, live_entries, open_source

_SAME = ("publish_time_ms", "expire_at_ms", "schedule_hash", "length", "crc", "key_hash", "flags")


def examine_generation(
    vfs: Vfs, folder: str, capture: LedgerCapture, source: GenerationSource, settled: BitMap, frontier_ms: int
) -> CompactedLedger:
    """Return the record of a generation in `folder`; raises Corrupt if it is damaged or differs from its ledger.

    It may hold more than what is live, but nothing that is gone already.
    """
    name = capture.name(folder)
    for problem in verify_ledger(vfs, folder, capture, 1):
        raise Corrupt(problem.what, path=problem.path, offset=problem.offset)
    with contextlib.closing(open_checked(vfs, name, "times")) as file:
        present = read_present(file, capture)
    live = live_entries(source, settled, frontier_ms)
    if not live <= present:
        raise Corrupt(f"{len(live - present)} live entries are missing", path=name.path("times"))
    last_expire_ms, keeps = 0, False
    with open_source(vfs, folder, capture, NONE) as target:
        ids = ids_of(present)
        for first in range(0, len(ids), BLOCK_ROWS):
            some = ids[first : first + BLOCK_ROWS]
            # One frame each is read to have the rows; all frames were checked above.
            read, expected = (
                side.storage.read(some, side.capture.data_bytes, 1) for side in (target, source)
            )
            times = source.amendments.effective(some, expected.times)
            rows = with_expiry_moved(expected.rows, expected.times, times)
            is_gone = (expected.times == CANCELLED_MS) | ((expected.times != 0) & (times == 0))
            same = (read.times == times) & ~is_gone
            for field in _SAME:
                same &= read.rows[field] == rows[field]
            if not same.all():
                entry_id = int(some[np.flatnonzero(~same)[0]])
                raise Corrupt(f"entry {entry_id} differs from that of the source", path=name.path("rows"))
            expire_at_ms = rows["expire_at_ms"]
            keeps |= not expire_at_ms.all()
            last_expire_ms = max(last_expire_ms, int(expire_at_ms.max()))
    assert capture.sparse is not None
    return CompactedLedger(
        ledger_id=capture.ledger_id,
        from_generation=source.capture.generation,
        generation=capture.generation,
        data_bytes=capture.data_bytes,
        present_bytes=capture.sparse.present_bytes,
        present=present,
        last_expire_ms=0 if keeps else last_expire_ms,
    )
