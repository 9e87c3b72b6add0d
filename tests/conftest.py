"""Depth of this run: profiles of Hypothesis, which tests are left to the deep run, and where files of tests lie."""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.depth import DEPTH, load_profile
from tests.lanes import TwoEnds, UnreadFile, make_module, run_item, sort_items, tell
from tests.process.fork_server import ForkServer

load_profile()

_MEMORY = Path("/dev/shm")
_MEMORY_BYTES_MIN = 2 << 30
_IN_MEMORY = frozenset({"wire", "jobs"})
"""Folders of tests that promise nothing about a disk: their waits for its syncs are half of their time."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave unread the files without a test of the marker to which a run of few tests is limited."""
    marker = config.option.markexpr.partition(" ")[0]
    if marker != "packaging" or not collection_path.name.startswith("test_"):
        return None
    return True if f"mark.{marker}" not in collection_path.read_text() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the depth of this run leaves out."""
    left_out = {"fast": ("deep", "slow"), "change": ("deep",), "deep": ()}[DEPTH]
    deselected = {item for item in items if any(item.get_closest_marker(name) for name in left_out)}
    config.hook.pytest_deselected(items=list(deselected))
    items[:] = [item for item in items if item not in deselected]
    if hasattr(config, "workerinput"):
        sort_items(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TwoEnds | None:
    """Share files among the test processes by `tests/lanes.py`."""
    return TwoEnds(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a test process how files are shared."""
    tell(node)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> UnreadFile | None:
    """Leave files unread that the test processes of a run have yet to share."""
    return make_module(module_path, parent)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Read a file when its turn comes, and run its tests."""
    return run_item(item, nextitem)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the cyclic collector, of which each walk would find that all of it stays: a fifth of the time.

    Then keep what was collected out of its walks, and let it walk seldom: a broker in memory is thousands of objects
    that live for one test, and their walks took a twelfth of all its time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Of a test that promises nothing about a disk the folder is in memory, where there is room; in a deep run none is."""
    room = request.path.relative_to(Path(__file__).parent).parts[0]
    if room not in _IN_MEMORY or DEPTH == "deep" or not _has_room():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="postdate-test-", dir=_MEMORY) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def interpreter_as_before() -> Iterator[None]:
    """Fail a test that leaves these settings otherwise: the one that fails of it would be another, by chance."""
    before = _settings_of_interpreter()
    yield
    assert _settings_of_interpreter() == before


def _settings_of_interpreter() -> tuple[object, ...]:
    return gc.get_threshold(), sys.getswitchinterval()  # Hypothesis leaves one of gc.callbacks


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """The process that brokers, commands and programs of tests are forked from."""
    server = ForkServer()
    yield server
    server.close()


def _has_room() -> bool:
    try:
        found = os.statvfs(_MEMORY)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize >= _MEMORY_BYTES_MIN
