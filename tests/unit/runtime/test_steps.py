"""Steps of work in a thread whose caller goes away."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from broker.runtime import steps
from broker.runtime.steps import StepThread, begin_step, run_step
from tests.unit.storage.held_executor import HeldExecutor


@pytest.mark.slow
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


# -- a thread of its own ---------------------------------------------------------------------------------------


@pytest.fixture
def thread() -> Iterator[StepThread]:
    thread = StepThread("steps-of-a-test")
    yield thread
    thread.shutdown()


async def test_a_thread_that_cannot_have_its_place_runs_steps(monkeypatch: pytest.MonkeyPatch):
    def fail() -> bool:
        raise ValueError("whatever it is")

    monkeypatch.setattr(steps, "run_when_woken", fail)
    thread = StepThread("steps-of-a-test")
    try:
        assert await asyncio.wait_for(begin_step(thread, int), 10) == 0
    finally:
        thread.shutdown()


async def test_steps_run_in_their_order_in_one_thread(thread: StepThread):
    names: list[tuple[int, str]] = []

    def step(number: int) -> int:
        names.append((number, threading.current_thread().name))
        return number

    begun = [begin_step(thread, step, number) for number in range(50)]
    assert await asyncio.gather(*begun) == list(range(50))
    assert names == [(number, "steps-of-a-test") for number in range(50)]


async def test_who_waits_for_a_step_that_fails_is_told_and_the_next_one_runs(thread: StepThread):
    def fail() -> None:
        raise OSError(5, "no disk")

    with pytest.raises(OSError, match="no disk"):
        await begin_step(thread, fail)
    assert await begin_step(thread, int) == 0


async def test_a_step_runs_although_it_was_cancelled(thread: StepThread):
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    may_end = threading.Event()
    ran: list[int] = []
    first = begin_step(thread, may_end.wait)
    second = begin_step(thread, ran.append, 2)
    first.cancel()
    second.cancel()
    may_end.set()
    assert await begin_step(thread, len, ran) == 1
    assert told == []


def test_a_thread_outlives_the_loop_that_asked(thread: StepThread):
    may_end = threading.Event()

    async def ask() -> None:
        begin_step(thread, may_end.wait)

    async def ask_again() -> int:
        return await begin_step(thread, int)

    asyncio.run(ask())
    may_end.set()
    assert asyncio.run(ask_again()) == 0


def test_what_a_closed_loop_waited_for_holds_up_no_other_loop(thread: StepThread):
    """Its future cannot be settled any more: telling who waited raises."""
    may_end = threading.Event()
    told: list[dict[str, Any]] = []

    async def ask() -> None:
        begin_step(thread, may_end.wait).add_done_callback(lambda _: None)

    async def ask_again() -> int:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        step = begin_step(thread, int)
        may_end.set()
        return await asyncio.wait_for(step, 10)

    asyncio.run(ask())
    assert asyncio.run(ask_again()) == 0
    assert told == []


async def test_shutdown_waits_for_the_steps_that_were_begun():
    thread, may_end = StepThread("steps-of-a-test"), threading.Event()
    ran: list[int] = []
    begun: list[asyncio.Future[Any]] = [
        begin_step(thread, may_end.wait),
        begin_step(thread, ran.append, 2),
    ]
    may_end.set()
    thread.shutdown()
    assert ran == [2]
    assert all(step.done() for step in begun), "nobody is left to tell who waits"


async def test_who_waits_is_told_although_another_loop_was_told_before(thread: StepThread):
    async def ask() -> int:
        return await asyncio.wait_for(begin_step(thread, int, 7), 10)

    assert await begin_step(thread, int, 6) == 6
    assert await asyncio.to_thread(asyncio.run, ask()) == 7
    assert await asyncio.wait_for(begin_step(thread, int, 8), 10) == 8


async def test_shutdown_gives_back_its_descriptors_and_may_come_twice():
    before = len(os.listdir("/proc/self/fd"))
    thread = StepThread("steps-of-a-test")
    await begin_step(thread, int)
    thread.shutdown()
    thread.shutdown()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_step_that_comes_after_the_shutdown_is_refused():
    thread = StepThread("steps-of-a-test")
    thread.shutdown()
    with pytest.raises(RuntimeError, match="has ended"):
        thread.begin(int)


async def test_who_waits_is_told_of_an_error_that_no_future_takes(thread: StepThread):
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(begin_step(thread, next, iter(())), 10)


async def test_nothing_of_a_step_is_held_after_it(thread: StepThread):
    class Large:
        pass

    async def run(work: Callable[[Large], object]) -> None:
        large = Large()
        held.append(weakref.ref(large, lambda _: gone.set()))
        with contextlib.suppress(OSError):
            await begin_step(thread, work, large)

    def fail(_: Large) -> None:
        raise OSError(5, "no disk")

    gone = threading.Event()
    held: list[weakref.ref[Large]] = []
    gc.disable()
    try:
        for work in (id, fail):
            gone, held = threading.Event(), []
            await run(work)
            assert await asyncio.to_thread(gone.wait, 10)
    finally:
        gc.enable()


async def test_when_done_is_called_before_callbacks_and_in_nobodys_context(thread: StepThread):
    var: contextvars.ContextVar[str] = contextvars.ContextVar("var", default="nobody's")
    var.set("the caller's")
    seen: list[tuple[str, str]] = []
    step = thread.begin(int, 7)
    step.add_done_callback(lambda done: seen.append(("callback", var.get())))
    step.when_done = lambda done: seen.append((f"done with {done.result()}", var.get()))
    assert await step == 7
    assert seen == [("done with 7", "nobody's"), ("callback", "the caller's")]


async def test_when_done_is_not_called_of_a_step_that_was_cancelled(thread: StepThread):
    may_end = threading.Event()
    seen: list[Any] = []
    step = thread.begin(may_end.wait)
    step.when_done = seen.append
    step.cancel()
    may_end.set()
    await thread.begin(int)
    assert seen == []
