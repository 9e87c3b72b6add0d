"""Work on many items, several at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


async def for_all(items: Iterator[T], work: Callable[[T], Awaitable[None]], at_once: int) -> None:
    """Await `work` of every item, `at_once` of them at a time; items are taken one by one, in order.

    The first failure cancels what is under way and is raised.
    """

    async def work_on() -> None:
        for item in items:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work_on())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
