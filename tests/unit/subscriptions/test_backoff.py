"""Waits of what was given back: as asked, or initial * multiplier ** attempts up to the maximum, less up to half."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from broker.policy import EffectiveSubscriptionPolicy
from broker.subscriptions.attempts import Attempts
from broker.subscriptions.backoff import delays

POLICY = EffectiveSubscriptionPolicy(initial_backoff_ms=1_000, max_backoff_ms=60_000, backoff_multiplier=2.0)


class FixedRandom(random.Random):
    """Random numbers that are one number."""

    def __init__(self, number: float) -> None:
        self._number = number

    def random(self) -> float:
        return self._number


def attempts_of(count: int, entries: BitMap) -> Attempts:
    attempts = Attempts()
    for _ in range(count):
        attempts.add({1: entries})
    return attempts


def wait_ms(
    count: int, policy: EffectiveSubscriptionPolicy = POLICY, jitter: float = 0.0, asked_ms: int = 0
) -> int:
    """Wait of an entry that was sent and counted so often before."""
    held = BitMap([7])
    [(delay_ms, part)] = delays({1: held}, asked_ms, attempts_of(count, held), policy, FixedRandom(jitter))
    assert part == {1: held}
    return delay_ms


@pytest.mark.parametrize(
    ("count", "expected_ms"), [(0, 1_000), (1, 2_000), (2, 4_000), (5, 32_000), (6, 60_000), (200, 60_000)]
)
def test_the_wait_grows_with_each_attempt_up_to_the_maximum(count: int, expected_ms: int) -> None:
    assert wait_ms(count) == expected_ms


def test_jitter_takes_off_up_to_half() -> None:
    assert wait_ms(1, jitter=0.5) == 1_500
    assert wait_ms(1, jitter=0.999_999) == 1_000
    assert wait_ms(9, jitter=0.5) == 45_000


def test_a_wait_that_was_asked_for_is_taken_as_it_is() -> None:
    assert wait_ms(5, jitter=0.9, asked_ms=123) == 123
    assert wait_ms(5, asked_ms=10_000_000) == 10_000_000


def test_a_multiplier_of_one_does_not_grow() -> None:
    policy = EffectiveSubscriptionPolicy(
        initial_backoff_ms=500, max_backoff_ms=60_000, backoff_multiplier=1.0
    )
    assert [wait_ms(count, policy) for count in (0, 1, 30)] == [500, 500, 500]


def test_entries_wait_by_their_own_attempts() -> None:
    attempts = attempts_of(2, BitMap([1, 2]))
    held = {1: BitMap([1, 2, 3]), 2: BitMap([1])}
    waits = list(delays(held, 0, attempts, POLICY, FixedRandom(0.0)))
    assert waits == [(1_000, {1: BitMap([3]), 2: BitMap([1])}), (4_000, {1: BitMap([1, 2])})]


def test_nothing_waits_for_nothing() -> None:
    assert list(delays({}, 0, Attempts(), POLICY, FixedRandom(0.0))) == []


@given(
    st.integers(0, 300),
    st.integers(0, 1 << 53),
    st.integers(0, 1 << 53),
    st.floats(1, 1_000),
    st.floats(0, 1, exclude_max=True),
)
def test_no_wait_is_longer_than_the_maximum(
    count: int, initial_ms: int, max_ms: int, multiplier: float, jitter: float
) -> None:
    policy = EffectiveSubscriptionPolicy(
        initial_backoff_ms=initial_ms, max_backoff_ms=max_ms, backoff_multiplier=multiplier
    )
    assert 0 <= wait_ms(count, policy, jitter) <= max_ms
