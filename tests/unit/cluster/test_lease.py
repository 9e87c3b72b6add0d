"""The owner's lease: on both clocks, from the beginning of an append."""

from __future__ import annotations

import time

import pytest

from broker.cluster.lease import OwnerLease, SystemLeaseClock
from broker.errors import Unavailable

LEASE_MS = 4000
HOLDS_MS = 3600
START_MS = 1_700_000_000_000


class Clocks:
    """Clocks that a test moves."""

    def __init__(self) -> None:
        self.boot_ms = 50_000
        self.wall_ms = START_MS

    def now_ms(self) -> int:
        return self.wall_ms

    def monotonic_ns(self) -> int:
        raise AssertionError("it stands still while the machine sleeps")

    def boottime_ns(self) -> int:
        return self.boot_ms * 1_000_000

    def move(self, ms: int) -> None:
        self.boot_ms += ms
        self.wall_ms += ms


def make() -> tuple[Clocks, OwnerLease]:
    clocks = Clocks()
    return clocks, OwnerLease(clocks, LEASE_MS)


def test_it_counts_from_the_beginning_of_the_append_and_not_from_its_answer() -> None:
    clocks, lease = make()
    begin = lease.begin()
    clocks.move(3000)
    assert not lease.holds(), "nothing was answered"
    lease.extend(begin)
    assert (lease.holds(), lease.left_ms()) == (True, HOLDS_MS - 3000)
    clocks.move(599)
    lease.check()
    clocks.move(1)
    assert (lease.holds(), lease.left_ms()) == (False, 0)
    with pytest.raises(Unavailable, match="owner lease has expired") as caught:
        lease.check()
    assert caught.value.reason == "ENGINE_UNREACHABLE"


@pytest.mark.parametrize(("boot_ms", "wall_ms"), [(HOLDS_MS, 0), (0, HOLDS_MS), (HOLDS_MS, -60_000)])
def test_whichever_clock_says_earlier_ends_it(boot_ms: int, wall_ms: int) -> None:
    clocks, lease = make()
    lease.extend(lease.begin())
    clocks.boot_ms += boot_ms
    clocks.wall_ms += wall_ms
    assert not lease.holds()


def test_a_wall_clock_that_is_set_back_makes_it_no_longer() -> None:
    clocks, lease = make()
    lease.extend(lease.begin())
    clocks.wall_ms -= 60_000
    assert lease.left_ms() == HOLDS_MS
    clocks.move(HOLDS_MS)
    assert not lease.holds()


def test_an_answer_that_comes_late_extends_it_by_what_is_left() -> None:
    clocks, lease = make()
    lease.extend(lease.begin())
    clocks.move(HOLDS_MS)
    begin = lease.begin()
    clocks.move(100)
    lease.extend(begin)
    assert lease.left_ms() == HOLDS_MS - 100


def test_nothing_is_handed_out_that_is_due_after_the_last_answered_group() -> None:
    clocks, lease = make()
    assert lease.until_ms == 0
    begin = lease.begin()
    clocks.move(500)
    lease.extend(begin)
    assert lease.until_ms == lease.until_after(begin) == START_MS + LEASE_MS


def test_it_ends_for_good_with_the_ownership() -> None:
    _, lease = make()
    lease.extend(lease.begin())
    lease.end()
    assert (lease.holds(), lease.left_ms()) == (False, 0)


def test_whoever_watches_is_told_when_it_holds_again_and_not_at_each_append() -> None:
    clocks, lease = make()
    told: list[bool] = []
    lease.watch(lambda: told.append(lease.holds()))
    lease.extend(lease.begin())
    assert told == [True]
    clocks.move(HOLDS_MS - 1)
    lease.extend(lease.begin())
    assert told == [True]
    clocks.move(HOLDS_MS)
    lease.extend(lease.begin())
    assert told == [True, True]


def test_the_machines_clock_counts_suspends() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "clock_gettime_ns", {time.CLOCK_BOOTTIME: 7}.__getitem__)
        assert SystemLeaseClock().boottime_ns() == 7
