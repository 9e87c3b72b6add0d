"""Bucket segments: where they are cut, and that columns come back from few bytes."""

from __future__ import annotations

import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import Corrupt
from broker.model import TIME_MS_MAX, Int64Column
from broker.storage.bucket_segment import (
    ORDINAL_END,
    SEGMENT_COUNT_LIMIT,
    cut_segments,
    decode_segment,
    encode_segment,
    pack_bits,
    packed_bytes,
    unpack_bits,
)

NOW_MS = 1_750_000_000_000
DAY_MS = 86_400_000

Rows = tuple[Int64Column, Int64Column]


def rows_of(pairs: list[tuple[int, int]]) -> Rows:
    rows = sorted(set(pairs))
    return np.array([time for time, _ in rows], np.int64), np.array([each for _, each in rows], np.int64)


def random_rows(count: int, span_ms: int, seed: int = 1) -> Rows:
    times = NOW_MS + np.random.default_rng(seed).integers(0, span_ms, count)
    order = np.argsort(times, kind="stable")
    return times[order], order.astype(np.int64)


def decoded(data: bytes, rows: Rows) -> Rows:
    return decode_segment(data, len(rows[0]), int(rows[0][0]), int(rows[1][0]), "x", 7)


def check_round_trip(rows: Rows) -> bytes:
    data = encode_segment(*rows)
    times, ordinals = decoded(data, rows)
    assert times.dtype == ordinals.dtype == np.int64
    assert np.array_equal(times, rows[0]) and np.array_equal(ordinals, rows[1])
    return data


