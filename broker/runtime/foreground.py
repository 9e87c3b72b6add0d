"""Calls that are being served: long work that nobody waits for that closely gives way to them.

A call takes several rounds of the event loop, and in each it would wait for a slice of such work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_PAUSE_SECONDS = 0.001
_PAUSES_MAX = 8
"""Pauses after one slice: where somebody is served at all times, the work goes on all the same, at about a tenth."""


class Foreground:
    """See the module's description."""

    def __init__(self, is_writing: Callable[[], bool]) -> None:
        """`is_writing`: whether a record is on its way to be durable, whoever waits for it."""
        self.calls = 0
        """Calls that are being served and end by themselves."""
        self._is_writing = is_writing

    async def give_way(self) -> None:
        """Wait until nobody is served, some milliseconds at most."""
        for _ in range(_PAUSES_MAX):
            if not (self.calls or self._is_writing()):
                return
            await asyncio.sleep(_PAUSE_SECONDS)
