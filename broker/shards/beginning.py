"""The beginning of a shard's process: it loads what it serves with while its supervisor does, and then waits for it.

Imports take most of the time of a start, and a processor for each process. What a process of a shard may touch, the
supervisor has to lock and prepare before; so the process waits, with all loaded, for a byte on its standard input.
"""

from __future__ import annotations

import ctypes
import os
import signal

from broker.errors import Fenced

BEGIN = b"b"
_PR_SET_PDEATHSIG = 1


def end_with(supervisor_pid: int) -> None:
    """Have the kernel kill this process once its supervisor has ended, and send it no signals of a terminal before."""
    # Those are for the supervisor, which drains all shards. A group is enough: Linux shares out processors by sessions
    # (sched_autogroup), and a shard with a session of its own would be woken later, for less each time.
    os.setpgid(0, 0)
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != supervisor_pid:  # it ended before that
        raise _supervisor_ended()


def wait_begin() -> None:
    """Return once the supervisor says so. Raises Fenced if it will never."""
    if os.read(0, len(BEGIN)) != BEGIN:
        raise _supervisor_ended()


def _supervisor_ended() -> Fenced:
    return Fenced("The supervisor of this shard has ended", reason="NO_SUPERVISOR")
