"""Steps of work in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


async def run_step(executor: Executor | None, work: Callable[[], T]) -> T:
    """Run a step to its end, also if the caller is cancelled: what cleans up then must not meet the step."""
    future = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise
