"""A thread that runs when it is woken."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import threading
from collections.abc import Callable
from typing import TypeVar
from unittest.mock import patch

import pytest

from broker.runtime import scheduling
from broker.runtime.scheduling import give_way, run_when_woken

T = TypeVar("T")


def in_a_thread(work: Callable[[], T]) -> T:
    said: list[T] = []
    thread = threading.Thread(target=lambda: said.append(work()))
    thread.start()
    thread.join()
    return said[0]


def test_policy_and_niceness_of_the_thread_stay():
    def look() -> tuple[int, int]:
        return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)

    def ask() -> bool:
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + 1)
        before = look()
        run_when_woken()
        return look() == before

    assert in_a_thread(ask)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="another number of the call")
def test_the_system_takes_it():
    assert in_a_thread(run_when_woken) is True


def test_where_the_call_has_no_known_number_nothing_changes():
    with patch.object(scheduling, "_SET_ATTRIBUTES", None):
        assert not run_when_woken()


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (os, "sched_getscheduler", OSError(errno.ENOSYS, "musl does not have it")),
        (os, "sched_getscheduler", PermissionError(errno.EPERM, "filtered")),
        (os, "getpriority", PermissionError(errno.EPERM, "filtered")),
        (ctypes, "CDLL", OSError("no library")),
        (ctypes, "CDLL", AttributeError("no such function")),
    ],
)
def test_a_system_without_one_of_the_calls_is_no_error(owner: object, name: str, error: Exception):
    with patch.object(owner, name, side_effect=error):
        assert run_when_woken() is False


def test_a_system_that_refuses_it_is_no_error():
    with patch.object(scheduling, "_SET_ATTRIBUTES", 100_000):  # no such call
        assert in_a_thread(run_when_woken) is False


def niceness() -> tuple[int, int]:
    """Of this thread, and of the process's first one."""
    return (
        os.getpriority(os.PRIO_PROCESS, threading.get_native_id()),
        os.getpriority(os.PRIO_PROCESS, os.getpid()),
    )


def test_a_thread_that_gives_way_has_a_third_of_the_weight_and_the_process_has_its_own():
    def look() -> tuple[int, int]:
        give_way()
        return niceness()

    ours, first = in_a_thread(niceness)
    assert in_a_thread(look) == (ours + 5, first)
    assert in_a_thread(niceness) == (ours, first)


def test_where_a_number_means_a_process_nothing_gives_way():
    with patch.object(sys, "platform", "darwin"), patch.object(os, "setpriority") as set_priority:
        in_a_thread(give_way)
    assert not set_priority.called


@pytest.mark.parametrize("name", ["getpriority", "setpriority"])
def test_a_system_that_refuses_a_niceness_is_no_error(name: str):
    """An error here would end the threads of an executor before their first step."""

    def look() -> bool:
        with patch.object(os, name, side_effect=PermissionError(errno.EPERM, "filtered")):
            give_way()
        return True

    assert in_a_thread(look)
