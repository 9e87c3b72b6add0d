"""Retries: which errors, for how long, and which not."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable

import pytest

from broker.runtime.patience import Patience, is_passing
from broker.runtime.vfs import WriteFailed
from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim


class Work:
    """Fails with the given errors, in turn, then answers."""

    def __init__(self, clock: SimClock, errors: list[OSError]) -> None:
        self.clock = clock
        self.errors = errors
        self.times_ms: list[int] = []

    async def __call__(self) -> str:
        self.times_ms.append(self.clock.monotonic_ns() // 1_000_000)
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def no_descriptors() -> OSError:
    return OSError(errno.EMFILE, "Too many open files", "data/x")


def test_pauses_double_up_to_a_second_and_have_no_end_while_the_broker_serves(caplog):
    noted: list[int] = []

    async def scenario(_: SimLoop, clock: SimClock) -> None:
        work = Work(clock, [no_descriptors() for _ in range(100)])
        assert await Patience(lambda: noted.append(1)).wait_done(work) == "done"
        pauses = [after - before for before, after in zip(work.times_ms, work.times_ms[1:], strict=False)]
        assert pauses[:8] == [10, 20, 40, 80, 160, 320, 640, 1000]
        assert set(pauses[8:]) == {1000}

    with caplog.at_level(logging.ERROR):
        run_sim(scenario, seed=1)
    assert len(noted) == 100
    assert 2 <= len(caplog.records) <= 5, "loud, and not once for each attempt"


def test_a_stop_waits_for_a_bounded_time():
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        patience, work = Patience(), Work(clock, [no_descriptors() for _ in range(100)])
        patience.end()
        with pytest.raises(OSError, match="Too many open files"):
            await patience.wait_done(work)
        assert work.times_ms[-1] - work.times_ms[0] < 2_000

    run_sim(scenario, seed=1)


@pytest.mark.parametrize(
    "error",
    [
        WriteFailed(errno.ENOSPC, "No space left on device", "data/x"),
        WriteFailed(errno.EMFILE, "Too many open files", "data/x"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "data/x"),
        FileExistsError(errno.EEXIST, "File exists", "data/x"),
        NotADirectoryError(errno.ENOTDIR, "Not a directory", "data/x"),
        ValueError("a bug"),
    ],
    ids=lambda error: f"{type(error).__name__}",
)
def test_what_is_in_doubt_and_what_no_waiting_mends_is_raised_at_once(error):
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        work = Work(clock, [error])
        with pytest.raises(type(error)):
            await Patience().wait_done(work)
        assert len(work.times_ms) == 1

    run_sim(scenario, seed=1)


@pytest.mark.parametrize("make", [no_descriptors, lambda: OSError(errno.EIO, "Input/output error")])
def test_no_error_of_a_write_is_passing(make: Callable[[], OSError]):
    error = make()
    assert is_passing(error)
    assert not is_passing(WriteFailed(error.errno, error.strerror, "data/x"))


def test_how_long_operations_have_failed_is_known():
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        patience = Patience()

        async def fail(times: int) -> None:
            await patience.wait_done(Work(clock, [no_descriptors() for _ in range(times)]))

        assert patience.failing_seconds() == 0
        first = asyncio.ensure_future(fail(10))
        await asyncio.sleep(2)
        second = asyncio.ensure_future(fail(100))
        await asyncio.sleep(1)
        assert 2.9 < patience.failing_seconds() < 3.1
        await first
        assert 0.9 < patience.failing_seconds() < 4
        second.cancel()
        await asyncio.wait([second])
        assert patience.failing_seconds() == 0

    run_sim(scenario, seed=1)
