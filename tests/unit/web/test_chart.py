"""A histogram as numbers: nothing is lost, nothing sticks out, what is there is seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.web.calendar_window import CalendarWindow, group
from broker.web.chart import SERIES_MAX, DueBars, draw, nice_ceiling, stack

HOURS = CalendarWindow("hour", [hour * 3_600_000 for hour in range(25)])
HEIGHT = 200

counts = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=2),
    st.lists(
        st.tuples(st.integers(0, 23), st.integers(1, 10**9)), max_size=10, unique_by=lambda each: each[0]
    ),
    max_size=9,
)


def stacked(counted: Mapping[str, Sequence[tuple[int, int]]], coloured: Sequence[str]) -> DueBars:
    return stack([(name, group(HOURS, bars)) for name, bars in counted.items()], coloured, (), 24)


@pytest.mark.slow
@given(counts)
def test_every_message_is_in_one_bar_and_bars_stay_inside(by_topic):
    counted = {name: [(hour * 3_600_000, n) for hour, n in sorted(bars)] for name, bars in by_topic.items()}
    chart = draw(HOURS, stacked(counted, sorted(counted)[:3]), 0, HEIGHT)
    assert chart.total == sum(n for bars in by_topic.values() for _, n in bars)
    assert sum(n for _, _, n in chart.series) == chart.total
    for bar in chart.bars:
        assert bar.messages == sum(n for bars in by_topic.values() for hour, n in bars if hour == bar.bar)
        assert bar.x >= 0 and bar.x + bar.width <= 100.001
        assert bar.parts and all(part.height > 0 and part.y >= -0.02 for part in bar.parts)
        assert sum(part.height for part in bar.parts) >= 2.9
        lowest = max(bar.parts, key=lambda part: part.y)
        assert lowest.y + lowest.height == pytest.approx(HEIGHT, abs=0.1)


def test_a_topic_keeps_its_colour_and_the_others_share_one():
    names = [f"t{i}" for i in range(7)]
    counted = {name: [(0, 10)] for name in names}
    chart = draw(HOURS, stacked(counted, names), 0, HEIGHT)
    assert [(place, name) for place, name, _ in chart.series] == [
        *enumerate(names[:SERIES_MAX]),
        (SERIES_MAX, ""),
    ]
    assert (chart.series[-1][2], chart.others) == (20, 2)
    only = draw(HOURS, stacked({"t3": [(0, 1)]}, names), 0, HEIGHT)
    assert only.series == [(3, "t3", 1)]


def test_now_is_marked_where_it_lies_and_nowhere_else():
    assert draw(HOURS, stacked({}, []), 6 * 3_600_000, HEIGHT).now_x == 25
    assert draw(HOURS, stacked({}, []), 24 * 3_600_000, HEIGHT).now_x is None


@given(st.integers(0, 10**12))
def test_the_scale_is_round_and_high_enough(value):
    top = nice_ceiling(value)
    assert top >= value and top % 4 == 0
    assert top <= max(4, 2 * value)
