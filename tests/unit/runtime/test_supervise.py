"""Supervision: no failure goes unseen, stop is orderly; and long loops let others run."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from broker.errors import Unavailable
from broker.runtime.supervise import Supervisor, YieldBudget
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim


class Failures:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def __call__(self, name: str, error: BaseException) -> None:
        self.seen.append((name, str(error)))


async def forever() -> None:
    await asyncio.Event().wait()


async def fail(message: str) -> None:
    await asyncio.sleep(1)
    raise ValueError(message)


def test_a_failure_is_logged_with_its_name_and_stops_the_broker_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> tuple[Failures, tuple[str, ...], str]:
        failures = Failures()
        supervisor = Supervisor(failures)
        supervisor.spawn("index pump", fail("first"))
        supervisor.spawn("dispatcher", fail("second"))
        supervisor.spawn("probe", forever())
        await asyncio.sleep(2)
        running = supervisor.names()
        await supervisor.stop()
        return failures, running, str(supervisor.failure)

    with caplog.at_level(logging.CRITICAL):
        failures, running, first = run_sim(scenario, 1)
    assert len(failures.seen) == 1
    assert failures.seen[0] in {("index pump", "first"), ("dispatcher", "second")}
    assert first == failures.seen[0][1]
    assert running == ("probe",)
    assert sorted(record.__dict__["fields"]["task"] for record in caplog.records) == [
        "dispatcher",
        "index pump",
    ]
    assert all(record.exc_info for record in caplog.records)


def test_a_task_may_end_and_its_owner_may_cancel_it() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> Failures:
        failures = Failures()
        supervisor = Supervisor(failures)
        supervisor.spawn("short", asyncio.sleep(1))
        cancelled = supervisor.spawn("cancelled", forever())
        cancelled.cancel()
        await asyncio.sleep(2)
        assert supervisor.names() == ()
        await supervisor.stop()
        return failures

    assert run_sim(scenario, 1).seen == []


def test_stop_cancels_the_newest_first_and_waits_for_all() -> None:
    ended: list[str] = []

    async def slow_to_end(name: str, seconds: float) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(f"{name} cancelled")
            await asyncio.sleep(seconds)
            ended.append(f"{name} ended")

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        supervisor = Supervisor(Failures())
        supervisor.spawn("a", slow_to_end("a", 1))
        supervisor.spawn("b", slow_to_end("b", 2))
        await asyncio.sleep(1)
        await supervisor.stop()
        assert supervisor.names() == ()
        await supervisor.stop()  # harmless

    run_sim(scenario, 1)
    assert ended == ["b cancelled", "a cancelled", "a ended", "b ended"]


def test_a_failure_while_stopping_is_logged_and_calls_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def fails_late() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("late")

    async def scenario(loop: SimLoop, clock: SimClock) -> tuple[Failures, str]:
        failures = Failures()
        supervisor = Supervisor(failures)
        supervisor.spawn("late", fails_late())
        await asyncio.sleep(1)
        await supervisor.stop()
        return failures, str(supervisor.failure)

    with caplog.at_level(logging.CRITICAL):
        failures, first = run_sim(scenario, 1)
    assert failures.seen == []
    assert first == "late"
    assert len(caplog.records) == 1


def test_nothing_starts_once_it_stops() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        supervisor = Supervisor(Failures())
        await supervisor.stop()
        with pytest.raises(Unavailable) as caught:
            supervisor.spawn("late", forever())
        assert caught.value.reason == "DRAINING"

    run_sim(scenario, 1)


def test_a_task_may_stop_its_own_supervisor() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> tuple[str, ...]:
        supervisor = Supervisor(Failures())
        supervisor.spawn("other", forever())
        task = supervisor.spawn("stopper", supervisor.stop())
        await task
        await asyncio.sleep(0)
        return supervisor.names()

    assert run_sim(scenario, 1) == ()


@pytest.mark.slow
def test_a_task_that_nobody_else_holds_is_kept() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> tuple[str, ...]:
        supervisor = Supervisor(Failures())
        supervisor.spawn("held", forever())
        await asyncio.sleep(1)
        gc.collect()
        await asyncio.sleep(1)
        running = supervisor.names()
        await supervisor.stop()
        return running

    assert run_sim(scenario, 1) == ("held",)


class HandClock:
    """Monotonic time that a test moves by hand."""

    def __init__(self) -> None:
        self.ns = 0

    def now_ms(self) -> int:
        return 0

    def monotonic_ns(self) -> int:
        return self.ns


def suspensions(budget: YieldBudget) -> int:
    """Count the turns that one call of `spent` gives the loop."""
    turns = 0
    step = budget.spent().__await__()
    for _ in step:
        turns += 1
    return turns


def test_a_loop_yields_once_its_time_is_used_up_and_not_before() -> None:
    clock = HandClock()
    budget = YieldBudget(clock, 2.0)
    clock.ns = 1_999_999
    assert suspensions(budget) == 0
    clock.ns = 2_000_000
    assert suspensions(budget) == 1
    assert suspensions(budget) == 0
    clock.ns = 4_000_000
    assert suspensions(budget) == 1


def test_a_loop_on_virtual_time_yields_too() -> None:
    budget = YieldBudget(HandClock(), steps_max=10)
    assert [suspensions(budget) for _ in range(20)] == [*[0] * 9, 1] * 2


def test_a_lasting_task_that_returns_and_one_that_nobody_cancelled_are_failures() -> None:
    async def end() -> None:
        await asyncio.sleep(1)

    async def wait_for_what_is_cancelled() -> None:
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        gone.cancel()
        await gone

    async def scenario(loop: SimLoop, clock: SimClock) -> list[list[tuple[str, str]]]:
        seen = []
        for work in (end, wait_for_what_is_cancelled, forever):
            failures = Failures()
            supervisor = Supervisor(failures)
            supervisor.spawn_lasting("probe", work())
            await asyncio.sleep(2)
            await supervisor.stop()
            seen.append(failures.seen)
        return seen

    assert run_sim(scenario, 1) == [
        [("probe", "The task 'probe' ended by itself")],
        [("probe", "The task 'probe' ended as cancelled by nobody")],
        [],
    ]
