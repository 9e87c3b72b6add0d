"""Tasks that live as long as the broker, and fairness between them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from broker.errors import Unavailable
from broker.runtime.clock import Clock
from broker.runtime.foreground import Foreground

# Not observe.logs: that package stands on this one. Its formatters find the fields in `extra`.
_log = logging.getLogger(__name__)


class Supervisor:
    """Owns named tasks, so that none is collected while it runs and somebody sees every failure.

    Its owner may cancel a task. If it fails, the state it kept is in doubt, and a broker that goes on with half of
    its tasks would accept what it cannot deliver: the failure is logged, and `on_failure` is told, once, and should
    stop the broker. So it is if a task that lasts returns, or one ends as cancelled that nobody has cancelled. The
    other tasks run on until `stop`.
    """

    def __init__(self, on_failure: Callable[[str, BaseException], None]) -> None:
        self._on_failure = on_failure
        self._tasks: dict[asyncio.Task[None], str] = {}  # in order of their start
        self._lasting: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.failure: BaseException | None = None
        """The first failure."""

    def spawn(self, name: str, coro: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Run a coroutine under a name; it may end by itself. Once the supervisor stops, it is not run: Unavailable."""
        if self._stopping:
            coro.close()
            raise Unavailable("The broker is stopping", reason="DRAINING")
        task = asyncio.get_running_loop().create_task(coro, name=name)
        self._tasks[task] = name
        task.add_done_callback(self._on_done)
        return task

    def spawn_lasting(self, name: str, coro: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """As `spawn`, for what ends only by being cancelled: if it returns, that is a failure too."""
        task = self.spawn(name, coro)
        self._lasting.add(task)
        return task

    def names(self) -> tuple[str, ...]:
        """Of the tasks that run, in order of their start."""
        return tuple(self._tasks.values())

    async def stop(self) -> None:
        """Cancel all tasks, the newest first, and return once all have ended. A failure now is only logged.

        A task that does not end keeps this waiting: callers set the limit.
        """
        self._stopping = True
        tasks = [task for task in reversed(self._tasks) if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        name = self._tasks.pop(task)
        is_lasting = task in self._lasting
        self._lasting.discard(task)
        error = _failure_of(name, task, is_lasting=is_lasting)
        if error is None:
            return
        _log.critical("A task failed", extra={"fields": {"task": name, "error": error}}, exc_info=error)
        if self.failure is None:
            self.failure = error
            if not self._stopping:
                self._on_failure(name, error)


def _failure_of(name: str, task: asyncio.Task[None], *, is_lasting: bool) -> BaseException | None:
    if task.cancelled():
        # What it waited for was cancelled, and not the task: nobody meant it to end.
        return None if task.cancelling() else RuntimeError(f"The task {name!r} ended as cancelled by nobody")
    if (error := task.exception()) is not None:
        return error
    return RuntimeError(f"The task {name!r} ended by itself") if is_lasting else None


Spawn = Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Start of a named task that somebody sees the failure of, as `Supervisor.spawn`."""


class OneAtATime:
    """Work in the background of which there is never more than one task."""

    def __init__(self, spawn: Spawn, name: str) -> None:
        self._spawn = spawn
        self._name = name
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin a task, unless one is running."""
        if not self.is_running:
            self._task = self._spawn(self._name, work())

    async def wait(self) -> None:
        """Return once none is running; its failure is somebody else's affair."""
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class YieldBudget:
    """Keeps a long loop from starving the others: `await budget.spent()` once a step."""

    __slots__ = ("_budget_ns", "_clock", "_foreground", "_since_ns", "_steps", "_steps_max")

    def __init__(
        self,
        clock: Clock,
        budget_ms: float = 2.0,
        *,
        steps_max: int = 256,
        foreground: Foreground | None = None,
    ) -> None:
        """`foreground`: who is served goes first, and not only in turn."""
        self._clock = clock
        self._foreground = foreground
        self._budget_ns = int(budget_ms * 1_000_000)
        self._since_ns = clock.monotonic_ns()
        # On virtual time a step takes no time, and a loop that never yields would be one long callback.
        self._steps_max = steps_max
        self._steps = 0

    async def spent(self) -> None:
        """Let others run if the budget is used up. Without that, this does not suspend."""
        self._steps += 1
        spent_ns = self._clock.monotonic_ns() - self._since_ns
        if self._steps < self._steps_max and spent_ns < self._budget_ns:
            return
        await asyncio.sleep(0)
        if self._foreground is not None:
            await self._foreground.give_way(spent_ns / 1e9)
        self._steps = 0
        self._since_ns = self._clock.monotonic_ns()


def forget_result(done: asyncio.Future[None]) -> asyncio.Future[None]:
    """Nobody may be waiting; a failed journal reports itself."""
    done.add_done_callback(lambda future: future.cancelled() or future.exception())
    return done
