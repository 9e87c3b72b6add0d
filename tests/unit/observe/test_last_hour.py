"""The last hour of counters, against a plain list of what rose when."""

from __future__ import annotations

from random import Random

import pytest

from broker.observe.last_hour import MINUTES, HourOfCounter, LastHour


@pytest.mark.slow
def test_an_hour_holds_what_rose_in_each_of_its_minutes():
    random, hour = Random(3), LastHour(1_000)
    names = ("a", "b", "c")
    counted = {name: [0, 0] for name in names}
    rose: dict[tuple[str, int, int], int] = {}
    minute = 1_000
    for _ in range(500):
        minute += random.choice([0, 1, 1, 1, 2, 5, 70 if random.random() < 0.05 else 1])
        for name in names:
            for at in range(2):
                more = random.choice([0, 0, 3, 10])
                counted[name][at] += more
                rose[name, at, minute] = rose.get((name, at, minute), 0) + more
            hour.note(name, (counted[name][0], counted[name][1]), minute)
        length = min(minute - 1_000, MINUTES)
        for name in names:
            assert [list(each.minutes) for each in hour.of(name, 2)] == [
                [rose.get((name, at, each), 0) for each in range(minute - length + 1, minute + 1)]
                for at in range(2)
            ]


def test_what_never_rose_takes_nothing_and_what_is_gone_is_forgotten():
    hour = LastHour(0)
    hour.note("still", (0,), 1)
    hour.note("gone", (5,), 1)
    assert list(hour._by_name) == ["gone"]
    hour.forget_unseen()
    assert hour.of("gone", 1)[0].total == 5
    hour.note("still", (0,), 2)
    hour.forget_unseen()
    assert hour._by_name == {}
    assert hour.of("gone", 1) == [HourOfCounter((0, 0))]


def test_a_counter_that_began_anew_rises_from_zero():
    hour = LastHour(0)
    hour.note("s", (100,), 1)
    hour.note("s", (7,), 2)
    [told] = hour.of("s", 1)
    assert (list(told.minutes), told.total, told.most) == ([100, 7], 107, 100)
    assert told.rate == 107 / 120


def test_before_the_first_minute_there_is_no_rate():
    [told] = LastHour(5).of("s", 1)
    assert (told.total, told.most, told.rate, list(told.minutes)) == (0, 0, 0.0, [])
