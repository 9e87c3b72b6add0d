"""SIGTERM, while consumers run: the first one stops them all, a second one ends the program."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

_stops: list[Callable[[], object]] = []


@contextmanager
def stopping_on_sigterm(stop: Callable[[], object]) -> Generator[None, None, None]:
    """Within the block, SIGTERM calls `stop`, which must not wait. A program that handles SIGTERM itself is left alone.

    Handlers belong to the main thread; elsewhere the block does nothing unless one in the main thread has begun.
    """
    if _may_install():
        signal.signal(signal.SIGTERM, _on_sigterm)
    _stops.append(stop)
    try:
        yield
    finally:
        _stops.remove(stop)
        is_ours = signal.getsignal(signal.SIGTERM) is _on_sigterm
        if not _stops and is_ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _may_install() -> bool:
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not _stops:
        os.kill(os.getpid(), signal.SIGTERM)
    for stop in tuple(_stops):
        stop()
