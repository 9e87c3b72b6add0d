"""Gives memory that was freed back to the system, which the allocator keeps otherwise."""

from __future__ import annotations

import asyncio
import ctypes
from contextlib import suppress


class Trimmer:
    """Trims the heap a while after it was asked to, once for all that asked meanwhile, and in a thread."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._is_due = False

    def ask(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(self._seconds, self._trim)

    def _trim(self) -> None:
        self._is_due = False
        with suppress(RuntimeError):  # the loop's threads have ended
            asyncio.get_running_loop().run_in_executor(None, trim_heap)


def trim_heap() -> None:
    """Return once what is free was given back; nothing is done where the C library has no such call."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
