"""Long work gives way to whoever is served, and goes on all the same."""

from __future__ import annotations

import asyncio

import pytest

from broker.runtime.foreground import Foreground
from broker.runtime.supervise import YieldBudget
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim


def run(foreground: Foreground, then_s: float = 1.0, rest_s: float = 1.0) -> tuple[float, float]:
    """Return the virtual seconds of a step beside a call that ends after a while, and of one some time after its end."""

    async def scenario(loop: SimLoop, clock: SimClock) -> tuple[float, float]:
        def end() -> None:
            foreground.calls = 0

        loop.call_later(then_s, end)
        budget, took = YieldBudget(clock, 0.0, foreground=foreground), []
        for pause_s in (then_s + rest_s, 0.0):
            begin = loop.time()
            await budget.spent()
            took.append(loop.time() - begin)
            await asyncio.sleep(pause_s)
        return took[0], took[1]

    return run_sim(scenario, 1)


def test_a_step_waits_for_a_call_and_not_without_one() -> None:
    foreground = Foreground(lambda: False)
    foreground.calls = 1
    beside, alone = run(foreground, 0.0035)
    assert 0.0035 <= beside < 0.006
    assert alone < 0.0005


@pytest.mark.parametrize(("worked_s", "rests_s"), [(0.0, 0.001), (0.0042, 0.0042), (3.0, 0.008)])
def test_after_a_call_steps_take_half_of_the_time_for_a_while(worked_s: float, rests_s: float) -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> list[float]:
        foreground = Foreground(lambda: False)
        foreground.calls = 1
        await foreground.give_way(0.0)
        foreground.calls, took = 0, []
        for _ in range(20):
            begin = loop.time()
            await foreground.give_way(worked_s)
            took.append(loop.time() - begin)
            await asyncio.sleep(0.004)
        return took

    took = run_sim(scenario, 1)
    rests = [each for each in took if each > 0]
    assert rests == took[: len(rests)], "for a while, and no more"
    assert all(abs(each - rests_s) < 0.0001 for each in rests)
    assert 0.04 < len(rests) * (rests_s + 0.004) < 0.07


def test_a_step_waits_for_a_call_that_came_while_it_rested() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> float:
        foreground = Foreground(lambda: False)
        foreground.calls = 1
        await foreground.give_way(0.0)
        foreground.calls = 0
        loop.call_later(0.002, setattr, foreground, "calls", 1)
        loop.call_later(0.0065, setattr, foreground, "calls", 0)
        begin = loop.time()
        await foreground.give_way(0.004)
        return loop.time() - begin

    assert 0.0065 <= run_sim(scenario, 1) < 0.008


def test_a_step_waits_for_a_record_of_somebody_that_is_being_written() -> None:
    beside, alone = run(Foreground(lambda: True))
    assert beside >= 0.005
    assert alone >= 0.005


def test_who_is_served_at_all_times_does_not_stop_the_work() -> None:
    foreground = Foreground(lambda: False)
    foreground.calls = 1
    beside, _ = run(foreground)
    assert 0.005 <= beside < 0.05
