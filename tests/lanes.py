"""Order in which the processes of a run take the files of tests, so that no core waits, and what one does with a file.

Tests of real processes wait for most of their time, those in memory never do. Half of the test processes begin at the
former, half at the latter, and both come to the short files last. A file stays in one process: what it makes for all
of its tests is made once. It is read there alone, when its turn comes: to read all of them took each process longer
than most of them take to run.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

WAITING = ("tests/process/", "tests/jobs/", "tests/clients/", "tests/browser/")
BUSY = ("tests/crash/", "tests/sim/", "tests/model/")
LONG = (
    "tests/process/test_cluster_shards.py",
    "tests/process/test_sdk_shards_kill.py",
    "tests/process/test_compaction.py",
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

    def _reschedule(self, node: WorkerController) -> None:
        # A process that has yet to begin with its file may be the last that does.
        if not self.workqueue or self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)


def sort_items(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place(item.nodeid.partition("::")[0]))


class UnreadFile(pytest.File):
    """A file of tests as the processes of a run share it."""

    def collect(self) -> Iterator[pytest.Item]:
        yield TestsOfFile.from_parent(self, name="tests")
        # A test process begins with an item when it knows the next one. With this one it knows it from the start.
        yield EndOfFile.from_parent(self, name="end")


class EndOfFile(pytest.Item):
    """Takes down what the file had in common with the one before and has not with the next."""

    def runtest(self) -> None:
        pass


class TestsOfFile(pytest.Item):
    """The tests of a file, read when they are run."""

    __test__ = False

    def runtest(self) -> None:
        raise AssertionError("it runs by `run`, which knows what comes next")

    def run(self, nextitem: pytest.Item | None) -> None:
        items = self._read()
        held = self.session.items
        index = held.index(self)
        for item, following in zip(items, [*items[1:], nextitem], strict=False):
            held[index] = item  # of which the reports are
            self.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.session.shouldfail or self.session.shouldstop:
                break
        held[index] = self

    def _read(self) -> list[pytest.Item]:
        unread = self.getparent(UnreadFile)
        assert unread is not None
        gc.collect()
        gc.disable()
        try:
            module = pytest.Module.from_parent(unread.parent, path=unread.path)
            items = list(self.session.genitems(module))
            self.ihook.pytest_collection_modifyitems(session=self.session, config=self.config, items=items)
        finally:
            gc.enable()
            gc.freeze()  # what was imported and read stays (tests/conftest.py)
        return items


def run_item(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run what is an item to the processes that share a run, or a test of one; None in any other run."""
    if isinstance(item, TestsOfFile):
        item.run(nextitem)
        return True
    if not is_shared(item.config):
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        # What set up or took down well is nothing to tell: of five words for each test to the first process one is left.
        if not report.passed or (report.when == "call" and not isinstance(item, EndOfFile)):
            item.ihook.pytest_runtest_logreport(report=report)
    return True


def tell(node: WorkerController) -> None:
    """Tell a process that is about to start whether it reads each file when its turn comes (`is_shared`).

    By a marker alone, as those of packaging, tests are chosen before they are shared.
    """
    option = node.config.option
    node.workerinput["reads_in_turn"] = option.dist == "loadfile" and option.markexpr != "packaging"


def is_shared(config: pytest.Config) -> bool:
    """Return whether this is one of several processes, each of which reads the files that it runs."""
    # Of what was asked for on the command line a process is told that tests are not distributed.
    return bool(getattr(config, "workerinput", {}).get("reads_in_turn"))


def make_module(module_path: Path, parent: pytest.Collector) -> UnreadFile | None:
    """The file as the processes of `TwoEnds` share it; None in any other run."""
    return UnreadFile.from_parent(parent, path=module_path) if is_shared(parent.config) else None
