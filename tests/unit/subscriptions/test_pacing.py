"""Messages that a policy lets a subscription hand out: rate, burst, and what may be leased at once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.policy import EffectiveSubscriptionPolicy
from broker.subscriptions.pacing import UNLIMITED, Pacing
from broker.topics.policies import default_subscription_policy
from tests.configs import broker_config

SECOND_NS = 1_000_000_000
DEFAULTS = default_subscription_policy(broker_config(data_dir="data"))


def policy(rate: float = 0.0, burst: int = 0, leased: int = 0) -> EffectiveSubscriptionPolicy:
    return replace(DEFAULTS, max_delivery_rate=rate, max_delivery_burst=burst, max_leased_messages=leased)


class Herd:
    """A subscription that is owed without end, on clocks that only its test moves."""

    def __init__(self, batch_max: int = 1_000) -> None:
        self.pacing = Pacing()
        self.now_ns = 5 * SECOND_NS
        self.sent: list[tuple[int, int]] = []  # when, how many
        self.looks = 0
        self._batch_max = batch_max

    def look(self, rule: EffectiveSubscriptionPolicy, leased: int = 0) -> int:
        self.looks += 1
        self.pacing.look(rule, leased, self.now_ns, self.now_ns // 1_000_000)
        return self.pacing.room

    def step(self, rule: EffectiveSubscriptionPolicy, wanted: int = UNLIMITED) -> int:
        """Hand out what may go, up to so many and to a batch."""
        count = min(self.look(rule), wanted, self._batch_max)
        if count:
            self.pacing.handed_out(count, self.now_ns)
            self.sent.append((self.now_ns, count))
        return count

    def run(self, rule: EffectiveSubscriptionPolicy, seconds: float, late_ns: list[int] | None = None) -> int:
        """Hand out for a while, as a dispatcher does, whose timers come so late in turn; how many went."""
        end_ns, count = self.now_ns + int(seconds * SECOND_NS), 0
        late_ns = late_ns or [0]
        while True:
            while sent := self.step(rule):
                count += sent
            assert self.pacing.next_ns is not None
            assert self.pacing.next_ns > self.now_ns
            self.now_ns = self.pacing.next_ns + late_ns[self.looks % len(late_ns)]
            if self.now_ns > end_ns:
                self.now_ns = end_ns
                return count


def check_bounds(sent: list[tuple[int, int]], rate: float, burst: int) -> None:
    """PACING-1, of every span that begins and ends with a hand-out."""
    for first in range(len(sent)):
        total = 0
        for at_ns, count in sent[first:]:
            total += count
            assert total <= burst + 1 + rate * (at_ns - sent[first][0]) / SECOND_NS


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.2, 1, 3.5, 15, 99, 1_000, 12_345.6, 1_000_000])
def test_rate_is_exact_within_five_percent_over_ten_seconds(rate: float):
    """From a full bucket, with a tenth of a second's worth at once; a message is the unit of what can be counted."""
    count = Herd().run(policy(rate), 10)
    assert abs(count - 10 * rate) <= max(0.5 * rate, 2)


@pytest.mark.slow
@given(
    rate=st.floats(1, 50_000),
    late_ms=st.lists(st.floats(0, 40), min_size=1, max_size=7),
)
def test_rate_is_reached_by_a_dispatcher_whose_timers_come_late(rate: float, late_ms: list[float]):
    herd = Herd()
    herd.run(policy(rate), 2)  # the burst is gone
    count = herd.run(policy(rate), 10, [int(each * 1e6) for each in late_ms])
    assert abs(count - 10 * rate) <= max(0.5 * rate, 2)


@given(
    rate=st.floats(0.01, 10_000),
    burst=st.integers(1, 500),
    steps=st.lists(st.tuples(st.integers(0, 3 * SECOND_NS), st.integers(1, 300)), max_size=40),
)
def test_no_span_of_time_sees_more_than_the_burst_and_what_the_rate_makes_of_it(
    rate: float, burst: int, steps: list[tuple[int, int]]
):
    herd, rule = Herd(), policy(rate, burst)
    for wait_ns, wanted in steps:
        herd.now_ns += wait_ns
        herd.step(rule, wanted)
    check_bounds(herd.sent, rate, max(burst, int(rate / 50)))


def test_a_hand_out_that_takes_its_time_earns_no_more_than_the_bucket_holds():
    herd, rule = Herd(), policy(100, 100)
    assert herd.look(rule) == 100
    herd.now_ns += 10 * SECOND_NS  # reading them took so long
    herd.pacing.handed_out(100, herd.now_ns)
    assert herd.look(rule) == 0


def test_burst_goes_at_once_and_comes_back_with_time():
    herd, rule = Herd(), policy(10, 30)
    assert herd.step(rule) == 30
    assert herd.step(rule) == 0
    herd.now_ns += 1 * SECOND_NS
    assert herd.step(rule) == 10
    herd.now_ns += 100 * SECOND_NS
    assert herd.step(rule) == 30


@pytest.mark.parametrize(
    ("rate", "burst", "expected"),
    [(1_000, 0, 100), (5, 0, 1), (0.001, 0, 1), (1_000, 1, 20), (1_000, 50, 50), (15, 0, 1)],
)
def test_burst_is_a_tenth_of_a_second_s_worth_and_never_less_than_two_looks(
    rate: float, burst: int, expected: int
):
    assert Herd().look(policy(rate, burst)) == expected


