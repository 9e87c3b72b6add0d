"""Steps of work in a thread whose caller goes away."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from broker.runtime.steps import run_step
from tests.unit.storage.held_executor import HeldExecutor


async def test_a_step_whose_caller_was_cancelled_comes_to_its_end_and_its_error_is_no_news() -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    executor = HeldExecutor(hold=True)
    ended = []

    def fail() -> None:
        ended.append(True)
        raise FileExistsError

    caller = asyncio.create_task(run_step(executor, fail))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done(), "what cleans up after it must not meet the step"
    executor.work()
    await asyncio.wait([caller])
    assert caller.cancelled()
    del caller
    gc.collect()
    assert ended and told == []
