"""Looking at runs of schedule keys from outside: print them, and read all of their entries. Blocks; changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from broker.errors import Corrupt
from broker.runs.tally import Tally
from broker.runtime.vfs import Vfs
from broker.storage.key_filter import Probe
from broker.storage.key_run import HEADER_BYTES, VERSION, KeyColumns, decode_header
from broker.storage.key_run_files import KEY_RUNS

Line = dict[str, Any]

_BLOCKS_AT_ONCE = 64


def read_key_run(vfs: Vfs, path: str, topic_id: int, run_id: int) -> Iterator[KeyColumns]:
    """The entries of a run, part by part; raises Corrupt for whatever is wrong with it, perhaps after the last part."""
    with contextlib.closing(KEY_RUNS.open(vfs, path, topic_id, run_id)) as reader:
        header = reader.read_header()
        fences, key_filter = reader.read_fences(header), reader.read_filter(header)
        tally = Tally()
        for first in range(0, len(fences), _BLOCKS_AT_ONCE):
            keys = reader.read_blocks(header, fences, first, min(first + _BLOCKS_AT_ONCE, len(fences)))
            tally.add(*keys.columns)
            if not key_filter.maybe(Probe(keys.hashes)).all():
                raise Corrupt(
                    "The filter of a key run leaves out an entry", path=path, offset=header.filter_at
                )
            yield keys
        if tally != Tally(header.count, header.checksum):
            raise Corrupt("A key run does not hold the entries that its header says", path=path, offset=0)


def dump_key_run(vfs: Vfs, path: str) -> Iterator[Line]:
    """A run: its header, then each entry. Raises Corrupt for what is damaged, after what can be read."""
    file = vfs.open(path)
    try:
        file_bytes = file.size()
        yield {"line": "header", "file": "key run", "version": VERSION, "file_bytes": file_bytes}
        header = decode_header(file.pread(HEADER_BYTES, 0), path)
    finally:
        file.close()
    yield {
        "line": "run",
        "topic_id": header.topic_id,
        "run_id": header.run_id,
        "kind": header.stamp.kind.name.lower(),
        "settled_ms": header.stamp.settled_ms,
        "count": header.count,
        "checksum": f"{header.checksum:016x}",
        "ledger_ids": [header.first_ledger_id, header.last_ledger_id],
        "block_count": header.block_count,
        "filter_bytes": header.filter_bytes,
    }
    for keys in read_key_run(vfs, path, header.topic_id, header.run_id):
        columns = keys.hashes.tolist(), keys.ledger_ids.tolist(), keys.entry_ids.tolist()
        for value, ledger_id, entry_id in zip(*columns, strict=True):
            yield {"line": "key", "hash": f"{value:016x}", "position": [ledger_id, entry_id]}
