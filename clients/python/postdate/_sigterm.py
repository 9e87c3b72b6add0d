"""SIGTERM, while consumers are open: the first one stops them all, a second one ends the program.

Once those are left that were open when the first one came, the program ends by it, as it would have without them. Only
`Subscription.run` returns instead.

Handlers belong to the main thread, and a program that handles SIGTERM itself is left alone.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

_stops: dict[object, Callable[[], object]] = {}
_returning: list[object] = []  # one for each `run` under way
_is_ending = False  # SIGTERM came, and is sent again when the last consumer is left


@contextmanager
def returning_on_sigterm() -> Generator[None, None, None]:
    """Around a `run`, which returns: SIGTERM stops the consumers, and the program goes on from there."""
    take_sigterm()
    mark = object()
    _returning.append(mark)
    try:
        yield
    finally:
        _returning.remove(mark)
        leave_sigterm()


def add_consumer(consumer: object, stop: Callable[[], object]) -> None:
    """From here on SIGTERM calls `stop`, which must not wait, if this is the main thread or one there began before."""
    if _is_ending:
        stop()  # one more would put off the end, or take what it cannot do
        return
    _stops[consumer] = stop
    take_sigterm()


def remove_consumer(consumer: object) -> None:
    """The consumer holds nothing any more: after the last one, the program ends if SIGTERM came."""
    if _stops.pop(consumer, None) is not None:
        _end_if_due()
        leave_sigterm()


def take_sigterm() -> None:
    """Handle SIGTERM, in the main thread and if nobody else does."""
    if _is_main() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and not _is_ending:
        signal.signal(signal.SIGTERM, _on_sigterm)


def leave_sigterm() -> None:
    """Handle SIGTERM no more, unless there are consumers."""
    if _is_main() and not _stops and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    global _is_ending  # noqa: PLW0603
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _is_ending = not _returning
    for consumer, stop in tuple(_stops.items()):
        try:
            stop()
        except RuntimeError:  # its loop was closed around it
            _stops.pop(consumer, None)
    _end_if_due()


def _end_if_due() -> None:
    global _is_ending  # noqa: PLW0603
    if _is_ending and not _stops:
        _is_ending = False
        os.kill(os.getpid(), signal.SIGTERM)


def _forget() -> None:
    """In a child: what was open is the parent's, and SIGTERM ends the child as it would have."""
    global _is_ending  # noqa: PLW0603
    _is_ending = False
    _stops.clear()
    _returning.clear()


os.register_at_fork(after_in_child=_forget)
