"""An executor that tests hold back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class HeldExecutor(Executor):
    """A file thread that works when told; unless `hold` is set, at once."""

    def __init__(self, *, hold: bool = False) -> None:
        self.hold = hold
        self._calls: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.append((future, lambda: fn(*args, **kwargs)))
        if not self.hold:
            self.work()
        return future

    def work(self) -> None:
        """Make all calls that wait."""
        calls, self._calls = self._calls, []
        for future, call in calls:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)

    @property
    def waiting_count(self) -> int:
        return len(self._calls)
