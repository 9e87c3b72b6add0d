"""The bytes of ledger files: headers, block checksums, footers, and which ranges are read at once."""

from __future__ import annotations

import contextlib
import struct

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import Corrupt
from broker.model import ROW
from broker.storage.blocks import (
    BLOCK_ROWS,
    HEADER_BYTES,
    KINDS,
    TRAILER_BYTES,
    BlockChecksums,
    FileHeader,
    decode_footer,
    decode_header,
    footer_bytes,
    frame_length,
    is_contiguous,
    peek_row_count,
    slice_frames,
    split_runs,
)

HEADER = FileHeader("rows", topic_id=7, ledger_id=(1 << 48) - 1, generation=3)


def checksums_of(row_count: int) -> BlockChecksums:
    checksums = BlockChecksums(8)
    checksums.extend(np.arange(row_count, dtype=np.int64))
    return checksums


def flip(block: bytes, bit: int) -> bytes:
    changed = bytearray(block)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("kind", KINDS)
def test_header_comes_back(kind: str) -> None:
    header = FileHeader(kind, 1, 2, 3)
    assert len(header.encode()) == HEADER_BYTES
    assert decode_header(header.encode() + b"rows") == header


def test_header_layout_is_the_documented_one() -> None:
    head = b"PDLR\x01\0\0\0" + struct.pack("<QQI", 7, (1 << 48) - 1, 3)
    assert HEADER.encode() == head + struct.pack("<I", google_crc32c.value(head))


def test_every_changed_bit_of_a_header_is_found() -> None:
    block = HEADER.encode()
    for bit in range(len(block) * 8):
        with pytest.raises(Corrupt):
            decode_header(flip(block, bit))


@pytest.mark.parametrize(
    ("offset", "bytes_there"), [(4, b"\x03"), (5, b"\x01"), (0, b"PDLX")], ids=["version", "zero", "magic"]
)
def test_foreign_header_with_a_right_checksum_is_refused(offset: int, bytes_there: bytes) -> None:
    head = bytearray(HEADER.encode()[:-4])
    head[offset : offset + len(bytes_there)] = bytes_there
    with pytest.raises(Corrupt):
        decode_header(bytes(head) + struct.pack("<I", google_crc32c.value(bytes(head))))


