"""Engine that runs the units of a job: here without Spark, in processes of this machine; on Spark in `spark`."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Protocol

from broker.jobs.work import R, U, Work, pack_units, run_units

_TASKS_PER_PROCESS = 16  # so that none waits long for the last, and results come as they are had


Tell = Callable[[int, int], None]
"""Is told how many tasks of how many are done."""


class Engine(Protocol):
    """Runs units somewhere. `start` may take seconds, and is timed apart from the work."""

    @property
    def name(self) -> str:
        """For the report."""

    def start(self) -> None: ...

    def run(self, work: Work[U, R], units: Sequence[U], tell: Tell) -> Iterator[list[R]]:
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
            self._pool = ProcessPoolExecutor(self._processes, context, _end_with_parent)
            for ready in [self._pool.submit(os.getpid) for _ in range(self._processes)]:
                ready.result()

    def run(self, work: Work[U, R], units: Sequence[U], tell: Tell) -> Iterator[list[R]]:
        if self._pool is None or len(units) == 1:
            for number, unit in enumerate(units, 1):
                yield run_units(work, [unit])
                tell(number, len(units))
            return
        tasks = pack_units(units, self._processes * _TASKS_PER_PROCESS)
        running = {self._pool.submit(run_units, work, task): task for task in tasks}
        for number, done in enumerate(as_completed(running), 1):
            tell(number, len(tasks))
            error = done.exception()
            if error is None:
                yield done.result()
            else:  # the process itself died
                yield [work.failed(unit, error) for unit in running[done]]

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _end_with_parent() -> None:
    """A job that is killed must not leave processes behind that wait for its work, or go on writing."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
