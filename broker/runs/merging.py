"""The choice of runs to merge, and sorted runs as one sorted stream. Pure; knows no rows.

Runs merge in tiers: eight adjacent ones of one size class become one of the next class, so that each entry
is rewritten about once a class (about five times for a billion entries). Smaller runs that lie between the
eight go with them, or they would stay between larger ones for good. Where the tiers alone leave more buckets
than policy allows, the adjacent ones with the least sum are merged, each time for the price of that sum.

Invariants:
  MERGE-1  A plan names at least two adjacent buckets, so every merge leaves fewer.
  MERGE-2  While there are more than `runs_max`, there is a plan.
  MERGE-3  `MergeRuns.step` returns rows that lie after all that it returned before.
  MERGE-4  What is in memory of a source is one part of it, as it was fed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

FAN_IN = 8

K = TypeVar("K", bound=tuple[int, ...])


@dataclass(frozen=True, slots=True)
class MergePlan:
    """Merge the runs `start` to `end`, the end excluded, into one."""

    start: int
    end: int


def plan_merge(counts: Sequence[int], *, runs_max: int, unit: int, fan_in: int = FAN_IN) -> MergePlan | None:
    """Choose what to merge next among runs in their order; None if nothing needs to be.

    `counts` are the entries of each that matter, `unit` the least size of a run; every limit from 1 on works.
    """
    assert runs_max >= 1 and unit >= 1 and fan_in >= 2
    classes = [size_class(count, unit, fan_in) for count in counts]
    for tier in sorted(set(classes)):
        group: list[int] = []
        for index, run_tier in enumerate(classes):
            if run_tier > tier:
                group = []
            elif run_tier == tier:
                group.append(index)
                if len(group) == fan_in:
                    return MergePlan(group[0], index + 1)
    excess = len(counts) - runs_max
    if excess <= 0:
        return None
    size = min(fan_in, excess + 1)
    start = min(range(len(counts) - size + 1), key=lambda first: sum(counts[first : first + size]))
    return MergePlan(start, start + size)


def size_class(count: int, unit: int, fan_in: int = FAN_IN) -> int:
    """0 for less than `fan_in` times the least size of a run, one more for each further factor."""
    tier = 0
    while count >= unit * fan_in:
        count //= fan_in
        tier += 1
    return tier


class RunRows(Protocol[K]):
    """Sorted rows of one kind, in columns. Keys order as the rows do."""

    def __len__(self) -> int: ...

    def part(self, rows: slice, /) -> Self: ...

    def key(self, row: int, /) -> K: ...

    def count_through(self, key: K, /) -> int:
        """Return how many of the rows lie at or before a key."""


R = TypeVar("R", bound=RunRows[Any])


class MergeRuns(Generic[R]):
    """Several sorted runs, fed part by part, taken as one stream.

    Feed every run that `wanted` names until it names none, then `step`; the stream ends when `is_done`.
    """

    def __init__(self, run_count: int, nothing: R) -> None:
        """`nothing`: no rows."""
        self._rows = [nothing] * run_count
        self._ended = [False] * run_count

    def wanted(self) -> list[int]:
        """The runs without a row in memory that may have more."""
        return [run for run, rows in enumerate(self._rows) if not len(rows) and not self._ended[run]]

    def feed(self, run: int, rows: R, *, is_last: bool) -> None:
        """The next rows of a run that was wanted; perhaps none, for a part may hold nothing to keep."""
        assert not len(self._rows[run])
        self._rows[run] = rows
        self._ended[run] = is_last

    @property
    def is_done(self) -> bool:
        return all(self._ended) and not any(map(len, self._rows))

    def step(self) -> list[R]:
        """The next rows of the stream: sorted parts, which the caller makes one of."""
        assert not self.wanted()
        # A run that may have more ends, for now, with its last row: what other runs hold beyond it has to wait.
        bound = min(
            (rows.key(-1) for rows, ended in zip(self._rows, self._ended, strict=True) if not ended),
            default=None,
        )
        parts: list[R] = []
        for run, rows in enumerate(self._rows):
            end = len(rows) if bound is None else rows.count_through(bound)
            if end:
                parts.append(rows.part(slice(0, end)))
                self._rows[run] = rows.part(slice(end, None))
        return parts
