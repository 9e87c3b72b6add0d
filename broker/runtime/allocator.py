"""Gives memory that was freed back to the system, which the allocator keeps otherwise."""

from __future__ import annotations

import asyncio
import ctypes
import time
from contextlib import suppress

_AGAIN_AFTER = 4
"""Times the pause after which the heap is trimmed again."""
_LOOK_SECONDS = 5.0
_WORK_SECONDS = 2.0
"""CPU time since the last trim; who has worked less has freed little."""
_REST = 0.1
"""Of a core: who takes no more is at rest."""
_RESTS = 2
"""Looks in a row that find it at rest: bursts that follow each other use the same memory."""


class Trimmer:
    """Trims the heap a while after it was asked to, once for all that asked meanwhile, and in a thread.

    It is trimmed once more a longer while after: a library that frees memory in threads of its own may be late.
    However often it is asked, so by calls without a message, a trim comes once in so many seconds: it holds the
    allocator's lock for milliseconds where much is free.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._is_due = False
        self._again: asyncio.TimerHandle | None = None

    def ask(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(self._seconds, self._trim_first)

    def _trim_first(self) -> None:
        self._is_due = False
        self._trim()
        if self._again is not None:
            self._again.cancel()
        self._again = asyncio.get_running_loop().call_later(_AGAIN_AFTER * self._seconds, self._trim)

    def _trim(self) -> None:
        with suppress(RuntimeError):  # the loop's threads have ended
            asyncio.get_running_loop().run_in_executor(None, trim_heap)


class RestTrim:
    """Trims the heap once a process rests after work: a load of ten million messages leaves 160 MB that are free.

    Not sooner, as what is freed under load is used again a moment later, and a new page costs more than one in use.
    """

    def __init__(self) -> None:
        self._worked_seconds = 0.0  # since the last trim
        self._rests = 0

    async def run(self) -> None:
        """Watch over this process until cancelled."""
        loop = asyncio.get_running_loop()
        cpu_seconds, looked_at = 0.0, loop.time()  # so the work of recovery counts
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            cpu_before, looked_before = cpu_seconds, looked_at
            cpu_seconds, looked_at = time.process_time(), loop.time()
            if self.is_due(cpu_seconds - cpu_before, looked_at - looked_before):
                try:
                    await loop.run_in_executor(None, trim_heap)
                except RuntimeError:  # no thread can be begun now
                    self._worked_seconds = _WORK_SECONDS

    def is_due(self, cpu_seconds: float, seconds: float) -> bool:
        """Note the CPU time of the last so many seconds; return whether to trim now."""
        self._worked_seconds += cpu_seconds
        self._rests = self._rests + 1 if cpu_seconds <= _REST * seconds else 0
        if self._rests < _RESTS or self._worked_seconds < _WORK_SECONDS:
            return False
        self._worked_seconds = 0.0
        return True


def trim_heap() -> None:
    """Return once what is free was given back; nothing is done where the C library has no such call."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
