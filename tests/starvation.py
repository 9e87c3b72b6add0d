"""Time that threads were ready to run and had no core: by so much a bound in real time may be missed on a busy machine.

On a free machine it is nothing, so what is added to a bound loosens none there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path


def starved_seconds(process: int | str = "self") -> float:
    """Return how long the threads of a process have waited for a core, those that have ended left out."""
    waited_ns = 0
    for path in Path(f"/proc/{process}/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that has ended
            waited_ns += int(path.read_text().split()[1])
    return waited_ns / 1e9


class Starvation:
    """Time that this process and another one have waited for a core since it was made."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._begins = {name: starved_seconds(name) for name in self._names}
        self._seconds = dict.fromkeys(self._names, 0.0)

    @property
    def seconds(self) -> float:
        """Return the time, as far as it was looked at before the other one ended."""
        self._look()
        return sum(self._seconds.values())

    @property
    def _names(self) -> tuple[int | str, int | str]:
        return "self", self._process

    def _look(self) -> None:
        for name in self._names:  # of threads that have ended nothing is left to read
            waited = starved_seconds(name) - self._begins[name]
            self._seconds[name] = max(self._seconds[name], waited)

    async def go_on(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(0.05)


@asynccontextmanager
async def starvation_of(process: int) -> AsyncIterator[Starvation]:
    """Watch a process until it has ended."""
    starvation = Starvation(process)
    looking = asyncio.create_task(starvation.go_on())
    try:
        yield starvation
    finally:
        looking.cancel()
