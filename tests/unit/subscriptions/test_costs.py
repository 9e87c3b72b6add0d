"""Costs of calls for one message do not grow with the number of held ones.

Counted in steps of the interpreter, and timed for what these do not show: work of bitmaps and columns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from pyroaring import BitMap

from broker.model import Entries
from broker.runtime.clock import SystemClock
from broker.subscriptions.attempts import Attempts
from broker.subscriptions.leases import Leases
from broker.subscriptions.reasons import Reasons, ReasonsMemory
from broker.subscriptions.redelivery import RedeliveryQueue

FEW, MANY = 125, 750
TIMES = 4
TIMED = 1_500
"""Messages for the timer, with ids so far apart that a copy of a bitmap costs far more than a step."""
APART = 1 << 12
LEASE_NS = 30_000_000_000


def _leased(count: int) -> Leases:
    leases = Leases()
    for first in range(0, count, 500):
        leases.grant("a", {1: BitMap(range(first, first + 500))}, LEASE_NS + first)
    return leases


def _leased_apart(count: int) -> Leases:
    leases = Leases()
    leases.grant("a", {1: BitMap(range(0, count * APART, APART))}, LEASE_NS)
    return leases


def _waking(leases: Leases, now_ns: int) -> None:
    """Ask what the dispatcher asks each time it wakes."""
    assert leases.expired(now_ns) == []
    leases.next_deadline_ns()


def _extend(count: int, each: Callable[[int], Entries]) -> None:
    leases = _leased(count)
    for now in range(count):
        leases.extend(each(now), LEASE_NS * 2 + now)
        _waking(leases, now)


def _extend_the_same(count: int, each: Callable[[int], Entries]) -> None:
    _extend(count, lambda now: each(now % 7))


def _settle(count: int, each: Callable[[int], Entries]) -> None:
    leases = _leased(count)
    for now in range(count):
        leases.settle(each(now))
        _waking(leases, now)


def _take_back(count: int, each: Callable[[int], Entries]) -> None:
    leases = _leased(count)
    for now in range(count):
        leases.take_back("a", each(now))
        _waking(leases, now)


def _grant(count: int, each: Callable[[int], Entries]) -> None:
    leases = Leases()
    for now in range(count):
        leases.grant("a", each(now), LEASE_NS + now)
        _waking(leases, now)


def _wait(count: int, each: Callable[[int], Entries]) -> None:
    waiting = RedeliveryQueue()
    for now in range(count):
        waiting.put(10**12 + now, each(now))
        assert waiting.take(now, 10) is None
        waiting.next_ms()


def _count_attempts(count: int, each: Callable[[int], Entries]) -> None:
    attempts = Attempts()
    for now in range(count):
        attempts.add(each(now))


def _note_reasons(count: int, each: Callable[[int], Entries]) -> None:
    reasons = Reasons(ReasonsMemory(SystemClock()))
    for now in range(count):
        reasons.note(each(now), "r" * 1_000)  # more than are kept, where there are many


def _forget_reasons(count: int, each: Callable[[int], Entries]) -> None:
    reasons = Reasons(ReasonsMemory(SystemClock()))
    reasons.note({1: BitMap(range(count))}, "boom")
    for now in range(count):
        reasons.forget(each(now))


WORKS = [
    *(_extend, _extend_the_same, _settle, _take_back, _grant, _wait, _count_attempts),
    *(_note_reasons, _forget_reasons),
]


@pytest.mark.slow
@pytest.mark.parametrize("work", WORKS)
def test_one_at_a_time_costs_the_same_however_many_there_are(work: Callable[..., None]):
    few, many = (_steps_of(lambda n=count: work(n, _one)) / count for count in (FEW, MANY))  # type: ignore[misc]
    assert many < few * 1.5  # what is merged in levels grows with the logarithm


def _one(entry_id: int) -> Entries:
    return {1: BitMap([entry_id])}


def _one_apart(entry_id: int) -> Entries:
    return {1: BitMap([entry_id * APART])}


@pytest.mark.slow
@pytest.mark.parametrize("work", WORKS)
def test_four_times_as_many_take_about_four_times_as_long(
    work: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    """Sixteen times, if each looked at all: ten thousand extensions, one by one, took a minute."""
    monkeypatch.setattr(sys.modules[__name__], "_leased", _leased_apart)
    work(TIMED, _one_apart)  # what is done once
    ratios: list[float] = []
    while not ratios or (
        min(ratios) > TIMES**1.5 and len(ratios) < 5
    ):  # another process may take the processor's cache
        few, many = (_seconds_of(lambda n=count: work(n, _one_apart)) for count in (TIMED, TIMES * TIMED))  # type: ignore[misc]
        ratios.append(many / few)
    assert min(ratios) <= TIMES**1.5, ratios


def _seconds_of(work: Callable[[], None]) -> float:
    """Of the processor, for this thread alone."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def _steps_of(work: Callable[[], None]) -> int:
    """Count the interpreter's steps: no clock, so the same on every machine."""
    steps = 0

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal steps
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        steps += event == "opcode"
        return count

    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(None)
    return steps