def test_a_high_rate_costs_a_hundred_looks_a_second():
    herd = Herd(batch_max=UNLIMITED)
    herd.run(policy(100_000), 10)
    assert herd.looks <= 2 * 10 * 100 + 10  # each time one that finds some and one that finds no more


def test_next_time_is_when_the_next_message_may_go_and_not_before():
    herd, rule = Herd(), policy(3)
    herd.step(rule)
    assert herd.look(rule) == 0
    next_ns = herd.pacing.next_ns
    assert next_ns == herd.now_ns + 333_333_334
    herd.now_ns = next_ns - 1
    assert herd.look(rule) == 0
    herd.now_ns = next_ns
    assert herd.look(rule) == 1


# -- changes -----------------------------------------------------------------------------------------------------------


def test_another_rate_counts_at_once_and_what_was_earned_before_counts_by_the_former_one():
    herd = Herd()
    herd.run(policy(1), 3)
    assert herd.look(policy(1)) == 0
    count = herd.run(policy(1_000), 10)
    assert abs(count - 10_000) <= 500
    count = herd.run(policy(2), 10)
    assert abs(count - 20) <= 2, "what the higher rate had left is not kept"


def test_changing_the_policy_again_and_again_lets_no_more_through():
    herd = Herd()
    for i in range(1_000):
        herd.step(policy(10 + i % 2, 5 + i % 3))
        herd.now_ns += SECOND_NS // 100
    assert sum(count for _, count in herd.sent) <= 7 + 1 + 11 * 10


def test_without_a_rate_all_may_go_and_nothing_is_held_back():
    herd = Herd()
    herd.step(policy(1))
    assert herd.look(policy(1)) == 0
    assert herd.pacing.holds(herd.now_ns // 1_000_000)
    assert herd.look(policy()) == UNLIMITED
    assert (herd.pacing.next_ns, herd.pacing.holds(herd.now_ns // 1_000_000)) == (None, False)


def test_after_a_change_nothing_goes_before_the_next_look():
    herd = Herd()
    herd.look(policy(100))
    herd.pacing.forget()
    assert herd.pacing.room == 0


# -- extremes ----------------------------------------------------------------------------------------------------------


def test_a_clock_that_would_go_back_gives_nothing_and_takes_nothing():
    herd, rule = Herd(), policy(10)
    herd.step(rule)
    herd.now_ns -= 3 * SECOND_NS
    assert herd.look(rule) == 0
    herd.now_ns += 3 * SECOND_NS
    assert herd.look(rule) == 0
    herd.now_ns += SECOND_NS // 10
    assert herd.look(rule) == 1


@pytest.mark.parametrize("rate", [5e-324, 1e-9, 1e9])
@pytest.mark.parametrize("burst", [1, 10**9])
def test_the_least_and_the_greatest_numbers(rate: float, burst: int):
    herd, rule = Herd(batch_max=UNLIMITED), policy(rate, burst)
    assert herd.step(rule) == max(burst, int(rate / 50))
    assert herd.look(rule) == 0
    herd.now_ns += 10**19  # three centuries
    assert 0 < herd.look(rule) <= max(burst, int(rate / 50))


# -- leases ------------------------------------------------------------------------------------------------------------


def test_what_is_leased_at_once_is_bounded_and_waits_for_no_time():
    herd, rule = Herd(), policy(leased=10)
    assert [herd.look(rule, leased) for leased in (0, 7, 10, 12)] == [10, 3, 0, 0]
    assert (herd.pacing.next_ns, herd.pacing.waits_for_leases) == (None, True)
    assert herd.look(rule, 9) == 1
    assert not herd.pacing.waits_for_leases


def test_rate_and_leases_bound_together():
    herd, rule = Herd(), policy(100, 5, 10)
    assert [herd.look(rule, leased) for leased in (0, 7, 10)] == [5, 3, 0]
    herd.step(rule)
    assert herd.look(rule, 0) == 0
    assert not herd.pacing.waits_for_leases
    assert herd.look(rule, 10) == 0
    assert (herd.pacing.next_ns, herd.pacing.waits_for_leases) == (None, True)


# -- what is late because of it ----------------------------------------------------------------------------------------


def test_messages_are_held_through_the_time_when_the_next_may_go():
    herd, rule = Herd(), policy(2)
    herd.step(rule)
    assert herd.pacing.held_through_ms == 0, "the first one went at once"
    herd.look(rule)
    assert herd.pacing.held_through_ms == 5_500
    herd.now_ns += SECOND_NS
    herd.look(rule)
    assert herd.pacing.held_through_ms == 5_500, "and no longer"
    assert [herd.pacing.holds(at_ms) for at_ms in (5_499, 5_500)] == [True, False]


def test_messages_are_held_until_a_lease_ended():
    herd, rule = Herd(), policy(leased=1)
    herd.look(rule, 1)
    herd.now_ns += 9 * SECOND_NS
    assert herd.pacing.holds(herd.now_ns // 1_000_000)
    herd.look(rule, 0)
    assert herd.pacing.held_through_ms == 14_000


def test_hand_outs_are_spread_evenly():
    herd = Herd()
    herd.run(policy(50, 1), 10)
    assert {later - earlier for (earlier, _), (later, _) in pairwise(herd.sent)} == {SECOND_NS // 50}
