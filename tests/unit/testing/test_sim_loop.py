"""The loop on virtual time: no waiting, no luck, no hang."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from broker.testing.sim_clock import START_MS, SimClock
from broker.testing.sim_loop import Deadlock, Latency, Livelock, SimLoop, run_sim


@pytest.mark.slow
def test_40000_timers_over_17_hours_fire_in_order_and_in_time() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> list[int]:
        fired: list[int] = []

        def fire(due_ms: int) -> None:
            fired.append(clock.now_ms() - START_MS - due_ms)

        delays_ms = [loop.rng("delays").randrange(17 * 3600 * 1000) for _ in range(40_000)]
        for delay_ms in delays_ms:
            loop.call_later(delay_ms / 1000, fire, delay_ms)
        await asyncio.sleep(17 * 3600)
        assert clock.monotonic_ns() == 17 * 3600 * 10**9
        return fired

    late_ms = run_sim(scenario, 1)
    assert (len(late_ms), set(late_ms)) == (40_000, {0})


async def _stuck_on_event() -> None:
    await asyncio.Event().wait()


async def _stuck_in_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(_stuck_on_event(), name="the one that waits")


async def _stuck_on_queue() -> None:
    task = asyncio.create_task(asyncio.Queue[int]().get(), name="reader")
    await asyncio.sleep(5)
    await task


@pytest.mark.parametrize(
    ("stuck", "named"),
    [
        (_stuck_on_event, "_stuck_on_event"),
        (_stuck_in_group, "the one that waits: _stuck_on_event"),
        (_stuck_on_queue, "reader: Queue.get"),
    ],
)
def test_deadlock_names_who_waits(stuck: Callable[[], object], named: str) -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        await stuck()  # type: ignore[misc]

    with pytest.raises(Deadlock, match=named):
        run_sim(scenario, 1)


def test_polling_without_time_is_a_livelock() -> None:
    async def poll() -> None:
        while True:  # what must be found
            await asyncio.sleep(0)

    loop = SimLoop(spin_limit=1000)
    with pytest.raises(Livelock, match=r"test_polling.*poll"):
        loop.run_until_complete(poll())
    loop.cancel_leftovers()
    loop.close()


def test_what_is_tried_again_for_ever_is_named():
    loop = SimLoop(jump_limit=1_000)

    async def try_again() -> None:
        while True:
            await asyncio.sleep(1)

    try:
        with pytest.raises(Livelock, match=r"goes on for ever.*\n.*try_again"):
            loop.run_until_complete(try_again())
        loop.cancel_leftovers()
    finally:
        loop.close()


def test_task_that_refuses_to_end_is_found() -> None:
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        loop.kept = asyncio.create_task(stubborn(), name="mule")  # type: ignore[attr-defined]
        await asyncio.sleep(1)

    with pytest.raises(Deadlock, match="mule"):
        run_sim(scenario, 1)


def test_each_executor_runs_in_order() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> list[tuple[str, int]]:
        done: list[tuple[str, int]] = []
        executors = {"one": ThreadPoolExecutor(1), "two": ThreadPoolExecutor(1), "none": None}
        calls = [
            loop.run_in_executor(executor, done.append, (name, number))
            for number in range(50)
            for name, executor in executors.items()
        ]
        await asyncio.gather(*calls)
        return done

    done = run_sim(scenario, 3)
    for name in ("one", "two", "none"):
        assert [number for who, number in done if who == name] == list(range(50))
    assert [who for who, _ in done] != ["one", "two", "none"] * 50  # between executors there is no order


def test_executor_takes_the_time_it_is_given() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        loop.latency = Latency(min_ms=2.0, max_ms=2.0, slow_every=0)
        assert await loop.run_in_executor(None, max, 1, 2) == 2
        assert await asyncio.to_thread(min, 1, 2) == 1
        assert loop.now_us() == 4000
        loop.latency = Latency(slow_every=1, slow_ms=30_000)
        await loop.run_in_executor(None, int)
        assert 7000 <= loop.now_us() <= 30_004_000

    run_sim(scenario, 1)


def test_executor_hands_over_exceptions() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(None, lambda: 1 // 0)
        assert await loop.run_in_executor(None, lambda: 1) == 1

    run_sim(scenario, 1)


def test_cancelled_call_runs_only_if_its_turn_had_come() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> list[str]:
        ran: list[str] = []
        calls = [loop.run_in_executor(None, ran.append, name) for name in ("running", "queued", "wanted")]
        calls[0].cancel()
        calls[1].cancel()
        await calls[2]
        return ran

    assert run_sim(scenario, 1) == ["running", "wanted"]


def test_clock_steps_both_ways_and_timers_do_not_care() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        assert clock.now_ms() == 5000
        clock.step(-3_600_000)
        await asyncio.sleep(1.5)
        assert (clock.now_ms(), clock.monotonic_ns()) == (5000 - 3_600_000 + 1500, 1_500_000_000)
        clock.step(7_200_000)
        await asyncio.sleep(0.001)
        assert (clock.now_ms(), clock.monotonic_ns()) == (5000 + 3_600_000 + 1501, 1_501_000_000)

    run_sim(scenario, 1, start_ms=5000)


def test_timeouts_use_virtual_time() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 30)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Queue[int]().get()
        assert await asyncio.wait_for(asyncio.sleep(1, "in time"), 30) == "in time"
        assert loop.now_us() == 61_000_000

    run_sim(scenario, 1)


async def _busy(loop: SimLoop, clock: SimClock) -> str:
    """Everything at once: queues, executors, timeouts, and groups that cancel out of a set."""
    queue: asyncio.Queue[int] = asyncio.Queue(maxsize=3)
    rng = loop.rng("busy")

    async def produce(who: int) -> None:
        for number in range(20):
            await asyncio.sleep(rng.random())
            await loop.run_in_executor(who % 3, random.Random, number)
            await queue.put(who * 100 + number)

    async def consume(who: int) -> None:
        try:
            while True:
                loop.trace(f"{who} took {await queue.get()}")
        except asyncio.CancelledError:
            loop.trace(f"{who} cancelled")
            raise

    async def stop() -> None:
        await asyncio.sleep(15)
        raise ValueError

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            for who in range(12):
                group.create_task(consume(who))
                group.create_task(produce(who))
            group.create_task(stop())

    with pytest.raises(ExceptionGroup):
        await work()
    return loop.digest()


@pytest.mark.slow
def test_same_seed_same_digest() -> None:
    first = run_sim(_busy, 7)
    ballast = [object() for _ in range(1000)]  # moves where later objects lie in memory
    assert [run_sim(_busy, 7) for _ in range(5)] == [first] * 5
    assert run_sim(_busy, 8) != first
    del ballast


def test_failure_of_a_task_that_nobody_awaits_fails_the_run() -> None:
    kept: list[asyncio.Task[None]] = []

    async def fail() -> None:
        raise ValueError("nobody looks")

    for keep in (True, False):

        async def scenario(loop: SimLoop, clock: SimClock, keep: bool = keep) -> None:
            loop.trace("before the failure")
            task = asyncio.create_task(fail())
            await asyncio.sleep(1)
            if keep:
                kept.append(task)

        with pytest.raises(ExceptionGroup) as failure:
            run_sim(scenario, 42)
        assert [str(error) for error in failure.value.exceptions] == ["nobody looks"]
        assert "seed 42" in failure.value.__notes__[0]
        assert "before the failure" in failure.value.__notes__[0]


def test_failure_of_a_callback_fails_the_run() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        loop.call_later(1, lambda: 1 // 0)
        await asyncio.sleep(2)

    with pytest.raises(ExceptionGroup) as failure:
        run_sim(scenario, 1)
    assert isinstance(failure.value.exceptions[0], ZeroDivisionError)


def test_leftovers_are_cancelled_oldest_first_and_may_clean_up() -> None:
    ended: list[int] = []
    held: list[asyncio.Task[None]] = []  # a loop holds tasks weakly

    async def linger(loop: SimLoop, number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await loop.run_in_executor(None, ended.append, number)

    async def scenario(loop: SimLoop, clock: SimClock) -> str:
        held.extend(asyncio.create_task(linger(loop, number)) for number in range(10))
        await asyncio.sleep(1)
        return "result"

    assert run_sim(scenario, 1) == "result"
    assert ended == list(range(10))


def test_failure_of_the_scenario_carries_the_seed() -> None:
    async def scenario(loop: SimLoop, clock: SimClock) -> None:
        raise KeyError("wrong")

    with pytest.raises(KeyError) as failure:
        run_sim(scenario, 99)
    assert "seed 99" in failure.value.__notes__[0]
