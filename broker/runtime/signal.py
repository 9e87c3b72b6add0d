"""A flag that one task waits for. An `asyncio.Event` costs 760 bytes, which a broker with many idle parts has often."""

from __future__ import annotations

import asyncio


class Signal:
    """Set by anybody, waited for by one task at a time."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        self._is_set = False

    async def wait(self) -> None:
        """Return once it is set, at once if it is."""
        if self._is_set:
            return
        assert self._waiter is None, "one task waits for a signal"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
