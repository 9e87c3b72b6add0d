"""Checks the lookup of schedule keys of a stopped broker: whether its runs are whole, and name every entry that holds
a key. They may name others as well. Blocks; changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import numpy as np

from broker.errors import Corrupt
from broker.model import CANCELLED_MS, ids_of, is_among
from broker.runtime.vfs import Vfs
from broker.storage.amendments import NONE, Amendments
from broker.storage.blocks import TIME, LedgerCapture
from broker.storage.key_run import NO_KEYS, KeyColumns, KeyRunKind, join_keys
from broker.storage.key_run_dump import read_key_run
from broker.storage.key_run_files import KEY_RUNS
from broker.storage.layout import Layout
from broker.storage.ledger_files import (
    open_checked,
)
from broker.storage.ledger_reads import (
    CheckedColumn,
)
from broker.storage.manifest import TopicImage
from broker.storage.packed_rows import rows_column
from broker.storage.sparse_files import read_present

_ROWS_AT_ONCE = 65_536


def find_key_problems(
    vfs: Vfs, layout: Layout, image: TopicImage, amendments: Mapping[int, Amendments | None]
) -> Iterator[str]:
    """Report the problems of the lookup. A ledger with unreadable columns or amendments (None) is not compared."""
    if image.keys_through is None:
        if image.key_run_ids:
            yield f"The manifest names runs of schedule keys, and no row has one ({layout.topic(image.topic_id)})"
        return
    columns: list[KeyColumns] = [NO_KEYS]
    is_whole = True
    for run_id in image.key_run_ids:
        path = f"{layout.keys(image.topic_id)}/{run_id}.keys"
        try:
            parts = list(read_key_run(vfs, path, image.topic_id, run_id))
            with contextlib.closing(KEY_RUNS.open(vfs, path, image.topic_id, run_id)) as reader:
                header = reader.read_header()
            if header.stamp.kind is KeyRunKind.HOLDERS:
                columns += parts
        except Corrupt as error:
            is_whole = False
            yield error.message
    if not is_whole:
        return  # what the others name is not all that there was
    keys = join_keys(columns)
    for ledger in image.ledgers:
        changed = amendments.get(ledger.ledger_id, NONE)
        if ledger.ledger_id > image.keys_through.ledger_id or changed is None:
            continue
        is_last = ledger.ledger_id == image.keys_through.ledger_id
        capture = ledger.capture
        end = min(image.keys_through.entry_id, capture.entry_count) if is_last else capture.entry_count
        here = keys.part(keys.ledger_ids == ledger.ledger_id)
        named = {*zip(here.entry_ids.tolist(), here.hashes.tolist(), strict=True)}
        with contextlib.suppress(Corrupt):  # whoever checks ledgers says so
            for entry_id, value in _holders(vfs, layout, capture, changed, end, image.frontier_ms):
                if (entry_id, value) not in named:
                    yield (
                        f"No run of schedule keys names entry {ledger.ledger_id}:{entry_id}, which holds one "
                        f"({layout.topic(image.topic_id)})"
                    )


def _holders(
    vfs: Vfs, layout: Layout, capture: LedgerCapture, amendments: Amendments, end: int, frontier_ms: int
) -> Iterator[tuple[int, int]]:
    """The entries before `end` that hold a key, and its hash. Those that were moved may be in no run (KEYUPKEEP-4)."""
    name = capture.name(layout.ledgers(capture.topic_id))
    with contextlib.ExitStack() as opened:
        rows_file = opened.enter_context(contextlib.closing(open_checked(vfs, name, "rows")))
        times_file = opened.enter_context(contextlib.closing(open_checked(vfs, name, "times")))
        rows = rows_column(capture)
        times = CheckedColumn(TIME, capture.row_count, None if capture.sealed else capture.times_crcs)
        present = None if capture.sparse is None else ids_of(read_present(times_file, capture))
        for first in range(0, capture.row_count, _ROWS_AT_ONCE):
            count = min(_ROWS_AT_ONCE, capture.row_count - first)
            hashes = rows.read(rows_file, first, count)["schedule_hash"]
            at = np.flatnonzero(hashes)
            if not len(at):
                continue
            entry_ids = (
                (at + first).astype(np.uint32) if present is None else present[first : first + count][at]
            )
            row_times = times.read(times_file, first, count)[at]
            now = amendments.effective(entry_ids, row_times)
            holds = (row_times > 0) & (now > frontier_ms) & (now < CANCELLED_MS) & (entry_ids < end)
            holds &= ~is_among(entry_ids, amendments.entry_ids)
            yield from zip(entry_ids[holds].tolist(), hashes[at][holds].tolist(), strict=True)