ROWS = {
    "one": rows_of([(5, 9)]),
    "least": rows_of([(0, 0)]),
    "greatest": rows_of([(TIME_MS_MAX, ORDINAL_END - 1)]),
    "least and greatest": rows_of([(0, ORDINAL_END - 1), (TIME_MS_MAX, 0)]),
    "steps of both signs": rows_of([(1, 0), (2, ORDINAL_END - 1), (3, 0), (4, ORDINAL_END - 1)]),
    "one time": (np.full(5000, NOW_MS), np.arange(5000)),
    "one time, scattered": (np.full(100, NOW_MS), np.cumsum(np.arange(100) ** 3)),
    "uniform": (NOW_MS + np.arange(5000) // 100, np.arange(5000)),
    "uneven runs": (NOW_MS + np.repeat(np.arange(0, 90, 3), np.arange(1, 31)), np.arange(465)),
    "random": random_rows(5000, 30 * DAY_MS),
    "falling ordinals": (NOW_MS + np.arange(300), np.arange(300)[::-1].copy()),
    "most there may be": (np.arange(SEGMENT_COUNT_LIMIT) // 7, np.arange(SEGMENT_COUNT_LIMIT)),
}


@pytest.mark.parametrize("name", ROWS)
def test_columns_come_back(name: str) -> None:
    check_round_trip(ROWS[name])


@given(
    st.lists(
        st.tuples(
            st.one_of(st.integers(0, 9), st.integers(0, TIME_MS_MAX)),
            st.one_of(st.integers(0, 99), st.integers(0, ORDINAL_END - 1)),
        ),
        min_size=1,
        max_size=60,
    )
)
def test_any_columns_come_back(pairs: list[tuple[int, int]]) -> None:
    check_round_trip(rows_of(pairs))


@given(st.integers(1, 63), st.integers(0, 40), st.integers(0, 1 << 32))
def test_any_width_is_packed_without_waste(width: int, count: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 1 << 64, count, dtype=np.uint64) >> np.uint64(64 - width)
    packed = pack_bits(values, width)
    assert len(packed) == packed_bytes(count, width) < (count + 8) * width / 8 + 1
    assert np.array_equal(unpack_bits(packed, count, width), values)


def test_the_bytes_are_the_documented_ones() -> None:
    # Deltas 1, 3 and 2 less their least 1 in 2 bits; ordinals 9, 7, 8 and 20 less their least 7 in 4 bits.
    data = encode_segment(np.array([10, 11, 14, 16]), np.array([9, 7, 8, 20]))
    times = struct.pack("<BBqH", 0, 2, 1, 0 | 2 << 2 | 1 << 4)
    ordinals = struct.pack("<BBqI", 0, 4, 7, 2 | 0 << 4 | 1 << 8 | 13 << 12)
    assert data == times + ordinals
    # Runs of 40 entries 5 ms apart; ordinals with steps of 3 cost nothing.
    data = encode_segment(np.repeat([10, 15, 20], 40), np.arange(0, 360, 3))
    times = struct.pack("<BIBqBq", 1, 3, 0, 5, 0, 40)
    assert data == times + struct.pack("<BBq", 1, 0, 3)
    # 17 bits: 16 as a column, then one bit of each.
    data = encode_segment(np.array([0, 1 << 16, 3 << 16]), np.array([0, 1, 2]))
    assert data[:15] == struct.pack("<BBqHHB", 0, 17, 1 << 16, 0, 0, 0b10)


@pytest.mark.parametrize(
    ("rows", "bytes_max"),
    [
        (random_rows(5000, 3 * DAY_MS), 4.2),
        (ROWS["uniform"], 0.01),
        (ROWS["one time"], 0.01),
        ((NOW_MS + np.arange(5000), np.arange(5000)), 0.01),
    ],
    ids=["random", "uniform", "one time", "one a millisecond"],
)
def test_an_entry_takes_few_bytes(rows: Rows, bytes_max: float) -> None:
    assert len(encode_segment(*rows)) / len(rows[0]) < bytes_max


# Damage


@pytest.mark.parametrize("name", ["one", "least and greatest", "uneven runs", "falling ordinals", "uniform"])
def test_what_is_cut_or_longer_is_corrupt(name: str) -> None:
    rows = ROWS[name]
    data = encode_segment(*rows)
    for length in range(len(data)):
        with pytest.raises(Corrupt) as caught:
            decoded(data[:length], rows)
    assert (caught.value.path, caught.value.offset) == ("x", 7)
    with pytest.raises(Corrupt):
        decoded(data + b"\0", rows)


def expect_order(data: bytes, count: int, first_ms: int, first_ordinal: int) -> None:
    """SEGMENT-1: any bytes give columns in order, or Corrupt."""
    with suppress(Corrupt):
        times, ordinals = decode_segment(data, count, first_ms, first_ordinal)
        assert len(times) == len(ordinals) == count
        keys = list(zip(times.tolist(), ordinals.tolist(), strict=True))
        assert keys[0] == (first_ms, first_ordinal)
        assert keys == sorted(set(keys))
        assert keys[-1][0] <= TIME_MS_MAX and 0 <= int(ordinals.min()) <= int(ordinals.max()) < ORDINAL_END


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["least and greatest", "uneven runs", "one time, scattered", "steps of both signs"]
)
def test_every_changed_bit_leaves_columns_in_order_or_corrupt(name: str) -> None:
    rows = ROWS[name]
    data = encode_segment(*rows)
    for bit in range(len(data) * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        expect_order(bytes(changed), len(rows[0]), int(rows[0][0]), int(rows[1][0]))


PACKED = st.tuples(
    st.integers(0, 70),
    st.one_of(st.integers(-3, 3), st.integers(-(1 << 63), (1 << 63) - 1)),
    st.binary(max_size=60),
).map(lambda parts: bytes([parts[0]]) + struct.pack("<q", parts[1]) + parts[2])


@given(
    st.one_of(
        st.binary(max_size=80),
        st.tuples(
            st.sampled_from([b"\0", b"\1\1\0\0\0", b"\1\3\0\0\0", b"\1\xff\xff\xff\xff"]), PACKED, PACKED
        ).map(b"".join),
        st.tuples(PACKED, st.sampled_from([b"\0", b"\1"]), PACKED).map(lambda parts: b"\0" + b"".join(parts)),
    ),
    st.sampled_from([-1, 0, 1, 2, 3, 9, SEGMENT_COUNT_LIMIT, SEGMENT_COUNT_LIMIT + 1, 1 << 60]),
    st.sampled_from([-1, 0, NOW_MS, TIME_MS_MAX, 1 << 62]),
    st.sampled_from([0, 5, ORDINAL_END - 1]),
)
def test_any_bytes_are_columns_in_order_or_corrupt(
    data: bytes, count: int, first_ms: int, first_ordinal: int
) -> None:
    expect_order(data, count, first_ms, first_ordinal)


@pytest.mark.parametrize(
    "steps",
    [(0, 1 << 62), (0, (1 << 62) - 1), (62, (1 << 62) - 1), (63, 0), (61, 1 << 61), (0, -(1 << 62))],
)
def test_sums_that_would_wrap_around_are_corrupt(steps: tuple[int, int]) -> None:
    width, least = steps
    count = 9
    content = b"\xff" * packed_bytes(count - 1, width)
    times = struct.pack("<BBq", 0, 0, 1)
    with pytest.raises(Corrupt):
        decode_segment(times + struct.pack("<BBq", 1, width, least) + content, count, 0, ORDINAL_END - 1)
    times = struct.pack("<BBq", 0, width, least) + content
    with pytest.raises(Corrupt):
        decode_segment(times + struct.pack("<BBq", 1, 0, 1), count, TIME_MS_MAX, 0)


@pytest.mark.parametrize(
    ("lengths", "is_right"),
    [((3, 1), True), ((0, 4), False), ((4, 0), False), ((5, -1), False), ((3, 2), False)],
)
def test_runs_that_are_not_of_all_entries_are_corrupt(lengths: tuple[int, int], is_right: bool) -> None:
    least = min(lengths)
    runs = struct.pack("<BqBxx", 3, least, (lengths[0] - least) | (lengths[1] - least) << 3)
    data = struct.pack("<BIBq", 1, 2, 0, 10) + runs + struct.pack("<BBq", 1, 0, 1)
    if is_right:
        assert decode_segment(data, 4, 7, 0)[0].tolist() == [7, 7, 7, 17]
        return
    with pytest.raises(Corrupt):
        decode_segment(data, 4, 7, 0)


# Where segments are cut


def test_a_segment_ends_with_a_time_step_once_it_is_worth_a_read() -> None:
    times = np.array([0, 1, 9, 10, 11, 20, 30, 31, 32, 33, 50])
    assert cut_segments(times, 10, max_entries=4, min_entries=2).tolist() == [3, 5, 9, 11]
    assert cut_segments(times, 10, max_entries=100, min_entries=1).tolist() == [3, 5, 6, 10, 11]
    assert cut_segments(times, 1, max_entries=100, min_entries=100).tolist() == [11]
    assert cut_segments(times, 10, max_entries=3, min_entries=100).tolist() == [3, 6, 9, 11]
    assert cut_segments(times[:0], 10).tolist() == []


def test_50_000_entries_over_30_days_are_about_25_segments() -> None:
    times, _ = random_rows(50_000, 30 * DAY_MS)
    assert 20 <= len(cut_segments(times, 300_000)) <= 25


def test_more_entries_of_one_time_than_a_segment_holds() -> None:
    assert cut_segments(np.full(12_001, NOW_MS), 300_000).tolist() == [5000, 10_000, 12_001]


@given(
    st.lists(st.integers(0, 60), max_size=80),
    st.integers(1, 20),
    st.integers(1, 12),
    st.integers(1, 12),
    st.lists(st.integers(0, 80), max_size=5),
)
def test_segments_cut_part_by_part_are_those_cut_at_once(
    numbers: list[int], step_ms: int, max_entries: int, min_entries: int, parts: list[int]
) -> None:
    times = np.array(sorted(numbers), np.int64)
    whole = cut_segments(times, step_ms, max_entries, min_entries).tolist()
    ends: list[int] = []
    for end in sorted(min(part, len(times)) for part in parts):
        start = ends[-1] if ends else 0
        cut = cut_segments(times[start:end], step_ms, max_entries, min_entries, is_last=False)
        ends += (start + cut).tolist()
    start = ends[-1] if ends else 0
    ends += (start + cut_segments(times[start:], step_ms, max_entries, min_entries)).tolist()
    assert ends == whole
    for low, high in zip([0, *whole], whole, strict=False):
        assert 0 < high - low <= max_entries
        is_worth = high - low >= min(min_entries, max_entries)
        assert is_worth or high == len(times)
