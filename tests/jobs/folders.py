"""Data directories for the tests of jobs, and the faults that are planted in them."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import numpy as np
from pyroaring import BitMap

from broker.model import Int64Column, Position
from broker.runtime.vfs import Vfs
from broker.storage.amendments import NONE
from broker.storage.manifest import TopicImage, decode_topic, encode_topic
from broker.testing.data_folder import NOW_MS, FolderWriter, Keys, StoredLedger, StoredSubscription

ROWS = 400
LEDGER_IDS = (1, 2, 3, 4, 5, 6)
SETTLED = 7
"""Of every ledger, every so many-th entry is settled by all."""


def times_of(ledger_id: int, rows: int = ROWS) -> Int64Column:
    """Due times over a month; every fifth row is not delayed."""
    times = NOW_MS + np.random.default_rng(ledger_id).integers(1, 30 * 86_400_000, rows)
    times[::5] = 0
    return times


def settled_of(ledger_ids: tuple[int, ...], rows: int = ROWS) -> dict[int, BitMap]:
    return {ledger_id: BitMap(range(SETTLED, rows, SETTLED)) for ledger_id in ledger_ids}


def amended(ledger_id: int) -> StoredLedger:
    """A ledger with entries cancelled and moved."""
    times = times_of(ledger_id)
    amendments = NONE.cancel(BitMap([11, 12]))
    moved = np.array([21, 22, 23], dtype=np.uint32)
    return StoredLedger(ledger_id, times, amendments.move(moved, times[moved] + 3_600_000, 90))


def write_folder(path: Path | str, vfs: Vfs | None = None) -> None:
    """Three topics: one with six ledgers and two buckets, one that is small, one that is empty."""
    with FolderWriter(str(path), vfs) as folder:
        ledgers = [
            amended(i) if i == 2 else StoredLedger(i, times_of(i), packed=i in (4, 5)) for i in LEDGER_IDS
        ]
        billing = StoredSubscription("billing", settled_of(LEDGER_IDS))
        audit = StoredSubscription("audit", settled_of(LEDGER_IDS))
        folder.add_topic("orders", ledgers, [billing, audit], ledgers_per_bucket=3)
        folder.add_topic("mails", [StoredLedger(7, times_of(7, 50))], [StoredSubscription("sender")])
        folder.add_topic("empty", [])


def write_wrong_folder(path: Path | str) -> None:
    """One topic whose buckets hold what they should not: an entry lost, one twice, one early, one beyond the end."""

    def held(bucket_id: int, keys: Keys) -> Keys:
        times, ledgers, entries = (column.copy() for column in keys)
        if bucket_id == 1:
            kept = ~((ledgers == 1) & (entries == 3))
            times[(ledgers == 2) & (entries == 6)] -= 1
            times, ledgers, entries = times[kept], ledgers[kept], entries[kept]
            return times, ledgers, entries
        extra = [(NOW_MS + 5, 4, ROWS + 9), (NOW_MS + 6, 99, 1), (int(times_of(1)[4]), 1, 4)]
        columns = list(zip(*extra, strict=True))
        return (
            np.concatenate((times, np.array(columns[0], np.int64))),
            np.concatenate((ledgers, np.array(columns[1], np.int64))),
            np.concatenate((entries, np.array(columns[2], np.uint32))),
        )

    with FolderWriter(str(path)) as folder:
        ledgers = [StoredLedger(i, times_of(i)) for i in LEDGER_IDS]
        folder.add_topic("orders", ledgers, [StoredSubscription("billing")], ledgers_per_bucket=3, held=held)


WRONG = {
    ("lost", 1, 1),
    ("wrong_time", 2, 1),
    ("extra", 4, 1),
    ("missing_ledger", 99, 1),
    ("duplicate", 1, 1),
}
"""Of `write_wrong_folder`: kind, ledger, count."""


def change_manifest(path: Path, topic_id: int = 1, **changes: object) -> TopicImage:
    """Write a topic's manifest with other values; returns it as it was."""
    file = path / "topics" / str(topic_id) / "manifest"
    image = decode_topic(file.read_bytes(), str(file))
    file.write_bytes(encode_topic(dataclasses.replace(image, **changes)))  # type: ignore[arg-type]
    return image


def die(*_: object) -> None:
    """A task whose process is killed."""
    os._exit(9)


def flip(path: Path, offset: int) -> None:
    """Change one bit."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


PINNED_IDS = (1, 2, 3, 4, 5)
"""Of `write_pinned_folder`: the ledgers of which little is live. One more takes entries."""

DUE_ID = 20
"""Of each of them: the entry that is due and was not acknowledged."""


def write_pinned_folder(path: Path | str, topics: int = 1) -> None:
    """Topics whose ledgers are mostly delivered, and whose buckets are small: what compaction is for."""
    now_ms = time.time_ns() // 1_000_000
    with FolderWriter(str(path), frontier_ms=now_ms - 86_400_000) as folder:
        for topic in range(topics):
            ids = [topic * 10 + each for each in (*PINNED_IDS, PINNED_IDS[-1] + 1)]
            ledgers = []
            settled = {}
            mark = Position(ids[0], 6)  # a cursor names nothing at or before its mark
            for ledger_id in ids:
                random = np.random.default_rng(ledger_id)
                times = now_ms - 3_600_000 - random.integers(0, 40_000_000, ROWS)
                times[::3] = 0
                times[7::50] = now_ms + random.integers(3_600_000, 86_400_000, len(times[7::50]))
                ledgers.append(StoredLedger(ledger_id, times))
                done = np.flatnonzero(times < now_ms)
                done = done[done > mark.entry_id] if ledger_id == mark.ledger_id else done
                settled[ledger_id] = BitMap(done[done != DUE_ID].tolist())
            billing = StoredSubscription("billing", settled, mark)
            folder.add_topic(f"orders-{topic}", ledgers, [billing], ledgers_per_bucket=1)
