"""Calls that are being served: long work that nobody waits for that closely gives way to them.

A call takes several rounds of the event loop, and in each it would wait for a slice of such work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_PAUSE_SECONDS = 0.001
_PAUSES_MAX = 8
"""Pauses after one slice: where somebody is served at all times, the work goes on all the same, at about a tenth."""
_RECENTLY_SECONDS = 0.05
"""Time for which whoever was served is expected again: meanwhile the work takes half of the time, so that most calls
find the loop free."""


class Foreground:
    """See the module's description."""

    def __init__(self, is_writing: Callable[[], bool]) -> None:
        """`is_writing`: whether a record is on its way to be durable, whoever waits for it."""
        self.calls = 0
        """Calls that are being served and end by themselves."""
        self._is_writing = is_writing
        self._expected_until = 0.0  # on the loop's clock: somebody

    async def give_way(self, worked_seconds: float) -> None:
        """Wait until nobody is served, some milliseconds at most; if somebody was lately, rest as long as it worked."""
        if await self._pause() or asyncio.get_running_loop().time() >= self._expected_until:
            return
        await asyncio.sleep(min(max(worked_seconds, _PAUSE_SECONDS), _PAUSE_SECONDS * _PAUSES_MAX))
        await self._pause()  # for who came while it rested

    async def _pause(self) -> bool:
        """Wait while somebody is served; returns whether somebody was."""
        pauses = 0
        while pauses < _PAUSES_MAX and (self.calls or self._is_writing()):
            self._expected_until = asyncio.get_running_loop().time() + _RECENTLY_SECONDS
            pauses += 1
            await asyncio.sleep(_PAUSE_SECONDS)
        return pauses > 0
