"""Processes of the benchmarks: each has the cores as a service of its own would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.processes import spawn

_ABOUT = """
import os, pathlib
group = pathlib.Path("/proc/self/autogroup")
print(os.getsid(0), os.getpid(), os.getpriority(os.PRIO_PROCESS, 0), group.read_text().split()[-1] if group.exists() else "-")
"""


@pytest.mark.parametrize("more", [0, 3])
def test_a_process_has_a_session_of_its_own_that_is_as_nice_as_it_is(more: int) -> None:
    core = min(os.sched_getaffinity(0))
    process = spawn(core, [sys.executable, "-c", _ABOUT], niceness=more, stdout=subprocess.PIPE)
    session, pid, niceness, of_session = process.communicate(timeout=60)[0].split()
    assert process.returncode == 0
    assert session == pid
    assert int(niceness) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + more)
    if Path("/proc/self/autogroup").exists():
        assert int(of_session) == more
