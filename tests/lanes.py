"""Order in which the processes of a run take the files of tests, so that no core waits.

Tests of real processes wait for most of their time, those in memory never do. Half of the test processes begin at the
former, half at the latter, and both come to the short files last. A file stays in one process: what it makes for all
of its tests is made once.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

WAITING = ("tests/process/", "tests/jobs/", "tests/clients/", "tests/browser/")
BUSY = ("tests/crash/", "tests/sim/", "tests/model/")
LONG = (
    "tests/process/test_cluster_shards.py",
    "tests/process/test_sdk_shards_kill.py",
    "tests/process/test_compaction.py",
    "tests/jobs/test_spark.py",
    "tests/process/test_cluster.py",
    "tests/process/test_start.py",
    "tests/process/test_shards.py",
    "tests/process/test_disk_calls.py",
    "tests/process/test_floods.py",
    "tests/process/test_memory_of_calls.py",
    "tests/sim/test_sim.py",
    "tests/sim/test_cluster.py",
    "tests/crash/test_storage_faults.py",
    "tests/crash/test_background_tasks.py",
    "tests/crash/test_reshard.py",
)
"""Files that take longest: begun last, one alone would keep the whole run."""


def place(path: str) -> int:
    """Place of a file between the two ends of the queue: below 0 at the first, above at the last."""
    long = path in LONG
    return -(path.startswith(WAITING) * (1 + long)) or path.startswith(BUSY) * (1 + long)


class TwoEnds(LoadFileScheduling):  # type: ignore[misc]  # of an untyped package
    """Every second test process takes its files from the end of the queue."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        if self.nodes.index(node) % 2:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


def sort_items(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place(item.nodeid.partition("::")[0]))
