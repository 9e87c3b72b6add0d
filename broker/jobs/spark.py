"""Runs the units of a job on Spark.

Each task is a few units, which it reads from files by itself: nothing is shuffled, no position crosses a network, and
the driver gets one line for each unit. The folder must be seen under one path by all executors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from broker.jobs.engine import Tell
from broker.jobs.spark_session import JobSession
from broker.jobs.work import R, U, Work, pack_units, run_units

if TYPE_CHECKING:
    import pyarrow as pa

_TASKS_PER_CORE = 4
_TELL_SECONDS = 0.5


class SparkEngine:
    """Runs units as tasks of one Spark job."""

    def __init__(self, master: str, session: JobSession | None = None) -> None:
        """With a `session` that is started already, it is used and left running."""
        self._owned = None if session is not None else JobSession(master, name="postdate")
        self._session = session or self._owned
        self._master = master

    @property
    def name(self) -> str:
        return f"spark {self._master}"

    def start(self) -> None:
        """Session, and the Python of the executors: the first task would wait for both."""
        if self._owned is not None:
            self._owned.start()
        spark = self._spark()
        cores = spark.sparkContext.defaultParallelism
        spark.range(0, cores, 1, cores).mapInArrow(_warm_up, "id bigint").collect()

    def run(self, work: Work[U, R], units: Sequence[U], tell: Tell) -> Iterator[list[R]]:
        spark = self._spark()
        tasks = pack_units(units, spark.sparkContext.defaultParallelism * _TASKS_PER_CORE)
        if not tasks:
            return
        lines = [json.dumps([unit.to_line() for unit in task]) for task in tasks]
        # One partition a task, each with the number of its task and nothing else: there is nothing to be skewed.
        frame = spark.range(0, len(tasks), 1, len(tasks)).mapInArrow(
            _task(work, lines), "task bigint, results binary"
        )
        with ThreadPoolExecutor(1) as waiter:
            collected = waiter.submit(frame.collect)
            while not wait([collected], _TELL_SECONDS).done:
                tell(_done_count(spark), len(tasks))
        if error := collected.exception():  # the job ended: what it did not check is to be told
            yield [work.failed(unit, error) for unit in units]
            return
        for row in collected.result():
            yield [work.result_of(line) for line in json.loads(bytes(row["results"]))]
        tell(len(tasks), len(tasks))

    def stop(self) -> None:
        if self._owned is not None:
            self._owned.stop()

    def _spark(self) -> Any:
        assert self._session is not None
        return self._session.spark


def _done_count(spark: Any) -> int:
    """Tasks that are done, of the one stage that runs."""
    tracker = spark.sparkContext.statusTracker()
    stages = map(tracker.getStageInfo, tracker.getActiveStageIds())
    return sum(stage.numCompletedTasks for stage in stages if stage is not None)


def _task(work: Work[U, R], tasks: Sequence[str]) -> Any:
    """A function that is sent to the executors; it carries its tasks and imports everything else there."""

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa  # noqa: PLC0415

        for batch in batches:
            for number in batch.column(0).to_pylist():
                units = [work.unit_of(line) for line in json.loads(tasks[number])]
                results = json.dumps([result.to_line() for result in run_units(work, units)]).encode()
                yield pa.RecordBatch.from_pydict(
                    {"task": pa.array([number], pa.int64()), "results": pa.array([results], pa.binary())}
                )

    return run


def _warm_up(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches
