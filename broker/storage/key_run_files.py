"""Runs of schedule keys, files of one folder, `topics/<topic_id>/keys`: how one is written, and what is read of it.

Before `finish` returns, a run was read back whole: what it holds is what it was given.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from google_crc32c import extend, value

from broker.errors import Corrupt
from broker.model import LEDGER_ID_MAX, UInt64Column
from broker.runs.storage import RunFile, RunKind, RunStorage, RunWriter
from broker.runs.tally import Tally
from broker.runtime.vfs import Vfs
from broker.storage.key_filter import KeyFilter, KeyFilterBuilder
from broker.storage.key_run import (
    ADVICE,
    BLOCK_ENTRIES,
    HEADER_BYTES,
    NO_KEYS,
    Fences,
    KeyColumns,
    KeyRunHeader,
    Stamp,
    decode_block,
    decode_fences,
    decode_filter,
    decode_header,
    encode_block,
    encode_fences,
    encode_header,
    join_keys,
)

_CHECKED_BLOCKS = 16  # read back in one step: about a millisecond
_FILTER_READ_BYTES = 1 << 20
_OF_HOLDERS = Stamp()


class KeyRunWriter:
    """One run being written; every call blocks. Ends with `finish` or `abort`. Raises Unavailable."""

    def __init__(self, file: RunWriter, topic_id: int, run_id: int, stamp: Stamp = _OF_HOLDERS) -> None:
        self._file = file
        self.abort = file.abort
        self._topic_id = topic_id
        self._run_id = run_id
        self._stamp = stamp
        self._given, self._found = Tally(), Tally()
        self._first_ledger_id, self._last_ledger_id = LEDGER_ID_MAX, 0
        self._uncut = NO_KEYS  # less than a block
        self._first_hashes, self._lengths, self._crcs = array("Q"), array("I"), array("I")
        self._checked = 0  # blocks that were read back
        self._filter_crc = 0
        self._reading: _WrittenRun | None = None

    def append(self, keys: KeyColumns) -> None:
        """Write the entries that follow, in order, each once."""
        if not len(keys):
            return
        self._given.add(*keys.columns)
        self._first_ledger_id = min(self._first_ledger_id, int(keys.ledger_ids.min()))
        self._last_ledger_id = max(self._last_ledger_id, int(keys.ledger_ids.max()))
        keys = join_keys([self._uncut, keys])
        end = len(keys) - len(keys) % BLOCK_ENTRIES
        for start in range(0, end, BLOCK_ENTRIES):
            self._add_block(keys.part(slice(start, start + BLOCK_ENTRIES)))
        # A copy: a view would keep the whole part alive.
        self._uncut = join_keys([NO_KEYS, keys.part(slice(end, None))])

    def check(self) -> bool:
        """After the last entry: read back a part of what was written; False once that was all of it."""
        reading = self._reading
        if reading is None:
            reading = self._reading = self._end_blocks()
        first, end = self._checked, min(self._checked + _CHECKED_BLOCKS, len(reading.fences))
        keys = reading.read(first, end)
        self._found.add(*keys.columns)
        self._add_filter(reading.builder.add(keys.hashes))
        self._checked = end
        return end < len(reading.fences)

    def finish(self) -> KeyRunHeader:
        """After the last `check`: returns once file and name are durable.

        Raises Corrupt for a run that was not what had been written.
        """
        reading, file = self._reading, self._file
        assert reading is not None and self._checked == len(reading.fences)
        if self._found != self._given:
            raise Corrupt("A key run does not hold the entries it was given", path=file.path)
        self._add_filter(reading.builder.end())
        file.append(reading.encoded_fences)
        file.flush()
        header = self._header(reading.header.filter_at, value(reading.encoded_fences))
        assert header.file_bytes == file.end
        file.finish(encode_header(header))
        return header

    def _add_block(self, keys: KeyColumns) -> None:
        block = encode_block(keys)
        self._first_hashes.append(int(keys.hashes[0]))
        self._lengths.append(len(block))
        self._crcs.append(value(block))
        self._file.append(block)

    def _end_blocks(self) -> _WrittenRun:
        """Write the last block; what was written can be read back then."""
        assert self._given.count
        if len(self._uncut):
            self._add_block(self._uncut)
            self._uncut = NO_KEYS
        self._file.flush()
        encoded = encode_fences(
            np.frombuffer(self._first_hashes, np.uint64),
            np.frombuffer(self._lengths, np.uint32),
            np.frombuffer(self._crcs, np.uint32),
        )
        header = self._header(self._file.end, value(encoded))
        fences = decode_fences(encoded, header, self._file.path)
        return _WrittenRun(self._file, header, fences, encoded, KeyFilterBuilder(header.count))

    def _header(self, filter_at: int, fences_crc: int) -> KeyRunHeader:
        return KeyRunHeader(
            topic_id=self._topic_id,
            run_id=self._run_id,
            count=self._given.count,
            checksum=self._given.checksum,
            first_ledger_id=self._first_ledger_id,
            last_ledger_id=self._last_ledger_id,
            filter_at=filter_at,
            block_count=len(self._first_hashes),
            filter_blocks=KeyFilterBuilder(self._given.count).block_count,
            filter_crc=self._filter_crc,
            fences_crc=fences_crc,
            kind=self._stamp.kind,
            settled_ms=self._stamp.settled_ms,
        )

    def _add_filter(self, part: bytes) -> None:
        self._filter_crc = extend(self._filter_crc, part)
        self._file.append(part)


@dataclass(frozen=True, slots=True)
class _WrittenRun:
    """The blocks of a run that is being read back, and the filter that is made of them."""

    file: RunWriter
    header: KeyRunHeader  # as far as it is known
    fences: Fences
    encoded_fences: bytes
    builder: KeyFilterBuilder

    def read(self, first: int, end: int) -> KeyColumns:
        return _read_blocks(self.file, self.header, self.fences, first, end)


class KeyRunReader:
    """One run open for reading; every call blocks. Raises Corrupt, Unavailable."""

    def __init__(self, file: RunFile) -> None:
        self._file = file
        self.close = file.close

    def read_header(self) -> KeyRunHeader:
        header = decode_header(self._file.pread(HEADER_BYTES, 0), self._file.path)
        self._file.check(header.topic_id, header.run_id, header.file_bytes, 8)
        return header

    def read_fences(self, header: KeyRunHeader) -> Fences:
        data = self._file.pread(header.fences_bytes, header.fences_at)
        return decode_fences(data, header, self._file.path)

    def read_filter(self, header: KeyRunHeader) -> KeyFilter:
        data = bytearray()
        crc = 0
        for start in range(0, header.filter_bytes, _FILTER_READ_BYTES):
            length = min(_FILTER_READ_BYTES, header.filter_bytes - start)
            part = self._file.pread(length, header.filter_at + start)
            crc = extend(crc, part)
            data += part
        return decode_filter(data, crc, header, self._file.path)

    def read_blocks(self, header: KeyRunHeader, fences: Fences, first: int, end: int) -> KeyColumns:
        """The entries of the blocks from `first` up to `end`, in one read."""
        return _read_blocks(self._file, header, fences, first, end)

    def find(
        self, header: KeyRunHeader, fences: Fences, blocks: Sequence[int], hashes: UInt64Column
    ) -> KeyColumns:
        """The entries with one of some rising hashes in some blocks."""
        parts = [NO_KEYS]
        for block in blocks:
            parts += _with_hashes(_read_blocks(self._file, header, fences, block, block + 1), hashes)
        return join_keys(parts)

    def find_nowait(
        self, header: KeyRunHeader, fences: Fences, blocks: Sequence[int], hashes: UInt64Column
    ) -> KeyColumns | None:
        """As `find`, for the event loop: None unless the blocks are in memory. Raises Corrupt."""
        parts = [NO_KEYS]
        for block in blocks:
            data = self._file.pread_nowait(int(fences.lengths[block]), int(fences.offsets[block]))
            if data is None:
                return None
            parts += _with_hashes(decode_block(data, header, fences, block, self._file.path), hashes)
        return join_keys(parts)


def _with_hashes(keys: KeyColumns, hashes: UInt64Column) -> list[KeyColumns]:
    """The entries of a block with some of the rising hashes."""
    low, high = np.searchsorted(hashes, keys.hashes[0]), np.searchsorted(hashes, keys.hashes[-1], "right")
    here = hashes[low:high]
    starts = np.searchsorted(keys.hashes, here, side="left").tolist()
    ends = np.searchsorted(keys.hashes, here, side="right").tolist()
    bounds = zip(starts, ends, strict=True)
    return [keys.part(slice(start, end)) for start, end in bounds if start < end]


class _Bytes(Protocol):
    """The file of a run, while it is written or later."""

    path: str

    def pread(self, length: int, offset: int) -> bytes: ...


def _read_blocks(file: _Bytes, header: KeyRunHeader, fences: Fences, first: int, end: int) -> KeyColumns:
    offsets, lengths = fences.offsets[first:end].tolist(), fences.lengths[first:end].tolist()
    data = file.pread(offsets[-1] + lengths[-1] - offsets[0], offsets[0])
    keys = []
    for index, offset, length in zip(range(first, end), offsets, lengths, strict=True):
        block = data[offset - offsets[0] : offset - offsets[0] + length]
        keys.append(decode_block(block, header, fences, index, file.path))
    return join_keys(keys)


KEY_RUNS: RunKind[KeyRunReader] = RunKind("key run", "keys", ADVICE, KeyRunReader)

KeyStorage = RunStorage[KeyRunReader]


def key_storage(vfs: Vfs, folder: str, topic_id: int, executor: Executor | None = None) -> KeyStorage:
    return RunStorage(vfs, folder, topic_id, KEY_RUNS, executor)


def create_key_run(storage: KeyStorage, run_id: int, stamp: Stamp = _OF_HOLDERS) -> KeyRunWriter:
    """Blocks."""
    return KeyRunWriter(storage.create(run_id, HEADER_BYTES), storage.topic_id, run_id, stamp)
