"""Trying a file operation again that failed without having written anything."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from broker.runtime.vfs import WriteFailed

T = TypeVar("T")

FIRST_PAUSE_SECONDS = 0.01
LONGEST_PAUSE_SECONDS = 1.0
_LOG_EVERY = 30

# A name that is not as the broker left it: somebody else was at work in the folder, and waiting mends nothing.
_NAMES_CHANGED = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)

_log = logging.getLogger(__name__)


def is_passing(error: BaseException) -> bool:
    """Return whether an operation that failed so may be tried again: no bytes are in doubt, and it may be well later.

    Of such a kind are no descriptor, no memory and no space for opening, making, renaming and removing files.
    """
    return isinstance(error, OSError) and not isinstance(error, (WriteFailed, *_NAMES_CHANGED))


class Patience:
    """Repeats what writers of the broker do, until it succeeds or fails for good.

    Pauses grow from 10 ms to a second. There is no limit on their number while the broker serves, as what is to be
    written has no other place to go and producers are held up meanwhile; from `end` on there is, so that a stop ends.
    """

    def __init__(self, note: Callable[[], None] = lambda: None) -> None:
        self._note = note  # of each repetition
        self._ending = False
        self._failing_since: list[float] = []  # of each operation that is tried again, on the loop's clock

    def end(self) -> None:
        """From now on an operation fails once its pauses have reached the longest."""
        self._ending = True

    def failing_seconds(self) -> float:
        """For how long the operation that has been tried longest has failed; 0 if none is being tried again."""
        if not self._failing_since:
            return 0.0
        return asyncio.get_running_loop().time() - min(self._failing_since)

    async def wait_done(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await what `work` returns, and again with a new call of it; raises what is not passing."""
        try:
            return await work()
        except OSError as error:
            if not is_passing(error):
                raise
            first = error
        since = asyncio.get_running_loop().time()
        self._failing_since.append(since)
        try:
            return await self._repeat(work, first)
        finally:
            self._failing_since.remove(since)

    async def _repeat(self, work: Callable[[], Awaitable[T]], error: OSError) -> T:
        pause_seconds, failures = FIRST_PAUSE_SECONDS, 1
        while True:
            if (failures - 1) % _LOG_EVERY == 0:
                fields = {"error": error, "failures": failures}
                _log.error("A file operation failed and is retried", extra={"fields": fields})
            self._note()
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)
            try:
                return await work()
            except OSError as again:
                if not is_passing(again) or (self._ending and pause_seconds >= LONGEST_PAUSE_SECONDS):
                    raise
                error = again
            failures += 1
