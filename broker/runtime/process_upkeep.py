"""The interpreter and the heap of a process that serves, set and looked after once, however many brokers are in it.

They belong to the process: a broker within another program, as that of `postdate.testing`, leaves them alone.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Coroutine
from typing import Any

from broker.runtime.allocator import RestTrim
from broker.runtime.cycles import CycleCollection
from broker.runtime.supervise import Supervisor

THREAD_SWITCH_SECONDS = 0.0005
"""Threads share the interpreter in turns of 5 ms by default: a file thread would cost the whole lateness budget."""


async def with_upkeep(serving: Coroutine[Any, Any, int]) -> int:
    """Run what serves, and ends well when the system asks with SIGTERM; returns its exit status.

    If the upkeep fails, the process is asked just so, and the status is 1 at least.
    """
    switch_seconds = sys.getswitchinterval()
    sys.setswitchinterval(THREAD_SWITCH_SECONDS)
    supervisor = Supervisor(lambda _name, _error: signal.raise_signal(signal.SIGTERM))
    supervisor.spawn_lasting("cycle collection", CycleCollection().run())
    supervisor.spawn_lasting("trim of the heap", RestTrim().run())
    try:
        status = await serving
    finally:
        sys.setswitchinterval(switch_seconds)
        await supervisor.stop()
    return status or int(supervisor.failure is not None)
