"""Places of threads in the order in which a core runs them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import sys
import threading

_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
"""The number of `sched_setattr`, which Python does not have."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period
_SLICE_NS = 100_000
"""The shortest one that the system grants."""
_NICENESS = 5
"""Added to that of the process for whoever gives way: a third of the weight."""


def run_when_woken() -> bool:
    """Let this thread run as soon as it is woken, in the place of whoever has the core; for one that works little.

    Linux, from 6.12 on, lets a thread with a short slice of time go first. Otherwise the one that woke it goes on, here
    for as long as it has work, and a busy neighbour to the end of its own slice of milliseconds. Returns whether the
    system took it: an older one goes on as it did, as does one whose library or sandbox knows none of these calls.
    """
    try:
        policy = os.sched_getscheduler(0)
        if _SET_ATTRIBUTES is None or policy != os.SCHED_OTHER:
            return False
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, policy, 0, nice, 0, _SLICE_NS, 0, 0)
        syscall = ctypes.CDLL(None, use_errno=True).syscall
        return bool(syscall(_SET_ATTRIBUTES, 0, attributes, 0) == 0)
    except (OSError, AttributeError):  # musl answers ENOSYS, a filter of system calls EPERM
        return False


def give_way() -> None:
    """Let the loop have three times as much of a core as this thread, where both want the same one.

    Otherwise a thread that reads for somebody has as much of it as the loop, which serves everybody else. A thread asks
    for itself, once: each time adds to its niceness, and to take it back needs a privilege. A system that does not
    know the niceness of a thread, or refuses it, shares as before.
    """
    if sys.platform != "linux":  # elsewhere a number means a process
        return
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
