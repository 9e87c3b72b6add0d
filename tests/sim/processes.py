"""Processes on one simulated loop: each may be frozen and woken, as by SIGSTOP, and killed at any step.

What a process starts belongs to it, by its context: tasks, timers, calls to its threads. While it is frozen its
callbacks are held, and run in their order once it is woken. One that is dead is never woken, until the run is over: then
all that is left is cancelled.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from typing import Any, TypeVar, TypeVarTuple, Unpack

from broker.testing.sim_loop import SimLoop

T = TypeVar("T")
_Ts = TypeVarTuple("_Ts")

_PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class Process:
    """See the module's description."""

    def __init__(self, loop: ProcessLoop) -> None:
        self.is_frozen = False
        self.is_dead = False
        self._loop = loop
        self._held: list[_Gate] = []
        self._context = contextvars.copy_context()
        self._context.run(_PROCESS.set, self)
        loop.processes.append(self)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin to do something in the process."""
        return self._loop.create_task(work, context=self._context.copy())

    def freeze(self) -> None:
        self.is_frozen = True

    def wake(self) -> None:
        self.is_frozen = False
        if not self.is_dead:
            self.let_go()

    def let_go(self) -> None:
        """Run what is held."""
        held, self._held = self._held, []
        for gate in held:
            gate.go_on()

    def kill(self) -> None:
        self.is_dead = True

    def holds(self, gate: _Gate) -> bool:
        """Return whether a callback must not run now."""
        is_held = (self.is_frozen or self.is_dead) and not self._loop.is_over
        if is_held:
            self._held.append(gate)
        return is_held


class _Gate:
    """A callback of a process."""

    __slots__ = ("_args", "_callback", "_context", "_loop", "_process", "handle")

    def __init__(
        self, loop: ProcessLoop, process: Process, callback: Callable[..., Any], context: Context | None
    ) -> None:
        self.handle: asyncio.Handle | None = None
        self._loop = loop
        self._process = process
        self._callback = callback
        self._context = context
        self._args: tuple[Any, ...] = ()

    def __call__(self, *args: Any) -> None:
        self._args = args
        if not self._process.holds(self):
            self._callback(*args)

    def go_on(self) -> None:
        self._loop.call_soon(self._run_late, context=self._context)

    def _run_late(self) -> None:
        if self.handle is None or not self.handle.cancelled():
            self._callback(*self._args)


class ProcessLoop(SimLoop):
    """A SimLoop of several processes."""

    def __init__(self, seed: int) -> None:
        self.is_over = False
        self.processes: list[Process] = []
        super().__init__(seed)

    def end(self) -> None:
        """The run is over: cancel what is left, also of processes that are frozen or dead."""
        self.is_over = True
        for process in self.processes:
            process.let_go()
        self.cancel_leftovers()

    def run_in_executor(
        self, executor: object, func: Callable[[Unpack[_Ts]], T], *args: *_Ts
    ) -> asyncio.Future[T]:
        """As `SimLoop.run_in_executor`; each process has a default executor of its own."""
        return super().run_in_executor(executor or ("default", _PROCESS.get()), func, *args)

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        gate = self._gate(callback, context)
        handle = super().call_soon(gate, *args, context=context)
        if isinstance(gate, _Gate):
            gate.handle = handle
        return handle

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        gate = self._gate(callback, context)
        handle = super().call_at(when, gate, *args, context=context)
        if isinstance(gate, _Gate):
            gate.handle = handle
        return handle

    def _gate(self, callback: Any, context: Context | None) -> Any:
        process = _PROCESS.get() if context is None else context.get(_PROCESS)
        if process is None or isinstance(callback, _Gate):
            return callback
        return _Gate(self, process, callback, context or contextvars.copy_context())
