"""A histogram of what is pending from exact times and from segments of which only the borders are known. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from broker.delayed.tracker import HistogramBar
from broker.model import Array, Int64Column

Spread = tuple[Int64Column, Int64Column, Int64Column]
"""First time, last time and count, aligned: entries that lie anywhere between two times."""

_PIECES_MAX = 262_144


def histogram_bars(
    exact: Sequence[Int64Column], spread: Sequence[Spread], start_ms: int, end_ms: int, width_ms: int
) -> list[HistogramBar]:
    """Bars in [start_ms, end_ms), those without entries left out. The exact times lie inside.

    Entries between two times count as spread evenly, in whole numbers that add up to the count.
    """
    bars, counts = [], []
    for times in exact:
        if len(times):
            found, found_counts = np.unique((times - start_ms) // width_ms, return_counts=True)
            bars.append(found)
            counts.append(found_counts)
    for first, last, count in spread:
        near = (last >= start_ms) & (first < end_ms)
        pieces = _spread_pieces(first[near], last[near], count[near], start_ms, end_ms, width_ms)
        bars.extend(piece[0] for piece in pieces)
        counts.extend(piece[1] for piece in pieces)
    if not bars:
        return []
    numbers, bar_of = np.unique(np.concatenate(bars), return_inverse=True)
    totals = np.zeros(len(numbers), dtype=np.int64)
    np.add.at(totals, bar_of, np.concatenate(counts))
    return [
        HistogramBar(start_ms + bar * width_ms, total)
        for bar, total in zip(numbers.tolist(), totals.tolist(), strict=True)
        if total
    ]


def _spread_pieces(
    first: Array, last: Array, count: Array, start_ms: int, end_ms: int, width_ms: int
) -> list[tuple[Array, Array]]:
    """(bar, count) for each bar that each segment touches, a bounded number of them at a time."""
    first_bar = (np.maximum(first, start_ms) - start_ms) // width_ms
    last_bar = (np.minimum(last, end_ms - 1) - start_ms) // width_ms
    lengths = last_bar - first_bar + 1
    pieces: list[tuple[Array, Array]] = []
    ends = np.cumsum(lengths)
    row = 0
    while row < len(lengths):
        before = ends[row - 1] if row else 0
        stop = max(row + 1, int(np.searchsorted(ends, before + _PIECES_MAX, side="right")))
        part = slice(row, stop)
        of = np.repeat(np.arange(row, stop), lengths[part])
        bar = (
            np.arange(len(of)) - np.repeat(ends[part] - lengths[part] - before, lengths[part]) + first_bar[of]
        )
        # In floating point, or count times duration overflows; what rises stays rising, so no count is negative.
        duration = (last[of] - first[of] + 1).astype(np.float64)
        left = np.maximum(np.maximum(bar * width_ms + start_ms, start_ms) - first[of], 0)
        right = np.minimum(
            np.minimum((bar + 1) * width_ms + start_ms, end_ms) - first[of], last[of] - first[of] + 1
        )
        share = np.floor(count[of] * (right / duration)) - np.floor(count[of] * (left / duration))
        pieces.append((bar, share.astype(np.int64)))
        row = stop
    return pieces
