"""Entries with schedule keys, and runs of them, for tests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from hypothesis import strategies as st

from broker.model import ENTRY_ID_MAX, LEDGER_ID_MAX
from broker.runtime.vfs import Vfs
from broker.storage.key_run import KeyColumns, KeyRunHeader
from broker.storage.key_run_files import KeyStorage, create_key_run, key_storage
from broker.testing.mem_vfs import MemVfs

Entry = tuple[int, int, int]  # (hash, ledger_id, entry_id)

TOPIC_ID = 3
RUN_ID = 8
FOLDER = "keys"
HASH_MAX = (1 << 64) - 1

hashes = st.one_of(st.integers(1, HASH_MAX), st.integers(1, 15), st.sampled_from((1, HASH_MAX)))
ledger_ids = st.one_of(st.integers(1, 9), st.integers(1, LEDGER_ID_MAX), st.sampled_from((1, LEDGER_ID_MAX)))
entry_ids = st.one_of(st.integers(0, 9), st.integers(0, ENTRY_ID_MAX))
entries = st.tuples(hashes, ledger_ids, entry_ids)


def columns(rows: Iterable[Entry]) -> KeyColumns:
    held = list(rows)
    parts = [[row[part] for row in held] for part in range(3)]
    return KeyColumns(
        np.array(parts[0], np.uint64), np.array(parts[1], np.int64), np.array(parts[2], np.uint32)
    )


def rows(keys: KeyColumns) -> list[Entry]:
    return list(zip(keys.hashes.tolist(), keys.ledger_ids.tolist(), keys.entry_ids.tolist(), strict=True))


def scattered(count: int, *, bits: int = 64, seed: int = 5) -> list[Entry]:
    """Sorted entries with scattered hashes of so many bits, none of them 0, over three ledgers. The same for ever."""
    top = (1 << bits) - 1
    values = ((i + seed) * 0x9E3779B97F4A7C15 % (1 << 64) ^ i * 0xD1B54A32D192ED03 for i in range(count))
    return sorted((value % top + 1, 4 + 300 * (i * 3 // count), i) for i, value in enumerate(values))


def disk() -> MemVfs:
    vfs = MemVfs()
    vfs.make_dir(FOLDER)
    vfs.sync_dir("")
    return vfs


def storage_of(vfs: Vfs, topic_id: int = TOPIC_ID) -> KeyStorage:
    return key_storage(vfs, FOLDER, topic_id)


def write(storage: KeyStorage, keys: Iterable[Entry], run_id: int = RUN_ID, step: int = 700) -> KeyRunHeader:
    """A run, written in parts of `step` entries; nothing is left of it if that fails."""
    held = columns(keys)
    writer = create_key_run(storage, run_id)
    try:
        for first in range(0, len(held), step):
            writer.append(held.part(slice(first, first + step)))
        while writer.check():
            pass
        return writer.finish()
    except BaseException:
        writer.abort()
        raise


def read_all(storage: KeyStorage, run_id: int = RUN_ID) -> list[Entry]:
    """Everything that a run holds, its filter included."""
    reader = storage.open_reader(run_id)
    try:
        header = reader.read_header()
        reader.read_filter(header)
        fences = reader.read_fences(header)
        return rows(reader.read_blocks(header, fences, 0, len(fences)))
    finally:
        reader.close()
