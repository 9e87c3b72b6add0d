"""A histogram of what is pending from exact times and from pieces of which only the borders are known. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from broker.delayed.tracker import Histogram, HistogramBar
from broker.model import Array, Int64Column

Spread = tuple[Int64Column, Int64Column, Int64Column]
"""First time, last time and count, aligned: entries that lie anywhere between two times."""

_PIECES_MAX = 262_144
_TIMES_AT_ONCE = 8_192


def histogram_of(
    exact: Sequence[Int64Column],
    spread: Sequence[Spread],
    gone: Int64Column,
    *,
    floor_ms: int,
    start_ms: int,
    end_ms: int,
    width_ms: int,
) -> Histogram:
    """Bars in [start_ms, end_ms), and what lies before and after; nothing before `floor_ms` counts.

    Entries between two times count as spread evenly, in whole numbers that add up to the count. What is `gone` at
    some times is among the others and does not count. The caller bounds the number of bars: each costs some bytes,
    whether it holds anything or not.
    """
    bins = _Bins(floor_ms, start_ms, end_ms, width_ms)
    nothing = np.empty(0, dtype=np.int64)
    totals = np.zeros(bins.count, dtype=np.int64)
    for times in exact:
        totals += bins.counts_of(times)
    first, last, count = (np.concatenate([nothing, *(columns[i] for columns in spread)]) for i in range(3))
    kept = (last >= floor_ms) & (count > 0)
    first, last, count = first[kept], last[kept], count[kept]
    first_bin, last_bin = bins.of(np.maximum(first, floor_ms)), bins.of(last)
    is_whole = (first_bin == last_bin) & (first >= floor_ms)
    np.add.at(totals, first_bin[is_whole], count[is_whole])
    parted = np.flatnonzero(~is_whole)
    if len(parted):
        _add_parts(totals, bins, first[parted], last[parted], count[parted])
    totals -= bins.counts_of(gone)
    is_sound = bool((totals >= 0).all())
    if not is_sound:  # what is gone did not lie where it was taken to lie: the next bars have it
        sums = np.maximum(np.minimum.accumulate(totals.cumsum()[::-1])[::-1], 0)
        totals = np.diff(sums, prepend=0)
    filled = np.flatnonzero(totals[1:-1])
    starts = (start_ms + filled * width_ms).tolist()
    bars = [HistogramBar(*pair) for pair in zip(starts, totals[1:-1][filled].tolist(), strict=True)]
    return Histogram(bars, int(totals[0]), int(totals[-1]), is_exact=is_sound and not len(parted))


class _Bins:
    """Bin 0 is what lies before the range, the last one what lies after it; between them there is one for each bar."""

    def __init__(self, floor_ms: int, start_ms: int, end_ms: int, width_ms: int) -> None:
        bars = max(-(-(end_ms - start_ms) // width_ms), 0)
        self.count = bars + 2
        self._start_ms, self._end_ms, self._width_ms = start_ms, end_ms, width_ms
        self._floor_ms = floor_ms

    def of(self, times: Int64Column) -> Array:
        clipped = np.clip(times, self._start_ms - 1, max(self._end_ms, self._start_ms))
        bins = (clipped - self._start_ms) // self._width_ms + 1
        bins[times >= self._end_ms] = self.count - 1
        return bins

    def counts_of(self, times: Int64Column) -> Array:
        """Number of times in each bin, but for those before the floor; some at a time, as new memory costs more than
        the work."""
        counts = np.zeros(self.count, dtype=np.int64)
        for first in range(0, len(times), _TIMES_AT_ONCE):
            some = times[first : first + _TIMES_AT_ONCE]
            counts += np.bincount(self.of(some[some >= self._floor_ms]), minlength=self.count)
        return counts

    def between(self, bins: Array, first: Array, last: Array) -> tuple[Array, Array]:
        """Of each entry's span [first, last], where the part in its bin begins and ends."""
        left = self._start_ms + (bins - 1) * self._width_ms
        right = np.minimum(left + self._width_ms, self._end_ms)
        is_before, is_after = bins == 0, bins == self.count - 1
        left[is_before] = self._floor_ms
        right[is_before] = self._start_ms
        left[is_after] = self._end_ms
        right[is_after] = last[is_after] + 1
        return np.maximum(np.maximum(left, first), self._floor_ms), np.minimum(right, last + 1)


def _add_parts(totals: Array, bins: _Bins, first: Array, last: Array, count: Array) -> None:
    """Share the entries of each span among the bins that it touches, a bounded number of them at a time."""
    first_bin = bins.of(first)
    lengths = bins.of(last) - first_bin + 1
    ends = np.cumsum(lengths)
    row = 0
    while row < len(lengths):
        before = ends[row - 1] if row else 0
        stop = max(row + 1, int(np.searchsorted(ends, before + _PIECES_MAX, side="right")))
        part = slice(row, stop)
        of = np.repeat(np.arange(row, stop), lengths[part])
        places = np.arange(len(of)) - np.repeat(ends[part] - lengths[part] - before, lengths[part])
        into = places + first_bin[of]
        left, right = bins.between(into, first[of], last[of])
        # In floating point, or count times duration overflows; what rises stays rising, so no count is negative.
        duration = (last[of] - first[of] + 1).astype(np.float64)
        share = np.floor(count[of] * ((right - first[of]) / duration)) - np.floor(
            count[of] * ((left - first[of]) / duration)
        )
        np.add.at(totals, into, np.maximum(share, 0).astype(np.int64))
        row = stop
