"""Steps of work in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple, TypeVar

from broker.runtime.scheduling import run_when_woken

T = TypeVar("T")

_ONE = (1).to_bytes(8, sys.byteorder)
"""Bytes of each write to an eventfd."""


class StepFuture(asyncio.Future[T]):
    """The future of a step in a `StepThread`."""

    when_done: Callable[[StepFuture[T]], None] | None = None
    """Called as soon as the loop hears of the end: callbacks and whoever awaits have their turn a round later."""


class _Step(NamedTuple):
    """Work of a `StepThread`, and who waits for it."""

    work: Callable[..., Any]
    args: tuple[Any, ...]
    future: StepFuture[Any]


class _Outcome(NamedTuple):
    """The result of a step, or its error."""

    future: StepFuture[Any]
    settle: Callable[[Any], None]
    value: Any


class StepThread:
    """One thread for steps, in the order in which they were asked for.

    Both sides wake each other by a write to an eventfd. Python gives up its lock for a write, so on a core that both
    share the one that is woken runs at once. A `SimpleQueue` and `call_soon_threadsafe` wake while they hold the lock:
    the other side runs once this one has nothing left to do, and the loop handles what it is told a round later.

    A step whose future was cancelled runs all the same.
    """

    def __init__(self, name: str) -> None:
        self._steps: deque[_Step] = deque()
        self._outcomes: deque[_Outcome] = deque()
        self._asked = os.eventfd(0)
        self._told = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._loop: asyncio.AbstractEventLoop | None = None  # which waits for `_told`
        self._is_shut_down = False
        # Not waited for where a process ends without `shutdown`: that is a crash, as any other.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Callable[..., T], *args: Any) -> StepFuture[T]:
        """Begin a step; the future completes on the loop of the caller, one loop at a time. Raises RuntimeError after
        `shutdown`."""
        if self._is_shut_down:
            raise RuntimeError("the thread has ended, and begins no step")
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._leave_loop()
            # Whoever is the first to ask lends its context to nobody.
            contextvars.Context().run(loop.add_reader, self._told, self._settle_told)
            self._loop = loop
        future: StepFuture[T] = StepFuture(loop=loop)
        self._steps.append(_Step(work, args, future))
        os.write(self._asked, _ONE)
        return future

    def shutdown(self) -> None:
        """End the thread, after the steps that were begun."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        os.write(self._asked, _ONE)
        self._thread.join()
        self._leave_loop()
        os.close(self._asked)
        os.close(self._told)

    def _leave_loop(self) -> None:
        """Settle what this loop was not told yet, and tell it no more."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            self._settle_outcomes(loop)
            loop.remove_reader(self._told)

    def _settle_told(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._told, len(_ONE))
        assert self._loop is not None
        self._settle_outcomes(self._loop)

    def _settle_outcomes(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._outcomes:
            future, settle, value = self._outcomes.popleft()
            # It may be cancelled. Of a loop that is closed nobody waits.
            if not future.done() and future.get_loop() is loop:
                settle(value)
                if future.when_done is not None:
                    future.when_done(future)

    def _run(self) -> None:
        with contextlib.suppress(
            Exception
        ):  # a thread that ends here leaves every caller waiting, without an error
            run_when_woken()
        while self._steps or not self._is_shut_down:
            os.read(self._asked, len(_ONE))
            while self._steps:
                self._outcomes.append(_run_step(self._steps.popleft()))
                os.write(self._told, _ONE)


def _run_step(step: _Step) -> _Outcome:
    try:
        return _Outcome(step.future, step.future.set_result, step.work(*step.args))
    except StopIteration as error:  # which no future takes
        return _Outcome(step.future, step.future.set_exception, RuntimeError(f"a step raised {error!r}"))
    except BaseException as error:
        return _Outcome(step.future, step.future.set_exception, error)
    finally:
        del step  # an error holds this frame, and the future the error


def begin_step(thread: StepThread | Executor | None, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
    """Begin a step in a thread, or in what stands for one."""
    if isinstance(thread, StepThread):
        return thread.begin(work, *args)
    return asyncio.get_running_loop().run_in_executor(thread, work, *args)


class InThisThread(Executor):
    """Runs steps where they are asked for: for a job, whose loop has nothing else to do."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


async def run_step(executor: Executor | None, work: Callable[[], T]) -> T:
    """Run a step to its end, also if the caller is cancelled: what cleans up then must not meet the step."""
    future = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # nobody waits for it any more; else asyncio logs that it was never looked at
        raise
