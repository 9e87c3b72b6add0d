"""Gives memory that was freed back to the system, which the allocator keeps otherwise."""

from __future__ import annotations

import asyncio
import ctypes
import time
from contextlib import suppress

_AGAIN_AFTER = 4
"""Times the pause after which the heap is trimmed again."""
_LOOK_SECONDS = 5.0
_BUSY = 0.25
"""Of a core: who took no more frees little."""
_REST = 1 / 3
"""Of what a busy process took."""
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
    """Trims the heap once a busy process rests: a load of ten million messages leaves 160 MB that are free.

    Not sooner, as what is freed under load is used again a moment later, and a new page costs more than one in use.
    """

    def __init__(self) -> None:
        self._busiest = 0.0  # at a look since the last trim
        self._rests = 0

    async def run(self) -> None:
        """Watch over this process until cancelled."""
        before = time.process_time()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            now = time.process_time()
            if self.is_due((now - before) / _LOOK_SECONDS):
                await asyncio.get_running_loop().run_in_executor(None, trim_heap)
            before = now

    def is_due(self, share: float) -> bool:
        """Note how much of a core was taken since the last look; return whether to trim now."""
        self._busiest = max(self._busiest, share)
        rests = self._busiest >= _BUSY and share <= self._busiest * _REST
        self._rests = self._rests + 1 if rests else 0
        if self._rests < _RESTS:
            return False
        self._busiest, self._rests = share, 0
        return True


def trim_heap() -> None:
    """Return once what is free was given back; nothing is done where the C library has no such call."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
