"""Steps of work in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class _Step(NamedTuple):
    """Work of a `StepThread`, and who waits for it."""

    work: Callable[..., Any]
    args: tuple[Any, ...]
    future: asyncio.Future[Any]


class StepThread:
    """One thread for steps, in the order in which they were asked for.

    A hop to it and back costs half of one to an executor, which makes two futures and a chain between them. A step
    whose future was cancelled runs all the same.
    """

    def __init__(self, name: str) -> None:
        self._steps: SimpleQueue[_Step | None] = SimpleQueue()
        self._is_shut_down = False
        # Not waited for where a process ends without `shutdown`: that is a crash, as any other.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Begin a step; the future completes on the loop of the caller. Raises RuntimeError after `shutdown`."""
        if self._is_shut_down:
            raise RuntimeError("the thread has ended, and begins no step")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._steps.put(_Step(work, args, future))
        return future

    def shutdown(self) -> None:
        """End the thread, after the steps that were begun."""
        self._is_shut_down = True
        self._steps.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            self._run_one(step)
            del step  # nothing of it is held until the next one comes

    @staticmethod
    def _run_one(step: _Step) -> None:
        try:
            result = step.work(*step.args)
        except StopIteration as error:  # which no future takes
            _tell(step.future, step.future.set_exception, RuntimeError(f"a step raised {error!r}"))
        except BaseException as error:
            _tell(step.future, step.future.set_exception, error)
        else:
            _tell(step.future, step.future.set_result, result)
        finally:
            del step  # an error holds this frame, and the future the error


def _tell(future: asyncio.Future[Any], settle: Callable[[Any], None], outcome: Any) -> None:
    def settle_once() -> None:
        if not future.done():  # it may be cancelled
            settle(outcome)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
        future.get_loop().call_soon_threadsafe(settle_once)


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
