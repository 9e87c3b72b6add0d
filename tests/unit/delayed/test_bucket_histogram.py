"""Bars from exact times and from pieces of which only the borders are known."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from broker.delayed.bucket_histogram import Spread, histogram_of
from broker.delayed.tracker import Histogram, HistogramBar

times = st.integers(0, 60)
columns = st.lists(st.lists(times, max_size=8), max_size=3)
pieces = st.lists(
    st.tuples(times, st.integers(0, 20), st.integers(0, 9)).map(lambda p: (p[0], p[0] + p[1], p[2])),
    max_size=5,
)


def column(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def _columns_of(spread) -> Spread:
    return (
        column([first for first, _, _ in spread]),
        column([last for _, last, _ in spread]),
        column([count for _, _, count in spread]),
    )


def bars_of(exact, spread, gone, floor, start, end, width) -> Histogram:
    spreads = [_columns_of(each) for each in spread]
    return histogram_of(
        [column(each) for each in exact],
        spreads,
        column(gone),
        floor_ms=floor,
        start_ms=start,
        end_ms=end,
        width_ms=width,
    )


@given(columns, st.lists(times, max_size=4), times, times, st.integers(0, 50), st.integers(1, 70))
def test_exact_times_are_counted_one_by_one(exact, points, floor, start, length, width):
    """Pieces that begin where they end are exact too; what is gone was there."""
    held = [time for each in exact for time in each] + points
    gone = held[::3]
    found = bars_of(exact, [[(time, time, 1) for time in points]], gone, floor, start, start + length, width)
    left = list(held)
    for time in gone:
        left.remove(time)
    bars: dict[int, int] = {}
    for time in left:
        if floor <= time and start <= time < start + length:
            bar = time - (time - start) % width
            bars[bar] = bars.get(bar, 0) + 1
    before = sum(floor <= time < start for time in left)
    after = sum(floor <= time and time >= start + length for time in left)
    expected = Histogram([HistogramBar(*bar) for bar in sorted(bars.items())], before, after, is_exact=True)
    assert found == expected


@given(st.lists(pieces, max_size=3), times, st.integers(0, 50), st.integers(1, 70))
def test_pieces_are_spread_over_the_bars_that_they_touch_and_add_up(spread, start, length, width):
    found = bars_of([], spread, [], 0, start, start + length, width)
    held = [piece for each in spread for piece in each if piece[2]]
    assert found.before + sum(bar.count for bar in found.bars) + found.after == sum(
        count for *_, count in held
    )
    for bar in found.bars:
        end = min(bar.start_ms + width, start + length)
        touching = [count for first, last, count in held if first < end and last >= bar.start_ms]
        within = [count for first, last, count in held if first >= bar.start_ms and last < end]
        assert 0 < bar.count <= sum(touching)
        assert bar.count >= sum(within)
    borders = [*range(start, start + length, width), start + length]
    is_parted = any(first < border <= last for first, last, _ in held for border in borders)
    assert found.is_exact is not is_parted


@given(st.lists(pieces, max_size=3), st.lists(times, max_size=5), st.integers(1, 9))
def test_what_is_gone_leaves_whole_numbers_that_add_up(spread, gone, width):
    held = sum(piece[2] for each in spread for piece in each)
    found = bars_of([], spread, gone, 0, 0, 200, width)
    assert found.before == 0
    assert sum(bar.count for bar in found.bars) + found.after == max(held - len(gone), 0)
    assert all(bar.count > 0 for bar in found.bars)


def test_a_piece_that_spans_years_is_shared_without_overflow():
    year = 365 * 86_400_000
    found = bars_of([], [[(1 << 40, (1 << 40) + 40_000 * year, 1 << 40)]], [], 0, 0, 1 << 52, 10 * year)
    assert found.before + sum(bar.count for bar in found.bars) + found.after == 1 << 40
    assert not found.is_exact
