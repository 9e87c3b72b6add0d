"""Depth of this run: profiles of Hypothesis, and which tests are left to the deep run."""

import gc
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.depth import DEPTH, load_profile
from tests.lanes import TwoEnds, UnreadFile, make_module, run_item, sort_items, tell

load_profile()

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
