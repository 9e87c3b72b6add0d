"""A kind of work: units that need nothing of each other, and what runs one. Engines run any. Pure.

A unit may be run more than once, at the same time too (a cluster tries a task again, and speculates), so running it
changes nothing, or what it leaves is the same whoever of them was first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

Line = dict[str, Any]
"""A value as it travels to a task and back: what JSON can hold."""


class WorkUnit(Protocol):
    """One piece of work."""

    @property
    def weight(self) -> int:
        """Return how much there is to do, beside others of its kind."""

    def to_line(self) -> Line: ...


class Result(Protocol):
    """Return what one unit came to."""

    def to_line(self) -> Line: ...


U = TypeVar("U", bound=WorkUnit)
R = TypeVar("R", bound=Result)


@dataclass(frozen=True, slots=True)
class Work(Generic[U, R]):
    """Its functions are sent to processes by name, so they are functions of modules."""

    run: Callable[[U], R]  # blocks; what it raises becomes a failed result
    failed: Callable[[U, BaseException], R]
    unit_of: Callable[[Line], U]
    result_of: Callable[[Line], R]


def run_units(work: Work[U, R], units: Sequence[U]) -> list[R]:
    """One task's units. Nothing that goes wrong with one keeps the others from being done."""
    results = []
    for unit in units:
        try:
            results.append(work.run(unit))
        except Exception as error:
            results.append(work.failed(unit, error))
    return results


def pack_units(units: Collection[U], task_count: int) -> list[list[U]]:
    """Share units out among at most so many tasks of about one weight, the heaviest first."""
    tasks: list[list[U]] = [[] for _ in range(min(task_count, len(units)))]
    weights = [0] * len(tasks)
    for unit in sorted(units, key=lambda unit: -unit.weight):
        lightest = weights.index(min(weights))
        tasks[lightest].append(unit)
        weights[lightest] += unit.weight
    return tasks
