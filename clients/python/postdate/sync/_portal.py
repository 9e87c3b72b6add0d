"""The event loop behind `postdate.sync`: one thread for the whole process, started when it is first needed.

Any thread may call, several at a time. A caller that is interrupted (Ctrl-C) cancels what it asked for and waits until
that has ended; interrupted again, it goes at once. The thread does not keep the program alive.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import inspect
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

from postdate._runner import Handler
from postdate._sigterm import leave_sigterm, returning_on_sigterm, take_sigterm
from postdate.message import Message

_T = TypeVar("_T")
_P = ParamSpec("_P")
_END = object()
_STOP_S = 5.0
_FORKED = "this client was made before the process forked: make one in the child"


class Portal:
    """Runs coroutines on a loop in a thread of its own, for callers that block."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._is_ending = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._turn, name="postdate-sync", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine; return what it returns, or raise what it raises."""
        try:
            self._check_caller()
        except BaseException:
            work.close()
            raise
        outcome: Future[_T] = Future()
        tasks: list[asyncio.Task[_T]] = []

        def begin() -> None:
            # The context of the calling thread came along, and with it the current span, say.
            tasks.append(task := self._loop.create_task(work))
            task.add_done_callback(partial(self._pass_on, outcome))

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        self._loop.call_soon_threadsafe(begin)
        try:
            return outcome.result()
        except BaseException:
            if not outcome.done():  # it was the caller who was interrupted
                self._loop.call_soon_threadsafe(cancel)
                try:
                    wait([outcome])
                finally:
                    if not outcome.done():
                        self._loop.call_soon_threadsafe(cancel)
            raise

    def enter(self, work: Coroutine[Any, Any, object]) -> None:
        """Begin a block of this thread: of consumers, in the main thread, SIGTERM is handled from before they open."""
        take_sigterm()
        try:
            self.run(work)
        finally:
            leave_sigterm()

    def leave(self, work: Coroutine[Any, Any, object]) -> None:
        try:
            self.run(work)
        finally:
            leave_sigterm()

    def call(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a plain function on the loop."""

        async def work() -> _T:
            return function(*args, **kwargs)

        return self.run(work())

    def next(self, messages: AsyncIterator[_T]) -> _T:
        """The next of an async iterator, or `StopIteration`."""
        found = self.run(_next(messages))
        if found is _END:
            raise StopIteration
        return found  # type: ignore[return-value]  # not _END

    def iterate(self, messages: AsyncIterator[_T]) -> Iterator[_T]:
        while True:
            try:
                yield self.next(messages)
            except StopIteration:
                return

    @contextmanager
    def entered(self, block: AbstractAsyncContextManager[_T]) -> Generator[_T, None, None]:
        """An async context manager around a block of this thread."""
        value = self.run(_enter(block))
        try:
            yield value
        except BaseException as error:
            if not self.run(_exit(block, error)):
                raise
        else:
            self.run(_exit(block, None))

    def run_handlers(
        self,
        run: Callable[[Handler], Coroutine[Any, Any, None]],
        handler: Callable[[Message], object],
        concurrency: int,
    ) -> None:
        """`Subscription.run` with a handler that blocks, in as many threads."""
        threads = ThreadPoolExecutor(max(1, concurrency), thread_name_prefix="postdate-handler")

        async def handle(message: Message) -> None:
            call = partial(_without_exit, handler, message)
            await self._loop.run_in_executor(threads, contextvars.copy_context().run, call)

        try:
            with returning_on_sigterm():
                self.run(run(handle))
        finally:
            threads.shutdown(wait=False)  # what outlasted the grace cannot be cancelled in a thread

    def _pass_on(self, outcome: Future[_T], task: asyncio.Task[_T]) -> None:
        if task.cancelled():
            # At the program's end only daemon threads still wait, and they end without a word.
            if not self._is_ending:
                outcome.set_exception(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(task.result())

    def check_process(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError(_FORKED)

    def _check_caller(self) -> None:
        self.check_process()
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "postdate.sync was called on its own event loop, from a `progress` function for example; "
                "that would wait for itself for ever"
            )
        if not self._thread.is_alive():
            raise RuntimeError("the program is ending, and postdate.sync has stopped")

    def _turn(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(_cancel_all())
            self._loop.close()

    def _stop(self) -> None:
        if self._pid == os.getpid():
            self._is_ending = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_STOP_S)


_lock = threading.Lock()
_portals: list[Portal] = []


def portal() -> Portal:
    """The one of this process."""
    with _lock:
        if not _portals:
            _portals.append(Portal())
        return _portals[0]


def _forget() -> None:
    """In a child: threads do not survive a fork, and one of them may have held the lock."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _portals.clear()


os.register_at_fork(after_in_child=_forget)


def _without_exit(handler: Callable[[Message], object], message: Message) -> None:
    """In a thread, `sys.exit` would end the loop and nothing else; what an `async def` returns would never run."""
    try:
        outcome = handler(message)
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"a handler raised {error!r}; `Subscription.stop` ends `run`") from error
    if inspect.iscoroutine(outcome):
        outcome.close()
        raise TypeError("the handler is an async function, and was not run: postdate.sync takes plain ones")


async def _next(messages: AsyncIterator[_T]) -> _T | object:
    try:
        return await anext(messages)
    except StopAsyncIteration:
        return _END


async def _enter(block: AbstractAsyncContextManager[_T]) -> _T:
    return await block.__aenter__()


async def _exit(block: AbstractAsyncContextManager[Any], error: BaseException | None) -> bool | None:
    if error is None:
        return await block.__aexit__(None, None, None)
    return await block.__aexit__(type(error), error, error.__traceback__)


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_STOP_S / 2)
