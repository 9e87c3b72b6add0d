"""Fields of forms: times are UTC, durations as settings are written; anything else is refused in words."""

from __future__ import annotations

import pytest

from broker.topics.schedule_values import Cancel, Move
from broker.web.refusals import PageRefusal
from broker.web.search import Search, form_time, parse_change, parse_time_ms

CHRISTMAS_MS = 1_798_135_200_000  # 2026-12-24 18:00 UTC


@pytest.mark.parametrize(
    "text",
    [
        "2026-12-24T18:00",
        "2026-12-24 18:00:00",
        "2026-12-24T19:00:00+01:00",
        "2026-12-24T18:00:00Z",
        str(CHRISTMAS_MS),
    ],
)
def test_times(text):
    assert parse_time_ms(text) == CHRISTMAS_MS


def test_no_time_is_none_and_a_time_reads_back():
    assert parse_time_ms("  ") == 0
    assert parse_time_ms(form_time(CHRISTMAS_MS)) == CHRISTMAS_MS
    assert form_time(0) == form_time(1 << 52) == ""


@pytest.mark.parametrize("text", ["soon", "2026-13-01", "1969-01-01", "9" * 30, "-5"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(PageRefusal, match=r"not a time|before 1970"):
        parse_time_ms(text)


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ({"action": "cancel"}, Cancel()),
        ({"action": "now"}, Move(deliver_after_ms=0)),
        ({"action": "move", "how": "at", "at": "2026-12-24T18:00"}, Move(deliver_at_ms=CHRISTMAS_MS)),
        ({"action": "move", "how": "after", "by": "2h"}, Move(deliver_after_ms=7_200_000)),
        ({"action": "move", "how": "by", "by": "-15m"}, Move(shift_ms=-900_000)),
        ({"action": "move", "how": "by", "by": "+ 1d"}, Move(shift_ms=86_400_000)),
    ],
)
def test_changes(form, change):
    assert parse_change(form) == change


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"action": "delete"},
        {"action": "move"},
        {"action": "move", "how": "at"},
        {"action": "move", "how": "after", "by": "-1h"},
        {"action": "move", "how": "by", "by": "1 fortnight"},
        {"action": "move", "how": "by", "by": "99999999999999d"},
    ],
)
def test_what_is_no_change_is_refused(form):
    with pytest.raises(PageRefusal):
        parse_change(form)


def test_a_search_reads_back_from_its_own_link():
    search = Search.of(
        {"topic": " orders ", "prefix": "a&b", "from": "1798135200000", "after": "5.6.7", "x": "y"}
    )
    assert (search.topic, search.start_ms, search.after) == ("orders", CHRISTMAS_MS, (5, 6, 7))
    assert search.link((8, 9, 10)) == "/scheduled?topic=orders&prefix=a%26b&from=1798135200000&after=8.9.10"


@pytest.mark.parametrize(
    "query", [{"from": "1798135200000", "until": "1798135200000"}, {"after": "1.2"}, {"key": "k" * 3_000}]
)
def test_searches_that_mean_nothing_are_refused(query):
    with pytest.raises(PageRefusal):
        Search.of(query)
