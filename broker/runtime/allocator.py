"""Gives memory that was freed back to the system, which the allocator keeps otherwise."""

from __future__ import annotations

import asyncio
import ctypes
from contextlib import suppress

_AGAIN_AFTER = 4
"""Times the pause after which the heap is trimmed again."""


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


def trim_heap() -> None:
    """Return once what is free was given back; nothing is done where the C library has no such call."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
