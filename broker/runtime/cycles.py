"""Garbage in cycles: Python's collector, kept from walking through all that a broker holds.

It runs in whichever thread allocates, and everybody else waits. A full collection walks every object there is: 190 ms
with 2,000 topics, several times while they come, to find some dozens of objects. And a young one comes with every 700
new objects, as Python has it, many times for each write of a busy journal, whose objects need no collector to go.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any

_LOOK_SECONDS = 30.0
_GROWN_OBJECTS = 200_000
_WHOLE_GENERATION = 2
_THRESHOLDS = 10_000, 1, 2
"""New objects between young collections, and how many of each kind between those of the next one: so full ones come
about as often as Python has them, and the longest of the others walks some 30,000 objects, in a millisecond or two."""


def is_whole_due(frozen: int, kept: int) -> bool:
    """Return whether all objects are to be walked, by how many are left out and how many there were after the last
    time: what became garbage since cannot be more than the difference."""
    return frozen >= 2 * kept + _GROWN_OBJECTS


class CycleCollection:
    """Collections at long intervals, of which the full ones look only at what came since the last one.

    What one has walked is left out of the next ones. Among that may be what becomes garbage later, as a deleted topic
    does; so once its number has doubled, all of it is walked after all.
    """

    def __init__(self) -> None:
        self._kept = 0  # objects left out after the last time that all were walked
        self._has_grown = False

    async def run(self) -> None:
        """Watch over the collector of this process until cancelled."""
        self._kept = gc.get_freeze_count()
        thresholds = gc.get_threshold()
        gc.set_threshold(*_THRESHOLDS)
        gc.callbacks.append(self._collected)
        try:
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                self.look()
        finally:
            gc.callbacks.remove(self._collected)
            gc.set_threshold(*thresholds)
            gc.unfreeze()

    def look(self) -> None:
        """Walk all objects if that is due."""
        if not self._has_grown:  # to count them takes milliseconds
            return
        self._has_grown = False
        if is_whole_due(gc.get_freeze_count(), self._kept):
            gc.unfreeze()
            gc.collect()
            self._kept = gc.get_freeze_count()
            self._has_grown = False

    def _collected(self, phase: str, info: dict[str, Any]) -> None:
        """Called by the collector, in any thread."""
        if phase == "stop" and info["generation"] == _WHOLE_GENERATION:
            gc.freeze()
            self._has_grown = True