@given(st.binary(max_size=80))
def test_any_bytes_are_a_header_or_corrupt(block: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_header(block)


@given(st.lists(st.integers(0, 2 * BLOCK_ROWS + 5), max_size=8), st.sampled_from([np.dtype("<i8"), ROW]))
def test_block_1_block_checksums_do_not_depend_on_batches(
    counts: list[int], dtype: np.dtype[np.void]
) -> None:
    raw = np.random.default_rng(sum(counts)).bytes(sum(counts) * dtype.itemsize)
    rows = np.frombuffer(raw, dtype)
    checksums = BlockChecksums(dtype.itemsize)
    first = 0
    for count in counts:
        checksums.extend(rows[first : first + count])
        first += count
    size = BLOCK_ROWS * dtype.itemsize
    blocks = [raw[start : start + size] for start in range(0, len(raw), size)]
    assert checksums.row_count == len(rows)
    assert checksums.crcs() == tuple(map(google_crc32c.value, blocks))
    assert all(checksums.verify(index, block) for index, block in enumerate(blocks))


def test_restored_checksums_continue_a_partial_block() -> None:
    half = checksums_of(BLOCK_ROWS + 100)
    restored = BlockChecksums(8, half.row_count, half.crcs())
    restored.extend(np.arange(half.row_count, 3 * BLOCK_ROWS, dtype=np.int64))
    assert restored.crcs() == checksums_of(3 * BLOCK_ROWS).crcs()


def test_verify_wants_all_rows_of_the_block_unchanged() -> None:
    checksums = checksums_of(BLOCK_ROWS + 2)
    block = np.arange(BLOCK_ROWS, BLOCK_ROWS + 2, dtype=np.int64)
    assert checksums.verify(1, block)
    assert checksums.verify(1, block.tobytes())
    assert not checksums.verify(1, flip(block.tobytes(), 9))
    assert not checksums.verify(1, block[:1])
    assert not checksums.verify(0, block)
    assert not checksums.verify(2, b"")
    assert not checksums.verify(-1, block)


def test_checksums_of_another_row_count_are_refused() -> None:
    with pytest.raises(Corrupt):
        BlockChecksums(8, BLOCK_ROWS + 1, [1])


@pytest.mark.parametrize("row_count", [0, 1, BLOCK_ROWS, BLOCK_ROWS + 1, 1_000_000])
def test_footer_comes_back(row_count: int) -> None:
    checksums = checksums_of(row_count)
    footer = checksums.encode_footer()
    assert len(footer) == footer_bytes(row_count)
    assert peek_row_count(b"rows" + footer) == row_count
    decoded = decode_footer(footer, 8)
    assert (decoded.row_count, decoded.crcs()) == (row_count, checksums.crcs())


def test_every_changed_bit_of_a_footer_is_found() -> None:
    footer = checksums_of(2 * BLOCK_ROWS).encode_footer()
    for bit in range(len(footer) * 8):
        with pytest.raises(Corrupt):
            decode_footer(flip(footer, bit), 8)


@given(st.binary(max_size=200), st.booleans())
def test_block_2_any_bytes_are_a_footer_or_corrupt(block: bytes, with_magic: bool) -> None:
    footer = block[:-TRAILER_BYTES] + b"PDLF\x01\0\0\0" + block[-16:] if with_magic else block
    with contextlib.suppress(Corrupt):
        assert decode_footer(footer, 8).encode_footer() == footer


@given(st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 32) - 1))
def test_block_2_footer_that_claims_too_much_is_refused_before_anything_is_allocated(
    rows: int, blocks: int
) -> None:
    body = struct.pack("<4sB3xQI", b"PDLF", 1, rows, blocks)
    footer = body + struct.pack("<I", google_crc32c.value(body))
    if rows or blocks:
        with pytest.raises(Corrupt):
            decode_footer(footer, 8)


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 40_000, 500_000]), st.sampled_from([2, 90, 70_000])), min_size=1
    )
)
def test_runs_hold_every_range_and_are_bounded(steps: list[tuple[int, int]]) -> None:
    gaps, lengths = (np.array(column, np.int64) for column in zip(*steps, strict=True))
    ends = np.cumsum(gaps + lengths)
    starts = ends - lengths
    firsts = split_runs(starts, ends).tolist()
    assert firsts[0] == 0
    assert firsts == sorted(set(firsts))
    for low, high in zip(firsts, [*firsts[1:], len(starts)], strict=True):
        assert ends[high - 1] - starts[low] <= 128 * 1024 + lengths[high - 1]
        assert (starts[low + 1 : high] - ends[low : high - 1] <= 32 * 1024).all()


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(2, 5)), min_size=1, max_size=40),
        min_size=1,
        max_size=6,
    ),
    st.booleans(),
)
def test_frames_are_cut_where_they_lie(pieces: list[list[tuple[int, int]]], equal: bool) -> None:
    """Pieces of frames with gaps between them; `equal` makes all frames of one length, side by side."""
    stream = np.random.default_rng(0).bytes(2000)
    parts, part_offsets, firsts, end = [], [], [], 5
    ranges: list[tuple[int, int]] = []
    for piece in pieces:
        part_start = end
        firsts.append(len(ranges))
        for gap, length in piece:
            start = end if equal else end + gap
            end = start + (4 if equal else length)
            ranges.append((start, end))
        parts.append(stream[part_start:end])
        part_offsets.append(part_start)
    starts, ends = (np.array(column, np.int64) for column in zip(*ranges, strict=True))
    frames = slice_frames(iter(parts), np.array(part_offsets), np.array(firsts), starts, ends)
    assert frames == [stream[low:high] for low, high in ranges]


def test_frames_that_only_add_up_like_equal_ones_are_cut_where_they_lie() -> None:
    lengths = np.array([4] + [3, 5] * 10, np.int64)
    ends = np.cumsum(lengths)
    part = bytes(range(84))
    frames = slice_frames([part], np.zeros(1, np.int64), np.zeros(1, np.int64), ends - lengths, ends)
    assert [len(frame) for frame in frames] == lengths.tolist()
    assert b"".join(frames) == part


@pytest.mark.parametrize(
    ("entry_ids", "expected"), [([], False), ([3], True), ([3, 4, 5], True), ([3, 5], False)]
)
def test_contiguous_ids_are_recognised(entry_ids: list[int], expected: bool) -> None:
    assert is_contiguous(np.array(entry_ids, np.uint32)) is expected


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"\x12\x00", 2),
        (b"\x12\x05hello", 7),
        (b"\x12\x80\x01", 131),
        (b"\x12\xff\xff\xff\xff\x0f", (1 << 32) - 1 + 6),
        (b"\x12\xff\xff\xff\xff\xff", None),
        (b"\x12", None),
        (b"\x0a\x05", None),
        (b"", None),
    ],
)
def test_frame_length_is_read_from_its_first_bytes(head: bytes, expected: int | None) -> None:
    assert frame_length(head) == expected
