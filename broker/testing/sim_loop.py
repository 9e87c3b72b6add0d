"""An event loop on virtual time: it never sleeps, and the same seed gives the same run.

When nothing is ready the loop jumps to the next timer. When there is no timer either, nothing could ever
happen again, and it raises `Deadlock`. Invariants:

  SIMLOOP-1  Time moves only between callbacks, in whole microseconds, never back.
  SIMLOOP-2  What one executor is given runs in that order, one at a time; None is an executor too.
  SIMLOOP-3  The order of callbacks depends on the seed and the program alone. Tasks hash by their number, so that
      sets of tasks (a TaskGroup cancels out of one) have the same order in every run. Sets of other objects
      do not; and sets of strings need a fixed PYTHONHASHSEED to agree between processes.

There are no sockets, no signals and no threads: functions for an executor run on the loop, at a time that
the seed chooses. A function whose turn has come runs even if its future is cancelled, as in a thread; one
that still waits for its turn is skipped.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, TypeVarTuple, Unpack

from broker.testing.sim_clock import START_MS, SimClock

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

_Coro: TypeAlias = Generator[Any, None, _T] | Coroutine[Any, Any, _T]

_SPIN_LIMIT = 1_000_000
_JUMP_LIMIT = 10_000_000
"""No scenario of ours needs a tenth of that: beyond it something is tried again for ever."""
_TRACE_LINES_MAX = 2000
_NOTE_LINES = 20
_CANCEL_ROUNDS = 10
_CANCEL_SECONDS = 3600.0  # of virtual time


class Deadlock(Exception):  # it reads as what it is: `raises(Deadlock)`
    """Nothing is ready, no timer is set, and the main task is not done."""


class Livelock(Exception):
    """Something polls: the loop turned over and over while time stood still, or time goes on and nothing ends."""


@dataclass(frozen=True)
class Latency:
    """Time that a call to an executor takes. One in `slow_every` takes up to `slow_ms`; 0 means none does."""

    min_ms: float = 0.05
    max_ms: float = 3.0
    slow_every: int = 200
    slow_ms: float = 500.0

    def draw_us(self, rng: random.Random) -> int:
        slow = self.slow_every > 0 and rng.randrange(self.slow_every) == 0
        low, high = (self.max_ms, self.slow_ms) if slow else (self.min_ms, self.max_ms)
        return round(rng.uniform(low, high) * 1000)


@dataclass(frozen=True, slots=True)
class _Call:
    """A function that waits for its executor."""

    run: Callable[[], None]
    future: asyncio.Future[Any]


class _SimTask(asyncio.Task[_T]):
    """A task that hashes by its number, and is named by it, so that runs can be compared."""

    def __init__(self, coro: _Coro[_T], loop: SimLoop, number: int, context: Context | None) -> None:
        self.number = number
        super().__init__(coro, loop=loop, name=f"task-{number}", context=context)

    def __hash__(self) -> int:
        return self.number

    def unasked_error(self) -> BaseException | None:
        """Return the exception that it ended with, if nobody has asked for it."""
        # Only asyncio's own mark tells; it has no public name, even for a subclass.
        return self.exception() if self._log_traceback else None


class _JumpingSelector:
    """Stands where a selector waits for sockets; jumps to the next timer instead."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        self._loop._pass_time(timeout)
        return []


