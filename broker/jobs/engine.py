"""What runs the units of an audit: here without Spark, in processes of this machine; on Spark in `spark`."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Protocol

from broker.jobs.plan import pack_units
from broker.jobs.units import audit_unit, failed_unit
from broker.jobs.values import Unit, UnitResult

_TASKS_PER_PROCESS = 4  # so that none waits long for the last


Tell = Callable[[int, int], None]
"""Is told how many tasks of how many are done."""


class Engine(Protocol):
    """Runs units somewhere. `start` may take seconds, and is timed apart from the work."""

    @property
    def name(self) -> str:
        """For the report."""

    def start(self) -> None: ...

    def run(self, units: Sequence[Unit], tell: Tell) -> Iterator[list[UnitResult]]:
        """The results, as they come; of every unit one, whatever happens. `tell` hears how far it is."""

    def stop(self) -> None: ...


class InlineEngine:
    """Runs units in processes of this machine, or in this one if there is work for one only."""

    def __init__(self, processes: int | None = None) -> None:
        self._processes = processes or len(os.sched_getaffinity(0))
        self._pool: ProcessPoolExecutor | None = None

    @property
    def name(self) -> str:
        return f"inline[{self._processes}]"

    def start(self) -> None:
        if self._processes > 1:
            # A fork of a process that has threads may hang; nothing here is big enough to be worth that.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._processes, context)
            for ready in [self._pool.submit(os.getpid) for _ in range(self._processes)]:
                ready.result()

    def run(self, units: Sequence[Unit], tell: Tell) -> Iterator[list[UnitResult]]:
        if self._pool is None or len(units) == 1:
            for number, unit in enumerate(units, 1):
                yield run_units([unit])
                tell(number, len(units))
            return
        tasks = pack_units(units, self._processes * _TASKS_PER_PROCESS)
        running = {self._pool.submit(run_units, task): task for task in tasks}
        for number, done in enumerate(as_completed(running), 1):
            tell(number, len(tasks))
            error = done.exception()
            if error is None:
                yield done.result()
            else:  # the process itself died
                yield [failed_unit(unit, error) for unit in running[done]]

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def run_units(units: Sequence[Unit]) -> list[UnitResult]:
    """One task's units. Nothing that goes wrong with one keeps the others from being checked."""
    results = []
    for unit in units:
        try:
            results.append(audit_unit(unit))
        except Exception as error:
            results.append(failed_unit(unit, error))
    return results
