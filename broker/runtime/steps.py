"""Steps of work in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


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