class SimLoop(asyncio.BaseEventLoop):
    """The loop. `latency` may be replaced while it runs, to make a disk slow for a while.

    `unhandled` collects what asyncio would only have logged: failures of tasks that nobody awaited, of
    futures, and of callbacks.
    """

    # Fields of BaseEventLoop that its type stubs leave out.
    _scheduled: list[asyncio.TimerHandle]
    _clock_resolution: float

    def __init__(
        self,
        seed: int = 0,
        *,
        latency: Latency | None = None,
        spin_limit: int = _SPIN_LIMIT,
        jump_limit: int = _JUMP_LIMIT,
    ) -> None:
        super().__init__()
        self.seed = seed
        self.latency = latency or Latency()
        self.unhandled: list[BaseException] = []
        self.trace_lines: deque[str] = deque(maxlen=_TRACE_LINES_MAX)
        self._selector = _JumpingSelector(self)
        # A timer's float can lie half a microsecond above the tick it is rounded to; it must fire there.
        self._clock_resolution = 1e-6
        self._now_us = 0
        self._spin_limit = spin_limit
        self._spin_count = 0
        self._jump_limit = self._jumps_left = jump_limit
        self._task_count = 0
        self._tasks: weakref.WeakSet[_SimTask[Any]] = weakref.WeakSet()
        self._latency_rng = self.rng("latency")
        self._queues: dict[object, deque[_Call]] = {}
        self._digest = hashlib.blake2b(digest_size=16)
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._note_unhandled)

    def time(self) -> float:
        return self._now_us / 1e6

    def now_us(self) -> int:
        """Microseconds of virtual time since the loop was made."""
        return self._now_us

    def rng(self, name: str) -> random.Random:
        """A random source of its own for `name`, so that more draws by one part change nothing for others."""
        return random.Random(f"{self.seed}/{name}")

    def trace(self, line: str) -> None:
        """Note what happened; it counts for the digest, and the last lines are kept in `trace_lines`."""
        self.trace_lines.append(f"{self._now_us / 1e6:.6f} {line}")
        self._digest.update(f"{self._now_us} {line}\n".encode())

    def digest(self) -> str:
        """Equal for two runs only if their traces, jumps in time and calls to executors were the same."""
        return self._digest.hexdigest()

    def run_in_executor(
        self, executor: object, func: Callable[[Unpack[_Ts]], _T], *args: *_Ts
    ) -> asyncio.Future[_T]:
        """Call `func` on the loop at a time that the seed chooses, after what `executor` was given before."""
        future: asyncio.Future[_T] = self.create_future()
        queue = self._queues.setdefault(executor, deque())
        queue.append(_Call(lambda: _settle(future, func, args), future))
        if len(queue) == 1:
            self._start(queue)
        return future

    def cancel_leftovers(self) -> None:
        """Cancel every task that is not done, oldest first, and let them end; note what went wrong."""
        for _ in range(_CANCEL_ROUNDS):  # a task that ends may start another
            if not (pending := self._pending_tasks()):
                break
            for task in pending:
                task.cancel()
            self.run_until_complete(asyncio.wait(pending, timeout=_CANCEL_SECONDS))
        else:
            raise Deadlock(self._report("tasks refuse to be cancelled:"))
        self.run_until_complete(self.shutdown_asyncgens())
        for task in sorted(self._tasks, key=_number):
            if (error := task.unasked_error()) is not None:
                self.unhandled.append(error)

    # What BaseEventLoop calls.

    def _process_events(self, event_list: list[Any]) -> None:
        pass  # there are no sockets

    def _write_to_self(self) -> None:
        pass  # nothing blocks, so nothing needs to be woken

    def _pass_time(self, timeout: float | None) -> None:
        if timeout is None or (timeout > 0 and self._scheduled[0].when() == math.inf):
            raise Deadlock(self._report("nothing left to wait for:"))
        tick = round(self._scheduled[0].when() * 1e6) if timeout > 0 else self._now_us
        if tick > self._now_us:
            self._now_us = tick
            self._jumps_left -= 1
            if self._jumps_left < 0:
                self._jumps_left = self._jump_limit  # so that the leftovers can still be cancelled
                raise Livelock(self._report(f"time goes on for ever, to {self.time():.6f} s:"))
            self._spin_count = 0
            self._digest.update(b"%d\n" % tick)
            return
        self._spin_count += 1
        if self._spin_count > self._spin_limit:
            self._spin_count = 0  # so that the leftovers can still be cancelled
            raise Livelock(self._report(f"time stands still at {self.time():.6f} s:"))

    # Executors.

    def _start(self, queue: deque[_Call]) -> None:
        delay_us = self.latency.draw_us(self._latency_rng)
        self.call_at((self._now_us + delay_us) / 1e6, self._finish, queue)

    def _finish(self, queue: deque[_Call]) -> None:
        self._digest.update(b"%d call\n" % self._now_us)
        try:
            queue[0].run()
        finally:
            queue.popleft()
            while queue and queue[0].future.cancelled():
                queue.popleft()
            if queue:
                self._start(queue)

    # Tasks.

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: _Coro[_T], *, context: Context | None = None
    ) -> _SimTask[_T]:
        self._task_count += 1
        task = _SimTask(coro, self, self._task_count, context)
        self._tasks.add(task)
        return task

    def _pending_tasks(self) -> list[_SimTask[Any]]:
        return sorted((task for task in self._tasks if not task.done()), key=_number)

    def _report(self, headline: str) -> str:
        return "\n  ".join([headline, *map(_describe, self._pending_tasks())])

    def _note_unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.unhandled.append(error if error is not None else RuntimeError(context["message"]))


def run_sim(
    scenario: Callable[[SimLoop, SimClock], Coroutine[Any, Any, _T]],
    seed: int,
    *,
    start_ms: int = START_MS,
    latency: Latency | None = None,
) -> _T:
    """Run `scenario` on a loop and clock of its own and return its result.

    What still runs when it returns is cancelled. A task that failed with nobody looking fails the run. Every
    failure carries the seed and the last lines of the trace as notes.
    """
    loop = SimLoop(seed, latency=latency)
    try:
        try:
            result = loop.run_until_complete(scenario(loop, SimClock(loop, start_ms)))
        finally:
            loop.cancel_leftovers()
    except BaseException as error:
        _explain(error, loop)
        for other in loop.unhandled:
            error.add_note(f"also, and nobody handled it: {other!r}")
        raise
    finally:
        loop.close()
    if loop.unhandled:
        failure = BaseExceptionGroup("failures that nobody handled", loop.unhandled)
        _explain(failure, loop)
        raise failure
    return result


def _explain(error: BaseException, loop: SimLoop) -> None:
    last_lines = list(loop.trace_lines)[-_NOTE_LINES:]
    error.add_note("\n".join([f"seed {loop.seed}; the end of the trace:", *last_lines]))


def _settle(future: asyncio.Future[_T], func: Callable[[Unpack[_Ts]], _T], args: tuple[*_Ts]) -> None:
    try:
        result = func(*args)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a thread hands over whatever its function raised
        if not future.done():
            future.set_exception(error)
    else:
        if not future.done():
            future.set_result(result)


def _number(task: _SimTask[Any]) -> int:
    return task.number


def _describe(task: _SimTask[Any]) -> str:
    """The task's name and the chain of what it awaits, outermost first."""
    places = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            places.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return f"{task.get_name()}: {' > '.join(places)}"
