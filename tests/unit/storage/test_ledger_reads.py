"""Refusals of a ledger's files though each checksum holds, and the number of frames within a bound in bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from google_crc32c import value

from broker.errors import Corrupt
from broker.model import ROW, RowColumn
from broker.storage.blocks import HEADER_BYTES, BlockChecksums
from broker.storage.ledger_reads import (
    FEW_READS,
    ReadHandles,
    frames_within,
    read_footer,
    read_frames,
    read_items,
)


class Bytes:
    """A file of some bytes."""

    path = "ledgers/1.0"

    def __init__(self, content: bytes, *, is_in_memory: bool = True) -> None:
        self._content = content
        self._is_in_memory = is_in_memory
        self.asked_for: list[tuple[int, int]] = []

    def size(self) -> int:
        return len(self._content)

    def pread(self, length: int, offset: int) -> bytes:
        return self._content[offset : offset + length]

    def pread_nowait(self, length: int, offset: int) -> bytes | None:
        return self.pread(length, offset) if self._is_in_memory else None

    def read_ahead(self, begins: Sequence[int], ends: Sequence[int]) -> None:
        self.asked_for += zip(begins, ends, strict=True)


def rows_at(frames: list[tuple[int, bytes]]) -> RowColumn:
    rows = np.zeros(len(frames), ROW)
    rows["offset"] = [offset for offset, _ in frames]
    rows["length"] = [len(frame) for _, frame in frames]
    rows["crc"] = [value(frame) for _, frame in frames]
    return rows


def test_frames_are_counted_up_to_the_bound_and_one_at_least():
    rows = rows_at([(0, b"abc"), (3, b"def"), (6, b"g")])
    assert [frames_within(rows, bytes_max) for bytes_max in (0, 2, 3, 5, 6, 7, 8)] == [1, 1, 1, 1, 2, 3, 3]


@pytest.mark.parametrize("count", [2, FEW_READS + 2])
def test_offsets_that_go_back_are_damage_though_the_frames_are_whole(count: int):
    data = b"".join(b"%04d" % n for n in range(count))
    file = Bytes(bytes(HEADER_BYTES) + data)
    order = [*range(2, count), 1, 0]
    rows = rows_at([(4 * n, data[4 * n : 4 * n + 4]) for n in order])
    with pytest.raises(Corrupt, match="offsets"):
        read_frames(ReadHandles(file, file, file), rows, len(data))


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_what_lies_scattered_and_is_not_in_memory_is_asked_for_together(*, is_in_memory: bool):
    places = [n << 14 for n in range(FEW_READS + 2)]
    data = b"".join(b"%04d" % n + bytes((1 << 14) - 4) for n in range(len(places)))
    file = Bytes(bytes(HEADER_BYTES) + data, is_in_memory=is_in_memory)
    wanted = [data[at : at + 4] for at in places]
    ranges = [(HEADER_BYTES + at, HEADER_BYTES + at + 4) for at in places]
    rows = rows_at(list(zip(places, wanted, strict=True)))
    assert read_frames(ReadHandles(file, file, file), rows, len(data)) == wanted
    assert file.asked_for == ([] if is_in_memory else ranges)
    file.asked_for.clear()
    assert read_items(file, np.array(places) + HEADER_BYTES, 4) == b"".join(wanted)
    assert file.asked_for == ([] if is_in_memory else ranges)


def test_a_whole_footer_of_another_count_is_damage():
    rows = np.zeros(5, "<i8")
    checksums = BlockChecksums(8)
    checksums.extend(rows)
    footer = checksums.encode_footer()
    assert read_footer(Bytes(bytes(HEADER_BYTES + 40) + footer), 8, 5).row_count == 5
    with pytest.raises(Corrupt, match="row count"):
        read_footer(Bytes(bytes(HEADER_BYTES + 48) + footer), 8, 6)
