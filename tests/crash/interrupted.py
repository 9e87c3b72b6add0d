"""A coroutine that gets an error in the place of what one of its awaits would give it, and names of its awaits."""

from __future__ import annotations

import asyncio
import enum
import errno
import gc
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from types import AsyncGeneratorType, FrameType
from typing import Any

import broker
from broker.errors import Corrupt, Unavailable
from broker.testing.mem_vfs import MemFile

_BROKER = str(Path(broker.__file__).parent)
_OF_TESTS = f"{_BROKER}/testing"


class Kind(enum.Flag):
    """Kinds of errors, to say which of them a task survives."""

    UNAVAILABLE = enum.auto()
    DISK = enum.auto()  # an OSError that may pass
    DAMAGE = enum.auto()
    BUG = enum.auto()
    CANCELLED = enum.auto()  # by nobody


READ = Kind.UNAVAILABLE | Kind.DAMAGE
"""Errors of reading what is stored: of the disk's own, readers make one of these."""
ANY_FILE = READ | Kind.DISK
BUGS = Kind.BUG | Kind.CANCELLED
ERRORS: dict[Kind, Callable[[], BaseException]] = {
    Kind.UNAVAILABLE: lambda: Unavailable("injected"),
    Kind.DISK: lambda: OSError(errno.EIO, "injected"),
    Kind.DAMAGE: lambda: Corrupt("injected"),
    Kind.BUG: lambda: KeyError("injected"),
    Kind.CANCELLED: lambda: asyncio.CancelledError("injected"),
}


class Interruption:
    """Of which await with which error, and which it was. Without an error the awaits are noted only.

    An await is named by the path to it: the functions that wait, from the task's own to the innermost of the broker and
    what that waits in, each with its line: `Reclaimer.run:175 > ... > Ledger._read:352`.
    """

    def __init__(self, error: BaseException | None = None, where: str = "") -> None:
        """Hit is the first await that `is_on` the path says so of; with "" the first of all."""
        self.error = error
        self.hit = ""
        self.seen: Counter[str] = Counter()
        self._where = where

    def note(self, path: str) -> bool:
        """Note an await; whether it is the one to hit."""
        self.seen[path] += 1
        if self.error is None or self.hit or not is_on(path, self._where):
            return False
        self.hit = path
        return True


def is_on(path: str, where: str) -> bool:
    """Return whether a part of a path, with its lines or without, is part of the path to an await."""
    return any(
        f" > {where} > " in f" > {whole} > " or not where for whole in (path, re.sub(r":\d+", "", path))
    )


class Interrupted(Coroutine[Any, Any, None]):
    """A coroutine with an interruption."""

    def __init__(self, inner: Coroutine[Any, Any, None], interruption: Interruption) -> None:
        self._inner = inner
        self._interruption = interruption
        self._waits: tuple[Any, str] | None = None

    def send(self, value: Any) -> Any:
        if self._interruption.hit:
            return self._inner.send(value)
        if self._waits is not None:
            future, path = self._waits
            self._waits = None
            # An await that has given a lock has not failed: whoever held it would never let it go.
            if not _is_a_lock(future) and self._interruption.note(path):
                assert self._interruption.error is not None
                return self._inner.throw(self._interruption.error)
        future = self._inner.send(value)
        self._waits = (future, _path_to(self._inner))
        return future

    def throw(self, *arguments: Any) -> Any:
        return self._inner.throw(*arguments)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, None]:
        return (yield from self._inner.__await__())  # a task steps it by `send` and does not come here


def _is_a_lock(awaited: Any) -> bool:
    is_done = isinstance(awaited, asyncio.Future) and awaited.done() and not awaited.cancelled()
    return is_done and awaited.exception() is None and isinstance(awaited.result(), MemFile)


def _path_to(waiting: Any) -> str:
    """Name the await in which a coroutine waits (`Interruption`)."""
    frames: list[FrameType] = []
    while waiting is not None:
        if type(waiting).__name__.startswith(
            "async_generator_"
        ):  # of a context manager; it says nothing itself
            waiting = next(x for x in gc.get_referents(waiting) if isinstance(x, AsyncGeneratorType))
        frame = next(
            (
                frame
                for name in ("cr_frame", "gi_frame", "ag_frame")
                if (frame := getattr(waiting, name, None)) is not None
            ),
            None,
        )
        if frame is None:
            break
        frames.append(frame)
        names = ("cr_await", "gi_yieldfrom", "ag_await")
        waiting = next((getattr(waiting, name) for name in names if hasattr(waiting, name)), None)
    own = [frame for frame in frames if _is_of_broker(frame)]
    names = [f"{frame.f_code.co_qualname}:{frame.f_lineno}" for frame in own]
    beyond = frames[frames.index(own[-1]) + 1 :] if own else frames  # of asyncio, or of a test
    return " > ".join([*names, *(frame.f_code.co_name for frame in beyond[:1])])


def _is_of_broker(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith(_BROKER) and not path.startswith(_OF_TESTS)
