"""Due times of a log's lines in its replay. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Timeline:
    """Milliseconds from the start of the replay, one for each time given, in their order."""

    offsets_ms: list[int]
    length_ms: int
    original_ms: int
    cut_count: int  # gaps that were cut
    gap_max_ms: float  # to this


def plan_timeline(
    times_ms: Sequence[int], speed: float, *, gap_max_ms: float | None, within_ms: float
) -> Timeline:
    """Squeeze the original spacing by `speed`, and cut what is longer than `gap_max_ms`.

    None cuts the longest gaps just so far that the whole fits into `within_ms`: the spacing of what
    happened together is kept, and the nights between go.
    """
    moments = sorted(set(times_ms))
    gaps = [(after - before) / speed for before, after in pairwise(moments)]
    limit = _fitting_gap(gaps, within_ms) if gap_max_ms is None else gap_max_ms
    offset = 0.0
    offsets = dict.fromkeys(moments[:1], 0)
    for gap, moment in zip(gaps, moments[1:], strict=True):
        offset += min(gap, limit)
        offsets[moment] = round(offset)
    return Timeline(
        offsets_ms=[offsets[time_ms] for time_ms in times_ms],
        length_ms=round(offset),
        original_ms=moments[-1] - moments[0] if moments else 0,
        cut_count=sum(gap > limit for gap in gaps),
        gap_max_ms=limit,
    )


def _fitting_gap(gaps: list[float], within_ms: float) -> float:
    """The longest gap so that all of them, cut to it, last no longer than `within_ms`."""
    left_ms = within_ms
    ordered = sorted(gaps)
    for place, gap in enumerate(ordered):
        share = left_ms / (len(ordered) - place)
        if gap > share:
            return share
        left_ms -= gap
    return ordered[-1] if ordered else 0.0
