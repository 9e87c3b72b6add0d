"""Costs of calls for one message do not grow with the number of held ones: counted in steps, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from pyroaring import BitMap

from broker.model import Entries
from broker.subscriptions.attempts import Attempts
from broker.subscriptions.leases import Leases
from broker.subscriptions.reasons import Reasons
from broker.subscriptions.redelivery import RedeliveryQueue

FEW, MANY = 250, 1_500
LEASE_NS = 30_000_000_000


def _leased(count: int) -> Leases:
    leases = Leases()
    for first in range(0, count, 500):
        leases.grant("a", {1: BitMap(range(first, first + 500))}, LEASE_NS + first)
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
    reasons = Reasons()
    for now in range(count):
        reasons.note(each(now), "r" * 1_000)  # more than are kept, where there are many


def _forget_reasons(count: int, each: Callable[[int], Entries]) -> None:
    reasons = Reasons()
    reasons.note({1: BitMap(range(count))}, "boom")
    for now in range(count):
        reasons.forget(each(now))


@pytest.mark.slow
@pytest.mark.parametrize(
    "work",
    [
        *(_extend, _extend_the_same, _settle, _take_back, _grant, _wait, _count_attempts),
        *(_note_reasons, _forget_reasons),
    ],
)
def test_one_at_a_time_costs_the_same_however_many_there_are(work: Callable[..., None]):
    few, many = (_steps_of(lambda n=count: work(n, _one)) / count for count in (FEW, MANY))  # type: ignore[misc]
    assert many < few * 1.5  # what is merged in levels grows with the logarithm


def _one(entry_id: int) -> Entries:
    return {1: BitMap([entry_id])}


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
