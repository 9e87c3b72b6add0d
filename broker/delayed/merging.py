"""Which buckets become one, and how sorted runs become one sorted stream. Pure.

Buckets merge in tiers: eight adjacent ones of one size class become one of the next class, so that each entry
is rewritten about once a class (about five times for a billion entries). Smaller buckets that lie between the
eight go with them, or they would stay between larger ones for good. Where the tiers alone leave more buckets
than policy allows, the adjacent ones with the least sum are merged, each time for the price of that sum.

Rows are pairs (deliver_at_ms, ordinal); ordinals are those of the result and order as positions do.

Invariants:
  G1  A plan names at least two adjacent buckets, so every merge leaves fewer.
  G2  While there are more than `max_buckets`, there is a plan.
  G3  `MergeRuns.step` returns rows that lie after all that it returned before, each once.
  G4  What is in memory of a source is one part of it, as it was fed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from broker.model import Int64Column

FAN_IN = 8
_KEY_BITS = 63


@dataclass(frozen=True, slots=True)
class MergePlan:
    """Merge the buckets `start` to `end`, the end excluded, into one."""

    start: int
    end: int


def plan_merge(
    counts: Sequence[int], *, max_buckets: int, min_index_count: int, fan_in: int = FAN_IN
) -> MergePlan | None:
    """Choose what to merge next among buckets in the order of the log; None if nothing needs to be.

    `counts` are the entries that each bucket still waits to hand out; every limit from 1 on works.
    """
    assert max_buckets >= 1 and min_index_count >= 1 and fan_in >= 2
    classes = [size_class(count, min_index_count, fan_in) for count in counts]
    for tier in sorted(set(classes)):
        group: list[int] = []
        for index, bucket_tier in enumerate(classes):
            if bucket_tier > tier:
                group = []
            elif bucket_tier == tier:
                group.append(index)
                if len(group) == fan_in:
                    return MergePlan(group[0], index + 1)
    excess = len(counts) - max_buckets
    if excess <= 0:
        return None
    size = min(fan_in, excess + 1)
    start = min(range(len(counts) - size + 1), key=lambda first: sum(counts[first : first + size]))
    return MergePlan(start, start + size)


def size_class(count: int, min_index_count: int, fan_in: int = FAN_IN) -> int:
    """0 for less than `fan_in` times the least size of a bucket, one more for each further factor."""
    tier = 0
    while count >= min_index_count * fan_in:
        count //= fan_in
        tier += 1
    return tier


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a bucket in the making, aligned."""

    times: Int64Column
    ordinals: Int64Column

    def __len__(self) -> int:
        return len(self.times)

    def part(self, rows: slice) -> Rows:
        return Rows(self.times[rows], self.ordinals[rows])


NO_ROWS = Rows(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def join_rows(parts: Sequence[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    return Rows(
        np.concatenate([NO_ROWS.times, *(part.times for part in parts)]),
        np.concatenate([NO_ROWS.ordinals, *(part.ordinals for part in parts)]),
    )


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows in order, each once; and the copies that were dropped."""

    rows: Rows
    doubles: Rows | None = None


def sort_rows(rows: Rows) -> SortedRows:
    if len(rows) < 2:
        return SortedRows(rows)
    lowest, bits = int(rows.times.min()), int(rows.ordinals.max()).bit_length()
    if (int(rows.times.max()) - lowest).bit_length() + bits <= _KEY_BITS:
        # Both in one number: sorting numbers is five times faster than sorting indexes of them.
        keys = ((rows.times - lowest) << bits) | rows.ordinals
        keys.sort()
        times, ordinals = (keys >> bits) + lowest, keys & ((1 << bits) - 1)
    else:
        order = np.lexsort((rows.ordinals, rows.times))
        times, ordinals = rows.times[order], rows.ordinals[order]
    is_new = np.ones(len(times), dtype=np.bool_)
    is_new[1:] = (times[1:] != times[:-1]) | (ordinals[1:] != ordinals[:-1])
    if is_new.all():
        return SortedRows(Rows(times, ordinals))
    is_double = ~is_new
    return SortedRows(Rows(times[is_new], ordinals[is_new]), Rows(times[is_double], ordinals[is_double]))


class MergeRuns:
    """Several sorted runs, fed part by part, taken as one sorted stream.

    Feed every run that `wanted` names until it names none, then `step`; the stream ends when `is_done`.
    """

    def __init__(self, run_count: int) -> None:
        self._rows = [NO_ROWS] * run_count
        self._ended = [False] * run_count

    def wanted(self) -> list[int]:
        """The runs without a row in memory that may have more."""
        return [run for run, rows in enumerate(self._rows) if not len(rows) and not self._ended[run]]

    def feed(self, run: int, rows: Rows, *, is_last: bool) -> None:
        """The next rows of a run that was wanted; perhaps none, for a part may hold nothing to keep."""
        assert not len(self._rows[run])
        self._rows[run] = rows
        self._ended[run] = is_last

    @property
    def is_done(self) -> bool:
        return all(self._ended) and not any(map(len, self._rows))

    def step(self) -> SortedRows:
        """The next rows of the stream."""
        assert not self.wanted()
        # A run that may have more ends, for now, with its last row: what other runs hold beyond it has to wait.
        bound = min(
            (
                (int(rows.times[-1]), int(rows.ordinals[-1]))
                for rows, ended in zip(self._rows, self._ended, strict=True)
                if not ended
            ),
            default=None,
        )
        parts: list[Rows] = []
        for run, rows in enumerate(self._rows):
            end = len(rows) if bound is None else _count_through(rows, *bound)
            if end:
                parts.append(rows.part(slice(0, end)))
                self._rows[run] = rows.part(slice(end, None))
        return SortedRows(parts[0]) if len(parts) == 1 else sort_rows(join_rows(parts))


def _count_through(rows: Rows, time: int, ordinal: int) -> int:
    """Return how many of the sorted rows lie at or before a row."""
    low, high = np.searchsorted(rows.times, (time, time + 1))
    return int(low + np.searchsorted(rows.ordinals[low:high], ordinal, side="right"))
